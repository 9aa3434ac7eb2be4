"""Names to check configs against, alone in the registries: config/ knows no quantizer or observer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError
from sparsebit.registry import OBSERVERS, QUANTIZERS


class ForBoth: ...


class ForWeights:
    TARGETS = ("weight",)


class ForActivations:
    TARGETS = ("activation",)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizers = {"uniform": ForBoth, "lsq": ForBoth, "lsq+": ForBoth, "dorefa": ForWeights, "pact": ForActivations}
    monkeypatch.setattr(QUANTIZERS, "_entries", quantizers)
    monkeypatch.setattr(QUANTIZERS, "_aliases", {"lsq_plus": "lsq+"})
    for registry in (QUANTIZERS, OBSERVERS):
        monkeypatch.setattr(registry, "_options", dict(registry._options))
    observers = ("minmax", "moving_average", "percentile", "mse", "kl_histogram", "aciq")
    monkeypatch.setattr(OBSERVERS, "_entries", {name: type(name, (), {}) for name in observers})
    monkeypatch.setattr(OBSERVERS, "_aliases", {})


def config(changes: dict[str, object] | None = None) -> dict[str, Any]:
    """The values of a small sound config (8-bit weights and activations) with some keys changed; `...` takes a key out.

    >>> config({"W.QUANTIZER.BIT": 4})["W"]
    {'QUANTIZER': {'BIT': 4}}
    """
    values: dict[str, Any] = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 8}}, "A": {"QUANTIZER": {"BIT": 8}}}
    for key, value in (changes or {}).items():
        section, (*path, leaf) = values, key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        if value is ...:
            section.pop(leaf)
        else:
            section[leaf] = value
    return values


@pytest.fixture
def message() -> Callable[[dict[str, object]], str]:
    """What a user is told about a config with these changes."""

    def told(changes: dict[str, object]) -> str:
        with pytest.raises(ConfigError) as caught:
            QuantConfig.from_dict(config(changes))
        return str(caught.value)

    return told
