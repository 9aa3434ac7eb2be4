"""Silences torch's exporter if it succeeds; if it fails, makes a short message that names the place."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from torch import fx, nn

from sparsebit.errors import DeploymentError

_LOGGERS = ("torch.onnx", "torch.export", "torch._export", "torch.fx", "onnxscript", "onnx_ir")
_NUM_LINES = 4
_ADVICE = {
    "export": "a dimension that the code compares or bakes in cannot be dynamic; a branch on data needs torch.cond",
    "convert": "write it in ops that ONNX has, or end the exported model before it",
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, prints and warnings of the exporter are suppressed; errors are still raised."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export_fault(error: Exception, model: nn.Module, inputs: Sequence[str], verb: str = "export_onnx") -> str:
    """The innermost cause in a few lines, and its place; torch's own message is pages long."""
    causes = _causes(error)
    text = _shortened(str(causes[-1]), inputs) or type(causes[-1]).__name__
    frames = [frame for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__)]
    if any("ConversionError" in type(cause).__name__ for cause in causes):
        op = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
        what = f"the op {op[1]} has no ONNX form" if op else f"an op has no ONNX form: {text}"
        return f"{verb}: {what}{_node_place(frames)}\n{_ADVICE['convert']}"
    place = _module_place(frames, model) + _line(str(causes[-1]))
    if "torch.export" in str(error):
        return f"{verb}: torch.export cannot follow the model{place}: {text}\n{_ADVICE['export']}"
    return f"{verb}{place}: {type(causes[-1]).__name__}: {text}"


def hides_interrupt(error: Exception) -> bool:
    """Whether Ctrl-C is behind the error: torch's C++ code turns a KeyboardInterrupt into a TypeError that names it."""
    return any("KeyboardInterrupt" in str(cause) for cause in _causes(error))


@contextlib.contextmanager
def refused_as(refusal: str, read: Callable[[], str] = str) -> Iterator[None]:
    """An error inside becomes a DeploymentError: `refusal`, then its first lines. `read`: returns more of its text."""
    try:
        yield
    except Exception as error:
        if hides_interrupt(error):
            raise KeyboardInterrupt from error
        lines = [line for line in f"{error}\n{read()}".splitlines() if line.strip()]
        raise DeploymentError(f"{refusal}: {' '.join(lines[:3])}") from error


def _causes(error: Exception) -> list[BaseException]:
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    return causes


def _shortened(text: str, inputs: Sequence[str]) -> str:
    """The first lines, without advice to torch's developers; inputs by their names."""
    lines = text.partition("The following call raised this error")[0].splitlines()
    advice = re.compile(r"(Caused by|For (more|extended|C\+\+)|If you suspect|consider using)")
    kept = "\n".join([line for line in lines if line.strip() and not advice.match(line)][:_NUM_LINES])
    names = dict(enumerate(inputs))
    return re.sub(r"inputs\['tensors'\]\[(\d+)\]", lambda match: names.get(int(match[1]), match[0]), kept)


def _module_place(frames: Sequence[FrameType], model: nn.Module) -> str:
    """The innermost module of the model that was running."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and names.get(id(module)):
            name = names[id(module)].removeprefix("model").removeprefix(".")
            return f" at {name} ({type(module).__name__})" if name else f" at {type(module).__name__}"
    return ""


def _line(text: str) -> str:
    """The user's line, if torch names it."""
    match = re.search(r'raised this error:\s+File "([^"]+)", line (\d+), in \w+\s+(.*)', text)
    return f", {match[1]}:{match[2]}: `{match[3].strip()}`" if match else ""


def _node_place(frames: Sequence[FrameType]) -> str:
    """The line of the captured graph, or of the model, that the node comes from."""
    for frame in reversed(frames):
        node = frame.f_locals.get("node")
        if isinstance(node, fx.Node):
            lines = str(node.meta.get("stack_trace") or "").strip().splitlines()
            code = lines[-1].partition(";")[0].strip() if lines else node.name
            return f"; in the graph: `{code}`"
    return ""
