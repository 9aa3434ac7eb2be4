"""Help at 80 columns."""

from __future__ import annotations

import itertools
import re

import pytest
from typer.testing import CliRunner

from sparsebit.cli.main import app
from sparsebit.cli.verb import flowing

VERBS = [["quantize"], ["export"], ["profile"], ["graph"], ["check"], ["audit"], ["config", "check"], ["demo"]]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_reads_well_at_80_columns(verb: list[str]) -> None:
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*verb, "--help"]).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search("<bool>|<int|range>", "".join(lines))
    prose = [line.strip() for line in lines[3 : next(i for i, line in enumerate(lines) if line.startswith("╭"))]]
    for line, following in itertools.pairwise(prose):
        if line and following and not line.endswith("\\"):  # a line ends only where the next word has no place
            assert len(f"{line} {following.split()[0]}") > 78


def test_commands_are_broken_as_a_shell_reads_them() -> None:
    text = flowing(f"Do this.\n\nsparsebit quantize {'--long-option value ' * 8}")
    assert all(len(line) <= 78 for line in text.splitlines())
    command = text.split("\n\n")[1]
    assert command.replace("\\\n", " ").split() == ["sparsebit", "quantize", *["--long-option", "value"] * 8]
    assert command.count("\\\n") == len(command.splitlines()) - 1
