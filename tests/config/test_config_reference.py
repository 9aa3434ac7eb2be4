"""The generated reference page is in step with the schema, and its examples are sound configs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from sparsebit.config.reading import read
from sparsebit.config.schema import QuantConfig
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


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_are_sound(text: str) -> None:
    assert isinstance(QuantConfig.from_dict(read(text)), QuantConfig)
