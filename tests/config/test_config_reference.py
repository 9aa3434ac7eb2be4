"""The generated reference page is in step with the schema, and its examples are sound configs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys

import pytest
from pydantic import Field

from sparsebit.config.reading import read
from sparsebit.config.schema import QuantConfig
from sparsebit.config.section import Section
from sparsebit.registry import OBSERVERS, QUANTIZERS
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reference" / "config.md"
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_in_step() -> None:
    # In an interpreter of its own: other tests register names of their own.
    command = [sys.executable, "-W", "ignore", str(ROOT / "docs" / "generate_config_reference.py"), "--check"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_registered_options_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class MineOptions(Section):
        PART: float = Field(0.5, gt=0, description="How much of the range is kept.")

    class ForWeights:
        TARGETS = ("weight",)

    OBSERVERS.register("mine", options=MineOptions)(object)
    QUANTIZERS.register("coarse", options=MineOptions)(ForWeights)
    monkeypatch.syspath_prepend(str(PAGE.parents[1]))
    page = importlib.import_module("generate_config_reference").render()
    row = "PART` | a number, above 0 | `0.5` | How much of the range is kept. |"
    assert f"| `W.OBSERVER.MINE.{row}" in page and f"| `A.OBSERVER.MINE.{row}" in page
    assert f"| `W.QUANTIZER.COARSE.{row}" in page and "A.QUANTIZER.COARSE" not in page


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_are_sound(text: str) -> None:
    assert isinstance(QuantConfig.from_dict(read(text)), QuantConfig)
