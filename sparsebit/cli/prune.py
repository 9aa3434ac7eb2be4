"""`sparsebit prune`: remove channels, heads and neurons from a model, and keep the smaller one as a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.option_groups import DataOptions, OutputOptions, grouped
from sparsebit.cli.output import decibel, facts_table, speaking
from sparsebit.cli.search import read_budgets

if TYPE_CHECKING:
    from sparsebit.sparse import ModelSize, SparseConfig, SparseModel


@grouped
def prune(
    model: options.Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="DIR", help="The folder of the smaller model; an older result is replaced."
        ),
    ],
    data: options.CalibrationData = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="FILE.yaml", help="What is pruned, and how (an sconfig.yaml)."),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option("--ratio", metavar="SHARE", min=0, max=1, help="The share of each group of channels that goes."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            metavar="NAME=NUMBER",
            help="macs, bytes or latency (the measured time in ONNX Runtime here) of the smaller model, up to 1 as a "
            "share: the ratio of each group is chosen.",
        ),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="NAME", help="The criterion, as l1norm or wanda.")
    ] = None,
    round_to: Annotated[
        int, typer.Option("--round-to", min=1, help="Widths stay multiples of this where they were.")
    ] = 1,
    no_reconstruct: Annotated[
        bool, typer.Option("--no-reconstruct", help="Leave the remaining weights as they are.")
    ] = False,
    model_args: options.ModelArgs = None,
    weights: options.Weights = None,
    device: options.Device = None,
    how: DataOptions = DataOptions(),
    said: OutputOptions = OutputOptions(),
) -> None:
    """Remove channels, heads and neurons, and save the smaller model.

    What can be removed is found, and proved, by running the model. With data, the weights that are left are fitted to
    the dense model afterwards; no labels are needed. The folder holds safetensors and a plan of the channels;
    sparsebit.sparse.load(DIR, model) makes the smaller model out of the original class.

    sparsebit prune -m my_model:Net -w net.safetensors -d calibration.npz --budget macs=0.7 -o small/
    """
    limits = read_budgets(budget or [])
    if said.record is not None:
        raise typer.BadParameter("prune keeps no record; leave it out", param_hint="--record")
    if ratio is not None and limits:
        raise typer.BadParameter("give --ratio, or --budget, which chooses the ratios")
    if ratio is None and not limits and config is None:
        raise typer.BadParameter("how much is to go? give --ratio 0.3, --budget macs=0.7, or a --config")
    if data is None:
        if limits:
            raise typer.BadParameter("missing: the ratios under a budget are chosen on data", param_hint="--data")
        how.refuse(("size", "resize", "mean", "std", "gray", "batch_size", "arrays"), "no --data")
    with speaking(as_json=said.json, quiet=said.quiet) as out:
        from sparsebit.cli.calibrated_model import load_subject
        from sparsebit.cli.loading import load_model
        from sparsebit.sparse import SparseModel, model_size, save
        from sparsebit.sparse.pruned_folder import checked_folder

        sconfig = _read_config(config, ratio, strategy, device, model)
        checked_folder(output)
        batches: list[Any] | None = None
        first = None
        if data is None:
            net = load_model(model, model_args, weights)
        else:
            subject = load_subject(model, model_args, weights, data, how)
            net, batches, first = subject.model, list(subject.data), subject.first_batch
        example = None if batches is None else batches[0]
        smodel = SparseModel(net, sconfig, example).eval()
        if sconfig.SPARSER.is_of_blocks:
            out.remark(f"found {len(smodel.blocks.blocks)} residual blocks that can be removed")
        else:
            found = smodel.groups
            out.remark(f"found {len(found.groups)} groups, {len(found.units)} units that can be removed")
        chosen = None
        if limits:
            assert batches is not None
            chosen = smodel.choose_ratios(limits, batches, round_to=round_to)
        smodel.calc_params(batches)
        pruned_sqnr = None if first is None else first.sqnr_db(smodel.model, sconfig.DEVICE)
        if batches is not None and not no_reconstruct:
            out.remark(f"fitting what is left on {len(batches)} batches")
            smodel.reconstruct(batches)
        small = smodel.shrink(round_to)
        sizes = model_size(net, smodel.example_batch), model_size(small, smodel.example_batch)
        sqnr = None if first is None else first.sqnr_db(small, sconfig.DEVICE)
        save(small, output)
        latency = None if chosen is None else chosen.latency
        record = {
            "model": model,
            "output": str(output),
            "before": sizes[0].to_dict(),
            "after": sizes[1].to_dict(),
            **_removed(smodel),
            "ratios": None if chosen is None else dict(chosen.ratios),
            "latency": None if latency is None else asdict(latency),
            "output_sqnr_db": {"pruned": pruned_sqnr, "reconstructed": None if no_reconstruct else sqnr},
        }
        facts = {
            **_sizes(*sizes),
            **({} if latency is None else {"latency": str(latency).partition(": ")[2]}),
            "removed": _removed_words(smodel),
            **({} if sqnr is None else {"output": f"{decibel(sqnr)} beside the dense model (first batch)"}),
            "saved": str(output),
        }
        out.result(record, *([] if said.quiet else [facts_table(facts)]))


def _removed(smodel: SparseModel) -> dict[str, Any]:
    """What could be removed, what was, and what must stay, for the record."""
    if smodel.config.SPARSER.is_of_blocks:
        names = smodel.removed_blocks()
        return {
            "blocks": {"removable": [block.name for block in smodel.blocks.blocks], "removed": names},
            "spared": [f"{entry.name}: {entry.reason}" for entry in smodel.blocks.spared],
        }
    return {
        "units": {"removable": len(smodel.groups.units), "removed": len(smodel.dead_units())},
        "groups": len(smodel.groups.groups),
        "spared": [str(entry) for entry in smodel.groups.spared],
    }


def _removed_words(smodel: SparseModel) -> str:
    if smodel.config.SPARSER.is_of_blocks:
        names = smodel.removed_blocks()
        return f"{len(names)} of {len(smodel.blocks.blocks)} residual blocks ({', '.join(names) or 'none'})"
    return f"{len(smodel.dead_units()):,} of {len(smodel.groups.units):,} channels, heads and neurons"


def _read_config(
    source: str | None, ratio: float | None, strategy: str | None, device: str | None, model: str
) -> SparseConfig:
    """The config with what the options say; the model's module is imported first, as it may register criteria."""
    from sparsebit.cli.loading import resolve
    from sparsebit.errors import ConfigError
    from sparsebit.sparse import parse_sconfig

    resolve(model, "--model")
    config = parse_sconfig({} if source is None else source)
    for key, value in (("SPARSER.RATIO", ratio), ("SPARSER.STRATEGY", strategy), ("DEVICE", device)):
        if value is not None:
            config = config.replace(key, value)
    if not config.SPARSER.is_structured:
        raise ConfigError(
            f"SPARSER.TYPE={config.SPARSER.TYPE}: prune makes models smaller, and single weights leave the size as it "
            "is; set TYPE: structured, or use SparseModel in Python"
        )
    return config


def _sizes(before: ModelSize, after: ModelSize) -> dict[str, str]:
    rows = (("MACs", before.macs, after.macs), ("parameters", before.parameters, after.parameters))
    named = (*rows, ("bytes", before.bytes, after.bytes))
    return {name: f"{one:,.0f} -> {other:,.0f} ({other / max(1, one):.3f})" for name, one, other in named}
