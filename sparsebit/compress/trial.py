"""Makes one candidate: quantize, write the file, pass the parity gate, measure its cost, judge its loss."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from sparsebit.compress.bench import Bench
from sparsebit.compress.goal import used
from sparsebit.compress.recipe import Recipe
from sparsebit.progress import OutOfTime
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.recording import record
from sparsebit.records import measured, write_record
from sparsebit.records.ladder import Judgement, LadderStep, Verdict
from sparsebit.sparse.shrinking import pruned_folder

log = logging.getLogger(__name__)

# `SMALL`: the float model of a recipe that removes channels, as `sparsebit.sparse.load` reads it.
MODEL, FILE, RECORD, SMALL = "model", "model.onnx", "record.json", "small"
_PLACEMENT_SHARE, _LONGEST_PLACEMENT_S = 0.1, 60.0  # of the whole time
_GATE_BATCHES = 2


@dataclass(frozen=True)
class Candidate:
    """A recipe that a rung proposes. `name`: short and unique in a run; `why`: the reason, in a sentence."""

    name: str
    why: str
    recipe: Recipe


def try_candidate(
    bench: Bench, candidate: Candidate, step: LadderStep, folder: Path, rejects_above: float | None
) -> LadderStep:
    """The step with its results; the file, the model and the record are in `folder`.

    `step`: with a name, a rung and a reason. `rejects_above`: a loss that a better candidate does not reach.
    An error of the candidate is its result; only the end of the time and an interrupt are raised.
    """
    start = time.monotonic()
    try:
        found = _made(bench, candidate.recipe, step, folder, rejects_above)
    except OutOfTime:
        raise
    except Exception as fault:  # a candidate that cannot be made is a result; the search goes on
        log.info("%s failed", step.name, exc_info=True)
        found = replace(step, verdict="failed", fault=f"{type(fault).__name__}: {fault}")
    return replace(found, seconds=time.monotonic() - start)


def _made(bench: Bench, recipe: Recipe, step: LadderStep, folder: Path, rejects_above: float | None) -> LadderStep:
    with measured("compress") as run:
        net = recipe.net(bench.model, bench.calibration)
        seconds = min(_LONGEST_PLACEMENT_S, 60 * bench.goal.minutes * _PLACEMENT_SHARE)
        qmodel = recipe.quantized(net, bench.calibration, seconds)
        if qmodel.placement is not None:
            recipe = recipe.replace(placement=qmodel.placement)
        file = folder / FILE
        gate = bench.calibration[:_GATE_BATCHES]
        parity = qmodel.export_onnx(bench.example.batch, file, dynamic_axes=bench.example.axes, check=gate)
    qmodel.save(folder / MODEL)
    if recipe.sconfig is not None:
        pruned_folder.save(net, folder / SMALL)
    cost = bench.cost(file, net, step.name)
    found = replace(step, recipe=recipe.to_dict(), cost=cost, parity=str(parity))
    over = {name: share for name, share in used(bench.goal, cost).items() if share > 1}
    if not over:
        judged = bench.judge.select(bench.runner(file, qmodel), bench.goal.max_loss, rejects_above)
        found = replace(found, selection=judged)
    write_record(folder / RECORD, record(qmodel, parity, name=step.name, file=file, run=run))
    return replace(found, verdict="over budget" if over else verdict_of(found.selection, bench.goal.max_loss))


def verdict_of(judged: Judgement | None, allowed: float | None) -> Verdict:
    """Whether the measured loss is within the allowed one."""
    return "within" if judged is not None and (allowed is None or judged.loss <= allowed) else "too much loss"


def load(bench: Bench, step: LadderStep, folder: Path) -> tuple[nn.Module, QuantModel]:
    """The float model and the quantized model of a finished step."""
    net = pruned_folder.load(folder / SMALL, bench.model).eval() if step.recipe["sparsity"] else bench.model
    return net, QuantModel.load(folder / MODEL, net)
