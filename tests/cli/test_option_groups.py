from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import typer
from typer.testing import CliRunner

from sparsebit import option_fields
from sparsebit.cli.option_groups import DataOptions, FileOptions, Given, Limits, argument, grouped, option, typed

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


@dataclass(frozen=True, kw_only=True)
class Lamp:
    heading: ClassVar = "Light"
    bright: bool = option(False, "Much light.", short="-b")
    colours: str | None = option(None, "Which colours.", "NAME,...", name="--colour")


@dataclass(frozen=True, kw_only=True)
class Draw:
    common: ClassVar = ("output", "bright")
    heading: ClassVar = "Drawing"
    file: str = argument(..., "What to draw.", "FILE")
    lamp: Lamp = Lamp(bright=False)
    margin: int = option(2, "White around it.")
    output: str = option(..., "Where it goes.", "DIR", short="-o")


def test_a_verb_is_one_dataclass() -> None:
    seen: list[Draw] = []

    @grouped
    def draw(asked: Draw) -> None:
        seen.append(asked)

    assert answers(draw, "a", "-o", "b").exit_code == 0
    assert answers(draw, "a", "--output", "b", "-b", "--colour", "red", "--margin", "3").exit_code == 0
    red = Draw(file="a", output="b", margin=3, lamp=Lamp(bright=True, colours="red"))
    assert seen == [Draw(file="a", output="b"), red]
    assert typed(red.lamp) == ["--bright", "--colour"] and typed(red.lamp, ["bright"]) == ["--bright"]
    assert answers(draw, "a").exit_code == 2
    page = answers(draw, "--help").output
    order = [
        page.index(word) for word in ("FILE", "Options ─", "--output", "--bright", "Light ─", "--colour", "Drawing")
    ]
    assert order == sorted(order), page


@dataclass(frozen=True)
class Declared:
    """A class of options that knows nothing of the command line."""

    size: int = option_fields.option(4, "How large.", least=0)
    kind: Literal["a", "b"] = option_fields.option("a", "Which.", choices=("a", "b"))
    limit: float | None = option_fields.option(None, "At most.")
    sorted: bool = option_fields.option(True, "In any order.")
    loud: bool = option_fields.option(False, "Say it loudly.", name="--say-it")
    bits: tuple[int, ...] = option_fields.option((), "Some.", metavar="N,N,...")
    names: tuple[str, ...] = option_fields.option((), "Names.")
    plain: int = 3


def test_declared_fields_become_options_and_the_given_values() -> None:
    seen: list[Given] = []

    @grouped
    def verb(given: Annotated[Given, Declared], more: int = 1) -> None:
        seen.append(given)

    assert answers(verb).exit_code == 0
    words = "--size 0 --kind b --limit 0 --no-sorted --say-it --bits 2,3 --names x,y --more 2"
    assert answers(verb, *words.split()).exit_code == 0
    assert seen == [
        {},
        {"size": 0, "kind": "b", "limit": 0.0, "sorted": False, "loud": True, "bits": (2, 3), "names": ("x", "y")},
    ]
    assert Declared(**seen[1]).plain == 3
    assert answers(verb, "--size", "-1").exit_code == 2
    page = " ".join(answers(verb, "--help").output.split())
    assert "How large. Default: 4." in page and "a|b" in page and "--plain" not in page and "--given" not in page
