"""`reason_for`: the sentences that say why a goal was met or not, and what to do next.

They are shown on the command line, in reports and in `Result.reason`, so they name candidates as the user sees them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sparsebit.compress.climbing.goal import used
from sparsebit.records.ladder import Cost, Ladder, LadderStep

TRAINING = "train.py"
ENDS_AT = 0.95  # of the time, for candidates; the rest is for the final judgement


def reason_for(ladder: Ladder, worst_layers: Sequence[str] = ()) -> str:
    """One or two sentences. `worst_layers`: those that cost the best candidate its accuracy, if it loses too much."""
    if not ladder.best:
        return f"no candidate was made; {_why_none(ladder)}"
    best = ladder.step(ladder.best)
    if ladder.met:
        return f"{best.name} {_loss(best)}{_costs(ladder, best)}"
    layers = f", most of it at {', '.join(worst_layers)}" if worst_layers else ""
    nearest = f"it {_loss(best)}{layers}{_costs(ladder, best)}"
    return f"{_why_not(ladder)}; the nearest is {best.name}: {nearest}. {_next(ladder, best)}"


def _why_none(ladder: Ladder) -> str:
    if faults := [step.fault for step in ladder.steps if step.fault]:
        return f"all {len(ladder.steps)} failed: {faults[-1]}"
    if not ladder.finished:
        return "the search was stopped before the first one; repeat the call to continue"
    if not ladder.steps and ladder.seconds < ENDS_AT * 60 * ladder.goal.minutes:
        return "no rung proposes one for this goal; allow a larger loss or budget, or choose other rungs"
    return "the time ran out before the first one; allow more minutes"


def _loss(step: LadderStep) -> str:
    if step.final is not None:
        return f"{step.final} that selection never saw" if step.final.bound is not None else str(step.final)
    return str(step.selection) if step.selection is not None else "was not judged, because it is over the budget"


def _costs(ladder: Ladder, step: LadderStep) -> str:
    if step.cost is None:
        return ""
    bits = "" if step.cost.bits is None else f", {step.cost.bits:.2f} bits a weight"
    return f"; it takes {cost_words(step.cost)} of the float file{bits}"


def cost_words(cost: Cost) -> str:
    """The shares of the float file's time, bytes and multiplications."""
    parts = [f"{cost.latency:.2f} of the time"] if cost.latency is not None else []
    parts.append(f"{cost.bytes_ratio:.3f} of the bytes")
    if cost.macs_ratio < 1:
        parts.append(f"{cost.macs_ratio:.2f} of the multiplications")
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _why_not(ladder: Ladder) -> str:
    goal, steps = ladder.goal, ladder.steps
    counts = Counter(step.verdict for step in steps)
    parts = []
    if counts["too much loss"]:
        losing = [step.selection for step in steps if step.verdict == "too much loss" and step.selection]
        bound, unit = max(judged.bound or 0.0 for judged in losing), losing[0].unit
        limit = f"{goal.max_loss:g} ± {bound:.2g} {unit}"
        parts.append(f"{counts['too much loss']} of {len(steps)} candidates lose more than {limit}")
    if counts["over budget"]:
        costs = [used(goal, step.cost) for step in steps if step.cost is not None]
        names = sorted({name for shares in costs for name, share in shares.items() if share > 1})
        parts.append(f"{counts['over budget']} of {len(steps)} take more than the budget of {', '.join(names)}")
    if counts["failed"]:
        parts.append(f"{counts['failed']} of {len(steps)} could not be made")
    if counts["within"]:
        parts.append("candidates that kept the loss in the selection lost more on unseen samples")
    return ", ".join(parts) or "the time ran out"


def _next(ladder: Ladder, best: LadderStep) -> str:
    stopped = "" if ladder.finished else "The search was stopped; repeat the call to continue. "
    if best.verdict == "over budget":  # training does not make a file smaller
        return f"{stopped}Next: allow a larger budget"
    is_language_model = ladder.float_cost is not None and ladder.float_cost.bits is not None
    advice = "Next: allow more bits" if is_language_model else f"Next: train it with {TRAINING}"
    return f"{stopped}{advice}"
