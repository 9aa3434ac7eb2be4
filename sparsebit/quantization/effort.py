"""`effort`: names for ladders of algorithms, by how much time post-training quantization may take."""

from __future__ import annotations

from typing import Any, Literal

import torch

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError

Effort = Literal["fast", "good", "best"]

# The ALGORITHMS of each effort. They are only used if some weights have fewer than 8 bits: with 8 bits there is hardly
# any accuracy to gain, and rounding that is fitted to little data can lose some.
_GPTQ = {"gptq": {"SWEEPS": 0, "MAX_ROWS": 16384, "SCALE_SEARCH": "gptq"}}
# The whole network learns the float model's outputs, from new views of the images in every step.
_NETWORK = {"METHOD": "distill", "VIEWS": 0, "PATCHED": 0.5, "FEATURES": 1.0, "LR": 0.001}
LADDERS: dict[str, tuple[Any, ...]] = {"fast": (), "good": (_GPTQ,), "best": (_GPTQ, {"reconstruct": _NETWORK})}
# Samples and steps of the training: a CPU takes an hour for as much as a GPU does in minutes.
_ON_CPU, _ON_GPU = {"BATCH_SIZE": 32, "STEPS": 2000}, {"BATCH_SIZE": 128, "STEPS": 6000}


def with_effort(config: QuantConfig, effort: str | None) -> QuantConfig:
    """The config with the algorithms of that effort; "good" and "best" also set ranges by `mse`, unless one is chosen.

    With weights of 8 bits or more only the ranges change.

    >>> from sparsebit.quantization import parse_qconfig
    >>> config = parse_qconfig("{W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {BIT: 8}}}")
    >>> [step.name for step in with_effort(config, "best").ALGORITHMS]
    ['gptq', 'reconstruct']
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
    changes: list[Any] = ["ALGORITHMS", _steps(config, effort) if _has_few_bits(config) else []]
    for kind in ("W", "A"):
        quantizer = getattr(config, kind).QUANTIZER
        is_open = not config.is_set(f"{kind}.OBSERVER.TYPE") and quantizer.TYPE == "uniform"
        if is_open and not quantizer.DISABLE:
            changes += [f"{kind}.OBSERVER.TYPE", "mse"]
    return config.replace(*changes)


def _steps(config: QuantConfig, effort: str) -> list[Any]:
    size = _ON_CPU if torch.device(config.DEVICE).type == "cpu" else _ON_GPU
    return [
        {name: {**options, **(size if name == "reconstruct" else {})}}
        for step in LADDERS[effort]
        for name, options in step.items()
    ]


def _has_few_bits(config: QuantConfig) -> bool:
    """Whether any weight has fewer than 8 bits: all of them, or those of a `SPECIFIC` entry."""
    quantizer = config.W.QUANTIZER
    found = {"QUANTIZER.BIT": quantizer.BIT, "QUANTIZER.DISABLE": quantizer.DISABLE}
    choices = [found, *(found | dict(override.settings) for override in config.W.SPECIFIC)]
    return any(not choice["QUANTIZER.DISABLE"] and choice["QUANTIZER.BIT"] < 8 for choice in choices)
