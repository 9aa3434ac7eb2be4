"""The steps of a search: a line for each while it runs, and a table at the end."""

from __future__ import annotations

from typing import Any

from sparsebit.cli.outputs.output import Output, table
from sparsebit.records.ladder import Ladder, LadderStep


class ShownSteps:
    """Prints each new step in a line."""

    def __init__(self, out: Output) -> None:
        self.out, self.count = out, 0

    def __call__(self, ladder: Ladder) -> None:
        for step in ladder.steps[self.count :]:
            found = cells(step)
            shares = [f"{found[name]} of the {name}" for name in ("time", "bytes") if found[name]]
            bits = [f"{found['bits']} bits a weight"] if found["bits"] else []
            cost = f", {', '.join([*shares, *bits])}" if shares else f": {step.fault}"
            lost = f", loses {found['loss']}" if found["loss"] else ""
            self.out.remark(f"{step.name}: {step.verdict}{lost}{cost} ({found['took']}; {step.why})")
        if len(ladder.steps) > self.count and not ladder.finished:
            left = max(0.0, ladder.goal.minutes - ladder.seconds / 60)
            self.out.remark(f"  best so far: {ladder.best or 'none'}; {left:.1f} of {ladder.goal.minutes:g} min left")
        self.count = len(ladder.steps)


def ladder_table(ladder: Ladder) -> Any:
    """A row for each step; `*` marks the best. Columns that no step has a value for are left out."""
    rows = [{"": "*" if step.name == ladder.best else "", **cells(step)} for step in ladder.steps]
    names = ["", "step", "result", "loss", "time", "bytes", "bits", "took"]
    shown = [name for name in names if name not in ("time", "bits") or any(row[name] for row in rows)]
    return table(shown, [tuple(row[name] for name in shown) for row in rows], numbers={"time", "bytes", "bits", "took"})


def cells(step: LadderStep) -> dict[str, str]:
    """The cells of a step in the table, by column."""
    judged, cost = step.final or step.selection, step.cost
    loss = "" if judged is None else f"{judged.loss:.2f}" + ("" if judged.bound is None else f" ± {judged.bound:.2f}")
    return {
        "step": step.name,
        "result": step.verdict,
        "loss": loss,
        "time": "" if cost is None or cost.latency is None else f"{cost.latency:.2f}",
        "bytes": "" if cost is None else f"{cost.bytes_ratio:.3f}",
        "bits": "" if cost is None or cost.bits is None else f"{cost.bits:.2f}",
        "took": f"{step.seconds:.0f} s",
    }
