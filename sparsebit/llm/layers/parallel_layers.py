"""Packed layers that read the same input (q, k and v; gate and up): one product computes the outputs of all of them.

Each layer stays a separate module, with its name, its state and its files. Its words and scales become views of
tensors that all layers of the group share. The first layer that is called computes the whole product and leaves
the outputs of the others with the group, until they are called with the same input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsebit.llm.layers.kernel_layouts import LAYOUTS, Prepared
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.models.architectures import ARCHITECTURES


def join_parallel_layers(model: nn.Module) -> int:
    """Let packed layers of `model` that read one input share a product, if possible; returns the number of groups.

    The table of architectures lists these layers. A group is not joined if its layers differ in bits, groups or
    zero points, or if no kernel for them supports it. After a move to another device, a group is joined again there.
    `separate_parallel_layers` undoes this.
    """
    separate_parallel_layers(model)
    groups = [ParallelGroup(layers) for layers in _parallel_layers(model)]
    return sum(group.join() for group in groups)


def separate_parallel_layers(model: nn.Module) -> None:
    """Let each packed layer compute its own product again, as training does."""
    for layer in [module for module in model.modules() if isinstance(module, QuantLinear)]:
        group = layer.parallel
        if isinstance(group, ParallelGroup):
            group.separate()
            for member in group.layers:
                member.parallel = None


@dataclass(frozen=True)
class _Answer:
    """The outputs `y` of all layers for the input `x`; bit i of `taken`: layer i has received its output."""

    x: Tensor
    version: int
    y: Tensor
    taken: int


class ParallelGroup:
    """Layers that read one input. `join` and `separate` do not change their outputs."""

    def __init__(self, layers: Sequence[QuantLinear]) -> None:
        self.layers = tuple(layers)
        self._whole: Prepared | None = None
        self._starts: tuple[int, ...] = ()
        self._answer: _Answer | None = None
        for layer in layers:
            layer.parallel = self

    @property
    def is_joined(self) -> bool:
        return self._whole is not None

    @torch.no_grad()
    def join(self) -> bool:
        """Put the weights of the layers side by side, if they are prepared for one kernel and alike."""
        first = self.layers[0]
        join = LAYOUTS[first.path].join if first.path in LAYOUTS else None
        if join is None or len({_kind(layer) for layer in self.layers}) > 1:
            return False
        joined = join([layer.prepared() for layer in self.layers])
        if joined is None:
            return False
        self._answer = None
        self._whole, parts = joined
        widths = [part.scales.shape[1] for part in parts]
        self._starts = tuple(sum(widths[:number]) for number in range(len(parts)))
        for layer, part in zip(self.layers, parts, strict=True):
            layer.qweight, layer.kernel_scales, layer.kernel_offsets = part.words, part.scales, part.offsets
        return True

    @torch.no_grad()
    def separate(self) -> None:
        """Give each layer separate tensors."""
        if self._whole is None:
            return
        self._whole, self._answer = None, None
        for layer in self.layers:
            for name, tensor in list(layer.named_buffers(recurse=False)):
                setattr(layer, name, tensor.clone(memory_format=torch.contiguous_format))

    def product(self, layer: QuantLinear, x: Tensor) -> Tensor | None:
        """The output of `layer`, without bias; None if it must compute its own: with hooks on one of the layers.

        An input that was written to since the first layer read it counts as another input.
        """
        version = _version(x)
        if self._whole is None or version is None or any(map(_is_hooked, self.layers)):
            return None
        number = next(number for number, one in enumerate(self.layers) if one is layer)
        found = self._answer
        if found is None or found.x is not x or found.version != version or found.taken >> number & 1:
            y = LAYOUTS[layer.path].product(x.reshape(-1, layer.in_features), self._whole)
            found = _Answer(x, version, y, 0)
        taken = found.taken | 1 << number
        is_last = taken == (1 << len(self.layers)) - 1
        self._answer = None if is_last else _Answer(x, version, found.y, taken)
        start = self._starts[number]
        return found.y[:, start : start + layer.out_features].reshape(*x.shape[:-1], layer.out_features)


def _version(x: Tensor) -> int | None:
    """How often `x` was written to; None in inference mode, where tensors do not count that.

    torch.compile cannot compare it. There, blocks of known architectures do not write to the input, and layers with
    hooks, which might, compute their own products.
    """
    if torch.compiler.is_compiling():
        return 0
    return None if x.is_inference() else x._version


def _is_hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_pre_hooks or layer._forward_hooks)


def _kind(layer: QuantLinear) -> tuple[object, ...]:
    """The properties that layers of a group must share."""
    scales = layer.kernel_scales
    return (
        layer.path,
        layer.bits,
        layer.group_size,
        layer.in_features,
        layer.kernel_offsets is None,
        layer.qweight.device,
        None if scales is None else scales.dtype,
    )


def _parallel_layers(model: nn.Module) -> Iterator[list[QuantLinear]]:
    row = ARCHITECTURES.get(str(getattr(getattr(model, "config", None), "model_type", "")))
    if row is None or row.stages is None:
        return
    for name, blocks in model.named_modules():
        if not isinstance(blocks, nn.ModuleList) or not f".{name}".endswith(f".{row.blocks}"):
            continue
        for block in blocks:
            parts = dict(block.named_modules())
            for group in row.fused_groups(row.stages):
                layers = [part for part in map(parts.get, group) if isinstance(part, QuantLinear)]
                if len(layers) == len(group):
                    yield layers
