"""`sparsebit config check`: is this config right, and what would it do to this model?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.output import speaking
from sparsebit.cli.verb import Verb

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from sparsebit.records import Coverage

app = typer.Typer(help="Configs: check them, see what they do.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Configs: check them, see what they do."""


@app.command("check", cls=Verb)
def check(
    config: Annotated[str, typer.Argument(metavar="FILE|BACKEND", help="A YAML config, or a backend's name.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODULE:FACTORY",
            help="Also show what is quantized in this model, and what is not.",
        ),
    ] = None,
    model_args: options.ModelArgs = None,
    data: options.Example = None,
    full: Annotated[bool, typer.Option("--full", help="Print the config with every default written out.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check a config; with a model, show the plan layer by layer.

    A wrong key or value is an error (exit code 1) that names the line, what is allowed and the nearest right key.

    sparsebit config check config.yaml -m my_model:Net

    sparsebit config check onnxruntime --full > config.yaml
    """
    if model is None and (model_args is not None or data is not None):
        raise typer.BadParameter("needs --model", param_hint="--model-args" if data is None else "--data")
    with speaking(as_json=json, quiet=quiet) as out:
        from sparsebit.cli.calibrating import formats, planned
        from sparsebit.quantization.quant_config import as_qconfig

        qconfig = as_qconfig(config)
        record: dict[str, Any] = {"config": qconfig.to_dict(defaults=True)}
        shown: list[RenderableType] = []
        if full and not json:
            out.raw(qconfig.to_yaml(defaults=True))
        if model is not None:
            coverage = planned(model, model_args, config, data).coverage
            record["coverage"] = coverage.to_dict()
            shown = _plan(coverage)
        if not quiet:
            out.remark(f"{config} is right: {formats(qconfig)}")
        out.result(record, *shown)


def _plan(coverage: Coverage) -> list[RenderableType]:
    """Tables of what is quantized and of what is not, and a closing line."""
    quantized = _table("layer", "op", "weight", "input", "output")
    for layer in coverage.quantized:
        dtypes = {
            role: ", ".join(dict.fromkeys(dtype for site, dtype in layer.sites.items() if site.split(".")[0] in roles))
            for role, roles in (("weight", ("weight",)), ("input", ("input", "shared")), ("output", ("output",)))
        }
        _add_row(quantized, layer.name, layer.op, *(text or "-" for text in dtypes.values()))
    floats = _table("float layer", "why")
    for left in coverage.float_layers:
        _add_row(floats, left.name, left.reason)
    untraced = _table("untraced module", "why", "where", "quantized inside")
    for module in coverage.opaque:
        inside = f"{len(module.quantized_inside)} layers"
        _add_row(untraced, f"{module.path or '(model)'} [{module.module_type}]", module.reason, module.line, inside)
    total = f"{coverage.num_weighted_quantized} of {coverage.num_weighted} weighted layers are quantized"
    float_lines = [f"float: {line}" for line in coverage.sizeable_floats()]
    tables = (table for table in (quantized, floats, untraced) if table.row_count)
    return [*tables, *float_lines, *([coverage.weights] if coverage.parameters else []), total]


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells))
