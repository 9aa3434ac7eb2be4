"""`effort`: names for ladders of algorithms, by how much time post-training quantization may take."""

from __future__ import annotations

from typing import Any, Literal

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError

Effort = Literal["fast", "good", "best"]

# The ALGORITHMS of each effort. They are only used if some weights have fewer than 8 bits: with 8 bits there is hardly
# any accuracy to gain, and rounding that is fitted to little data can lose some.
LADDERS: dict[str, tuple[Any, ...]] = {
    "fast": (),
    "good": ({"gptq": {"SWEEPS": 0, "MAX_ROWS": 16384, "SCALE_SEARCH": "gptq"}},),
    "best": ("smooth", {"gptq": {"SCALE_SEARCH": "gptq"}}, {"reconstruct": {"METHOD": "qdrop", "LEARN_BIASES": True}}),
}


def with_effort(config: QuantConfig, effort: str | None) -> QuantConfig:
    """The config with the algorithms of that effort; "good" and "best" also set ranges by `mse`, unless one is chosen.

    With weights of 8 bits or more only the ranges change.

    >>> from sparsebit.quantization import parse_qconfig
    >>> config = parse_qconfig("{W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {BIT: 8}}}")
    >>> [step.name for step in with_effort(config, "best").ALGORITHMS]
    ['smooth', 'gptq', 'reconstruct']
    """
    if effort is None:
        return config
    if effort not in LADDERS:
        raise ConfigError(f"effort={effort!r}: allowed: {', '.join(LADDERS)}")
    if config.ALGORITHMS:
        names = ", ".join(step.name for step in config.ALGORITHMS)
        raise ConfigError(f"effort={effort!r}, and the config has ALGORITHMS, too ({names}): give one of the two")
    if effort == "fast":
        return config
    changes: list[Any] = ["ALGORITHMS", list(LADDERS[effort]) if _has_few_bits(config) else []]
    for kind in ("W", "A"):
        quantizer = getattr(config, kind).QUANTIZER
        is_open = not config.is_set(f"{kind}.OBSERVER.TYPE") and quantizer.TYPE == "uniform"
        if is_open and not quantizer.DISABLE:
            changes += [f"{kind}.OBSERVER.TYPE", "mse"]
    return config.replace(*changes)


def _has_few_bits(config: QuantConfig) -> bool:
    """Whether any weight has fewer than 8 bits: all of them, or those of a `SPECIFIC` entry."""
    quantizer = config.W.QUANTIZER
    found = {"QUANTIZER.BIT": quantizer.BIT, "QUANTIZER.DISABLE": quantizer.DISABLE}
    choices = [found, *(found | dict(override.settings) for override in config.W.SPECIFIC)]
    return any(not choice["QUANTIZER.DISABLE"] and choice["QUANTIZER.BIT"] < 8 for choice in choices)
