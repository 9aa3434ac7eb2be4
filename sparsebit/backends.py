"""What each backend accepts as numbers, as data.

Read by the config's rules, by the numbers' rules and by the runtime profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Granularity = Literal["tensor", "channel", "group"]


@dataclass(frozen=True)
class NumberRules:
    """The formats one backend runs for one kind of tensor. `advice` ends every refusal: what a user should set."""

    bits: frozenset[int]
    granularities: frozenset[Granularity]
    symmetric: frozenset[bool]
    advice: str


@dataclass(frozen=True)
class Backend:
    """`weight_only` replaces `weight` where the layer's activations stay float."""

    name: str
    weight: NumberRules
    activation: NumberRules
    weight_only: NumberRules


_ANY_BITS = frozenset(range(1, 17))
_ALL: frozenset[Granularity] = frozenset({"tensor", "channel", "group"})
_BOTH = frozenset({True, False})


def _rules(
    bits: set[int] | frozenset[int],
    granularities: set[Granularity] | frozenset[Granularity],
    symmetric: set[bool] | frozenset[bool],
    advice: str,
) -> NumberRules:
    return NumberRules(frozenset(bits), frozenset(granularities), frozenset(symmetric), advice)


_ANYTHING = _rules(_ANY_BITS, _ALL, _BOTH, "set 1 to 16 bits")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("virtual", _ANYTHING, _ANYTHING, _ANYTHING),
        Backend(
            "onnxruntime",
            weight=_rules({8}, {"tensor", "channel"}, _BOTH, "onnxruntime runs 8-bit weights beside 8-bit activations"),
            activation=_rules({8}, {"tensor"}, _BOTH, "onnxruntime runs 8-bit per-tensor activations"),
            weight_only=_rules({4, 8}, _ALL, _BOTH, "onnxruntime runs 4- or 8-bit weights beside float activations"),
        ),
        Backend(
            "openvino",
            weight=_rules({8}, {"tensor", "channel"}, _BOTH, "openvino runs 8-bit weights beside 8-bit activations"),
            activation=_rules({8}, {"tensor"}, _BOTH, "openvino runs 8-bit per-tensor activations"),
            weight_only=_rules({4, 8}, _ALL, _BOTH, "openvino runs 4- or 8-bit weights beside float activations"),
        ),
        Backend(
            "tensorrt",
            weight=_rules({8}, {"channel"}, {True}, "tensorrt runs 8-bit per-channel-symmetric weights"),
            activation=_rules({8}, {"tensor"}, {True}, "tensorrt runs 8-bit per-tensor-symmetric activations"),
            weight_only=_rules(
                {4, 8},
                {"channel", "group"},
                {True},
                "tensorrt runs 4- or 8-bit symmetric weights beside float activations",
            ),
        ),
    )
}
