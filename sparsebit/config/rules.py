"""`broken_rules`: the rules between keys of one tensor's config.

Bits are given, the quantizer fits the tensor, the number format fits the quantizer, the backend runs the format, and
batch-norm tuning has per-channel weights. Used for configs (`schema.py`) and for changed plans (`planning/sites.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sparsebit.backends import BACKENDS, FORMATS, Format, NumberRules
from sparsebit.config.config_errors import MISSING, Fault
from sparsebit.config.fields import registered_for
from sparsebit.config.tensor_config import Kind, TensorConfig
from sparsebit.registry import OBSERVERS, QUANTIZERS

_NOUNS = {"W": "weight", "A": "activation"}
_ESCAPE = "BACKEND: virtual"


def broken_rules(
    kind: Kind, tensor: TensorConfig, *, backend: str, weight_only: bool, bn_tuning: str | None
) -> Iterator[Fault]:
    """The rules that one tensor's config breaks; none if it stays float.

    `weight_only`: the activations of these layers stay float, which lets some backends run fewer bits.
    `bn_tuning`: the change of the config that switches it off; None if it is off.
    """
    if tensor.QUANTIZER.DISABLE:
        return
    yield from _bits(kind, tensor)
    yield from _quantizer(kind, tensor)
    yield from _format(kind, tensor)
    yield from _backend(kind, tensor, backend, weight_only)
    if kind == "W" and bn_tuning is not None and tensor.granularity != "channel":
        scheme = f"per-channel-{'symmetric' if tensor.symmetric else 'affine'}"
        reason = f"BN tuning needs per-channel weights; set {scheme}, or {bn_tuning}"
        yield _fault(kind, "QSCHEME", tensor.QSCHEME, reason)


def schemes(rules: NumberRules) -> list[str]:
    """The QSCHEMEs that a backend runs, as they are written in a config."""
    return [
        f"per-{granularity}-{'symmetric' if symmetric else 'affine'}"
        for granularity in ("tensor", "channel", "group")
        if granularity in rules.granularities
        for symmetric in (True, False)
        if symmetric in rules.symmetric
    ]


def quantizers_for(kind: Kind) -> list[str]:
    """The quantizers made for weights or activations: by TARGETS of the class; without TARGETS, for both."""
    return registered_for(QUANTIZERS, _NOUNS[kind])


def _bits(kind: Kind, tensor: TensorConfig) -> Iterator[Fault]:
    if tensor.QUANTIZER.BIT:
        return
    bits = sorted(FORMATS[format_of(tensor)].bits)
    span = f"{bits[0]} to {bits[-1]}" if len(bits) > 1 else str(bits[0])
    reason = f"set {span}, or {kind}.QUANTIZER.DISABLE: true to leave the {_NOUNS[kind]}s float"
    if tensor.is_set("QUANTIZER.BIT"):
        yield _fault(kind, "QUANTIZER.BIT", 0, f"no number has 0 bits; {reason}")
    else:
        yield Fault((kind, "QUANTIZER", "BIT"), f"{MISSING}{reason}")


def _quantizer(kind: Kind, tensor: TensorConfig) -> Iterator[Fault]:
    name, allowed = tensor.QUANTIZER.TYPE, quantizers_for(kind)
    if name not in allowed:
        reason = f"not made for {_NOUNS[kind]}s; allowed: {', '.join(allowed)}"
        yield _fault(kind, "QUANTIZER.TYPE", name, f"{reason}; write {kind}.QUANTIZER.TYPE: uniform")


def format_of(tensor: TensorConfig) -> Format:
    """The number format of the quantizer: the class's FORMAT, by default integers."""
    found: Format = getattr(QUANTIZERS.get(tensor.QUANTIZER.TYPE), "FORMAT", "integer")
    return found


def _format(kind: Kind, tensor: TensorConfig) -> Iterator[Fault]:
    """The rules of the number format itself, whatever the backend."""
    number = format_of(tensor)
    if number == "integer" or tensor.QUANTIZER.TYPE not in quantizers_for(kind):
        return
    rules, bit, scheme = FORMATS[number], tensor.QUANTIZER.BIT, tensor.QSCHEME
    if bit and bit not in rules.bits:
        yield _fault(kind, "QUANTIZER.BIT", bit, f"{rules.advice}; set {_either(sorted(rules.bits))}")
    if scheme not in schemes(rules):
        yield _fault(kind, "QSCHEME", scheme, f"{rules.advice}; set {_either(schemes(rules))}")
    allowed = [name for name in OBSERVERS if number in getattr(OBSERVERS.get(name), "FORMATS", FORMATS)]
    if tensor.OBSERVER.TYPE not in allowed:
        reason = f"it weighs even steps, which {tensor.QUANTIZER.TYPE} does not have; allowed: {', '.join(allowed)}"
        yield _fault(kind, "OBSERVER.TYPE", tensor.OBSERVER.TYPE, reason)


def _backend(kind: Kind, tensor: TensorConfig, backend: str, weight_only: bool) -> Iterator[Fault]:
    runs = BACKENDS[backend]
    rules = runs.activation if kind == "A" else runs.weight_only if weight_only else runs.weight
    bit, scheme, number = tensor.QUANTIZER.BIT, tensor.QSCHEME, format_of(tensor)
    if number not in rules.formats and kind == "W":
        name = tensor.QUANTIZER.TYPE
        is_alone = number in runs.weight_only.formats
        does = f"runs {name} weights with float activations only" if is_alone else f"runs no {name} weights"
        remedy = "A.QUANTIZER.DISABLE: true, or another TYPE" if is_alone else "another TYPE"
        yield _fault(kind, "QUANTIZER.TYPE", name, f"{backend} {does}; set {remedy}, or {_ESCAPE}")
    if bit and bit not in rules.bits:
        alone = kind == "W" and bit in runs.weight_only.bits
        more = ", or A.QUANTIZER.DISABLE: true to quantize weights only" if alone else ""
        yield _fault(kind, "QUANTIZER.BIT", bit, f"{rules.advice}; {_allowed_bits(rules)}{more}, or {_ESCAPE}")
    if scheme not in schemes(rules):
        yield _fault(kind, "QSCHEME", scheme, f"{rules.advice}; set {_either(schemes(rules))}, or {_ESCAPE}")


def _fault(kind: Kind, key: str, value: object, reason: str) -> Fault:
    return Fault((kind, *key.split(".")), reason, f"={value}")


def _either(choices: Iterable[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _allowed_bits(rules: NumberRules) -> str:
    """`set 4 or 8`; where no width is allowed, the other way out."""
    return f"set {_either(sorted(rules.bits))}" if rules.bits else "set W.QUANTIZER.DISABLE: true"
