"""Which positions of a batch are real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsebit.sparse.scoring.padding import real_positions, real_rows


class Net(nn.Module):
    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        return x


class AnyKeywords(nn.Module):
    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return x


REAL = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(("model", "kwargs"), [
    (Net(), {"attention_mask": REAL.long()}), (Net(), {"attention_mask": REAL.float()}),
    (Net(), {"key_padding_mask": ~REAL}), (AnyKeywords(), {"attention_mask": REAL}),
], ids=["numbers", "floats", "padding is true", "keywords of any name"])  # fmt: skip
def test_masks(model: nn.Module, kwargs: dict[str, Tensor]) -> None:
    found = real_positions(((torch.zeros(2, 3, 4),), kwargs), model)
    assert found is not None and torch.equal(found, REAL)


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 3), torch.zeros(2, 1, 3, 3), torch.full((2, 3), -1e9), torch.zeros(2, 3)]
)
def test_what_pads_nothing(mask: Tensor) -> None:
    """All ones; an additive mask of attention; no real token at all."""
    assert real_positions(((torch.zeros(2, 3, 4),), {"attention_mask": mask}), Net()) is None


def test_a_positional_mask() -> None:
    found = real_positions(((torch.zeros(2, 3, 4), REAL), {}), Net())
    assert found is not None and torch.equal(found, REAL)


def test_rows() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(real_rows(x, REAL), x[REAL]) and torch.equal(real_rows(x.flatten(0, 1), REAL), x[REAL])
    other = torch.zeros(2, 7)
    assert real_rows(other, REAL) is other and real_rows(x, None) is x
