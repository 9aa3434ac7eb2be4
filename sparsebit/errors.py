"""Faults of the user's input, one class per kind.

Every message says what was given, where, what is allowed and what to do.
"""

from __future__ import annotations


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters written as escapes: what a file holds must not steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


class SparsebitError(ValueError):
    """Any error that the user can fix. Bugs of our own are assertions, never this."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(SparsebitError):
    """A config that cannot be obeyed: unknown key, wrong type, value outside its set, broken rule."""


class SpecError(SparsebitError):
    """A number format that does not exist (0 bits, a group of size 0, ...)."""


class BackendError(SparsebitError):
    """A number format that the chosen backend cannot run; carries the layer's name."""


class CaptureError(SparsebitError):
    """A model, or a call of it, that the captured graph does not stand for."""


class CalibrationError(SparsebitError):
    """A verb used before its data was there, or data that no range can be made from."""


class CheckpointError(SparsebitError):
    """Files that do not hold what this model needs."""


class DeploymentError(SparsebitError):
    """A model that cannot be exported, or a file that a runtime does not take or runs differently."""


class RecordError(SparsebitError):
    """A record file that cannot be read, or that belongs to another model."""


class MissingExtraError(SparsebitError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}, which is not installed: pip install 'sparsebit[{extra}]'"
        )
