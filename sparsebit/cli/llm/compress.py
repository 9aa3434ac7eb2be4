"""`sparsebit llm compress`: search for the smallest packed model that keeps the perplexity, or the best in a budget."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from sparsebit.cli.option_groups import Given, SpeakingOptions, argument, grouped, option
from sparsebit.cli.options import Names, read_limits, read_names
from sparsebit.cli.outputs.output import facts_table, kilobytes, speaking
from sparsebit.llm.recipe import Calibration

if TYPE_CHECKING:
    from sparsebit.compress import Result


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """The model, its texts, and what is asked of the result."""

    heading: ClassVar = "Goal"

    model: str = argument(..., "A model folder: config.json, safetensors, tokenizer.", "DIR", show_default=False)
    output: Path = option(..., "The folder of the run: the best model, records, all candidates.", "DIR", short="-o")
    text: list[Path] = option(..., "Calibration text; repeat it to mix several kinds.", "FILE|DIR")
    heldout: Path = option(..., "Other text, by which candidates are judged.", "FILE|DIR")
    target: str = option("transformers", "What reads the result.", "llama.cpp|vllm|transformers|genai", name="--for")
    metric: str = option("perplexity", "perplexity, or kl: the divergence from the float model.", "NAME")
    max_loss: float | None = option(
        None, "The loss that is allowed: % of perplexity, or hundredths of a nat (default: 1, if no --budget).", min=0
    )
    budget: list[str] | None = option(
        None, "bytes or bits: bytes=0.3 (a share of float), bits=4.5 with scales; may be repeated.", "NAME=LIMIT"
    )
    prefer: str | None = option(None, "What is made small if there is no --budget (bytes).", "bytes|bits")
    minutes: float = option(60.0, "How long to search.", "M", min=0.01)
    rungs: Names | None = option(None, "Only these rungs of the ladder.", "NAME,...", parser=read_names)


@grouped
def compress(goal: GoalOptions, drawn: Annotated[Given, Calibration], say: SpeakingOptions) -> None:
    """Find the smallest packed model that keeps the perplexity, or the best one in a budget.

    Tries 8 bits, 4 bits by GPTQ, other scales and groups, learned rounding, mixed bits and fewer bits, within the
    minutes. The same command with the same folder continues a run that was stopped.

    sparsebit llm compress llama/ --text books.txt --heldout other.txt --max-loss 1 -o run/

    sparsebit llm compress llama/ --text books.txt --heldout other.txt --budget bits=3.5 --for genai -o small/
    """
    budget = read_limits(goal.budget or [])
    with speaking(as_json=say.json, quiet=say.quiet) as out:
        from sparsebit import compress as search
        from sparsebit.cli.outputs.ladders import ShownSteps, ladder_table
        from sparsebit.records.json_form import to_plain
        from sparsebit.records.ladder import Ladder

        out.remark(f"compressing {goal.model} for {goal.target}, at most {goal.minutes:g} min")
        found = search(
            goal.model,
            Calibration(goal.text, **drawn),
            goal.target,
            folder=goal.output,
            metric=goal.metric,
            validation=goal.heldout,
            max_loss=goal.max_loss,
            budget=budget,
            prefer=goal.prefer,  # type: ignore[arg-type]  # checked by the search
            minutes=goal.minutes,
            rungs=goal.rungs,
            show=ShownSteps(out),
        )
        plain: dict[str, Any] = to_plain(found.ladder, Ladder)
        record = {"folder": str(goal.output), "file": found.file and str(found.file), **plain}
        out.result(record, ladder_table(found.ladder), details=[facts_table(_facts(found))])
        if found.ladder.best:
            out.next_steps(
                found.ladder.reproduce, f"sparsebit report {shlex.quote(str(goal.output))}   # a page about the run"
            )


def _facts(found: Result) -> dict[str, str]:
    if not found.ladder.best:
        return {"goal": f"not met: {found.reason}"}
    step, before = found.ladder.step(found.ladder.best), found.ladder.float_cost
    assert step.cost is not None and before is not None
    return {
        "goal": "met" if found.met else "not met",
        "best": found.reason,
        "selection": str(step.selection or ""),
        "written": f"{found.file}, {kilobytes(step.cost.num_bytes)} of {kilobytes(before.num_bytes)}",
        "check": step.parity,
    }
