"""How many bytes a model's weights take, in float and packed into the bits that they are quantized to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import fx, nn

from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, WeightedQuantOpr
from sparsebit.quantization.ops.table import weight_argument
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
    all else (biases, norms, ...) stays float. Scales of activations are not weights.
    """
    of_quantizers = {p for module in qmodel.modules() if isinstance(module, Quantizer) for p in module.parameters()}
    sizes = {p: p.numel() * p.element_size() for p in qmodel.parameters() if p not in of_quantizers}
    packed = dict(sizes)
    for weight, quantizer in _weights(qmodel):
        if quantizer.is_enable:
            scales = quantizer.scale.numel()
            zero_points = 0 if quantizer.spec.symmetric else scales
            packed[weight] = -(-(weight.numel() + zero_points) * quantizer.spec.bits // 8) + 4 * scales
    return WeightSize(sum(sizes.values()), sum(packed.values()))


def _weights(qmodel: QuantModel) -> Iterator[tuple[nn.Parameter, Quantizer]]:
    """Every parameter that a layer owns as its weight, or that a function is given as such."""
    for module in qmodel.modules():
        if isinstance(module, WeightedQuantOpr):
            yield module.op.get_parameter("weight"), module.weight_quantizer
        elif isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                function = module.get_submodule(str(node.target)) if node.op == "call_module" else None
                if isinstance(function, FunctionalWeightedQuantOpr):
                    place = weight_argument(function.row, node.args, node.kwargs)
                    source = node.kwargs.get(place) if isinstance(place, str) else node.args[place or 0]
                    if isinstance(source, fx.Node) and source.op == "get_attr":
                        value = attrgetter(str(source.target))(module)
                        if isinstance(value, nn.Parameter):
                            yield value, function.weight_quantizer
