"""`sparsebit prune`: remove channels, heads and neurons from a model, and save the smaller one as a folder.

The steps are those of `SparseModel`: find groups, choose ratios under a budget, mask, fit the remaining weights,
shrink. Sizes, time, SQNR and accuracy are measured before and after, and stored in the folder for `sparsebit report`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from sparsebit.cli.inputs.accuracy import Accuracy, Scores
from sparsebit.cli.inputs.calibrated_model import load_subject
from sparsebit.cli.inputs.data import Inputs, fitting
from sparsebit.cli.inputs.first_batch import FirstBatch
from sparsebit.cli.inputs.loading import import_model, load_net, weights_source
from sparsebit.cli.inputs.scoring import load_test
from sparsebit.cli.option_groups import retyped
from sparsebit.cli.options import refuse
from sparsebit.cli.outputs.output import Output, decibel, facts_table
from sparsebit.cli.outputs.output_names import check_folder_name
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import PruneOptions
from sparsebit.cli.verbs.search import read_budgets
from sparsebit.errors import ConfigError
from sparsebit.records.model_folders import PrunedModel, PrunedSize
from sparsebit.sparse import ModelSize, RatioChoice, SparseConfig, SparseModel, model_size, parse_sconfig, save
from sparsebit.sparse.budgets.latency_table import RUNTIME
from sparsebit.sparse.budgets.measured_time import MeasuredTime, measured_time
from sparsebit.sparse.budgets.ratio_search import KERNEL_WIDTHS
from sparsebit.sparse.shrinking.pruned_folder import checked_folder
from sparsebit.sparse.shrinking.pruned_layers import float_graph, pruned_layers


def prune(asked: PruneOptions, out: Output, recorded: Recording) -> None:
    """Choose, remove, fit, save, and report."""
    name, data, output, round_to = asked.net.model, asked.data, asked.output, asked.round_to
    check_folder_name(output)
    limits = read_budgets(asked.budget or [])
    _check(asked, limits)
    sconfig = _read_config(asked)
    checked_folder(output)
    batches: list[Any] | None = None
    first = None
    if data is None:
        net = load_net(asked.net)
    else:
        subject = load_subject(asked.net, data, fitting(asked.how, data, asked.scored.test_data))
        net, batches, first = subject.model, list(subject.data), subject.first_batch
    test = load_test(asked.scored, net, net, Inputs.of(net), data, asked.how)
    smodel = SparseModel(net, sconfig, None if batches is None else batches[0]).eval()
    chosen, pruned_sqnr = _masked(smodel, asked, limits, batches, first, out)
    small = smodel.shrink(round_to)
    sizes = model_size(net, smodel.example_batch), model_size(small, smodel.example_batch)
    sqnr = None if first is None else first.sqnr_db(small, sconfig.DEVICE)
    models = {"dense": (net, "cpu"), "pruned": (small, sconfig.DEVICE)}
    accuracy = None if test is None else test.run(models, calibrated=True)
    latency = chosen and chosen.latency
    time = measured_time(net, small, smodel.example_batch)
    notes = [] if sconfig.SPARSER.is_of_blocks else list(smodel.groups.notes)  # the limits of the proof of the channels
    layers, graph = pruned_layers(net, small), float_graph(small, smodel.example_batch)
    before, after = map(_size, sizes)
    measured = PrunedModel(name, before, after, layers, graph, output_sqnr_db=sqnr, notes=tuple(notes))
    save(small, output, measured=_with_results(measured, time, accuracy))
    record = {
        "model": name,
        "weights": weights_source(asked.net.model, asked.net.weights),
        "output": str(output),
        "before": sizes[0].to_dict(),
        "after": sizes[1].to_dict(),
        **_removed(smodel),
        "ratios": chosen and dict(chosen.ratios),
        "round_to": (round_to or 1) if chosen is None else chosen.round_to,
        "latency": latency and asdict(latency),
        "time": time.to_dict(),
        "notes": notes,
        "accuracy": accuracy and accuracy.to_dict(),
        "output_sqnr_db": {"pruned": pruned_sqnr, "reconstructed": None if asked.no_reconstruct else sqnr},
    }
    facts = {
        **_sizes(*sizes),
        "latency": "" if latency is None else str(latency).partition(": ")[2],
        "time": str(time),
        "removed": _removed_words(smodel),
        **{f"note {number}": note for number, note in enumerate(notes, 1)},
        "output": "" if sqnr is None else f"SQNR {decibel(sqnr)} against the dense model (first batch)",
        "accuracy": str(accuracy or ""),
        "saved": str(output),
    }
    out.result(record, details=[facts_table(facts)])
    net_again, data_again = retyped(asked.net, without=["weights"]), retyped(asked.how, asked.scored)
    words = ["sparsebit quantize", net_again, f"-w {output} -d {data or 'SOURCE'}", data_again, "-o FILE.onnx"]
    out.next_steps(" ".join(filter(None, words)))


def _size(size: ModelSize) -> PrunedSize:
    return PrunedSize(size.macs, size.parameters, size.bytes)


def _with_results(found: PrunedModel, time: MeasuredTime, accuracy: Accuracy | Scores | None) -> PrunedModel:
    if time.dense_ms is not None and time.small_ms is not None:
        both = (time.dense_ms, time.small_ms)
        found = replace(found, runtime=RUNTIME, milliseconds=both, latency=time.ratio)
    return replace(found, accuracy=None if accuracy is None else accuracy.facts())


def _masked(
    smodel: SparseModel,
    asked: PruneOptions,
    limits: dict[str, float],
    batches: list[Any] | None,
    first: FirstBatch | None,
    out: Output,
) -> tuple[RatioChoice | None, float | None]:
    """Choose and mask, and fit what remains; returns the choice, and the SQNR before the fit."""
    if smodel.config.SPARSER.is_of_blocks:
        out.remark(f"found {len(smodel.blocks.blocks)} residual blocks that can be removed")
    else:
        found = smodel.groups
        out.remark(f"found {len(found.groups)} groups, {len(found.units)} units that can be removed")
    chosen = None
    if limits:
        assert batches is not None
        chosen = smodel.choose_ratios(limits, batches, round_to=asked.round_to or KERNEL_WIDTHS)
        out.remark(_widths(chosen.round_to, was_given=asked.round_to is not None))
    smodel.calc_params(batches)
    _check_removed(smodel)
    pruned_sqnr = None if first is None else first.sqnr_db(smodel.model, smodel.config.DEVICE)
    if batches is not None and not asked.no_reconstruct:
        out.remark(f"fitting the remaining weights on {len(batches)} batches")
        smodel.reconstruct(batches)
    return chosen, pruned_sqnr


def _check(asked: PruneOptions, limits: dict[str, float]) -> None:
    """Raise before the work for options that cannot be used together, or without data."""
    is_open = asked.ratio is None and not limits and asked.config is None
    refuse(
        {
            "give --ratio, or --budget, which chooses the ratios": asked.ratio is not None and limits,
            "how much should be removed? give --ratio 0.3, --budget macs=0.7, or a --config": is_open,
        }
    )
    refuse({"missing: the ratios under a budget are chosen on data": asked.data is None and limits}, "--data")
    if asked.data is None and asked.scored.test_data is None:
        asked.how.refuse_without_data()


def _widths(round_to: int, *, was_given: bool) -> str:
    """Which widths the smaller model has, and why."""
    coarser = {16: "", 8: "16", 1: "16 or 8"}.get(round_to, "")
    why = f": with multiples of {coarser} the budget is missed, or much of it unused" if coarser else ""
    widths = "widths of any number" if round_to == 1 else f"widths stay multiples of {round_to} where they were"
    return widths if was_given else widths + ("" if round_to == 1 else ", which kernels like") + why


def _removed(smodel: SparseModel) -> dict[str, Any]:
    """For the record: the removable, the removed and the spared parts."""
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


def _check_removed(smodel: SparseModel) -> None:
    """Raise if the ratio removes nothing: the folder would hold the dense model."""
    if smodel.config.SPARSER.is_of_blocks:
        found, removed, what = [len(smodel.blocks.blocks)], len(smodel.removed_blocks()), "residual blocks"
    else:
        found, removed = [len(group.units) for group in smodel.groups.groups], len(smodel.dead_units())
        what = "channels, heads or neurons"
    if not found:
        raise ConfigError(f"no {what} can be removed from the model:\n{smodel.groups}")
    if not removed:
        raise ConfigError(
            f"nothing is removed: the largest group has {max(found)} {what}, of which the ratio rounds to none, or "
            "SPARE and SPECIFIC leave all of them; give a larger ratio, or a smaller budget"
        )


def _removed_words(smodel: SparseModel) -> str:
    if smodel.config.SPARSER.is_of_blocks:
        names = smodel.removed_blocks()
        return f"{len(names)} of {len(smodel.blocks.blocks)} residual blocks ({', '.join(names) or 'none'})"
    return f"{len(smodel.dead_units()):,} of {len(smodel.groups.units):,} channels, heads and neurons"


def _read_config(asked: PruneOptions) -> SparseConfig:
    """The config with the options applied; the model's module is imported first, as it may register criteria."""
    import_model(asked.net.model)
    config = parse_sconfig({} if asked.config is None else asked.config)
    given = {"SPARSER.RATIO": asked.ratio, "SPARSER.STRATEGY": asked.strategy, "DEVICE": asked.device}
    for key, value in given.items():
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
