"""The kinds of tensors that are quantized: "weight" and "activation", which the first Sparsebit called "feature"."""

from __future__ import annotations

from typing import Literal, cast

from sparsebit.errors import ConfigError

Target = Literal["weight", "activation", "feature"]

_WORDS = ("activation", "feature")


class _Activation(str):
    """The word "activation", which also equals "feature": code that compares with the older word keeps working.

    As a key of a dict or a set it is "activation" only.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other in _WORDS

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


ACTIVATION: Target = cast("Target", _Activation("activation"))


def as_target(word: str) -> Target:
    """The target that a word names; "feature" is the older word for "activation"."""
    if word == "weight":
        return "weight"
    if word in _WORDS:
        return ACTIVATION
    raise ConfigError(f"target {word!r}; allowed: 'weight', 'activation'")


def targets_of(kind: object) -> tuple[str, ...]:
    """The targets of a registered class, or a class of options: its `TARGETS`; both without them."""
    given = getattr(kind, "TARGETS", ("weight", ACTIVATION))
    return tuple(ACTIVATION if word in _WORDS else word for word in ((given,) if isinstance(given, str) else given))


def is_for(kind: object, target: str) -> bool:
    """Whether a class, or a class of options, is made for a target; "" means any target."""
    return not target or as_target(target) in targets_of(kind)


def mismatch(kind: object, target: str) -> str:
    """`is for weight tensors, not for an activation`, for a class that is not made for a target."""
    article = "a" if target == "weight" else "an"
    return f"is for {' and '.join(targets_of(kind))} tensors, not for {article} {as_target(target)}"
