"""Branches of functions: which are taken, and which can be forced."""

from __future__ import annotations

from typing import Any

from sparsebit.sparse.proof.code_forks import FORK, Arm, forked, forks_run


class Base:
    def value(self, x: int) -> int:
        return x


class Private(Base):
    def __init__(self) -> None:
        self.__factor = 3

    def value(self, x: int) -> int:
        if x > 10:
            return x * self.__factor
        return super().value(x) if x else -1


def test_a_forced_branch_is_taken_with_private_names_and_super() -> None:
    found = forked(Private.value)  # type: ignore[arg-type]
    assert found is not None and [fork.text for fork in found.forks] == ["x > 10", "x"]
    with forks_run([found]) as taken:
        assert Private().value(2) == 2
    assert taken == {Arm(found.number, 0, False), Arm(found.number, 1, True)}
    with forks_run([found], [Arm(found.number, 0, True)]):
        assert Private().value(2) == 6
    assert Private().value(2) == 2 and FORK not in Private.value.__globals__


def counted(number: int) -> int:
    steps = 0
    while number > 0:
        number, steps = number - 1, steps + 1
    return steps


def test_a_loop_is_forced_once() -> None:
    found = forked(counted)  # type: ignore[arg-type]
    assert found is not None
    with forks_run([found], [Arm(found.number, 0, True)]):
        assert counted(0) == 1


def made(factor: int) -> Any:
    def inner(x: int) -> int:
        return x * factor if x > 1 else x

    return inner


def test_a_closure_keeps_its_variables() -> None:
    inner = made(5)
    found = forked(inner)
    assert found is not None
    with forks_run([found], [Arm(found.number, 0, True)]):
        assert inner(1) == 5


def test_code_without_a_source_has_no_forks() -> None:
    space: dict[str, Any] = {}
    exec("def f(x):\n    return 1 if x else 2\n", space)
    assert forked(space["f"]) is None
