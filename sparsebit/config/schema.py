"""`QuantConfig`: every key of a quantization config, typed, frozen, strict, with its meaning and its default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, overload

import pydantic
from pydantic import BeforeValidator, Field, PlainSerializer

from sparsebit.backends import BACKENDS
from sparsebit.config.faults import Fault, Faults, error, faults_of, given, unknown_key
from sparsebit.config.fields import Allowed, OneOf, field_at, section_of
from sparsebit.config.rules import broken_rules
from sparsebit.config.section import Section, put
from sparsebit.config.selectors import Override, matches, near_names, read_overrides, select
from sparsebit.config.tensor_config import ActivationConfig, Kind, TensorConfig, WeightConfig

__all__ = ["ActivationConfig", "Kind", "QuantConfig", "Schedule", "TensorConfig", "UnmatchedGlob", "WeightConfig"]


def _default_device() -> str:
    """`cuda` if there is one, else `cpu`"""
    import torch  # here, so that reading a config that names its device needs no torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _folded(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$"), BeforeValidator(_folded), Allowed("cpu, cuda, cuda:N")]
Globs = Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Allowed('a list of globs, ["backbone.*"]')]
Overrides = Annotated[
    tuple[Override, ...],
    BeforeValidator(read_overrides),
    PlainSerializer(lambda overrides: [override.to_entry() for override in overrides]),
    Allowed('a list, [{"layer1.*": [KEY, value, KEY, value...]}]'),
]


class Schedule(Section):
    """What is done to the graph."""

    FUSE_BN: bool = Field(False, description="Fold batch norms into the convolutions and linears before them.")
    BN_TUNING: bool = Field(
        False,
        description="Batch-norm statistics will be tuned under quantization; folding waits until that has ended. "
        "Needs per-channel weights.",
    )
    DISABLE_UNNECESSARY_QUANT: bool = Field(
        True,
        description="In fused chains (conv + activation, add + relu) only the first op quantizes its input.",
    )

    @property
    def fuse_bn_now(self) -> bool:
        """Whether batch norms are folded when the model is built: not while they are still to be tuned."""
        return self.FUSE_BN and not self.BN_TUNING


_SPECIFIC = "Settings for single layers, by glob on their names, with the keys of this section. A later entry wins."


class WeightSection(WeightConfig):
    """`W`: the config of all weights, and what is special about some."""

    SPECIFIC: Overrides = Field((), description=_SPECIFIC)


class ActivationSection(ActivationConfig):
    """`A`: the config of all activations, and what is special about some."""

    SPECIFIC: Overrides = Field((), description=_SPECIFIC)


class UnmatchedGlob(NamedTuple):
    """A `SPECIFIC` glob that no layer answers to; its text is the warning."""

    key: str
    glob: str
    near: list[str]

    def __str__(self) -> str:
        near = f"; near names: {', '.join(self.near)}" if self.near else ""
        return f"{self.key}: the glob {self.glob!r} matches no layer, so its settings have no effect{near}"


class QuantConfig(Section):
    """A whole quantization config: made by `parse_qconfig` (or `from_dict`), changed only by `replace`."""

    BACKEND: Annotated[str, OneOf.fixed(*BACKENDS)] = Field(
        "virtual", description="Where the model will run; `virtual` simulates any format."
    )
    DEVICE: Device = Field(default_factory=_default_device, description="Where calibration and training run.")
    SKIP_TRACE_MODULES: Globs = Field(
        (), description="Modules (globs on their paths) that are not entered and stay float."
    )
    SCHEDULE: Schedule = Field(default_factory=Schedule, description="What is done to the graph.")
    W: WeightSection = Field(default_factory=WeightSection, description="Weights.")
    A: ActivationSection = Field(default_factory=ActivationSection, description="Activations.")

    @overload
    def resolve(self, kind: Literal["W"], layer: str) -> WeightConfig: ...
    @overload
    def resolve(self, kind: Literal["A"], layer: str) -> ActivationConfig: ...
    def resolve(self, kind: Kind, layer: str) -> TensorConfig:
        """The config of one layer's weights or activations: its `SPECIFIC` overrides applied, the rules checked.

        Overrides that are sound alone may break a rule together; that shows here, under the layer's name.
        """
        tensor = self._tensor(kind, layer)
        if faults := [fault.at(layer) for fault in self._broken(kind, layer, tensor)]:
            raise error(faults)
        return tensor

    def unmatched_globs(self, layers: Iterable[str], kind: Kind | None = None) -> list[UnmatchedGlob]:
        """The `SPECIFIC` globs that match none of the layers, each with the names that may have been meant."""
        names = list(layers)
        return [
            UnmatchedGlob(f"{section}.SPECIFIC", override.glob, near_names(override.glob, names))
            for section in ((kind,) if kind else _KINDS)
            for override in self._section(section).SPECIFIC
            if not any(matches(override.glob, name) for name in names)
        ]

    @pydantic.field_validator("A")
    @classmethod
    def _complete(cls, section: ActivationSection, info: pydantic.ValidationInfo) -> ActivationSection:
        return _with_default_scheme(section, info.data.get("BACKEND", "virtual"))

    @pydantic.model_validator(mode="after")
    def _check(self) -> QuantConfig:
        overrides = [(kind, override) for kind in _KINDS for override in self._section(kind).SPECIFIC]
        wrong = [fault for kind, override in overrides for fault in _wrong(kind, override)]
        if faults := wrong or list(self._all_broken()):
            raise Faults(faults)
        return self

    def _all_broken(self) -> Iterator[Fault]:
        """The broken rules of the config as such, then those that come in with a `SPECIFIC` glob."""
        general = {kind: list(self._broken(kind, "")) for kind in _KINDS}
        globs = dict.fromkeys(override.glob for kind in _KINDS for override in self._section(kind).SPECIFIC)
        for kind in _KINDS:
            yield from general[kind]
            for glob in globs:
                yield from (fault.at(glob) for fault in self._broken(kind, glob) if fault not in general[kind])

    def _broken(self, kind: Kind, site: str, tensor: TensorConfig | None = None) -> Iterator[Fault]:
        return broken_rules(
            kind,
            tensor or self._tensor(kind, site),
            backend=self.BACKEND,
            weight_only=kind == "W" and self._tensor("A", site).QUANTIZER.DISABLE,
            bn_tuning=self.SCHEDULE.BN_TUNING,
        )

    def _tensor(self, kind: Kind, site: str) -> TensorConfig:
        section = self._section(kind)
        values = section.model_dump(exclude_unset=True, exclude={"SPECIFIC"})
        for override in select(section.SPECIFIC, site):
            for key, value in override.settings:
                put(values, tuple(key.split(".")), value)
        if kind == "W":
            return WeightConfig.model_validate(values)
        return _with_default_scheme(ActivationConfig.model_validate(values), self.BACKEND)

    def _section(self, kind: Kind) -> WeightSection | ActivationSection:
        return self.W if kind == "W" else self.A


_KINDS: tuple[Kind, Kind] = ("W", "A")
C = TypeVar("C", bound=ActivationConfig)


def _with_default_scheme(config: C, backend: str) -> C:
    """The same config with the QSCHEME that the backend runs, where the user gave none."""
    if config.is_set("QSCHEME") or False in BACKENDS[backend].activation.symmetric:
        return config
    completed = config.model_copy(update={"QSCHEME": "per-tensor-symmetric"})
    completed.model_fields_set.discard("QSCHEME")  # it is still a default: nobody wrote it
    return completed


def _wrong(kind: Kind, override: Override) -> Iterator[Fault]:
    """What is wrong with the keys and values of one override, each by itself."""
    model: type[TensorConfig] = WeightConfig if kind == "W" else ActivationConfig
    for key, value in override.settings:
        path = tuple(key.split("."))
        field = field_at(model, path)
        if field is None and path[0] in _KINDS and field_at(QuantConfig, path):
            remedy = f"write {'.'.join(path[1:])}" + (f" in {path[0]}.SPECIFIC" if path[0] != kind else "")
            fault = Fault((kind, *path), f"keys of {kind}.SPECIFIC start below {kind}; {remedy}", given(value))
        elif field is None:
            fault = unknown_key(model, path, value, prefix=(kind,))
        elif section := section_of(field):
            inner = ", ".join(f"{key}.{name}" for name in section.model_fields)
            fault = Fault((kind, *path), f"holds further keys; set one of {inner}", given(value))
        else:
            values: dict[str, Any] = {}
            put(values, path, value)
            try:
                model.model_validate(values)
                continue
            except pydantic.ValidationError as invalid:
                (fault,) = faults_of(invalid, model, prefix=(kind,))
        yield fault.at(override.glob)
