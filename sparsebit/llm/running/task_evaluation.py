"""Scores of a loaded model on tasks of lm-evaluation-harness (the package `lm_eval`), if that is installed."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.llm.models.hub_classes import package


@dataclass(frozen=True)
class TaskScore:
    """One figure of one task. `stderr`: its standard error, None if lm-eval has none.

    `filter`: how lm-eval read the answers; "none" for likelihoods. `num_samples`: number of questions.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    num_samples: int
    num_fewshot: int


def evaluate_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 4,
) -> list[TaskScore]:
    """The scores of a model of `sparsebit.llm.load` in tasks of lm-eval. Packed weights stay packed.

    `tasks`: names of tasks, groups or tags, or patterns such as `arc_*`. `include_path`: a folder of task files (YAML)
    in addition to those of lm-eval. `limit`: at most this many questions of each task. `num_fewshot`: answered
    questions before each one; default: the task's own number. Tasks load their data from the hub of Hugging Face unless
    their file names local files.
    """
    harness = package("lm_eval", "", "measuring tasks")
    import lm_eval.tasks

    given = None if include_path is None else Path(include_path)
    if not tasks or (given is not None and not given.is_dir()):
        wrong = "no tasks are given" if not tasks else f"include_path {given} is not a folder"
        raise ConfigError(f"{wrong}; name tasks of lm-eval, such as lambada_openai, or a folder of task files (YAML)")
    manager, names = _meant(tasks, given, lm_eval.tasks.TaskManager)
    try:
        # Tasks are built here, with their data, so that an error of the data is reported as such.
        built = manager.load(names)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ConfigError(
            f"tasks {', '.join(names)}: cannot be built ({reason}); tasks of lm-eval fetch their data from the hub: "
            "connect to it once, or give a folder of tasks with local data as include_path"
        ) from error
    from lm_eval.models.huggingface import HFLM

    # lm-eval computes with this very model: it is not loaded a second time, and its layers stay packed.
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    how: dict[str, Any] = {"num_fewshot": num_fewshot, "limit": limit, "log_samples": False, "bootstrap_iters": 1000}
    found = harness.simple_evaluate(model=wrapped, tasks=_outermost(built), task_manager=manager, **how)
    scores = _scores(found)
    broken = [one.task for one in scores if math.isnan(one.value)]
    if broken or not scores:
        raise CalibrationError(f"no score for {', '.join(broken or names)}: the model's likelihoods are not finite")
    return scores


def _meant(tasks: Sequence[str], folder: Path | None, make: Any) -> tuple[Any, list[str]]:
    """A manager with the tasks, and the matched names, without repetitions."""
    if folder is not None:
        # lm-eval has thousands of files, which take seconds to read: skip them if the folder has all requested tasks.
        manager = make(include_path=str(folder), include_defaults=False)
        own = [_matches(task, manager) for task in tasks]
        if all(own):
            return manager, list(dict.fromkeys(name for names in own for name in names))
    manager = make(include_path=None if folder is None else str(folder))
    found: dict[str, None] = {}
    for task in tasks:
        names = _matches(task, manager)
        if not names:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3, cutoff=0.5)
            hint = f"the nearest are {', '.join(near)}" if near else f"it knows {len(manager.all_tasks)} others"
            raise ConfigError(f"task {task!r} is not known to lm-eval; {hint}; own tasks: give include_path")
        found |= dict.fromkeys(names)
    return manager, list(found)


def _matches(task: str, manager: Any) -> list[str]:
    if task in manager.all_tasks:
        return [task]
    return list(manager.match_tasks([task])) if "*" in task else []


def _outermost(built: Mapping[str, Any]) -> list[Any]:
    """Groups, and tasks that are in none of them."""
    groups: Mapping[str, Any] = built["groups"]
    inner = {child for group in groups.values() for child in group.child_names}
    tops = [group for name, group in groups.items() if name not in inner]
    inside = {task.task_name for group in tops for task in group.get_all_tasks()}
    return [*tops, *(task for name, task in built["tasks"].items() if name not in inside)]


def _scores(found: Mapping[str, Any]) -> list[TaskScore]:
    scores: list[TaskScore] = []
    for task, figures in {**found["results"], **found.get("groups", {})}.items():
        better: Mapping[str, Any] = found.get("higher_is_better", {}).get(task) or {}
        samples = found.get("n-samples", {}).get(task, {}).get("effective", figures.get("sample_len", 0))
        for key, value in figures.items():
            metric, comma, way = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                error = figures.get(f"{metric}_stderr,{way}")
                error = float(error) if isinstance(error, (int, float)) else None
                counts = int(samples or 0), int(found.get("n-shot", {}).get(task) or 0)
                scores.append(TaskScore(task, metric, way, float(value), error, better.get(metric), *counts))
    return scores
