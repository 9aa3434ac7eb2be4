"""A layer that the config, or the runtime's profile, keeps in float is float in ONNX Runtime's own graph too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.onnx_graph.qdq_graph import FLOAT_KEY, OFF_KEY
from sparsebit.quantization import QuantModel
from tests.deploy.exported_files import metadata, optimized_ops, worst
from tests.deploy.tiny_files import Tiny
from tests.parameters import first_fast
from tests.quantization.tiny import calibrated, qconfig

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def middle_off(name: str = "1") -> dict[str, object]:
    switch = [{name: ["QUANTIZER.DISABLE", True]}]
    return {"W.SPECIFIC": switch, "A.SPECIFIC": switch}


def net(middle: nn.Module, channels: int = 8, *, between: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    before = [between] if between is not None else []
    last: nn.Module = nn.Linear(6, 4) if isinstance(middle, nn.Linear) else nn.Conv2d(6, 4, 3, padding=1)
    first: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, *before, middle, nn.ReLU(), last)


MIDDLES = {
    "Conv": (nn.Conv2d(8, 6, 3, padding=1), None),
    "Conv without a bias": (nn.Conv2d(8, 6, 3, padding=1, bias=False), None),
    "Conv in groups": (nn.Conv2d(8, 6, 3, padding=1, groups=2), None),
    "Conv behind a pool": (nn.Conv2d(8, 6, 3, padding=1), nn.MaxPool2d(2)),
    "ConvTranspose": (nn.ConvTranspose2d(8, 6, 2, stride=2), None),
    "ConvTranspose behind a pool": (nn.ConvTranspose2d(8, 6, 3, stride=2), nn.MaxPool2d(2)),
    "Gemm": (nn.Linear(512, 6), nn.Flatten()),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", MIDDLES)
def test_a_layer_that_is_switched_off_stays_float(kind: str, tmp_path: Path) -> None:
    middle, between = MIDDLES[kind]
    with torch.no_grad():  # a far outlier: one scale for the whole weight loses the rest
        middle.get_parameter("weight")[0] *= 300
    model = net(middle, between=between)
    name = next(name for name, module in model.named_modules() if module is middle)
    qmodel = calibrated(model, [X], qconfig(middle_off(name), backend="onnxruntime"))
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.sqnr_db > 70
    op = kind.split()[0]
    ops = optimized_ops(tmp_path / "m.onnx", tmp_path)
    assert ops[op] + ops[f"Fused{op}"] == 1
    found = audit(tmp_path / "m.onnx", repeats=0)
    assert not found.warnings and not any(layer.rounds_weight for layer in found.layers)
    assert [layer.op for layer in found.heavy if layer.arithmetic == "float"] == [op]


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_one_channel_and_no_known_size(dynamic: bool, tmp_path: Path) -> None:
    """No axis is known to be longer than 1, along which a scale could be repeated."""
    middle = nn.Conv2d(1, 6, 3, padding=1)
    qmodel = calibrated(net(middle, 1), [X], qconfig(middle_off("2"), backend="onnxruntime"))
    axes = {"x": {0: "batch", 2: "height", 3: "width"}} if dynamic else None
    file = tmp_path / "m.onnx"
    parity = qmodel.export_onnx(X, file, input_names=["x"], dynamic_axes=axes, check=[X])
    assert parity is not None and parity.worst.sqnr_db > 70
    assert optimized_ops(file, tmp_path)["QLinearConv"] == 2
    found = audit(file, repeats=1)
    assert [layer.arithmetic for layer in found.heavy] == ["integer", "float", "integer"]
    assert found.ratio is not None and not found.warnings


class Two(nn.Module):
    """One value that an integer layer reads, and two float ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.a(x)) + torch.relu(self.b(x)) + torch.relu(self.c(x))


def test_other_readers_of_the_value_keep_their_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    switch = [{"b": ["QUANTIZER.DISABLE", True]}, {"c": ["QUANTIZER.DISABLE", True]}]
    config = qconfig({"W.SPECIFIC": switch, "A.SPECIFIC": switch}, backend="onnxruntime")
    qmodel = calibrated(Two(), [X], config)
    parity = qmodel.export_onnx(X, tmp_path / "m.onnx", check=[X])
    assert parity is not None and parity.worst.sqnr_db > 70
    found = {layer.name: layer.arithmetic for layer in audit(tmp_path / "m.onnx", repeats=0).heavy}
    assert found == {"first": "integer", "a": "integer", "b": "float", "c": "float"}


