from __future__ import annotations

import warnings

import torch

from tests.fuzz.choices import Choices
from tests.fuzz.grammar import FEATURES, generate
from tests.fuzz.program import Compiled, Program

SEEDS = range(300)


def programs() -> list[Program]:
    return [generate(Choices.from_seed(seed)) for seed in SEEDS]


def test_same_seed_gives_the_same_program() -> None:
    first, second = programs(), programs()
    assert [p.source() for p in first] == [p.source() for p in second]
    assert len({p.source() for p in first}) == len(first)


def test_every_feature_is_written() -> None:
    written = set().union(*(p.features for p in programs()))
    assert set(FEATURES) - written == set()


def test_feature_that_is_left_out_is_not_written() -> None:
    left_out = {"linear", "method", "block"}
    written = set().union(*(generate(Choices.from_seed(seed), without=left_out).features for seed in SEEDS))
    assert not written & left_out


def runs(program: Program) -> bool:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # those of torch about old parametrizations
            compiled = Compiled(program)
            args, kwargs = compiled.inputs(0)
            compiled.make()(*args, **kwargs)
    except Exception:
        return False
    return True


def test_nearly_all_programs_run() -> None:
    assert sum(map(runs, programs())) >= 0.97 * len(SEEDS)


def test_models_of_a_program_are_equal() -> None:
    compiled = Compiled(generate(Choices.from_seed(1)))
    one, two = compiled.make().state_dict(), compiled.make().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
