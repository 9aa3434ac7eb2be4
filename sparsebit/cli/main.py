"""`app`: the command `sparsebit` with its verbs, and what becomes of a fault.

Exit codes: 0 done; 1 a fault that the user can mend, told in one message; 2 a command line without sense; 130 Ctrl-C.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sparsebit
from sparsebit.cli import audit, config_check, demo, graph, profile, quantize
from sparsebit.errors import SparsebitError

INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Verbs(TyperGroup):
    """The verbs, with every mendable fault turned into one message on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _tell("interrupted", "nothing was left half-written")
            raise typer.Exit(INTERRUPTED) from None
        except (SparsebitError, OSError) as fault:
            # A closed pipe (`| head`) is no fault of anybody's; typer ends quietly on it.
            if ctx.params.get("traceback") or isinstance(fault, BrokenPipeError):
                raise
            _tell("error", str(fault))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Verbs,
    help="Small and fast PyTorch models: quantize any nn.Module, see what it costs, keep the result.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quantize")(quantize.quantize)
app.command("profile")(profile.profile)
app.command("graph")(graph.graph)
app.command("audit")(audit.audit)
app.add_typer(config_check.app, name="config")
app.command("demo")(demo.demo)


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


def _tell(kind: str, message: str) -> None:
    typer.echo(f"{typer.style(kind, fg='red', bold=True)}: {message}", err=True)