def test_the_file_notes_what_is_meant_to_be_float(tmp_path: Path) -> None:
    import onnx

    qmodel = calibrated(net(nn.ConvTranspose2d(8, 6, 2, stride=2)), [X], qconfig(backend="onnxruntime"))
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    nodes = onnx.load(str(tmp_path / "m.onnx")).graph.node
    assert [node.op_type for node in nodes if FLOAT_KEY in metadata(node)] == ["ConvTranspose"]


def test_the_audit_sees_what_the_runtime_rounds_by_itself(tmp_path: Path) -> None:
    t = Tiny()
    x = t.node("Conv", [t.quantized("x"), t.float_weight("w", (8, 8, 3, 3))], "float_conv", pads=[1] * 4)
    x = t.node("ConvTranspose", [t.quantized(x), t.float_weight("v", (8, 8, 2, 2))], "up", strides=[2, 2])
    file = t.save(tmp_path / "m.onnx", t.conv(t.quantized(x), "last"))
    found = audit(file, repeats=0)
    assert {layer.name for layer in found.layers if layer.rounds_weight} == {"float_conv", "up"}
    assert any("rounds the float weights of float_conv, up to int8 by itself" in words for words in found.warnings)


@pytest.mark.parametrize("key", [FLOAT_KEY, OFF_KEY])
def test_the_audit_compares_what_is_meant_to_be_float_with_what_is(key: str, tmp_path: Path) -> None:
    """A file that another tool has quantized further: a layer that the export noted as float has integers now."""
    import onnx

    t = Tiny()
    file = t.save(tmp_path / "m.onnx", t.conv(t.quantized(t.conv(t.quantized("x"), "first")), "last"))
    assert not audit(file, repeats=0).warnings
    model = onnx.load(str(file))
    (first,) = (node for node in model.graph.node if node.name == "first")
    first.metadata_props.add(key=key, value="Conv")
    onnx.save(model, str(file))
    found = audit(file, repeats=0)
    (layer,) = (layer for layer in found.layers if layer.meant_float)
    assert (layer.name, layer.arithmetic) == ("first", "integer")
    assert any("first is meant to be computed in float" in words for words in found.warnings)


class UNet(nn.Module):
    """Convolutions down, transposed convolutions up, skips that are joined or added: all drawn at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, generator = np.random.default_rng(seed), torch.manual_seed(seed)
        assert generator is not None
        self.act = [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.LeakyReLU(0.1)][draw.integers(4)]
        widths = [int(draw.choice([4, 6, 8, 12])) for _ in range(1 + int(draw.integers(1, 3)))]
        self.pool = [nn.MaxPool2d(2), nn.AvgPool2d(2)][draw.integers(2)]
        self.down = nn.ModuleList(self.block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up, self.behind, self.adds = nn.ModuleList(), nn.ModuleList(), []
        for inner, outer in zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True):
            kernel, padding, more = [(2, 0, 0), (4, 1, 0), (3, 1, 1)][draw.integers(3)]
            bias = bool(draw.integers(2))
            up = nn.ConvTranspose2d(inner, outer, kernel, 2, padding, more, bias=bias)
            self.up.append(up)
            self.adds.append(bool(draw.integers(2)))
            self.behind.append(self.block(outer if self.adds[-1] else 2 * outer, outer))
        self.head = nn.Conv2d(widths[0], 2, 1)

    def block(self, inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), self.act)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(self.pool(x) if index else x)
            skips.append(x)
        skips.pop()
        for up, block, adds in zip(self.up, self.behind, self.adds, strict=True):
            x, skip = up(x), skips.pop()
            x = block(x + skip if adds else torch.cat([x, skip], 1))
        y: Tensor = self.head(x)
        return y


def quantized_unet(seed: int) -> tuple[QuantModel, Tensor]:
    model = UNet(seed).eval()
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return calibrated(model, [images], qconfig(backend="onnxruntime")), images


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_fast(range(6), 2))
def test_random_unets_are_bit_exact(seed: int, tmp_path: Path) -> None:
    qmodel, images = quantized_unet(seed)
    parity = qmodel.export_onnx(images[:2], tmp_path / "m.onnx", check=[images])
    assert parity is not None and parity.is_exact
    found = audit(tmp_path / "m.onnx", repeats=0)
    assert {layer.arithmetic for layer in found.heavy if layer.op == "ConvTranspose"} == {"float"}
    assert not any(layer.rounds_weight for layer in found.layers)


class Between(nn.Module):
    """An op between quantized convolutions; their two outputs are its operands."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.middle, self.last = op, nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(torch.relu(self.a(x)), torch.relu(self.b(x))))
        return y


