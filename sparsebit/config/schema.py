"""`QuantConfig`: every key of a quantization config, typed, frozen, strict, with its meaning and its default.

A new key is a field with a description here or in `tensor_config`; the reference page and error messages follow from
it. Rules between keys are in `rules`. `SPECIFIC` overrides single layers by glob, so each rule is checked for the
general config and for every combination of overrides that a layer can get (`_all_broken`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, overload

import pydantic
from pydantic import BeforeValidator, Field, PlainSerializer

from sparsebit.backends import BACKENDS
from sparsebit.config.algorithm_steps import BATCHNORM_TUNING, Step, read_steps, wrong_order
from sparsebit.config.config_errors import Fault, Faults, error, faults_of, given, unknown_key
from sparsebit.config.fields import Allowed, OneOf, field_at, section_of
from sparsebit.config.rules import broken_rules
from sparsebit.config.section import Section, put
from sparsebit.config.selectors import Override, Selector, near_names, read_overrides
from sparsebit.config.tensor_config import ActivationConfig, Kind, TensorConfig, WeightConfig

__all__ = ["ActivationConfig", "Kind", "QuantConfig", "Schedule", "TensorConfig", "UnmatchedGlob", "WeightConfig"]


def default_device() -> str:
    """`cuda` if there is one, else `cpu`"""
    import torch  # here, so that a config that names its device can be read without torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _folded(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), BeforeValidator(_folded), Allowed("cpu, cuda, cuda:N")]
Globs = Annotated[tuple[str, ...], Allowed('a list of globs, ["backbone.*"]')]
Overrides = Annotated[
    tuple[Override, ...],
    BeforeValidator(read_overrides),
    PlainSerializer(lambda overrides: [override.to_entry() for override in overrides]),
    Allowed('a list, [{"layer1.*": [KEY, value, KEY, value...]}]'),
]
Steps = Annotated[
    tuple[Step, ...],
    BeforeValidator(read_steps),
    PlainSerializer(lambda steps: [step.to_entry() for step in steps]),
    Allowed("a list of names, each with its options if there are any, [gptq, {reconstruct: {STEPS: 500}}]"),
]


class Schedule(Section):
    """Changes to the graph before quantization."""

    FUSE_BN: bool = Field(False, description="Fold batch norms into the convolutions and linears before them.")
    MERGE_BRANCHES: bool = Field(
        True,
        description="Where batch norms are folded: a sum of convolutions and norms of one input (RepVGG, MobileOne, "
        "RepGhost) becomes one convolution.",
    )
    FOLD_SCALES: bool = Field(
        True,
        description="Where batch norms are folded: a parameter for each channel that a layer's output is multiplied by "
        "(layer scale) is multiplied into its weight.",
    )
    PAD_CHANNELS: bool = Field(
        True,
        description="In files for ONNX Runtime: channels of zeros are added, and narrow groups joined, where its fast "
        "integer kernels need multiples of 16 (depthwise) or 4 channels. The other codes stay what they were.",
    )
    BN_TUNING: bool = Field(
        False,
        description="Batch-norm statistics will be tuned under quantization; folding waits until that has ended. "
        "Needs per-channel weights.",
    )
    DISABLE_UNNECESSARY_QUANT: bool = Field(
        True, description="In fused chains (conv + activation, add + relu) only the first op quantizes its input."
    )


_SPECIFIC = (
    "Settings for single layers, by glob on their names, with the keys of this section. "
    "The first glob that matches a layer wins; later ones are ignored."
)


class WeightSection(WeightConfig):
    """`W`: the config of all weights, with overrides for single layers."""

    SPECIFIC: Overrides = Field((), description=_SPECIFIC)


class ActivationSection(ActivationConfig):
    """`A`: the config of all activations, with overrides for single layers."""

    SPECIFIC: Overrides = Field((), description=_SPECIFIC)


class UnmatchedGlob(NamedTuple):
    """A `SPECIFIC` glob without effect: it matches no layer, or an earlier glob (`behind`) wins for all of them.

    Its text is the warning.
    """

    key: str
    glob: str
    near: list[str]
    behind: str = ""

    def __str__(self) -> str:
        near = f"; near names: {', '.join(self.near)}" if self.near else ""
        why = f"matches no layer, so its settings have no effect{near}"
        if self.behind:
            why = f"has no effect: {self.behind!r} is before it and matches the same layers, and the first match wins; "
            why += f"put {self.glob!r} before {self.behind!r}"
        return f"{self.key}: the glob {self.glob!r} {why}"


# Near names, which take time to find, are only searched for this many unmatched globs.
MOST_NEAR_NAMES = 5


class QuantConfig(Section):
    """A whole quantization config: made by `parse_qconfig` (or `from_dict`), changed only by `replace`."""

    BACKEND: Annotated[str, OneOf.fixed(*BACKENDS)] = Field(
        "virtual", description="Where the model will run; `virtual` simulates any format."
    )
    DEVICE: Device = Field(default_factory=default_device, description="Where calibration and training run.")
    SKIP_TRACE_MODULES: Globs = Field(
        (), description="Modules (globs on their paths) that are not entered and stay float."
    )
    SCHEDULE: Schedule = Field(default_factory=Schedule, description="Changes to the graph before quantization.")
    ALGORITHMS: Steps = Field(
        (),
        description="Algorithms to run on the calibrated model, in this order, with its data. `quantize` does it; "
        "with a `QuantModel` of your own call `apply_algorithms`.",
    )
    W: WeightSection = Field(default_factory=WeightSection, description="Weights.")
    A: ActivationSection = Field(default_factory=ActivationSection, description="Activations.")

    @property
    def without_batchnorm_tuning(self) -> str | None:
        """The change of the config that switches batch-norm tuning off; None if it is off.

        While they are to be tuned, batch norms are not folded, and weights have a scale per channel.
        """
        if any(step.name == BATCHNORM_TUNING for step in self.ALGORITHMS):
            return f"take {BATCHNORM_TUNING} out of ALGORITHMS"
        return "SCHEDULE.BN_TUNING: false" if self.SCHEDULE.BN_TUNING else None

    @overload
    def resolve(self, kind: Literal["W"], layer: str) -> WeightConfig: ...
    @overload
    def resolve(self, kind: Literal["A"], layer: str) -> ActivationConfig: ...
    def resolve(self, kind: Kind, layer: str) -> TensorConfig:
        """The config of one layer's weights or activations: the winner of `SPECIFIC` applied, the rules checked.

        Overrides of `W` and of `A` that are valid separately may break a rule together; that is reported here, under
        the layer's name.
        """
        overrides = {section: self.winner(section, layer) for section in _KINDS}
        if faults := [fault.at(layer) for fault in self._broken(kind, overrides["W"], overrides["A"])]:
            raise error(faults)
        return self._tensor(kind, overrides[kind])

    def winner(self, kind: Kind, layer: str) -> Override | None:
        """The `SPECIFIC` entry for a layer's weights or activations; None if no glob matches."""
        return self._selectors[kind].first(layer)

    def unmatched_globs(self, layers: Iterable[str], kind: Kind | None = None) -> list[UnmatchedGlob]:
        """The `SPECIFIC` globs that have no effect on any of the layers, and why."""
        names = list(layers)
        return [
            found
            for section in ((kind,) if kind else _KINDS)
            for found in without_effect(f"{section}.SPECIFIC", self._selectors[section], names)
        ]

    @cached_property
    def _selectors(self) -> dict[Kind, Selector]:
        return {kind: Selector(self._section(kind).SPECIFIC) for kind in _KINDS}

    @cached_property
    def _tensors(self) -> dict[tuple[Kind, Any], TensorConfig]:
        return {}

    @pydantic.field_validator("A")
    @classmethod
    def _complete(cls, section: ActivationSection, info: pydantic.ValidationInfo) -> ActivationSection:
        return _with_default_scheme(section, info.data.get("BACKEND", "virtual"))

    @pydantic.model_validator(mode="after")
    def _check(self) -> QuantConfig:
        wrong = {
            (kind, place): faults
            for kind in _KINDS
            for place, override in enumerate(self._section(kind).SPECIFIC)
            if (faults := list(_wrong(kind, override)))
        }
        order = list(wrong_order(self.ALGORITHMS))
        if faults := [*order, *(fault for found in wrong.values() for fault in found), *self._all_broken(wrong)]:
            raise Faults(faults)
        return self

    def _all_broken(self, wrong: Container[tuple[Kind, int | None]]) -> Iterator[Fault]:
        """The broken rules of the general config, then those that a `SPECIFIC` glob adds.

        `wrong`: entries of `SPECIFIC` whose rules cannot be checked.
        """
        # The general config is that of a layer with the empty name: a glob like `*` in SPECIFIC applies to it.
        sound = [[o for p, o in enumerate(self._section(kind).SPECIFIC) if (kind, p) not in wrong] for kind in _KINDS]
        weight, activation = (Selector(overrides).first("") for overrides in sound)
        general = [fault for kind in _KINDS for fault in self._broken(kind, weight, activation)]
        yield from general
        found: dict[tuple[Any, ...], list[Fault]] = {}
        for glob in sorted({override.glob for overrides in sound for override in overrides}):
            places = [(kind, next(iter(self._selectors[kind].matching(glob)), None)) for kind in _KINDS]
            if any(place in wrong for place in places):
                continue
            weight, activation = (
                None if place is None else self._section(kind).SPECIFIC[place] for kind, place in places
            )
            # Checked once for equal settings: mixed-precision configs have thousands of entries with a few of them.
            key = tuple(None if override is None else str(override.settings) for override in (weight, activation))
            if key not in found:
                broken = [fault for kind in _KINDS for fault in self._broken(kind, weight, activation)]
                found[key] = [fault for fault in broken if fault not in general]
            yield from (fault.at(glob) for fault in found[key])

    def _broken(self, kind: Kind, weight: Override | None, activation: Override | None) -> Iterator[Fault]:
        """The broken rules of a tensor whose layer has these overrides."""
        try:
            tensor = self._tensor(kind, weight if kind == "W" else activation)
        except pydantic.ValidationError as invalid:  # a rule between the keys of a section of options
            return iter(faults_of(invalid, _MODELS[kind], prefix=(kind,)))
        return broken_rules(
            kind,
            tensor,
            backend=self.BACKEND,
            weight_only=kind == "W" and self._is_float("A", activation),
            bn_tuning=self.without_batchnorm_tuning,
        )

    def _is_float(self, kind: Kind, override: Override | None) -> bool:
        try:
            return self._tensor(kind, override).QUANTIZER.DISABLE
        except pydantic.ValidationError:  # reported by `_broken`
            return False

    def _tensor(self, kind: Kind, override: Override | None) -> TensorConfig:
        """The config of a tensor with the override's settings, made once."""
        key = (kind, None if override is None else str(override.settings))
        if key not in self._tensors:
            values = self._section(kind).model_dump(exclude_unset=True, exclude={"SPECIFIC"})
            for name, value in () if override is None else override.settings:
                put(values, tuple(name.split(".")), value)
            self._tensors[key] = (
                WeightConfig.model_validate(values)
                if kind == "W"
                else _with_default_scheme(ActivationConfig.model_validate(values), self.BACKEND)
            )
        return self._tensors[key]

    def _section(self, kind: Kind) -> WeightSection | ActivationSection:
        return self.W if kind == "W" else self.A


