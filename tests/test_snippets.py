"""Python blocks in the README and in the documentation run; the blocks of a page share their names, as in a session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Pages whose training loops are long: what is shortened, and to what. The slow tests run them whole.
SHORTENED = {
    "docs/tutorials/train-at-4-bits.md": [
        ("lr=5e-3), 10)", "lr=5e-3), 2)"),
        ("epochs(qmodel, optimizer, 20)", "epochs(qmodel, optimizer, 2)"),
    ]
}


def pages() -> list[Any]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        pytest.param(page, marks=[pytest.mark.exact_sums] if page.name == "openvino.md" else [])
        for page in found
        if BLOCK.search(page.read_text(encoding="utf-8"))
    ]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch.onnx.export, where a page calls it
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    for long, short in SHORTENED.get(str(page.relative_to(ROOT)), ()):
        assert long in text
        text = text.replace(long, short)
    run(text, page)


@pytest.mark.slow
@pytest.mark.parametrize("page", SHORTENED)
def test_runs_whole(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run((ROOT / page).read_text(encoding="utf-8"), ROOT / page)


def run(text: str, page: Path) -> None:
    names: dict[str, object] = {"__name__": "snippet"}
    for block in BLOCK.finditer(text):
        first_line = text.count("\n", 0, block.start(1))
        # Blank lines in front make a traceback point at the line of the page.
        code = compile("\n" * first_line + block[1], str(page), "exec", dont_inherit=True)  # not this file's __future__
        exec(code, names)
