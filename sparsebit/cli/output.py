"""What a verb says: its result on stdout, everything else (progress, remarks, warnings) on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# A table in a file or a pipe: wide enough for the names of layers.
_WIDTH_OF_FILES = 120


class Output:
    """Output of one run. `stdout` is the real one: during a command, `sys.stdout` goes to stderr (see `speaking`)."""

    def __init__(self, stdout: TextIO, *, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.warnings: list[str] = []
        self._stdout = stdout

    def result(self, record: Mapping[str, Any], *shown: RenderableType) -> None:
        """The verb's one result: `record` for programs, `shown` for people."""
        if self.as_json:
            self.raw(json.dumps(plain({**record, "warnings": self.warnings}), indent=2, allow_nan=False) + "\n")
            return
        from rich.console import Console

        width = None if self._stdout.isatty() else _WIDTH_OF_FILES
        console = Console(file=self._stdout, width=width, highlight=False, markup=False, emoji=False)
        for item in shown:
            console.print(item)
        self._stdout.flush()  # a full disk is an error here, not when the interpreter ends

    def raw(self, text: str) -> None:
        """Text as it is: no wrapping, no colour."""
        self._stdout.write(text)
        self._stdout.flush()

    def remark(self, text: str) -> None:
        """A word on the way; not with `--quiet`."""
        if not self.quiet:
            typer.echo(text, err=True)

    def warn(self, text: str) -> None:
        """A warning, shown once; with `--quiet` too, since something was not done as asked."""
        if text not in self.warnings:
            self.warnings.append(text)
            typer.echo(f"{typer.style('warning', fg='yellow', bold=True)}: {text}", err=True)


@contextlib.contextmanager
def speaking(*, as_json: bool, quiet: bool) -> Iterator[Output]:
    """Around a verb's work: what the user's own code prints goes to stderr, and warnings become single lines there."""
    output = Output(sys.stdout, as_json=as_json, quiet=quiet)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch, where numpy is not wanted
        warnings.showwarning = lambda message, *_, **__: output.warn(str(message))
        from sparsebit import progress

        progress.set_quiet(quiet)
        log, handler = logging.getLogger("sparsebit"), _Told(output)
        log.addHandler(handler)
        try:
            yield output
        finally:
            log.removeHandler(handler)
            progress.set_quiet(False)


class _Told(logging.Handler):
    """Shows what the library logs as a warning."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self.output = output

    def emit(self, record: logging.LogRecord) -> None:
        self.output.warn(record.getMessage())


def plain(value: Any) -> Any:
    """The same values as JSON knows them: infinities and NaN become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def facts_table(facts: Mapping[str, str]) -> Table:
    """A line for each, its name in front; facts without words are left out."""
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
