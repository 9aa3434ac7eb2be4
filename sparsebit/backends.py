"""The number formats that each backend accepts, as data.

Read by the config's rules, by the numbers' rules and by the runtime profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Granularity = Literal["tensor", "channel", "group"]
Format = Literal["integer", "float8"]


@dataclass(frozen=True)
class NumberRules:
    """The formats one backend runs for one kind of tensor. `advice` ends every error: what a user should set."""

    bits: frozenset[int]
    granularities: frozenset[Granularity]
    symmetric: frozenset[bool]
    advice: str
    formats: frozenset[Format] = frozenset({"integer"})


@dataclass(frozen=True)
class Backend:
    """`weight_only` replaces `weight` if the layer's activations stay float.

    `group_bits`: the bits that weights in groups may have; None: those of `weight_only`. `whole_groups`: a group's size
    divides the weight's inputs.
    """

    name: str
    weight: NumberRules
    activation: NumberRules
    weight_only: NumberRules
    group_bits: frozenset[int] | None = None
    whole_groups: bool = False


_ANY_BITS = frozenset(range(1, 17))
_ALL: frozenset[Granularity] = frozenset({"tensor", "channel", "group"})
_BOTH = frozenset({True, False})


def _rules(
    bits: set[int] | frozenset[int],
    granularities: set[Granularity] | frozenset[Granularity],
    symmetric: set[bool] | frozenset[bool],
    advice: str,
    *more: Format,
) -> NumberRules:
    """`more`: formats besides integers."""
    formats: frozenset[Format] = frozenset({"integer", *more})
    return NumberRules(frozenset(bits), frozenset(granularities), frozenset(symmetric), advice, formats)


def _cpu_runtime(name: str, bits_alone: set[int], *, whole_groups: bool = False) -> Backend:
    """`bits_alone`: of weights whose layers have float activations."""
    weight = _rules({8}, {"tensor", "channel"}, _BOTH, f"{name} runs 8-bit weights with 8-bit activations")
    activation = _rules({8}, {"tensor"}, _BOTH, f"{name} runs 8-bit per-tensor activations")
    allowed = ", ".join(f"{bits}-" for bits in sorted(bits_alone)[:-1])
    advice = f"{name} runs {allowed} or {max(bits_alone)}-bit weights with float activations"
    alone = _rules(bits_alone, _ALL, _BOTH, advice, "float8")
    return Backend(name, weight, activation, weight_only=alone, whole_groups=whole_groups)


_ANYTHING = _rules(_ANY_BITS, _ALL, _BOTH, "set 1 to 16 bits")
_ANY_WEIGHT = _rules(_ANY_BITS, _ALL, _BOTH, "set 1 to 16 bits", "float8")

# What a number format allows on every backend.
FORMATS: dict[Format, NumberRules] = {
    "integer": _ANYTHING,
    "float8": NumberRules(
        frozenset({8}),
        frozenset({"tensor", "channel"}),
        frozenset({True}),
        "fp8 has 8 bits, one scale per tensor or per channel, and no zero point",
        frozenset({"float8"}),
    ),
}

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("virtual", weight=_ANY_WEIGHT, activation=_ANYTHING, weight_only=_ANY_WEIGHT),
        _cpu_runtime("onnxruntime", {2, 4, 8}),
        _cpu_runtime("openvino", {4, 8}, whole_groups=True),
        Backend(
            "tensorrt",
            weight=_rules({8}, {"channel"}, {True}, "tensorrt runs 8-bit per-channel-symmetric weights"),
            activation=_rules({8}, {"tensor"}, {True}, "tensorrt runs 8-bit per-tensor-symmetric activations"),
            weight_only=_rules(
                {4, 8},
                {"channel", "group"},
                {True},
                "tensorrt runs 4- or 8-bit symmetric weights with float activations",
                "float8",
            ),
            group_bits=frozenset({4}),
            whole_groups=True,
        ),
        Backend(
            "qnn",
            weight=_rules({4, 8}, {"tensor", "channel"}, {True}, "qnn runs 4- or 8-bit symmetric weights, no groups"),
            activation=_rules({8, 16}, {"tensor"}, _BOTH, "qnn runs 8- or 16-bit per-tensor activations"),
            weight_only=_rules(
                set(), {"tensor", "channel"}, {True}, "qnn runs no integer weights with float activations"
            ),
        ),
        Backend(
            "aot_inductor",
            weight=_rules({8}, {"tensor", "channel"}, {True}, "aot_inductor runs 8-bit symmetric weights"),
            activation=_rules({8}, {"tensor"}, _BOTH, "aot_inductor runs 8-bit per-tensor activations"),
            weight_only=_rules(
                {8}, {"tensor", "channel"}, {True}, "aot_inductor runs 8-bit symmetric weights with float activations"
            ),
        ),
        Backend(
            "executorch",
            weight=_rules({8}, {"tensor", "channel"}, {True}, "executorch runs 8-bit symmetric weights"),
            activation=_rules({8}, {"tensor"}, _BOTH, "executorch runs 8-bit per-tensor activations"),
            weight_only=_rules(
                {8}, {"tensor", "channel"}, {True}, "executorch runs 8-bit symmetric weights with float activations"
            ),
        ),
        Backend(
            "litert",
            weight=_rules({8}, {"tensor", "channel"}, {True}, "litert runs 8-bit symmetric weights"),
            activation=_rules({8}, {"tensor"}, _BOTH, "litert runs 8-bit per-tensor activations"),
            weight_only=_rules(
                {8}, {"tensor", "channel"}, {True}, "litert runs 8-bit symmetric weights with float activations"
            ),
        ),
        Backend(
            "coreml",
            weight=_rules({8}, {"tensor", "channel"}, {True}, "coreml runs 8-bit symmetric weights"),
            activation=_rules({8}, {"tensor"}, _BOTH, "coreml runs 8-bit per-tensor activations"),
            weight_only=_rules(
                {8}, {"tensor", "channel"}, {True}, "coreml runs 8-bit symmetric weights with float activations"
            ),
        ),
    )
}
