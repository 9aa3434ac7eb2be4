"""`ErrorProfile`: the quantization error of every layer's output and of every quantized tensor.

`AccuracyGains`: the accuracy that is regained when single layers of a quantized model are float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparsebit.text_table import text_table

MOST_BINS = 64


@dataclass(frozen=True)
class LayerGain:
    """One layer in float, all others quantized. `gain`: the change of the score; negative if it gets worse."""

    layer: str
    sqnr_db: float
    score: float
    gain: float


@dataclass(frozen=True)
class AccuracyGains:
    """Scores of the float and of the quantized model, and of single layers, from `QuantModel.accuracy_gains`.

    `metric`: its description; higher scores are better. `num_samples`: 0 if the metric has its own data.
    `layers`: those that were tried, the largest gain first. `together`: the score with all of them in float.
    """

    metric: str
    num_samples: int
    float_score: float
    quantized_score: float
    together: float
    layers: tuple[LayerGain, ...]

    def __str__(self) -> str:
        """A row per layer."""
        rows = [("in float", "score", "gain", "SQNR alone")]
        rows += [(row.layer, f"{row.score:.4f}", f"{row.gain:+.4f}", f"{row.sqnr_db:.1f} dB") for row in self.layers]
        together = f"these {len(self.layers)} together"
        rows += [(together, f"{self.together:.4f}", f"{self.together - self.quantized_score:+.4f}", "")]
        return f"{self.title}\n{text_table(rows, numbers=True)}"

    @property
    def title(self) -> str:
        """The scores of the whole, in a line."""
        on = f" on {self.num_samples} samples" if self.num_samples else ""
        return f"{self.metric}{on}: float {self.float_score:.4f}, quantized {self.quantized_score:.4f}"


@dataclass(frozen=True)
class LayerError:
    """The quantization error of one layer's output (or of the model's, sync)."""

    layer: str
    error: float
    sqnr_db: float


@dataclass(frozen=True)
class ValueHistogram:
    """How many values fell into each of at most 64 bins of equal width: bin `i` starts at `low + i * width`.

    `width` is a power of two and `low` a multiple of it. Only the finite values of a sample are counted.
    """

    low: float
    width: float
    counts: tuple[int, ...]

    @property
    def high(self) -> float:
        return self.low + self.width * len(self.counts)


@dataclass(frozen=True)
class SiteError:
    """One quantizer on float values: the error of its own rounding and clipping, and statistics of the values.

    `low`, `high`: the extremes of the float values. `clip_low`, `clip_high`: the smallest and the largest possible
    output; with several scales, those of the widest. `clipped`: the share of values outside of their own scale's range.
    `histogram`, `quantized`: of the float values and of the quantized ones; None if they were not requested. `scales`:
    in ascending order, `peaks`: the largest absolute float value of each channel, in ascending order; of more than 64,
    evenly spaced ones with both ends.
    """

    site: str
    target: Literal["weight", "activation"]
    format: str
    num_scales: int
    mse: float
    sqnr_db: float
    low: float
    high: float
    clip_low: float
    clip_high: float
    clipped: float
    histogram: ValueHistogram | None = None
    quantized: ValueHistogram | None = None
    scales: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True)
class ErrorProfile:
    """The errors of layers and of quantized tensors, as `QuantModel.profile` measures them.

    `sync`: the layers' errors are those of all layers quantized together; else of each alone.
    Quantized tensors are measured on float inputs in both cases. `data`: a description of the inputs. `gains`: from
    `QuantModel.accuracy_gains`; None if it was not requested. `changed_by`: algorithms that had changed weights before:
    errors are counted from the changed weights, which may lie on the grid already.
    """

    sync: bool
    num_batches: int
    layers: tuple[LayerError, ...]
    sites: tuple[SiteError, ...] = ()
    data: str | None = None
    gains: AccuracyGains | None = None
    changed_by: tuple[str, ...] = ()
