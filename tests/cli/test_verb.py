"""Help at 80 columns."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sparsebit.cli.main import app
from sparsebit.cli.verb import flowing, joined

VERBS = [[name] for name in ("quantize", "export", "profile", "search", "prune", "graph", "check", "audit", "demo")]
VERBS.append(["config", "check"])


def command(verb: list[str]) -> Any:
    found: Any = typer.main.get_command(app)
    for name in verb:
        found = found.commands[name]
    return found


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_reads_well_at_80_columns(verb: list[str]) -> None:
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*verb, "--help"]).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search("<bool>|<int|range>", "".join(lines))
    prose = [line.strip() for line in lines[3 : next(i for i, line in enumerate(lines) if line.startswith("╭"))]]
    for line, following in itertools.pairwise(prose):
        if line and following and not line.endswith("\\"):  # a line ends only where the next word has no place
            assert len(f"{line} {following.split()[0]}") > 78


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_shows_five_common_options_first(verb: list[str]) -> None:
    first = [one for one in command(verb).params if one.opts[0].startswith("-") and one.rich_help_panel is None]
    assert 0 < len(first) <= 5


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_examples_in_the_help_can_be_typed(verb: list[str]) -> None:
    examples = re.findall(r"^sparsebit .*?(?=\n\n|\Z)", command(verb).help, flags=re.M | re.S)
    assert examples
    for example in examples:
        words = shlex.split(example.replace("\\\n", " ").partition(" > ")[0])
        assert words[1 : len(verb) + 1] == verb
        command(verb).make_context("sparsebit", words[len(verb) + 1 :])


def test_commands_are_broken_as_a_shell_reads_them() -> None:
    text = flowing(f"Do this.\n\nsparsebit quantize {'--long-option value ' * 8}")
    assert all(len(line) <= 78 for line in text.splitlines())
    command = text.split("\n\n")[1]
    assert command.replace("\\\n", " ").split() == ["sparsebit", "quantize", *["--long-option", "value"] * 8]
    assert command.count("\\\n") == len(command.splitlines()) - 1


@pytest.mark.parametrize("words", [["2,3,4"], ["2", "3", "4"], ["2,3", "4"]], ids=" ".join)
def test_lists_are_written_with_commas_or_spaces(words: list[str]) -> None:
    assert joined(["--candidate-bits", *words, "-q"], {"--candidate-bits"}) == ["--candidate-bits", "2,3,4", "-q"]
    given = ["search", "-m", "a:b", "-d", "c", "-o", "d.yaml", "--latency", "0.5", "-o", "x.json"]
    answer = CliRunner().invoke(app, [*given, "--candidate-bits", *words])
    assert answer.exit_code == 2 and "2,3,4: " in answer.stderr


@pytest.mark.parametrize(
    ("words", "said", "unsaid"),
    [
        (["quantize", "--bits", "4"], "W.QUANTIZER.BIT is a key of the config", "--input"),
        (["profile", "--bits", "4"], "W.QUANTIZER.BIT is a key of the config", "--quiet"),
        (["quantize", "--backend", "tensorrt"], "--config takes the name of a backend", "Possible"),
        (["quantize", "--wieghts", "f.pt"], "Possible options: --weights", "--quiet"),
        (["llm", "quantize", "--bit", "4"], "Possible options: --bits", "--quiet"),
        (["quantize", "--frobnicate"], "No such option: --frobnicate", "Possible"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_hints_for_options_that_do_not_exist(words: list[str], said: str, unsaid: str) -> None:
    answer = CliRunner(env={"COLUMNS": "300"}).invoke(app, words)
    assert answer.exit_code == 2 and said in answer.stderr and unsaid not in answer.stderr
