"""A linear layer or convolution as a matrix product: its weight as `(groups, rows, columns)`, its input as patches.

Methods that need second moments of a layer's input (GPTQ, SparseGPT) treat every layer, grouped and transposed
convolutions included, in this one form:
`output[group, position, row] = sum over columns of patches[group, position, column] * weight[group, row, column]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

# Elements of one chunk of patches: 64 MiB in float32. A single sample may exceed it.
_CHUNK = 16 << 20
# Elements of the second moments of one layer: 200 MB in float64. GPTQ holds about 16 such matrices.
_MOST_MOMENTS = 5000**2
_LINEAR = (nn.Linear.forward,)
_CONV = (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
_TRANSPOSED = (nn.ConvTranspose1d.forward, nn.ConvTranspose2d.forward, nn.ConvTranspose3d.forward)


@dataclass(frozen=True)
class LayerMatrix:
    """How one layer's weight and input become matrices; made by `layer_matrix`.

    The weight's columns are its input channels times kernel positions, in the order of the weight's memory. With
    `parts`, the columns of each group are divided into that many separate groups, and the layer's output is the sum of
    theirs: second moments between two parts are ignored.
    """

    groups: int
    num_dims: int  # of the images; 0 of a linear layer
    out_axis: int  # of the weight's output channels: 1 of a transposed convolution
    unfold: Callable[[Tensor], Tensor]
    parts: int = 1

    def in_parts(self, weight: Tensor, multiple: int = 1) -> LayerMatrix:
        """The same, in as many parts as needed to keep second moments small: one, except for very wide layers.

        A part has a multiple of `multiple` columns, and is not far smaller than necessary. If columns cannot be
        divided so, there is one part.
        """
        groups, _, columns = self.matrix(weight).shape
        needed = -(-groups * columns**2 // _MOST_MOMENTS)
        fitting = (n for n in range(needed, 4 * needed) if columns % n == 0 and columns // n % multiple == 0)
        return replace(self, parts=self.parts * next(fitting, 1)) if needed > 1 else self

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight, or a tensor that belongs to it element by element, as `(groups, rows, columns)`."""
        if self.out_axis == 0:
            return self._parted(weight.reshape(self.groups, weight.shape[0] // self.groups, -1))
        split = weight.reshape(self.groups, weight.shape[0] // self.groups, *weight.shape[1:])
        return self._parted(split.transpose(1, 2).flatten(2))

    def weight(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `matrix`, in the weight's shape."""
        matrix = torch.unflatten(matrix, 0, (self.groups, self.parts)).transpose(1, 2)
        if self.out_axis == 0:
            return matrix.reshape(shape)
        split = matrix.reshape(self.groups, shape[1], shape[0] // self.groups, *shape[2:])
        return split.transpose(1, 2).reshape(shape)

    def outputs(self, per_row: Tensor) -> Tensor:
        """Sums over the rows of each output channel; `per_row`: `(groups, rows)`."""
        return torch.unflatten(per_row, 0, (self.groups, self.parts)).sum(1).flatten()

    def num_rows(self, x: Tensor) -> int:
        """How many positions the input has, over all samples."""
        if self.num_dims == 0:
            return x.numel() // max(x.shape[-1], 1)
        x = x[None] if x.ndim == self.num_dims + 1 else x
        return len(x) * int(torch.Size(self.unfold(x[:1]).shape[2 : 2 + self.num_dims]).numel()) if len(x) else 0

    def patches(self, x: Tensor, step: int = 1) -> Iterator[Tensor]:
        """The input in chunks of `(groups, positions, columns)`, so that large images stay within bounded memory.

        `step`: one of every `step` positions, drawn with a fixed seed: a regular stride would select the same token
        of each sentence, or the same column of each image.
        """
        if self.num_dims == 0:
            rows = x.reshape(-1, x.shape[-1])
            rows = rows[drawn_positions(len(rows), step, rows.device)] if step > 1 else rows
            for part in rows.split(max(_CHUNK // max(rows.shape[1], 1), 1)):
                yield self._parted(part[None])
            return
        if x.ndim == self.num_dims + 1:  # an unbatched image
            x = x[None]
        if not len(x):
            return
        first = self._grouped(x[:1], step)
        yield first
        for part in x[1:].split(max(_CHUNK // max(first.numel(), 1), 1)) if len(x) > 1 else ():
            yield self._grouped(part, step)

    def _grouped(self, x: Tensor, step: int) -> Tensor:
        """`(n, channels, *positions, *kernel)` as `(groups, n * positions, channels / groups * kernel)`."""
        windows = self.unfold(x)
        num_dims = self.num_dims
        if step > 1:
            sizes = (len(windows), *windows.shape[2 : 2 + num_dims])
            sample, *place = torch.unravel_index(drawn_positions(torch.Size(sizes).numel(), step, x.device), sizes)
            chosen = windows.movedim(1, 1 + num_dims)[(sample, *place)]  # (chosen, channels, *kernel): a copy
            return self._parted(chosen.reshape(len(chosen), self.groups, -1).transpose(0, 1))
        windows = torch.unflatten(windows, 1, (self.groups, -1))  # (n, groups, channels, *positions, *kernel)
        order = (1, 0, *range(3, 3 + num_dims), 2, *range(3 + num_dims, 3 + 2 * num_dims))
        columns = windows.shape[2] * int(torch.Size(windows.shape[3 + num_dims :]).numel())
        return self._parted(windows.permute(order).reshape(self.groups, -1, columns))

    def _parted(self, matrix: Tensor) -> Tensor:
        """`(groups, any, columns)` with a group for each part of the columns."""
        if self.parts == 1:
            return matrix
        return torch.unflatten(matrix, 2, (self.parts, -1)).transpose(1, 2).flatten(0, 1)


def drawn_positions(count: int, step: int, device: torch.device) -> Tensor:
    """One of every `step` of this many positions: the same ones for the same count."""
    starts = torch.arange(0, count, step)
    offsets = torch.randint(step, starts.shape, generator=torch.Generator().manual_seed(count))
    return (starts + offsets).clamp(max=count - 1).to(device)


def layer_matrix(layer: nn.Module) -> LayerMatrix | None:
    """The matrix form of a linear layer, a convolution or a transposed one; None for any other layer.

    A subclass with its own forward may use its weight in another way, so it has none.
    """
    forward: Any = type(layer).forward
    if "forward" in layer.__dict__:
        return None
    if isinstance(layer, nn.Linear) and forward in _LINEAR:
        return LayerMatrix(1, 0, 0, lambda x: x)
    if isinstance(layer, _ConvTransposeNd) and forward in _TRANSPOSED:
        return LayerMatrix(layer.groups, len(layer.kernel_size), 1, lambda x: _transposed_windows(layer, x))
    if isinstance(layer, _ConvNd) and forward in _CONV:
        return LayerMatrix(layer.groups, len(layer.kernel_size), 0, lambda x: _windows_of(layer, x))
    return None


def _windows_of(layer: _ConvNd, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padding = layer._reversed_padding_repeated_twice  # counted also for padding="same" and "valid"
    x = F.pad(x, padding, mode=mode) if any(padding) else x
    return _windows(x, layer.kernel_size, layer.stride, layer.dilation)


def _transposed_windows(layer: _ConvTransposeNd, x: Tensor) -> Tensor:
    """A transposed convolution reads its input with `stride - 1` zeros in between, and the kernel mirrored."""
    num_dims = len(layer.kernel_size)
    spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)))
    every: list[slice] = [slice(None), slice(None), *(slice(None, None, step) for step in layer.stride)]
    spread[tuple(every)] = x
    padding: list[int] = []
    for dim in reversed(range(num_dims)):
        border = layer.dilation[dim] * (layer.kernel_size[dim] - 1) - int(layer.padding[dim])
        padding += [border, border + layer.output_padding[dim]]  # a negative border crops
    windows = _windows(F.pad(spread, padding), layer.kernel_size, (1,) * num_dims, layer.dilation)
    return windows.flip(tuple(range(-num_dims, 0)))


def _windows(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """`(n, channels, *positions, *kernel)`: a view."""
    for dim, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + dim, gap * (size - 1) + 1, step)[..., ::gap]
    return x
