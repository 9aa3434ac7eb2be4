"""Plain results that go to JSON and to reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer with at least one quantizer: site name -> number format."""

    name: str
    op: str
    sites: dict[str, str]


@dataclass(frozen=True)
class FloatLayer:
    name: str
    reason: str


@dataclass(frozen=True)
class OpaqueModule:
    """A module that could not be traced: where, why, and the layers inside that are quantized all the same."""

    path: str
    module_type: str
    reason: str
    line: str
    quantized_inside: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """What is quantized, what is float and why. `notes`: things true of the capture that a user may not expect."""

    quantized: tuple[QuantizedLayer, ...] = ()
    float_layers: tuple[FloatLayer, ...] = ()
    opaque: tuple[OpaqueModule, ...] = ()
    notes: tuple[str, ...] = ()
    num_weighted: int = 0
    num_weighted_quantized: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def weighted_fraction(self) -> float:
        """Share of the conv, linear and embedding layers whose weight is quantized."""
        return self.num_weighted_quantized / self.num_weighted if self.num_weighted else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"weighted_fraction": self.weighted_fraction}

    def __str__(self) -> str:
        weighted = f"{self.num_weighted_quantized} of {self.num_weighted} weighted layers quantized"
        lines = [f"{weighted}, {len(self.quantized)} layers in all"]
        lines += [f"  float    {layer.name}: {layer.reason}" for layer in self.float_layers]
        for module in self.opaque:
            lines.append(f"  untraced {module.path or '(model)'} [{module.module_type}]: {module.reason}")
            lines.append(f"           at {module.line}")
            inside = ", ".join(module.quantized_inside) or "nothing"
            lines.append(f"           quantized inside: {inside}")
        lines += [f"  note     {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerError:
    """The error that quantization brings to one layer's output (or to the model's, sync)."""

    layer: str
    error: float
    sqnr_db: float
