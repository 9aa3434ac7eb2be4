"""`QuantLinear`: a linear layer whose weight stays packed, multiplied by the fastest kernel that supports it.

A kernel may keep the codes in its own order (`kernel_layouts.py`): then `qweight` has that order, and `packed`
restores the usual one. `prepare` chooses the kernel for a device and a type of activations; a layer that moves to
another device is first converted back to the usual order.

One product may compute the outputs of layers that read the same input (q, k and v; gate and up; `ParallelGroup`). Each
stays a separate module, with its name, its state and its files; its words and scales become views of tensors that all
layers of the group share. The first layer that is called computes the whole product and leaves the outputs of the
others with the group, until they are called with the same input.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebit.llm.layers.cpu_probe import UNPACKED, probe_cpu
from sparsebit.llm.layers.float_weight import FloatLinear
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.layers.kernel_layouts import FRAGMENTS, INTEGERS, LAYOUTS, Activations, KernelLayout, Prepared
from sparsebit.llm.layers.packed_weight import PackedWeight, packed_linear, packed_transposed
from sparsebit.llm.models.architectures import known_row


def outside_autocast(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """The backward of a Function, called outside of autocast, which would change the types of its products."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, gradient: Tensor) -> Any:
        device = gradient.device.type
        if not torch.is_autocast_enabled(device):
            return backward(ctx, gradient)
        with torch.autocast(device, enabled=False):
            return backward(ctx, gradient)

    return wrapped


