"""Batch-norm tuning: running statistics taken again under quantization, then folded into the quantized layers.

Quantized weights and activations shift the statistics that batch norms were trained with; a few forwards put that right
(Sun et al., "Hybrid 8-bit Floating Point Training and Inference for Deep Neural Networks", 2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import CalibrationError
from sparsebit.graph.passes.fold_batchnorm import can_fold, fold_into
from sparsebit.graph.patterns import Match, MatchingNode, module_of
from sparsebit.graph.rewrite import ReplacePatternBase
from sparsebit.quantization.calibration import calibrate_weight
from sparsebit.quantization.ops.quant_opr import QuantOpr, WeightedQuantOpr


@contextlib.contextmanager
def restarted_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, running statistics start from nothing and become the plain average over the forwards.

    A norm that no forward reached, and after an error every norm, gets back what it had.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise CalibrationError(
            "batchnorm_tuning(): no batch norm with running statistics is left in the model; "
            "set SCHEDULE.BN_TUNING: true, which keeps them from being folded when the model is built"
        )
    before = [({name: buffer.clone() for name, buffer in norm.named_buffers()}, norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a cumulative average: every batch counts the same
    tuned: set[_BatchNorm] = set()
    try:
        yield
        tuned.update(norm for norm in norms if norm.num_batches_tracked)
        if not tuned:
            raise CalibrationError("no forward was run inside batchnorm_tuning(); run a few batches there")
    finally:
        for norm, (buffers, momentum) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm not in tuned:
                norm.load_state_dict(buffers, strict=False)


class FoldQuantizedBatchNorm(ReplacePatternBase):
    """Folds a batch norm into the quantized layer in front of it and calibrates the layer's new weight."""

    nodes = (
        MatchingNode("layer", types=(WeightedQuantOpr,)),
        MatchingNode("norm", types=(_BatchNorm, QuantOpr), inputs=("layer",)),
    )

    def replace(self, match: Match, graph_module: fx.GraphModule) -> dict[str, fx.Node]:
        layer, norm = module_of(match["layer"], graph_module), module_of(match["norm"], graph_module)
        assert isinstance(layer, WeightedQuantOpr)
        norm = norm.op if isinstance(norm, QuantOpr) and isinstance(norm.op, nn.Module) else norm
        calls = [n for n in graph_module.graph.nodes if n.target == match["layer"].target]
        if not can_fold(layer.op, norm) or len(match["layer"].users) != 1 or len(calls) != 1:
            return {}
        assert isinstance(norm, _BatchNorm)
        weight = layer.op.weight
        if sum(p is weight for module in graph_module.modules() for p in module._parameters.values()) > 1:
            return {}
        fold_into(layer.op, norm)
        _neutralize(norm)
        if not layer.weight_quantizer.fake_fused:
            calibrate_weight(layer)
        return {"norm": match["layer"]}


def _neutralize(norm: _BatchNorm) -> None:
    """Make the norm compute the identity: the module that the graph was traced from still calls it."""
    assert norm.running_mean is not None and norm.running_var is not None
    with torch.no_grad():
        norm.running_mean.zero_()
        norm.running_var.fill_(1 - norm.eps)
        if norm.affine:
            norm.weight.fill_(1)
            norm.bias.zero_()
