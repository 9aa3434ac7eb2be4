"""A folder with a small model of the user's own in it, and the command line run there."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsebit.cli.main import app
from sparsebit.sparse.budgets.measured_time import MeasuredTime

MODULE = "own_project"
SOURCE = """
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self, classes=10):
            super().__init__()
            torch.manual_seed(0)
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
            self.head = nn.Linear(8, classes)

        def forward(self, x):
            x = self.stem(x)
            return self.head(torch.relu(x + self.body(x)).mean((2, 3)))


    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, query, key):
            return self.left(query) + self.right(key)


    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale=None):
            return self.linear(x if scale is None else x * scale)


    def calls():
        yield {"x": torch.randn(2, 4), "scale": torch.ones(2, 1)}


    net = Net()
    number = 7


    def batches():
        print("chatter of the user's own")
        torch.manual_seed(1)
        for _ in range(6):
            yield torch.randn(4, 3, 8, 8)


    stored = [torch.zeros(4, 3, 8, 8)]


    def masked():
        return [(torch.ones(10, 10), batch) for batch in batches()]


    def broken():
        raise ValueError("no such checkpoint")


    def needy(width):
        return Net()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: it holds `own_project.py`."""
    (tmp_path / f"{MODULE}.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


class Answer:
    """What a command said and how it ended."""

    def __init__(self, result: Any) -> None:
        self.code: int = result.exit_code
        self.out: str = result.stdout
        self.err: str = result.stderr
        self.exception: BaseException | None = result.exception

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Sparsebit = Callable[..., Answer]


@pytest.fixture
def sparsebit() -> Sparsebit:
    """`sparsebit("graph", "--model", ...)`, in this process."""

    def run(*arguments: object) -> Answer:
        return Answer(CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments]))

    return run


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prune` exports and times both models at its end; tests of other things do without."""
    monkeypatch.setattr("sparsebit.cli.verbs.prune.measured_time", lambda *_: MeasuredTime(reason="not of interest"))
