"""`Audit`: the arithmetic in which each layer of a file runs, its size and its speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Arithmetic = Literal["integer", "weight-only", "float", "unknown"]


@dataclass(frozen=True)
class Latency:
    """One call's time in milliseconds: median and quartiles over the rounds.

    `cpu_ms` is the time of the whole process, all its threads together: with one thread it is the cost of the call, and
    other processes hardly change it. `wall_ratio` and `cpu_ratio` are against the first run of the same rounds: the
    median of the ratios round by round, which a changing clock frequency does not affect; 1 for the first run itself.
    """

    wall_ms: float
    wall_quartiles_ms: tuple[float, float]
    cpu_ms: float
    cpu_quartiles_ms: tuple[float, float]
    wall_ratio: float
    cpu_ratio: float
    num_rounds: int
    calls_per_round: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LayerRun:
    """One layer of the file. `heavy`: it multiplies matrices; `weight-only`: low-bit weights, float activations.

    A layer in float has a `cause` (the same text for all layers of its group), a `detail` and a `remedy`.
    `on_purpose`: the profile leaves it in float by design, or the config switched it off.
    `rounds_weight`: the file stores its weight in float, and the runtime still rounds it to int8.
    `meant_float`: the export marked it to be computed in float.

    `inputs`: the layers whose results it reads, also through ops that are not layers. `shape`: of its result, with 0
    for open sizes; `macs`: its multiplications, with open sizes counted as 1; `num_bytes`, `weight_bits`: of its stored
    weight. `ms`, `float_ms`: its time in this file and in the float file; None if it was not timed.
    """

    name: str
    op: str
    kind: str
    heavy: bool
    arithmetic: Arithmetic
    kernel: str
    cause: str = ""
    detail: str = ""
    remedy: str = ""
    on_purpose: bool = False
    rounds_weight: bool = False
    meant_float: bool = False
    inputs: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    macs: int | None = None
    num_bytes: int | None = None
    weight_bits: int | None = None
    ms: float | None = None
    float_ms: float | None = None


@dataclass(frozen=True)
class Audit:
    """Which layers of a file run in integers, and how fast it is, as measured by `audit`.

    `leftovers`: remaining conversions in the runtime's graph, by op. `latency` has the keys `float` and `quantized` if
    both were timed; `float_source` is the path of the float file, or `twin` (the same file without its quantization).
    `feeds` describes the inputs of the model.
    """

    file: str
    runtime: str
    runtime_version: str
    cpu: str
    num_threads: int
    layers: tuple[LayerRun, ...]
    leftovers: dict[str, int]
    num_bytes: int
    float_bytes: int | None = None
    float_source: str | None = None
    latency: dict[str, Latency] = field(default_factory=dict)
    feeds: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    verdict: str = ""

    @property
    def heavy(self) -> tuple[LayerRun, ...]:
        return tuple(layer for layer in self.layers if layer.heavy)

    @property
    def ratio(self) -> float | None:
        """Quantized against float time: CPU time with one thread, wall time with several; None if not timed."""
        timed = self.latency.get("quantized")
        if timed is None or "float" not in self.latency:
            return None
        return timed.cpu_ratio if self.num_threads == 1 else timed.wall_ratio

    def groups(self) -> list[tuple[LayerRun, ...]]:
        """The float layers, grouped by cause: those with heavy layers first, then large ones; last those on purpose."""
        groups: dict[str, list[LayerRun]] = {}
        for layer in self.layers:
            if layer.arithmetic in ("float", "unknown"):
                groups.setdefault(layer.cause, []).append(layer)
        return sorted(
            map(tuple, groups.values()),
            key=lambda group: (group[0].on_purpose, -sum(layer.heavy for layer in group), -len(group)),
        )

    def counts(self) -> dict[str, int]:
        """Heavy layers by arithmetic."""
        return dict(Counter(layer.arithmetic for layer in self.heavy))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "counts": self.counts()}

    def __str__(self) -> str:
        return self.verdict
