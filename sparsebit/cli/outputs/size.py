"""How many bytes a model's weights take, in float and packed into the bits that they are quantized to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    parameters = qmodel.coverage.parameters
    return WeightSize(sum(p.float_bytes for p in parameters), sum(p.bytes for p in parameters))
