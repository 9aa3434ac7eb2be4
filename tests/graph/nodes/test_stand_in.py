"""Stand-ins: their class, their attributes, and the module that they replace."""

from __future__ import annotations

from torch import Tensor, nn

from sparsebit.graph.nodes.stand_in import StandIn, replaced_by, without_stand_ins


class Wraps(StandIn):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def _replaced_module(self) -> nn.Module | None:
        return self.__dict__.get("_modules", {}).get("inner")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_class_and_attributes_are_those_of_the_replaced_module() -> None:
    outer = Wraps(nn.Linear(3, 5))
    assert isinstance(outer, nn.Linear) and type(outer) is Wraps
    assert outer.out_features == Wraps(outer).out_features == 5


def test_the_replaced_module_is_found_through_several() -> None:
    layer = nn.Linear(3, 5)
    assert replaced_by(Wraps(Wraps(layer))) is layer and replaced_by(layer) is layer


def test_a_model_without_stand_ins() -> None:
    layer = nn.Linear(3, 5)
    model = without_stand_ins(nn.Sequential(Wraps(nn.Sequential(Wraps(layer)))))
    assert model[0][0] is layer  # type: ignore[index]
