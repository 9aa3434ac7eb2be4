"""Fields of an options dataclass, with their limits and help.

A verb's options are one frozen dataclass. `option(...)` declares a field with its help and its limits: `check_options`
checks the limits in `__post_init__`, and the command line creates its options from the fields
(`sparsebit.cli.option_groups`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sparsebit.errors import ConfigError

_KEY = "sparsebit.option"


@dataclass(frozen=True)
class Option:
    """`least`, `most`: inclusive limits; `above`, `below`: exclusive limits. `usual`: advice.

    `name`: on the command line; None: derived from the field's name. `panel`: the group of its help.
    """

    help: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[Any, ...] = ()
    usual: str = ""
    metavar: str | None = None
    name: str | None = None
    panel: str | None = None

    def allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return value is not None and (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def allowed(self) -> str:
        """The allowed values, for an error."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        low = f"more than {self.above:g}" if self.least is None else f"{self.least:g}"
        if self.most is not None:
            words = f"{low} to {self.most:g}"
        elif self.below is not None and self.below < float("inf"):
            words = f"{low} to less than {self.below:g}"
        else:
            words = low if self.least is None else f"{low} or more"
        return f"{words}; {self.usual}" if self.usual else words


def option(default: Any, meaning: str, **limits: Any) -> Any:
    """A field of an options dataclass. `limits`: fields of `Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(meaning, **limits)})


def options_of(kind: type) -> dict[str, tuple[Option, Any]]:
    """The options of a dataclass and their defaults, by the names of the fields."""
    found = {field.name: (field.metadata.get(_KEY), field.default) for field in dataclasses.fields(kind)}
    return {name: (option, default) for name, (option, default) in found.items() if option is not None}


def check_options(value: Any) -> None:
    """Raise for a field that is outside of its limits; None is allowed if it is the default."""
    for name, (option, default) in options_of(type(value)).items():
        given = getattr(value, name)
        if not (given is None and default is None) and not option.allows(given):
            raise ConfigError(f"{name}={given!r}: allowed: {option.allowed()}")
