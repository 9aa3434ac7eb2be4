"""The properties notice faults that are planted in a quantized copy, and only those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.errors import CaptureError
from sparsebit.quantization import QuantModel
from tests.fuzz import properties, training
from tests.fuzz.choices import Choices
from tests.fuzz.grammar import generate
from tests.fuzz.program import Argument, ModuleClass, Program, Statement
from tests.fuzz.properties import PROPERTIES, Verdict, judge
from tests.fuzz.shrink import shrink

X = (Argument("x", "torch.randn(b, 8, generator=g)"),)
LAYER = Statement("linear", ("v1 = self.m1(x)",), "v1", "x", members=("self.m1 = nn.Linear(8, 8)",))
CURVE = Statement("function", ("v2 = v1.tanh()",), "v2", "v1")
SUM = Statement("binary", ("v3 = v2 + x",), "v3", "v2")


def program(*statements: Statement, result: str = "v3") -> Program:
    return Program(ModuleClass("Net", "self, x", statements or (LAYER, CURVE, SUM), result), X)


def planted(monkeypatch: pytest.MonkeyPatch, name: str, **methods: Any) -> Verdict:
    faulty = type("Planted", (QuantModel,), methods)
    for file in (properties, training):
        monkeypatch.setattr(file, "QuantModel", faulty)
    return judge(program(), name)


@pytest.mark.parametrize("name", PROPERTIES)
def test_hold_for_a_plain_program(name: str) -> None:
    assert judge(program(), name) == Verdict(name, "same")


@pytest.mark.parametrize("name", ["values", "example", "gradients"])
def test_other_values_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def forward(self: QuantModel, *args: Any, **kwargs: Any) -> Any:
        return QuantModel.forward(self, *args, **kwargs) * 1.1

    assert planted(monkeypatch, name, forward=forward).outcome == "different"


@pytest.mark.parametrize("name", ["values", "example", "gradients"])
def test_fault_at_16_bits_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def forward(self: QuantModel, *args: Any, **kwargs: Any) -> Any:
        output = QuantModel.forward(self, *args, **kwargs)
        return output * 1.1 if self.is_quantized("activation") else output

    found = planted(monkeypatch, name, forward=forward)
    assert found.outcome == "different" and "16 bits" in found.details


def test_lost_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: QuantModel, x: torch.Tensor) -> Any:
        return QuantModel.forward(self, x.detach())

    found = planted(monkeypatch, "gradients", forward=forward)
    assert found.outcome == "different" and "input_gradient" in found.details


def test_other_number_type_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: QuantModel, x: torch.Tensor) -> Any:
        return QuantModel.forward(self, x).double()

    assert "float64" in planted(monkeypatch, "values", forward=forward).details


def test_change_of_the_users_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def calc_qparams(self: QuantModel) -> None:
        QuantModel.calc_qparams(self)
        self.original.seen = True

    assert "user's model" in planted(monkeypatch, "values", calc_qparams=calc_qparams).details


def test_another_function_after_copying_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deepcopy(self: QuantModel, memo: dict[int, Any]) -> Any:
        copied = QuantModel.__deepcopy__(self, memo)
        copied.set_quant(w_quant=False, a_quant=False)
        return copied

    assert "deep copy" in planted(monkeypatch, "copies", __deepcopy__=deepcopy).details


def test_crash_and_refusal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: QuantModel) -> None:
        raise KeyError("x")

    def refuse(self: QuantModel) -> None:
        raise CaptureError("no")

    assert planted(monkeypatch, "values", prepare_calibration=crash).outcome == "crash"
    assert planted(monkeypatch, "values", prepare_calibration=refuse).outcome == "refused"


def test_model_that_does_not_run_is_no_fault() -> None:
    broken = program(Statement("function", ("v1 = x @ x",), "v1", "x"), result="v1")
    assert judge(broken, "values").outcome == "invalid"


def test_unstable_model_is_no_fault() -> None:
    """The difference of two nearly equal numbers, magnified: 16 bits cannot hold it, in any simulation."""
    lines = ("v2 = (v1 + 1000 - v1.sigmoid()) - 1000 - v1",)
    chaotic = program(LAYER, Statement("function", lines, "v2", "v1"), result="v2 * 1000")
    assert judge(chaotic, "values").outcome in ("unstable", "same")


def test_shrinking_keeps_only_what_the_fault_needs() -> None:
    smallest = shrink(program(), lambda p: "tanh" in p.source())
    assert [s.feature for s in smallest.root.statements] == ["function"]
    assert nn.Module in type(properties.Compiled(smallest).make()).__mro__


def test_a_model_that_cancels_its_own_rounding_is_unstable() -> None:
    """`x -= y`, where both are the same memory: 0 in float, the rounding of y at 16 bits."""
    same = Statement("method", ("v1 = x.mul_(1)",), "v1", "x")
    cancel = Statement("operator", ("x -= v1",), "v1", "v1")
    spoilt = Statement("function", ("v2 = x * 1",), "v2", "x")
    assert judge(program(same, cancel, spoilt, result="v2"), "values").outcome in ("same", "unstable")


def test_a_state_that_leaves_the_calibrated_ranges_is_no_fault() -> None:
    summing = Statement("state", ("self.total = self.total + 1", "v2 = v1 * self.total"), "v2", "v1")
    members = (*LAYER.members, "self.total = torch.ones(8)")
    layer = Statement("linear", ("v1 = self.m1(x)",), "v1", "x", members=members)
    then = Statement("linear", ("v3 = self.m2(v2)",), "v3", "v2", members=("self.m2 = nn.Linear(8, 8)",))
    assert judge(program(layer, summing, then), "values") == Verdict(
        "values", "told", "its state leaves the ranges of the calibration"
    )


def test_a_write_that_hides_from_the_backward_is_no_fault() -> None:
    write = Statement("through_view", ("if x.sum() > -1e9:", "    x.data.fill_(1.5)"), "v1", "x")
    assert judge(program(LAYER, write, result="v1"), "gradients").outcome == "told"


def test_a_last_place_that_half_precision_rounds_apart_is_no_fault() -> None:
    """The batch norm is folded: sums differ in their last place, and `.half()` makes steps of that."""
    assert (
        judge(generate(Choices.from_seed(621312), without=("guarded_layer", "sentinel", "knob")), "values").outcome
        == "same"
    )
