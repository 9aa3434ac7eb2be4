"""`WeightBatches`: fake-quantizes a model's weights in a few GPU kernels before a training step, not one per layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsebit.execution.distributed import is_distributed
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.region import Region
from sparsebit.kernels.compilation import shows_kernels
from sparsebit.numerics.spec import PerChannel
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.lsq import LSQ
from sparsebit.quantization.quantizers.uniform import Uniform
from sparsebit.quantization.speed.fused_layer import FusedLayer, fused_layer_of
from sparsebit.quantization.speed.fusion_guards import may_fuse
from sparsebit.quantization.speed.recomputation import autocast_dtype

if TYPE_CHECKING:
    from sparsebit.kernels.foreach_fake_quant import RowBatch

LARGEST_BATCH = 32 << 20  # elements: the quantized weights of a batch are one more copy in memory
# The gradients of a batch are ready at the same time. With several processes batches are small, so that sending
# gradients can begin while the backward still runs.
LAYERS_PER_BATCH = 16
_ROWS = frozenset({"conv", "linear"})


class WeightBatches:
    """Sets the quantized weight (`FusedLayer.quantized_weight`) of every layer that can be batched, for one forward."""

    def __init__(self, root: Region) -> None:
        """`root`: the graph of the whole model. Layers that opaque code calls are left out: it may run them again in
        the backward (`torch.utils.checkpoint`), when batches are gone.
        """
        self.root = root
        called = {module_of(node, root.graph_module): None for node in root.graph_module.graph.nodes}
        # A weight that is computed when it is read (parametrizations, hooks) must be read once, by its layer.
        layers = [m for m in called if type(m) is WeightedQuantOpr and m.row.name in _ROWS]
        self.layers = [layer for layer in layers if layer.op._parameters.get("weight") is not None]
        self.batches: dict[tuple[Any, ...], RowBatch] = {}
        self._served: list[FusedLayer] = []

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, weights are quantized; a layer that cannot be batched quantizes its own."""
        try:
            self.quantize()
            yield
        finally:
            self.clear()

    def quantize(self) -> None:
        """Quantize for one forward; `clear` must follow it."""
        for learns, layers in self._groups():
            self._quantize(layers, learns)

    def clear(self) -> None:
        for layer in self._served:
            layer.quantized_weight = None
        self._served = []

    def _quantize(self, fused_layers: list[FusedLayer], learns: bool) -> None:
        from sparsebit.kernels.foreach_fake_quant import RowBatch, RowForm, fake_quantize_rows

        weights = [_weight(fused.layer) for fused in fused_layers]
        quantizers = [fused.layer.weight_quantizer for fused in fused_layers]
        forms = tuple(
            RowForm(tuple(weight.shape), weight.stride(), quantizer.spec.qmin, quantizer.spec.qmax)
            for weight, quantizer in zip(weights, quantizers, strict=True)
        )
        device = weights[0].device
        dtype = autocast_dtype(device.type) or torch.float32
        scales = [quantizer.scale for quantizer in quantizers]
        if (forms, device) not in self.batches:
            self.batches[forms, device] = RowBatch(forms, device)
        quantized = fake_quantize_rows(self.batches[forms, device], weights, scales, dtype, learns=learns)
        for fused, weight in zip(fused_layers, quantized, strict=True):
            fused.quantized_weight = weight
        self._served += fused_layers

    def _groups(self) -> list[tuple[bool, list[FusedLayer]]]:
        groups: list[tuple[bool, list[FusedLayer]]] = []
        if not self.layers or not shows_kernels(_weight(self.layers[0])):
            return groups
        # One kind of quantizer per batch, as the kernel has one gradient. Others quantize their weights by themselves.
        for kind, learns in ((LSQ, True), (Uniform, False)):
            most = LAYERS_PER_BATCH if is_distributed() else len(self.layers)
            batch: list[FusedLayer] = []
            size = 0
            for layer in self.layers:
                fused = fused_layer_of(layer)
                if fused is None or type(layer.weight_quantizer) is not kind or not _fits(layer):
                    continue
                numel = _weight(layer).numel()
                if batch and (len(batch) == most or size + numel > LARGEST_BATCH):
                    groups.append((learns, batch))
                    batch, size = [], 0
                batch.append(fused)
                size += numel
            if batch:
                groups.append((learns, batch))
        return groups


def _weight(layer: WeightedQuantOpr) -> Tensor:
    weight = layer.op.weight
    assert isinstance(weight, Tensor)
    return weight


def _fits(layer: WeightedQuantOpr) -> bool:
    weight, quantizer = layer.op._parameters.get("weight"), layer.weight_quantizer
    return (
        type(weight) is nn.Parameter  # not one that a parametrization computes
        and weight.requires_grad
        and weight.dtype == torch.float32
        and shows_kernels(weight)
        and may_fuse(quantizer, (layer.op,), weight)
        and quantizer.spec.symmetric
        and quantizer.spec.granularity == PerChannel(0)
        and quantizer.scale.numel() == weight.shape[0] > 1
        and weight.stride(0) * weight.shape[0] == weight.numel()
        and weight.stride(0) == max(weight.stride())
        and (quantizer.scale.requires_grad or not isinstance(quantizer, LSQ))
    )
