"""`app`: the command `sparsebit` with its verbs, and how errors are shown.

Exit codes: 0 done; 1 an error that the user can fix, told in one message; 2 a command line without sense; 130 Ctrl-C,
143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import sparsebit
from sparsebit.cli import audit, check, config_check, demo, export, graph, llm, profile, prune, quantize, search
from sparsebit.cli.verb import Verb
from sparsebit.errors import SparsebitError

INTERRUPTED = 128 + signal.SIGINT  # as shells count
TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM, of a scheduler or of `docker stop`: cleans up as Ctrl-C does."""


class Verbs(TyperGroup):
    """The verbs, with every error that the user can fix turned into one message on stderr and an exit code."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Where `--version` and `--help` are answered: the output may be a full disk."""
        is_traced = "--traceback" in args
        try:
            with _output_written():
                return super().make_context(info_name, args, parent, **extra)
        except OSError as fault:
            if is_traced or isinstance(fault, BrokenPipeError):
                raise
            _tell("error", str(fault))
            raise typer.Exit(1) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            with _ending_cleanly(), _output_written():
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            _tell("interrupted", "nothing was left half-written")
            raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None
        except (SparsebitError, OSError, MemoryError, RuntimeError, SystemExit) as fault:
            # A closed pipe (`| head`) is not an error; typer ends quietly on it, and so does rich, by SystemExit.
            is_closed_pipe = isinstance(fault, BrokenPipeError) or isinstance(fault.__context__, BrokenPipeError)
            message = None if is_closed_pipe else _told(fault)
            if ctx.params.get("traceback") or message is None:
                raise
            _tell("error", message)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Verbs,
    help="Small and fast PyTorch models: quantize any nn.Module, see what it costs, keep the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quantize", cls=Verb)(quantize.quantize)
app.command("profile", cls=Verb)(profile.profile)
app.command("search", cls=Verb)(search.search)
app.command("prune", cls=Verb)(prune.prune)
app.command("graph", cls=Verb)(graph.graph)
app.command("export", cls=Verb)(export.export)
app.command("check", cls=Verb)(check.check)
app.command("audit", cls=Verb)(audit.audit)
app.add_typer(config_check.app, name="config")
app.add_typer(llm.app, name="llm")
app.command("demo", cls=Verb)(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsebit {sparsebit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_version, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the whole traceback of a fault.", envvar="SPARSEBIT_TRACEBACK")
    ] = False,
) -> None:
    # What the flags do is done by `_version` and by `Verbs.invoke`.
    del version, traceback


@contextlib.contextmanager
def _output_written() -> Iterator[None]:
    """At the end, everything printed is written, so that a full disk is an error here and not after the last line."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # What could not be written is still in the buffer: the interpreter would try again as it ends, and fail.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
            raise


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Inside, SIGTERM is an exception, so that what is half-written is taken away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _told(fault: BaseException) -> str | None:
    """What is said of an error that the user can fix; None for bugs of our own."""
    if isinstance(fault, (SparsebitError, OSError)):
        return str(fault)
    from sparsebit.cli.loading import cause

    if isinstance(fault, SystemExit):
        return f"the model or the data ended the run: {cause(fault)}"
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return f"out of memory ({cause(fault)}); give less at once: --batch-size, --num-samples, --size"
    return None


def _tell(kind: str, message: str) -> None:
    typer.echo(f"{typer.style(kind, fg='red', bold=True)}: {message}", err=True)
