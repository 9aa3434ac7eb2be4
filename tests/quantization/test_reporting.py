from __future__ import annotations

import base64
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.quantization import QuantModel

X = torch.randn(8, 4)


def quantized() -> QuantModel:
    return sparsebit.quantize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [X], "onnxruntime")


def data_of(page: str) -> str:
    """What the page shows, which it holds packed."""
    return zlib.decompress(base64.b64decode(page.partition('id="data">')[2].partition("</script>")[0])).decode()


def test_a_page_with_and_without_results(tmp_path: Path) -> None:
    qmodel = quantized()
    plain = qmodel.report(tmp_path / "plain.html").read_text()
    assert "<title>Sequential</title>" in plain and '"name":"2"' in data_of(plain)
    assert "sqnr_db" not in data_of(plain)
    full = qmodel.report(tmp_path / "full.html", qmodel.profile(X), title="mine").read_text()
    assert "<title>mine</title>" in full and '"sqnr_db"' in data_of(full)


def test_a_model_before_calibration(tmp_path: Path) -> None:
    qmodel = QuantModel(nn.Sequential(nn.Linear(4, 4)), "onnxruntime")
    assert qmodel.report(tmp_path / "page.html").exists()


def test_a_wrong_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sparsebit.RecordError, match="has no section in a record"):
        quantized().report(tmp_path / "page.html", "no result")  # type: ignore[arg-type]


def test_in_a_notebook() -> None:
    text = quantized()._repr_html_()
    assert "Size of the weights" in text and "quantized for onnxruntime" in text
