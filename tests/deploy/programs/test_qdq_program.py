"""The lowering of fake-quant nodes: what is a constant, and how long it takes to find out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.programs import qdq_program
from sparsebit.deploy.programs.to_program import to_program
from sparsebit.graph.state.modes import evaluating
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from tests.quantization.tiny import calibrated, qconfig

ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    """Forty sums of a value with itself, as a deep residual network has: 2^40 paths from the layer to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = (x + x) * 0.5
        return self.fc(x)


@torch.no_grad()
def test_a_deep_residual_network_is_lowered_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[Any] = []
    original = qdq_program._value_of

    def counted(module: Any, node: Any) -> Tensor | None:
        visited.append(node)
        assert len(visited) < 1000
        return original(module, node)

    monkeypatch.setattr(qdq_program, "_value_of", counted)
    qmodel = calibrated(Doubled().eval(), [ROWS], qconfig(backend="executorch"))
    with evaluating(qmodel), quantizers_as_constants(qmodel):
        program = to_program(qmodel, (ROWS,), {})
    torch.testing.assert_close(program.module()(ROWS), qmodel(ROWS))
    assert any(value.dtype == torch.int8 for value in program.state_dict.values())


class Computed(nn.Module):
    """A weight that is made of two parameters, and rounded before and after it is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.left * self.right)


@torch.no_grad()
def test_a_computed_weight_is_stored_as_integers() -> None:
    torch.manual_seed(0)
    qmodel = calibrated(Computed().eval(), [ROWS], qconfig(backend="executorch"))
    with evaluating(qmodel), quantizers_as_constants(qmodel):
        program = to_program(qmodel, (ROWS,), {})
    torch.testing.assert_close(program.module()(ROWS), qmodel(ROWS))
    assert any(value.dtype == torch.int8 and value.shape == (3, 6) for value in program.state_dict.values())
