"""How many bytes a model's weights take, in float and packed into the bits that they are quantized to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.quantizers.base import Quantizer

if TYPE_CHECKING:
    from sparsebit.quantization import QuantModel


@dataclass(frozen=True)
class WeightSize:
    """Bytes, before and after."""

    float_bytes: int
    quantized_bytes: int

    @property
    def ratio(self) -> float:
        return self.float_bytes / self.quantized_bytes if self.quantized_bytes else 1.0


def weight_size(qmodel: QuantModel) -> WeightSize:
    """Every parameter of the model as it runs (batch norms folded where they are), tied ones once.

    A quantized weight takes its bits, packed without gaps, and a float scale (and a zero point, where affine) per row;
    all else (biases, norms, weights that are used as plain tensors) stays float. Scales of activations are not weights.
    """
    quantizers = {id(q) for module in qmodel.modules() if isinstance(module, Quantizer) for q in module.parameters()}
    sizes = {p: p.numel() * p.element_size() for p in qmodel.parameters() if id(p) not in quantizers}
    packed = dict(sizes)
    for layer in qmodel.modules():
        if isinstance(layer, WeightedQuantOpr) and layer.weight_quantizer.is_enable:
            weight, quantizer = layer.op.get_parameter("weight"), layer.weight_quantizer
            scales = quantizer.scale.numel()
            zero_points = 0 if quantizer.spec.symmetric else scales
            packed[weight] = -(-(weight.numel() + zero_points) * quantizer.spec.bits // 8) + 4 * scales
    return WeightSize(sum(sizes.values()), sum(packed.values()))
