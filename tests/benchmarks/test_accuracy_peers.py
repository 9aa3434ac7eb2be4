"""The comparison with other tools, as far as it needs none of them: what is run, what is told, and our own rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def peers(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("accuracy_peers")


def classifier(peers: ModuleType) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    images, labels = torch.rand(64, 3, 8, 8), torch.arange(64) % 4

    def evaluate(m: nn.Module) -> tuple[float, torch.Tensor]:
        with torch.no_grad():
            outputs = m(images)
        return peers.top1(outputs, labels), outputs

    return peers.Task("tiny", "top1", model, list(torch.rand(4, 16, 3, 8, 8)), evaluate, labels)


def test_every_case_names_known_tools_and_starts_with_ours(peers: ModuleType) -> None:
    for case, tools in peers.COMPARED.values():
        assert case.task in peers.TASKS
        assert set(tools) <= set(peers.TOOLS) and tools[0].startswith("sparsebit")


@pytest.mark.parametrize("tool", ["sparsebit", "sparsebit-fast", "sparsebit-good", "sparsebit-equalize"])
def test_own_rows(peers: ModuleType, tool: str) -> None:
    task = classifier(peers)
    quantized = peers.TOOLS[tool].quantize(task, peers.Case("tiny", 4, 8))
    record = peers.compare(task, task.evaluate(task.model), task.evaluate(quantized))
    assert record["sqnr_db"] > 10 and record["agreement"] > 50
    assert record["loss"] == pytest.approx(record["float"] - record["quantized"], abs=1e-3)


def test_embeddings_have_a_cosine(peers: ModuleType) -> None:
    task = peers.Task("tiny", "spearman", nn.Identity(), [], lambda model: (0.0, None))
    one, other = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    record = peers.compare(task, (0.8, one), (0.7, other))
    assert (record["cosine"], record["cosine_min"], record["loss"]) == (0.85355, 0.70711, 0.1)


def test_texts_are_given_one_by_one_without_padding(peers: ModuleType) -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    samples = sys.modules["accuracy_tools"]._samples(batch)
    assert [sample["input_ids"].tolist() for sample in samples] == [[[5, 6]], [[7, 8, 9]]]
    assert [len(sample) for sample in sys.modules["accuracy_tools"]._samples(torch.rand(3, 2))] == [1, 1, 1]


def test_each_package_has_its_own_folder(peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nncf").mkdir()
    monkeypatch.setenv("SPARSEBIT_PEERS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "here")
    assert peers.environment("nncf")["PYTHONPATH"] == f"here{os.pathsep}{tmp_path / 'nncf'}"
    assert peers.environment("brevitas")["PYTHONPATH"] == "here"


def test_tool_that_fails_has_a_row_with_the_reason(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "__file__", "/does/not/exist.py")
    row = peers.in_own_process("resnet20-W4A8", "nncf", "float.pt")
    assert row["tool"] == "nncf" and "/does/not/exist.py" in row["failed"]
