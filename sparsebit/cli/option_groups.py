"""The command line's options as frozen dataclasses, one for each verb; `grouped` makes typer's options from them.

A verb is a function of one dataclass:

    @dataclass(frozen=True, kw_only=True)
    class Draw:
        common: ClassVar = ("model", "output")  # listed first in `--help`; all others are under their headings
        model: ModelOptions  # a group: its fields are options too
        output: Path | None = option(None, "The file to write (default: stdout).", "FILE", short="-o")

    @grouped
    def draw(asked: Draw) -> None: ...

The option of a field has its name (`batch_size`: `--batch-size`). A dataclass may set the `heading` of its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

import typer

from sparsebit.cli import options
from sparsebit.option_fields import options_of
from sparsebit.records.parity import Tolerance

# Values of an options dataclass that were given on the command line, by field name; see `grouped`.
Given: TypeAlias = dict[str, Any]
NUM_TEST_SAMPLES = 1000
SOURCES = "an image folder, a .npz or .safetensors file, or MODULE:FACTORY that yields batches"


def option(default: Any, text: str, metavar: str | None = None, *, short: str = "", name: str = "", **more: Any) -> Any:
    """A field that is an option with the help `text`. `default`: `...` if it is required. `name`: `--other-name`.

    `more` goes to `typer.Option`: `parser`, `min`, `max`, `callback`, `hidden`, ...
    """
    return _field(default, typer.Option, short=short, name=name, help=text, metavar=metavar, **more)


def argument(default: Any, text: str, metavar: str, **more: Any) -> Any:
    """A field that is an argument: a word without a leading `--`."""
    return _field(default, typer.Argument, help=text, metavar=metavar, **more)


def _field(default: Any, kind: Callable[..., Any], **more: Any) -> Any:
    given: dict[str, Any] = {} if default is ... else {"default": default}
    return dataclasses.field(metadata={"kind": kind, **more}, **given)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, with which weights."""

    heading: ClassVar = "Model"

    model: str = option(
        ..., "A function or class that makes the model, an nn.Module, or a float ONNX file.",
        "MODULE:FACTORY|FILE.onnx",
        short="-m",
    )  # fmt: skip
    weights: Path | None = option(
        None, "Its weights: .safetensors, .pt, or the folder of a pruned model.", "FILE|DIR", short="-w"
    )
    model_args: options.Arguments | None = option(
        None, "Arguments of the function: a JSON object or list.", "JSON", parser=options.read_arguments
    )


