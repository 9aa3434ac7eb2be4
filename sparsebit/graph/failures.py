"""Where a trace broke, and why, in the user's own lines."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from dataclasses import dataclass

import torch
from torch import fx, nn

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True)
class Untraced:
    """One module that stays opaque: where the trace broke and why. `line` is `file:number: source`."""

    path: str
    module_type: str
    reason: str
    line: str


def describe_failure(error: Exception, path: str, module: nn.Module) -> Untraced:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    line = _failing_line(error) or forward_line(module)
    return Untraced(path, type(module).__name__, f"{type(error).__name__}: {reason}", line)


def forward_line(module: nn.Module) -> str:
    """Where the module's forward is defined."""
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: def forward" if code else "unknown line"


def reraise_own_fault(error: Exception) -> None:
    """An error from our own lines is a bug here, not a module that cannot be traced."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.startswith(_HERE) and not isinstance(error, fx.proxy.TraceError):
        raise error


def user_line() -> str:
    """`file:line: source` of the innermost running frame that is the user's own code."""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def _failing_line(error: BaseException) -> str | None:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def _is_ours(filename: str) -> bool:
    return filename.startswith((_TORCH, _HERE, "<"))
