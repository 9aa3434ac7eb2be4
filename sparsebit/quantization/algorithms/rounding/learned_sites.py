"""The learned parameters of a reconstruction at a quantizer: the rounding of a weight, the step size of an activation.

While they are in place, they replace the quantizer's forward; `store` writes the result into the model, where the
quantizer itself then computes the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.execution.blocks.training import Decay, ParameterGroup
from sparsebit.numerics.fake_quant import dispatch
from sparsebit.numerics.qparams import SMALLEST_SCALE, broadcast_to
from sparsebit.numerics.reference import quantize as codes_of
from sparsebit.numerics.rounding.learned_codes import LearnedCodes, RoundingKind, StartGrid
from sparsebit.quantization.algorithms.layer_visits import is_first_call, store_codes
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.ops.bias import BiasRounding
from sparsebit.quantization.ops.integer_ops import IntegerKernel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer, rounds_by_operator

_DECAYS: dict[RoundingKind, Decay] = {"sigmoid": "constant", "sign": "linear", "latent": "cosine", "none": "constant"}


@dataclass(frozen=True)
class Rates:
    """Learning rates: of the rounding, of the weights' scales, of the activations' step sizes, of biases."""

    rounding: float
    weight_scale: float
    step_size: float
    bias: float


class LearnedWeight:
    """A weight whose rounding, and optionally its scale, is learned. `original`: its float values.

    It starts with the current codes of the weight.
    """

    def __init__(
        self,
        quantizer: Quantizer,
        weight: nn.Parameter,
        original: Tensor,
        kind: RoundingKind,
        *,
        learns_scale: bool,
        smallest_scale: Tensor | None = None,
    ) -> None:
        self.quantizer, self.weight, self.learns_scale = quantizer, weight, learns_scale
        spec = quantizer.spec
        scale, zero_point = (number.detach().clone() for number in quantizer.qparams())
        smallest = scale.new_tensor(SMALLEST_SCALE) if smallest_scale is None else smallest_scale
        self.present = codes_of(weight.detach(), scale, zero_point, spec).to(scale)
        grid = StartGrid(scale, zero_point.round(), spec.qmin, spec.qmax, spec.symmetric, self._wide, smallest)
        self.learned = LearnedCodes(original.detach().to(scale), self.present, grid, kind, learns_scale=learns_scale)

    def groups(self, rates: Rates) -> list[ParameterGroup]:
        learned = self.learned
        decay = _DECAYS[learned.kind]
        rounding = ParameterGroup((learned.v,), rates.rounding, decay, signed=learned.kind == "sign")
        scales = ParameterGroup(tuple(learned.factors), rates.weight_scale, "cosine", lowest=0.3, highest=2.0)
        return [rounding] * (learned.kind != "none") + [scales] * self.learns_scale

    def __call__(self, x: Tensor) -> Tensor:
        """The current value of the learned weight; `x`, the stored weight, is ignored."""
        return self.learned.values().to(x.dtype)

    @torch.no_grad()
    def store(self) -> int:
        """Write codes and scales into the model; returns how many codes differ from the initial ones."""
        scale, zero_point = self.learned.grid()
        codes = (self.learned.steps(scale, zero_point, hard=True) + self._wide(zero_point)).round()
        store_codes(self.quantizer, self.weight, codes, scale, zero_point)
        return int((codes != self.present).sum())

    def _wide(self, number: Tensor) -> Tensor:
        return broadcast_to(number, self.weight.shape, self.quantizer.spec.granularity)


class LearnedStep:
    """The step size of an activation, and on an affine grid its zero point (LSQ+), relative to the initial ones.

    `drop`: in training, the share of the elements that stay in float (QDrop, section 3.3).
    """

    def __init__(self, quantizer: Quantizer, *, is_learned: bool, drop: float, generator: torch.Generator) -> None:
        self.quantizer, self.is_learned, self.drop, self.generator = quantizer, is_learned, drop, generator
        self.scale, self.zero_point = (number.detach().clone() for number in quantizer.qparams())
        spec = quantizer.spec
        self.log_factor = torch.zeros_like(self.scale).requires_grad_(is_learned)
        # A grid that starts at zero is that of a ReLU: its start stays fixed.
        moves = is_learned and not spec.symmetric and bool((self.zero_point > spec.qmin).all())
        self.shift = torch.zeros_like(self.zero_point).requires_grad_(moves)
        self.is_training = True
        self._drops: Tensor | None = None

    def groups(self, rates: Rates) -> list[ParameterGroup]:
        learned = tuple(p for p in (self.log_factor, self.shift) if p.requires_grad)
        return [ParameterGroup(learned, rates.step_size, "cosine")] if learned else []

    def __call__(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        scale, zero_point = self.grid()
        spec = self.quantizer.spec
        y = dispatch.fake_quantize(x, scale, zero_point, spec, gradient="lsq", tag=self.quantizer.name)
        if not self.is_training or not self.drop:
            return y
        return torch.where(self._dropped(x), x, y)

    def _dropped(self, x: Tensor) -> Tensor:
        """A mask of the elements that stay in float: a random window of random numbers, which are drawn once.

        Drawing one number for each element in each step would take as long as the layer.
        """
        size = x.numel()
        if self._drops is None or len(self._drops) < 2 * size:
            self._drops = (torch.rand(2 * size, generator=self.generator) < self.drop).to(x.device)
        start = int(torch.randint(size + 1, (), generator=self.generator))
        return self._drops[start : start + size].view(x.shape)

    def grid(self) -> tuple[Tensor, Tensor]:
        spec = self.quantizer.spec
        if not self.is_learned:
            return self.scale, self.zero_point
        zero_point = self.zero_point + self.shift * (spec.qmax - spec.qmin)
        return self.scale * self.log_factor.exp(), zero_point.clamp(spec.qmin, spec.qmax)

    @torch.no_grad()
    def store(self) -> None:
        if self.is_learned:
            scale, zero_point = self.grid()
            self.quantizer.store_qparams(scale, zero_point.round())


@dataclass(frozen=True)
class Wanted:
    """Switches: which parameters are learned."""

    rounding: RoundingKind
    step_sizes: bool
    weight_scales: bool
    biases: bool


@dataclass(frozen=True)
class Sites:
    """The learned parameters of one block. `biases`: each with the size that its learning rate is relative to."""

    weights: tuple[LearnedWeight, ...]
    steps: tuple[LearnedStep, ...]
    biases: tuple[tuple[nn.Parameter, float], ...]
    were_fitted: bool = False  # by an algorithm before

    def groups(self, rates: Rates) -> list[ParameterGroup]:
        found = [group for weight in self.weights for group in weight.groups(rates)]
        found += [group for step in self.steps for group in step.groups(rates)]
        return found + [ParameterGroup((bias,), rates.bias * size, "cosine") for bias, size in self.biases]

    def store(self) -> int:
        """Write the learned values into the model; returns how many codes of weights changed."""
        for step in self.steps:
            step.store()
        return sum(weight.store() for weight in self.weights)


def find_sites(
    block: Block,
    wanted: Wanted,
    owners: dict[int, int],
    float_parameters: FloatParameters,
    drop: float,
    generator: torch.Generator,
    reasons: dict[str, str],
) -> Sites:
    """The parameters of the block that can be learned; `reasons` collects why a weight cannot.

    A layer that later blocks call again is learned with its first call.
    """
    weights: list[LearnedWeight] = []
    steps: dict[Quantizer, LearnedStep] = {}
    biases: list[tuple[nn.Parameter, float]] = []
    for path, layer in _first_called(block):
        if isinstance(layer, WeightedQuantOpr) and layer.weight_quantizer.is_enable:
            reason = why_not_learned(layer, owners)
            if reason:
                reasons[path] = reason
            else:
                weights.append(_learned_weight(path, layer, wanted, float_parameters))
                bias = layer.op._parameters.get("bias")
                if wanted.biases and bias is not None and owners[id(bias)] == 1:
                    biases.append((bias, _row_norm(layer)))
        for quantizer in layer.modules():
            if isinstance(quantizer, Quantizer) and _has_grid(quantizer):
                steps[quantizer] = LearnedStep(quantizer, is_learned=wanted.step_sizes, drop=drop, generator=generator)
    were_fitted = any(float_parameters.get(f"{path}.op.weight") is not None for path, _ in _first_called(block))
    return Sites(tuple(weights), tuple(steps.values()), tuple(biases), were_fitted)


def why_not_learned(layer: WeightedQuantOpr, owners: dict[int, int]) -> str:
    """The reason why the layer's weight is not learned; empty if it is."""
    weight, quantizer = layer.op._parameters.get("weight"), layer.weight_quantizer
    if is_parametrized(layer.op) or weight is None:
        return "its weight is computed (pruning, a norm of the weight)"
    if owners.get(id(weight), 1) > 1:
        return "its weight belongs to several layers"
    if not rounds_by_operator(quantizer) or type(quantizer).transform is not Quantizer.transform:
        return f"the quantizer {quantizer.TYPE!r} rounds in its own way"
    if quantizer.spec.format != "integer" or not _stores_scale(quantizer):
        return f"the quantizer {quantizer.TYPE!r} has no grid of equal steps with a scale of its own"
    return ""


