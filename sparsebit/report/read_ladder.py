"""The folder of `sparsebit compress` as a run of the page: the goal, the ladder, and the layers of the best file.

`run_of_folder` reads the folder; `run_of_ladder` needs the ladder alone, so a running search can be shown too. The
layers come from the best candidate's own record (a network) or packed folder (a language model), through the readers
of those. A ladder's shares are relative to the float file; a budget above 1 is an amount and is converted for the plot.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sparsebit.records.files import read_record
from sparsebit.records.ladder import Cost, Judgement, Ladder, LadderGoal, LadderStep
from sparsebit.report.page_data import Card, Run, Step, quantity
from sparsebit.report.read_language_model import is_packed, run_of_language_model
from sparsebit.report.read_record import run_of_record

_PERCENT = ("top-1 accuracy", "same top-1 as float", "cosine to the float outputs")
_FURTHER_CARDS = ("In integers", "Quantized layers", "Output SQNR", "Bits of a weight")
LADDER, RECORD = "ladder.json", "record.json"
_UNITS = {"latency": " ms", "bytes": " bytes", "macs": " multiplications", "bits": " a weight"}
_PACKED = "model"  # the folder of a candidate's packed language model, in the candidate's own folder


def run_of_folder(folder: Path, ladder: Ladder) -> Run:
    """The run with the record of its best file, if that has been written."""
    run = run_of_ladder(ladder, folder.resolve().name)
    run = run.replace(reproduce=run.reproduce.replace(str(folder.resolve()), run.name))  # the page may be mailed
    best = _best(folder, ladder)
    if best is None:
        return run
    shown = {card.label for card in run.cards}
    rest = tuple(card for card in best.cards if card.label in _FURTHER_CARDS and card.label not in shown)
    return run.replace(
        kind=best.kind,
        cards=(*run.cards, *rest),
        layers=best.layers,
        drawing=best.drawing,
        tables=best.tables,
        notes=(*run.notes, *best.notes),
    )


def _best(folder: Path, ladder: Ladder) -> Run | None:
    """The run of the best candidate alone."""
    if (folder / RECORD).exists():
        return run_of_record(read_record(folder / RECORD), folder.resolve().name)
    packed = folder / ladder.step(ladder.best).folder / _PACKED if ladder.best else folder
    return run_of_language_model(packed) if is_packed(packed) else None


def run_of_ladder(ladder: Ladder, name: str) -> Run:
    """The run without layers: all steps and the choice."""
    best = ladder.step(ladder.best) if ladder.best else None
    cost_name = _cost_name(ladder.goal, ladder.steps)
    limit = ladder.goal.budget.get(cost_name)
    return Run(
        name=name,
        kind=f"search for {ladder.goal.target}",
        cards=tuple(_cards(ladder, best)),
        goal=goal_words(ladder.goal, _unit(ladder)),
        met=ladder.met if ladder.met or ladder.finished else None,
        reason=ladder.reason or ("the search has not finished" if not ladder.finished else ""),
        reproduce=ladder.reproduce,
        steps=tuple(_step(ladder, step) for step in ladder.steps),
        cost_name=cost_name,
        max_loss=ladder.goal.max_loss,
        max_cost=_limit_of_plot(ladder, cost_name, limit),
        notes=(_time_words(ladder),),
    )


def _limit_of_plot(ladder: Ladder, name: str, limit: float | None) -> float | None:
    """The budget on the axis of the plot: a share of the float file's amount, or bits."""
    plain = ladder.float_cost
    if limit is None or limit <= 1 or name == "bits":
        return limit
    whole = (
        None if plain is None else {"latency": plain.milliseconds, "bytes": plain.num_bytes, "macs": plain.macs}[name]
    )
    return limit / whole if whole else None


def _unit(ladder: Ladder) -> str:
    """The metric's unit, which only judgements have."""
    return next((judged.unit for step in ladder.steps if (judged := step.final or step.selection) is not None), "")


def goal_words(goal: LadderGoal, unit: str = "") -> str:
    """The goal in a sentence. `unit`: of the metric."""
    amount = unit if goal.metric in unit else f"{unit} of {goal.metric}".lstrip()
    parts = [f"at most {goal.max_loss:g} {amount} lost"] if goal.max_loss is not None else []
    for name, limit in goal.budget.items():
        parts.append(f"{name} at most {_amount(name, limit)}")
    wanted = "most accurate" if goal.prefer == "loss" else {"latency": "fastest"}.get(goal.prefer, "smallest")
    return f"the {wanted} file for {goal.target} with {' and '.join(parts)}" if parts else f"the {wanted} file"


def _amount(name: str, limit: float) -> str:
    if limit <= 1:
        return f"{100 * limit:g} % of the float file's"
    return quantity(limit) if name == "bytes" else f"{limit:g}{_UNITS[name]}"


def _cost_name(goal: LadderGoal, steps: tuple[LadderStep, ...]) -> str:
    """The horizontal axis of the plot: the cost that the search makes small."""
    name = goal.prefer if goal.prefer != "loss" else next(iter(goal.budget), "bytes")
    is_timed = any(step.cost is not None and step.cost.latency is not None for step in steps)
    return "bytes" if name == "latency" and not is_timed else name


def _step(ladder: Ladder, step: LadderStep) -> Step:
    judged, cost = step.final or step.selection, step.cost
    return Step(
        step.name,
        step.rung,
        step.why,
        step.verdict,
        step.seconds,
        None if judged is None else judged.loss,
        None if judged is None else judged.bound,
        "" if judged is None else judged.unit,
        None if judged is None else judged.num_samples,
        None if cost is None else cost.latency,
        None if cost is None else cost.bytes_ratio,
        None if cost is None or not _counts_macs(ladder) else cost.macs_ratio,
        None if cost is None else cost.bits,
        step.parity,
        step.fault,
        _recipe(step),
        step.name == ladder.best,
        step.name in ladder.pareto,
    )


