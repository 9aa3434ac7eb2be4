"""Every op that quantization knows, a row each: what it is called as module, function and method, and which inputs are tensors.

An op is never reimplemented: a row only says where its tensors are, and the original module or function computes. So
arguments by position or by name, defaults and flags are honoured by construction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.errors import ConfigError
from sparsebit.graph.example import guard


class OpKind(Enum):
    """How an op meets quantization."""

    WEIGHTED = "weighted"  # quantizes its input and its weight
    UNARY = "unary"  # quantizes its one input
    MULTI = "multi"  # every tensor input is quantized in front of it
    TRANSPARENT = "transparent"  # moves or selects values: needs no quantizer
    PYTHON = "python"  # sizes, comparisons, casts: not part of the arithmetic
    FLOAT = "float"  # known, and kept in float


@dataclass(frozen=True)
class OpRow:
    """`inputs`: names of the leading parameters, "" for one that is no quantizable tensor (a list-valued one counts as several);
    `weight`: the weight's name, and its place among the function's parameters; `channel_axis`: its output channels.

    `is_activation`: may be absorbed by the layer in front.
    """

    name: str
    kind: OpKind
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("input",)
    weight: str | None = None
    weight_position: int = 1
    channel_axis: int = 0
    is_activation: bool = False
    reason: str = ""
    implementation: type[nn.Module] | None = None


def tensor_arguments(row: OpRow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int | str, Any]]:
    """Where the row's tensor inputs are in a call: (position or name, value). Varargs (`torch.einsum`) take all that follow."""
    found: list[tuple[int | str, Any]] = []
    for position, name in enumerate(row.inputs):
        if name.startswith("*"):
            found.extend((index, args[index]) for index in range(position, len(args)))
        elif name in kwargs:
            found.append((name, kwargs[name]))
        elif position < len(args) and name:
            found.append((position, args[position]))
    return found


def weight_argument(row: OpRow, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Any] | None:
    """Where a function's weight is in a call."""
    if row.weight in kwargs:
        return row.weight, kwargs[row.weight]
    return (row.weight_position, args[row.weight_position]) if row.weight_position < len(args) else None


def _activation(name: str, modules: tuple[type[nn.Module], ...], functions: tuple[Callable[..., Any], ...], methods: tuple[str, ...] = ()) -> OpRow:
    return OpRow(name, OpKind.UNARY, modules, functions, methods, is_activation=True)


def _unary(name: str, modules: tuple[type[nn.Module], ...], functions: tuple[Callable[..., Any], ...], methods: tuple[str, ...] = ()) -> OpRow:
    return OpRow(name, OpKind.UNARY, modules, functions, methods)


def _transparent(name: str, modules: tuple[type[nn.Module], ...], functions: tuple[Callable[..., Any], ...], methods: tuple[str, ...] = ()) -> OpRow:
    return OpRow(name, OpKind.TRANSPARENT, modules, functions, methods)


def _two(name: str, functions: tuple[Callable[..., Any], ...], methods: tuple[str, ...]) -> OpRow:
    return OpRow(name, OpKind.MULTI, (), functions, methods, inputs=("input", "other"))


