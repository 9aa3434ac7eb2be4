"""The table of the placement benchmark, and the cores that its processes are pinned to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn


@pytest.fixture
def placement(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("placement")


def line(name: str, size: int, default: float, measured: float, ort: float) -> str:
    ratios = {"float": 1.0, "default": default, "measured": measured, "ort": ort}
    return json.dumps({"model": name, "size": size} | {k: {"ratio": v, "cpu_ms": 2.0} for k, v in ratios.items()})


def test_the_table_has_means_by_size_and_names_what_loses(
    placement: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.jsonl"
    lines = [line("a", 96, 1.0, 0.5, 1.0), line("b", 96, 1.0, 1.125, 1.0), line("a", 224, 1.0, 0.25, 0.2)]
    file.write_text("\n".join([*lines, json.dumps({"model": "c", "size": 96, "error": "no such model"})]) + "\n")
    placement.summary(file)
    told = capsys.readouterr().out
    assert "| geometric mean | 96 | | 1.00 | 0.75 | 1.00 |" in told
    assert "slower than float: [('b', 96)]" in told
    assert "behind the peer: [('a', 224, 1.25), ('b', 96, 1.12)]" in told
    assert "('c', 96, 'no such model')" in told


def test_workers_have_cores_of_their_own(placement: ModuleType) -> None:
    assert placement.cores(1) == [min(os.sched_getaffinity(0))]
    with pytest.raises(SystemExit, match="cores"):
        placement.cores(100_000)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch.onnx.export
def test_multiplications_are_counted_by_kind(benchmark_module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(128, 10)).eval()
    torch.onnx.export(model, (torch.randn(1, 3, 8, 8),), tmp_path / "m.onnx", dynamo=True, verbose=False)
    found = sorted(benchmark_module("placement_limits").layer_macs(tmp_path / "m.onnx").values())
    assert found == [("dense", 128 * 10), ("dense", 8 * 36 * 27), ("depthwise", 8 * 16 * 9)]
