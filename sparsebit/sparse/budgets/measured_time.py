"""The time of one sample in ONNX Runtime, before and after pruning: fewer MACs do not always take less time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from sparsebit.execution.batches import as_call
from sparsebit.sparse.budgets.latency_table import RUNTIME, Clock
from sparsebit.sparse.shrinking.surgery import ChannelPlan

_FASTER = 0.97  # a ratio above it is within the noise of a measurement
_SECONDS = 1.0
_HINT = "choose ratios by measured time (--budget latency=0.7), or keep widths that kernels like (--round-to 16)"


@dataclass(frozen=True)
class MeasuredTime:
    """Milliseconds of one sample in float files with one thread. `reason`: why nothing was measured."""

    dense_ms: float | None = None
    small_ms: float | None = None
    ratio: float | None = None
    reason: str = ""

    @property
    def is_faster(self) -> bool:
        return self.ratio is not None and self.ratio <= _FASTER

    def to_dict(self) -> dict[str, Any]:
        return {"runtime": RUNTIME, **asdict(self), "is_faster": self.is_faster if self.ratio is not None else None}

    def __str__(self) -> str:
        if self.ratio is None:
            return f"not measured: {self.reason}"
        text = f"{self.dense_ms:.3g} ms -> {self.small_ms:.3g} ms ({self.ratio:.3f}) in ONNX Runtime, 1 thread"
        return text if self.is_faster else f"{text}: not faster; {_HINT}"


def measured_time(dense: nn.Module, small: nn.Module, example_inputs: Any) -> MeasuredTime:
    """The time of both models, measured in turns on the first sample of a batch."""
    try:
        clock = Clock(dense, as_call(example_inputs, dense), lambda _: ChannelPlan())
        before, after = clock.times(small, _SECONDS)
    except Exception as error:  # the exporter and the runtime raise many kinds; pruning itself has succeeded
        return MeasuredTime(reason=(str(error).splitlines() or [type(error).__name__])[0][:200])
    return MeasuredTime(before.ms, after.ms, after.ratio)
