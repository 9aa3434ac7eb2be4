"""Finds branches on dynamic sizes: an ONNX file only contains the branch that the example takes, for every size."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparsebit.graph.nodes.example import guard

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep  # the whole package


@contextlib.contextmanager
def branches_on_sizes() -> Iterator[list[str]]:
    """Inside, during an export, collects the lines of the model's code that branch on a dynamic size.

    An `assert` is left out: if it fails, the model does not run either. Branches in torch's own code are left out too.
    """
    found: list[str] = []
    thread = threading.get_ident()
    original: Any = torch.SymBool.__bool__

    def answer(question: torch.SymBool) -> bool:
        if threading.get_ident() == thread and _is_open(question):
            line = _asking_line(sys._getframe(1))
            if line is not None and line not in found and not line.split(": ", 1)[-1].startswith("assert"):
                found.append(line)
        return bool(original(question))

    torch.SymBool.__bool__ = answer  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.SymBool.__bool__ = original  # type: ignore[method-assign]


def _is_open(question: torch.SymBool) -> bool:
    """Whether it is true for some sizes and false for others."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(question) and not statically_known_true(torch.sym_not(question))


def _asking_line(frame: types.FrameType | None) -> str | None:
    """`file:line: code` of the model's own code that branches; None if torch's code does."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code is guard.__code__:  # checked when the model was captured
            return str(frame.f_locals["line"])
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"
