"""`app`: the command `sparsebit` with its verbs, and how errors are shown.

Exit codes: 0 done; 1 an error that the user can fix, shown as one message; 2 a usage error; 130 Ctrl-C,
143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import sparsebit
from sparsebit.cli import verb_options
from sparsebit.cli.llm import verbs as llm
from sparsebit.cli.option_groups import grouped
from sparsebit.cli.outputs.recording import working
from sparsebit.cli.verb import Verb
from sparsebit.errors import SparsebitError

INTERRUPTED = 128 + signal.SIGINT  # as shells count
TERMINATED = 128 + signal.SIGTERM
JOBS = {  # the verbs as `sparsebit --help` lists them
    "Start here": ["demo", "compress", "report"],
    "Quantize and prune": ["quantize", "profile", "search", "config", "graph", "prune"],
    "Ship an ONNX file": ["export", "check", "audit"],
    "Language models": ["llm"],
}
_SHORT = 68  # columns of a verb's line in `sparsebit --help`


class Terminated(KeyboardInterrupt):
    """SIGTERM, from a scheduler or `docker stop`: cleans up as Ctrl-C does."""


class Verbs(TyperGroup):
    """The verbs, with every error that the user can fix turned into one message on stderr and an exit code."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """`--version` and `--help` are printed here, so a full disk is handled here too."""
        is_traced = "--traceback" in args
        try:
            with _output_written():
                return super().make_context(info_name, args, parent, **extra)
        except OSError as fault:
            if is_traced or isinstance(fault, BrokenPipeError):
                raise
            _print("error", str(fault))
            raise typer.Exit(1) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help on one screen: the verbs grouped by job, one line each."""
        lines = ["Usage: sparsebit VERB [OPTIONS]", "", str(self.help), ""]
        for job, names in JOBS.items():
            lines.append(typer.style(job, bold=True))
            lines += [f"  {name:<9} {self.commands[name].get_short_help_str(_SHORT)}" for name in names]
        options = ", ".join(max(one.opts, key=len) for one in self.get_params(ctx))
        lines += ["", "`sparsebit VERB --help` shows the options of a verb, with an example.", f"Others: {options}"]
        formatter.write("\n".join(lines) + "\n")

    def invoke(self, ctx: Any) -> Any:
        try:
            with _ending_cleanly(), _output_written():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # from `--help` of a verb; both are RuntimeErrors but not errors here
            raise
        except KeyboardInterrupt as stop:
            _print("interrupted", "nothing was left half-written")
            raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None
        except (SparsebitError, OSError, MemoryError, RuntimeError, SystemExit) as fault:
            # A closed pipe (`| head`) is not an error; typer ends silently on it, and so does rich, by SystemExit.
            is_closed_pipe = isinstance(fault, BrokenPipeError) or isinstance(fault.__context__, BrokenPipeError)
            message = None if is_closed_pipe else _message(fault)
            if ctx.params.get("traceback") or message is None:
                raise
            _print("error", message)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Verbs,
    help="Small and fast PyTorch models: quantize or prune any nn.Module, keep the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Check a config and show what it does to a model.", no_args_is_help=True)
config_app.callback()(lambda: None)  # so that `check` stays a separate verb
app.add_typer(config_app, name="config")
app.add_typer(llm.app, name="llm")


def _add(where: typer.Typer, words: str, kind: type) -> None:
    """Add a verb, whose help is the docstring of its options. Its module loads torch, so the verb's run imports it."""

    def run(asked: Any) -> None:
        with working(asked.said, words) as to:
            work = importlib.import_module(f"sparsebit.cli.verbs.{words.replace(' ', '_')}")
            getattr(work, words.split()[-1])(asked, *to)

    run.__annotations__["asked"] = kind
    where.command(words.split()[-1], cls=Verb, help=kind.__doc__)(grouped(run))


_add(app, "demo", verb_options.DemoOptions)
_add(app, "compress", verb_options.CompressOptions)
_add(app, "report", verb_options.ReportOptions)
_add(app, "quantize", verb_options.QuantizeOptions)
_add(app, "profile", verb_options.ProfileOptions)
_add(app, "search", verb_options.SearchOptions)
_add(app, "graph", verb_options.GraphOptions)
_add(app, "prune", verb_options.PruneOptions)
_add(app, "export", verb_options.ExportOptions)
_add(app, "check", verb_options.CheckOptions)
_add(app, "audit", verb_options.AuditOptions)
_add(config_app, "config check", verb_options.ConfigOptions)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsebit {sparsebit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the whole traceback of an error.", envvar="SPARSEBIT_TRACEBACK")
    ] = False,
) -> None:
    # The flags are handled by `_version` and by `Verbs.invoke`.
    del version, traceback


@contextlib.contextmanager
def _output_written() -> Iterator[None]:
    """Flush all output at the end, so that a full disk raises here and not after the last line."""
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            # The buffer still holds the unwritten output: the interpreter would try again at exit, and fail.
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
            raise


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Inside, SIGTERM raises an exception, so that half-written results are removed."""
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


def _message(fault: BaseException) -> str | None:
    """The message for an error that the user can fix; None for bugs of Sparsebit."""
    if isinstance(fault, (SparsebitError, OSError)):
        return str(fault)
    from sparsebit.cli.inputs.loading import cause

    if isinstance(fault, SystemExit):
        return f"the model or the data ended the run: {cause(fault)}"
    if isinstance(fault, MemoryError) or "can't allocate memory" in str(fault) or "out of memory" in str(fault):
        return f"out of memory ({cause(fault)}); give less at once: --batch-size, --num-samples, --size"
    return None


def _print(kind: str, message: str) -> None:
    typer.echo(f"{typer.style(kind, fg='red', bold=True)}: {message}", err=True)
