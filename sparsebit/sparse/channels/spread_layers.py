"""Layers that compute only some of their outputs and read only some of their inputs; activations keep their width.

Where code between two layers relies on a width (a norm over channels, `x.reshape(batch, length, 768)`), channels can
be removed from the layers but not from the activations: the first layer computes fewer outputs and puts zeros in the
places of the others, the second reads the remaining places. The result equals that of masked layers for any code
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Spread:
    """The two buffers of a spread layer; None: that side is ordinary. They follow from a plan, so states omit them.

    `spread_reads`: the places that are read. `spread_writes`: for each place of the output, the index of its computed
    channel; the number of computed channels means zero.
    """

    spread_reads: Tensor | None
    spread_writes: Tensor | None
    channel_dim = -1

    def _read(self, x: Tensor) -> Tensor:
        return x if self.spread_reads is None else x.index_select(self.channel_dim, self.spread_reads)

    def _written(self, y: Tensor) -> Tensor:
        if self.spread_writes is None:
            return y
        zeros = F.pad(y, (0, 0) * (-1 - self.channel_dim) + (0, 1))
        return zeros.index_select(self.channel_dim, self.spread_writes)

    def extra_repr(self) -> str:
        """The layer's own text, and how many channels it reads and computes."""
        text: str = super().extra_repr()  # type: ignore[misc]
        text += "" if self.spread_reads is None else f", reads={self.spread_reads.numel()}"
        return text + ("" if self.spread_writes is None else f", computes={int(self.spread_writes.max())}")


class SpreadLinear(_Spread, nn.Linear):
    """A linear layer whose `in_features` and `out_features` are the widths of the activations."""

    def forward(self, input: Tensor) -> Tensor:
        return self._written(F.linear(self._read(input), self.weight, self.bias))


class _SpreadConv(_Spread):
    """A convolution whose `in_channels` and `out_channels` are the widths of the activations."""

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self
        return self._written(layer._conv_forward(self._read(input), layer.weight, layer.bias))


class SpreadConv1d(_SpreadConv, nn.Conv1d):
    channel_dim = -2


class SpreadConv2d(_SpreadConv, nn.Conv2d):
    channel_dim = -3


class SpreadConv3d(_SpreadConv, nn.Conv3d):
    channel_dim = -4


_FORMS: dict[type[nn.Module], type[Any]] = {
    nn.Linear: SpreadLinear, nn.Conv1d: SpreadConv1d, nn.Conv2d: SpreadConv2d, nn.Conv3d: SpreadConv3d,
}  # fmt: skip


def can_spread(module: nn.Module) -> bool:
    """Whether a layer has such a form: torch's own linear layers and convolutions without groups, of plain weights."""
    return type(module) in _FORMS and "weight" in module._parameters and getattr(module, "groups", 1) == 1


def spread_layer(module: nn.Module, reads: Sequence[int] | None, writes: Sequence[int] | None) -> None:
    """Change a layer whose weight has been made smaller to its spread form, in place.

    `reads`, `writes`: the remaining places of the activations; None: all. Must be called before the layer's numbers of
    channels are set from the smaller weight.
    """
    device = module.get_parameter("weight").device
    places, table = (None if x is None else torch.tensor(x, dtype=torch.long, device=device) for x in (reads, writes))
    if table is not None:
        num_given: int = getattr(module, "out_features", None) or module.out_channels  # type: ignore[assignment]
        given = torch.full((num_given,), len(table), dtype=torch.long, device=device)
        given[table] = torch.arange(len(table), device=device)
        table = given
    module.__class__ = _FORMS[type(module)]
    module.register_buffer("spread_reads", places, persistent=False)
    module.register_buffer("spread_writes", table, persistent=False)


def spread_sides(module: nn.Module) -> tuple[bool, bool]:
    """Whether a layer's inputs, and its outputs, are wider than its weight."""
    if not isinstance(module, _Spread):
        return False, False
    return module.spread_reads is not None, module.spread_writes is not None
