"""`compress_folder`: the search for a language model in a folder, judged on held-out text."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
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
from sparsebit.compress.language.trial import LanguageTrials, bytes_of, file_of
from sparsebit.errors import ConfigError
from sparsebit.llm import Calibration, load, token_stream, windows
from sparsebit.llm.converting.targets import TARGETS
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.models.hub_models import local_folder
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.records.ladder import Cost, Ladder, LadderGoal

_LENGTH, _WINDOWS, _FEWEST = 512, 128, 8  # tokens of a window; windows that judge, at most and at least
_BATCH = 4
Text = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def compress_folder(
    model: str | os.PathLike[str],
    data: Text,
    validation: str | os.PathLike[str] | None,
    metric: PerSample,
    goal: LadderGoal,
    folder: str | os.PathLike[str],
    rungs: list[Rung],
    show: Callable[[Ladder], None],
) -> Result:
    """As `sparsebit.compress` describes; `data`: text files to calibrate on, `validation`: a held-out text."""
    if goal.target not in TARGETS:
        raise ConfigError(f"target={goal.target!r}: allowed for a language model: {', '.join(TARGETS)}")
    if validation is None:
        raise ConfigError("validation=None: a language model is judged on text that it was not calibrated on; give one")
    source, texts = local_folder(model), _paths(data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = RunFolder(folder)
    with run.alone():
        identity = _identity(source, [*texts, Path(validation)], goal, rungs)
        ladder = run.read(identity) or empty_ladder(identity, goal)
        float_model = load(source, device=device)
        batches = _held_out(source, Path(validation), float_model, device)
        judge = SampleJudge(metric, float_model, batches[0::2], batches[1::2])
        size, bits = _float_size(source)
        trials = LanguageTrials(source, goal, Calibration(texts), judge, size, device)
        if not ladder.finished:
            begun = ladder.replace(float_cost=Cost(size, 1.0, 0, 1.0, bits=bits))
            ladder = Search(trials, LanguageStudy(size), rungs, run, begun, show).run()
            ladder = _write_outcome(run, ladder, source, texts)
            show(ladder)
    return Result(ladder, run.path, run.path / f"best{file_of(goal.target, run.path).suffix}", trials.load)


def _paths(data: Text) -> list[Path]:
    """The text files."""
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    if wrong := [one for one in given if not isinstance(one, str | os.PathLike)]:
        kind = type(wrong[0]).__name__
        raise ConfigError(f"data of type {kind}: a language model in a folder is calibrated on text files; give paths")
    return [Path(one) for one in given]


def _held_out(source: Path, text: Path, model: Any, device: str) -> list[dict[str, Any]]:
    """Windows of the text in batches, which two judges share."""
    length = min(_LENGTH, int(getattr(model.config, "max_position_embeddings", None) or _LENGTH))
    tokens = token_stream(text, load_tokenizer(source), limit=length * _WINDOWS)
    found = windows(tokens, length, min(_WINDOWS, max(len(tokens) // length, _FEWEST)))
    size = min(_BATCH, len(found) // 2)
    return [{"input_ids": batch.to(device), "use_cache": False} for batch in found.split(size)]


def _float_size(source: Path) -> tuple[int, float]:
    """The bytes of the float files, and bits of a weight in them."""
    files = ModelFolder(source)
    size = sum(path.stat().st_size for path in set(files.files.values()))
    return bytes_of(source), 8 * size / sum(math.prod(shape) for shape in files.shapes().values())


def _identity(source: Path, texts: Sequence[Path], goal: LadderGoal, rungs: Sequence[Rung]) -> str:
    """A checksum of what the result depends on; files count by name, size and time of change, as they are large."""
    files = [path for place in (source, *texts) for path in ([place] if place.is_file() else sorted(place.rglob("*")))]
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    asked = [goal.target, goal.metric, goal.max_loss, goal.budget, goal.prefer, [rung.name for rung in rungs]]
    return hashlib.sha256(json.dumps([facts, asked]).encode()).hexdigest()


def _write_outcome(run: RunFolder, ladder: Ladder, source: Path, texts: Sequence[Path]) -> Ladder:
    """Put the best candidate at the top of the run; returns the ladder with how to make it again."""
    if ladder.best:
        step = ladder.step(ladder.best)
        file = file_of(ladder.goal.target, run.path / step.folder)
        run.copy_in(file, f"best{file.suffix}")
        recipe = LanguageRecipe.from_dict(step.recipe)
        options = "".join(f", {name}={value!r}" for name, value in recipe.options.items())
        text = ", ".join(f"Path({str(path)!r})" for path in texts)
        ladder = ladder.replace(
            reproduce=f'sparsebit.llm.quantize("{source}", "OUT", recipe_for("{recipe.target}"{options}), '
            f"Calibration([{text}]))"
        )
    run.write(ladder)
    return ladder
