"""ONNX Runtime prints nothing when it opens and runs a file of ours with its default settings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.deploy.exporting.to_onnx import to_onnx
from sparsebit.deploy.onnx_graph.model_file import write
from sparsebit.quantization import QuantModel
from tests.quantization.tiny import Block, Residual, calibrated, qconfig

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))


class Padded(nn.Module):
    """Zero padding of its own in front of convolutions of odd widths, as EfficientNet-Lite has it; then a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 18, 3, 2), nn.Conv2d(18, 18, 3, groups=18)
        self.grouped, self.fc = nn.Conv2d(18, 27, 1, groups=9), nn.Linear(27, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem(F.pad(x, (0, 1, 0, 1))))
        x = F.relu6(self.depthwise(F.pad(x, (1, 1, 1, 1))))
        x = F.hardswish(self.grouped(x))
        return self.fc((x * F.hardsigmoid(x.mean((2, 3), keepdim=True))).mean((2, 3)))


class Upsampled(nn.Module):
    """Sizes that are read of tensors become constants that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.interpolate(self.up(F.max_pool2d(x, 2)), size=x.shape[-2:])
        return self.last(F.pad(torch.cat([x, y], 1), (1, 1, 1, 1)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.table(ids).relu())


NETS: dict[str, tuple[type[nn.Module], Tensor]] = {
    "residual": (Residual, IMAGES),
    "block": (Block, IMAGES),
    "padded": (Padded, IMAGES),
    "upsampled": (Upsampled, IMAGES),
    "words": (Words, IDS),
}


def printed(file: Path, x: Tensor, capfd: pytest.CaptureFixture[str]) -> str:
    """What a default session prints while it is made and run."""
    capfd.readouterr()
    session: Any = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return capfd.readouterr().err


PAIRS = [("padded", backend) for backend in ("virtual", "onnxruntime", "openvino", "tensorrt")]
PAIRS += [("residual", "tensorrt"), ("block", "onnxruntime"), ("upsampled", "virtual"), ("words", "onnxruntime")]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("net", "backend"), PAIRS)
def test_files_of_all_backends(net: str, backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, x = NETS[net]
    qmodel: QuantModel = calibrated(make().eval(), [x], qconfig(backend=backend))
    qmodel.export_onnx(x, tmp_path / "m.onnx", opset_version=17 if net == "residual" else None)
    assert printed(tmp_path / "m.onnx", x, capfd) == ""


def test_float_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Upsampled().eval()
    write(to_onnx(model, (IMAGES,), {}, signature=inspect.signature(model.forward)), tmp_path / "m.onnx")
    assert printed(tmp_path / "m.onnx", IMAGES, capfd) == ""


def test_unused_initializers_of_subgraphs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kind = ir.TensorType(ir.DataType.FLOAT)
    x, y = (ir.Value(name=name, shape=ir.Shape((2,)), type=kind) for name in "xy")
    flag = ir.Value(
        name="flag", const_value=ir.tensor(np.array(True), name="flag"), type=ir.TensorType(ir.DataType.BOOL)
    )

    def branch(name: str) -> ir.Graph:
        node = ir.node("Neg", [x], name=name)
        node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = name, ir.Shape((2,)), kind
        unused = ir.Value(name=f"{name}/unused", const_value=ir.tensor(np.ones(3, np.float32), name=f"{name}/unused"))
        return ir.Graph([], node.outputs, nodes=[node], initializers=[unused], name=name)

    node = ir.node("If", [flag], {"then_branch": branch("a"), "else_branch": branch("b")}, outputs=[y], name="if")
    graph = ir.Graph([x], [y], nodes=[node], initializers=[flag], opset_imports={"": 21}, name="g")
    write(ir.Model(graph, ir_version=10), tmp_path / "m.onnx")
    assert printed(tmp_path / "m.onnx", torch.ones(2), capfd) == ""
