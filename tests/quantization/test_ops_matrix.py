"""Every op of the spec as module, function and tensor method, by position and by name, with its defaults.

Each runs in a tiny model: the float forward is the original's, bit by bit; what is to be quantized is, and computes
what the op computes on quantized inputs; what is not says so in the coverage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.quantization import QuantModel
from tests.parameters import listed
from tests.quantization.tiny import minmax_quantized, qconfig

Shape = tuple[int, ...]


class Case(NamedTuple):
    id: str
    kind: str  # unary, weighted, embedding, multi, moved, float
    call: Callable[..., Any]  # (model, *inputs): `model.op` is the module, `model.w` the weight
    shapes: tuple[Shape, ...]
    op: Callable[[], nn.Module] | None = None
    weight: Shape | None = None


class OneInput(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.op = case.op() if case.op is not None else None
        if case.weight is not None:
            self.w = nn.Parameter(torch.randn(case.weight))

    def forward(self, x: Tensor) -> Any:
        return self.case.call(self, x)


class TwoInputs(OneInput):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.case.call(self, x, y)


class ThreeInputs(OneInput):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:
        return self.case.call(self, x, y, z)


IMAGE, SEQUENCE, VOLUME, MATRIX = (2, 4, 6, 6), (2, 4, 6), (2, 4, 4, 4, 4), (3, 6)

# The kind, the shape of the input, and modules; each is called by position and by name.
MODULES: list[tuple[str, Shape, str]] = [
    ("weighted", SEQUENCE, "nn.Conv1d(4, 3, 3) | nn.ConvTranspose1d(4, 3, 3)"),
    ("weighted", IMAGE, """
        nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2, padding="valid") |
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect") | nn.Conv2d(4, 3, 3, padding="same", bias=False) |
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate") |
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular") |
        nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2)
    """),
    ("weighted", VOLUME, "nn.Conv3d(4, 3, 3) | nn.ConvTranspose3d(4, 3, 2)"),
    ("weighted", MATRIX, "nn.Linear(6, 3) | nn.Linear(6, 3, bias=False)"),
    ("unary", SEQUENCE, """
        nn.BatchNorm1d(4) | nn.InstanceNorm1d(4) | nn.MaxPool1d(2) | nn.AvgPool1d(2) | nn.AdaptiveAvgPool1d(2) |
        nn.AdaptiveMaxPool1d(2) | nn.ReLU() | nn.ReLU6() | nn.LeakyReLU(0.2) | nn.PReLU(4) | nn.ELU() | nn.SELU() |
        nn.CELU() | nn.Sigmoid() | nn.SiLU() | nn.GELU() | nn.GELU(approximate="tanh") | nn.Mish() | nn.Hardsigmoid() |
        nn.Hardswish() | nn.Hardtanh() | nn.Tanh() | nn.Softplus(beta=2) | nn.Softmax(dim=-1) | nn.LogSoftmax(dim=1)
    """),
    ("unary", IMAGE, """
        nn.BatchNorm2d(4) | nn.GroupNorm(2, 4) | nn.InstanceNorm2d(4, affine=True) | nn.LayerNorm((6, 6)) |
        nn.MaxPool2d(3, 2, padding=1, ceil_mode=True) | nn.MaxPool2d(2, return_indices=True) |
        nn.AvgPool2d(3, 2, padding=1, count_include_pad=False) | nn.AvgPool2d(2, divisor_override=3) |
        nn.AdaptiveAvgPool2d((2, None)) | nn.AdaptiveMaxPool2d(2) | nn.Upsample(scale_factor=2) |
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True) |
        nn.Upsample(size=9, mode="bicubic", align_corners=False) | nn.UpsamplingNearest2d(scale_factor=2) |
        nn.UpsamplingBilinear2d(scale_factor=2)
    """),
    ("unary", MATRIX, "nn.RMSNorm(6)"),
    ("unary", VOLUME, """
        nn.BatchNorm3d(4) | nn.InstanceNorm3d(4) | nn.MaxPool3d(2) | nn.AvgPool3d(2) | nn.AdaptiveAvgPool3d(1) |
        nn.AdaptiveMaxPool3d(1) | nn.Upsample(scale_factor=2, mode="trilinear")
    """),
    ("moved", IMAGE, """
        nn.Flatten() | nn.Dropout() | nn.Dropout2d() | nn.Identity() | nn.ZeroPad2d(1) | nn.ReflectionPad2d(1) |
        nn.ReplicationPad2d(1) | nn.ConstantPad2d(1, 0.5) | nn.CircularPad2d(1) | nn.PixelShuffle(2) |
        nn.Unflatten(1, (2, 2))
    """),
    ("moved", SEQUENCE, "nn.ReflectionPad1d(2) | nn.ConstantPad1d(2, 0.0) | nn.Dropout1d() | nn.AlphaDropout()"),
]  # fmt: skip

# The kind, the shapes of x, y and z, and calls.
CALLS: list[tuple[str, tuple[Shape, ...], str]] = [
    ("multi", (MATRIX, MATRIX), """
        operator.add(x, y) | torch.add(x, y) | torch.add(input=x, other=y, alpha=2) | x.add(y) | x.add(other=y) |
        operator.iadd(x.clone(), y) | operator.sub(x, y) | torch.sub(x, y) | torch.rsub(x, y) |
        x.sub(other=y, alpha=2) | operator.mul(x, y) | torch.mul(x, other=y) | x.mul(y) | operator.truediv(x, y) |
        torch.div(x, y) | torch.div(input=x, other=y) | x.div(y) | torch.cat([x, y]) | torch.cat((x, y), 1) |
        torch.cat(tensors=[x, y], dim=-1) | torch.concat([x, y], dim=0) | torch.stack([x, y]) |
        torch.stack(tensors=(x, y), dim=1) | torch.einsum("ij,kj->ik", x, y)
    """),
    ("multi", ((3, 6), (6, 2)), """
        operator.matmul(x, y) | torch.matmul(x, y) | torch.matmul(input=x, other=y) | x.matmul(y) | torch.mm(x, y) |
        torch.mm(x, mat2=y) | x.mm(y)
    """),
    ("multi", ((2, 3, 6), (2, 6, 4)), "torch.bmm(x, y) | torch.bmm(input=x, mat2=y) | x.bmm(y)"),
    ("multi", ((2, 3, 4), (2, 3, 6), (2, 6, 4)), """
        torch.baddbmm(x, y, z) | torch.baddbmm(x, batch1=y, batch2=z, beta=0.5) | x.baddbmm(y, z)
    """),
    ("multi", ((2, 2, 5, 4),) * 3, """
        F.scaled_dot_product_attention(x, y, z) |
        F.scaled_dot_product_attention(query=x, key=y, value=z, is_causal=True)
    """),
    ("multi", (MATRIX,), "x + 2 | 2 + x | 2 - x | 0.5 * x | x + x"),
    ("unary", (IMAGE,), """
        torch.mean(x) | torch.mean(x, 1) | torch.mean(input=x, dim=(2, 3), keepdim=True) | x.mean() | x.mean((2, 3)) |
        x.mean(dim=-1, keepdim=True) | F.batch_norm(x, torch.zeros(4), torch.ones(4)) |
        F.batch_norm(input=x, running_mean=None, running_var=None, training=True) | F.layer_norm(x, (6, 6)) |
        F.layer_norm(input=x, normalized_shape=[6, 6], eps=1e-3) | F.group_norm(x, 2) | F.instance_norm(x) |
        F.rms_norm(x, (6,)) | torch.layer_norm(x, (6, 6)) | torch.group_norm(x, 2) | F.max_pool2d(x, 2) |
        F.max_pool2d(input=x, kernel_size=3, stride=2, padding=1, ceil_mode=True) |
        F.max_pool2d(x, 2, return_indices=True) | torch.max_pool2d(x, 2) | F.avg_pool2d(x, 2) |
        F.avg_pool2d(x, 3, padding=1, count_include_pad=False) | F.adaptive_avg_pool2d(x, 1) |
        F.adaptive_avg_pool2d(input=x, output_size=(1, 2)) | F.adaptive_max_pool2d(x, 1) |
        F.interpolate(x, scale_factor=2) | F.interpolate(input=x, size=(9, 9), mode="bilinear", align_corners=True) |
        F.interpolate(x, (3, 3), mode="bicubic", antialias=True) | F.interpolate(x, size=3, mode="area")
    """),
    ("unary", (SEQUENCE,), """
        F.max_pool1d(x, 2) | F.avg_pool1d(x, kernel_size=2) | F.adaptive_avg_pool1d(x, 2) |
        F.adaptive_max_pool1d(x, 2) | F.interpolate(x, scale_factor=2, mode="linear") | F.relu(x) |
        F.relu(input=x, inplace=False) | F.relu(x.clone(), inplace=True) | torch.relu(x) | x.relu() |
        x.clone().relu_() | F.relu6(x) | F.leaky_relu(x) | F.leaky_relu(x, 0.3) |
        F.leaky_relu(input=x, negative_slope=0.3) | F.elu(x) | F.selu(x) | F.celu(x) | F.sigmoid(x) |
        torch.sigmoid(x) | x.sigmoid() | F.silu(x) | F.gelu(x) | F.gelu(x, approximate="tanh") | F.mish(x) |
        F.hardsigmoid(x) | F.hardswish(x) | F.hardtanh(x, -0.5, 0.5) | torch.tanh(x) | x.tanh() | F.softplus(x) |
        F.softmax(x, -1) | F.softmax(input=x, dim=1) | torch.softmax(x, dim=-1) | x.softmax(-1) |
        F.log_softmax(x, dim=-1) | torch.log_softmax(x, 1) | x.log_softmax(dim=-1)
    """),
    ("unary", (VOLUME,), """
        F.max_pool3d(x, 2) | F.avg_pool3d(x, 2) | F.adaptive_avg_pool3d(x, 1) | F.adaptive_max_pool3d(x, 1)
    """),
    ("moved", (IMAGE,), """
        torch.flatten(x) | torch.flatten(input=x, start_dim=1) | x.flatten(1) | x.unflatten(1, (2, 2)) |
        torch.unflatten(x, 1, (2, 2)) | x.reshape(x.size(0), -1) | x.view(x.size()) |
        x.view(x.shape[0], x.shape[1], -1) | x.reshape(x.shape[0] * 2, x.shape[1] // 2, -1) |
        torch.reshape(input=x, shape=(2, -1)) | x.reshape((2, -1)) | x.view(2, -1) | x.chunk(2, dim=1)[0] |
        torch.chunk(input=x, chunks=2, dim=1)[1] | x.split(2, 1)[0] | x.split([1, 3], dim=1)[1] |
        torch.split(x, 2, dim=1)[0] | x.unbind(1)[2] | torch.unbind(x, dim=1)[0] | x[:, :1].expand(-1, 4, -1, -1) |
        x[:, :1].expand_as(x) | x.repeat(1, 2, 1, 1) | x.transpose(1, 2) | torch.transpose(input=x, dim0=1, dim1=2) |
        x.permute(0, 2, 3, 1) | x.permute((0, 2, 3, 1)) | torch.permute(x, dims=(0, 2, 3, 1)) | x.mT |
        x[:, :1].squeeze(1) | torch.squeeze(x[:, :1]) | x.unsqueeze(1) | torch.unsqueeze(x, dim=-1) | F.pad(x, (1, 1)) |
        F.pad(input=x, pad=(1, 0, 1, 0), mode="reflect") | x.roll(1, 2) |
        torch.roll(input=x, shifts=(1, 2), dims=(2, 3)) | x.to(x.device) | x.to(dtype=x.dtype) | x[:, 1] | x[..., ::2] |
        x[:, None] | x == 0 | torch.eq(x, 0.0) | x.eq(0.0) | F.dropout(x, training=False) | F.dropout2d(x, 0.5, False) |
        torch.clone(x) | x.clone() | x.contiguous() | x.detach() | torch.where(x > 0, x, 0.0) | x.where(x > 0, 0.0) |
        torch.where(condition=x > 0, input=x, other=0.0) | x.masked_fill(x < 0, 0.0) | torch.clamp(x, -1, 1) |
        torch.clamp(input=x, min=0) | x.clamp(max=1.0) | x.clamp_min(0.0) | -x | x.amax((2, 3)) |
        torch.maximum(x, torch.zeros(())) | x[:, torch.arange(x.shape[1] // 2)]
    """),
    ("float", (SEQUENCE,), """
        x // 0.3 | torch.floor_divide(x, 0.3) | x.floor_divide(0.3) | torch.erf(x) | x.cumsum(1) | F.glu(x, 1)
    """),
]  # fmt: skip

# The shapes of the weight w and of x, and calls.
WEIGHTED: list[tuple[Shape, Shape, str]] = [
    ((4,), SEQUENCE, "F.prelu(x, w) | x.prelu(w)"),
    ((1,), SEQUENCE, "torch.prelu(x, w)"),
    ((3, 4, 3), SEQUENCE, "F.conv1d(x, w) | F.conv1d(input=x, weight=w, padding=1)"),
    ((3, 4, 3, 3), IMAGE, """
        F.conv2d(x, w, None, 2, 1) | F.conv2d(weight=w, input=x, stride=2) | F.conv2d(x, weight=w)
    """),
    ((3, 4, 2, 2, 2), VOLUME, "F.conv3d(x, w)"),
    ((4, 3, 3), SEQUENCE, "F.conv_transpose1d(x, w)"),
    ((4, 3, 3, 3), IMAGE, "F.conv_transpose2d(x, w, stride=2)"),
    ((4, 3, 2, 2, 2), VOLUME, "F.conv_transpose3d(input=x, weight=w)"),
    ((3, 6), MATRIX, "F.linear(x, w) | F.linear(weight=w, input=x) | F.linear(x, w * 0.5)"),
    ((6, 3), MATRIX, """
        torch.addmm(torch.ones(3), x, w) | torch.addmm(input=torch.ones(3), mat1=x, mat2=w) |
        torch.ones(3).addmm(x, w)
    """),
]  # fmt: skip


NAMES = {"F": F, "nn": nn, "operator": operator, "torch": torch}


def cases() -> Iterator[Case]:
    for kind, shape, text in MODULES:
        for made in listed(text):
            op = eval(f"lambda: {made}", NAMES)
            name = "x" if "RMSNorm" in made else "input"
            yield Case(made, kind, lambda m, x: m.op(x), (shape,), op)
            yield Case(f"{made} by name", kind, lambda m, x, name=name: m.op(**{name: x}), (shape,), op)
    made = "nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1)"
    call = lambda m, x: m.op(x, output_size=[12, 12])  # noqa: E731
    yield Case(f"{made} with output_size", "weighted", call, (IMAGE,), lambda: eval(made, NAMES))
    for kind, shapes, text in CALLS:
        for call in listed(text):
            compute = eval(f"lambda {', '.join('xyz'[: len(shapes)])}: {call}", NAMES)
            yield Case(call, kind, lambda m, *x, f=compute: f(*x), shapes)
    for weight, shape, text in WEIGHTED:
        for call in listed(text):
            compute, kind = eval(f"lambda w, x: {call}", NAMES), "unary" if "prelu" in call else "weighted"
            yield Case(call, kind, lambda m, x, f=compute: f(m.w, x), (shape,), weight=weight)


@pytest.mark.sample(71)
@pytest.mark.parametrize("case", [*cases()], ids=lambda case: case.id)
@torch.no_grad()
def test_op(case: Case) -> None:
    model = {1: OneInput, 2: TwoInputs, 3: ThreeInputs}[len(case.shapes)](case).eval()
    inputs = [torch.randn(shape) for shape in case.shapes]
    if "div" in case.id:
        inputs[-1] = inputs[-1].abs() + 1
    qmodel = QuantModel(model, qconfig({"A.QADD.ENABLE_QUANT": True}, bits=4))
    qmodel.prepare_calibration()
    expected = model(*inputs)
    assert_same(qmodel(*inputs), expected)

    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    assert qmodel.coverage.opaque == ()
    targets = sorted(quantizer.target for quantizer in qmodel.quantizers() if quantizer.is_enable)
    if case.kind in ("moved", "float"):
        assert targets == []
        assert_same(qmodel(*inputs), expected)
        lines = [layer for layer in qmodel.coverage.float_layers if "float" in layer.reason]
        assert len(lines) == (case.kind == "float")
        return
    floats = [layer for layer in qmodel.coverage.float_layers if "divisor" not in layer.name]
    assert floats == []
    assert targets.count("weight") == (case.kind == "weighted")
    assert targets.count("activation") == (1 if "div" in case.id else len(case.shapes))  # a divisor stays in float
    assert_same(qmodel(*inputs), quantized_by_hand(model, qmodel, inputs))
    assert any((a != b).any() for a, b in zip(leaves(qmodel(*inputs)), leaves(expected), strict=True))


def quantized_by_hand(model: OneInput, qmodel: QuantModel, inputs: list[Tensor]) -> Any:
    """The op itself on quantized inputs, with its weight quantized."""
    for quantizer in qmodel.quantizers():
        if quantizer.target == "weight" and quantizer.is_enable:
            weight = model.op.weight if model.op is not None else model.w
            if "w * 0.5" in model.case.id:
                weight = quantizer(weight * 0.5) * 2
                model.w.copy_(weight)
            else:
                weight.copy_(quantizer(weight))
    if "div" in model.case.id:
        return model(minmax_quantized(inputs[0]), *inputs[1:])
    return model(*map(minmax_quantized, inputs))


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def assert_same(actual: Any, expected: Any) -> None:
    assert len(leaves(actual)) == len(leaves(expected)) > 0
    for one, other in zip(leaves(actual), leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("as_module", [True, False], ids=["module", "function"])
def test_embedding_quantizes_its_weight_alone(as_module: bool) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, padding_idx=0)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) if as_module else F.embedding(ids, self.table.weight, padding_idx=0)

    model, ids = Lookup().eval(), torch.randint(0, 10, (2, 5))
    qmodel = QuantModel(model, qconfig(bits=4))
    qmodel.prepare_calibration()
    assert torch.equal(qmodel(ids), model(ids))
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    (quantizer,) = [q for q in qmodel.quantizers() if q.is_enable]
    assert quantizer.target == "weight"
    assert torch.equal(qmodel(ids), F.embedding(ids, quantizer(model.table.weight), padding_idx=0))


@torch.no_grad()
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_taken_apart(batch_first: bool) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model, x = Attention().eval(), torch.randn(3, 5, 8)
    qmodel = QuantModel(model, qconfig())
    qmodel.prepare_calibration()
    torch.testing.assert_close(qmodel(x), model(x))
    qmodel.calc_qparams()
    qmodel.set_quant(w_quant=True, a_quant=True)
    assert {q.name for q in qmodel.quantizers() if q.target == "weight" and q.is_enable} == {
        f"attention.{name}_proj.weight" for name in ("q", "k", "v", "out")
    }
    assert F.mse_loss(qmodel(x), model(x)) < 1e-3 * model(x).square().mean()


@torch.no_grad()
def test_neighbours_of_a_recurrent_layer_are_quantized() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.lstm, self.back = nn.Linear(6, 5), nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden, (last, _) = self.lstm(self.front(x))
            return self.back(hidden) + last.sum()

    model, x = Tagger().eval(), torch.randn(2, 5, 6)
    qmodel = QuantModel(model, qconfig())
    qmodel.prepare_calibration()
    assert torch.equal(qmodel(x), model(x))
    qmodel.calc_qparams()
    assert {layer.name for layer in qmodel.coverage.quantized} >= {"front", "back", "lstm"}


def test_stochastic_depth_is_known() -> None:
    timm = pytest.importorskip("timm.layers")
    torchvision = pytest.importorskip("torchvision.ops")

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.drop_path = timm.DropPath(0.5)
            self.stochastic = torchvision.StochasticDepth(0.5, "row")

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.drop_path(self.fc(x))
            return x + torchvision.stochastic_depth(self.stochastic(x), 0.3, "batch", self.training)

    model, x = Deep().eval(), torch.randn(4, 6)
    qmodel = QuantModel(model, qconfig())
    assert torch.equal(qmodel.eval()(x), model(x))
    assert qmodel.coverage.opaque == ()
    assert {layer.name for layer in qmodel.coverage.float_layers} == {"add", "add_1"}
    assert not torch.equal(qmodel.train()(x), model(x))


def test_an_unknown_op_is_listed_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x).relu() + torch.special.i0(x)

    coverage = QuantModel(Twice(), qconfig()).coverage
    unknown = [layer for layer in coverage.float_layers if "unknown op" in layer.reason]
    assert [layer.name for layer in unknown] == ["erf", "special_i0"]
    assert "register_qmodule" in unknown[0].reason