def _first_called(block: Block) -> Iterator[tuple[str, nn.Module]]:
    seen: set[int] = set()
    modules = block.modules
    for node in block.nodes:
        if node.op == "call_module" and id(modules[str(node.target)]) not in seen:
            seen.add(id(modules[str(node.target)]))
            if is_first_call(node):
                yield str(node.target), modules[str(node.target)]


def _learned_weight(
    path: str, layer: WeightedQuantOpr, wanted: Wanted, float_parameters: FloatParameters
) -> LearnedWeight:
    weight, original = layer.op.get_parameter("weight"), float_parameters.get(f"{path}.op.weight")
    smallest, bias = None, layer.stored_bias()
    for rounding, _ in layer.arithmetics:
        if bias is not None and rounding is not None:  # twice the room, because the bias may be learned
            least = 2 * rounding.smallest_scale(bias)
            smallest = least if smallest is None else torch.maximum(smallest, least)
    return LearnedWeight(
        layer.weight_quantizer,
        weight,
        weight if original is None else original,
        wanted.rounding,
        learns_scale=wanted.weight_scales,
        smallest_scale=smallest,
    )


def _row_norm(layer: WeightedQuantOpr) -> float:
    """How strongly an output changes with its inputs: a bias's learning rate is relative to it."""
    weight = layer.op.get_parameter("weight").detach()
    return float(weight.flatten(1).norm(dim=1).mean()) if weight.ndim > 1 else 1.0


