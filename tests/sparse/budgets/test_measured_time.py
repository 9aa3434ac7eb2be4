"""A smaller model is called faster only where the measured time says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsebit.errors import DeploymentError
from sparsebit.sparse.budgets.measured_time import MeasuredTime, measured_time


def test_a_model_that_is_not_faster_is_not_called_faster() -> None:
    slow, fast = MeasuredTime(1.0, 0.98, 0.98), MeasuredTime(1.0, 0.6, 0.6)
    assert not slow.is_faster and "not faster" in str(slow) and "latency" in str(slow)
    assert fast.is_faster and "not faster" not in str(fast)


def test_a_model_that_cannot_be_exported_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")

    def refuse(*_: object) -> bytes:
        raise DeploymentError("no such operator\nmore lines")

    monkeypatch.setattr("sparsebit.sparse.budgets.latency_table.onnx_bytes", refuse)
    found = measured_time(nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2))
    assert found.ratio is None and found.reason == "no such operator" and found.to_dict()["is_faster"] is None
