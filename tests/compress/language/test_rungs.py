"""The bits that the rungs of language models ask for, from candidates that are made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsebit.compress.climbing.known import Known
from sparsebit.compress.language.recipe import LanguageRecipe, LanguageStudy
from sparsebit.compress.language.rungs import LANGUAGE_RUNGS
from sparsebit.records.ladder import LadderStep
from tests.compress.made import goal, step

STUDY = LanguageStudy(float_bytes=1_000_000, columns=frozenset({128}))
TARGET = "transformers"
RUNGS = {4: "four bits", 8: "eight bits"}


def made(bits: int, num_bytes: int, **more: Any) -> LadderStep:
    """A candidate whose scales take a quarter of a bit."""
    found = step(f"w{bits}", RUNGS[bits], **more)
    assert found.cost is not None
    recipe = LanguageRecipe(TARGET, {"bits": bits, "group_size": 128}).to_dict()
    return replace(found, recipe=recipe, cost=replace(found.cost, num_bytes=num_bytes, bits=bits + 0.25))


def asked(*steps: LadderStep, **wanted: Any) -> float | None:
    known = Known(goal(TARGET, models="language models", **wanted), steps, STUDY, 600.0)
    found = LANGUAGE_RUNGS.get("mixed bits").propose(known)
    if found is None:
        return None
    assert isinstance(found.recipe, LanguageRecipe)
    return float(found.recipe.options["average_bits"])


def test_bytes_are_on_the_line_through_the_candidates() -> None:
    assert asked(made(4, 200_000), made(8, 360_000), budget={"bytes": 280_000}) == pytest.approx(5.99)
    assert asked(made(4, 200_000), made(8, 360_000), budget={"bytes": 0.28}) == pytest.approx(5.99)


def test_one_candidate_or_equal_sizes_show_no_line() -> None:
    assert asked(made(4, 200_000), budget={"bytes": 280_000}) is None
    assert asked(made(4, 360_000), made(8, 360_000), budget={"bytes": 280_000}) is None


def test_bits_of_a_budget_are_those_of_the_codes() -> None:
    assert asked(made(4, 200_000), budget={"bits": 5.0}) == pytest.approx(4.74)


def test_without_a_budget_half_way_between_kept_and_lost() -> None:
    lost = made(4, 200_000, verdict="too much loss")
    assert asked(lost, made(8, 360_000), max_loss=1.0, prefer="bytes") == pytest.approx(6.0)
    assert asked(made(4, 200_000), made(8, 360_000), max_loss=1.0, prefer="bytes") is None  # nothing lost too much