_KINDS: tuple[Kind, Kind] = ("W", "A")
_MODELS: dict[Kind, type[TensorConfig]] = {"W": WeightConfig, "A": ActivationConfig}
C = TypeVar("C", bound=ActivationConfig)


def without_effect(key: str, selector: Selector, names: list[str]) -> Iterator[UnmatchedGlob]:
    """The globs that apply to none of the layers, and why."""
    matched: dict[int, int] = {}  # place in the list -> of the one that wins for a layer of it, itself where it can
    for name in names:
        places = selector.matching(name)
        for place in places:
            matched.setdefault(place, places[0])
        matched.update({place: place for place in places[:1]})
    num_unmatched = 0
    for place, override in enumerate(selector.overrides):
        if place not in matched:
            num_unmatched += 1
            near = near_names(override.glob, names) if num_unmatched <= MOST_NEAR_NAMES else []
            yield UnmatchedGlob(key, override.glob, near)
        elif matched[place] != place:
            yield UnmatchedGlob(key, override.glob, [], selector.overrides[matched[place]].glob)


def _with_default_scheme(config: C, backend: str) -> C:
    """The same config with the QSCHEME that the backend runs, if the user gave none."""
    if config.is_set("QSCHEME") or False in BACKENDS[backend].activation.symmetric:
        return config
    completed = config.model_copy(update={"QSCHEME": "per-tensor-symmetric"})
    completed.model_fields_set.discard("QSCHEME")  # it is still a default: the user did not write it
    return completed