class QuantLinear(nn.Module):
    """`x @ weight.T + bias` with `weight = (codes - zeros) * scales`, kept as `qweight`, `scales` and `zeros`.

    Buffers: `qweight (out, words)` int32, `scales (out, groups)`, `zeros (out, groups)` uint8 or None if symmetric.
    `prepare` converts `qweight` to the order of a kernel; `path` names that kernel, or is "unpacked", and `path_reason`
    is the reason why no kernel was chosen. Files and `packed` always have the order of `PackedWeight`. `parallel`:
    the group of layers that read the same input, if they share a product (`ParallelGroup`). `inputs`: how the input is
    rounded, if it is; on a GPU, int8 codes of input and weight are then multiplied as whole numbers.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    kernel_scales: Tensor | None
    kernel_offsets: Tensor | None

    def __init__(
        self, packed: PackedWeight, bias: Tensor | None = None, *, inputs: InputRounding | None = None
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.bits, self.group_size = packed.bits, packed.group_size
        self.register_buffer("qweight", packed.qweight)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("zeros", packed.zeros)
        self.register_buffer("kernel_scales", None, persistent=False)
        self.register_buffer("kernel_offsets", None, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.path, self.path_reason = UNPACKED, "not prepared"
        self._wish: tuple[torch.dtype, Activations] | None = None
        self.parallel: ParallelGroup | None = None

    @torch.no_grad()
    def prepare(self, dtype: torch.dtype = torch.float32, activations: Activations = "float32") -> None:
        """Choose the kernel for inputs of `dtype` and convert the codes to its order, or set `path_reason` if there is
        none. `activations`: how far a kernel for CPUs may round them; see `sparsebit.llm.load`.
        """
        self._restore()
        self._wish = dtype, activations
        layout, reason = self._choice(dtype, activations)
        if layout is None:
            self.path, self.path_reason = UNPACKED, reason
            return
        ready = layout.prepare(self.packed, dtype)
        self.path, self.path_reason = layout.name, ""
        self.qweight, self.kernel_scales, self.kernel_offsets = ready.words, ready.scales, ready.offsets
        if self.parallel is not None:
            self.parallel.join()

    @property
    def packed(self) -> PackedWeight:
        if self.path == UNPACKED:
            return PackedWeight(self.qweight, self.scales, self.zeros, self.bits, self.group_size, self.in_features)
        codes = LAYOUTS[self.path].codes(self.prepared())
        return PackedWeight.from_codes(codes, self.scales, self.zeros, self.bits)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if x.dtype == torch.float32 and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))  # as nn.Linear; autocast would round inside the product
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        if self.inputs is not None and (needs_gradient or self.path != INTEGERS.name):
            x = self.inputs(x)
        if needs_gradient:
            y: Tensor = _Differentiable.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        if self.path == UNPACKED:
            return packed_linear(x, self.packed, self.bias)
        shared = None if self.parallel is None else self.parallel.product(self, x)
        return self._with_bias(self._own_product(x) if shared is None else shared)

    def dense_weight(self, dtype: torch.dtype) -> Tensor | None:
        """The whole weight `(out, in)`, if the chosen kernel has a program for that; else None."""
        dense = None if self.path == UNPACKED else LAYOUTS[self.path].dense
        return None if dense is None else dense(self.prepared()).to(dtype)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, `gradient (..., out)` times the weight, unpacked for this and then freed."""
        dense = self.dense_weight(gradient.dtype)
        return packed_transposed(gradient, self.packed) if dense is None else gradient @ dense

    def exact_product(self, x: Tensor) -> Tensor:
        """The output for `x`, without kernels that round the input, and without a graph for a backward."""
        if self.path == UNPACKED or LAYOUTS[self.path].dense is None:
            return packed_linear(x, self.packed, self.bias)
        return self._with_bias(self._own_product(x))

    def _own_product(self, x: Tensor) -> Tensor:
        """The product of only this layer, by the chosen kernel."""
        rows = x.reshape(-1, self.in_features)
        return LAYOUTS[self.path].product(rows, self.prepared()).reshape(*x.shape[:-1], self.out_features)

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        kind = "symmetric" if self.zeros is None else "asymmetric"
        shape = f"{self.in_features}, {self.out_features}"
        return f"{shape}, bits={self.bits}, group_size={self.group_size}, {kind}, {self.path}"

    def _choice(self, dtype: torch.dtype, activations: Activations) -> tuple[KernelLayout | None, str]:
        device = self.qweight.device
        if device.type == "cpu":
            layout = probe_cpu(activations).layout
            if layout is None:
                return None, f"the fastest way here with {activations} activations"
        elif device.type == "cuda":
            layout = INTEGERS if self._multiplies_codes() else FRAGMENTS
        else:
            return None, f"no kernel for {device.type}"
        reason = layout.refusal(self.packed, dtype)
        return (layout, "") if reason is None else (None, reason)

    def _multiplies_codes(self) -> bool:
        """Whether the input has int8 codes without zero points, and the weight has 8 bits."""
        found = None if self.inputs is None else self.inputs.format
        return found is not None and found.kind == "int8" and found.symmetric and self.bits == 8

    def prepared(self) -> Prepared:
        """The weight in the order of the chosen kernel."""
        assert self.kernel_scales is not None
        sizes = self.in_features, self.out_features, self.group_size
        return Prepared(self.qweight, self.kernel_scales, self.kernel_offsets, *sizes, self.inputs)

    def _restore(self) -> None:
        """Convert the codes back to the order of `PackedWeight`."""
        if self.parallel is not None:
            self.parallel.separate()
        if self.path != UNPACKED:
            self.qweight = self.packed.qweight
            self.kernel_scales = self.kernel_offsets = None
            self.path, self.path_reason = UNPACKED, "not prepared"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Another device or type may need another kernel."""
        self._restore()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._wish is not None and not self.qweight.is_meta:
            dtype, activations = self._wish
            # What becomes of inputs, whose type need not be that of the scales.
            self.prepare(fn(torch.empty(0, dtype=dtype)).dtype, activations)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.path != UNPACKED:
            destination[f"{prefix}qweight"] = self.packed.qweight

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._restore()
        super()._load_from_state_dict(*args, **kwargs)
        if self._wish is not None:
            self.prepare(*self._wish)


class _Differentiable(torch.autograd.Function):
    """The product of a layer. For the backward it keeps the layer, whose weight is packed, and no dense weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantLinear) -> Tensor:
        ctx.layer = layer
        return layer.exact_product(x)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer: QuantLinear = ctx.layer
        return layer.input_gradient(gradient), None


