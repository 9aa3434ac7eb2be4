"""`Site`: one quantized tensor and its number format. `Plan`: all sites of a model, and why the rest is in float.

Both are values: `replace` returns a changed plan, and `QuantModel(model, plan=plan)` builds from it. A site's name is
its layer and its role, `layer1.conv.weight`; the quantizer has the same name, in messages and in saved folders. A site
that no config of the backend could express is an error in `Plan.replace` too: `check_change` applies its rules.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import pydantic
from torch import fx

from sparsebit.config.config_errors import Fault, faults_of
from sparsebit.config.options import selected_options
from sparsebit.config.rules import broken_rules, format_of
from sparsebit.config.schema import ActivationConfig, QuantConfig, TensorConfig, WeightConfig
from sparsebit.config.section import Section
from sparsebit.config.selectors import near_names
from sparsebit.config.targets import is_for, mismatch
from sparsebit.config.tensor_config import Kind
from sparsebit.errors import BackendError, ConfigError
from sparsebit.graph.nodes.node_names import node_name
from sparsebit.numerics.spec import Granularity, PerChannel, PerGroup, PerTensor, TensorSpec
from sparsebit.quantization.observers.ranges import MovingAverageOptions, ema_ratio
from sparsebit.registry import OBSERVERS, QUANTIZERS
from sparsebit.text_table import text_table

Role = Literal["input", "weight", "output", "shared", "gate"]
_ROLES: tuple[Role, ...] = ("input", "weight", "output", "shared", "gate")
_ROLE = re.compile(rf"(.*)\.((?:{'|'.join(_ROLES)})(?:\..*)?)$", re.DOTALL)  # the last role in the name
_SPEC_FIELDS = frozenset({"bits", "symmetric", "granularity", "narrow", "format"})
_SITE_FIELDS = frozenset({"quantizer", "observer", "quantizer_options", "observer_options"})
_DEFAULT_PAST = MovingAverageOptions().EMA_RATIO
LEFT_OUT = "left out of the plan"


@dataclass(frozen=True)
class Site:
    """One tensor that is quantized.

    `name`: the layer and the role, `layer1.conv.weight`. `quantizer`, `observer`: registered names. Options that are
    None are those of the config. `ema_ratio`: the weight of the past if a range follows the data in training.
    """

    name: str
    role: Role
    spec: TensorSpec
    quantizer: str = "uniform"
    observer: str = "minmax"
    quantizer_options: Section | None = None
    observer_options: Section | None = None
    ema_ratio: float = _DEFAULT_PAST

    @property
    def layer(self) -> str:
        return split_site(self.name)[0]

    def replace(self, **changes: Any) -> Site:
        """A changed site. Fields of the number format (`bits`, `symmetric`, `granularity`, …) may be given directly."""
        allowed = _SPEC_FIELDS | _SITE_FIELDS | {"spec"}
        if unknown := ", ".join(map(repr, sorted(changes.keys() - allowed))):
            raise ConfigError(f"{self.name}: a site has no {unknown}; allowed: {', '.join(sorted(allowed))}")
        for key, known in (("quantizer", QUANTIZERS), ("observer", OBSERVERS)):
            if key in changes:
                changes[key] = known.canonical(changes[key])
                if changes[key] != getattr(self, key):  # another kind gets its default options
                    changes.setdefault(f"{key}_options", None)
        spec = changes.pop("spec", self.spec)
        number = getattr(QUANTIZERS.get(changes.get("quantizer", self.quantizer)), "FORMAT", "integer")
        if number != spec.format:  # the numbers of another quantizer
            spec = spec.replace(format=number, narrow=False)
        of_spec = {key: changes.pop(key) for key in list(changes) if key in _SPEC_FIELDS}
        is_same = of_spec.get("bits", spec.bits) == spec.bits and of_spec.get("symmetric", True)
        of_spec.setdefault("narrow", spec.narrow and is_same)  # only for 8-bit symmetric weights
        return dataclasses.replace(self, spec=spec.replace(**of_spec), **changes)

    def completed(self, planned: Site) -> Site:
        """This site, with missing options taken from the config's planned site if that is of the same kind."""
        same = [kind for kind in ("quantizer", "observer") if getattr(self, kind) == getattr(planned, kind)]
        keys = [f"{kind}_options" for kind in same if getattr(self, f"{kind}_options") is None]
        return dataclasses.replace(self, **{key: getattr(planned, key) for key in keys})

    @classmethod
    def from_dict(cls, name: str, values: Mapping[str, Any]) -> Site:
        """The site from a result of `to_dict`."""
        try:
            more = {f"{kind}_options": _options(name, kind, values) for kind in ("quantizer", "observer")}
            granularity = _granularity(**values["granularity"])
            form = {key: values[key] for key in ("bits", "symmetric", "narrow", "format")}
            spec = TensorSpec(granularity=granularity, **form)
            past = values.get("ema_ratio", _DEFAULT_PAST)
            return cls(name, values["role"], spec, values["quantizer"], values["observer"], **more, ema_ratio=past)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{name}: not a site of a plan ({error!r}); write it with Plan.to_dict()") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Options are written if there are any, `ema_ratio` if it is not the default."""
        spec, granularity = self.spec, self.spec.granularity
        options = {"quantizer_options": self.quantizer_options, "observer_options": self.observer_options}
        given = {key: section for key, section in options.items() if section and type(section).model_fields}
        return {
            "role": self.role,
            "bits": spec.bits,
            "symmetric": spec.symmetric,
            "granularity": {"kind": granularity.kind, "axis": granularity.axis, "size": granularity.size},
            "narrow": spec.narrow,
            "format": spec.format,
            "quantizer": self.quantizer,
            "observer": self.observer,
            **({} if self.ema_ratio == _DEFAULT_PAST else {"ema_ratio": self.ema_ratio}),
            **{key: section.to_dict(defaults=True) for key, section in given.items()},
        }


