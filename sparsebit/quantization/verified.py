"""`VerifiedModel`: a simulated model that is compared with the original's own code before it is trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CaptureError, SparsebitError
from sparsebit.execution.batches import Call, as_call, to_device
from sparsebit.graph.call_form import call_form, has_forward
from sparsebit.graph.comparison import difference
from sparsebit.graph.copying import copy_model
from sparsebit.graph.hidden_writes import may_write_parameters
from sparsebit.graph.leaf_policy import LeafPolicy
from sparsebit.graph.nested import tensors_of
from sparsebit.graph.outcome import (
    Buffers,
    Outcome,
    Randomness,
    buffers_of,
    cloned,
    outcome_of,
    state_kept,
    tensor_at,
    undisturbed_randomness,
    with_gradients,
)
from sparsebit.graph.outer_state import OuterState, undisturbed_outer_state
from sparsebit.graph.passes.fold_batchnorm import Folded
from sparsebit.graph.verification import Compare, Reference, in_double, is_within
from sparsebit.quantization.carried_state import BuiltState, CarriedState, twin_at
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.simulation import SimulatedModel
from sparsebit.quantization.sites import Plan
from sparsebit.quantization.stages import Transform, name_of
from sparsebit.records import Coverage, GradientCheck

log = logging.getLogger(__name__)

# How often the model is captured again, each time with fewer modules as graphs, before a difference is only reported.
_ATTEMPTS = 12
_DISTURBED_RUNS = 3


class VerifiedModel(SimulatedModel):
    """Compares itself, with quantization off, with the model it was made from: on `example_inputs` (without any, on the
    inputs of the first call) and on the first calibration batch, in values, dtypes, shapes and what is written into
    inputs and buffers.

    The smallest module that differs runs its own code from then on; one that differs even so is left untouched, in
    float. `coverage` names it. `verify="calibration"` leaves out the example and the first call; `verify=False` leaves
    out all, and with them a forward of the float model each.
    """

    _verifies: bool | Literal["calibration"] = False
    _proof_is_due = False  # whether the next calibration batch has to be compared
    _built_weights: tuple[Any, ...] = ()
    _first_call_is_due = False
    _compares_sources = False  # whether own code that runs in the place of a graph is compared, at its first call
    _built_state: BuiltState
    _unproved = ""  # why the copy is not known to be the same function

    def __init__(
        self,
        model: nn.Module,
        config: Source | QuantConfig | None = None,
        *,
        plan: Plan | None = None,
        transforms: Sequence[Transform] = (),
        example_inputs: Any = None,
        verify: bool | Literal["calibration"] = True,
    ) -> None:
        super().__init__(model, config, plan=plan, transforms=transforms, example_inputs=example_inputs)
        self._verifies = verify
        if not verify:
            self._unproved = "verify=False: the copy was not compared with the model's own code"
        elif verify != "calibration" and example_inputs is not None:
            self._verify_example(as_call(example_inputs, model))
        self._first_call_is_due = verify is True and example_inputs is None
        self._compares_sources = bool(verify)

    @property
    def coverage(self) -> Coverage:
        """What is quantized, what is float and why."""
        found = super().coverage
        return dataclasses.replace(found, notes=(*found.notes, self._unproved)) if self._unproved else found

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super()._build(*args, **kwargs)
        self._built_weights = self._weights_now()
        self._built_state = BuiltState(self.original, self.source)

    def _weights_now(self) -> tuple[Any, ...]:
        """Another value after any change to the weights, here or in the original."""
        original = self.original
        return tuple((id(p), p._version, p.dtype) for module in (original, self.model) for p in module.parameters())

    def _rebuild(self, example: Call | None) -> None:
        if self._weights_now() != self._built_weights:
            raise CaptureError(
                "the model has to be captured again for this call, but its weights have changed since it was built, "
                "and would be lost; build the QuantModel with example_inputs like this call's before changing them"
            )
        before = dict(self.named_parameters())
        super()._rebuild(example)
        self._keep_parameters(before)

    def _keep_parameters(self, before: dict[str, nn.Parameter]) -> None:
        """Put the parameters of the last capture back where they are the same: an optimizer may hold them."""
        same = {
            id(new): old
            for name, new in self.named_parameters()
            if (old := before.get(name)) is not None and old.shape == new.shape and torch.equal(old, new)
        }
        for module in (*self.modules(), *self._code_modules()):
            for name, parameter in module._parameters.items():
                if id(parameter) in same:
                    module._parameters[name] = same[id(parameter)]
        self._built_weights = self._weights_now()

    def _capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = CarriedState.of(self._built_state, self.original, self.source, self._folded_tensors())
        super()._capture_again(args, kwargs)
        state.put_into(self.source)

    def _verify_example(self, call: Call) -> None:
        call = to_device(call, self.device)
        if any(tensor.is_meta for tensor in tensors_of(call)):
            return
        with torch.no_grad(), undisturbed_randomness():
            self._proved(cloned(call), "example_inputs", super().forward, keep_state=True)

    def _verified(self, call: Call, occasion: str, run: Callable[..., Any]) -> Any:
        """What `run` gives for `call`, once that is what the original's own code gives; what differs is cut out."""
        outcome = self._proved(call, occasion, run)
        return run(*call[0], **call[1]) if outcome is None else outcome.output

    def _proved(
        self, call: Call, occasion: str, run: Callable[..., Any], *, keep_state: bool = False
    ) -> Outcome | None:
        """What the copy does with `call`, once that is what the original does; None where it did not run, or failed.

        `keep_state`: the copy's buffers and attributes are afterwards what they were.
        """
        self._proof_is_due = False
        if self._root is not None and self._root.bind(*call) is None:
            self._capture_again(*call)
            self._proof_is_due = False
        reason = self._why_not_comparable()
        if reason:
            log.info("%s is not compared with the model's own code: %s", occasion, reason)
            return None
        given, randomness = cloned(call), Randomness.now()
        reference = self._reference()
        try:
            expected = reference.outcome(cloned(call), randomness)
        except Exception as error:  # the copy's forward shows it to the user
            log.debug("the model's own code fails on %s: %s: %s", occasion, type(error).__name__, error)
            return None
        outcome: Outcome | None = None
        outside = OuterState(self.source.modules(), {})
        repeats = True
        for attempt in range(_ATTEMPTS):
            found, outcome = self._compare(call, run, expected, keep_state)
            if found is None or (outcome is not None and self._is_no_fault(given, expected, randomness)):
                log.info("the copy computes what the model's own code computes on %s", occasion)
                break
            if self._transforms:
                raise CaptureError(
                    f"after the transforms {', '.join(map(name_of, self._transforms))} the model computes something "
                    f"else on {occasion}: {found}; a transform must keep what the graph computes (verify=False is for "
                    "those that are meant to change it)"
                )
            if registered := self._registered_ops():
                self._unproved = f"with ops that you registered ({registered}) the copy differs on {occasion}: {found}"
                break
            if not repeats or not reference.repeats(cloned(given), expected, randomness):
                self._unproved = f"the model's own code gives another result when {occasion} runs again: {found}"
                if not repeats or outcome is None or "" in self._captured.untraced:
                    break
                repeats = False  # a graph would give one of its results at every call
            elif attempt == _ATTEMPTS - 1:
                self._unproved = f"the copy differs from the model's own code on {occasion}: {found}"
                warnings.warn(f"{self._unproved}; what it computes is not what the model computes", stacklevel=5)
                break
            self._cut(given, found, reference, randomness)
            _put_back(call, given)
            outside.restore()
            randomness.restore()
        if keep_state:  # parameters that the forward wrote into are what they were
            self._built_weights = self._weights_now()
        return outcome

    def verify_training(self, batch: Any, loss: Callable[[Any], Tensor]) -> GradientCheck:
        """Compare the gradients of one step, with quantization off, with those of the model's own code.

        `batch` as for calibration; `loss` makes a scalar of the model's output. Compared are the gradients of inputs
        and of parameters, in train mode (in eval mode where batch norms are folded or a branch on `self.training` was
        captured). The smallest module that differs runs its own code from then on; in a calibrated model, which cannot
        be captured again, it is an error that names the module.
        """
        model = self.original
        if self._weights_now() != self._built_weights:
            raise CaptureError(
                "verify_training() after the weights have changed: there is nothing left to compare with; call it "
                "before training, on the weights that the QuantModel was built from"
            )
        call = to_device(as_call(batch, model), self.device)
        randomness, cuts, found = Randomness.now(), dict(self._policy.own_code), ""
        for _ in range(_ATTEMPTS):
            reference = Reference(model, self.device, training=not self._has_one_mode)
            expected = reference.gradients(call, loss, randomness)
            differs, names = self._gradient_difference(call, loss, expected, reference.training, randomness)
            if differs is None:
                randomness.restore()
                new = {path: why for path, why in self._policy.own_code.items() if path not in cuts}
                return GradientCheck(tuple(names), tuple(sorted(expected.gradients.keys() - names)), new)
            found = differs
            if any(quantizer.is_calibrated for quantizer in self.quantizers()):
                differing = self._differing(call, found, reference, randomness, _module_gradients)
                told = "; ".join(f"{path or 'the model'}: {why}" for path, why in differing.items())
                raise CaptureError(
                    f"gradients of the copy differ from the model's own, in {told}; build a new QuantModel and call "
                    "verify_training() before calibration: such a module then runs its own code"
                )
            self._cut(call, found, reference, randomness, _module_gradients)
        raise CaptureError(f"gradients of the copy differ from the model's own, whatever runs its own code: {found}")

    def _gradient_difference(
        self,
        call: Call,
        loss: Callable[[Any], Tensor],
        expected: Outcome,
        training: bool,
        randomness: Randomness,
    ) -> tuple[str | None, set[str]]:
        """What differs, and the names of what was compared; a weight that a norm was folded into is not."""
        same = {name: twin for name, (_, twin) in _same_parameters(self.original, self).items()}
        switches = self.is_quantized("weight"), self.is_quantized("activation")
        is_training = self.training
        with undisturbed_randomness(randomness), state_kept(self.model, self.source):
            self.set_quant(w_quant=False, a_quant=False)
            self.train(training)
            try:
                outcome = with_gradients(super().forward, call, loss, same)
            finally:
                self.train(is_training)
                self.set_quant(*switches)
        return outcome.difference(expected), expected.gradients.keys() & outcome.gradients.keys()

    @property
    def _has_one_mode(self) -> bool:
        """Whether train mode differs from the original's by design."""
        is_folded = any(isinstance(module, Folded) for module in self._code_modules())
        return is_folded or bool(self._captured.eval_branches)

    def _reference(self, path: str = "") -> Reference:
        """The own code of the original's module at `path`, in the modes that the copy's modules have now."""
        module = self.original.get_submodule(path)
        prefix = f"{path}." if path else ""
        twins = {name: twin_at(self.source, f"{prefix}{name}" if name else path) for name, _ in module.named_modules()}
        modes = {name: twin.training for name, twin in twins.items() if twin is not None}
        return Reference(module, self.device, training=modes.get("", self.training), modes=modes)

    def _why_not_comparable(self, path: str = "") -> str:
        """Why the original's module at `path` may well give something else than the copy's; "" where it may not."""
        if self._weights_now() != self._built_weights:
            return "the weights have changed since the model was captured"
        if not self._has_equal_buffers(path):
            return "the buffers have changed since the model was captured"
        if any(is_within(module, path) for module, _ in self._built_state.changes()):
            return "attributes have changed since the model was captured"
        if self.training and self._has_one_mode:
            return "in train mode folded batch norms and captured eval branches differ from it by design"
        return ""

    def _has_equal_buffers(self, path: str) -> bool:
        """Whether the original's buffers below `path` hold what the copy's hold; those of folded norms do not count."""
        folded = self._folded_tensors()
        buffers = self.original.get_submodule(path).named_buffers(prefix=path)
        pairs = [(buffer, tensor_at(self.source, name)) for name, buffer in buffers]
        return all(
            torch.equal(twin, buffer.to(twin))
            for buffer, twin in pairs
            if twin is not None and id(twin) not in folded and twin.shape == buffer.shape and not twin.is_sparse
        )

    def _registered_ops(self) -> str:
        """The ops of the model that users registered: what these compute may be meant to differ."""
        ops = (part for part in self.model.modules() if isinstance(part, QuantOpr) and not isinstance(part, QIdentity))
        return ", ".join(sorted({type(part).__name__ for part in ops if part.row.implementation is not None}))

    def _compare(
        self, call: Call, run: Callable[..., Any], expected: Outcome, keep_state: bool
    ) -> tuple[str | None, Outcome | None]:
        """What differs, and what the copy did; None where it failed."""
        with self._unseen() if keep_state else contextlib.nullcontext():
            try:
                outcome = outcome_of(run, call, self._watched_buffers())
            except SparsebitError:
                raise
            except Exception as error:
                return f"{type(error).__name__}: {error}", None
            return outcome.difference(expected), outcome

    def _watched_buffers(self) -> Buffers:
        return buffers_of(self.source, self.original)

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """What forwards of the copy do inside to state is undone, in the copy and outside of it."""
        with undisturbed_outer_state(self.source), state_kept(self.model, self.source):
            yield

    def _differing(
        self, call: Call, found: str, reference: Reference, randomness: Randomness, compare: Compare | None = None
    ) -> dict[str, str]:
        """The smallest modules that differ, and how."""
        paths, build = _with_code(self.original, self._policy), self._part_with_buffers
        return reference.smallest_differing(cloned(call), paths, build, randomness, compare=compare) or {"": found}

    def _cut(
        self, call: Call, found: str, reference: Reference, randomness: Randomness, compare: Compare | None = None
    ) -> None:
        """Capture again, with the smallest modules that differ running their own code.

        Where such a module does already, the modules inside it do too; after that it stays untouched, in float.
        """
        model = self.original
        policy = self._policy
        for path, why in self._differing(call, found, reference, randomness, compare).items():
            log.warning("%s runs its own code: its graph computes something else: %s", path or "the model", why)
            reason = f"its graph computes something else than its code: {why}"
            inside = [name for name in _with_code(model, policy, path) if name not in policy.own_code]
            for name in inside if path in policy.own_code and inside else [path]:
                policy = policy.cut(name, reason)
        self._policy = policy
        self._rebuild(call if self._example is not None else None)
        self._proof_is_due = False

    def _part_with_buffers(self, path: str, module: nn.Module, call: Call) -> tuple[nn.Module, Buffers]:
        part = self._part(path, module, call)
        return part, buffers_of(part.source, module)

    def _part(self, path: str, module: nn.Module, call: Call) -> SimulatedModel:
        """A copy of one module, captured and with quantizers as in the whole, off."""
        part = SimulatedModel.__new__(SimulatedModel)
        nn.Module.__init__(part)
        example, form = (call, None) if self._example is not None else (None, call_form(module, *call))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user is warned when the whole is built
            transforms = () if path else self._transforms  # they know the whole graph
            policy = self._policy.below(path, module)
            part._set_up(module, self.config, example, policy, form, transforms=transforms)
        return part.to(self.device).train(self.training)

    def _is_no_fault(self, call: Call, expected: Outcome, randomness: Randomness) -> bool:
        """Whether the copy is right although it differs.

        Either earlier calls have moved a state that it keeps outside of buffers: a new copy gives what is expected. Or
        only rounding differs, amplified by the model: copy and original are the same in float64, and the original
        itself gives something else when its parameters move by a rounding error.
        """
        model = self.original
        if self._agrees_anew(copy_model(model), call, randomness):
            return True
        if any(x.dtype == torch.float64 for x in (*model.parameters(), *tensors_of(call))):
            return False
        return self._agrees_anew(copy_model(model).double(), in_double(call), randomness) and self._amplifies_rounding(
            call, expected, randomness
        )

    def _agrees_anew(self, model: nn.Module, call: Call, randomness: Randomness) -> bool:
        """Whether a new copy of the model computes what the model's own code computes."""
        now = Randomness.now()
        try:
            part = self._part("", model, call)
            expected = Reference(model, self.device, training=self.training).outcome(cloned(call), randomness)
            randomness.restore()
            with undisturbed_outer_state(model):
                outcome = outcome_of(part, cloned(call), buffers_of(part.source, model))
        except Exception as error:
            log.debug("no comparison with a new copy: %s: %s", type(error).__name__, error)
            return False
        finally:
            now.restore()
        return outcome.difference(expected) is None

    def _amplifies_rounding(self, call: Call, expected: Outcome, randomness: Randomness) -> bool:
        """Code that asks for the dtype of its inputs is another function in float64, and not for rounding."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(_DISTURBED_RUNS):
            disturbed = copy_model(self.original)
            with torch.no_grad():
                for parameter in filter(torch.is_floating_point, disturbed.parameters()):
                    noise = torch.rand(parameter.shape, generator=generator).to(parameter) - 0.5
                    parameter.add_(4 * torch.finfo(parameter.dtype).eps * noise * parameter)
            reference = Reference(disturbed, self.device, training=self.training)
            output = reference.outcome(cloned(call), randomness).output
            if difference(output, expected.output, slack=0.1) is not None:
                return True
        return False


def _with_code(model: nn.Module, policy: LeafPolicy, path: str = "") -> list[str]:
    """The paths, from `path` down, of the modules that are no leaves: their own code can run in place of a graph."""
    modules = model.get_submodule(path).named_modules(prefix=path)
    return [name for name, module in modules if has_forward(module) and not policy.is_leaf(module, name)]


def _module_gradients(module: nn.Module, part: nn.Module, call: Call) -> str | None:
    """What differs in the gradients of a module and of its stand-in, for one random direction of their output."""

    def directional(output: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        floats = [x for x in tensors_of(output) if x.is_floating_point() and x.requires_grad]
        return sum(((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in floats), torch.zeros(()))

    assert isinstance(part, SimulatedModel)
    own = copy_model(module, share_parameters=not may_write_parameters(module)).train(part.training)
    pairs, randomness = _same_parameters(own, part), Randomness.now()
    expected = with_gradients(own, call, directional, {name: parameter for name, (parameter, _) in pairs.items()})
    randomness.restore()
    twins = {name: twin for name, (_, twin) in pairs.items()}
    return with_gradients(part, call, directional, twins).difference(expected)


def _same_parameters(model: nn.Module, copied: SimulatedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """The model's parameters and the copy's, by name, where nothing was folded into the copy's or taken out of it."""
    folded = copied._folded_tensors()
    pairs = {name: (parameter, tensor_at(copied.source, name)) for name, parameter in model.named_parameters()}
    return {
        name: (parameter, twin)
        for name, (parameter, twin) in pairs.items()
        if twin is not None and id(twin) not in folded and torch.equal(twin, parameter.to(twin.device))
    }


@torch.no_grad()
def _put_back(call: Call, given: Call) -> None:
    """Undo what a forward wrote into its inputs."""
    for tensor, before in zip(tensors_of(call), tensors_of(given), strict=True):
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            tensor.copy_(before)
