"""`AccuracyGains`: the accuracy that comes back when single layers of a quantized model are float."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerGain:
    """One layer in float, all others quantized. `gain`: the score that comes back; negative where it gets worse."""

    layer: str
    sqnr_db: float
    score: float
    gain: float


@dataclass(frozen=True)
class AccuracyGains:
    """What `QuantModel.accuracy_gains` measures: scores of the float and of the quantized model, and of single layers.

    `metric`: in words; higher scores are better. `num_samples`: 0 where the metric has data of its own. `layers`: those
    that were tried, the largest gain first. `together`: the score with all of them in float.
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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines])

    @property
    def title(self) -> str:
        """The scores of the whole, in a line."""
        on = f" on {self.num_samples} samples" if self.num_samples else ""
        return f"{self.metric}{on}: float {self.float_score:.4f}, quantized {self.quantized_score:.4f}"
