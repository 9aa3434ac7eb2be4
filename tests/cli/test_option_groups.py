from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner

from sparsebit.cli.option_groups import DataOptions, FileOptions, Limits, grouped

Width = Annotated[int, typer.Option("--width", "-w", help="How wide.")]
Loud = Annotated[bool, typer.Option("--loud")]


@dataclass(frozen=True)
class Inner:
    loud: Loud = False


@dataclass(frozen=True)
class Group:
    width: Width = 3
    inner: Inner = Inner()


WIDE = Group(width=5)


def answers(verb: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(verb)
    return CliRunner().invoke(app, list(arguments))


def test_groups_become_options_and_values() -> None:
    seen: list[Any] = []

    @grouped
    def verb(name: Annotated[str, typer.Argument()], group: Group = WIDE, last: int = 1) -> None:
        """Say it."""
        seen.append((name, group, last))

    assert answers(verb, "a").exit_code == 0
    assert answers(verb, "b", "-w", "7", "--loud", "--last", "2").exit_code == 0
    assert seen == [("a", Group(5), 1), ("b", Group(7, Inner(True)), 2)]
    page = answers(verb, "--help").output
    assert "Say it." in page and "How wide." in page and "--loud" in page and "--group" not in page


def test_a_group_without_a_default_has_its_own() -> None:
    seen: list[Group] = []

    @grouped
    def verb(group: Group) -> None:
        seen.append(group)

    assert answers(verb).exit_code == 0 and seen == [Group()]


def test_wrong_values_are_usage_errors() -> None:
    @grouped
    def verb(group: Group = WIDE) -> None:
        raise AssertionError(group)

    assert answers(verb, "--width", "wide").exit_code == 2


def test_what_was_given() -> None:
    assert not Limits() and Limits(min_sqnr=0.0).given() == ["--min-sqnr"]
    assert FileOptions(limits=Limits(exact=True), opset=20).given() == ["--opset", "--exact"]
    assert DataOptions().num_samples == 256
