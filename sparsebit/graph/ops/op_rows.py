"""Every op that the methods know, a row each: its names as module, function and method, and where its tensors are.

An op is never reimplemented: a row only says where its tensors are, and the original module or function computes. So
arguments by position or by name, defaults and flags are honoured by construction.

To add an op, add a row to the tuple of its kind. `op_table.py` finds the row of a node; a row's `name` is what runtime
profiles, passes and plans refer to. An op with arithmetic of its own is registered with `register_qmodule` instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import dropout, padding

from sparsebit.graph.nodes.example import guard
from sparsebit.graph.nodes.value_kinds import copied
from sparsebit.graph.passes.decompose import attention_layout

Modules = tuple[type[nn.Module], ...]
Functions = tuple[Callable[..., Any], ...]


class OpKind(Enum):
    """How an op treats the values of its inputs, as far as quantization needs to know."""

    WEIGHTED = "weighted"  # quantizes its input and its weight
    UNARY = "unary"  # quantizes its one input
    MULTI = "multi"  # every tensor input is quantized before it
    TRANSPARENT = "transparent"  # moves or selects values: needs no quantizer
    PYTHON = "python"  # sizes, comparisons, casts: not part of the arithmetic
    FLOAT = "float"  # known, and kept in float


@dataclass(frozen=True)
class OpRow:
    """`inputs`: names of the leading parameters, "" for one that is not a quantizable tensor, a leading "*" for varargs
    (a list-valued one counts as several); `weight`, `bias`: their names, and their places among the function's
    parameters; `channel_axis`: the weight's output channels. `is_activation`: may be fused into the layer before it.
    `names`: classes and functions of packages that are not imported here.
    """

    name: str
    kind: OpKind
    modules: Modules = ()
    functions: Functions = ()
    methods: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("input",)
    weight: str | None = None
    weight_position: int = 1
    bias: str | None = None
    bias_position: int = 2
    channel_axis: int = 0
    is_activation: bool = False
    reason: str = ""
    names: tuple[str, ...] = ()
    implementation: type[nn.Module] | None = None


def _of(kind: OpKind, **more: Any) -> Callable[..., OpRow]:
    """Makes rows of one kind: `(name, modules, functions, methods)`."""

    def row(name: str, modules: Modules, functions: Functions = (), methods: tuple[str, ...] = ()) -> OpRow:
        return OpRow(name, kind, modules, functions, methods, **more)

    return row


_unary, _activation = _of(OpKind.UNARY), _of(OpKind.UNARY, is_activation=True)
_moving, _python = _of(OpKind.TRANSPARENT), _of(OpKind.PYTHON)
_binary, _joining = _of(OpKind.MULTI, inputs=("input", "other")), _of(OpKind.MULTI, inputs=("tensors",))

_WEIGHTED = (
    OpRow(
        "conv", OpKind.WEIGHTED, (nn.Conv1d, nn.Conv2d, nn.Conv3d), (F.conv1d, F.conv2d, F.conv3d),
        weight="weight", bias="bias",
    ),
    OpRow(
        "conv_transpose", OpKind.WEIGHTED,
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        weight="weight", channel_axis=1,
    ),
    OpRow("linear", OpKind.WEIGHTED, (nn.Linear,), (F.linear,), weight="weight", bias="bias"),
    OpRow("embedding", OpKind.WEIGHTED, (nn.Embedding,), (F.embedding,), inputs=(), weight="weight"),
    OpRow(
        "addmm", OpKind.WEIGHTED, (), (torch.addmm,), ("addmm",), inputs=("", "mat1"),
        weight="mat2", weight_position=2, bias="input", bias_position=0, channel_axis=1,
    ),
)  # fmt: skip

_ARITHMETIC = (
    _binary("add", (), (operator.add, operator.iadd, torch.add), ("add", "add_", "__add__", "__radd__", "__iadd__")),
    _binary(
        "sub", (), (operator.sub, operator.isub, torch.sub, torch.subtract, torch.rsub), ("sub", "sub_", "subtract")
    ),
    _binary("mul", (), (operator.mul, operator.imul, torch.mul, torch.multiply), ("mul", "mul_", "multiply")),
    _of(OpKind.MULTI, inputs=("input", ""))(  # the divisor stays in float (`quantization/planning/divisors.py`)
        "div", (), (operator.truediv, operator.itruediv, torch.div, torch.true_divide, torch.divide),
        ("div", "div_", "divide", "true_divide"),
    ),
    _binary("matmul", (), (operator.matmul, torch.matmul), ("matmul", "__matmul__")),
    _of(OpKind.MULTI, inputs=("input", "mat2"))("bmm", (), (torch.bmm, torch.mm), ("bmm", "mm")),
    _of(OpKind.MULTI, inputs=("input", "batch1", "batch2"))("baddbmm", (), (torch.baddbmm,), ("baddbmm",)),
    _of(OpKind.MULTI, inputs=("", "*operands"))("einsum", (), (torch.einsum,)),
    _of(OpKind.MULTI, inputs=("query", "key", "value"))("attention", (), (F.scaled_dot_product_attention,)),
    _joining("cat", (), (torch.cat, torch.concat, torch.concatenate)),
    _joining("stack", (), (torch.stack,)),
    _unary("mean", (), (torch.mean,), ("mean",)),
)  # fmt: skip

_NORMS = (
    _unary(
        "batch_norm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        (F.batch_norm, torch.batch_norm),
    ),
    _unary("layer_norm", (nn.LayerNorm,), (F.layer_norm, torch.layer_norm)),
    _unary("group_norm", (nn.GroupNorm,), (F.group_norm, torch.group_norm)),
    _unary(
        "instance_norm", (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        (F.instance_norm, torch.instance_norm),
    ),
    _unary("rms_norm", (nn.RMSNorm,), (F.rms_norm, torch.rms_norm)),
)  # fmt: skip

_POOLS = (
    _unary(
        "max_pool", (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        (
            F.max_pool1d, F.max_pool2d, F.max_pool3d,
            F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices,
            torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
        ),
    ),
    _unary("avg_pool", (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)),
    _unary(
        "adaptive_avg_pool", (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    ),
    _unary(
        "adaptive_max_pool", (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        (
            F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d,
            F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool3d_with_indices,
            torch.adaptive_max_pool1d,
        ),
    ),
    _unary("upsample", (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), (F.interpolate, F.upsample)),
)  # fmt: skip

_ACTIVATIONS = (
    _activation("relu", (nn.ReLU,), (F.relu, torch.relu, F.relu_, torch.relu_), ("relu", "relu_")),
    _activation("relu6", (nn.ReLU6,), (F.relu6,)),
    _activation("leaky_relu", (nn.LeakyReLU,), (F.leaky_relu, F.leaky_relu_)),
    _activation("prelu", (nn.PReLU,), (F.prelu, torch.prelu), ("prelu",)),
    _activation("elu", (nn.ELU, nn.SELU, nn.CELU), (F.elu, F.elu_, F.selu, F.celu, torch.selu, torch.celu)),
    _activation("sigmoid", (nn.Sigmoid,), (F.sigmoid, torch.sigmoid), ("sigmoid", "sigmoid_")),
    _activation("silu", (nn.SiLU,), (F.silu,)),
    _activation("gelu", (nn.GELU,), (F.gelu,)),
    _activation("mish", (nn.Mish,), (F.mish,)),
    _activation("hardsigmoid", (nn.Hardsigmoid,), (F.hardsigmoid,)),
    _activation("hardswish", (nn.Hardswish,), (F.hardswish,)),
    _activation("hardtanh", (nn.Hardtanh,), (F.hardtanh, F.hardtanh_)),
    _activation("tanh", (nn.Tanh,), (F.tanh, torch.tanh), ("tanh", "tanh_")),
    _activation("softplus", (nn.Softplus,), (F.softplus,)),
    _unary("softmax", (nn.Softmax, nn.Softmax2d), (F.softmax, torch.softmax), ("softmax",)),
    _unary("log_softmax", (nn.LogSoftmax,), (F.log_softmax, torch.log_softmax), ("log_softmax",)),
)

_MOVES = (
    _moving("flatten", (nn.Flatten,), (torch.flatten, torch.ravel), ("flatten", "ravel")),
    _moving("unflatten", (nn.Unflatten,), (torch.unflatten,), ("unflatten",)),
    _moving("reshape", (), (torch.reshape,), ("reshape", "view", "view_as", "reshape_as")),
    _moving(
        "chunk", (), (torch.chunk, torch.split, torch.split_with_sizes, torch.tensor_split, torch.unbind),
        ("chunk", "split", "split_with_sizes", "tensor_split", "unbind"),
    ),
    _moving(
        "expand", (), (torch.broadcast_to, torch.tile, torch.repeat_interleave),
        ("expand", "expand_as", "repeat", "tile", "broadcast_to", "repeat_interleave"),
    ),
    _moving(
        "permute", (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        (
            torch.transpose, torch.permute, torch.swapaxes, torch.movedim, torch.t,
            F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle,
        ),
        ("transpose", "permute", "swapaxes", "movedim", "t"),
    ),
    _moving("squeeze", (), (torch.squeeze, torch.unsqueeze), ("squeeze", "unsqueeze")),
    _moving(
        "pad", (padding._ConstantPadNd, padding._ReflectionPadNd, padding._ReplicationPadNd, padding._CircularPadNd),
        (F.pad,),
    ),
    _moving("roll", (), (torch.roll, torch.flip), ("roll", "flip")),
    _moving(
        "getitem", (), (operator.getitem, torch.select, torch.narrow, torch.index_select, torch.gather),
        ("select", "narrow", "index_select", "gather"),
    ),
    _moving("fold", (nn.Unfold, nn.Fold), (F.unfold, F.fold), ("unfold",)),
    _of(OpKind.TRANSPARENT, names=("StochasticDepth", "stochastic_depth", "DropPath", "drop_path"))(
        "dropout", (dropout._DropoutNd,),
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout),
    ),
    _moving(
        "identity", (nn.Identity,), (torch.clone, torch.detach, attention_layout, copied),
        ("clone", "contiguous", "detach", "to", "float", "double", "half", "bfloat16", "type_as", "cpu", "cuda"),
    ),
    _moving(
        "clamp", (), (torch.clamp, torch.clip, torch.clamp_min, torch.clamp_max),
        ("clamp", "clip", "clamp_", "clamp_min", "clamp_max"),
    ),
    _moving("where", (), (torch.where, torch.masked_fill), ("where", "masked_fill", "masked_fill_")),
    _moving(
        "max", (), (torch.max, torch.min, torch.maximum, torch.minimum, torch.amax, torch.amin),
        ("max", "min", "maximum", "minimum", "amax", "amin"),
    ),
    _moving("neg", (), (operator.neg, torch.neg), ("neg",)),
)  # fmt: skip

_PYTHON = (
    _python(
        "size", (), (getattr, guard, operator.mod, torch._assert, torch._shape_as_tensor), ("size", "dim", "numel")
    ),
    _python(
        "compare", (),
        (
            operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge,
            torch.eq, torch.ne, torch.lt, torch.gt, torch.le, torch.ge,
            operator.and_, operator.or_, operator.invert,
        ),
        ("eq", "ne", "lt", "gt", "le", "ge", "all", "any", "bool", "long", "int"),
    ),
    _python(
        "factory", (),
        (
            torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace, torch.eye,
            torch.zeros_like, torch.ones_like, torch.full_like, torch.meshgrid,
        ),
        ("new_zeros", "new_ones", "new_full"),
    ),
)  # fmt: skip

_FLOAT = (
    _of(OpKind.FLOAT, reason="floor division runs in float: a rounded input may change its result by a whole unit")(
        "floordiv", (), (operator.floordiv, torch.floor_divide), ("floor_divide",)
    ),
    _of(OpKind.FLOAT, reason="recurrent layers run in float; their neighbours are quantized")(
        "recurrent", (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    ),
    _of(OpKind.FLOAT, reason="embedding bags run in float")("embedding_bag", (nn.EmbeddingBag,), (F.embedding_bag,)),
    _of(OpKind.FLOAT, reason="attention with bias_kv or add_zero_attn runs in float as one piece")(
        "packed_attention", (nn.MultiheadAttention,)
    ),
)

ROWS: tuple[OpRow, ...] = (*_WEIGHTED, *_ARITHMETIC, *_NORMS, *_POOLS, *_ACTIVATIONS, *_MOVES, *_PYTHON, *_FLOAT)
