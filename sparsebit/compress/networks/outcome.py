"""Writes the results of a search into its folder: `best.onnx`, files that rebuild it, records, a training script."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

from sparsebit.compress.climbing.conclusion import TRAINING, reason_for
from sparsebit.compress.climbing.run_folder import RunFolder
from sparsebit.compress.networks.bench import Bench
from sparsebit.compress.networks.study import Study
from sparsebit.compress.networks.training_script import training_script
from sparsebit.compress.networks.trial import MODEL, RECORD, SMALL, file_name, load
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.folders import replace_text
from sparsebit.progress import OutOfTime, time_limit
from sparsebit.records import read_record, write_record
from sparsebit.records.ladder import Ladder, LadderStep

BEST_MODEL = "best"
CONFIG, PLACEMENT, SPARSITY = "best.yaml", "placement.json", "sparsity.yaml"
_PROFILED_BATCHES, _TIMED_S = 2, 2.0
_NUM_NAMED = 3  # of the layers that cost the most accuracy
_REASON_SHARE = 0.05  # of the time, to find them, unless a rung already has


def best_file(target: str) -> str:
    """The name of the best candidate's file: `best.onnx`, or with the ending of the target's files."""
    return f"best{PROFILES[target].ending}"


def write_outcome(bench: Bench, run: RunFolder, ladder: Ladder) -> Ladder:
    """Write the best candidate's files to the top of the run; returns the ladder with the call that rebuilds it."""
    if not ladder.best:
        run.write(ladder)
        return ladder
    step = ladder.step(ladder.best)
    source = run.path / step.folder
    recipe = step.recipe
    run.copy_in(source / MODEL, BEST_MODEL)
    _write(run.path / CONFIG, recipe["config"])
    has_profile = isinstance(recipe["placement"], dict)
    _write(run.path / PLACEMENT, json.dumps(recipe["placement"], indent=1) + "\n" if has_profile else None)
    _write(run.path / SPARSITY, recipe["sparsity"])
    if recipe["sparsity"]:
        run.copy_in(source / SMALL, SMALL)
    else:
        shutil.rmtree(run.path / SMALL, ignore_errors=True)
    run.copy_in(source / file_name(bench), best_file(bench.goal.target))
    _write(run.path / TRAINING, None if ladder.met else training_script(ladder))
    _write_record(bench, run, step)
    config, placement, small = (repr(str(run.path / name)) for name in (CONFIG, PLACEMENT, SMALL))
    placed = f", placement={placement}" if has_profile else ""
    net = f"sparsebit.sparse.load({small}, model)" if recipe["sparsity"] else "model"
    again = f"sparsebit.quantize({net}, batches, {config}{placed})"
    if step.verdict == "too much loss":
        with contextlib.suppress(OutOfTime), time_limit(60 * ladder.goal.minutes * _REASON_SHARE):
            worst = Study(bench, run.path).worst_layers(step)[:_NUM_NAMED]
            ladder = ladder.replace(reason=reason_for(ladder, worst))
    ladder = ladder.replace(reproduce=again)
    run.write(ladder)
    return ladder


def _write_record(bench: Bench, run: RunFolder, step: LadderStep) -> None:
    """The record of the step, with the errors of all layers and how the runtime executes the file."""
    source, file = run.path / step.folder, run.path / best_file(bench.goal.target)
    qmodel = load(bench, step, source)[1]
    # A measured placement may leave the whole model in float, which has no errors.
    errors = () if qmodel.is_float_by_plan else (qmodel.profile(bench.calibration[:_PROFILED_BATCHES]),)
    made = read_record(source / RECORD)
    assert made.file is not None
    audits = () if bench.stopwatch is None else (audit(file, runtime=bench.runtime, budget_s=_TIMED_S),)
    facts = replace(made.file, path=str(file))
    write_record(run.path / RECORD, made.replace(errors=errors, audits=audits, file=facts))


def _write(path: Path, text: str | None) -> None:
    """Write a file, or remove the one of an earlier call."""
    if text is None:
        path.unlink(missing_ok=True)
    else:
        replace_text(path, text)
