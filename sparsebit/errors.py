"""Errors that a user can fix, one class per kind.

Every message says what was given, where, what is allowed and what to do.
"""

from __future__ import annotations

import sys


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters written as escapes: text of a file must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


class SparsebitError(ValueError):
    """Base of all errors that the user can fix. Bugs of Sparsebit itself are assertions."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(SparsebitError):
    """A config that cannot be obeyed: unknown key, wrong type, value outside its set, broken rule."""


class SpecError(SparsebitError):
    """A number format that does not exist (0 bits, a group of size 0, ...)."""


class BackendError(SparsebitError):
    """A number format that the chosen backend cannot run; carries the layer's name."""


class CaptureError(SparsebitError):
    """A model that cannot be captured, or a call that the captured graph does not cover."""


class CalibrationError(SparsebitError):
    """A method that was called before calibration, or calibration data that gives no range."""


class CheckpointError(SparsebitError):
    """A saved folder or a state_dict that is damaged or belongs to another model."""


class DeploymentError(SparsebitError):
    """A model that cannot be exported, or a file that a runtime does not take or runs differently."""


class BudgetError(SparsebitError):
    """Budgets that no choice keeps, or no choice found in the time given."""


class RecordError(SparsebitError):
    """A record file that cannot be read, or that belongs to another model."""


class MissingExtraError(SparsebitError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        cause, problem = sys.exc_info()[1], "is not installed"
        # A package that is there and fails while it is imported has another problem than one that is not.
        if isinstance(cause, ImportError) and not (isinstance(cause, ModuleNotFoundError) and cause.name):
            problem = f"cannot be imported ({str(cause).splitlines()[0] if str(cause) else type(cause).__name__})"
        super().__init__(f"{purpose} needs the package {package!r}, which {problem}: pip install 'sparsebit[{extra}]'")
