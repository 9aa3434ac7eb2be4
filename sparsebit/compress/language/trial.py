"""Makes a candidate of a language model: quantize, write the runtime's file, measure its size, judge its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsebit.compress.climbing.goal import is_over, verdict_of
from sparsebit.compress.judging.judges import Judge
from sparsebit.compress.language.recipe import LanguageRecipe
from sparsebit.deploy.audit.file_latency import Timed
from sparsebit.llm import Calibration, convert, load, quantize
from sparsebit.llm.converting.targets import TARGETS
from sparsebit.records.ladder import Cost, Judgement, LadderGoal, LadderStep

PACKED = "model"  # the folder that `sparsebit.llm.quantize` writes, in the folder of a candidate


@dataclass(frozen=True)
class LanguageTrials:
    """Candidates of the model in `source`. `float_bytes`: of its files."""

    source: Path
    goal: LadderGoal
    calibration: Calibration
    judge: Judge
    float_bytes: int
    device: str

    def made(self, recipe: LanguageRecipe, step: LadderStep, folder: Path, rejects_above: float | None) -> LadderStep:
        """The step with its results. `rejects_above`: judging may stop once the loss is certainly above this."""
        made = quantize(self.source, folder / PACKED, recipe.recipe, self.calibration, device=self.device)
        assert made.check is not None
        parity = f"{made.check.reader} computes our logits, at most {made.check.difference:.2g} off"
        file = file_of(self.goal.target, folder)
        form = TARGETS[self.goal.target].format
        if form is not None:
            converted = convert(folder / PACKED, file, form)
            if converted.check is not None:
                parity = f"{converted.check.reader} computes our logits, at most {converted.check.difference:.2g} off"
        size = bytes_of(file)
        cost = Cost(size, size / self.float_bytes, 0, 1.0, bits=made.bits_per_weight)
        found = replace(step, cost=cost, parity=parity)
        if is_over(self.goal, cost):
            return replace(found, verdict="over budget")
        judged = self.judge.select(self.load(folder / PACKED), self.goal.max_loss, rejects_above)
        return replace(found, selection=judged, verdict=verdict_of(judged, self.goal.max_loss))

    def concluded(self, step: LadderStep, folder: Path) -> Judgement:
        """The judgement on windows that selection never saw."""
        return self.judge.conclude(self.load(folder / PACKED), self.goal.max_loss)

    def times(self, folders: Mapping[str, Path]) -> dict[str, Timed]:
        """Nothing: the time of a language model depends on its runtime, which is not run here."""
        del folders
        return {}

    def load(self, folder: Path) -> Any:
        """A packed model."""
        return load(folder, device=self.device)


def file_of(target: str, folder: Path) -> Path:
    """Where the runtime's file, or folder, of a candidate is."""
    return folder / {"gguf": f"{PACKED}.gguf", "onnx-genai": "genai", None: PACKED}[TARGETS[target].format]


def bytes_of(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)
