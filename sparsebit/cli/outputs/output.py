"""The output of a verb: its result on stdout, everything else (progress, remarks, warnings) on stderr.

So a program can read stdout, with `--json` as one object. While a verb works, `sys.stdout` is stderr (`speaking`):
prints of the user's own model and data code must not mix with the result. Warnings and the library's log become lines
on stderr, and are kept for `--json` and records.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

# The width of a table in a file or a pipe: enough for the names of layers.
_WIDTH_OF_FILES = 120


class Output:
    """Output of one run. `stdout` is the real one: during a command, `sys.stdout` goes to stderr (see `speaking`)."""

    def __init__(self, stdout: TextIO, *, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.warnings: list[str] = []
        self._stdout = stdout

    def result(self, record: Mapping[str, Any], *shown: RenderableType, details: Sequence[RenderableType] = ()) -> None:
        """The verb's only result: `record` for programs, the rest for people; `--quiet` leaves out the `details`."""
        if self.as_json:
            self.raw(json.dumps(plain({**record, "warnings": self.warnings}), indent=2, allow_nan=False) + "\n")
            return
        from rich.console import Console

        width = None if self._stdout.isatty() else _WIDTH_OF_FILES
        console = Console(file=self._stdout, width=width, highlight=False, markup=False, emoji=False)
        for item in (*(() if self.quiet else details), *shown):
            console.print(item)
        self._stdout.flush()  # a full disk is an error here, not when the interpreter ends

    def next_steps(self, *commands: str) -> None:
        """Suggested next commands, on stderr; for people only."""
        if not self.as_json:
            for command in commands:
                self.remark(f"next: {command}")

    def raw(self, text: str) -> None:
        """Text without wrapping or colour."""
        self._stdout.write(text)
        self._stdout.flush()

    def remark(self, text: str) -> None:
        """A remark during the work; not with `--quiet`."""
        if not self.quiet:
            typer.echo(text, err=True)

    def warn(self, text: str) -> None:
        """A warning, shown once, with `--quiet` too: something was not done as asked."""
        if text not in self.warnings:
            self.warnings.append(text)
            typer.echo(f"{typer.style('warning', fg='yellow', bold=True)}: {text}", err=True)


@contextlib.contextmanager
def speaking(*, as_json: bool, quiet: bool) -> Iterator[Output]:
    """For a verb's work: prints of the user's own code go to stderr, and warnings become single lines there."""
    output = Output(sys.stdout, as_json=as_json, quiet=quiet)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # from torch if numpy is not installed
        warnings.showwarning = lambda message, *_, **__: output.warn(str(message))
        from sparsebit import progress

        progress.set_quiet(quiet)
        log, own, handler = logging.getLogger("sparsebit"), logging.getLogger("sparsebit.cli"), _Shown(output)
        level = own.level
        own.setLevel(logging.INFO)
        log.addHandler(handler)
        try:
            with progress.heartbeat():
                yield output
        finally:
            log.removeHandler(handler)
            own.setLevel(level)
            progress.set_quiet(False)


class _Shown(logging.Handler):
    """Shows warnings that the library logs, and messages that the command line's own files log as remarks."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.output.warn(record.getMessage())
        elif record.levelno >= logging.INFO and record.name.startswith("sparsebit.cli"):
            self.output.remark(record.getMessage())


def plain(value: Any) -> Any:
    """The same values in JSON's types: infinities and NaN become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, numbers: Collection[str] = (), narrow: str = ""
) -> Table:
    """A table of texts. `numbers`: columns aligned to the right; `narrow`: the column that is never wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, overflow="fold", justify="right" if name in numbers else "left", no_wrap=name == narrow)
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def facts_table(facts: Mapping[str, str]) -> Table:
    """A line for each fact, after its name; empty facts are left out."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    for name, fact in facts.items():
        if fact:
            grid.add_row(name, Text(fact))
    return grid


def decibel(value: float) -> str:
    """`34.2 dB`."""
    return f"{value:.1f} dB" if math.isfinite(value) else ("exact" if value > 0 else "no signal")


def kilobytes(num_bytes: int) -> str:
    """`55.1 KB`, `44.6 MB`: powers of 1,000."""
    return f"{num_bytes / 1e3:.1f} KB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.1f} MB"
