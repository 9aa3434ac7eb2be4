"""Tiny models and the shortest way to a config and a calibrated model, for the tests of quantization."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.config.schema import QuantConfig
from sparsebit.config.section import put
from sparsebit.numerics import reference
from sparsebit.numerics.qparams import qparams_from_range
from sparsebit.numerics.spec import PerTensor, TensorSpec
from sparsebit.quantization import QuantModel, parse_qconfig
from sparsebit.quantization.quantizers.base import Quantizer

UINT4 = TensorSpec(4, False, PerTensor())


def qconfig(changes: dict[str, Any] | None = None, *, bits: int = 8, backend: str = "virtual") -> QuantConfig:
    """`qconfig({"A.QADD.ENABLE_QUANT": True}, bits=4)`: a sound config on the CPU with some keys changed."""
    values: dict[str, Any] = {
        "BACKEND": backend,
        "DEVICE": "cpu",
        "W": {"QUANTIZER": {"BIT": bits}},
        "A": {"QUANTIZER": {"BIT": bits}},
    }
    for key, value in (changes or {}).items():
        put(values, tuple(key.split(".")), value)
    return parse_qconfig(values)


def prepared(model: nn.Module, batches: Iterable[Any], config: Any = None, **settings: Any) -> QuantModel:
    """A model that has seen the batches; its numbers are computed next, by `calc_qparams` or `init_QAT`."""
    if config is None and "plan" not in settings:
        config = qconfig()
    qmodel = QuantModel(model, config, **settings)
    qmodel.prepare_calibration()
    run(qmodel, batches)
    return qmodel


def calibrated(
    model: nn.Module, batches: Iterable[Any], config: Any = None, *, asym: bool = False, **settings: Any
) -> QuantModel:
    """A calibrated model with quantization on; batches are single tensors, or tuples of positional arguments."""
    qmodel = prepared(model, batches, config, **settings)
    qmodel.calc_qparams(asym=asym)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


@torch.no_grad()
def run(qmodel: nn.Module, batches: Iterable[Any]) -> None:
    for batch in batches:
        qmodel(*batch) if isinstance(batch, tuple) else qmodel(batch)


def sites(qmodel: QuantModel) -> set[str]:
    """The names of all quantizers that are not off for good."""
    return {quantizer.name for quantizer in qmodel.quantizers() if not quantizer.fake_fused}


def site(qmodel: QuantModel, name: str) -> Quantizer:
    return next(quantizer for quantizer in qmodel.quantizers() if quantizer.name == name)


def minmax_quantized(x: Tensor, spec: TensorSpec = UINT4) -> Tensor:
    """`x` on the grid of its own range, by the reference."""
    return reference.fake_quantize(x, *qparams_from_range(x.min(), x.max(), spec), spec)


def simulated(quantizer: Quantizer, x: Tensor) -> Tensor:
    """`x` on the quantizer's grid, by the reference."""
    scale, zero_point = (value.detach() for value in quantizer.qparams())
    return reference.fake_quantize(x, scale, zero_point, quantizer.spec)


def switched_on(quantizer: Quantizer, x: Tensor) -> Quantizer:
    """The quantizer, calibrated on `x`."""
    quantizer.update_observer(x)
    quantizer.calc_qparams()
    quantizer.enable_quant()
    return quantizer


class ConvBnRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.bn.running_mean.normal_()
            self.bn.running_var.uniform_(0.5, 2)
            self.bn.weight.uniform_(0.5, 2)
            self.bn.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class Residual(nn.Module):
    """conv+bn+relu -> (conv + identity) -> relu -> pool -> linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBnRelu()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.bn(self.conv(x)) + x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A transformer block: norms, attention, two residual adds, an MLP; its tokens come from a convolution."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj((q @ k.transpose(-2, -1)).softmax(dim=-1) @ v)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    """An embedding whose weight is that of the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Opaque(nn.Module):
    """Branches on data: torch.fx cannot trace it, and its layers are found one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 1e6:
            return x
        return self.second(torch.tanh(self.first(x)))


class Mixed(nn.Module):
    """Positions are mixed by a mask that all samples share, `(positions, positions)`; then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(mask @ x))).mean(1)


class MaskFirst(Mixed):
    """The same with the mask in front: the first argument has no axis of samples."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, mask)


def masked_batches(*, first: bool, num_batches: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Batches of 4 samples for `MaskFirst` (`first`) or for `Mixed`, with a mask of 5 positions."""
    samples = torch.randn(num_batches, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    return [(torch.eye(5), x) if first else (x, torch.eye(5)) for x in samples]
