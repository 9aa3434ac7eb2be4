from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import DeploymentError
from tests.deploy.exported_files import EXACT, differences
from tests.quantization.tiny import Residual, calibrated, qconfig

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """What a transformer has: a table, norms, products of activations, factors, moves, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = ((q * 0.25) @ k.transpose(1, 2)).softmax(-1)
        return x + self.out(F.gelu(scores @ v))


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.slope = nn.Conv2d(3, 8, 3), nn.PReLU(8)

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 - self.slope(self.first(x))[:, ::2]


def exported(model: nn.Module, data: Tensor, tmp_path: Path, bits: int = 8) -> tuple[object, onnx.ModelProto]:
    config = qconfig({"A.QUANTIZER.BIT": bits}, backend="qnn")
    qmodel = calibrated(model.eval(), [data], config)
    qmodel.export_onnx(data, tmp_path / "m.onnx")
    return qmodel, onnx.load(tmp_path / "m.onnx")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("model", [Block, Residual, Slopes])
def test_every_op_is_between_integers(model: type[nn.Module], bits: int, tmp_path: Path) -> None:
    data = IDS if model is Block else IMAGES
    _, file = exported(model(), data, tmp_path, bits)
    makers = {name: node.op_type for node in file.graph.node for name in node.output}
    kinds = {value.name: value.data_type for value in file.graph.initializer}
    nodes = [node for node in file.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    for node in nodes:
        read = {makers.get(name) for name in node.input if name and name not in kinds and name not in ("x", "ids")}
        if node.op_type == "Relu" or "MatMul" in read:
            continue  # with the layer before it
        assert read <= {"DequantizeLinear"}, f"{node.op_type} reads {read}"
        given = (
            node.input[:2] if node.op_type in ("Conv", "Gemm") else node.input
        )  # the runtime stores the layer's bias
        floats = [name for name in given if kinds.get(name) == onnx.TensorProto.FLOAT]
        assert not floats, f"{node.op_type} reads the floats {floats}"
    assert {node.op_type for node in nodes} >= ({"Gather", "LayerNormalization"} if model is Block else {"Conv"})


@pytest.mark.parametrize("model", [Block, Residual])
def test_the_file_as_written_computes_the_simulation(model: type[nn.Module], tmp_path: Path) -> None:
    data = IDS if model is Block else IMAGES
    qmodel, _ = exported(model(), data, tmp_path)
    # The factors of a norm are rounded to 8 bits in the file; in this one they are all 1.
    assert max(differences(qmodel, tmp_path / "m.onnx", data).values()) <= EXACT  # type: ignore[arg-type]


def test_a_table_is_stored_once_on_the_grid_of_its_result(tmp_path: Path) -> None:
    _, file = exported(Block(), IDS, tmp_path)
    tables = [value for value in file.graph.initializer if list(value.dims) == [50, 16]]
    assert [onnx.helper.tensor_dtype_to_string(value.data_type) for value in tables] == ["TensorProto.UINT8"]


def test_factors_of_norms_are_rounded_to_their_range(tmp_path: Path) -> None:
    model = Block()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(-0.5, 2.0, 16))
        model.norm.bias.copy_(torch.linspace(-1.0, 1.0, 16))
    _, file = exported(model, IDS, tmp_path)
    numbers = {value.name: onnx.numpy_helper.to_array(value) for value in file.graph.initializer}
    for end, expected, step in (
        ("weight/uint8", model.norm.weight, 2.5 / 255),
        ("bias/int32", model.norm.bias, 2**-29),
    ):
        (name,) = (name for name in numbers if name.endswith(f"{end}/codes"))
        base = name.removesuffix("codes")
        found = (numbers[name].astype("float64") - numbers[f"{base}zero_point"]) * numbers[f"{base}scale"]
        assert abs(found - expected.detach().double().numpy()).max() <= step * 0.51


def test_open_sizes_are_refused(tmp_path: Path) -> None:
    qmodel = calibrated(Residual().eval(), [IMAGES], qconfig(backend="qnn"))
    with pytest.raises(DeploymentError, match=r"dynamic_axes of x: files for qnn have fixed sizes"):
        qmodel.export_onnx(IMAGES, tmp_path / "m.onnx", dynamic_axes={"x": {0: "batch"}})
    assert not list(tmp_path.iterdir())
