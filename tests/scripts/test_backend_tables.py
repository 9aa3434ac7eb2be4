"""The tables of the pages are in step with profiles, number types and rules."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from sparsebit.deploy.audit.tensorrt_rules import RULES
from sparsebit.deploy.runtimes import PROFILES
from tests.conftest import ROOT


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("backend_tables")


def test_in_step(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["backend_tables.py", "--check"])
    assert tables.main() == 0, capsys.readouterr().err


def test_types(tables: ModuleType) -> None:
    rows = tables.types().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 1 to 2", "| 3 to 4", "| 5 to 8", "| 9 to 16", "| fp8"]
    assert rows[1] == "| 3 to 4 | `int4`, `uint4` | `int8`, `uint8` | 21 |"


def test_files(tables: ModuleType) -> None:
    rows = tables.files().splitlines()[2:]
    assert len(rows) == len(PROFILES)
    assert "| `onnxruntime` | int32 | -127 to 127 | 21 | onnxruntime |" in rows
    assert "| `tensorrt` | float | -128 to 127 | 20 | onnxruntime, node by node |" in rows


def test_profile_names_every_op_once(tables: ModuleType) -> None:
    rows = tables.one_profile("onnxruntime").splitlines()
    inputs = next(row for row in rows if row.startswith("| inputs quantized |"))
    behind = next(row for row in rows if row.startswith("| inputs quantized only behind"))
    assert "`conv`" in inputs and "`add`" in behind and "`add`" not in inputs


def test_every_rule_is_told(tables: ModuleType) -> None:
    assert set(tables.ASKED) == {rule.name for rule in RULES}
