"""`Observer`: gathers the statistic of one tensor and turns it into a range; `register_observer` adds new kinds.

Two parts, kept apart: a mergeable statistic (`statistics.py`, `histogram.py`), and the choice of a range from it
(`range_of`). The invariant: statistics of batches or processes merge to the statistic of all data, so the range does
not depend on how the data was divided. A `Quantizer` owns one observer, calls `update` in each calibration forward, and
turns `calc_range` into scale and zero point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, cast, overload

import torch
from torch import Tensor

from sparsebit.backends import Format
from sparsebit.config.options import check_options
from sparsebit.config.section import Section
from sparsebit.config.targets import ACTIVATION, Target, as_target
from sparsebit.config.tensor_config import ActivationObserver, WeightObserver
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.numerics.spec import PerTensor, TensorSpec, to_rows
from sparsebit.quantization.observers.histogram import Histogram
from sparsebit.quantization.observers.statistics import Samples, State, Statistic, check_finite
from sparsebit.registry import OBSERVERS, own_type

S = TypeVar("S", bound=Statistic)
ObserverClass = TypeVar("ObserverClass", bound="type[Observer[Any]]")

Range = tuple[Tensor, Tensor]

# The FORMATS of observers that assume evenly spaced levels, which float formats do not have.
EVEN_STEPS: frozenset[Format] = frozenset({"integer"})
# A row's histogram with its running sums takes some 400 KB.
ROWS_AT_A_TIME = 64


class Observer(Generic[S]):
    """Computes the range of one tensor from everything that `update` got.

    A kind of observer defines its statistic (`new_statistic`) and the range computed from it (`range_of`).
    Rows, dtypes, empty batches, merging and state are the same for all of them. `FORMATS`: the number formats that it
    supports. `options`: those that it was registered with (`register_observer`), with the config's values.
    """

    FORMATS: ClassVar[frozenset[Format]] = frozenset({"integer", "float8"})
    OPTIONS: ClassVar[type[Section]] = Section
    options: Section

    def __init__(self, spec: TensorSpec, options: Section | None = None, target: Target = ACTIVATION) -> None:
        self.spec = spec
        self.options = self.OPTIONS() if options is None else options
        self.target = as_target(target)
        self.statistic = self.new_statistic()

    def new_statistic(self) -> S:
        """An empty statistic of the kind that `range_of` reads."""
        raise NotImplementedError(f"{type(self).__name__} must define new_statistic()")

    def range_of(self, statistic: S) -> Range:
        """Lowest and highest value to be represented, `(R,)` each."""
        raise NotImplementedError(f"{type(self).__name__} must define range_of(statistic)")

    def _rows(self, x: Tensor) -> Tensor:
        """The input of the statistic for a tensor: one row for each scale, `(R, n)`."""
        return to_rows(x, self.spec.granularity)

    @property
    def is_empty(self) -> bool:
        return self.statistic.is_empty

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add the values of `x`. Any shape, floating type and memory format; an empty tensor changes nothing."""
        if x.numel() == 0:
            return
        x = x.detach()
        self.statistic.update(self._rows(x if x.is_floating_point() else x.float()))

    @torch.no_grad()
    def calc_range(self, *, check: bool = True) -> Range:
        """`(min, max)` in float32: shape `()` for PerTensor, else one number per row. The range always contains zero.

        `check`: test whether it is finite, which stalls a device.
        """
        if self.is_empty:
            raise CalibrationError("nothing was observed: run calibration batches after prepare_calibration()")
        low, high = self.range_of(self.statistic)
        low, high = low.float().clamp(max=0), high.float().clamp(min=0)
        if check:
            check_finite(low, high)
        return (low.squeeze(0), high.squeeze(0)) if isinstance(self.spec.granularity, PerTensor) else (low, high)

    def reset(self) -> None:
        """Forget everything that was observed."""
        self.statistic = self.new_statistic()

    def merge(self, other: Observer[S]) -> None:
        """Add everything that `other` has seen, as if it had come after this one's own data."""
        if repr(self) != repr(other):
            raise CalibrationError(f"cannot merge {other!r} into {self!r}: all but the data must be the same")
        self.statistic.merge(other.statistic)

    def state(self) -> State:
        """The observed statistic, as tensors; empty before the first update."""
        return self.statistic.state()

    def load_state(self, state: State) -> None:
        """Restore a result of `state()`."""
        self.reset()
        self.statistic.load_state(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec}, {self.options}, target={self.target!r})"


