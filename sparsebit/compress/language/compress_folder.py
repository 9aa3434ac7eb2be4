"""`compress_folder`: the search for a language model in a folder, judged on held-out text."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from sparsebit.compress.climbing.result import Result
from sparsebit.compress.climbing.run_folder import RunFolder
from sparsebit.compress.climbing.rung import Rung
from sparsebit.compress.climbing.search import Search, empty_ladder
from sparsebit.compress.judging.judges import SampleJudge
from sparsebit.compress.judging.metrics import PerSample
from sparsebit.compress.language.recipe import LanguageRecipe, LanguageStudy
from sparsebit.compress.language.trial import PACKED, LanguageTrials, bytes_of, file_of
from sparsebit.errors import ConfigError
from sparsebit.llm import Calibration, load, token_stream, windows
from sparsebit.llm.converting.targets import TARGETS, need_model
from sparsebit.llm.models.calibration_text import draw_windows
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.models.hub_models import local_folder
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.records.ladder import Cost, Ladder, LadderGoal

_WINDOWS, _FEWEST = 128, 8  # windows of text that judge: at most, at least
_BATCH = 4
Text = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def compress_folder(
    model: str | os.PathLike[str],
    data: Text | Calibration,
    validation: str | os.PathLike[str] | None,
    metric: PerSample,
    goal: LadderGoal,
    folder: str | os.PathLike[str],
    rungs: list[Rung],
    show: Callable[[Ladder], None],
) -> Result:
    """As `sparsebit.compress` describes; `data`: texts to calibrate on, `validation`: a held-out one."""
    if goal.target not in TARGETS:
        raise ConfigError(f"target={goal.target!r}: allowed for a language model: {', '.join(TARGETS)}")
    if validation is None:
        raise ConfigError("validation=None: a language model is judged on text that it was not calibrated on; give one")
    source, calibration, held_out = local_folder(model), _calibration(data), Path(validation)
    if any(text.resolve() == held_out.resolve() for text in calibration.texts):
        raise ConfigError(f"validation={str(validation)!r} is also calibrated on; give another text")
    need_model(goal.target, source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunFolder(folder)
    with run.alone():
        identity = _identity(source, calibration, held_out, goal, rungs)
        best = run.path / f"best{file_of(goal.target, run.path).suffix}"
        ladder = run.read(identity, goal.minutes, best.name) or empty_ladder(identity, goal)
        float_model = load(source, device=device)
        batches = _batches(source, calibration, held_out, device)
        judge = SampleJudge(metric, float_model, batches[0::2], batches[1::2])
        files, size = ModelFolder(source), bytes_of(source)
        trials = LanguageTrials(source, goal, calibration, judge, size, device)
        if not ladder.finished:
            begun = ladder.replace(float_cost=Cost(size, 1.0, 0, 1.0, bits=_bits_of(files)))
            study = LanguageStudy(size, frozenset(shape[-1] for shape in files.shapes().values() if len(shape) > 1))
            ladder = Search(trials, study, rungs, run, begun, show).run()
            ladder = _write_outcome(run, ladder, source, calibration)
            show(ladder)
    packed = best if TARGETS[goal.target].format is None else None  # a file for another runtime is not loaded here
    return Result(ladder, run.path, best, lambda step: trials.load(packed or run.path / step.folder / PACKED))


def _calibration(data: Text | Calibration) -> Calibration:
    """The calibration as it was given, or one that draws from these text files."""
    if isinstance(data, Calibration):
        return data
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    if wrong := [one for one in given if not isinstance(one, str | os.PathLike)]:
        kind = type(wrong[0]).__name__
        raise ConfigError(f"data of type {kind}: a language model in a folder is calibrated on text files; give paths")
    return Calibration([Path(one) for one in given])


def _batches(source: Path, calibration: Calibration, held_out: Path, device: str) -> list[dict[str, Any]]:
    """Windows of the held-out text, as long as those of the calibration; too little of either text is an error."""
    tokenizer, length = load_tokenizer(source), calibration.length
    wanted, chat = calibration.num_samples, calibration.chat_template
    draw_windows(calibration.texts, tokenizer, num_samples=wanted, length=length, widest=1, chat_template=chat)
    tokens = token_stream(held_out, tokenizer, limit=length * _WINDOWS)
    found = windows(tokens, length, min(_WINDOWS, max(len(tokens) // length, _FEWEST)))
    return [{"input_ids": batch.to(device), "use_cache": False} for batch in found.split(min(_BATCH, len(found) // 2))]


def _bits_of(model: ModelFolder) -> float:
    """Bits of a weight in the files of the float model."""
    size = sum(path.stat().st_size for path in set(model.files.values()))
    return 8 * size / sum(math.prod(shape) for shape in model.shapes().values())


def _identity(source: Path, calibration: Calibration, held_out: Path, goal: LadderGoal, rungs: Sequence[Rung]) -> str:
    """A checksum of what the result depends on; files count by name, size and time of change, as they are large."""
    places = [source, *calibration.texts, held_out]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*")))]
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    how = [calibration.num_samples, calibration.length, calibration.seed, calibration.chat_template]
    asked = [goal.target, goal.metric, goal.max_loss, goal.budget, goal.prefer, [rung.name for rung in rungs]]
    return hashlib.sha256(json.dumps([facts, how, asked]).encode()).hexdigest()


def _write_outcome(run: RunFolder, ladder: Ladder, source: Path, calibration: Calibration) -> Ladder:
    """Put the best candidate at the top of the run; returns the ladder with how to make it again."""
    if ladder.best:
        step = ladder.step(ladder.best)
        file = file_of(ladder.goal.target, run.path / step.folder)
        run.copy_in(file, f"best{file.suffix}")
        ladder = ladder.replace(reproduce=command(source, LanguageRecipe.from_dict(step.recipe), calibration))
    run.write(ladder)
    return ladder


def command(source: Path, recipe: LanguageRecipe, calibration: Calibration) -> str:
    """The command line that quantizes by this recipe, without a search."""
    usual = Calibration(calibration.text)
    drawn = {field.name: getattr(calibration, field.name) for field in fields(Calibration) if field.name != "text"}
    changed = {name: value for name, value in drawn.items() if value != getattr(usual, name)}
    words = [f"--text {shlex.quote(str(text))}" for text in calibration.texts]
    for name, value in {**recipe.options, **changed}.items():
        option = f"--{name.replace('_', '-')}"
        listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words.append(option if value is True else f"{option} {listed}")
    return f"sparsebit llm quantize {shlex.quote(str(source))} --for {recipe.target} {' '.join(words)} -o OUT"