def _counts_macs(ladder: Ladder) -> bool:
    """Whether multiplications are part of the goal, or any candidate has fewer."""
    goal = ladder.goal
    asked = "macs" in goal.budget or goal.prefer == "macs"
    return asked or any(step.cost is not None and step.cost.macs_ratio < 1 for step in ladder.steps)


def _recipe(step: LadderStep) -> dict[str, str]:
    """The recipe as files of text, as the run folder has them for the best one."""
    names = {"config": "best.yaml", "sparsity": "sparsity.yaml", "placement": "placement.json"}
    found = {}
    for key, file in names.items():
        value = step.recipe.get(key)
        if value:
            found[file] = value if isinstance(value, str) else json.dumps(_short(value), indent=1)
    if "target" in step.recipe:
        found["recipe"] = _call_words(step.recipe)
    return found


def _call_words(recipe: dict[str, Any]) -> str:
    """The call that makes a language model's recipe."""
    options = recipe.get("options") or {}
    given = [repr(recipe["target"]), *(f"{name}={_python(value)}" for name, value in options.items())]
    return f"sparsebit.llm.recipe_for({', '.join(given)})"


def _python(value: object) -> str:
    return repr(tuple(value) if isinstance(value, list) else value)


def _short(value: object) -> object:
    """The value with long lists cut: those of a measured placement are complete in the run's own file."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list) and len(value) > 12:
        return [*map(_short, value[:12]), f"and {len(value) - 12} more"]
    return value


def _cards(ladder: Ladder, best: LadderStep | None) -> list[Card]:
    judged = None if best is None else best.final or best.selection
    cards = []
    if judged is not None:
        cards.append(_accuracy_card(judged, ladder, is_final=best is not None and best.final is not None))
    if best is not None and best.cost is not None:
        cards += _cost_cards(best.cost, ladder)
    return cards


def _accuracy_card(judged: Judgement, ladder: Ladder, *, is_final: bool) -> Card:
    bound = "" if judged.bound is None else f" ± {judged.bound:.2g}"
    unseen = " that had no influence on the choice" if is_final else ""
    change = "better" if judged.loss < 0 else "lost"
    note = f"{abs(judged.loss):.2f}{bound} {judged.unit} {change}, on {judged.num_samples} samples{unseen}"
    allowed = ladder.goal.max_loss
    # The final judgement uses new, fewer samples, so the search accepts a loss within its bound; so does the page.
    is_good = None if allowed is None else judged.loss <= allowed + (judged.bound or 0.0 if is_final else 0.0)
    return Card(*_score_words(judged), None, is_good, note)


def _score_words(judged: Judgement) -> tuple[str, str, str]:
    """The name, the score and the float model's score, in the unit that readers know."""
    name, scores = judged.metric[:1].upper() + judged.metric[1:], (judged.score, judged.float_score)
    if judged.metric == "perplexity":  # the scores are log-likelihoods in hundredths of a nat
        return name, f"{math.exp(-scores[0] / 100):.2f}", f"{math.exp(-scores[1] / 100):.2f}"
    if judged.unit == "hundredths of a nat":
        return name, f"{-scores[0] / 100:.4f} nats", ""
    unit = " %" if judged.metric in _PERCENT else ""
    return name, f"{judged.score:.2f}{unit}", f"{judged.float_score:.2f}{unit}"


def _cost_cards(cost: Cost, ladder: Ladder) -> list[Card]:
    plain, budget = ladder.float_cost, ladder.goal.budget
    cards = []
    if cost.milliseconds is not None:
        before = "" if plain is None or plain.milliseconds is None else f"{plain.milliseconds:.3g} ms"
        good = _keeps(budget.get("latency"), cost.latency, cost.milliseconds)
        note = "one sample, one thread"
        cards.append(Card("Time of a call", f"{cost.milliseconds:.3g} ms", before, cost.latency, good, note))
    before = "" if plain is None else quantity(plain.num_bytes)
    good = _keeps(budget.get("bytes"), cost.bytes_ratio, cost.num_bytes)
    cards.append(Card("Size of the file", quantity(cost.num_bytes), before, cost.bytes_ratio, good))
    if cost.bits is not None:
        before = "" if plain is None or plain.bits is None else f"{plain.bits:.3g}"
        good = _keeps(budget.get("bits"), None, cost.bits)
        cards.append(Card("Bits of a weight", f"{cost.bits:.2f}", before, None, good, "with scales"))
    if cost.macs_ratio < 1 or "macs" in budget:
        before = "" if plain is None else quantity(plain.macs, ("", "k", "M", "G"))
        good = _keeps(budget.get("macs"), cost.macs_ratio, cost.macs)
        units = ("", "k", "M", "G")
        cards.append(Card("Multiplications", quantity(cost.macs, units), before, cost.macs_ratio, good))
    return cards


def _keeps(limit: float | None, share: float | None, absolute: float) -> bool | None:
    """Whether a cost is within its budget; None without one."""
    if limit is None:
        return None
    return absolute <= limit if limit > 1 else share is not None and share <= limit


def _time_words(ladder: Ladder) -> str:
    state = "" if ladder.finished else "; it was stopped, and the same call continues it"
    return f"the search took {ladder.seconds / 60:.1f} of {ladder.goal.minutes:g} minutes{state}"