ROWS: tuple[OpRow, ...] = (
    # --- layers with a weight
    OpRow("conv", OpKind.WEIGHTED, (nn.Conv1d, nn.Conv2d, nn.Conv3d), (F.conv1d, F.conv2d, F.conv3d), weight="weight"),
    OpRow(
        "conv_transpose",
        OpKind.WEIGHTED,
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        weight="weight",
        channel_axis=1,
    ),
    OpRow("linear", OpKind.WEIGHTED, (nn.Linear,), (F.linear,), weight="weight"),
    OpRow("embedding", OpKind.WEIGHTED, (nn.Embedding,), (F.embedding,), inputs=(), weight="weight"),
    OpRow("addmm", OpKind.WEIGHTED, (), (torch.addmm,), ("addmm",), inputs=("", "mat1"), weight="mat2", weight_position=2, channel_axis=1),
    # --- arithmetic with several tensors
    _two("add", (operator.add, operator.iadd, torch.add), ("add", "add_", "__add__", "__radd__", "__iadd__")),
    _two("sub", (operator.sub, operator.isub, torch.sub, torch.subtract, torch.rsub), ("sub", "sub_", "subtract")),
    _two("mul", (operator.mul, operator.imul, torch.mul, torch.multiply), ("mul", "mul_", "multiply")),
    _two("div", (operator.truediv, operator.itruediv, torch.div, torch.true_divide, torch.divide), ("div", "div_", "divide", "true_divide")),
    _two("matmul", (operator.matmul, torch.matmul, torch.mm), ("matmul", "mm", "__matmul__")),
    OpRow("bmm", OpKind.MULTI, (), (torch.bmm,), ("bmm",), inputs=("input", "mat2")),
    OpRow("baddbmm", OpKind.MULTI, (), (torch.baddbmm,), ("baddbmm",), inputs=("input", "batch1", "batch2")),
    OpRow("einsum", OpKind.MULTI, (), (torch.einsum,), (), inputs=("", "*operands")),
    OpRow("attention", OpKind.MULTI, (), (F.scaled_dot_product_attention,), (), inputs=("query", "key", "value")),
    OpRow("cat", OpKind.MULTI, (), (torch.cat, torch.concat, torch.concatenate), (), inputs=("tensors",)),
    OpRow("stack", OpKind.MULTI, (), (torch.stack,), (), inputs=("tensors",)),
    # --- reductions and norms
    _unary("mean", (), (torch.mean,), ("mean",)),
    _unary("batch_norm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), (F.batch_norm,)),
    _unary("layer_norm", (nn.LayerNorm,), (F.layer_norm, torch.layer_norm)),
    _unary("group_norm", (nn.GroupNorm,), (F.group_norm, torch.group_norm)),
    _unary("instance_norm", (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), (F.instance_norm,)),
    _unary("rms_norm", (nn.RMSNorm,), (F.rms_norm,)),
    # --- pooling and resizing
    _unary("max_pool", (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), (F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)),
    _unary("avg_pool", (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)),
    _unary(
        "adaptive_avg_pool",
        (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    ),
    _unary(
        "adaptive_max_pool",
        (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    ),
    _unary("upsample", (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), (F.interpolate, F.upsample)),
    # --- activations
    _activation("relu", (nn.ReLU,), (F.relu, torch.relu, F.relu_, torch.relu_), ("relu", "relu_")),
    _activation("relu6", (nn.ReLU6,), (F.relu6,)),
    _activation("leaky_relu", (nn.LeakyReLU,), (F.leaky_relu,)),
    _activation("prelu", (nn.PReLU,), (F.prelu, torch.prelu), ("prelu",)),
    _activation("elu", (nn.ELU, nn.SELU, nn.CELU), (F.elu, F.selu, F.celu)),
    _activation("sigmoid", (nn.Sigmoid,), (F.sigmoid, torch.sigmoid), ("sigmoid", "sigmoid_")),
    _activation("silu", (nn.SiLU,), (F.silu,)),
    _activation("gelu", (nn.GELU,), (F.gelu,)),
    _activation("mish", (nn.Mish,), (F.mish,)),
    _activation("hardsigmoid", (nn.Hardsigmoid,), (F.hardsigmoid,)),
    _activation("hardswish", (nn.Hardswish,), (F.hardswish,)),
    _activation("hardtanh", (nn.Hardtanh,), (F.hardtanh,)),
    _activation("tanh", (nn.Tanh,), (F.tanh, torch.tanh), ("tanh", "tanh_")),
    _activation("softplus", (nn.Softplus,), (F.softplus,)),
    _unary("softmax", (nn.Softmax, nn.Softmax2d), (F.softmax, torch.softmax), ("softmax",)),
    _unary("log_softmax", (nn.LogSoftmax,), (F.log_softmax, torch.log_softmax), ("log_softmax",)),
    # --- values moved or selected
    _transparent("flatten", (nn.Flatten,), (torch.flatten,), ("flatten",)),
    _transparent("unflatten", (nn.Unflatten,), (torch.unflatten,), ("unflatten",)),
    _transparent("reshape", (), (torch.reshape,), ("reshape", "view", "view_as", "reshape_as")),
    _transparent("chunk", (), (torch.chunk, torch.split, torch.tensor_split, torch.unbind), ("chunk", "split", "tensor_split", "unbind")),
    _transparent("expand", (), (torch.broadcast_to, torch.tile, torch.repeat_interleave), ("expand", "expand_as", "repeat", "tile", "broadcast_to")),
    _transparent(
        "permute",
        (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        (torch.transpose, torch.permute, torch.swapaxes, torch.movedim, torch.t, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle),
        ("transpose", "permute", "swapaxes", "movedim", "t"),
    ),
    _transparent("squeeze", (), (torch.squeeze, torch.unsqueeze), ("squeeze", "unsqueeze")),
    _transparent("pad", (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d), (F.pad,)),
    _transparent("roll", (), (torch.roll, torch.flip), ("roll", "flip")),
    _transparent("getitem", (), (operator.getitem, torch.select, torch.narrow, torch.index_select, torch.gather), ("select", "narrow", "index_select", "gather")),
    _transparent("fold", (nn.Unfold, nn.Fold), (F.unfold, F.fold), ("unfold",)),
    _transparent("dropout", (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), (F.dropout, F.dropout2d, F.dropout3d)),
    _transparent("identity", (nn.Identity,), (torch.clone,), ("clone", "contiguous", "detach", "to", "float", "type_as", "cpu", "cuda")),
    _transparent("clamp", (), (torch.clamp, torch.clip), ("clamp", "clip", "clamp_")),
    _transparent("where", (), (torch.where, torch.masked_fill), ("where", "masked_fill", "masked_fill_")),
    OpRow("max", OpKind.TRANSPARENT, (), (torch.max, torch.maximum, torch.minimum, torch.amax), ("max", "amax"), reason="selects"),
    # --- not arithmetic of the network
    OpRow("size", OpKind.PYTHON, (), (getattr, guard, operator.floordiv, operator.mod, operator.neg, torch._assert, torch._shape_as_tensor), ("size", "dim", "numel", "floor_divide")),
    OpRow(
        "compare",
        OpKind.PYTHON,
        (),
        (operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge, torch.eq, torch.floor_divide, operator.and_, operator.or_, operator.invert),
        ("eq", "ne", "lt", "gt", "le", "ge", "all", "any", "bool", "long", "int"),
    ),
    OpRow("factory", OpKind.PYTHON, (), (torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.linspace, torch.eye, torch.zeros_like, torch.ones_like, torch.full_like, torch.meshgrid), ("new_zeros", "new_ones", "new_full")),
    # --- known, and float
    OpRow("recurrent", OpKind.FLOAT, (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell), reason="recurrent layers run in float; their neighbours are quantized"),
    OpRow("embedding_bag", OpKind.FLOAT, (nn.EmbeddingBag,), reason="embedding bags run in float"),
    OpRow("packed_attention", OpKind.FLOAT, (nn.MultiheadAttention,), reason="attention with bias_kv or add_zero_attn runs in float as one piece"),
)  # fmt: skip

# Source (module class, function, method name) -> row. `register_qmodule` adds to it.
QMODULE_MAP: dict[Any, OpRow] = {source: row for row in ROWS for source in (*row.modules, *row.functions, *row.methods)}


def register_qmodule(
    sources: Sequence[Any], *, kind: OpKind | None = None, name: str | None = None, inputs: tuple[str, ...] = ("input",), weight: str | None = None
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """File a `QuantOpr` subclass as the quantizable form of `sources`: module classes, functions, names of tensor methods.

    Module classes named here are leaves of the capture. `kind` defaults to UNARY, to MULTI for a `MultipleInputsQuantOpr`
    and to WEIGHTED where `weight` names the op's weight.

    >>> @register_qmodule(sources=[my_swish])
    ... class QMySwish(QuantOpr):
    ...     def compute(self, x, beta=1.0):
    ...         return x * torch.sigmoid(beta * x)
    """

    def file(implementation: type[nn.Module]) -> type[nn.Module]:
        if not (isinstance(implementation, type) and hasattr(implementation, "compute")):
            raise ConfigError(f"register_qmodule: {implementation!r} is no subclass of QuantOpr")
        several = any(base.__name__ == "MultipleInputsQuantOpr" for base in implementation.__mro__)
        guess = OpKind.WEIGHTED if weight else OpKind.MULTI if several else OpKind.UNARY
        row = OpRow(name or implementation.__name__.lower(), kind or guess, inputs=inputs, weight=weight, implementation=implementation)
        for source in sources:
            if not (isinstance(source, str) or callable(source)):
                raise ConfigError(f"register_qmodule: {source!r} is neither a module class, a function nor a method's name")
            QMODULE_MAP[source] = row
        return implementation

    return file


def registered_module_types() -> tuple[type[nn.Module], ...]:
    """Module classes that users registered: leaves of the capture."""
    return tuple(
        source for source, row in QMODULE_MAP.items() if row.implementation is not None and isinstance(source, type) and issubclass(source, nn.Module)
    )


def row_of_module(module: nn.Module) -> OpRow | None:
    """The row of a module's class, or of the nearest torch.nn base of a childless subclass (`Conv2dSame`)."""
    exact = QMODULE_MAP.get(type(module))
    if exact is not None or (any(True for _ in module.children()) and not is_parametrized(module)):
        return exact
    return next((QMODULE_MAP[base] for base in type(module).__mro__ if base in QMODULE_MAP), None)


def row_of(node: fx.Node, root: fx.GraphModule) -> OpRow | None:
    """The row of a graph node; None for an op that nobody registered."""
    if node.op == "call_module":
        return row_of_module(root.get_submodule(str(node.target)))
    if node.op in ("call_function", "call_method"):
        return QMODULE_MAP.get(node.target)
    return None