@dataclass(frozen=True, kw_only=True)
class TrainedModel(ModelOptions):
    """A model whose weights matter: random weights cause a warning."""

    random_weights: bool = option(False, "The weights are meant to be random: do not warn.")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How to read the data; None: not given."""

    heading: ClassVar = "Data"

    size: options.Size | None = option(
        None, "Image folder: the size that the model takes.", "N|HxW", parser=options.read_size
    )
    resize: int | None = option(
        None, "Image folder: scale the shorter side, then crop.", "N", min=1, max=options.LARGEST_SIDE
    )
    mean: options.Numbers | None = option(
        None, "Images: subtracted from pixels in 0..1.", "X[,X,X]", parser=options.read_mean
    )
    std: options.Numbers | None = option(None, "Images: divides after that.", "X[,X,X]", parser=options.read_std)
    gray: bool = option(False, "Image folder: one channel instead of three.")
    batch_size: int | None = option(None, "Samples per batch (32).", min=1)
    num_samples: int = option(256, "Samples to use, spread evenly over the data.", short="-n", min=1)
    arrays: options.Names | None = option(
        None, "File: the arrays to use (default: all but labels).", "NAME,...", name="--input",
        parser=options.read_names,
    )  # fmt: skip

    def refuse(self, names: Iterable[str], source: str) -> None:
        """Raise a usage error for options that do not apply to this kind of data: no option is ignored silently."""
        given = ", ".join(typed(self, names))
        options.refuse({f"{given} cannot be used with {source}": given})

    def refuse_without_data(self) -> None:
        """Raise a usage error for options that describe data if no data is given."""
        self.refuse(("size", "resize", "mean", "std", "gray", "batch_size", "arrays"), "no --data")


def data_option(default: Any = ..., note: str = "") -> Any:
    return option(default, f"{SOURCES[0].upper()}{SOURCES[1:]}.{note}", "SOURCE", short="-d")


def example_option() -> Any:
    """`--data` where it only shows how the model is called."""
    text = "An example call, for models that cannot be traced without: as for quantize."
    return option(None, text, "SOURCE", short="-d")


def config_option(default: Any, note: str = "") -> Any:
    return option(default, f"A YAML config, or a backend for its 8-bit default{note}.", "FILE|BACKEND", short="-c")


def device_option() -> Any:
    return option(None, "cpu, cuda or cuda:N (default: the config's DEVICE).", "DEVICE")


@dataclass(frozen=True)
class PlacementOptions:
    """Which layers run in integers."""

    heading: ClassVar = "Placement: which layers run in integers"

    placement: str = option(
        "default",
        "default: by the backend's profile; measured: the fastest on this machine; or a saved placement.",
        "default|measured|FILE",
    )
    placement_seconds: float = option(60.0, "How long to try placements.", "S", min=0)
    save_placement: Path | None = option(None, "Save the measured placement.", "FILE.json")

    def check(self, *, has_data: bool) -> None:
        """Raise before the work if the options cannot be used together."""
        is_unmeasured = self.save_placement is not None and self.placement != "measured"
        needs_data = self.placement != "default" and not has_data
        options.refuse(
            {
                "--save-placement keeps what --placement measured finds; give both": is_unmeasured,
                f"--placement {self.placement} is measured on data; give --data": needs_data,
            }
        )


@dataclass(frozen=True)
class Limits:
    """Tolerances for a file beyond the limits of the parity check."""

    heading: ClassVar = "Limits: fail (exit code 1) if the outputs differ more"

    exact: bool = option(False, "Every bit of every output must be equal.")
    min_sqnr: float | None = option(None, "Lowest SQNR of any output.", "DB", callback=options.finite_decibels)
    allow_nan: bool = option(False, "Accept NaN that is on both sides.")

    def given(self) -> list[str]:
        """The given options, as they are typed."""
        return typed(self)

    def __bool__(self) -> bool:
        return bool(self.given())

    def tolerance(self) -> Tolerance:
        return Tolerance(exact=self.exact or None, min_sqnr_db=self.min_sqnr, allow_nan=self.allow_nan)


@dataclass(frozen=True)
class FileOptions:
    """How to write an ONNX file; None: not given."""

    heading: ClassVar = "ONNX file"

    opset: int | None = option(None, "ONNX opset (default: the lowest that fits).", min=1)
    dynamic_batch: bool = option(False, "Accept any batch size (axis 0 is named batch); otherwise 1.")
    input_names: options.Names | None = option(
        None, "Names of the inputs, in the order of forward's parameters.", "NAME,...", parser=options.read_names
    )
    output_names: options.Names | None = option(
        None, "Names of the outputs, in order.", "NAME,...", parser=options.read_names
    )
    extra_info: bool = option(False, "Also write MODEL_extra.onnx: bits and format of each tensor.")
    no_check: bool = option(False, "Keep the file without running and comparing it.")
    overwrite: bool = option(False, "Also replace a file that sparsebit did not write.")
    limits: Limits = Limits()

    def given(self) -> list[str]:
        """The given options, as they are typed."""
        return [*typed(self), *self.limits.given()]


@dataclass(frozen=True)
class ScoreOptions:
    """The metric and its data; None: not given."""

    heading: ClassVar = "Accuracy"

    test_data: str | None = option(
        None, "Labelled data, read like --data, for the accuracy of each model (default: --data).", "SOURCE"
    )
    test_samples: int | None = option(None, f"Samples of it, spread evenly ({NUM_TEST_SAMPLES}).", min=1)
    metric: str | None = option(
        None,
        "accuracy (default), agreement with the first model (no labels), or MODULE:FUNCTION (of the model: a score).",
        "METRIC",
    )

    @property
    def is_labelled(self) -> bool:
        return (self.metric or "accuracy") == "accuracy"


@dataclass(frozen=True, kw_only=True)
class SpeakingOptions:
    """How to print the result."""

    heading: ClassVar = "Output"

    json: bool = option(False, "Print one JSON object on stdout and nothing else.")
    quiet: bool = option(False, "Print only the result, warnings and errors.", short="-q")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(SpeakingOptions):
    """How to print the result, and where to write a record of it."""

    record: Path | None = option(None, "Add the result to this record of the model.", "FILE.json")


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb as typer sees it: the fields of a parameter that is a dataclass are options.

    A dataclass in a default (`data: DataOptions = DataOptions(num_samples=64)`) sets the defaults of its options.
    A parameter `Annotated[Given, Recipe]` becomes the fields of the library's `Recipe` that are declared with
    `sparsebit.option_fields.option`; the verb receives the given values by field name.
    """
    hints = typing.get_type_hints(verb, include_extras=True)
    own = inspect.signature(verb).parameters
    shown: list[inspect.Parameter] = []
    for name, parameter in own.items():
        declared = _declared(hints[name])
        if declared is not None:
            shown += _made_of(declared)
        elif dataclasses.is_dataclass(hints[name]):
            common = getattr(hints[name], "common", ())
            found = list(_expanded(hints[name], parameter.default, common))
            shown += sorted(found, key=lambda one: common.index(one.name) if one.name in common else len(common))
        else:
            shown.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(verb)
    def called(**values: Any) -> None:
        verb(**{name: _value(name, hints[name], values) for name in own})

    signature = inspect.Signature(shown)
    vars(called).pop("__wrapped__")
    vars(called)["__signature__"] = signature
    called.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return called


