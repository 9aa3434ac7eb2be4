"""`sparsebit config check`: validate a config, and show its effect on a model."""

from __future__ import annotations

from typing import Any

import yaml
from rich.console import RenderableType

from sparsebit.cli.inputs.calibrated_model import formats, planned
from sparsebit.cli.inputs.loading import import_model
from sparsebit.cli.option_groups import typed
from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.output import Output, table
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import ConfigOptions
from sparsebit.config.schema import QuantConfig
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records import Coverage


def check(asked: ConfigOptions, out: Output, recorded: Recording) -> None:
    """Read the config, place its quantizers, and report."""
    config, model = asked.config, asked.net.model
    given = [*typed(asked.net, ["model_args"]), *typed(asked, ["data"]), *typed(asked.net, ["weights"])]
    refuse({"needs --model": given and not model}, ", ".join(given))
    if model:
        import_model(model)  # the module may register the observers and quantizers that the config names
    qconfig = as_qconfig(config)
    record: dict[str, Any] = {"config": qconfig.to_dict(defaults=True)}
    shown: list[RenderableType] = []
    if asked.full and not asked.said.json:
        out.raw(_full_yaml(qconfig))
    if model:
        coverage = planned(asked.net, config, asked.data).coverage
        record["coverage"] = coverage.to_dict()
        record["specific"] = winners = _winners(qconfig, coverage)
        rows = [[name, *(globs.get(kind, "-") for kind in ("W", "A"))] for name, globs in winners.items()]
        specific = [table(("layer", "W.SPECIFIC", "A.SPECIFIC"), rows)] if winners else []
        shown = [*specific, *_plan(coverage)]
    out.remark(f"{config} is right: {formats(qconfig)}")
    out.result(record, *shown)
    if not model and not asked.full:
        out.next_steps(f"sparsebit config check {config} -m MODULE:FACTORY   # what it does to a model")


def _full_yaml(config: QuantConfig) -> str:
    """The config with its defaults; a comment names the keys that the backend decides for each layer."""
    values = config.to_dict(defaults=True)
    comment = ""
    if config.BACKEND != "virtual" and not config.is_set("A.QADD.ENABLE_QUANT"):
        values["A"].pop("QADD")
        comment = f"# A.QADD.ENABLE_QUANT is left out: {config.BACKEND} quantizes the adds that it runs in integers.\n"
    if config.BACKEND != "virtual" and not config.is_set("SCHEDULE.FUSE_BN"):
        values["SCHEDULE"].pop("FUSE_BN")
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _winners(config: QuantConfig, coverage: Coverage) -> dict[str, dict[str, str]]:
    """By layer, the globs of `W.SPECIFIC` and `A.SPECIFIC` that apply; layers without one are left out."""
    names = [*(layer.name for layer in coverage.quantized), *(layer.name for layer in coverage.float_layers)]
    found = {}
    for name in names:
        entries = {"W": config.winner("W", name), "A": config.winner("A", name)}
        if globs := {kind: override.glob for kind, override in entries.items() if override is not None}:
            found[name] = globs
    return found


def _plan(coverage: Coverage) -> list[RenderableType]:
    """Tables of quantized and of float layers, and a closing line."""
    quantized = []
    for layer in coverage.quantized:
        dtypes = [
            ", ".join(dict.fromkeys(dtype for site, dtype in layer.sites.items() if site.split(".")[0] in roles))
            for roles in (("weight",), ("input", "shared"), ("output",))
        ]
        quantized.append([layer.name, layer.op, *(text or "-" for text in dtypes)])
    floats = [[left.name, left.reason] for left in coverage.float_layers]
    untraced = [
        [f"{one.path or '(model)'} [{one.module_type}]", one.reason, one.line, f"{len(one.quantized_inside)} layers"]
        for one in coverage.opaque
    ]
    tables = {
        ("layer", "op", "weight", "input", "output"): quantized,
        ("float layer", "why"): floats,
        ("untraced module", "why", "where", "quantized inside"): untraced,
    }
    total = f"{coverage.num_weighted_quantized} of {coverage.num_weighted} weighted layers are quantized"
    float_lines = [f"float: {line}" for line in coverage.sizeable_floats()]
    shown = [table(columns, rows) for columns, rows in tables.items() if rows]
    return [*shown, *float_lines, *([coverage.weights] if coverage.parameters else []), total]
