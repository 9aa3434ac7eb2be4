"""Makes a candidate of a network: quantize, write the file, pass the parity gate, measure its cost, judge its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from sparsebit.compress.climbing.goal import is_over, verdict_of
from sparsebit.compress.networks.bench import Bench
from sparsebit.compress.networks.recipe import Recipe
from sparsebit.deploy.audit.file_latency import Timed
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.recording import record
from sparsebit.records import measured, write_record
from sparsebit.records.ladder import Judgement, LadderStep
from sparsebit.sparse.shrinking import pruned_folder

# `SMALL`: the float model of a recipe that removes channels, as `sparsebit.sparse.load` reads it.
MODEL, RECORD, SMALL = "model", "record.json", "small"
_PLACEMENT_SHARE, _LONGEST_PLACEMENT_S = 0.1, 60.0  # of the whole time
_GATE_BATCHES = 2


@dataclass(frozen=True)
class NetworkTrials:
    """Candidates of one network: the file, the model and the record of each are in its folder."""

    bench: Bench

    def made(self, recipe: Recipe, step: LadderStep, folder: Path, rejects_above: float | None) -> LadderStep:
        """The step with its results. `rejects_above`: judging may stop once the loss is certainly above this."""
        bench = self.bench
        with measured("compress") as run:
            net = recipe.net(bench.model, bench.calibration)
            seconds = min(_LONGEST_PLACEMENT_S, 60 * bench.goal.minutes * _PLACEMENT_SHARE)
            qmodel = recipe.quantized(net, bench.calibration, seconds)
            if qmodel.placement is not None:
                recipe = recipe.replace(placement=qmodel.placement)
            file = folder / file_name(bench)
            gate = bench.calibration[:_GATE_BATCHES]
            parity = qmodel.export(file, bench.example.batch, dynamic_axes=bench.example.axes, check=gate)
        qmodel.save(folder / MODEL)
        if recipe.sconfig is not None:
            pruned_folder.save(net, folder / SMALL)
        cost = bench.cost(file, net, step.name)
        found = replace(step, recipe=recipe.to_dict(), cost=cost, parity=str(parity))
        write_record(folder / RECORD, record(qmodel, parity, name=step.name, file=file, run=run))
        if is_over(bench.goal, cost):
            return replace(found, verdict="over budget")
        judged = bench.judge.select(bench.runner(file, qmodel), bench.goal.max_loss, rejects_above)
        return replace(found, selection=judged, verdict=verdict_of(judged, bench.goal.max_loss))

    def concluded(self, step: LadderStep, folder: Path) -> Judgement:
        """The judgement on samples that selection never saw."""
        qmodel = load(self.bench, step, folder)[1]
        return self.bench.judge.conclude(
            self.bench.runner(folder / file_name(self.bench), qmodel), self.bench.goal.max_loss
        )

    def times(self, folders: Mapping[str, Path]) -> dict[str, Timed]:
        """The time of each candidate over the float file's, in turns; empty if the target does not run here."""
        return self.bench.times({name: folder / file_name(self.bench) for name, folder in folders.items()})


def file_name(bench: Bench) -> str:
    """The name of a candidate's file in its folder."""
    return f"model{bench.ending}"


def load(bench: Bench, step: LadderStep, folder: Path, name: str = MODEL) -> tuple[nn.Module, QuantModel]:
    """The float model and the quantized model of a finished step, in the folder `name` of `folder`."""
    net = pruned_folder.load(folder / SMALL, bench.model).eval() if step.recipe["sparsity"] else bench.model
    return net, QuantModel.load(folder / name, net)
