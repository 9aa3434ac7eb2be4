"""Describes why a trace failed, with the line of the user's code (`Untraced`); logs faults of this package."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import logging
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx, nn

log = logging.getLogger(__name__)

# What a module's code may raise: a model that calls sys.exit() must not end the capture.
FAILURES: tuple[type[BaseException], ...] = (Exception, SystemExit)
# For tests: an error in Sparsebit's own code is raised instead of logged.
RAISE_VARIABLE = "SPARSEBIT_RAISE_OWN_FAULTS"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CACHE = re.compile(r"transformers\.cache_utils\.\w+")
_HERE = str(Path(__file__).parents[1]) + os.sep  # sparsebit/graph


@dataclass(frozen=True)
class Untraced:
    """One module that was not traced: where the trace failed and why. `line` is `file:number: source`."""

    path: str
    module_type: str
    reason: str
    line: str


def describe_failure(error: BaseException, path: str, module: nn.Module) -> Untraced:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if _CACHE.search(reason):  # a class of transformers, which a call keeps between the tokens that it generates
        reason += "; call the model with use_cache=False (model.config.use_cache = False), and it can be traced"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    frames = [f for f in frames if f.filename != contextlib.__file__]  # around a call: it changes state
    line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else forward_line(module)
    return Untraced(path, type(module).__name__, f"{type(error).__name__}: {reason}", line)


def forward_line(module: nn.Module) -> str:
    """Where the module's forward is defined."""
    forward = module.__dict__.get("forward") or inspect.getattr_static(type(module), "forward", None)
    code = getattr(forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: def forward" if code else "unknown line"


def report_own_fault(error: BaseException) -> None:
    """Log an error of Sparsebit's own code. The module runs its own code instead."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(_HERE) or isinstance(error, fx.proxy.TraceError):
        return
    if os.environ.get(RAISE_VARIABLE):
        raise error
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
    log.warning(
        "a fault of Sparsebit at %s (%s: %s) ended a trace; the module runs its own code, please report it",
        place, type(error).__name__, error,
    )  # fmt: skip
    log.debug("the trace ended here", exc_info=error)


def user_line() -> str:
    """`file:line: source` of the innermost running frame that is the user's own code."""
    frame = inspect.currentframe()
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def is_ours(filename: str) -> bool:
    """Whether the code is torch's, ours, or generated; a notebook's cells are the user's."""
    return filename.startswith((_TORCH, _HERE, "<")) and not filename.startswith("<ipython-input")
