from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.deploy.sessions.runtime_sessions import open_session
from tests.deploy.exported_files import EXACT, op_types, worst
from tests.quantization.tiny import calibrated, qconfig

IDS = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(0))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


@pytest.mark.filterwarnings("ignore:.*is obeyed, against the onnxruntime profile")
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine", "per-tensor-symmetric"])
def test_rows_are_looked_up_as_integers(scheme: str, tmp_path: Path) -> None:
    qmodel = calibrated(Words(), [IDS], qconfig({"W.QSCHEME": scheme}, backend="onnxruntime"))
    qmodel.export_onnx(IDS, tmp_path / "m.onnx")
    assert worst(qmodel, tmp_path / "m.onnx", IDS) <= EXACT
    graph = onnx.load(str(tmp_path / "m.onnx")).graph
    stored = {tensor.name for tensor in graph.initializer}
    (lookup,) = [node for node in graph.node if node.op_type == "Gather" and node.input[0] == "table.weight/codes"]
    assert lookup.input[0] in stored  # nothing is dequantized in front of it
    assert not [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] == lookup.input[0]]


def test_the_float_twin_has_a_float_table(tmp_path: Path) -> None:
    qmodel = calibrated(Words(), [IDS], qconfig(backend="onnxruntime"))
    qmodel.export_onnx(IDS, tmp_path / "m.onnx")
    twin = float_twin(tmp_path / "m.onnx")
    assert not [
        t.name for t in twin.graph.initializer if t.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    ]
    exact, rounded = (open_session(file) for file in (twin.SerializeToString(), tmp_path / "m.onnx"))
    expected, found = (session.run({"ids": IDS.numpy()})[0] for session in (exact, rounded))
    assert abs(expected - found).max() < 0.05 * abs(expected).max()


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_8_bit_floats_are_dequantized_in_front_of_it(backend: str, tmp_path: Path) -> None:
    """ONNX Runtime's Gather takes none."""
    if backend == "openvino":
        pytest.importorskip("openvino")
    changes = {"W.QUANTIZER.TYPE": "fp8", "A.QUANTIZER": {"DISABLE": True}}
    qmodel = calibrated(Words(), [IDS], qconfig(changes, backend=backend))
    qmodel.export_onnx(IDS, tmp_path / "m.onnx", check=[IDS])
    graph = onnx.load(str(tmp_path / "m.onnx")).graph
    (lookup,) = [node for node in graph.node if node.op_type == "Gather"]
    assert lookup.input[0] == "table.weight/dq"


def test_a_runtime_that_does_not_run_here_gets_the_standard_form(tmp_path: Path) -> None:
    qmodel = calibrated(Words(), [IDS], qconfig(backend="tensorrt"))
    qmodel.export_onnx(IDS, tmp_path / "m.onnx")
    assert op_types(tmp_path / "m.onnx")["Gather"] == 1
    assert worst(qmodel, tmp_path / "m.onnx", IDS) <= EXACT


@pytest.mark.filterwarnings("ignore:W.QSCHEME")
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-tensor-affine"])
def test_tables_of_four_bits_load(scheme: str, tmp_path: Path) -> None:
    """ONNX Runtime has no Gather of 4-bit integers: the table is dequantized in front of it."""
    ids = torch.arange(6).reshape(2, 3)
    changes = {"W.QUANTIZER.BIT": 4, "W.QSCHEME": scheme, "A.QUANTIZER.DISABLE": True}
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4))
    qmodel = calibrated(model, [ids], qconfig(changes, backend="onnxruntime"))
    parity = qmodel.export_onnx(ids, tmp_path / "m.onnx", check=[ids])
    assert parity is not None and parity.worst.max_difference <= 1e-6
