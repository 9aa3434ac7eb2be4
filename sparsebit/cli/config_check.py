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

    from sparsebit.config.schema import QuantConfig
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
            help="Also show what is quantized in this model, what is not, and which SPECIFIC entry won for each layer.",
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
        from sparsebit.cli.calibrated_model import formats, planned
        from sparsebit.cli.loading import resolve
        from sparsebit.quantization.quant_config import as_qconfig

        if model is not None:
            resolve(model, "--model")  # it may register the observers and quantizers that the config names
        qconfig = as_qconfig(config)
        record: dict[str, Any] = {"config": qconfig.to_dict(defaults=True)}
        shown: list[RenderableType] = []
        if full and not json:
            out.raw(_full_yaml(qconfig))
        if model is not None:
            qmodel = planned(model, model_args, config, data)
            coverage = qmodel.coverage
            record["coverage"] = coverage.to_dict()
            record["specific"] = winners = _winners(qconfig, coverage)
            shown = [*_specific(winners), *_plan(coverage)]
        if not quiet:
            out.remark(f"{config} is right: {formats(qconfig)}")
        out.result(record, *shown)


def _full_yaml(config: QuantConfig) -> str:
    """The config with its defaults; what the backend decides layer by layer is left to it, in a comment."""
    import yaml

    values = config.to_dict(defaults=True)
    comment = ""
    if config.BACKEND != "virtual" and not config.is_set("A.QADD.ENABLE_QUANT"):
        values["A"].pop("QADD")
        comment = f"# A.QADD.ENABLE_QUANT is left out: {config.BACKEND} quantizes the adds that it runs in integers.\n"
    if config.BACKEND != "virtual" and not config.is_set("SCHEDULE.FUSE_BN"):
        values["SCHEDULE"].pop("FUSE_BN")
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _winners(config: QuantConfig, coverage: Coverage) -> dict[str, dict[str, str]]:
    """By layer, the glob of `W.SPECIFIC` and of `A.SPECIFIC` that it goes by; layers without one are left out."""
    names = [*(layer.name for layer in coverage.quantized), *(layer.name for layer in coverage.float_layers)]
    found = {}
    for name in names:
        entries = {"W": config.winner("W", name), "A": config.winner("A", name)}
        if globs := {kind: override.glob for kind, override in entries.items() if override is not None}:
            found[name] = globs
    return found


def _specific(winners: dict[str, dict[str, str]]) -> list[RenderableType]:
    table = _table("layer", "W.SPECIFIC", "A.SPECIFIC")
    for name, globs in winners.items():
        _add_row(table, name, *(globs.get(kind, "-") for kind in ("W", "A")))
    return [table] if winners else []


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
