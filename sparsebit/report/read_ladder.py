"""The folder of `sparsebit compress` as a run of the page: the ladder, and the layers of the best file."""

from __future__ import annotations

import json
from pathlib import Path

from sparsebit.records.files import read_record
from sparsebit.records.ladder import Cost, Judgement, Ladder, LadderGoal, LadderStep
from sparsebit.report.page_data import Card, Run, Step, quantity
from sparsebit.report.read_record import run_of_record

LADDER, RECORD = "ladder.json", "record.json"
_UNITS = {"latency": "ms", "bytes": "bytes", "macs": "multiplications"}


def run_of_folder(folder: Path, ladder: Ladder) -> Run:
    """The run with the record of its best file, if that has been written."""
    run = run_of_ladder(ladder, folder.name)
    if not (folder / RECORD).exists():
        return run
    best = run_of_record(read_record(folder / RECORD), folder.name)
    rest = tuple(card for card in best.cards if card.label in ("In integers", "Quantized layers", "Output SQNR"))
    return run.replace(
        kind=best.kind,
        cards=(*run.cards, *rest),
        layers=best.layers,
        drawing=best.drawing,
        tables=best.tables,
        notes=(*run.notes, *best.notes),
    )


def run_of_ladder(ladder: Ladder, name: str) -> Run:
    """What was tried, and what was chosen, without its layers."""
    best = ladder.step(ladder.best) if ladder.best else None
    cost_name = _cost_name(ladder.goal, ladder.steps)
    limit = ladder.goal.budget.get(cost_name)
    return Run(
        name=name,
        kind=f"search for {ladder.goal.target}",
        cards=tuple(_cards(ladder, best)),
        goal=goal_words(ladder.goal),
        met=ladder.met,
        reason=ladder.reason or ("the search has not finished" if not ladder.finished else ""),
        reproduce=ladder.reproduce,
        steps=tuple(_step(ladder, step) for step in ladder.steps),
        cost_name=cost_name,
        max_loss=ladder.goal.max_loss,
        max_cost=limit if limit is not None and limit <= 1 else None,
        notes=(_time_words(ladder),),
    )


def goal_words(goal: LadderGoal) -> str:
    """The goal in a sentence."""
    parts = [f"at most {goal.max_loss:g} lost of {goal.metric}"] if goal.max_loss is not None else []
    for name, limit in goal.budget.items():
        parts.append(f"{name} at most {limit:g}{' of the float file' if limit <= 1 else ' ' + _UNITS[name]}")
    wanted = "most accurate" if goal.prefer == "loss" else {"latency": "fastest"}.get(goal.prefer, "smallest")
    return f"the {wanted} file for {goal.target} with {' and '.join(parts)}" if parts else f"the {wanted} file"


def _cost_name(goal: LadderGoal, steps: tuple[LadderStep, ...]) -> str:
    """The horizontal axis of the plot: what the search makes small."""
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
        None if cost is None else cost.macs_ratio,
        step.parity,
        step.fault,
        _recipe(step),
        step.name == ladder.best,
        step.name in ladder.pareto,
    )


def _recipe(step: LadderStep) -> dict[str, str]:
    """The recipe as files of text, as the run folder has them for the best one."""
    names = {"config": "best.yaml", "sparsity": "sparsity.yaml", "placement": "placement.json"}
    found = {}
    for key, file in names.items():
        value = step.recipe.get(key)
        if value:
            found[file] = value if isinstance(value, str) else json.dumps(_short(value), indent=1)
    return found


def _short(value: object) -> object:
    """Without the long lists of a measured placement, which the run's own file has."""
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
    unseen = " that the selection never saw" if is_final else ""
    note = f"loses {judged.loss:.2f}{bound} {judged.unit} on {judged.num_samples} samples{unseen}"
    allowed = ladder.goal.max_loss
    is_good = None if allowed is None else judged.loss <= allowed + (judged.bound or 0.0)
    name = judged.metric[:1].upper() + judged.metric[1:]
    return Card(name, f"{judged.score:.2f}", f"{judged.float_score:.2f}", None, is_good, note)


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
    state = "" if ladder.finished else "; it was stopped, and the same call goes on"
    return f"the search took {ladder.seconds / 60:.1f} of {ladder.goal.minutes:g} minutes{state}"
