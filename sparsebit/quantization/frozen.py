"""Every quantizer as constants, for as long as a model is exported: what is simulated now is what the file holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.numerics.operator import OPERATOR
from sparsebit.quantization.ops.bias import INT32, BiasRounding
from sparsebit.quantization.ops.quant_opr import QShared, WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer


class FrozenSite(nn.Module):
    """The one fake-quant operator with fixed numbers. `value`: a weight, as the quantizer transforms it (DoReFa)."""

    is_enable = True
    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        name: str,
        scale: Tensor,
        zero_point: Tensor,
        axis: int | None,
        group_size: int,
        qmin: int,
        qmax: int,
        value: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.name, self.axis, self.group_size, self.qmin, self.qmax = name, axis, group_size, qmin, qmax
        self.register_buffer("scale", scale.detach().float())
        self.register_buffer("zero_point", zero_point.detach().float().round())
        self.register_buffer("value", value)

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        x = x if self.value is None else self.value
        return OPERATOR(
            x, self.scale, self.zero_point, self.axis, self.group_size, self.qmin, self.qmax, "ste", self.name
        )

    def summary(self) -> str:
        return f"[{self.qmin}, {self.qmax}]"


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, every enabled quantizer and bias of `model` is a `FrozenSite`; afterwards all is as before."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                site = _frozen_site(parent, child)
                if site is not None and child is not None:
                    swapped.append((parent, name, child))
                    if isinstance(child, Quantizer):
                        child.enable_export_onnx()
        # Only now: a bias is frozen with the numbers of its neighbours.
        sites = [_frozen_site(parent, child) for parent, _, child in swapped]
        for (parent, name, _), site in zip(swapped, sites, strict=True):
            parent._modules[name] = site
        yield
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child
            if isinstance(child, Quantizer):
                child.disable_export_onnx()


def _frozen_site(parent: nn.Module, child: nn.Module | None) -> FrozenSite | None:
    if isinstance(child, Quantizer) and child.is_enable:
        spec = child.spec
        value: Tensor | None = None
        with torch.no_grad():
            if isinstance(parent, WeightedQuantOpr) and child is parent.weight_quantizer:
                weight = parent.op.weight
                assert isinstance(weight, Tensor)
                value = child.transform(weight).detach()
            scale, zero_point = child.qparams()
        granularity = spec.granularity
        return FrozenSite(
            child.name, scale, zero_point, granularity.axis, granularity.size, spec.qmin, spec.qmax, value
        )
    if isinstance(child, QShared) and child.input_quantizer.is_enable:
        owner = child.input_quantizer
        axis, size = owner.spec.granularity.axis, owner.spec.granularity.size
        return FrozenSite(child.name, *owner.qparams(), axis, size, owner.spec.qmin, owner.spec.qmax)
    if isinstance(child, BiasRounding) and child.is_enable:
        scale = child.scale()
        axis = None if scale.numel() == 1 else 0
        return FrozenSite(child.name, scale, torch.zeros_like(scale), axis, 0, *INT32)
    return None