class First(nn.Module):
    """A layer in the place of an op: it reads the first operand."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, a: Tensor, _: Tensor) -> Tensor:
        y: Tensor = self.layer(a)
        return y


def outlier(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight[0] *= 300
    return layer


OPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "add": (lambda a, b: a + b, "QLinearAdd"),
    "add and relu": (lambda a, b: torch.relu(a + b), "QLinearAdd"),
    "mul": (lambda a, b: a * b, "QLinearMul"),
    "average pool": (First(nn.AvgPool2d(2)), "QLinearAveragePool"),
    "global pool": (First(nn.AdaptiveAvgPool2d(1)), "QLinearGlobalAveragePool"),
    "softmax": (lambda a, _: a.softmax(1), "QLinearSoftmax"),
    "matmul": (lambda a, b: torch.matmul(a, b), "QLinearMatMul"),
    "matmul by @, transposed": (lambda a, b: a @ b.transpose(-1, -2), "QLinearMatMul"),
    "matmul in front of floats": (lambda a, b: torch.matmul(a, b).tanh(), "MatMulIntegerToFloat"),
    "bmm": (lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).reshape(a.shape), "QLinearMatMul"),
    "linear of images": (First(outlier(nn.Linear(8, 8))), "QGemm"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", OPS)
def test_an_op_that_is_simulated_in_float_has_no_integer_kernel(kind: str, tmp_path: Path) -> None:
    op, kernel = OPS[kind]
    name = "middle.layer" if isinstance(op, First) else kind.split()[0]
    config = qconfig(
        middle_off(name) if "linear" in kind else {"A.SPECIFIC": middle_off(name)["A.SPECIFIC"]}, backend="onnxruntime"
    )
    file = tmp_path / "m.onnx"
    parity = calibrated(Between(op), [X], config).export_onnx(X, file, check=[X])
    assert parity is not None and parity.worst.sqnr_db > 70
    assert optimized_ops(file, tmp_path)[kernel] == 0
    found = audit(file, repeats=0)
    assert not found.warnings
    assert all(layer.arithmetic == "float" for layer in found.layers if layer.name not in ("a", "b", "last"))


def test_ops_that_are_simulated_in_integers_keep_their_kernels(tmp_path: Path) -> None:
    for kind in ("add", "mul", "average pool", "global pool"):
        op, kernel = OPS[kind]
        calibrated(Between(op), [X], qconfig(backend="onnxruntime")).export_onnx(X, tmp_path / "m.onnx")
        assert optimized_ops(tmp_path / "m.onnx", tmp_path)[kernel] == 1


def test_openvino_computes_light_ops_in_float(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    off = [{"middle.layer": ["QUANTIZER.DISABLE", True]}]
    qmodel = calibrated(Between(First(nn.AvgPool2d(2))), [X], qconfig({"A.SPECIFIC": off}, backend="openvino"))
    qmodel.export_onnx(X, tmp_path / "m.onnx")
    assert not audit(tmp_path / "m.onnx", runtime="openvino", repeats=0).warnings


@pytest.mark.filterwarnings("ignore:W.QSCHEME=per-tensor-affine is obeyed")
@pytest.mark.parametrize("backend", ["onnxruntime", "virtual"])
@pytest.mark.parametrize("kind", ["conv", "linear", "linear, quantized"])
def test_a_float_bias_that_int32_does_not_hold(kind: str, backend: str, tmp_path: Path) -> None:
    """With steps of 1e-10 a bias of 0.3 has more of them than int32: a default session would wrap it around."""
    torch.manual_seed(0)
    layer: nn.Module = nn.Conv2d(3, 5, 1) if kind == "conv" else nn.Linear(8, 5)
    model = nn.Sequential(layer, nn.Linear(5, 3)) if kind == "linear, quantized" else layer
    images = X * 1e-6
    qmodel = calibrated(model, [images], qconfig({"W.QSCHEME": "per-tensor-affine"}, backend=backend))
    parity = qmodel.export_onnx(images, tmp_path / "m.onnx", check=[images])
    assert parity is not None and parity.worst.sqnr_db > 40
    assert worst(qmodel, tmp_path / "m.onnx", images, optimize=True) < 1 / 250


@pytest.mark.parametrize("size", [1, 6])
def test_a_softmax_whose_integer_kernel_overflows(size: int, tmp_path: Path) -> None:
    """Its results are all nearly 1 / size, which the kernel writes as 0."""

    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0.01).softmax(-1) @ x.transpose(-1, -2)

    images = X[..., :size]
    qmodel = calibrated(Even(), [images], qconfig(backend="virtual"))
    qmodel.export_onnx(images, tmp_path / "m.onnx", check=[images])
    assert worst(qmodel, tmp_path / "m.onnx", images, optimize=True) < 1 / 250