def _expanded(kind: Any, given: Any, common: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    """An option for each field of a group and of the groups in it. `given`: the group that holds the defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        value = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if isinstance(given, kind):
            value = getattr(given, field.name)
        if dataclasses.is_dataclass(hint):
            yield from _expanded(hint, value, common)
        else:
            heading = None if field.name in common else getattr(kind, "heading", None)
            shown = Annotated[hint, _info(field, heading)] if field.metadata else hint
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=shown)


def _info(field: dataclasses.Field[Any], heading: str | None) -> Any:
    """Typer's description of a field that `option` or `argument` made."""
    given = dict(field.metadata)
    if given.pop("kind") is typer.Argument:
        return typer.Argument(**given)
    names = [_spelled(field), given.pop("short")]
    del given["name"]
    return typer.Option(*filter(None, names), **{"rich_help_panel": heading, **given})


def _spelled(field: dataclasses.Field[Any]) -> str:
    """`--batch-size`."""
    return field.metadata.get("name") or f"--{field.name.replace('_', '-')}"


def _value(name: str, hint: Any, values: dict[str, Any]) -> Any:
    """The value that the verb receives for a parameter, taken from the values of all options."""
    declared = _declared(hint)
    if declared is not None:
        given = {
            name: values[name]
            for name in options_of(declared)
            if values[name] is not None and values[name] is not False
        }
        return {name: _parsed(declared, name, value) for name, value in given.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint, include_extras=True)
        return hint(**{one.name: _value(one.name, hints[one.name], values) for one in dataclasses.fields(hint)})
    return values[name]


def _made_of(kind: type) -> Iterator[inspect.Parameter]:
    """A typer option for each declared field of an options dataclass; None if it is not given."""
    hints = typing.get_type_hints(kind)
    for name, (option, default) in options_of(kind).items():
        typed = option.name or f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
        is_shown = default is not None and default != () and not isinstance(default, bool)
        choices = "|".join(map(str, option.choices)) or None
        text, metavar = f"{option.help} Default: {default}." if is_shown else option.help, option.metavar or choices
        limits: dict[str, Any] = {"min": option.least, "max": option.most, "rich_help_panel": option.panel}
        # Lists and choices are text on the command line.
        kind = next((kind for kind in typing.get_args(hints[name]) if kind is not type(None)), hints[name])
        shown: Any = kind if kind in (bool, int, float) and typing.get_origin(hints[name]) is not tuple else str
        annotation: Any = Annotated[shown | None, typer.Option(typed, help=text, metavar=metavar, **limits)]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parsed(kind: type, name: str, value: Any) -> Any:
    """The value of a field: a flag `--no-...` turns it off, and text for a tuple is split at its commas."""
    default = options_of(kind)[name][1]
    if isinstance(default, bool):
        return not default
    hint = typing.get_type_hints(kind)[name]
    if typing.get_origin(hint) is not tuple:
        return value
    if typing.get_args(hint)[0] is int:
        return options.read_bits(value)
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _declared(hint: Any) -> Any:
    """The options dataclass of a parameter `Annotated[Given, Recipe]`; None for other parameters."""
    arguments = typing.get_args(hint) if typing.get_origin(hint) is Annotated else ()
    return arguments[1] if arguments[1:] and dataclasses.is_dataclass(arguments[1]) else None


def typed(group: Any, names: Iterable[str] | None = None) -> list[str]:
    """The given options of a group (of those in `names`), as they are typed: `--dynamic-batch`."""
    values = {field: getattr(group, field.name) for field in dataclasses.fields(group) if field.metadata}
    used = [field for field, value in values.items() if value not in (None, "") and value is not False]
    return [_spelled(field) for field in used if names is None or field.name in names]


def retyped(*groups: Any, without: Iterable[str] = ()) -> str:
    """The options of the groups with their values, for a command to copy; those that have their default are left out.

    >>> retyped(DataOptions(size=options.Size(192, 320), mean=options.Numbers((0.5, 0.4, 0.4)), gray=True))
    '--size 192x320 --mean 0.5,0.4,0.4 --gray'
    """
    words: list[str] = []
    for group in groups:
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if not field.metadata or field.name in without or value in (None, False, "", field.default):
                continue
            words += [field.metadata.get("short") or _spelled(field)]
            words += [] if value is True else [options.as_typed(value)]
    return shlex.join(words)
