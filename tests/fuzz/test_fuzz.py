"""Random programs: a fixed number of seeds here, any number with `python -m tests.fuzz`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.choices import Choices
from tests.fuzz.grammar import generate
from tests.fuzz.properties import judge, smallest_like
from tests.parameters import first_fast

NAMES = ["values", "example", "gradients", "copies", "modes", "attributes", "pruned"]


def check(choices: Choices, name: str) -> None:
    program = generate(choices)
    verdict = judge(program, name)
    if verdict.is_fault:
        smallest = smallest_like(program, verdict, tries=60)
        pytest.fail(f"{name}: {verdict.outcome}: {verdict.details}\n{smallest.source()}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", first_fast(range(0, 60, 8)))
def test_program_of_a_seed(start: int, name: str) -> None:
    for seed in range(start, start + 8):
        check(Choices.from_seed(seed), name)


# Statements are left out of a failing program faster than hypothesis shrinks it.
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_program_of_hypothesis(data: st.DataObject, name: str) -> None:
    check(Choices.from_hypothesis(data), name)