@dataclass(frozen=True)
class Plan(Mapping[str, Site]):
    """All sites of a model by name, in the order of the model.

    `floats`: what is not quantized, and why. `layers`: all names that a glob of the config may match. `warnings`:
    the cost of the user's own keys compared with the runtime's profile.
    """

    config: QuantConfig
    sites: Mapping[str, Site] = field(default_factory=dict)
    floats: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Site:
        if name not in self.sites:
            raise KeyError(f"no site {name!r}; near names: {', '.join(near_names(name, list(self.sites)))}")
        return self.sites[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __contains__(self, name: object) -> bool:
        return name in self.sites

    def replace(self, changes: Mapping[str, Site | Mapping[str, Any] | None]) -> Plan:
        """A new plan. Keys: names of sites, or globs. Values: fields to change, a whole site, or None for float.

        A site that a config of the same backend could not contain is an error. Weights whose layer's activations are
        left out of the plan are checked by the rules for weights alone.

        >>> from sparsebit.quantization import parse_qconfig
        >>> site = Site("fc.weight", "weight", TensorSpec(8, symmetric=True))
        >>> plan = Plan(parse_qconfig("virtual"), {"fc.weight": site})
        >>> plan.replace({"*.weight": {"bits": 4}})["fc.weight"].spec.dtype_name
        'int4'
        """
        sites, floats = dict(self.sites), dict(self.floats)
        for wanted, change in changes.items():
            names = [wanted] if wanted in self.sites else [name for name in self.sites if fnmatchcase(name, wanted)]
            if not names:
                near = ", ".join(near_names(wanted, list(self.sites)))
                raise ConfigError(f"the plan has no site {wanted!r}; near names: {near}")
            if change is None:
                floats |= dict.fromkeys(names, LEFT_OUT)
                sites = {name: site for name, site in sites.items() if name not in names}
                continue
            for old in map(self.sites.__getitem__, names):
                sites[old.name] = site = change if isinstance(change, Site) else old.replace(**change)
                if (site.name, site.role) != (old.name, old.role):
                    shown = f"{old.name!r} ({old.role}), and its new site is called {site.name!r} ({site.role})"
                    raise ConfigError(f"the plan has {shown}")
        changed = dataclasses.replace(self, sites=sites, floats=floats)
        for name, site in sites.items():
            if site is not self.sites[name]:
                check_change(site, self.sites[name], self.config, weight_only=changed._has_float_activations(site))
        return changed

    def _has_float_activations(self, site: Site) -> bool:
        """Whether the activations of a weight's layer are float, by the config or because the plan leaves them out."""
        layers = {site.layer, site.name.rpartition(".")[0]}  # `gru.weight_hh_l0` is a separate site, in `gru`
        return (
            self.floats.get(f"{site.layer}.input") == LEFT_OUT
            or all(other.role == "weight" for other in self.sites.values())
            or any(self.config.resolve("A", layer).QUANTIZER.DISABLE for layer in layers)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "sites": {name: site.to_dict() for name, site in self.sites.items()},
            "floats": dict(self.floats),
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan from a result of `to_dict`."""
        if missing := sorted({"config", "sites"} - values.keys()):
            raise ConfigError(f"not a plan: {', '.join(missing)} is missing; write it with Plan.to_dict()")
        sites = {name: Site.from_dict(name, site) for name, site in values["sites"].items()}
        config = QuantConfig.from_dict(values["config"])
        return cls(config, sites, dict(values.get("floats", {})), warnings=tuple(values.get("warnings", ())))

    def fitted(self, planned: Plan) -> Plan:
        """`planned`, which the config makes for a model, with this plan's sites instead; missing ones become float."""
        sites = {name: self.sites[name].completed(site) for name, site in planned.sites.items() if name in self.sites}
        left_out = {name: self.floats.get(name, LEFT_OUT) for name in planned.sites if name not in self.sites}
        return dataclasses.replace(planned, sites=sites, floats={**planned.floats, **left_out})

    def missing_in(self, built: Plan) -> list[str]:
        """The sites of this plan that a model built from it does not have."""
        return [name for name in self.sites if name not in built.sites]

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        rows = [("site", "format", "scale per", "quantizer", "observer")]
        specs = ((site, site.spec) for site in self.sites.values())
        rows += [(one.name, spec.dtype_name, spec.granularity.kind, one.quantizer, one.observer) for one, spec in specs]
        return "\n".join([text_table(rows), *(f"{name}  float: {reason}" for name, reason in self.floats.items())])


def _options(site: str, kind: str, values: Mapping[str, Any]) -> Section | None:
    """The saved options of a site; None without any, and then the config's options apply."""
    given = values.get(f"{kind}_options")
    if given is None:
        return None
    registry = QUANTIZERS if kind == "quantizer" else OBSERVERS
    options: type[Section] | None = registry.options_of(values[kind])[1]
    if options is None:
        raise ConfigError(f"{site}: the {kind} {values[kind]!r} takes no options, the plan has {dict(given)}")
    return options.from_dict(given)


def _granularity(kind: str, axis: int | None, size: int) -> Granularity:
    if kind == "tensor":
        return PerTensor()
    return PerGroup(cast("int", axis), size) if kind == "group" else PerChannel(cast("int", axis))


def layer_name(region_path: str, node: fx.Node) -> str:
    """A node's name for configs and reports: its module's path, or the path of the module that calls it and the op."""
    return f"{region_path}.{node_name(node)}" if region_path else node_name(node)


def split_site(site: str) -> tuple[str, str]:
    """A quantizer's name as layer and role: `layer1.conv.input.0` -> (`layer1.conv`, `input.0`)."""
    found = _ROLE.match(site)
    return (found[1], found[2]) if found else (site, "input")


def spec_of(config: TensorConfig, channel_axis: int) -> TensorSpec:
    """The number format that one tensor's config describes. `channel_axis`: the tensor's axis of output channels."""
    granularity: Granularity = PerTensor()
    if config.granularity == "channel":
        granularity = PerChannel(channel_axis)
    elif config.granularity == "group":
        assert isinstance(config, WeightConfig)
        granularity = PerGroup(1 - channel_axis, config.QUANTIZER.GROUP_SIZE)  # groups along the input channels
    return TensorSpec(config.QUANTIZER.BIT, config.symmetric, granularity, format=format_of(config))


def site_of(name: str, config: TensorConfig, channel_axis: int, *, narrow: bool = False) -> Site:
    """The site of a tensor with this config. `narrow`: symmetric 8-bit weights leave out their lowest code."""
    role = split_site(name)[1].partition(".")[0]
    is_weight = isinstance(config, WeightConfig)
    spec = spec_of(config, channel_axis)
    if narrow and is_weight and spec.format == "integer" and spec.symmetric and spec.bits == 8:
        spec = spec.replace(narrow=True)
    return Site(
        name,
        "weight" if is_weight else cast("Role", role),
        spec,
        quantizer=config.QUANTIZER.TYPE,
        observer=config.OBSERVER.TYPE,
        quantizer_options=selected_options(config.QUANTIZER),
        observer_options=selected_options(config.OBSERVER),
        ema_ratio=ema_ratio(config),
    )


def activation_axis(config: ActivationConfig) -> int:
    return 1 if config.OBSERVER.LAYOUT == "NCHW" else -1


# --- the config's rules for a changed site


_MODELS: dict[Kind, type[TensorConfig]] = {"W": WeightConfig, "A": ActivationConfig}


def check_change(new: Site, old: Site, config: QuantConfig, *, weight_only: bool) -> None:
    """Raise for a changed site that a config could not contain either; faults that `old` already had are ignored.

    `weight_only`: the activations of these weights' layers stay float, which lets some backends run fewer bits.
    """
    target = "weight" if new.role == "weight" else "activation"
    kind = QUANTIZERS.get(new.quantizer)
    if not is_for(kind, target):
        raise ConfigError(f"quantizer {new.quantizer!r} at {new.name}: it {mismatch(kind, target)}; set another one")
    known = _faults(old, config, config.BACKEND, weight_only)
    if faults := [fault for fault in _faults(new, config, config.BACKEND, weight_only) if fault not in known]:
        anywhere = _faults(new, config, "virtual", weight_only)
        error = ConfigError if all(fault in anywhere for fault in faults) else BackendError
        raise error("\n  ".join(f"{_shown(new, fault)} at {new.name}: {fault.reason}" for fault in faults))


def _faults(site: Site, config: QuantConfig, backend: str, weight_only: bool) -> list[Fault]:
    kind: Kind = "W" if site.role == "weight" else "A"
    values = {
        "QSCHEME": _scheme(site),
        "QUANTIZER": {"TYPE": site.quantizer, "BIT": site.spec.bits},
        "OBSERVER": {"TYPE": site.observer},
    }
    try:
        tensor = _MODELS[kind].model_validate(values)
    except pydantic.ValidationError as invalid:  # activations in groups
        return faults_of(invalid, _MODELS[kind], prefix=(kind,))
    bn_tuning = config.without_batchnorm_tuning
    return list(broken_rules(kind, tensor, backend=backend, weight_only=weight_only, bn_tuning=bn_tuning))


def _shown(site: Site, fault: Fault) -> str:
    """The property of the site that the fault is about: `4-bit per-channel-symmetric`, `observer 'mse'`."""
    kind = fault.key[1].lower() if fault.key[1:] in (("QUANTIZER", "TYPE"), ("OBSERVER", "TYPE")) else ""
    if kind:
        return f"{kind} {getattr(site, kind)!r}"
    return f"{'fp8' if site.spec.format == 'float8' else f'{site.spec.bits}-bit'} {_scheme(site)}"


def _scheme(site: Site) -> str:
    return f"per-{site.spec.granularity.kind}-{'symmetric' if site.spec.symmetric else 'affine'}"