def _has_grid(quantizer: Quantizer) -> bool:
    return (
        quantizer.is_enable
        and quantizer.target == "activation"
        and quantizer.spec.format == "integer"
        and rounds_by_operator(quantizer)
        and type(quantizer).transform is Quantizer.transform
        and _stores_scale(quantizer)
    )


def _stores_scale(quantizer: Quantizer) -> bool:
    return {"scale", "zero_point"} <= {*quantizer._parameters, *quantizer._buffers}


@contextlib.contextmanager
def in_place(sites: Sites, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the quantizers compute with the learned values, and layers as in training: with plain fake-quant
    instead of a runtime's integer arithmetic, which has no gradient.
    """
    parts = [part for module in modules for part in module.modules()]
    kernels = [part for part in parts if isinstance(part, (IntegerKernel, BiasRounding))]
    modes = [kernel.training for kernel in kernels]
    biases = [(bias, bias.requires_grad) for bias, _ in sites.biases]
    learned: dict[Quantizer, Any] = {site.quantizer: site for site in sites.weights}
    learned.update({site.quantizer: site for site in sites.steps})
    try:
        for quantizer, site in learned.items():
            quantizer.__dict__["forward"] = site
        for kernel in kernels:
            kernel.training = True
        for bias, _ in biases:
            bias.requires_grad_()
        yield
    finally:
        for quantizer in learned:
            quantizer.__dict__.pop("forward", None)
        for kernel, mode in zip(kernels, modes, strict=True):
            kernel.training = mode
        for bias, was_trained in biases:
            bias.requires_grad_(was_trained)
