from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.version import __version__
from tests.deploy.exported_files import metadata
from tests.quantization.tiny import calibrated, qconfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False))
        self.conv = nn.Conv1d(8, 4, 3, padding=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.block(self.embed(ids)))
        return F.relu(self.conv(x.transpose(1, 2)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (2, 5))
    qmodel = calibrated(Net(), [ids], qconfig({"W.SPECIFIC": [{"conv": ["QUANTIZER.BIT", 4]}]}))
    path = tmp_path_factory.mktemp("naming") / "m.onnx"
    qmodel.export_onnx(ids, path, extra_info=True)
    return path


def test_nodes_are_named_after_their_layers(file: Path) -> None:
    nodes = {node.name: node.op_type for node in onnx.load(str(file)).graph.node}
    assert len(nodes) == len(onnx.load(str(file)).graph.node)
    wanted = {"embed": "Gather", "block.0": "MatMul", "block.0/bias": "Add", "block.2": "MatMul", "conv": "Conv"}
    assert {name: nodes.get(name) for name in wanted} == wanted
    assert nodes["block.0#2"] == "MatMul"  # the second call
    assert nodes["conv.weight/dq"] == "DequantizeLinear" and nodes["conv.input/q"] == "QuantizeLinear"


def test_nothing_of_the_machine_is_in_the_file(file: Path) -> None:
    for path in (file, file.with_name("m_extra.onnx")):
        content = path.read_bytes()
        for trace in (b"/work", b"site-packages", b".py", b"Traceback", str(Path.home()).encode() + b"/"):
            assert trace not in content, f"{trace!r} in {path.name}"


def test_the_model_says_who_made_it_and_for_what(file: Path) -> None:
    model = onnx.load(str(file))
    assert (model.producer_name, model.producer_version) == ("sparsebit", __version__)
    assert metadata(model) == {"sparsebit.backend": "virtual"}
    assert all(key.startswith("sparsebit.") for node in model.graph.node for key in metadata(node))
    assert not any(node.doc_string for node in model.graph.node)


def test_what_the_config_switched_off_is_noted(tmp_path: Path) -> None:
    """A layer by SPECIFIC, and a module with all its layers by SKIP_TRACE_MODULES."""
    off = [{"conv": ["QUANTIZER.DISABLE", True]}]
    config = qconfig({"W.SPECIFIC": off, "A.SPECIFIC": off, "SKIP_TRACE_MODULES": ["block"]}, backend="onnxruntime")
    ids = torch.randint(0, 9, (2, 5))
    calibrated(Net(), [ids], config).export_onnx(ids, tmp_path / "m.onnx")
    noted = {
        node.name: metadata(node)["sparsebit.switched_off"]
        for node in onnx.load(str(tmp_path / "m.onnx")).graph.node
        if node.op_type in ("Conv", "MatMul", "Gemm") and metadata(node)
    }
    skipped, disabled = "SKIP_TRACE_MODULES keeps it in float", "QUANTIZER.DISABLE is true in the config"
    assert noted.pop("conv") == disabled
    assert set(noted) >= {"block.0", "block.2"} and set(noted.values()) == {skipped}


def test_the_extra_file_has_every_site_and_is_a_model_too(file: Path) -> None:
    extra = file.with_name("m_extra.onnx")
    onnx.checker.check_model(str(extra), full_check=True)
    assert open_session(extra).inputs == ("ids",)
    sites = json.loads(metadata(onnx.load(str(extra)))["sparsebit.sites"])
    assert sites["conv.weight"]["bits"] == 4 and sites["conv.weight"]["stored_as"] == "int4"
    assert sites["block.0.weight"]["bits"] == 8 and sites["block.0.weight"]["quantizer"] == "uniform"
    assert sites["conv.input"]["observer"] == "minmax"
    on_nodes = {metadata(node).get("sparsebit.site") for node in onnx.load(str(extra)).graph.node} - {None}
    assert on_nodes == set(sites)
    assert all(1 <= facts["bits"] <= 32 for facts in sites.values())
