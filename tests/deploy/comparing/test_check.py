from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from sparsebit.deploy.comparing.check import AS_WRITTEN, check_against, check_as_written, runtime_of
from sparsebit.deploy.comparing.float_twin import float_twin
from sparsebit.errors import DeploymentError
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FEEDS = [{"input": X.numpy()}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    path = tmp_path_factory.mktemp("check") / "net.onnx"
    calibrated(model, [X], qconfig(backend="onnxruntime")).export_onnx(X, path)
    return path


@pytest.mark.exact_sums
def test_the_runtime_computes_what_the_file_says(file: Path) -> None:
    found = check_as_written(file, FEEDS)
    assert not found.fault
    assert found.parity.against == AS_WRITTEN and found.parity.worst.top1 == 1.0
    assert found.parity.worst.sqnr_db > 40 and found.parity.worst.noise_db is not None


def test_the_distance_to_the_float_file(file: Path, tmp_path: Path) -> None:
    onnx.save(float_twin(file), str(tmp_path / "float.onnx"))
    found = check_against(file, tmp_path / "float.onnx", FEEDS)
    assert 20 < found.parity.worst.sqnr_db < 60 and not found.fault


def test_a_file_that_the_runtime_reads_otherwise_is_a_fault(file: Path, tmp_path: Path) -> None:
    """ONNX Runtime takes a linear's int32 bias as it is, whatever scale is written beside it."""
    model = onnx.load(str(file))
    scale: Any = next(tensor for tensor in model.graph.initializer if tensor.name == "5.bias/scale")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * numpy.float32(1000), scale.name))
    onnx.save(model, str(tmp_path / "broken.onnx"))
    assert check_as_written(tmp_path / "broken.onnx", FEEDS).fault


def test_files_of_different_models_are_not_compared(file: Path, tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info
    inputs = [info(name, onnx.TensorProto.FLOAT, [1]) for name in "ab"]
    node = onnx.helper.make_node("Add", ["a", "b"], ["c"])
    graph = onnx.helper.make_graph([node], "g", inputs, [info("c", onnx.TensorProto.FLOAT, [1])])
    other = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(other, str(tmp_path / "other.onnx"))
    with pytest.raises(DeploymentError, match="not the same model"):
        check_against(file, tmp_path / "other.onnx", FEEDS)


def test_data_of_the_wrong_shape_is_named(file: Path) -> None:
    with pytest.raises(DeploymentError, match=r"cannot run this data \(input \(8, 3, 4, 4\)"):
        check_as_written(file, [{"input": X.numpy()[:, :, :4, :4]}])


def test_a_file_knows_its_runtime(file: Path) -> None:
    assert runtime_of(file) == "onnxruntime"
