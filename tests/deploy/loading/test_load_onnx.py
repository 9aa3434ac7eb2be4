"""Float ONNX files, loaded: names, parameters, parity with ONNX Runtime, and what comes after."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import sparsebit
from sparsebit.deploy.loading.compare import difference
from sparsebit.deploy.loading.load_onnx import load_onnx
from sparsebit.errors import DeploymentError
from sparsebit.sparse import SparseModel
from tests.parameters import first_fast

DYNAMIC = {0: "batch"}


class Residual(nn.Module):
    """Strided and depthwise convolutions with norms, a residual add, gating, a transposed convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.gate = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + F.hardswish(self.depthwise(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        x = self.up(F.max_pool2d(x, 2))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """An embedding with positions and a block of a transformer, whose reshapes read the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.position = nn.Parameter(torch.randn(1, 6, 16))
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
        return x + F.gelu(self.out((weights @ v).transpose(1, 2).reshape(n, length, width)))


def exported(net: nn.Module, x: Tensor, file: Path, opset: int, *, dynamo: bool = True) -> Path:
    """The float file of torch's exporter, with a dynamic batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            torch.onnx.export(
                net.eval(), (x,), file, dynamo=True, opset_version=opset, dynamic_shapes=(DYNAMIC,), verbose=False
            )
        else:
            torch.onnx.export(
                net.eval(),
                (x,),
                file,
                dynamo=False,
                opset_version=opset,
                input_names=["x"],
                dynamic_axes={"x": DYNAMIC},
            )
    return file


def trained(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return net.eval()


def case(kind: str) -> tuple[nn.Module, Tensor]:
    return (trained(Residual()), torch.randn(2, 3, 16, 16)) if kind == "conv" else (
        Attention().eval(), torch.randint(0, 11, (2, 6))
    )  # fmt: skip


WAYS = [(18, True), (13, False), (11, False), (17, False), (21, True), (20, True)]


@pytest.mark.parametrize("kind", ["conv", "attention"])
@pytest.mark.parametrize(("opset", "dynamo"), first_fast(WAYS, 2))
def test_files_of_torch_have_their_names_and_another_batch_size(
    kind: str, opset: int, dynamo: bool, tmp_path: Path
) -> None:
    net, x = case(kind)
    file = exported(net, x, tmp_path / "net.onnx", opset, dynamo=dynamo)
    assert onnx.load(file).opset_import[0].version == opset
    model = load_onnx(file, [x])
    more = torch.cat([x, x.flip(0), x])
    with torch.no_grad():
        torch.testing.assert_close(model(more), net(more), rtol=1e-4, atol=1e-5)
    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.LayerNorm, nn.Embedding)
    own = {name: type(m) for name, m in net.named_modules() if isinstance(m, kinds)}
    found = {name: type(m) for name, m in model.named_modules() if isinstance(m, kinds)}
    assert {*own.values()} == {*found.values()} and len(own) == len(found)
    assert {*own} - {*found} <= ({"stem.0"} if not dynamo else set())  # its weight was folded with the norm's
    if kind == "attention":
        assert dict(model.named_parameters())["position"].requires_grad


def test_quantized_and_exported_as_from_pytorch(tmp_path: Path) -> None:
    net, x = case("conv")
    model = load_onnx(exported(net, x, tmp_path / "net.onnx", 18), [x])
    batches = [torch.randn(4, 3, 16, 16) for _ in range(2)]
    outputs, operators = [], []
    for name, one in (("torch", net), ("onnx", model)):
        qmodel = sparsebit.quantize(one, batches, "onnxruntime")
        file = tmp_path / f"{name}.onnx"
        parity = qmodel.export_onnx(batches[0], file, check=batches)
        assert parity is not None and parity.is_exact
        session = sparsebit.open_session(file)
        outputs.append(session.run({session.inputs[0]: batches[0].numpy()})[0])
        operators.append(sorted(node.op_type for node in onnx.load(file).graph.node))
    assert operators[0] == operators[1]
    assert difference(outputs[0], outputs[1]) < 0.02


def test_a_fixed_batch_says_so(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(nn.Linear(4, 2), (torch.randn(1, 4),), file, dynamo=True, verbose=False)
    load_onnx(file)
    with pytest.raises(DeploymentError, match=r"takes 1x4, and a batch of the data is 3x4.*dynamic batch"):
        load_onnx(file, [torch.randn(3, 4)])
    with pytest.raises(DeploymentError, match="holds no batch"):
        load_onnx(file, [])


def made(nodes: list[Any], constants: dict[str, Any], *, shape: list[Any], opset: int = 17) -> onnx.ModelProto:
    """A file with one input `x` and one output `y`."""
    stored = [numpy_helper.from_array(torch.as_tensor(value).numpy(), name) for name, value in constants.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), name=attributes.pop("name", f"n_{op}"), **attributes)


def loaded(model: onnx.ModelProto, folder: Path, data: Any = None) -> nn.Module:
    onnx.save(model, folder / "made.onnx")
    return load_onnx(folder / "made.onnx", data)


def test_a_shared_weight_is_one_parameter(tmp_path: Path) -> None:
    """A matrix that two MatMuls read is one layer; vectors that are equal are copied for each layer."""
    nodes = [
        node("MatMul", "x w", "a"),
        node("MatMul", "a w", "b", name="second"),
        node("MatMul", "b v", "c", name="third"),
        node("Add", "c k", "y"),
    ]
    weight = torch.randn(4, 4)
    model = loaded(made(nodes, {"w": weight, "v": torch.randn(4, 4), "k": torch.ones(4)}, shape=["n", 4]), tmp_path)
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 2
    assert len(list(model.parameters())) == 3


def test_a_computed_weight_is_a_parameter(tmp_path: Path) -> None:
    """Transpose and Mul of a constant are computed while the file is loaded."""
    nodes = [node("Transpose", "w", "t", perm=[1, 0]), node("Mul", "t two", "u"), node("MatMul", "x u")]
    model = loaded(made(nodes, {"w": torch.randn(3, 4), "two": torch.tensor(2.0)}, shape=["n", 4]), tmp_path)
    (layer,) = (m for m in model.modules() if isinstance(m, nn.Linear))
    assert layer.weight.shape == (3, 4)


def test_a_difference_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(made([node("Relu", "x")], {}, shape=["n", 4]), tmp_path / "made.onnx")
    from sparsebit.deploy.loading.operators import activations

    monkeypatch.setitem(activations._PLAIN, "Relu", torch.sigmoid)
    with pytest.raises(DeploymentError, match=r"output y differs from ONNX Runtime's by .* of its range"):
        load_onnx(tmp_path / "made.onnx")


def test_pruned_and_with_mixed_bits_by_the_names_of_the_file(tmp_path: Path) -> None:
    net, x = case("conv")
    model = load_onnx(exported(net, x, tmp_path / "net.onnx", 18), [x])
    config = {
        "BACKEND": "virtual",
        "W": {"QUANTIZER": {"BIT": 8}, "SPECIFIC": [{"gate": ["QUANTIZER.BIT", 4]}]},
        "A": {"QUANTIZER": {"BIT": 8}},
    }
    qmodel = sparsebit.quantize(model, [x], config)
    bits = {
        name: module.weight_quantizer.bit for name, module in qmodel.named_modules() if name.endswith(("gate", "head"))
    }
    assert set(bits.values()) == {4, 8}
    smodel = SparseModel(model, {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "RATIO": 0.5}}, x).eval()
    smodel.calc_params()
    small = smodel.shrink()
    assert small.get_submodule("stem.0").out_channels < 8
    with torch.no_grad():
        torch.testing.assert_close(small(x), smodel(x), rtol=1e-4, atol=1e-5)
        assert small(torch.cat([x, x])).shape == (4, 5)
