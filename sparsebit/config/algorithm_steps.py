"""`ALGORITHMS`: the algorithms that a config names, in order, each with the options that it was registered with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparsebit.config.config_errors import Fault, Faults, all_faults, given
from sparsebit.config.section import Section
from sparsebit.errors import ConfigError
from sparsebit.registry import ALGORITHMS

KEY = "ALGORITHMS"
# Must be the last algorithm: it folds batch norms, so that later ones could not compare with the float model.
BATCHNORM_TUNING = "batchnorm_tuning"
_FORM = "[gptq, {reconstruct: {STEPS: 500}}]"


@dataclass(frozen=True)
class Step:
    """One entry of `ALGORITHMS`: a registered name, and its options in the config."""

    name: str
    options: Section

    def to_entry(self) -> str | dict[str, dict[str, Any]]:
        """The form in which it is written in a config file."""
        written = self.options.to_dict()
        return {self.name: written} if written else self.name


def read_steps(value: object) -> tuple[Step, ...]:
    """`[name, {name: {KEY: value}}]` -> steps in the order written, with checked options."""
    if not isinstance(value, (list, tuple)):
        raise Faults([Fault((KEY,), f"allowed: a list, {_FORM}", given(value))])
    found = [read for entry in value for read in _read_entry(entry)]
    if faults := [fault for fault in found if isinstance(fault, Fault)]:
        raise Faults(faults)
    return tuple(step for step in found if isinstance(step, Step))


def wrong_order(steps: tuple[Step, ...]) -> Iterator[Fault]:
    """Yield a fault if algorithms follow the one that must be the last."""
    names = [step.name for step in steps]
    if BATCHNORM_TUNING in names[:-1]:
        later = ", ".join(names[names.index(BATCHNORM_TUNING) + 1 :])
        yield Fault(
            (KEY,),
            f"{BATCHNORM_TUNING} folds the batch norms with new statistics, so later algorithms ({later}) cannot "
            f"compare with the float model; name {BATCHNORM_TUNING} once, as the last",
        )


def _read_entry(entry: object) -> Iterator[Step | Fault]:
    if isinstance(entry, Step):
        yield entry
        return
    named = {entry: None} if isinstance(entry, str) else entry
    if not isinstance(named, Mapping) or len(named) != 1 or not all(isinstance(name, str) for name in named):
        yield Fault((KEY,), f"each entry is a name, or one name with its options: {_FORM}", given(entry))
        return
    ((name, values),) = named.items()
    values = {} if values is None else values
    try:
        canonical = ALGORITHMS.canonical(name)
    except ConfigError as unknown:
        yield Fault((KEY,), str(unknown), place=(KEY, name))
        return
    options: type[Section] = ALGORITHMS.options_of(canonical)[1] or Section
    if not isinstance(values, Mapping):
        keys = ", ".join(options.model_fields) or "none: it has no options"
        yield Fault((KEY, name), f"allowed: a mapping of options: {keys}", given(values))
    elif faults := all_faults(values, options):
        yield from (replace(fault, key=(KEY, name, *fault.key), place=()) for fault in faults)
    else:
        yield Step(canonical, options.model_validate(dict(values)))
