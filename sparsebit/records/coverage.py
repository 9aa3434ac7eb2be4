"""`Coverage`: which layers and parameters of a model are quantized, which are float, and why.

Plain data for JSON (`run_record`): adding or renaming a field requires a new version there.
"""

from __future__ import annotations

from collections import Counter
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
    """A module that could not be traced: its place, the reason, and the layers inside that are still quantized."""

    path: str
    module_type: str
    reason: str
    line: str
    quantized_inside: tuple[str, ...]


@dataclass(frozen=True)
class ParameterRecord:
    """One parameter of the model: `format` is the type that layers read (`int8`, `float32`), `reason` why it is float.

    `float_bytes`: unquantized; `bytes`: packed into its format, with its scales.
    """

    name: str
    num_elements: int
    format: str
    float_bytes: int
    bytes: int
    reason: str = ""

    @property
    def is_quantized(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Coverage:
    """The quantized and the float layers, with reasons. `notes`: properties of the capture that a user may not expect.

    `parameters`: all of the model, including biases and norms, but not those that were folded into others.
    """

    quantized: tuple[QuantizedLayer, ...] = ()
    float_layers: tuple[FloatLayer, ...] = ()
    opaque: tuple[OpaqueModule, ...] = ()
    notes: tuple[str, ...] = ()
    num_weighted: int = 0
    num_weighted_quantized: int = 0
    parameters: tuple[ParameterRecord, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def weighted_fraction(self) -> float:
        """Share of the conv, linear and embedding layers whose weight is quantized."""
        return self.num_weighted_quantized / self.num_weighted if self.num_weighted else 0.0

    @property
    def num_parameters(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def parameter_fraction(self) -> float:
        """Share of all parameters (numbers, not tensors) that are quantized."""
        quantized = sum(parameter.num_elements for parameter in self.parameters if parameter.is_quantized)
        return quantized / self.num_parameters if self.num_parameters else 0.0

    @property
    def weights(self) -> str:
        """The totals in a line."""
        share, before = 100 * self.parameter_fraction, sum(parameter.float_bytes for parameter in self.parameters)
        sizes = f"{_bytes(before)} in float, {_bytes(sum(parameter.bytes for parameter in self.parameters))} quantized"
        return f"{share:.1f} % of {self.num_parameters:,} parameters quantized, {100 - share:.1f} % float; {sizes}"

    def sizeable_floats(self) -> list[str]:
        """The reasons for which more than 1 % of all parameters are float: the share, the names, the reason.

        Names that differ only in numbers are merged: `layers.*.experts.down_proj`.
        """
        by_reason: dict[str, list[ParameterRecord]] = {}
        for parameter in self.parameters:
            if not parameter.is_quantized:
                by_reason.setdefault(parameter.reason, []).append(parameter)
        total = max(self.num_parameters, 1)
        shares = {reason: sum(p.num_elements for p in group) / total for reason, group in by_reason.items()}
        return [
            f"{100 * share:.1f} % of parameters: {_names(by_reason[reason])}: {reason}"
            for reason, share in sorted(shares.items(), key=lambda item: -item[1])
            if share > 0.01
        ]

    def to_dict(self) -> dict[str, Any]:
        names = ("weighted_fraction", "num_parameters", "parameter_fraction")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        weighted = f"{self.num_weighted_quantized} of {self.num_weighted} weighted layers quantized"
        lines = [f"{weighted}, {len(self.quantized)} layers in all"]
        if self.parameters:
            lines.append(f"  weights  {self.weights}")
            lines += [f"  float    {line}" for line in self.sizeable_floats()]
        lines += [f"  float    {layer.name}: {layer.reason}" for layer in self.float_layers]
        for module in self.opaque:
            lines.append(f"  untraced {module.path or '(model)'} [{module.module_type}]: {module.reason}")
            lines.append(f"           at {module.line}")
            lines.append(f"           quantized inside: {', '.join(module.quantized_inside) or 'nothing'}")
        return "\n".join([*lines, *(f"  note     {note}" for note in self.notes)])


def _names(parameters: list[ParameterRecord]) -> str:
    """The three largest, and how many more there are."""
    sizes: Counter[str] = Counter()
    alone: dict[str, str] = {}
    for parameter in parameters:
        pattern = ".".join("*" if part.isdigit() else part for part in parameter.name.split("."))
        alone[pattern] = pattern if pattern in alone else parameter.name
        sizes[pattern] += parameter.num_elements
    rest = f" and {len(sizes) - 3} more" if len(sizes) > 3 else ""
    return ", ".join(alone[pattern] for pattern, _ in sizes.most_common(3)) + rest


def _bytes(number: int) -> str:
    if number < 1000:
        return f"{number} B"
    power = 1 if number < 1000**2 else 2 if number < 1000**3 else 3
    return f"{number / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"
