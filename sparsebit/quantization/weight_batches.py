"""A model's weights fake-quantized in a few kernels before a training step, where each layer would start its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsebit.graph.capture import Region
from sparsebit.graph.patterns import module_of
from sparsebit.numerics.spec import PerChannel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.lsq import LSQ
from sparsebit.quantization.quantizers.uniform import Uniform

if TYPE_CHECKING:
    from sparsebit.numerics.row_batch import RowBatch

# Gradients of a batch are ready together: few layers, so that other processes can begin to send them.
LAYERS_PER_BATCH = 16
_ROWS = frozenset({"conv", "linear"})
_HAS_TRITON = find_spec("triton") is not None


class WeightBatches:
    """Hands every layer that can be batched its quantized weight (`WeightedQuantOpr.ready_weight`) for one forward."""

    def __init__(self, root: Region) -> None:
        """`root`: the graph of the whole model. What opaque code calls stays out: it may run it again in the backward
        (`torch.utils.checkpoint`), when batches are gone.
        """
        self.root = root
        called = {module_of(node, root.graph_module): None for node in root.graph_module.graph.nodes}
        self.layers = [m for m in called if isinstance(m, WeightedQuantOpr) and m.row.name in _ROWS]
        self.batches: dict[tuple[Any, ...], RowBatch] = {}

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, weights are quantized; a layer that cannot be batched does so itself."""
        try:
            for learns, layers in self._groups():
                self._quantize(layers, learns)
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        for layer in self.layers:
            layer.ready_weight = None

    def _quantize(self, layers: list[WeightedQuantOpr], learns: bool) -> None:
        from sparsebit.numerics.row_batch import RowBatch, RowForm, fake_quantize_rows

        weights = [_weight(layer) for layer in layers]
        quantizers = [layer.weight_quantizer for layer in layers]
        forms = tuple(
            RowForm(tuple(weight.shape), weight.stride(), quantizer.spec.qmin, quantizer.spec.qmax)
            for weight, quantizer in zip(weights, quantizers, strict=True)
        )
        device = weights[0].device
        if (forms, device) not in self.batches:
            self.batches[forms, device] = RowBatch(forms, device)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
        scales = [quantizer.scale for quantizer in quantizers]
        quantized = fake_quantize_rows(self.batches[forms, device], weights, scales, dtype, learns=learns)
        for layer, weight in zip(layers, quantized, strict=True):
            layer.ready_weight = weight

    def _groups(self) -> Iterator[tuple[bool, list[WeightedQuantOpr]]]:
        if not self.layers or not _runs_kernels(_weight(self.layers[0])):
            return
        for kind, learns in ((LSQ, True), (Uniform, False)):
            fitting = [layer for layer in self.layers if type(layer.weight_quantizer) is kind and _fits(layer)]
            for first in range(0, len(fitting), LAYERS_PER_BATCH):
                yield learns, fitting[first : first + LAYERS_PER_BATCH]


def _weight(layer: WeightedQuantOpr) -> Tensor:
    weight = layer.op.weight
    assert isinstance(weight, Tensor)
    return weight


def _runs_kernels(weight: Tensor) -> bool:
    return weight.is_cuda and _HAS_TRITON


def _fits(layer: WeightedQuantOpr) -> bool:
    quantizer: Quantizer = layer.weight_quantizer
    weight = layer.op._parameters.get("weight")  # not one that a parametrization computes
    return (
        "forward" not in layer.__dict__  # a user's own, which may run the layer again in the backward
        and type(weight) is nn.Parameter
        and _runs_kernels(weight)
        and weight.dtype == torch.float32
        and weight.requires_grad
        and quantizer.is_enable
        and not quantizer.is_following
        and not quantizer.observing
        and quantizer.spec.symmetric
        and quantizer.spec.granularity == PerChannel(0)
        and quantizer.scale.numel() == weight.shape[0] > 1
        and weight.stride(0) * weight.shape[0] == weight.numel()
        and weight.stride(0) == max(weight.stride())
        and (quantizer.scale.requires_grad or not isinstance(quantizer, LSQ))
    )
