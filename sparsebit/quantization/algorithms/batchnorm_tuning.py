"""Batch-norm tuning: running statistics taken again under quantization, then folded into the quantized layers.

Quantized weights and activations shift the statistics that batch norms were trained with; a few forwards put that right
(Sun et al., "Hybrid 8-bit Floating Point Training and Inference for Deep Neural Networks", 2019).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.errors import CalibrationError
from sparsebit.graph.capture import Captured
from sparsebit.graph.passes.fold_batchnorm import can_fold, fold_into
from sparsebit.graph.patterns import Match, MatchingNode, module_of
from sparsebit.graph.rewrite import ReplacePatternBase
from sparsebit.quantization.calibration import calibrate_weight
from sparsebit.quantization.ops.quant_opr import QuantOpr, WeightedQuantOpr
from sparsebit.quantization.placement import layer_name

# (name of the layer, layer, norm behind it) -> whether the norm works on the layer's output channels.
MayFold = Callable[[str, nn.Module, _BatchNorm], bool]


@contextlib.contextmanager
def restarted_statistics(model: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Inside, running statistics start from nothing and become the plain average over the forwards.

    A norm that no forward reached, and after an error every norm, gets back what it had. Yields the rank of each norm's
    inputs, to be read afterwards.
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
    ranks: dict[nn.Module, int] = {}

    def note(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        ranks[norm] = args[0].dim()

    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    tuned: set[_BatchNorm] = set()
    try:
        yield ranks
        tuned.update(norm for norm in norms if norm.num_batches_tracked)
        if not tuned:
            raise CalibrationError("no forward was run inside batchnorm_tuning(); run a few batches there")
    finally:
        for handle in handles:
            handle.remove()
        for norm, (buffers, momentum) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if norm not in tuned:
                norm.load_state_dict(buffers, strict=False)


def fold_quantized_batchnorm(captured: Captured, may_fold: MayFold) -> list[str]:
    """Fold every batch norm that may be folded into its quantized layer; gives the names of these layers."""
    folded: list[str] = []
    for path, region in captured.regions.items():
        _FoldQuantized(path, may_fold, folded).apply(region.graph_module)
    return folded


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
        fold_into(layer.op, norm)
        if not layer.weight_quantizer.fake_fused:
            calibrate_weight(layer)
        self.folded.append(name)
        return {"norm": match["layer"]}
