"""The parameters that a reconstruction learns: rounding and scale of a weight, step size of an activation.

`find_sites` creates them for a block, `in_place` lets them replace the forward of their quantizers during training, and
`store` writes the result into the model. The invariant: after `store`, the ordinary quantizer computes the same values
as the learned one, because the weight holds dequantized codes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.execution.blocks.training import Decay, ParameterGroup
from sparsebit.numerics.fake_quant import dispatch
from sparsebit.numerics.qparams import SMALLEST_SCALE, broadcast_to
from sparsebit.numerics.reference import quantize as codes_of
from sparsebit.numerics.rounding.learned_codes import LearnedCodes, RoundingKind, StartGrid
from sparsebit.quantization.algorithms.layer_visits import (
    has_own_grid,
    is_first_call,
    smallest_scale,
    store_codes,
    why_weight_stays,
)
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.calibrating.model_state import quantizers_of
from sparsebit.quantization.ops.bias import BiasRounding
from sparsebit.quantization.ops.integer_ops import IntegerKernel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer

Unit = Literal["layers", "blocks", "network"]
_DECAYS: dict[RoundingKind, Decay] = {"sigmoid": "constant", "sign": "linear", "latent": "cosine", "none": "constant"}


@dataclass(frozen=True)
class Rates:
    """Learning rates: of the rounding, of the weights' scales, of the activations' step sizes, of biases."""

    rounding: float
    weight_scale: float
    step_size: float
    bias: float


class LearnedWeight:
    """A weight whose codes, and optionally scale, are learned, starting from its current codes.

    `original`: its values in the float model; None if the stored weight is that.
    """

    def __init__(self, layer: WeightedQuantOpr, original: Tensor | None, kind: RoundingKind, learns: bool) -> None:
        self.quantizer, self.weight = layer.weight_quantizer, layer.op.get_parameter("weight")
        self.learns_scale, spec, least = learns, self.quantizer.spec, smallest_scale(layer)
        original = self.weight if original is None else original
        scale, zero_point = (number.detach().clone() for number in self.quantizer.qparams())
        smallest = scale.new_tensor(SMALLEST_SCALE) if least is None else least
        self.present = codes_of(self.weight.detach(), scale, zero_point, spec).to(scale)
        grid = StartGrid(scale, zero_point.round(), spec.qmin, spec.qmax, spec.symmetric, self._wide, smallest)
        self.learned = LearnedCodes(original.detach().to(scale), self.present, grid, kind, learns_scale=learns)

    def groups(self, rates: Rates) -> list[ParameterGroup]:
        learned = self.learned
        rounding = ParameterGroup((learned.v,), rates.rounding, _DECAYS[learned.kind], signed=learned.kind == "sign")
        scales = ParameterGroup(tuple(learned.factors), rates.weight_scale, "cosine", lowest=0.3, highest=2.0)
        return [rounding] * (learned.kind != "none") + [scales] * self.learns_scale

    def __call__(self, x: Tensor) -> Tensor:
        """The current value of the learned weight; `x`, the stored weight, is ignored while the quantizer is on."""
        return self.learned.values().to(x.dtype) if self.quantizer.use_quant else x

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

    def __init__(self, quantizer: Quantizer, settings: Settings, generator: torch.Generator) -> None:
        self.quantizer, self.generator = quantizer, generator
        self.is_learned, self.drop = settings.learn_step_sizes, settings.drop
        self.scale, self.zero_point = (number.detach().clone() for number in quantizer.qparams())
        spec = quantizer.spec
        self.log_factor = torch.zeros_like(self.scale).requires_grad_(self.is_learned)
        # A grid that starts at zero is that of a ReLU's output: its zero point stays fixed.
        moves = self.is_learned and not spec.symmetric and bool((self.zero_point > spec.qmin).all())
        self.shift = torch.zeros_like(self.zero_point).requires_grad_(moves)
        self._drops: Tensor | None = None

    def groups(self, rates: Rates) -> list[ParameterGroup]:
        learned = tuple(p for p in (self.log_factor, self.shift) if p.requires_grad)
        return [ParameterGroup(learned, rates.step_size, "cosine")] if learned else []

    def __call__(self, x: Any) -> Any:
        if not self.quantizer.use_quant or not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        y = dispatch.fake_quantize(x, *self.grid(), self.quantizer.spec, gradient="lsq", tag=self.quantizer.name)
        return torch.where(self._dropped(x), x, y) if self.drop else y

    def _dropped(self, x: Tensor) -> Tensor:
        """A mask of elements that stay in float: a random window of numbers drawn once, because drawing is slow."""
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
class Settings:
    """The settings in which methods differ. `unit`: what is learned at once. `drop`: see `LearnedStep`."""

    unit: Unit
    rounding: RoundingKind
    learn_step_sizes: bool
    learn_weight_scales: bool
    learn_biases: bool
    drop: float
    fisher: bool

    def changed(self, *wishes: Any) -> Settings:
        """These settings with other values, in the order of the fields after `unit`; None keeps a value."""
        pairs = zip(astuple(self)[1:], wishes, strict=True)
        return Settings(self.unit, *(now if wish is None else wish for now, wish in pairs))


@dataclass(frozen=True)
class LearnedSites:
    """Everything that is learned in one block. `biases`: each with the size that its learning rate is relative to."""

    weights: tuple[LearnedWeight, ...]
    steps: tuple[LearnedStep, ...]
    biases: tuple[tuple[nn.Parameter, float], ...]
    were_fitted: bool = False  # whether an earlier algorithm has fitted weights to the same data

    def groups(self, rates: Rates) -> list[ParameterGroup]:
        learned: tuple[LearnedWeight | LearnedStep, ...] = (*self.weights, *self.steps)
        found = [group for site in learned for group in site.groups(rates)]
        return found + [ParameterGroup((bias,), rates.bias * size, "cosine") for bias, size in self.biases]

    def store(self) -> int:
        """Write the learned values into the model; returns how many codes of weights changed."""
        for step in self.steps:
            step.store()
        return sum(weight.store() for weight in self.weights)


def find_sites(
    block: Block, settings: Settings, owners: dict[int, int], floats: FloatParameters, generator: torch.Generator
) -> tuple[LearnedSites, dict[str, str]]:
    """All that can be learned in the block, and for every other quantized weight, by path, why it cannot."""
    reasons: dict[str, str] = {}
    weights: list[LearnedWeight] = []
    steps: dict[Quantizer, LearnedStep] = {}
    biases: list[tuple[nn.Parameter, float]] = []
    were_fitted = False
    for node in block.nodes:
        if node.op != "call_module" or not is_first_call(node):
            continue
        path, layer = str(node.target), block.modules[str(node.target)]
        original = floats.get(f"{path}.op.weight")
        were_fitted |= original is not None
        if isinstance(layer, WeightedQuantOpr) and layer.weight_quantizer.is_enable:
            if reason := why_weight_stays(layer, owners) or _why_unequal(layer.weight_quantizer):
                reasons[path] = reason
            else:
                weights.append(LearnedWeight(layer, original, settings.rounding, settings.learn_weight_scales))
                bias = layer.op._parameters.get("bias")
                if settings.learn_biases and bias is not None and owners[id(bias)] == 1:
                    biases.append((bias, _row_norm(layer)))
        for quantizer in quantizers_of(layer):
            is_site = quantizer.is_enable and quantizer.target == "activation"
            if is_site and quantizer.spec.format == "integer" and has_own_grid(quantizer):
                steps[quantizer] = LearnedStep(quantizer, settings, generator)
    return LearnedSites(tuple(weights), tuple(steps.values()), tuple(biases), were_fitted), reasons


def _why_unequal(quantizer: Quantizer) -> str:
    is_equal = quantizer.spec.format == "integer"
    return "" if is_equal else f"the quantizer {quantizer.TYPE!r} has no grid of equal steps"


def _row_norm(layer: WeightedQuantOpr) -> float:
    """The mean norm of the weight's rows. A bias's learning rate is relative to it, as outputs scale with it."""
    weight = layer.op.get_parameter("weight").detach()
    return float(weight.flatten(1).norm(dim=1).mean()) if weight.ndim > 1 else 1.0


@contextlib.contextmanager
def in_place(sites: LearnedSites, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, quantizers compute with the learned values, and layers with plain fake-quant.

    The simulated integer kernels and the int32 biases are inactive in training mode, which is set on them alone.
    """
    parts = [part for module in modules for part in module.modules()]
    kernels = {part: part.training for part in parts if isinstance(part, (IntegerKernel, BiasRounding))}
    biases = [(bias, bias.requires_grad) for bias, _ in sites.biases]
    learned: tuple[LearnedWeight | LearnedStep, ...] = (*sites.weights, *sites.steps)
    try:
        for site in learned:
            site.quantizer.__dict__["forward"] = site
        for kernel in kernels:
            kernel.training = True
        for bias, _ in biases:
            bias.requires_grad_()
        yield
    finally:
        for site in learned:
            site.quantizer.__dict__.pop("forward", None)
        for kernel, mode in kernels.items():
            kernel.training = mode
        for bias, was_trained in biases:
            bias.requires_grad_(was_trained)
