"""The life of a `QuantModel`: its verbs in any order, and what holds after each of them."""

from __future__ import annotations

import copy
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparsebit.errors import CalibrationError, SparsebitError
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import qconfig
from tests.stateful.comparing import (
    FORGOTTEN,
    assert_same,
    assert_same_state,
    is_among,
    named_arguments,
    outcome,
    tensors,
)
from tests.stateful.networks import NETWORKS, Call, Network

CONFIGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "learned": {"A.QUANTIZER.TYPE": "lsq", "W.QUANTIZER.TYPE": "lsq"},
    "per channel": {"A.QSCHEME": "per-channel-affine", "W.QSCHEME": "per-channel-symmetric"},
}


class QuantizedLife(RuleBasedStateMachine):
    names: tuple[str, ...] = tuple(NETWORKS)

    @initialize(data=st.data(), config=st.sampled_from(sorted(CONFIGS)), with_example=st.booleans())
    def build(self, data: st.DataObject, config: str, with_example: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stateful-"))
        self.network: Network = NETWORKS[data.draw(st.sampled_from(self.names), label="network")]
        self.config = qconfig(CONFIGS[config] | {"SCHEDULE.FUSE_BN": self.network.folds})
        self.float_model = self.network.fresh()
        self.calls = self.network.some_calls()
        self.example = named_arguments(self.float_model, self.calls[0]) if with_example else None
        self.qmodel = QuantModel(self.float_model, self.config, example_inputs=self.example)
        self.is_calibrated, self.num_observed = False, -1
        self.is_trained, self.num_exports, self.is_loaded = False, 0, False

    def some_call(self, data: st.DataObject) -> Call:
        return self.calls[data.draw(st.sampled_from(range(len(self.calls))), label="call")]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def is_settled(self) -> bool:
        return self.num_observed < 0

    # --- calls and modes

    @rule(train=st.booleans())
    def switch_mode(self, train: bool) -> None:
        self.qmodel.train(train)

    @precondition(lambda self: not self.is_calibrated and self.is_settled and not self.is_trained)
    @rule(data=st.data())
    def call_in_float(self, data: st.DataObject) -> None:
        """Before calibration the copy computes what the model does; a loaded one refuses calls of another form: it has
        no float model to capture again.
        """
        args, kwargs = self.some_call(data)
        self.qmodel.eval()
        right = outcome(self.float_model, (args, kwargs))
        got = outcome(self.qmodel, (args, kwargs))
        assert_same(right, got, "the copy before calibration", limit=1e-5, may_refuse=self.is_loaded)

    # --- calibrating

    @rule()
    def prepare(self) -> None:
        self.qmodel.prepare_calibration()
        self.num_observed = 0

    @precondition(lambda self: not self.is_settled)
    @rule(data=st.data())
    def observe(self, data: st.DataObject) -> None:
        found = outcome(self.qmodel, self.some_call(data))
        self.num_observed += not isinstance(found, SparsebitError)

    @precondition(lambda self: self.num_observed > 0)
    @rule(asym=st.booleans())
    def finish_calibration(self, asym: bool) -> None:
        try:
            self.qmodel.calc_qparams(asym=asym)
        except CalibrationError:  # none of the batches was of the captured form
            assert asym
            self.qmodel.calc_qparams()
        self.qmodel.set_quant(w_quant=True, a_quant=True)
        self.is_calibrated, self.num_observed = True, -1

    @precondition(lambda self: self.is_calibrated and self.is_settled)
    @rule(weights=st.booleans(), activations=st.booleans())
    def switch_quantization(self, weights: bool, activations: bool) -> None:
        self.qmodel.set_quant(w_quant=weights, a_quant=activations)

    # --- training and changing

    @precondition(lambda self: self.is_settled)
    @rule(data=st.data())
    def train_a_step(self, data: st.DataObject) -> None:
        args, kwargs = self.some_call(data)
        self.qmodel.train()
        optimizer = torch.optim.SGD(self.qmodel.parameters(), lr=0.01)
        try:
            output = self.qmodel(*args, **kwargs)
        except SparsebitError:
            return
        sum(x.square().mean() for x in tensors(output)).backward()  # type: ignore[union-attr]
        optimizer.step()
        self.is_trained = True

    @precondition(lambda self: self.is_settled and self.qmodel.plan.sites)
    @rule(data=st.data(), bits=st.sampled_from([4, 6, 8]))
    def change_a_site(self, data: st.DataObject, bits: int) -> None:
        site = data.draw(st.sampled_from(sorted(self.qmodel.plan.sites)))
        self.qmodel.replace_quantizer(site, {"bits": bits})
        assert self.qmodel.plan[site].spec.bits == self.qmodel.sites[site].spec.bits == bits

    @precondition(lambda self: self.is_settled and self.is_calibrated and self.qmodel.plan.sites)
    @rule(data=st.data())
    def leave_a_site_out(self, data: st.DataObject) -> None:
        site = data.draw(st.sampled_from(sorted(self.qmodel.plan.sites)))
        self.qmodel = self.qmodel.with_plan(self.qmodel.plan.replace({site: None})).train(self.qmodel.training)
        assert site not in self.qmodel.sites

    # --- keeping

    @rule()
    def save_and_load(self) -> None:
        self.qmodel.save(self.folder / "saved")
        loaded = QuantModel.load(self.folder / "saved", self.network.fresh(FORGOTTEN))
        self.is_loaded = True
        self.follow(loaded, "a saved and loaded model", may_refuse=not self.is_calibrated)

    @rule()
    def deepcopy(self) -> None:
        self.follow(copy.deepcopy(self.qmodel), "a deep copy")

    @rule()
    def pickle(self) -> None:
        self.follow(pickle.loads(pickle.dumps(self.qmodel)), "a pickled model")

    def follow(self, other: QuantModel, what: str, *, may_refuse: bool = False) -> None:
        """Compare the other one, and go on with it."""
        assert_same_state(self.qmodel.state_dict(), other.state_dict(), what)
        assert self.qmodel.plan == other.plan, f"{what} has another plan"
        training = self.qmodel.training
        for model in (self.qmodel, other):
            model.eval()
        if self.is_settled:  # a call is observed otherwise
            for number, call in enumerate(self.calls):
                right, got = outcome(self.qmodel, call), outcome(other, call)
                assert_same(right, got, f"{what}, call {number}", may_refuse=may_refuse)
        elif not other.is_calibrating:
            # A deep copy goes on with what was gathered. What is saved or pickled does not: some ranges are unknown.
            self.num_observed, self.is_calibrated = -1, False
        self.qmodel = other.train(training)

    @precondition(lambda self: self.is_calibrated and self.is_settled and self.num_exports < 1)
    @rule(chance=st.integers(0, 7))
    def export(self, chance: int) -> None:
        if chance != 7:
            return
        self.num_exports += 1
        before = [outcome(self.qmodel.eval(), call) for call in self.calls]
        example = named_arguments(self.float_model, self.calls[0])
        file = self.folder / "model.onnx"
        if isinstance(before[0], SparsebitError):  # its channels are along a dimension of another size
            with pytest.raises(SparsebitError):
                self.qmodel.export_onnx(example, file)
            return
        self.qmodel.export_onnx(example, file)
        assert file.stat().st_size and not list(self.folder.glob(".*"))
        for call, right in zip(self.calls, before, strict=True):
            assert_same(right, outcome(self.qmodel, call), "the model after its export")

    # --- what always holds

    @invariant()
    def every_parameter_is_kept(self) -> None:
        if not hasattr(self, "qmodel") or self.is_trained or self.network.folds:
            return
        state, trained = self.qmodel.state_dict(), dict(self.qmodel.named_parameters())
        for where, held in (("state_dict()", state), ("parameters()", trained)):
            lost = [name for name, p in self.float_model.named_parameters() if not is_among(p, held)]
            assert not lost, f"not in {where}: {', '.join(lost)}"
        counted = {parameter.name for parameter in self.qmodel.coverage.parameters}
        missing = [name for name, _ in self.float_model.named_parameters() if name not in counted]
        assert not missing, f"not in the report: {', '.join(missing)}"
