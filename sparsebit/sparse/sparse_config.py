"""`parse_sconfig`: a sparsity config from a YAML file, a dict or YAML text, as a frozen `SparseConfig`.

The schema works like that of quantization configs (`config/section.py`): all wrong keys and values are named in one
ConfigError. Checks that need the config alone are here (`SparseConfig._faults`); checks that need the model are in
`config_checks.py`. `ratio_of` is the one place that decides the ratio of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any

import pydantic
from pydantic import Field

from sparsebit.config.config_errors import Fault, Faults, faults_of, given, unknown_key
from sparsebit.config.fields import OneOf, field_at
from sparsebit.config.reading import Source, read
from sparsebit.config.schema import Device, Globs, Overrides, default_device
from sparsebit.config.section import Section, put
from sparsebit.config.selectors import Selector, matches_any
from sparsebit.sparse.scoring.criteria import CRITERIA
from sparsebit.sparse.scoring.element_masks import block_shape, n_of_m
from sparsebit.sparse.sparsers import SPARSERS

_SCOPES = {"layer": "layer", "layerwise": "layer", "global": "global"}
BLOCKS = "residual_block"
_STRUCTURED = ("channel", "filter", "head", "neuron", BLOCKS)
_GRANULARITY = (
    "element, 4x1 (blocks), 2:4 (N of M), channel, filter, head, neuron, residual_block, layerwise (the first "
    "Sparsebit's)"
)


def _granularity(value: str) -> str:
    name = value.lower()
    if name in ("", "element", "layerwise", *_STRUCTURED):
        return name
    pattern, block = n_of_m(name), block_shape(name)
    if (pattern and 0 < pattern[0] < pattern[1]) or (block and min(block) > 0):
        return name
    raise ValueError(f"not one of {_GRANULARITY}")


class LayerSparsity(Section):
    """The keys that `SPECIFIC` may set for single layers."""

    RATIO: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="The share that is pruned, 0 to 1.")


class SparserConfig(LayerSparsity):
    """Which weights are pruned, by which criterion, and how many."""

    TYPE: Annotated[str, OneOf.registered(SPARSERS)] = Field(
        "structured",
        description="`structured` (`structed`): channels, heads, neurons or whole residual blocks, which `shrink` "
        "removes; `unstructured` (`unstructed`): single weights, blocks or N of M; `register_sparser` adds more.",
    )
    STRATEGY: Annotated[str, OneOf.registered(CRITERIA)] = Field(
        "l1norm", description="The criterion; `register_criterion` adds more."
    )
    GRANULARITY: Annotated[str, OneOf(lambda: (_GRANULARITY,), _granularity)] = Field(
        "", description="What is pruned at once. By default channels (structured) or elements (unstructured)."
    )
    SCOPE: Annotated[str, OneOf(lambda: ("layer", "global"), lambda v: _SCOPES[v.lower()])] = Field(
        "layer", description="Whether the ratio holds in every layer or group, or over all of them together."
    )
    SPARE: Globs = Field((), description="Layers (globs on their names) that are left alone.")
    SPECIFIC: Overrides = Field((), description="Ratios of single layers by glob; the first glob that matches wins.")

    @property
    def is_structured(self) -> bool:
        return self.TYPE == "structured"

    @property
    def is_of_blocks(self) -> bool:
        return self.GRANULARITY == BLOCKS


class ScheduleConfig(Section):
    """How the ratio is reached: each call of `calc_params` is one step."""

    TYPE: Annotated[str, OneOf.fixed("one-shot", "linear", "cubic")] = Field(
        "one-shot", description="`linear`: equal steps; `cubic`: large steps first (Zhu and Gupta 2017)."
    )
    STEPS: Annotated[int, Field(ge=1)] = Field(1, description="The number of steps of `linear` and `cubic`.")

    def share(self, step: int) -> float:
        """The part of the ratio that applies after a step, counted from 1.

        >>> [ScheduleConfig(TYPE="cubic", STEPS=2).share(step) for step in (1, 2, 3)]
        [0.875, 1.0, 1.0]
        """
        done = min(1.0, step / self.STEPS)
        return 1 - (1 - done) ** 3 if self.TYPE == "cubic" else done


class SparseConfig(Section):
    """A whole sparsity config: made by `parse_sconfig`, changed only by `replace`."""

    DEVICE: Device = Field(default_factory=default_device, description="Where the model runs.")
    SPARSER: SparserConfig = Field(default_factory=SparserConfig, description="What is pruned.")
    SCHEDULE: ScheduleConfig = Field(default_factory=ScheduleConfig, description="How the ratio is reached.")

    @pydantic.model_validator(mode="after")
    def _check(self) -> SparseConfig:
        if faults := list(self._faults()):
            raise Faults(faults)
        return self

    def _faults(self) -> Iterator[Fault]:
        sparser = self.SPARSER
        name, key = sparser.GRANULARITY, ("SPARSER", "GRANULARITY")
        settings = [(over.glob, setting, value) for over in sparser.SPECIFIC for setting, value in over.settings]
        is_of_channels = name in _STRUCTURED
        if name not in ("", "layerwise") and is_of_channels != sparser.is_structured:
            kind = "structured" if is_of_channels else "unstructured"
            yield Fault(key, f"is for TYPE: {kind}, and TYPE is {sparser.TYPE}", given(name))
        if name == "layerwise" and sparser.SCOPE == "global":
            yield Fault(key, "means SCOPE: layer, and SCOPE is global; take one of them out", given(name))
        if pattern := n_of_m(name):
            share = 1 - pattern[0] / pattern[1]
            if sparser.is_set("RATIO") and abs(sparser.RATIO - share) > 1e-6:
                yield Fault(("SPARSER", "RATIO"), f"{name} prunes {share:g}; take RATIO out", given(sparser.RATIO))
            if sparser.SCOPE == "global":
                yield Fault(("SPARSER", "SCOPE"), f"{name} has one ratio in every row; set layer", given("global"))
            for glob, setting, value in settings:
                if setting == "RATIO" and value not in (0, 0.0):
                    reason = f"{name} prunes {share:g} of a layer, or none of it (RATIO 0)"
                    yield Fault(("SPARSER", "RATIO"), reason, given(value)).at(glob)
        kind, steps = self.SCHEDULE.TYPE, self.SCHEDULE.STEPS
        if kind == "one-shot" and steps > 1:
            yield Fault(("SCHEDULE", "STEPS"), "one-shot has one step; set TYPE: linear or cubic", given(steps))
        if pattern and kind != "one-shot":
            yield Fault(("SCHEDULE", "TYPE"), f"{name} has no steps between; set one-shot", given(kind))
        for glob, setting, value in settings:
            yield from (fault.at(glob) for fault in _wrong(setting, value))

    @cached_property
    def _selector(self) -> Selector:
        return Selector(self.SPARSER.SPECIFIC)

    def ratio_of(self, layers: str | tuple[str, ...]) -> float:
        """The ratio of a layer, or of a group of layers: 0 for a spared one, else that of the first matching glob."""
        names = (layers,) if isinstance(layers, str) else layers
        if any(matches_any(self.SPARSER.SPARE, name) for name in names):
            return 0.0
        # The first entry of SPECIFIC that matches any of the group's layers decides, whichever layer it matches.
        places = sorted(place for name in names for place in self._selector.matching(name)[:1])
        pattern = n_of_m(self.SPARSER.GRANULARITY)
        ratio = 1 - pattern[0] / pattern[1] if pattern else self.SPARSER.RATIO
        return float(dict(self._selector.overrides[places[0]].settings).get("RATIO", ratio)) if places else ratio

    def is_overridden(self, layers: tuple[str, ...]) -> bool:
        """Whether `SPARE` or `SPECIFIC` mentions one of these layers."""
        return any(matches_any(self.SPARSER.SPARE, name) or self._selector.matching(name) for name in layers)


def _wrong(key: str, value: object) -> list[Fault]:
    path = tuple(key.split("."))
    if field_at(LayerSparsity, path) is None:
        return [unknown_key(LayerSparsity, path, value, prefix=("SPARSER",))]
    values: dict[str, Any] = {}
    put(values, path, value)
    try:
        LayerSparsity.model_validate(values)
    except pydantic.ValidationError as invalid:
        return faults_of(invalid, LayerSparsity, ("SPARSER",))
    return []


def parse_sconfig(source: Source | SparseConfig) -> SparseConfig:
    """The checked, frozen config; everything wrong in it is named in one ConfigError.

    >>> config = parse_sconfig("SPARSER: {TYPE: structed, STRATEGY: L1norm, RATIO: 0.5}")
    >>> config.SPARSER.TYPE, config.SPARSER.STRATEGY, config.SPARSER.RATIO
    ('structured', 'l1norm', 0.5)
    """
    return source if isinstance(source, SparseConfig) else SparseConfig.from_dict(read(source))
