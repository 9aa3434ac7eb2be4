"""The life of a `SparseModel`: its verbs in any order, and what holds after each of them."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsebit.sparse import SparseModel, load, save
from tests.stateful.comparing import FORGOTTEN, assert_same, assert_same_state, named_arguments, outcome, tensors
from tests.stateful.networks import NETWORKS, Call, Network

SPARSERS: dict[str, dict[str, Any]] = {
    "elements": {"TYPE": "unstructured", "STRATEGY": "l1norm", "RATIO": 0.5},
    "everywhere": {"TYPE": "unstructured", "STRATEGY": "l1norm", "RATIO": 0.6, "SCOPE": "global"},
    "channels": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": 0.5},
}
SCHEDULES = {1: {}, 3: {"TYPE": "linear", "STEPS": 3}}
EXACT = 1e-5  # of two models with other widths: sums are in another order


class PrunedLife(RuleBasedStateMachine):
    names: tuple[str, ...] = tuple(name for name in NETWORKS if name != "tied")

    @initialize(data=st.data(), sparser=st.sampled_from(sorted(SPARSERS)), num_steps=st.sampled_from(sorted(SCHEDULES)))
    def build(self, data: st.DataObject, sparser: str, num_steps: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.network: Network = NETWORKS[data.draw(st.sampled_from(self.names), label="network")]
        self.config = {"DEVICE": "cpu", "SPARSER": SPARSERS[sparser], "SCHEDULE": SCHEDULES[num_steps]}
        self.is_structured = sparser == "channels"
        self.float_model = self.network.fresh()
        self.calls = self.network.some_calls()
        self.example = named_arguments(self.float_model, self.calls[0])
        self.smodel = SparseModel(self.float_model, self.config, example_inputs=self.example).eval()
        self.num_steps, self.num_done, self.is_trained = num_steps, 0, False

    def some_call(self, data: st.DataObject) -> Call:
        return self.calls[data.draw(st.sampled_from(range(len(self.calls))), label="call")]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- pruning and training

    @rule(train=st.booleans())
    def switch_mode(self, train: bool) -> None:
        self.smodel.train(train)

    @precondition(lambda self: self.num_done < self.num_steps)
    @rule()
    def prune(self) -> None:
        self.smodel.calc_params()
        self.num_done += 1

    @rule(data=st.data(), momentum=st.sampled_from([0.0, 0.9]))
    def train_a_step(self, data: st.DataObject, momentum: float) -> None:
        args, kwargs = self.some_call(data)
        optimizer = torch.optim.SGD(self.smodel.parameters(), lr=0.01, momentum=momentum)
        self.smodel.train()
        for _ in range(2):
            optimizer.zero_grad()
            output = self.smodel(*args, **kwargs)
            sum(x.square().mean() for x in tensors(output)).backward()  # type: ignore[union-attr]
            optimizer.step()
        for name, mask in self.smodel.masks.items():
            gradient = self.smodel.model.get_parameter(name).grad
            assert gradient is None or not gradient[~mask].any(), f"{name}: pruned weights have gradients"
        self.is_trained = True

    @precondition(lambda self: not self.num_done and not self.is_trained)
    @rule()
    def call_before_pruning(self) -> None:
        for call in self.calls:
            assert_same(
                outcome(self.float_model, call), outcome(self.smodel.eval(), call), "a model that is not pruned"
            )

    # --- keeping

    @rule()
    def load_state(self) -> None:
        fresh = SparseModel(self.network.fresh(FORGOTTEN), self.config, example_inputs=self.example)
        fresh.load_state_dict(self.smodel.state_dict())
        self.follow(fresh, "a state_dict in a new model")

    @rule()
    def deepcopy(self) -> None:
        self.follow(copy.deepcopy(self.smodel), "a deep copy")

    @rule()
    def pickle(self) -> None:
        self.follow(pickle.loads(pickle.dumps(self.smodel)), "a pickled model")

    def follow(self, other: SparseModel, what: str) -> None:
        """Compare the other one, and go on with it."""
        training = self.smodel.training
        assert_same_state(self.smodel.state_dict(), other.state_dict(), what)
        for call in self.calls:
            assert_same(outcome(self.smodel.eval(), call), outcome(other.eval(), call), what)
        self.smodel = other.train(training)

    @precondition(lambda self: self.is_structured)
    @rule(round_to=st.sampled_from([1, 4]))
    def shrink_and_save(self, round_to: int) -> None:
        """The smaller model is the masked one on every path, and so is the one that was saved and loaded."""
        training = self.smodel.training
        small = self.smodel.eval().shrink(round_to).eval()
        save(small, self.folder / "small")
        loaded = load(self.folder / "small", self.network.fresh(FORGOTTEN)).eval()
        assert_same_state(small.state_dict(), loaded.state_dict(), "a saved smaller model")
        twin = copy.deepcopy(small)
        for number, call in enumerate(self.calls):
            right, got = outcome(self.smodel, call), outcome(small, call)
            assert_same(right, got, f"the smaller model, call {number}", limit=EXACT)
            assert_same(got, outcome(loaded, call), f"the loaded smaller model, call {number}")
            assert_same(got, outcome(twin, call), f"a copy of the smaller model, call {number}")
        self.smodel.train(training)

    # --- what always holds

    @invariant()
    def pruned_weights_are_zero(self) -> None:
        if not hasattr(self, "smodel"):
            return
        state = self.smodel.state_dict()
        for name, mask in self.smodel.masks.items():
            assert not state[f"model.{name}"][~mask].any(), f"{name}: pruned weights are not zero"
        lost = [name for name, _ in self.float_model.named_parameters() if f"model.{name}" not in state]
        assert not lost, f"not in state_dict(): {', '.join(lost)}"

    @invariant()
    def ratio_is_what_was_asked(self) -> None:
        if not hasattr(self, "smodel") or self.is_structured or self.num_done < self.num_steps:
            return
        masks = [mask.flatten() for mask in self.smodel.masks.values()]
        found, asked = 1 - float(torch.cat(masks).float().mean()), self.config["SPARSER"]["RATIO"]
        assert abs(found - asked) < 0.02, f"asked {asked}, found {found:.3f}"
