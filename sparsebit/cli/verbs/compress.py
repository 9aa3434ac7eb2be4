"""`sparsebit compress`: search for the best file under a goal, showing each step as it is judged."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from sparsebit.cli.inputs.calibrated_model import load_subject
from sparsebit.cli.inputs.data import Inputs, fitting, load_data
from sparsebit.cli.inputs.loading import resolve, users_code
from sparsebit.cli.option_groups import NUM_TEST_SAMPLES, retyped
from sparsebit.cli.options import read_limits, refuse
from sparsebit.cli.outputs.ladders import ShownSteps, ladder_table
from sparsebit.cli.outputs.output import Output, facts_table, kilobytes
from sparsebit.cli.outputs.recording import Recording
from sparsebit.cli.verb_options import CompressOptions
from sparsebit.compress import Result
from sparsebit.compress import compress as search
from sparsebit.compress.climbing.conclusion import TRAINING
from sparsebit.compress.networks.outcome import CONFIG, PLACEMENT
from sparsebit.compress.networks.trial import SMALL
from sparsebit.records.json_form import to_plain
from sparsebit.records.ladder import Ladder


def compress(asked: CompressOptions, out: Output, recorded: Recording) -> None:
    """Search, and report the ladder and the best file."""
    del recorded
    budget = read_limits(asked.budget or [])
    metric = _metric(asked)
    subject = load_subject(asked.net, asked.data, fitting(asked.how, asked.data, asked.scored.test_data))
    validation = _validation(asked, subject.model)
    out.remark(f"compressing {asked.net.model} for {asked.target}, at most {asked.minutes:g} min")
    with users_code("compress failed", theirs_alone=False):
        result = search(
            subject.model,
            list(subject.data),
            asked.target,
            folder=asked.output,
            metric=metric,
            validation=validation,
            max_loss=asked.max_loss,
            budget=budget,
            prefer=asked.prefer,  # type: ignore[arg-type]  # checked by the search
            minutes=asked.minutes,
            rungs=asked.rungs,
            show=ShownSteps(out),
        )
    record = {"folder": str(asked.output), "file": result.file and str(result.file), **to_plain(result.ladder, Ladder)}
    out.result(record, ladder_table(result.ladder), details=[facts_table(_facts(result))])
    out.next_steps(*_next_steps(asked, result))


def _metric(asked: CompressOptions) -> Any:
    """The user's function, a metric's name, or None."""
    name, labels = asked.scored.metric, asked.scored.test_data
    if name is not None and ":" in name:
        return resolve(name, "--metric")
    refuse(
        {
            f"{name!r}: write accuracy, agreement or MODULE:FUNCTION": name not in (None, "accuracy", "agreement"),
            "accuracy is measured on labelled data; give --test-data": name == "accuracy" and not labels,
        },
        "--metric",
    )
    return "top1" if labels and asked.scored.is_labelled else "agreement"


def _validation(asked: CompressOptions, model: Any) -> list[Any] | None:
    source = asked.scored.test_data
    if source is None:
        return None
    how = replace(fitting(asked.how, source, asked.data), num_samples=asked.scored.test_samples or NUM_TEST_SAMPLES)
    return list(load_data(source, how, Inputs.of(model), labelled=_metric(asked) == "top1"))


def _facts(result: Result) -> dict[str, str]:
    ladder = result.ladder
    if not ladder.best:
        return {"goal": f"not met: {result.reason}"}
    step = ladder.step(ladder.best)
    assert step.cost is not None
    before = "" if ladder.float_cost is None else f", {kilobytes(ladder.float_cost.num_bytes)} in float"
    latency = step.cost.milliseconds
    time = "" if latency is None or ladder.float_cost is None else f"{latency:.3g} ms for one sample, one thread"
    return {
        "goal": "met" if result.met else "not met",
        "best": result.reason,
        "selection": str(step.selection or ""),
        "file": f"{result.file}, {kilobytes(step.cost.num_bytes)}{before}",
        "time": time,
        "parity": step.parity,
    }


def _next_steps(asked: CompressOptions, result: Result) -> list[str]:
    """The commands that show the run, make the file again without a search, or train the nearest candidate."""
    if not result.ladder.best:
        return []
    folder, net = asked.output, asked.net
    run, config, placement, script = (shlex.quote(str(folder / name)) for name in ("", CONFIG, PLACEMENT, TRAINING))
    step = result.ladder.step(result.ladder.best)
    data = " ".join(filter(None, [f"-d {shlex.quote(str(asked.data))}", retyped(asked.how)]))
    words = retyped(net)
    if step.recipe["sparsity"]:
        words = retyped(replace(net, weights=folder / SMALL))
    placed = f" --placement {placement}" if (folder / PLACEMENT).exists() else ""
    half = "" if asked.scored.test_data else "   # calibrates on all of the data, the search on half of it"
    again = f"sparsebit quantize {words} {data} -c {config}{placed} -o FILE.onnx{half}"
    page = f"sparsebit report {run}   # a page about the run"
    return [page, again, *([] if result.met else [f"python {script}   # trains the nearest candidate"])]
