"""`fold_norms`: folds batch norms into quantized layers, without changing the integers of their weights.

The last step of batch-norm tuning: quantized weights and activations shift the statistics that batch norms were trained
with, a few forwards re-estimate them (Sun et al., "Hybrid 8-bit Floating Point Training and Inference for Deep Neural
Networks", 2019), and then the norm's factor per channel goes into the weight's scale per channel. `graph/passes` folds
norms of float models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.deploy.runtimes import PROFILES
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.passes.fold_batchnorm import can_fold, fold_factor, fold_into
from sparsebit.graph.rewriting.patterns import Match, MatchingNode
from sparsebit.graph.rewriting.rewrite import ReplacePatternBase
from sparsebit.numerics.qparams import SMALLEST_SCALE, broadcast_to
from sparsebit.numerics.spec import scale_shape
from sparsebit.quantization.building.attach_integer_ops import attach_integer_ops, make_room_for_biases
from sparsebit.quantization.calibrating.runner import calibrate_weight
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.ops.quant_opr import QuantOpr, WeightedQuantOpr
from sparsebit.quantization.planning.sites import layer_name
from sparsebit.quantization.quantizers.base import Quantizer, rounds_by_operator

log = logging.getLogger(__name__)

# (name of the layer, layer, norm after it) -> whether the norm works on the layer's output channels.
MayFold = Callable[[str, nn.Module, _BatchNorm], bool]


def fold_norms(qmodel: SimulatedModel, may_fold: MayFold) -> None:
    """Fold batch norms into the quantized layers before them, and attach the layers' integer arithmetic again."""
    for path, region in qmodel.built.captured.regions.items():
        _FoldQuantized(path, may_fold, qmodel.built.folded_layers).apply(region.graph_module)
    attach_integer_ops(qmodel.built.captured, PROFILES[qmodel.config.BACKEND])
    make_room_for_biases(qmodel.model)


class _FoldQuantized(ReplacePatternBase):
    nodes = (
        MatchingNode("layer", types=(WeightedQuantOpr,)),
        MatchingNode("norm", types=(_BatchNorm, QuantOpr), inputs=("layer",)),
    )

    def __init__(self, path: str, may_fold: MayFold, folded: list[str]) -> None:
        super().__init__()
        self.path, self.may_fold, self.folded = path, may_fold, folded

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        layer, norm = (module_of(match[name], graph_module) for name in ("layer", "norm"))
        assert isinstance(layer, WeightedQuantOpr)
        norm = norm.op if isinstance(norm, QuantOpr) and isinstance(norm.op, nn.Module) else norm
        name = layer_name(self.path, match["layer"])
        if not isinstance(norm, _BatchNorm) or not can_fold(layer.op, norm) or not self.may_fold(name, layer.op, norm):
            return {}
        calls = [node for node in graph_module.graph.nodes if node.target == match["layer"].target]
        owners = [p for module in graph_module.modules() for p in module._parameters.values() if p is layer.op.weight]
        if len(match["layer"].users) != 1 or len(calls) != 1 or len(owners) != 1:
            return {}
        quantizer, factor = layer.weight_quantizer, fold_factor(norm)
        if not quantizer.fake_fused:
            quantizer.prepare_folding(layer.op.get_parameter("weight"))
        fold_into(layer.op, norm)  # replaces the weight by a new parameter
        weight = layer.op.get_parameter("weight")
        if not quantizer.fake_fused and not rescale(quantizer, weight, layer.row.channel_axis, factor):
            calibrate_weight(layer)
        self.folded.append(name)
        return {"norm": match["layer"]}


@torch.no_grad()
def rescale(quantizer: Quantizer, weight: Tensor, channel_axis: int, factor: Tensor) -> bool:
    """Rescale the grid of a weight whose output channels were multiplied by `factor` (out,): the codes do not change.

    So the trained codes, with which the statistics were estimated, are those that run. A negative factor mirrors a
    channel's codes. On a symmetric grid the lowest code (-128) has no mirror image: it becomes the highest (127), and
    values that were clipped at 127 must become -127, not -128, so the weight is clamped. False if the grid cannot be
    rescaled: one scale for all channels, or a quantizer with its own arithmetic.
    """
    spec = quantizer.spec
    shape = scale_shape(weight.shape, spec.granularity)  # () or (out,), or the scale's shape of a weight in groups
    place = channel_axis if len(shape) > 1 else 0
    if not quantizer.is_calibrated or not rounds_by_operator(quantizer) or not shape or shape[place] != len(factor):
        if quantizer.is_calibrated and any(True for _ in quantizer.parameters()):
            remedy = "is calibrated again; set W.QSCHEME: per-channel-symmetric to keep what was trained"
            log.warning("%s: its learned scale cannot absorb a factor per channel, and %s", quantizer.name, remedy)
        return False
    scale, zero_point = (number.reshape(shape) for number in quantizer.qparams())
    factor = factor.to(scale).reshape([-1 if axis == place else 1 for axis in range(len(shape))])
    scale = torch.where(factor == 0, scale, scale * factor.abs()).clamp_min(SMALLEST_SCALE)
    if spec.symmetric:
        lowest = torch.where(factor < 0, -spec.qmax * scale, float("-inf")).flatten()
        weight.clamp_(min=broadcast_to(lowest, weight.shape, spec.granularity))
    else:
        mirrored = spec.qmin + spec.qmax - zero_point.round()
        zero_point = torch.where(factor < 0, mirrored, zero_point)
    quantizer.store_qparams(scale.flatten(), zero_point.flatten())
    return True
