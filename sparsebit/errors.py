"""Errors that a user can fix, one class per kind.

Every message says what was given, where, what is allowed and what to do.
"""

from __future__ import annotations

import re
import sys
import traceback
from importlib import metadata
from types import FrameType


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
    """A method that was called before calibration, or calibration data without a finite range."""


class CheckpointError(SparsebitError):
    """A saved folder or a state_dict that is damaged or belongs to another model."""


class DeploymentError(SparsebitError):
    """A model that cannot be exported, or a file that a runtime rejects or runs differently."""


class BudgetError(SparsebitError):
    """Budgets that no choice keeps, or no choice found within the time limit."""


class RecordError(SparsebitError):
    """A record file that cannot be read, or that belongs to another model."""


_MODULES = {"pillow": "PIL", "scikit-learn": "sklearn"}  # packages whose modules are called differently


class MissingExtraError(SparsebitError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        problem = import_problem(_MODULES.get(package, package.replace("-", "_")))
        super().__init__(f"{purpose} needs the package {package!r}, which {problem} {install_command(extra, package)}")


def import_problem(module: str) -> str:
    """`is not installed:`, or why an installed module cannot be imported; for the exception being handled.

    A package imports others, and one of those may be missing or broken: the innermost exception, and the package that
    was being imported when it was raised, are the cause.
    """
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, ModuleNotFoundError) and error.name and not _frames(error)[1:]):
        return "is not installed:"  # no code of the package has run
    imported = _imported(error)
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
        imported += _imported(error)
    text = (str(error).splitlines() or [""])[0]
    shown = text if text and isinstance(error, ImportError) else f"{type(error).__name__}: {text}".removesuffix(": ")
    broken = next((name for name in reversed(imported) if name != "sparsebit"), module)
    return f"cannot be imported ({shown}):" + (f" repair the package {broken!r}, or" if broken != module else "")


def _frames(error: BaseException) -> list[FrameType]:
    """The frames of the traceback without those of importlib, the innermost last."""
    found = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame for frame in found if not str(frame.f_globals.get("__name__")).startswith("importlib")]


def _imported(error: BaseException) -> list[str]:
    """The packages that were being imported, the innermost last; one of them may have called a function of another."""
    modules = [frame for frame in _frames(error) if frame.f_code.co_name == "<module>"]
    return [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in modules]


def install_command(extra: str, package: str) -> str:
    """The command that installs the packages of an extra by their own names.

    Another project owns the name of this one on the package index, so pip would install that project instead.
    """
    listed = sorted(_packages_of(extra)) or [package]
    return "pip install " + " ".join(f"'{one}'" if set(one) & set("<>=[] ") else one for one in listed)


def _packages_of(extra: str) -> set[str]:
    """The requirements of an extra in this installation's metadata; empty for a copy that is not installed."""
    try:
        listed = metadata.requires("sparsebit") or []
    except metadata.PackageNotFoundError:
        return set()
    found: set[str] = set()
    for line in listed:
        requirement, _, condition = (part.strip() for part in line.partition(";"))
        if not re.search(rf"""extra == ["']{re.escape(extra)}["']""", condition):
            continue
        if own := re.fullmatch(r"sparsebit\[(.*)\]", requirement):  # an extra that includes other extras
            found.update(*(_packages_of(other.strip()) for other in own[1].split(",")))
        else:
            found.add(requirement)
    return found


def users_level() -> int:
    """The `stacklevel` of a warning from here that names the first caller outside of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_passed(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_passed(name: str) -> bool:
    return name.startswith("sparsebit.") or name == "contextlib"  # its decorators add frames
