"""`parse_qconfig`: reads a quantization config from a backend's name, a YAML file, a dict or YAML text.

`sparsebit/quantization/__init__.py` imports all built-in observers, quantizers and algorithms, which registers the
names that a config may use.
"""

from __future__ import annotations

import os
from typing import Any

from sparsebit.backends import BACKENDS
from sparsebit.config.fields import nearest
from sparsebit.config.reading import Source, read
from sparsebit.config.schema import QuantConfig
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import ConfigError

WEIGHTS_ONLY = "weights-only"
_SHORT_NAMES = {"ort": "onnxruntime", "ov": "openvino", "trt": "tensorrt"}


def parse_qconfig(source: Source | QuantConfig) -> QuantConfig:
    """The checked, frozen config; everything wrong in it is named in one ConfigError.

    `source` is the path of a YAML file, a mapping, YAML text, or a name of `named_configs`: a backend's (`onnxruntime`:
    8 bits in that runtime's formats) or `onnxruntime-weights-only`. A config that is already checked is returned
    unchanged.

    >>> qconfig = parse_qconfig("{W: {QUANTIZER: {BIT: 4}}, A: {QUANTIZER: {BIT: 8}}}")
    >>> qconfig.W.QUANTIZER.BIT, qconfig.A.QSCHEME
    (4, 'per-tensor-affine')
    >>> parse_qconfig("tensorrt").A.QSCHEME
    'per-tensor-symmetric'
    """
    if isinstance(source, QuantConfig):
        return source
    if isinstance(source, str) and not source.strip():
        known = ", ".join(named_configs())
        raise ConfigError(f"the config is empty text: give the path of a YAML file, YAML text, or a name ({known})")
    if isinstance(source, str) and "\n" not in source and not os.path.isfile(source):
        names = named_configs()
        if source.lower() in names:
            return QuantConfig.from_dict(names[source.lower()])
        near = _SHORT_NAMES.get(source.lower()) or nearest(source, names)
        if near and not set(source) & set(":{}/\\."):
            raise ConfigError(
                f"no config file at {source!r}, and no config has that name; did you mean {near}? "
                f"Names: {', '.join(names)}"
            )
    return _with_implied_steps(QuantConfig.from_dict(read(source)))


def _with_implied_steps(config: QuantConfig) -> QuantConfig:
    """`W.QUANTIZER.TYPE: adaround`, as in the first Sparsebit, adds a missing `reconstruct` to ALGORITHMS."""
    kinds = {config.W.QUANTIZER.TYPE, *(dict(entry.settings).get("QUANTIZER.TYPE") for entry in config.W.SPECIFIC)}
    is_wanted = any(isinstance(kind, str) and kind.lower() == "adaround" for kind in kinds)
    if not is_wanted or any(step.name == "reconstruct" for step in config.ALGORITHMS):
        return config
    entries = [step.to_entry() for step in config.ALGORITHMS]
    return config.replace("ALGORITHMS", [*entries, {"reconstruct": {"METHOD": "adaround"}}])


# The name that functions use which accept a config in any form: it reads better there than "parse".
as_qconfig = parse_qconfig


def named_configs() -> dict[str, dict[str, Any]]:
    """The configs with names: a backend's own, and the same without activations, which needs no data."""
    named = {name: PROFILES[name].recommended() for name in BACKENDS}
    weights = {
        f"{name}-{WEIGHTS_ONLY}": {**config, "A": {"QUANTIZER": {"DISABLE": True}}} for name, config in named.items()
    }
    return {**named, **weights, WEIGHTS_ONLY: weights[f"onnxruntime-{WEIGHTS_ONLY}"]}


def require_device(config: QuantConfig) -> None:
    """Raise for a GPU that does not exist, before any work is done."""
    if not config.DEVICE.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(config.DEVICE.partition(":")[2] or 0) >= count:
        raise ConfigError(
            f"DEVICE={config.DEVICE}: torch sees {count or 'no'} GPU here; set DEVICE: cpu, or remove the key from the "
            'config; for a saved model, QuantModel.load(..., device="cpu")'
        )