class HistogramObserver(Observer[Any]):
    """An observer whose range comes from a histogram (`histogram_range`), for activations and for weights.

    Activations are counted as they come. A weight's values are kept, and its rows counted when the range is computed.
    """

    def new_statistic(self) -> Any:
        return Samples() if self.target == "weight" else Histogram()

    def histogram_range(self, histogram: Histogram, rows: Tensor | None) -> Range:
        """The range of each row of the histogram; `rows`: their values, if they are kept."""
        raise NotImplementedError

    def range_of(self, statistic: Any) -> Range:
        """The ranges of all rows, a few dozen rows at a time to bound the memory."""
        ends = []
        if isinstance(statistic, Histogram):
            parts = [slice(start, start + ROWS_AT_A_TIME) for start in range(0, len(statistic.low), ROWS_AT_A_TIME)]
            ends = [self.histogram_range(statistic.of_rows(part), None) for part in parts]
        else:
            for rows in statistic.rows.split(ROWS_AT_A_TIME):
                histogram = Histogram(len(statistic.rows))
                histogram.update(rows)
                ends.append(self.histogram_range(histogram, rows))
        return torch.cat([low for low, _ in ends]), torch.cat([high for _, high in ends])


@overload
def register_observer(
    name: ObserverClass, *, replace: bool = False, options: type[Section] | None = None
) -> ObserverClass: ...
@overload
def register_observer(
    name: str, *, replace: bool = False, options: type[Section] | None = None
) -> Callable[[ObserverClass], ObserverClass]: ...
def register_observer(name: str | ObserverClass, *, replace: bool = False, options: type[Section] | None = None) -> Any:
    """A class decorator that makes an observer known to configs as `OBSERVER: {TYPE: name}`.

    Without a name (`@register_observer`) its name is the `TYPE` of the class. `options`: a `Section` whose keys
    configs may set as `OBSERVER: {NAME: {...}}`; the observer has them as `self.options`. An observer that is
    registered without options inherits those of the registered class that it extends, under that class's name.

    >>> from pydantic import Field
    >>> from sparsebit.quantization.observers.statistics import MinMax
    >>> class PartOptions(Section):
    ...     PART: float = Field(0.5, gt=0, le=1, description="How much of the range is kept.")
    >>> @register_observer("part_of_range", options=PartOptions)
    ... class PartOfRange(Observer[MinMax]):
    ...     options: PartOptions
    ...     def new_statistic(self):
    ...         return MinMax()
    ...     def range_of(self, statistic):
    ...         low, high = statistic.range()
    ...         return self.options.PART * low, self.options.PART * high
    """
    if not isinstance(name, str):
        return register_observer(own_type(name), replace=replace, options=options)(name)

    def decorate(kind: ObserverClass) -> ObserverClass:
        is_observer = isinstance(kind, type) and issubclass(kind, Observer)
        if not is_observer or kind.range_of is Observer.range_of:
            raise ConfigError(
                f"register_observer({name!r}) on {kind!r}: allowed: a subclass of Observer that defines "
                "new_statistic() and range_of(statistic) (calc_minmax() in the first Sparsebit); "
                "docs/guides/add-an-observer.md shows how"
            )
        if options is not None:
            check_options(options, "observer", name, WeightObserver, ActivationObserver)
        OBSERVERS.register(name, replace=replace, options=options)(kind)
        if options is not None:
            kind.OPTIONS = options
        return kind

    return decorate


def build_observer(
    name: str, spec: TensorSpec, options: Section | None = None, target: Target = ACTIVATION
) -> Observer[Any]:
    """A fresh observer of the kind registered as `name` (case-insensitive)."""
    kind = cast("type[Observer[Any]]", OBSERVERS.get(name))
    return kind(spec, options, target)
