"""`QuantLinear`: a linear layer whose weight stays packed, multiplied by the fastest kernel that supports it.

A kernel may keep the codes in its own order (`kernel_layouts.py`): then `qweight` has that order, and `packed`
restores the usual one. `prepare` chooses the kernel for a device and a type of activations; a layer that moves to
another device is first converted back to the usual order.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsebit.llm.layers.cpu_probe import UNPACKED, probe_cpu
from sparsebit.llm.layers.float_linear import FloatLinear
from sparsebit.llm.layers.kernel_layouts import FRAGMENTS, LAYOUTS, Activations, KernelLayout, Prepared
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.layers.unpacked_product import packed_linear, packed_transposed


class SharedProduct(Protocol):
    """Layers that read one input and are multiplied together; see `parallel_layers.py`."""

    def join(self) -> bool: ...

    def separate(self) -> None: ...

    def product(self, layer: QuantLinear, x: Tensor) -> Tensor | None:
        """The output of the layer without bias; None if it must compute its own."""
        ...


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
    the group of layers that read the same input, if they share a product (`parallel_layers.py`).
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    kernel_scales: Tensor | None
    kernel_offsets: Tensor | None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
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
        self.parallel: SharedProduct | None = None

    @torch.no_grad()
    def prepare(self, dtype: torch.dtype = torch.float32, activations: Activations = "float32") -> None:
        """Choose the kernel for inputs of `dtype` on the device of the weight, and convert the codes to its order.

        `activations`: how far a kernel for CPUs may round them; see `sparsebit.llm.load`. A layer that no kernel
        supports is unpacked while it is multiplied, and `path_reason` has the reason.
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
        x = _in_type_of_autocast(x)
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = _Differentiable.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        return self._product(x)

    def dense_weight(self, dtype: torch.dtype) -> Tensor | None:
        """The whole weight `(out, in)`, if the chosen kernel has a program for that; else None."""
        dense = None if self.path == UNPACKED else LAYOUTS[self.path].dense
        return None if dense is None else dense(self.prepared()).to(dtype)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the input, `gradient (..., out)` times the weight, which is unpacked for this and then
        freed.
        """
        dense = self.dense_weight(gradient.dtype)
        return packed_transposed(gradient, self.packed) if dense is None else gradient @ dense

    def exact_product(self, x: Tensor) -> Tensor:
        """The output for `x`, without kernels that round the input, and without a graph for a backward."""
        if self.path == UNPACKED or LAYOUTS[self.path].dense is None:
            return packed_linear(x, self.packed, self.bias)
        return self._with_bias(self._own_product(x))

    def _product(self, x: Tensor) -> Tensor:
        if self.path == UNPACKED:
            return packed_linear(x, self.packed, self.bias)
        y = None if self.parallel is None else self.parallel.product(self, x)
        return self._with_bias(self._own_product(x) if y is None else y)

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
            layout = FRAGMENTS
        else:
            return None, f"no kernel for {device.type}"
        reason = layout.refusal(self.packed, dtype)
        return (layout, "") if reason is None else (None, reason)

    def prepared(self) -> Prepared:
        """The weight in the order of the chosen kernel."""
        assert self.kernel_scales is not None
        sizes = self.in_features, self.out_features, self.group_size
        return Prepared(self.qweight, self.kernel_scales, self.kernel_offsets, *sizes)

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


def _in_type_of_autocast(x: Tensor) -> Tensor:
    """A float32 `x` in the type that `nn.Linear` uses under autocast, which would otherwise round inside the
    product.
    """
    if x.dtype != torch.float32 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


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
