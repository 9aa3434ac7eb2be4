from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebit.deploy.sessions.litert_session import _number, _to_codes, _to_numbers
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError, MissingExtraError
from tests.quantization.tiny import TwoLayers, calibrated, qconfig

ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
INT8 = {"quantization": (0.5, -3), "dtype": np.int8}


def test_floats_become_the_codes_of_the_input_and_back() -> None:
    numbers = np.array([0.0, 0.25, 0.75, -1.0, 900.0, -900.0], dtype=np.float32)
    codes = _to_codes(numbers, INT8)
    assert codes.dtype == np.int8 and codes.tolist() == [-3, -3, -1, -5, 127, -128]
    assert _to_numbers(codes, INT8, "float32").tolist() == [0.0, 0.0, 1.0, -1.0, 65.0, -62.5]


def test_other_types_stay() -> None:
    ids = np.array([1, 2], dtype=np.int64)
    assert _to_codes(ids, {"quantization": (0.0, 0), "dtype": np.int64}) is ids
    assert _to_numbers(ids, {"quantization": (0.0, 0)}, "int64").tolist() == [1, 2]


def test_ports_are_in_the_order_of_their_numbers() -> None:
    assert sorted(["args_10", "args_9", "args_0"], key=_number) == ["args_0", "args_9", "args_10"]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(b"not a model at all")
    with pytest.raises(DeploymentError, match=r"m\.tflite does not load in LiteRT: it is not a \.tflite file"):
        open_session(tmp_path / "m.tflite", "litert")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(MissingExtraError, match="needs the package 'ai-edge-litert'"):
        open_session(b"\0\0\0\0TFL3", "litert")


@pytest.mark.slow
def test_damaged_files(tmp_path: Path) -> None:
    for module in ("litert_torch", "ai_edge_litert"):
        pytest.importorskip(module, reason="writes and runs .tflite files: the extra litert")
    qmodel = calibrated(TwoLayers().eval(), [ROWS], qconfig(backend="litert"))
    qmodel.export(tmp_path / "m.tflite", ROWS, check=[ROWS])
    data = (tmp_path / "m.tflite").read_bytes()
    for damaged in (data[:200], data[: len(data) // 2], data[:8] + b"\xff" * 64 + data[72:]):
        with pytest.raises(DeploymentError, match=r"does not load in LiteRT|is damaged"):
            open_session(damaged, "litert")
