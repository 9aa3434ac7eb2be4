"""The benchmark of fine-tuning runs on a CPU with its small shape."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def benchmark(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("peft")
    return benchmark_module("llm_finetune")


def test_every_way_but_that_of_a_gpu(benchmark: ModuleType) -> None:
    options = argparse.Namespace(
        shape="tiny", device="cpu", bits=[4], group_size=128, rows=1, length=16, steps=1, rank=4
    )
    found = {way: benchmark.measure(way, options) for way in ("packed", "lora", "lora_blocks")}
    for way, record in found.items():
        assert record["first_loss"] == pytest.approx(math.log(512), abs=0.5) and record["seconds"] > 0, way
    assert found["packed"]["resident_bytes"] < 0.5 * found["lora"]["resident_bytes"]
    assert sum(found["packed"]["packed_layers"].values()) == 14
