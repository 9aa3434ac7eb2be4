"""The benchmark of fine-tuning runs on a CPU with its small shape."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    pytest.importorskip("peft")
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    yield importlib.import_module("llm_finetune")
    for name in ("llm_finetune", "common", "torchvision_shim"):
        sys.modules.pop(name, None)


def test_every_way_but_that_of_a_gpu(benchmark: ModuleType) -> None:
    options = argparse.Namespace(
        shape="tiny", device="cpu", bits=[4], group_size=128, rows=1, length=16, steps=1, rank=4
    )
    found = {way: benchmark.measure(way, options) for way in ("packed", "lora", "lora_blocks")}
    for way, record in found.items():
        assert record["first_loss"] == pytest.approx(math.log(512), abs=0.5) and record["seconds"] > 0, way
    assert found["packed"]["resident_bytes"] < 0.5 * found["lora"]["resident_bytes"]
    assert sum(found["packed"]["packed_layers"].values()) == 14