def _wrong(kind: Kind, override: Override) -> Iterator[Fault]:
    """The faults of the keys and values of one override, each checked separately."""
    model = _MODELS[kind]
    for key, value in override.settings:
        path = tuple(key.split("."))
        field = field_at(model, path)
        faults: list[Fault] = []
        if field is None and path[0] in _KINDS and field_at(QuantConfig, path):
            remedy = f"write {'.'.join(path[1:])}" + (f" in {path[0]}.SPECIFIC" if path[0] != kind else "")
            faults = [Fault((kind, *path), f"keys of {kind}.SPECIFIC start below {kind}; {remedy}", given(value))]
        elif field is None:
            faults = [unknown_key(model, path, value, prefix=(kind,))]
        elif section := section_of(field):
            inner = ", ".join(f"{key}.{name}" for name in section.model_fields)
            faults = [Fault((kind, *path), f"holds further keys; set one of {inner}", given(value))]
        else:
            values: dict[str, Any] = {}
            put(values, path, value)
            try:
                model.model_validate(values)
            except pydantic.ValidationError as invalid:
                # Rules between keys of a section are checked for all settings together.
                faults = [fault for fault in faults_of(invalid, model, (kind,)) if fault.key == (kind, *path)]
        yield from (fault.at(override.glob) for fault in dict.fromkeys(faults))
