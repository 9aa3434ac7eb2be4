"""Options that go together, as one value each, and `grouped`: verbs whose parameters are such values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import typer

from sparsebit.cli import options
from sparsebit.records.parity import Tolerance


@dataclass(frozen=True)
class DataOptions:
    """How the data is to be read; None: not said. `arrays`: those of a file of arrays that the model is given."""

    size: options.ImageSize = None
    resize: options.Resize = None
    mean: options.Mean = None
    std: options.Std = None
    gray: options.Gray = False
    batch_size: options.BatchSize = None
    num_samples: options.NumSamples = 256
    arrays: options.Arrays = None

    def refuse(self, names: Iterable[str], source: str) -> None:
        """A usage error for options that do not apply to this kind of data: no option is ignored silently."""
        typed = {"arrays": "input"}
        used = [typed.get(name, name) for name in names if getattr(self, name) not in (None, False)]
        given = [f"--{name.replace('_', '-')}" for name in used]
        if given:
            raise typer.BadParameter(f"{', '.join(given)} cannot be used with {source}")


@dataclass(frozen=True)
class PlacementOptions:
    """Which layers run in integers."""

    placement: options.Placement = "default"
    placement_seconds: options.PlacementSeconds = 60.0
    save_placement: options.SavePlacement = None

    def check(self, *, has_data: bool) -> None:
        """Refuse what cannot be done, before the work."""
        if self.save_placement is not None and self.placement != "measured":
            raise typer.BadParameter("--save-placement keeps what --placement measured finds; give both")
        if self.placement != "default" and not has_data:
            raise typer.BadParameter(f"--placement {self.placement} is measured on data; give --data")


@dataclass(frozen=True)
class Limits:
    """How far a file may be from what it is compared with, beyond the limits of the parity check."""

    exact: options.Exact = False
    min_sqnr: options.MinSqnr = None
    allow_nan: options.AllowNan = False

    def given(self) -> list[str]:
        """The options that were used, as they are typed."""
        return _typed(vars(self))

    def __bool__(self) -> bool:
        return bool(self.given())

    def tolerance(self) -> Tolerance:
        return Tolerance(exact=self.exact or None, min_sqnr_db=self.min_sqnr, allow_nan=self.allow_nan)


@dataclass(frozen=True)
class FileOptions:
    """How an ONNX file is to be written; None: not said."""

    opset: options.Opset = None
    dynamic_batch: options.DynamicBatch = False
    input_names: options.InputNames = None
    output_names: options.OutputNames = None
    extra_info: options.ExtraInfo = False
    no_check: options.NoCheck = False
    limits: Limits = Limits()

    def given(self) -> list[str]:
        """The options that were used, as they are typed."""
        own = {name: value for name, value in vars(self).items() if name != "limits"}
        return [*_typed(own), *self.limits.given()]


@dataclass(frozen=True)
class OutputOptions:
    """What is said, and where a record of it is kept."""

    json: options.Json = False
    quiet: options.Quiet = False
    record: options.Record = None


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer sees it: each parameter that is a group stands for the options in it.

    A group's default (`data: DataOptions = DataOptions(num_samples=64)`) gives the defaults of its options.
    """
    hints = typing.get_type_hints(verb, include_extras=True)
    own = inspect.signature(verb).parameters
    shown: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if _is_group(hints[name]):
            default = hints[name]() if parameter.default is inspect.Parameter.empty else parameter.default
            shown += _expanded(default)
        else:
            shown.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def called(**values: Any) -> None:
        verb(**{name: _gathered(hints[name], values) if _is_group(hints[name]) else values[name] for name in own})

    signature = inspect.Signature(shown)
    vars(called).pop("__wrapped__")
    vars(called)["__signature__"] = signature
    called.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return called


def _expanded(default: Any) -> Iterator[inspect.Parameter]:
    """An option for each field of a group; those of the groups in it, too."""
    for name, hint in typing.get_type_hints(type(default), include_extras=True).items():
        value = getattr(default, name)
        if _is_group(hint):
            yield from _expanded(value)
        else:
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=hint)


def _gathered(kind: Any, values: dict[str, Any]) -> Any:
    """The group, of the values of its options."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{name: _gathered(hint, values) if _is_group(hint) else values[name] for name, hint in hints.items()})


def _is_group(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _typed(values: dict[str, Any]) -> list[str]:
    """`--dynamic-batch` and the like, of the values that were given."""
    return [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None and value is not False]
