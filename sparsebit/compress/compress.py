"""`compress`: the best file under a goal, found by climbing a ladder of methods within a time budget.

A *rung* proposes candidates, a *trial* makes and measures one, a *judge* compares it with the float model, and the
`Search` (`climbing/search.py`) chooses. Everything is kept in one folder. This file connects the parts for networks;
`language/compress_folder.py` does so for language models, which are given as a folder.

Invariant: the same call with the same folder continues; `_identity` decides whether a call is the same, so everything
that changes the result must be in it. The user's model is left as it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sparsebit.compress.climbing.goal import Amount, Budget, need_backend, read_goal
from sparsebit.compress.climbing.result import Result
from sparsebit.compress.climbing.run_folder import RunFolder
from sparsebit.compress.climbing.rung import Rung
from sparsebit.compress.climbing.search import Search, empty_ladder
from sparsebit.compress.judging.fingerprint import fingerprint
from sparsebit.compress.judging.judges import judge_of
from sparsebit.compress.judging.metrics import Metric, has_own_data, inputs_of, read_metric
from sparsebit.compress.judging.samples import Samples, split
from sparsebit.compress.language.compress_folder import compress_folder
from sparsebit.compress.language.metrics import read_language_metric
from sparsebit.compress.language.rungs import LANGUAGE_RUNGS
from sparsebit.compress.networks.bench import (
    Bench,
    Example,
    example_of,
    float_cost,
    runtime_float,
    stopwatch_for,
    write_float,
)
from sparsebit.compress.networks.outcome import BEST_MODEL, best_file, write_outcome
from sparsebit.compress.networks.rungs import RUNGS
from sparsebit.compress.networks.study import Study
from sparsebit.compress.networks.trial import NetworkTrials, load
from sparsebit.deploy.onnx_graph.model_file import graph_digest, staged
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.errors import ConfigError
from sparsebit.graph.checking.outcome import state_kept
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.records.ladder import Ladder, LadderGoal
from sparsebit.registry import Registry
from sparsebit.tensor_files import digest

log = logging.getLogger(__name__)


def compress(
    model: nn.Module | str | os.PathLike[str],
    data: Any,
    target: str = "onnxruntime",
    *,
    folder: str | os.PathLike[str],
    metric: Any = None,
    validation: Any = None,
    max_loss: float | None = None,
    budget: Budget | None = None,
    prefer: Amount | None = None,
    minutes: float = 20.0,
    rungs: Sequence[str] | None = None,
    show: Callable[[Ladder], None] | None = None,
) -> Result:
    """The fastest file that keeps the loss, or the most accurate one that keeps the budget, in about `minutes`.

    `data`: batches as for `quantize`. Without `validation`, its first half calibrates and the rest judges. `target`: a
    backend. `folder`: keeps everything; the same call with the same folder continues a run that was stopped.

    `metric`: a score, higher is better; its forms are in `sparsebit.compress.judging.metrics`. None: the agreement with
    the float model, without labels. `max_loss`: in the unit of the metric, percent points for shares; 1 if no budget is
    given either. `budget`: limits on `latency`, `bytes`, `macs`: up to 1 a share of the float file's, else
    milliseconds, bytes, multiplications. `prefer`: what is made small without a budget; `latency` by default.
    `rungs`: the names of those to climb, default all. `show`: called with the ladder after every step.

    A language model is given as its folder: `data` is text files or a `sparsebit.llm.Calibration`, `validation` a text
    that is not among them, `target`
    `transformers`, `vllm`, `llama.cpp` or `genai`, `metric` `perplexity` or `kl`, a budget `bytes` or `bits`.

    Every file that is offered has passed the comparison with its simulation in the runtime. If nothing keeps the goal,
    the nearest candidate is returned with the reason, and `train.py` in the folder.

    >>> result = sparsebit.compress(net, loader, folder="run/", max_loss=0.5)  # doctest: +SKIP
    >>> result.file, result.met, result.reason  # doctest: +SKIP
    """
    show = show or _quiet
    if not isinstance(model, nn.Module | str | os.PathLike):
        kind = type(model).__name__
        raise ConfigError(f"model of type {kind}: give a torch.nn.Module, or the folder of a language model")
    wanted: Any = {"max_loss": max_loss, "budget": budget, "prefer": prefer, "minutes": float(minutes)}
    if isinstance(model, str | os.PathLike):
        judged_by = read_language_metric(metric)
        goal = read_goal(target, judged_by.name, **wanted, models="language models")
        return compress_folder(model, data, validation, judged_by, goal, folder, _chosen(rungs, LANGUAGE_RUNGS), show)
    need_backend(target)
    if target in TARGETS:
        TARGETS[target].require()
    chosen = _chosen(rungs, RUNGS)
    samples = split(data, validation, needs_samples=not has_own_data(metric))
    model = _on_cpu(model)
    with state_kept(model):
        model.eval()
        example = example_of(model, samples.calibration)
        batch = (samples.selection or samples.calibration)[0]
        measured = read_metric(metric, _outputs(model, batch), batch)
        goal = read_goal(target, measured.name, **wanted)
        run = RunFolder(folder)
        with run.alone():
            return _run(model, samples, example, measured, goal, run, chosen, show)


def _run(
    model: nn.Module,
    samples: Samples,
    example: Example,
    metric: Metric,
    goal: LadderGoal,
    run: RunFolder,
    rungs: list[Rung],
    show: Callable[[Ladder], None],
) -> Result:
    float_file, best = run.path / "float.onnx", best_file(goal.target)
    with staged(float_file) as path:  # `run.read` raises if the folder holds another run; its float file then stays
        axes = write_float(model, example, path)
        example = example.for_target(goal.target, axes)
        identity = _identity(model, samples, goal, rungs, f"{graph_digest(path)} {fingerprint(metric)}")
        ladder = run.read(identity, goal.minutes, best) or empty_ladder(identity, goal)
    float_file = runtime_float(model, example, goal.target, float_file)
    stopwatch = stopwatch_for(goal, example, model)
    cost = ladder.float_cost or float_cost(float_file, model, example, stopwatch)
    judge = judge_of(metric, model, samples.selection, samples.final)
    bench = Bench(model, goal, samples.calibration, example, judge, stopwatch, float_file, cost)
    if not ladder.finished:
        study = Study(bench, run.path)
        judge.check()
        search = Search(NetworkTrials(bench), study, rungs, run, ladder.replace(float_cost=cost), show)
        ladder = write_outcome(bench, run, search.run())
        show(ladder)
    return Result(ladder, run.path, run.path / best, lambda step: load(bench, step, run.path, BEST_MODEL)[1])


def _chosen(names: Sequence[str] | None, registry: Registry[Rung]) -> list[Rung]:
    """The rungs in their order."""
    if isinstance(names, str):
        raise ConfigError(f"rungs={names!r}: give a list of names, as [{names!r}]")
    every = [registry.get(name) for name in (registry.names() if names is None else names)]
    if not every:
        raise ConfigError(f"rungs=(): nothing would be tried; allowed: {', '.join(registry.names())}")
    return sorted(every, key=lambda rung: rung.order)


def _identity(model: nn.Module, samples: Samples, goal: LadderGoal, rungs: list[Rung], computed: str) -> str:
    """A checksum of what the result depends on; another number of minutes continues the same run.

    `computed`: what the model and the metric compute.
    """
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    batches = [*samples.calibration, *samples.selection, *samples.final]
    data = {str(place): tensor for place, tensor in enumerate(tensors_of(batches))}
    sizes = [len(part) for part in (samples.calibration, samples.selection, samples.final)]
    names = [rung.name for rung in rungs]
    asked = json.dumps([goal.target, goal.metric, goal.max_loss, goal.budget, goal.prefer, sizes, names])
    return hashlib.sha256(f"{digest(state)} {digest(data)} {asked} {computed}".encode()).hexdigest()


def _on_cpu(model: nn.Module) -> nn.Module:
    """The model, or a copy if it is elsewhere: it is compared with files that run on the CPU."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return model if all(tensor.is_cpu for tensor in tensors) else copy_model(model).cpu()


@torch.no_grad()
def _outputs(model: nn.Module, batch: Any) -> Any:
    args, kwargs = map_nested(torch.Tensor, torch.clone, inputs_of(batch, model))
    return model(*args, **kwargs)


def _quiet(ladder: Ladder) -> None:
    del ladder
