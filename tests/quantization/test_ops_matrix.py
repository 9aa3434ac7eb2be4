"""Every op of the spec as module, function and tensor method, by position and by name, with its defaults.

Each runs in a tiny model: the float forward is the original's, bit by bit; what is to be quantized is, and computes
what the op computes on quantized inputs; what is not says so in the coverage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.quantization import QuantModel
from tests.quantization.tiny import minmax_quantized, qconfig


class Case(NamedTuple):
    id: str
    kind: str  # unary, weighted, embedding, multi, moved, float
    call: Callable[..., Any]  # (model, *inputs): `model.op` is the module, `model.w` the weight
    shapes: tuple[tuple[int, ...], ...] = ((2, 4, 6),)
    op: Callable[[], nn.Module] | None = None
    weight: tuple[int, ...] | None = None


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
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.case.call(self, x, y)


class ThreeInputs(OneInput):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        return self.case.call(self, x, y, z)


IMAGE, SEQUENCE, VOLUME, MATRIX = (2, 4, 6, 6), (2, 4, 6), (2, 4, 4, 4, 4), (3, 6)


def modules(kind: str, shape: tuple[int, ...], **made: Callable[[], nn.Module]) -> list[Case]:
    """A case per module; each is called by position and by name."""
    return [
        case
        for name, make in made.items()
        for case in (
            Case(f"nn.{name}", kind, lambda m, x: m.op(x), (shape,), make),
            Case(f"nn.{name}-by-name", kind, lambda m, x: m.op(input=x), (shape,), make),
        )
    ]


def calls(kind: str, *shapes: tuple[int, ...], **made: Callable[..., Any]) -> list[Case]:
    return [Case(name.replace("__", "."), kind, lambda m, *x, f=f: f(*x), shapes) for name, f in made.items()]


def weighted(weight: tuple[int, ...], *shapes: tuple[int, ...], **made: Callable[..., Any]) -> list[Case]:
    return [
        Case(name.replace("__", "."), "weighted", lambda m, *x, f=f: f(m.w, *x), shapes, weight=weight)
        for name, f in made.items()
    ]


WEIGHTED = [
    *modules(
        "weighted", SEQUENCE, Conv1d=lambda: nn.Conv1d(4, 3, 3), ConvTranspose1d=lambda: nn.ConvTranspose1d(4, 3, 3)
    ),
    *modules(
        "weighted",
        IMAGE,
        Conv2d=lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2, groups=2, padding="valid"),
        Conv2d_reflect=lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
        Conv2d_same=lambda: nn.Conv2d(4, 3, 3, padding="same", bias=False),
        ConvTranspose2d=lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
    ),
    *modules(
        "weighted", VOLUME, Conv3d=lambda: nn.Conv3d(4, 3, 3), ConvTranspose3d=lambda: nn.ConvTranspose3d(4, 3, 2)
    ),
    *modules("weighted", MATRIX, Linear=lambda: nn.Linear(6, 3), Linear_no_bias=lambda: nn.Linear(6, 3, bias=False)),
    Case(
        "nn.ConvTranspose2d-output_size",
        "weighted",
        lambda m, x: m.op(x, output_size=[12, 12]),
        (IMAGE,),
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1),
    ),
    *weighted(
        (3, 4, 3),
        SEQUENCE,
        F__conv1d=lambda w, x: F.conv1d(x, w),
        F__conv1d_names=lambda w, x: F.conv1d(input=x, weight=w, padding=1),
    ),
    *weighted(
        (3, 4, 3, 3),
        IMAGE,
        F__conv2d=lambda w, x: F.conv2d(x, w, None, 2, 1),
        F__conv2d_names=lambda w, x: F.conv2d(weight=w, input=x, stride=2),
        F__conv2d_mixed=lambda w, x: F.conv2d(x, weight=w),
    ),
    *weighted((3, 4, 2, 2, 2), VOLUME, F__conv3d=lambda w, x: F.conv3d(x, w)),
    *weighted((4, 3, 3), SEQUENCE, F__conv_transpose1d=lambda w, x: F.conv_transpose1d(x, w)),
    *weighted((4, 3, 3, 3), IMAGE, F__conv_transpose2d=lambda w, x: F.conv_transpose2d(x, w, stride=2)),
    *weighted((4, 3, 2, 2, 2), VOLUME, F__conv_transpose3d=lambda w, x: F.conv_transpose3d(input=x, weight=w)),
    *weighted(
        (3, 6),
        MATRIX,
        F__linear=lambda w, x: F.linear(x, w),
        F__linear_names=lambda w, x: F.linear(weight=w, input=x),
        F__linear_computed_weight=lambda w, x: F.linear(x, w * 0.5),
    ),
    *weighted(
        (6, 3),
        MATRIX,
        torch__addmm=lambda w, x: torch.addmm(torch.ones(3), x, w),
        torch__addmm_names=lambda w, x: torch.addmm(input=torch.ones(3), mat1=x, mat2=w),
        Tensor__addmm=lambda w, x: torch.ones(3).addmm(x, w),
    ),
]

ARITHMETIC = [
    *calls(
        "multi",
        MATRIX,
        MATRIX,
        operator__add=operator.add,
        torch__add=torch.add,
        torch__add_alpha=lambda x, y: torch.add(input=x, other=y, alpha=2),
        Tensor__add=lambda x, y: x.add(y),
        Tensor__add_names=lambda x, y: x.add(other=y),
        iadd=lambda x, y: operator.iadd(x.clone(), y),
        operator__sub=operator.sub,
        torch__sub=torch.sub,
        torch__rsub=torch.rsub,
        Tensor__sub=lambda x, y: x.sub(other=y, alpha=2),
        operator__mul=operator.mul,
        torch__mul=lambda x, y: torch.mul(x, other=y),
        Tensor__mul=lambda x, y: x.mul(y),
        operator__truediv=operator.truediv,
        torch__div=torch.div,
        torch__div_names=lambda x, y: torch.div(input=x, other=y),
        Tensor__div=lambda x, y: x.div(y),
        cat=lambda x, y: torch.cat([x, y]),
        cat_tuple=lambda x, y: torch.cat((x, y), 1),
        cat_names=lambda x, y: torch.cat(tensors=[x, y], dim=-1),
        concat=lambda x, y: torch.concat([x, y], dim=0),
        stack=lambda x, y: torch.stack([x, y]),
        stack_names=lambda x, y: torch.stack(tensors=(x, y), dim=1),
        einsum=lambda x, y: torch.einsum("ij,kj->ik", x, y),
    ),
    *calls(
        "multi",
        (3, 6),
        (6, 2),
        operator__matmul=operator.matmul,
        torch__matmul=torch.matmul,
        torch__matmul_names=lambda x, y: torch.matmul(input=x, other=y),
        Tensor__matmul=lambda x, y: x.matmul(y),
        torch__mm=torch.mm,
        torch__mm_names=lambda x, y: torch.mm(x, mat2=y),
        Tensor__mm=lambda x, y: x.mm(y),
    ),
    *calls(
        "multi",
        (2, 3, 6),
        (2, 6, 4),
        torch__bmm=torch.bmm,
        torch__bmm_names=lambda x, y: torch.bmm(input=x, mat2=y),
        Tensor__bmm=lambda x, y: x.bmm(y),
    ),
    *calls(
        "multi",
        (2, 3, 4),
        (2, 3, 6),
        (2, 6, 4),
        torch__baddbmm=torch.baddbmm,
        torch__baddbmm_names=lambda x, y, z: torch.baddbmm(x, batch1=y, batch2=z, beta=0.5),
        Tensor__baddbmm=lambda x, y, z: x.baddbmm(y, z),
    ),
    *calls(
        "multi",
        *[(2, 2, 5, 4)] * 3,
        F__scaled_dot_product_attention=lambda x, y, z: F.scaled_dot_product_attention(x, y, z),
        F__scaled_dot_product_attention_names=lambda x, y, z: F.scaled_dot_product_attention(
            query=x, key=y, value=z, is_causal=True
        ),
    ),
    *calls(
        "multi",
        MATRIX,
        add_number=lambda x: x + 2,
        radd_number=lambda x: 2 + x,
        rsub_number=lambda x: 2 - x,
        mul_number=lambda x: 0.5 * x,
        add_itself=lambda x: x + x,
    ),
    *calls(
        "unary",
        IMAGE,
        torch__mean=torch.mean,
        torch__mean_dim=lambda x: torch.mean(x, 1),
        torch__mean_names=lambda x: torch.mean(input=x, dim=(2, 3), keepdim=True),
        Tensor__mean=lambda x: x.mean(),
        Tensor__mean_dims=lambda x: x.mean((2, 3)),
        Tensor__mean_names=lambda x: x.mean(dim=-1, keepdim=True),
    ),
]

NORMS = [
    *modules("unary", SEQUENCE, BatchNorm1d=lambda: nn.BatchNorm1d(4), InstanceNorm1d=lambda: nn.InstanceNorm1d(4)),
    *modules(
        "unary",
        IMAGE,
        BatchNorm2d=lambda: nn.BatchNorm2d(4),
        GroupNorm=lambda: nn.GroupNorm(2, 4),
        InstanceNorm2d=lambda: nn.InstanceNorm2d(4, affine=True),
        LayerNorm=lambda: nn.LayerNorm((6, 6)),
    ),
    *modules("unary", VOLUME, BatchNorm3d=lambda: nn.BatchNorm3d(4), InstanceNorm3d=lambda: nn.InstanceNorm3d(4)),
    Case("nn.RMSNorm", "unary", lambda m, x: m.op(x), (MATRIX,), lambda: nn.RMSNorm(6)),
    Case("nn.RMSNorm-by-name", "unary", lambda m, x: m.op(x=x), (MATRIX,), lambda: nn.RMSNorm(6)),
    *calls(
        "unary",
        IMAGE,
        F__batch_norm=lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
        F__batch_norm_training=lambda x: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
        F__layer_norm=lambda x: F.layer_norm(x, (6, 6)),
        F__layer_norm_names=lambda x: F.layer_norm(input=x, normalized_shape=[6, 6], eps=1e-3),
        F__group_norm=lambda x: F.group_norm(x, 2),
        F__instance_norm=lambda x: F.instance_norm(x),
        F__rms_norm=lambda x: F.rms_norm(x, (6,)),
        torch__layer_norm=lambda x: torch.layer_norm(x, (6, 6)),
        torch__group_norm=lambda x: torch.group_norm(x, 2),
    ),
]

POOLS = [
    *modules(
        "unary",
        SEQUENCE,
        MaxPool1d=lambda: nn.MaxPool1d(2),
        AvgPool1d=lambda: nn.AvgPool1d(2),
        AdaptiveAvgPool1d=lambda: nn.AdaptiveAvgPool1d(2),
        AdaptiveMaxPool1d=lambda: nn.AdaptiveMaxPool1d(2),
    ),
    *modules(
        "unary",
        IMAGE,
        MaxPool2d=lambda: nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        MaxPool2d_indices=lambda: nn.MaxPool2d(2, return_indices=True),
        AvgPool2d=lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
        AvgPool2d_divisor=lambda: nn.AvgPool2d(2, divisor_override=3),
        AdaptiveAvgPool2d=lambda: nn.AdaptiveAvgPool2d((2, None)),
        AdaptiveMaxPool2d=lambda: nn.AdaptiveMaxPool2d(2),
        Upsample=lambda: nn.Upsample(scale_factor=2),
        Upsample_bilinear=lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        Upsample_bicubic=lambda: nn.Upsample(size=9, mode="bicubic", align_corners=False),
        UpsamplingNearest2d=lambda: nn.UpsamplingNearest2d(scale_factor=2),
        UpsamplingBilinear2d=lambda: nn.UpsamplingBilinear2d(scale_factor=2),
    ),
    *modules(
        "unary",
        VOLUME,
        MaxPool3d=lambda: nn.MaxPool3d(2),
        AvgPool3d=lambda: nn.AvgPool3d(2),
        AdaptiveAvgPool3d=lambda: nn.AdaptiveAvgPool3d(1),
        AdaptiveMaxPool3d=lambda: nn.AdaptiveMaxPool3d(1),
        Upsample_trilinear=lambda: nn.Upsample(scale_factor=2, mode="trilinear"),
    ),
    *calls(
        "unary",
        IMAGE,
        F__max_pool2d=lambda x: F.max_pool2d(x, 2),
        F__max_pool2d_names=lambda x: F.max_pool2d(input=x, kernel_size=3, stride=2, padding=1, ceil_mode=True),
        F__max_pool2d_indices=lambda x: F.max_pool2d(x, 2, return_indices=True),
        torch__max_pool2d=lambda x: torch.max_pool2d(x, 2),
        F__avg_pool2d=lambda x: F.avg_pool2d(x, 2),
        F__avg_pool2d_names=lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
        F__adaptive_avg_pool2d=lambda x: F.adaptive_avg_pool2d(x, 1),
        F__adaptive_avg_pool2d_names=lambda x: F.adaptive_avg_pool2d(input=x, output_size=(1, 2)),
        F__adaptive_max_pool2d=lambda x: F.adaptive_max_pool2d(x, 1),
        F__interpolate=lambda x: F.interpolate(x, scale_factor=2),
        F__interpolate_names=lambda x: F.interpolate(input=x, size=(9, 9), mode="bilinear", align_corners=True),
        F__interpolate_bicubic=lambda x: F.interpolate(x, (3, 3), mode="bicubic", antialias=True),
        F__interpolate_area=lambda x: F.interpolate(x, size=3, mode="area"),
    ),
    *calls(
        "unary",
        SEQUENCE,
        F__max_pool1d=lambda x: F.max_pool1d(x, 2),
        F__avg_pool1d=lambda x: F.avg_pool1d(x, kernel_size=2),
        F__adaptive_avg_pool1d=lambda x: F.adaptive_avg_pool1d(x, 2),
        F__adaptive_max_pool1d=lambda x: F.adaptive_max_pool1d(x, 2),
        F__interpolate_linear=lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    ),
    *calls(
        "unary",
        VOLUME,
        F__max_pool3d=lambda x: F.max_pool3d(x, 2),
        F__avg_pool3d=lambda x: F.avg_pool3d(x, 2),
        F__adaptive_avg_pool3d=lambda x: F.adaptive_avg_pool3d(x, 1),
        F__adaptive_max_pool3d=lambda x: F.adaptive_max_pool3d(x, 1),
    ),
]

ACTIVATIONS = [
    *modules(
        "unary",
        SEQUENCE,
        ReLU=nn.ReLU,
        ReLU6=nn.ReLU6,
        LeakyReLU=lambda: nn.LeakyReLU(0.2),
        PReLU=lambda: nn.PReLU(4),
        ELU=nn.ELU,
        SELU=nn.SELU,
        CELU=nn.CELU,
        Sigmoid=nn.Sigmoid,
        SiLU=nn.SiLU,
        GELU=nn.GELU,
        GELU_tanh=lambda: nn.GELU(approximate="tanh"),
        Mish=nn.Mish,
        Hardsigmoid=nn.Hardsigmoid,
        Hardswish=nn.Hardswish,
        Hardtanh=nn.Hardtanh,
        Tanh=nn.Tanh,
        Softplus=lambda: nn.Softplus(beta=2),
        Softmax=lambda: nn.Softmax(dim=-1),
        LogSoftmax=lambda: nn.LogSoftmax(dim=1),
    ),
    *calls(
        "unary",
        SEQUENCE,
        F__relu=F.relu,
        F__relu_names=lambda x: F.relu(input=x, inplace=False),
        F__relu_inplace=lambda x: F.relu(x.clone(), inplace=True),
        torch__relu=torch.relu,
        Tensor__relu=lambda x: x.relu(),
        Tensor__relu_=lambda x: x.clone().relu_(),
        F__relu6=F.relu6,
        F__leaky_relu=F.leaky_relu,
        F__leaky_relu_slope=lambda x: F.leaky_relu(x, 0.3),
        F__leaky_relu_names=lambda x: F.leaky_relu(input=x, negative_slope=0.3),
        F__elu=F.elu,
        F__selu=F.selu,
        F__celu=F.celu,
        F__sigmoid=torch.nn.functional.sigmoid,
        torch__sigmoid=torch.sigmoid,
        Tensor__sigmoid=lambda x: x.sigmoid(),
        F__silu=F.silu,
        F__gelu=F.gelu,
        F__gelu_tanh=lambda x: F.gelu(x, approximate="tanh"),
        F__mish=F.mish,
        F__hardsigmoid=F.hardsigmoid,
        F__hardswish=F.hardswish,
        F__hardtanh=lambda x: F.hardtanh(x, -0.5, 0.5),
        torch__tanh=torch.tanh,
        Tensor__tanh=lambda x: x.tanh(),
        F__softplus=F.softplus,
        F__softmax=lambda x: F.softmax(x, -1),
        F__softmax_names=lambda x: F.softmax(input=x, dim=1),
        torch__softmax=lambda x: torch.softmax(x, dim=-1),
        Tensor__softmax=lambda x: x.softmax(-1),
        F__log_softmax=lambda x: F.log_softmax(x, dim=-1),
        torch__log_softmax=lambda x: torch.log_softmax(x, 1),
        Tensor__log_softmax=lambda x: x.log_softmax(dim=-1),
    ),
    Case("F.prelu", "unary", lambda m, x: F.prelu(x, m.w), (SEQUENCE,), weight=(4,)),
    Case("torch.prelu", "unary", lambda m, x: torch.prelu(x, m.w), (SEQUENCE,), weight=(1,)),
    Case("Tensor.prelu", "unary", lambda m, x: x.prelu(m.w), (SEQUENCE,), weight=(4,)),
]

MOVED = [
    *modules(
        "moved",
        IMAGE,
        Flatten=nn.Flatten,
        Dropout=nn.Dropout,
        Dropout2d=nn.Dropout2d,
        Identity=nn.Identity,
        ZeroPad2d=lambda: nn.ZeroPad2d(1),
        ReflectionPad2d=lambda: nn.ReflectionPad2d(1),
        ReplicationPad2d=lambda: nn.ReplicationPad2d(1),
        ConstantPad2d=lambda: nn.ConstantPad2d(1, 0.5),
        CircularPad2d=lambda: nn.CircularPad2d(1),
        PixelShuffle=lambda: nn.PixelShuffle(2),
        Unflatten=lambda: nn.Unflatten(1, (2, 2)),
    ),
    *modules(
        "moved",
        SEQUENCE,
        ReflectionPad1d=lambda: nn.ReflectionPad1d(2),
        ConstantPad1d=lambda: nn.ConstantPad1d(2, 0.0),
        Dropout1d=nn.Dropout1d,
        AlphaDropout=nn.AlphaDropout,
    ),
    *calls(
        "moved",
        IMAGE,
        torch__flatten=torch.flatten,
        torch__flatten_names=lambda x: torch.flatten(input=x, start_dim=1),
        Tensor__flatten=lambda x: x.flatten(1),
        Tensor__unflatten=lambda x: x.unflatten(1, (2, 2)),
        torch__unflatten=lambda x: torch.unflatten(x, 1, (2, 2)),
        Tensor__size=lambda x: x.reshape(x.size(0), -1),
        Tensor__size_all=lambda x: x.view(x.size()),
        shape=lambda x: x.view(x.shape[0], x.shape[1], -1),
        shape_arithmetic=lambda x: x.reshape(x.shape[0] * 2, x.shape[1] // 2, -1),
        torch__reshape=lambda x: torch.reshape(input=x, shape=(2, -1)),
        Tensor__reshape=lambda x: x.reshape((2, -1)),
        Tensor__view=lambda x: x.view(2, -1),
        Tensor__chunk=lambda x: x.chunk(2, dim=1)[0],
        torch__chunk=lambda x: torch.chunk(input=x, chunks=2, dim=1)[1],
        Tensor__split=lambda x: x.split(2, 1)[0],
        Tensor__split_sizes=lambda x: x.split([1, 3], dim=1)[1],
        torch__split=lambda x: torch.split(x, 2, dim=1)[0],
        unbind=lambda x: x.unbind(1)[2],
        torch__unbind=lambda x: torch.unbind(x, dim=1)[0],
        Tensor__expand=lambda x: x[:, :1].expand(-1, 4, -1, -1),
        Tensor__expand_as=lambda x: x[:, :1].expand_as(x),
        Tensor__repeat=lambda x: x.repeat(1, 2, 1, 1),
        Tensor__transpose=lambda x: x.transpose(1, 2),
        torch__transpose=lambda x: torch.transpose(input=x, dim0=1, dim1=2),
        Tensor__permute=lambda x: x.permute(0, 2, 3, 1),
        Tensor__permute_tuple=lambda x: x.permute((0, 2, 3, 1)),
        torch__permute=lambda x: torch.permute(x, dims=(0, 2, 3, 1)),
        mT=lambda x: x.mT,
        Tensor__squeeze=lambda x: x[:, :1].squeeze(1),
        torch__squeeze=lambda x: torch.squeeze(x[:, :1]),
        Tensor__unsqueeze=lambda x: x.unsqueeze(1),
        torch__unsqueeze=lambda x: torch.unsqueeze(x, dim=-1),
        F__pad=lambda x: F.pad(x, (1, 1)),
        F__pad_names=lambda x: F.pad(input=x, pad=(1, 0, 1, 0), mode="reflect"),
        Tensor__roll=lambda x: x.roll(1, 2),
        torch__roll=lambda x: torch.roll(input=x, shifts=(1, 2), dims=(2, 3)),
        getattr_device=lambda x: x.to(x.device),
        getattr_dtype=lambda x: x.to(dtype=x.dtype),
        getitem=lambda x: x[:, 1],
        getitem_ellipsis=lambda x: x[..., ::2],
        getitem_none=lambda x: x[:, None],
        eq=lambda x: x == 0,
        torch__eq=lambda x: torch.eq(x, 0.0),
        Tensor__eq=lambda x: x.eq(0.0),
        F__dropout=lambda x: F.dropout(x, training=False),
        F__dropout2d=lambda x: F.dropout2d(x, 0.5, False),
        torch__clone=torch.clone,
        Tensor__clone=lambda x: x.clone(),
        Tensor__contiguous=lambda x: x.contiguous(),
        Tensor__detach=lambda x: x.detach(),
        torch__where=lambda x: torch.where(x > 0, x, 0.0),
        Tensor__where=lambda x: x.where(x > 0, 0.0),
        torch__where_names=lambda x: torch.where(condition=x > 0, input=x, other=0.0),
        Tensor__masked_fill=lambda x: x.masked_fill(x < 0, 0.0),
        torch__clamp=lambda x: torch.clamp(x, -1, 1),
        torch__clamp_names=lambda x: torch.clamp(input=x, min=0),
        Tensor__clamp=lambda x: x.clamp(max=1.0),
        Tensor__clamp_min=lambda x: x.clamp_min(0.0),
        neg=lambda x: -x,
        amax=lambda x: x.amax((2, 3)),
        maximum=lambda x: torch.maximum(x, torch.zeros(())),
        factories=lambda x: x[:, torch.arange(x.shape[1] // 2)],
    ),
]

FLOAT = [
    *calls(
        "float",
        SEQUENCE,
        floordiv=lambda x: x // 0.3,
        torch__floor_divide=lambda x: torch.floor_divide(x, 0.3),
        Tensor__floor_divide=lambda x: x.floor_divide(0.3),
        unknown_function=lambda x: torch.erf(x),
        unknown_method=lambda x: x.cumsum(1),
        unknown_attention=lambda x: F.glu(x, 1),
    ),
]

CASES = [*WEIGHTED, *ARITHMETIC, *NORMS, *POOLS, *ACTIVATIONS, *MOVED, *FLOAT]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
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
            if "computed" in model.case.id:
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
