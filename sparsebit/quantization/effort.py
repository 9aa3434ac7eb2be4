"""`effort`: names for ladders of algorithms, by how much time post-training quantization may take."""

from __future__ import annotations

from typing import Any, Literal

import torch

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError

Effort = Literal["fast", "good", "best"]

# The ALGORITHMS of each effort. GPTQ is only used if some weights have fewer than 8 bits, and training if some weights
# or activations have: with 8 bits there is hardly any accuracy to gain, and a fit to little data can lose some.
_GPTQ = {"gptq": {"SWEEPS": 0, "MAX_ROWS": 16384, "SCALE_SEARCH": "gptq"}}
# The whole network learns the float model's outputs, from new views of the images in every step.
_NETWORK = {"METHOD": "distill", "VIEWS": 0, "PATCHED": 0.5, "LR": 0.001}
LADDERS: dict[str, tuple[Any, ...]] = {"fast": (), "good": (_GPTQ,), "best": (_GPTQ, {"reconstruct": _NETWORK})}
# Samples and steps of the training: a CPU takes an hour for as much as a GPU does in minutes.
_ON_CPU, _ON_GPU = {"BATCH_SIZE": 32, "STEPS": 2000}, {"BATCH_SIZE": 128, "STEPS": 6000}


def with_effort(config: QuantConfig, effort: str | None, *, steps: int | None = None) -> QuantConfig:
    """The config with the algorithms of that effort; "good" and "best" also set ranges by `mse`, unless one is chosen.

    With 8 bits or more only the ranges change. `steps`: of the training in "best", if not as many as usual.

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
    changes: list[Any] = ["ALGORITHMS", _algorithms(config, effort, steps)]
    for kind in ("W", "A"):
        quantizer = getattr(config, kind).QUANTIZER
        is_open = not config.is_set(f"{kind}.OBSERVER.TYPE") and quantizer.TYPE == "uniform"
        if is_open and not quantizer.DISABLE:
            changes += [f"{kind}.OBSERVER.TYPE", "mse"]
    return config.replace(*changes)


def _algorithms(config: QuantConfig, effort: str, steps: int | None) -> list[Any]:
    has_few = {kind: _has_few_bits(config, kind) for kind in ("W", "A")}
    is_useful = {"gptq": has_few["W"], "reconstruct": any(has_few.values())}
    sizes = {"reconstruct": _ON_CPU if torch.device(config.DEVICE).type == "cpu" else _ON_GPU}
    if steps is not None:
        sizes["reconstruct"] = {**sizes["reconstruct"], "STEPS": steps}
    chosen = [(name, options) for step in LADDERS[effort] for name, options in step.items()]
    return [{name: {**options, **sizes.get(name, {})}} for name, options in chosen if is_useful[name]]


def _has_few_bits(config: QuantConfig, kind: str) -> bool:
    """Whether any weight ("W") or activation ("A") has fewer than 8 bits: all, or those of a `SPECIFIC` entry."""
    section = getattr(config, kind)
    found = {"QUANTIZER.BIT": section.QUANTIZER.BIT, "QUANTIZER.DISABLE": section.QUANTIZER.DISABLE}
    choices = [found, *(found | dict(override.settings) for override in section.SPECIFIC)]
    return any(not choice["QUANTIZER.DISABLE"] and choice["QUANTIZER.BIT"] < 8 for choice in choices)
