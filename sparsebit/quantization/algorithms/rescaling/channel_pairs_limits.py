"""Statistics of data for pairs of layers: the range of each channel, and how far a channel may be scaled.

A clip (ReLU6) between source and readers is not homogeneous: `min(x / s, 6) * s` equals `min(x, 6)` only if neither
clips. So channels that it clips on the data keep their scale, and the others get a lower bound for their factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.execution.distributed import gather
from sparsebit.numerics.layer_channels import num_dims
from sparsebit.quantization.algorithms.rescaling.channel_pairs import ChannelPair


class ChannelValues:
    """The smallest and largest value of each channel, `(channels,)`, over batches; `count`: how many, on average."""

    def __init__(self, low: Tensor, high: Tensor, count: float = 0.0) -> None:
        self.low, self.high, self.count = low, high, count

    @classmethod
    def of(cls, num_channels: int, device: torch.device) -> ChannelValues:
        """Statistics without any value yet."""
        blank = torch.full((num_channels,), torch.inf, dtype=torch.float64, device=device)
        return cls(blank, -blank)

    def add(self, x: Tensor, labels: Tensor) -> None:
        """`labels`: the channel of each value, -1 for none, in the shape of `x`."""
        self.count += x.numel() / max(len(self.low), 1)
        axes = [axis for axis in range(labels.ndim) if labels.stride(axis) and labels.shape[axis] > 1]
        low = high = x
        if len(axes) == 1 and x.numel() and x.ndim > 1:  # the usual case: labels along one axis
            others = tuple(axis for axis in range(x.ndim) if axis != axes[0])
            low, high = x.amin(others), x.amax(others)
            for axis in reversed(others):
                labels = labels.select(axis, 0)
        places, is_ours = labels.reshape(-1).long(), labels.reshape(-1) >= 0
        for found, values, how in ((self.low, low, "amin"), (self.high, high, "amax")):
            found.scatter_reduce_(0, places[is_ours], values.reshape(-1)[is_ours].double(), how)

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of each channel; 0 for a channel without values."""
        return torch.maximum(self.high, -self.low).nan_to_num(0.0, 0.0, 0.0).clamp_min(0)

    @property
    def surely_lowest(self) -> Tensor:
        """A bound that new values hardly ever fall below: the lowest value minus three mean gaps between the values.

        With few values, the next one may well be lower than all; with a thousand, the gap is negligible.
        """
        return self.low - (self.high - self.low) * 3 / max(self.count - 1, 1)

    def merged(self) -> ChannelValues:
        """The statistics of all processes together."""
        parts = gather((self.low.cpu(), self.high.cpu(), self.count))
        low = torch.stack([part[0] for part in parts]).amin(0)
        high = torch.stack([part[1] for part in parts]).amax(0)
        return ChannelValues(low.to(self.low.device), high.to(self.low.device), sum(part[2] for part in parts))


@dataclass(frozen=True)
class ScaleLimits:
    """`is_free`: channels that may be scaled. `smallest`: the lower bound of their factor, `(channels,)`."""

    is_free: Tensor
    smallest: Tensor
    reason: str = ""


class SeenValues:
    """A callback for runs of the float model: records the inputs of the clips of `pairs`, and of certain readers.

    `readers_of`: the pairs whose readers' inputs are recorded.
    """

    def __init__(self, pairs: Iterable[ChannelPair], readers_of: Iterable[ChannelPair]) -> None:
        self._clips: dict[tuple[str, fx.Node], ChannelValues] = {}
        self._inputs: dict[str, ChannelValues] = {}
        self._watched: dict[fx.Node, list[tuple[ChannelValues, Tensor]]] = {}
        for pair in pairs:
            for clip in pair.clips:
                values = ChannelValues.of(pair.num_channels, pair.is_free.device)
                self._clips[pair.name, clip.node] = values
                self._watched.setdefault(clip.node.all_input_nodes[0], []).append((values, clip.labels))
        for pair in readers_of:
            values = self._inputs[pair.name] = ChannelValues.of(pair.num_channels, pair.is_free.device)
            for reader in pair.readers:  # labels along the last axes, in a form that broadcasts to the value's shape
                labels = reader.channels.reshape(-1, *([1] * num_dims(reader.layer)))
                self._watched.setdefault(reader.node.all_input_nodes[0], []).append((values, labels))

    def __call__(self, node: fx.Node, value: Any) -> None:
        for values, labels in self._watched.get(node, ()):
            values.add(value, _fitted(labels, value))

    def inputs(self, pair: ChannelPair) -> ChannelValues | None:
        """The inputs of the pair's readers, per channel; None if they were not watched."""
        return self._inputs[pair.name].merged() if pair.name in self._inputs else None

    def limits(self, pair: ChannelPair, *, has_data: bool = True) -> ScaleLimits:
        """How far the channels may be scaled without any clip between the layers clipping more or less."""
        is_free, reasons = pair.is_free.clone(), []
        smallest = torch.zeros(pair.num_channels, dtype=torch.float64, device=is_free.device)
        for clip in pair.clips:
            if not (clip.low <= 0 <= clip.high) or not has_data:
                is_free[:] = False
                reasons.append(f"{clip.node.name} clips" + (" to numbers without zero" if has_data else ": give data"))
                continue
            values = self._clips[pair.name, clip.node].merged()
            is_clipped = values.high > clip.high
            smallest = torch.maximum(smallest, values.high / clip.high)
            if clip.low < 0:
                is_clipped |= values.low < clip.low
                smallest = torch.maximum(smallest, values.low / clip.low)
            if bool((is_clipped & is_free).any()):
                reasons.append(f"{clip.node.name} clips {int(is_clipped.sum())} channels on the data")
            is_free &= ~is_clipped
        return ScaleLimits(is_free, smallest.nan_to_num(0.0, 0.0, 0.0), "; ".join(reasons))


def _fitted(labels: Tensor, value: Tensor) -> Tensor:
    """Labels of one batch for the values of another, whose size may differ along axes that labels do not depend on."""
    if labels.ndim == value.ndim:
        for axis in range(labels.ndim):
            if labels.shape[axis] != value.shape[axis]:
                labels = labels.narrow(axis, 0, 1)
    return labels.expand(value.shape)
