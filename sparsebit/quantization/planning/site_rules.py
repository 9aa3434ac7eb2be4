"""The config's rules for sites that a plan changes: quantizer, number format, observer, limits of the backend."""

from __future__ import annotations

from typing import Protocol

import pydantic

from sparsebit.config.config_errors import Fault, faults_of
from sparsebit.config.rules import broken_rules
from sparsebit.config.schema import ActivationConfig, QuantConfig, TensorConfig, WeightConfig
from sparsebit.config.targets import is_for, mismatch
from sparsebit.config.tensor_config import Kind
from sparsebit.errors import BackendError, ConfigError
from sparsebit.numerics.spec import TensorSpec
from sparsebit.registry import QUANTIZERS

_MODELS: dict[Kind, type[TensorConfig]] = {"W": WeightConfig, "A": ActivationConfig}


class Site(Protocol):
    """The fields of a plan's site that the rules read."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def spec(self) -> TensorSpec: ...
    @property
    def quantizer(self) -> str: ...
    @property
    def observer(self) -> str: ...


def check_change(new: Site, old: Site, config: QuantConfig, *, weight_only: bool) -> None:
    """Raise for a changed site that a config could not contain either; properties unchanged from `old` are not checked.

    `weight_only`: the activations of these weights' layers stay float, which lets some backends run fewer bits.
    """
    target = "weight" if new.role == "weight" else "activation"
    kind = QUANTIZERS.get(new.quantizer)
    if not is_for(kind, target):
        raise ConfigError(f"quantizer {new.quantizer!r} at {new.name}: it {mismatch(kind, target)}; set another one")
    known = _faults(old, config, config.BACKEND, weight_only)
    faults = [fault for fault in _faults(new, config, config.BACKEND, weight_only) if fault not in known]
    if faults:
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
    if fault.key[1:] == ("QUANTIZER", "TYPE"):
        return f"quantizer {site.quantizer!r}"
    if fault.key[1:] == ("OBSERVER", "TYPE"):
        return f"observer {site.observer!r}"
    return f"{'fp8' if site.spec.format == 'float8' else f'{site.spec.bits}-bit'} {_scheme(site)}"


def _scheme(site: Site) -> str:
    return f"per-{site.spec.granularity.kind}-{'symmetric' if site.spec.symmetric else 'affine'}"
