"""What must hold for every program: the quantized copy computes what the model computes, or says that it does not."""

from __future__ import annotations

import copy
import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sparsebit.errors import SparsebitError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.quantizers.base import Quantizer
from tests.fuzz.calls import (
    CLOSE,
    FOLDING,
    KEEPING,
    UNSTABLE,
    Different,
    Invalid,
    Leaves,
    Told,
    compare,
    disturbed,
    exact_limit,
    reference,
    run_call,
    seed,
    sensitivity,
    without_hooks,
)
from tests.fuzz.lives import attributes, forgotten, modes, pruned
from tests.fuzz.program import Compiled, Program
from tests.fuzz.shrink import shrink
from tests.fuzz.training import gradients
from tests.fuzz.values import snapshot


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one property: "same", "different", "crash", "refused", "told", "unstable" or "invalid", with the details."""

    about: str  # the property's name
    outcome: str
    details: str = ""

    @property
    def is_fault(self) -> bool:
        return self.outcome in ("different", "crash")


def values(program: Program, compiled: Compiled, *, with_example: bool) -> None:
    """Quantization off, calibrating, and 16 bits: the copy's calls in a row are the model's."""
    expected = reference(compiled, 6)
    model = compiled.make()
    before = snapshot(model)
    example = program.shape_of_example(*compiled.inputs(0)) if with_example else None
    seed(0)
    qmodel = QuantModel(model, KEEPING if with_example else FOLDING, example_inputs=example)
    for call in (0, 1):
        compare(call, expected[call], run_call(compiled, qmodel, call), exact_limit(compiled), "quantization off")
    qmodel.prepare_calibration()
    for call in (2, 3):
        # The first batch also runs the model's own code, for comparison: hooks record twice.
        right, got = expected[call], run_call(compiled, qmodel, call)
        if call == 2:
            right, got = without_hooks(right), without_hooks(got)
        compare(call, right, got, exact_limit(compiled), "calibrating")
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    for call in (4, 5):
        got = run_call(compiled, qmodel, call)
        try:
            compare(call, expected[call], got, CLOSE, "16 bits")
        except Different:
            noise = sensitivity(expected[call], [run[call] for run in disturbed(compiled, 6)])
            if sensitivity(expected[call], [got]) <= UNSTABLE * noise:
                raise Told("unstable: 16-bit noise moves the float model as far") from None
            if _shares_ranges(compiled, call):
                raise Told("a shared layer reads inputs of ranges too different for one scale") from None
            if "state" in program.features and (_grows(expected) or _is_drift(program, with_example=with_example)):
                raise Told("its state leaves the ranges of the calibration") from None
            raise
    compare(6, before, snapshot(model), 0.0, "the user's model after building and running the copy")


def _shares_ranges(compiled: Compiled, call: int) -> bool:
    """Whether a layer that is called several times reads inputs a thousand times larger in one of the calls."""
    model, sizes = compiled.make(), dict[nn.Module, list[float]]()

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        sizes.setdefault(module, []).extend(float(x.abs().max()) for x in args if _is_real(x))

    with register_module_forward_pre_hook(note):
        run_call(compiled, model, call)
    layers = [one for module, one in sizes.items() if next(module.parameters(), None) is not None and len(one) > 1]
    return any(max(one) > 1000 * min(one) for one in layers)


def _grows(expected: list[Leaves]) -> bool:
    """Whether the outputs of each pair of calls are many times those of the pair before: a state that is squared."""
    sizes = [max((float(x.abs().max()) for _, x in leaves if _is_real(x)), default=0.0) for leaves in expected]
    return min(sizes[4] / max(sizes[2], 1e-30), sizes[5] / max(sizes[3], 1e-30)) > 100


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0


def _is_drift(program: Program, *, with_example: bool) -> bool:
    """Whether the copy is right with the ranges of all calls: what a state sums up leaves those of the calibration."""
    numbers: dict[str, Quantizer] = {}
    for calibrating in ((2, 3, 4, 5), (2, 3)):
        compiled = Compiled(program)  # with globals of its own
        expected = reference(compiled, 6)
        example = program.shape_of_example(*compiled.inputs(0)) if with_example else None
        seed(0)
        qmodel = QuantModel(compiled.make(), KEEPING if with_example else FOLDING, example_inputs=example)
        for call in (0, 1):
            run_call(compiled, qmodel, call)
        qmodel.prepare_calibration()
        for call in calibrating:
            run_call(compiled, qmodel, call)
        qmodel.calc_qparams()
        numbers = numbers or {quantizer.name: quantizer for quantizer in qmodel.quantizers()}
    for quantizer in qmodel.quantizers():
        if quantizer.name in numbers:
            quantizer.scale.copy_(numbers[quantizer.name].scale)
            quantizer.zero_point.copy_(numbers[quantizer.name].zero_point)
    qmodel.set_quant(w_quant=True, a_quant=True)
    try:
        for call in (4, 5):
            compare(call, expected[call], run_call(compiled, qmodel, call), CLOSE, "16 bits")
    except Different:
        return False
    return True


def own_values(program: Program, compiled: Compiled) -> None:
    """Without example inputs, batch norms folded."""
    values(program, compiled, with_example=False)


def example_values(program: Program, compiled: Compiled) -> None:
    """With example inputs."""
    values(program, compiled, with_example=True)


def copies(program: Program, compiled: Compiled) -> None:
    """A deep copy, a state_dict in a new model, and a saved and loaded model are the same function."""
    reference(compiled, 2)
    example = program.shape_of_example(*compiled.inputs(0))
    qmodel = QuantModel(compiled.make(), KEEPING, example_inputs=example)
    qmodel.prepare_calibration()
    for call in (0, 1):
        run_call(compiled, qmodel, call)
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    twin = copy.deepcopy(qmodel)
    kept = copy.deepcopy(qmodel)
    for call in (2, 3):
        compare(call, run_call(compiled, qmodel, call), run_call(compiled, twin, call), 0.0, "a deep copy")
    if "state" in program.features or "hook" in program.features:
        return  # attributes of Python are in no state_dict
    again = QuantModel(compiled.make(), KEEPING, example_inputs=example)
    again.load_state_dict(kept.state_dict())
    again.set_quant(w_quant=True, a_quant=True)
    with tempfile.TemporaryDirectory() as folder:
        kept.save(f"{folder}/saved")
        loaded = QuantModel.load(f"{folder}/saved", forgotten(compiled), example_inputs=example)
    for call in (2, 3):
        right = run_call(compiled, kept, call)
        compare(call, right, run_call(compiled, again, call), 1e-6, "a state_dict in a new model")
        compare(call, right, run_call(compiled, loaded, call), 1e-6, "a saved and loaded model")


PROPERTIES: dict[str, Callable[[Program, Compiled], None]] = {
    "values": own_values, "example": example_values, "gradients": gradients, "copies": copies, "modes": modes,
    "attributes": attributes, "pruned": pruned,
}  # fmt: skip


def judge(program: Program, name: str) -> Verdict:
    """Whether one property holds for a program. Nothing that the program or the copy does ends in an exception."""
    logging.getLogger("sparsebit").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PROPERTIES[name](program, Compiled(program))
    except Different as fault:
        return Verdict(name, "different", str(fault))
    except Told as told:
        return Verdict(name, "unstable" if "unstable" in str(told) else "told", str(told))
    except Invalid as fault:
        return Verdict(name, "invalid", str(fault))
    except SparsebitError as refusal:
        return Verdict(name, "refused", f"{type(refusal).__name__}: {refusal}")
    except Exception as crash:
        return Verdict(name, "crash", f"{type(crash).__name__}: {crash}")
    return Verdict(name, "same")


def smallest_like(program: Program, verdict: Verdict, *, tries: int = 400) -> Program:
    """The smallest program with a fault of the same kind, at the same stage."""
    kind = _kind(verdict)
    return shrink(program, lambda smaller: _kind(judge(smaller, verdict.about)) == kind, tries=tries)


def _kind(verdict: Verdict) -> str:
    stage, _, rest = verdict.details.partition(":")
    return f"{verdict.outcome} {stage.split(',')[-1]} {rest.split(']')[0]}"
