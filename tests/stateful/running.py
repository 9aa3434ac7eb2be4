"""Runs of state machines: a fixed number of lives from a seed, and the steps of the first one that fails."""

from __future__ import annotations

import logging
import traceback
import warnings
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.stateful.language import LanguageLife
from tests.stateful.pruned import PrunedLife
from tests.stateful.quantized import QuantizedLife

MACHINES: dict[str, type[RuleBasedStateMachine]] = {
    "quantized": QuantizedLife,
    "pruned": PrunedLife,
    "language": LanguageLife,
}
STEPS = {"quantized": 12, "pruned": 12, "language": 6}


def run_lives(name: str, num_lives: int, seed: int, *, shrinks: bool = False, **attributes: Any) -> None:
    """Raise the error of the first life that fails, with its steps in the notes."""
    machine = type(MACHINES[name].__name__, (MACHINES[name],), attributes)
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    settings = hypothesis.settings(
        max_examples=num_lives,
        stateful_step_count=STEPS[name],
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lives take odd turns: training without data, few samples
        logging.disable(logging.CRITICAL)
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
        finally:
            logging.disable(logging.NOTSET)


def failure_of(name: str, num_lives: int, seed: int, *, shrinks: bool = False) -> str:
    """What failed and the steps to it; empty where all lives went well."""
    try:
        run_lives(name, num_lives, seed, shrinks=shrinks)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}\n  at {where.filename}:{where.lineno}\n{notes}"
    return ""