def kernel_paths(model: nn.Module) -> dict[str, int]:
    """How many layers of the model are multiplied by which kernel; an unpacked one is listed with its reason."""
    layers = [module for module in model.modules() if isinstance(module, QuantLinear | FloatLinear)]
    return dict(Counter(f"{one.path} ({one.path_reason})" if one.path_reason else one.path for one in layers))


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared ones count once, those without memory (meta device) not at all."""
    every = [*model.parameters(), *model.buffers()]
    found = {tensor.data_ptr(): tensor.nbytes for tensor in every if not tensor.is_meta}
    return sum(found.values())


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
        if layer.parallel is not None:
            layer.parallel.separate()
            for member in layer.parallel.layers:
                member.parallel = None


class ParallelGroup:
    """Layers that read one input. `join` and `separate` do not change their outputs."""

    def __init__(self, layers: Sequence[QuantLinear]) -> None:
        self.layers = tuple(layers)
        self._whole: Prepared | None = None
        self._starts: tuple[int, ...] = ()
        # For an input and its version: the outputs of all layers; bit i of the last: layer i has received its output.
        self._answer: tuple[Tensor, int, Tensor, int] | None = None
        for layer in layers:
            layer.parallel = self

    @torch.no_grad()
    def join(self) -> bool:
        """Put the weights of the layers side by side, if they are prepared for one kernel and alike."""
        first = self.layers[0]
        join = LAYOUTS[first.path].join if first.path in LAYOUTS else None
        if join is None or len({_kind(layer) for layer in self.layers}) > 1 or first.inputs is not None:
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
        """The layer's output without bias; None if a layer has hooks. An input written to is another input."""
        version = _version(x)
        hooks = [one._forward_pre_hooks or one._forward_hooks for one in self.layers]
        if self._whole is None or version is None or any(hooks):
            return None
        number = next(number for number, one in enumerate(self.layers) if one is layer)
        found = self._answer
        if found is None or found[0] is not x or found[1] != version or found[3] >> number & 1:
            found = x, version, LAYOUTS[layer.path].product(x.reshape(-1, layer.in_features), self._whole), 0
        y, taken = found[2], found[3] | 1 << number
        self._answer = None if taken == (1 << len(self.layers)) - 1 else (x, version, y, taken)
        start = self._starts[number]
        return y[:, start : start + layer.out_features].reshape(*x.shape[:-1], layer.out_features)


def _version(x: Tensor) -> int | None:
    """How often `x` was written to; None in inference mode. torch.compile cannot compare it: there, blocks of known
    architectures do not write to the input, and layers with hooks, which might, compute their own products.
    """
    if torch.compiler.is_compiling():
        return 0
    return None if x.is_inference() else x._version


def _kind(layer: QuantLinear) -> tuple[object, ...]:
    """The properties that layers of a group must share."""
    dtype = None if layer.kernel_scales is None else layer.kernel_scales.dtype
    sizes = layer.path, layer.bits, layer.group_size, layer.in_features
    return (*sizes, layer.kernel_offsets is None, layer.qweight.device, dtype, layer.inputs)


def _parallel_layers(model: nn.Module) -> Iterator[list[QuantLinear]]:
    row = known_row(model)
    groups = () if row is None or row.stages is None else row.fused_groups(row.stages)
    for name, blocks in model.named_modules():
        if row is None or not isinstance(blocks, nn.ModuleList) or not f".{name}".endswith(f".{row.blocks}"):
            continue
        for block, group in itertools.product(blocks, groups):
            layers = [part for part in map(dict(block.named_modules()).get, group) if isinstance(part, QuantLinear)]
            if len(layers) == len(group):
                yield layers
