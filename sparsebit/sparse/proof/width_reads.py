"""Reads syntax trees of user code: may it use the width of a tensor as a number (`h / h.shape[1] ** 0.5`)?

`other_paths.py` asks this of branches that no run takes. `may_count` decides which of them are worth a forced run;
names in none of the tables below count as yes. `numbers_read` names the variables and dimensions whose size a branch
uses as a number; if the branch cannot be run, their channels are pinned. A size that only makes shapes, indices or
comparisons is not a number.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.sparse.proof.code_forks import FORK

# (variable, dimension); None: a dimension that is not known.
Read = tuple[str, int | None]

_SIZES = frozenset(("shape", "size", "numel", "nelement", "__len__"))
# Attributes of torch's modules that follow the channels.
_WIDTHS = frozenset((
    "in_features", "out_features", "in_channels", "out_channels", "num_features", "num_channels", "num_groups",
    "groups", "hidden_size", "input_size", "embedding_dim", "embed_dim", "num_heads", "head_dim", "num_parameters",
))  # fmt: skip
_COUNTING = frozenset((
    "mean", "var", "std", "norm", "softmax", "log_softmax", "softmin", "logsumexp", "layer_norm", "rms_norm",
    "normalize", "nanmean", "var_mean", "std_mean", "median", "topk", "sort", "prod", "argmax", "argmin", "amax",
))  # fmt: skip
_OF_NUMBERS = frozenset(("int", "float", "sqrt", "max", "min", "len", "size", "numel", "pow", "log", "log2", "abs"))
# Functions that take sizes as sizes: the result has as many elements as are given.
SIZING = frozenset((
    "view", "reshape", "expand", "repeat", "unflatten", "split", "split_with_sizes", "chunk", "zeros", "ones", "empty",
    "full", "new_zeros", "new_ones", "new_empty", "new_full", "arange", "range", "narrow", "rand", "randn", "unfold",
    "view_as", "expand_as", "broadcast_to", "print", "format", "pad", "warn", "len", "isinstance",
))  # fmt: skip
# Operators that treat all channels alike, and each by itself: without some of them, the others keep their values.
_HARMLESS = frozenset((
    "abs", "add", "add_", "addcmul", "bool", "bfloat16", "celu", "clamp", "clamp_", "clone", "contiguous", "cpu",
    "cuda", "detach", "dim", "div", "div_", "double", "dropout", "dropout_", "dropout2d", "elu", "erf", "exp", "float",
    "fill_", "gelu", "half", "hardsigmoid", "hardswish", "hardtanh", "int", "is_floating_point", "item", "leaky_relu",
    "long", "masked_fill", "masked_fill_", "mish", "mul", "mul_", "neg", "ndimension", "pow", "relu",
    "relu6", "relu_", "requires_grad_", "rsqrt", "selu", "sigmoid", "sigmoid_", "silu", "softplus", "sqrt", "square",
    "sub", "sub_", "tanh", "tanh_", "tensor", "to", "type", "type_as", "zero_", "zeros_like", "ones_like", "empty_like",
    "squeeze", "unsqueeze", "permute", "transpose", "t", "cat", "stack",
    "interpolate", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "conv1d", "conv2d", "conv3d", "linear",
    "batch_norm", "matmul", "checkpoint", "is_grad_enabled", "is_tensor", "is_available", "get_device",
))  # fmt: skip


def may_count(code: Iterable[ast.AST], sizes: Collection[str] = (), functions: Collection[str] = ()) -> bool:
    """Whether code may use the number of channels, or mix them: it reads a size, or calls an unknown function.

    `sizes`: variables that hold sizes. `functions`: names of the user's functions and modules.
    """
    return any(_counts(node, sizes, functions) for part in code for node in ast.walk(part))


def size_variables(function: ast.AST) -> frozenset[str]:
    """The variables of a function that hold sizes of tensors."""
    return frozenset(_size_names(function))


def _counts(node: ast.AST, sizes: Collection[str], functions: Collection[str]) -> bool:
    if isinstance(node, ast.Attribute):
        if node.attr in _SIZES or node.attr in _WIDTHS or node.attr in functions:
            return True
        is_function = isinstance(node.value, ast.Name) and node.value.id in ("torch", "F", "functional")
        return is_function and node.attr not in _HARMLESS and callable(getattr(F, node.attr, None))
    if isinstance(node, ast.Name):
        return node.id in sizes or node.id in functions
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in functions  # `getattr(self, "name")`
    if isinstance(node, ast.Subscript):
        return _is_part(node.slice)
    if isinstance(node, ast.BinOp):  # `h / self.width`
        return any(isinstance(side, ast.Attribute) for side in (node.left, node.right))
    if not isinstance(node, ast.Call):
        return False
    name = _called(node)
    if name in (FORK, *_HARMLESS):
        return False
    return name == "len" or hasattr(Tensor, name) or hasattr(F, name) or not _is_plain(name)


def _is_plain(name: str) -> bool:
    """Whether a function of Python or torch has nothing to do with the values of a tensor."""
    return name in SIZING or (hasattr(builtins, name) and name != "eval") or hasattr(torch, name)


def _is_part(index: ast.expr) -> bool:
    """Whether an index takes a part of a dimension other than the first: `h[:, :8]`, `h[..., 0]`."""
    items = index.elts if isinstance(index, ast.Tuple) else [index] if isinstance(index, ast.Slice) else []
    return any(
        (isinstance(one, ast.Slice) and (one.lower, one.upper, one.step) != (None, None, None))
        or (isinstance(one, ast.Constant) and type(one.value) is int)
        for one in items
    )


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def numbers_read(code: Iterable[ast.AST], function: ast.AST) -> set[Read]:
    """The sizes that code uses as numbers, and the dimensions whose channels it counts.

    A size that only makes shapes (`h.view(n, -1)`), indices or comparisons is not a number. `function`: the whole
    definition, where variables may get their values.
    """
    listed = list(code)
    names = _size_names(function)
    found: set[Read] = set()
    for part in listed:
        parents = {child: node for node in ast.walk(part) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(part):
            if isinstance(node, ast.Call) and _called(node) in _COUNTING:
                found |= set(_counted(node))
            reads = _reads(node, names)
            if reads and _is_number(node, parents, names):
                found |= reads
    return found


def _size_names(function: ast.AST) -> dict[str, set[Read]]:
    """The variables that hold sizes, and of what: `c = h.shape[1]`, `n, c = h.shape`, `scale = c ** -0.5`."""
    names: dict[str, set[Read]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and (whole := _whole_shape(value)):
            for place, one in enumerate(target.elts):
                if isinstance(one, ast.Name):
                    names.setdefault(one.id, set()).add((whole, place))
        elif isinstance(target, ast.Name) and _is_of_numbers(value, names):
            reads = {read for part in ast.walk(value) for read in _reads(part, names)}
            names.setdefault(target.id, set()).update(reads)
    return {name: reads for name, reads in names.items() if reads}


def _whole_shape(node: ast.AST) -> str | None:
    """The variable whose whole shape an expression is."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "size"
        and not node.args
    ):
        node = node.func
    is_shape = isinstance(node, ast.Attribute) and node.attr in ("shape", "size") and isinstance(node.value, ast.Name)
    return node.value.id if is_shape else None  # type: ignore[attr-defined]


def _reads(node: ast.AST, names: dict[str, set[Read]]) -> set[Read]:
    """The sizes that one expression is, by itself."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return names.get(node.id, set())
    if isinstance(node, ast.Subscript) and (whole := _whole_shape(node.value)):
        place = _whole_number(node.slice)
        return {(whole, place)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        if node.func.attr == "size" and node.args:
            return {(node.func.value.id, _whole_number(node.args[0]))}
        if node.func.attr in ("numel", "nelement"):
            return {(node.func.value.id, None)}
    if isinstance(node, ast.Call) and _called(node) == "len" and node.args and isinstance(node.args[0], ast.Name):
        return {(node.args[0].id, 0)}
    return set()


def _whole_number(node: ast.AST) -> int | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return value if isinstance(value, int) else None


def _is_of_numbers(node: ast.AST, names: dict[str, set[Read]]) -> bool:
    """Whether an expression holds sizes, constants and attributes alone, and so is a number."""
    if _reads(node, names) or isinstance(node, (ast.Constant, ast.operator, ast.unaryop, ast.Attribute)):
        return True
    if isinstance(node, ast.Call):
        return _called(node) in _OF_NUMBERS and all(_is_of_numbers(part, names) for part in node.args)
    is_arithmetic = isinstance(node, (ast.BinOp, ast.UnaryOp))
    return is_arithmetic and all(_is_of_numbers(part, names) for part in ast.iter_child_nodes(node))


def _is_number(node: ast.AST, parents: dict[ast.AST, ast.AST], names: dict[str, set[Read]]) -> bool:
    """Whether a size goes into arithmetic or a function, other than to make a shape."""
    is_used = False
    while (above := parents.get(node)) is not None:
        if isinstance(above, (ast.Compare, ast.JoinedStr, ast.Raise, ast.Assert)):
            return False
        if isinstance(above, ast.Subscript) and node is above.slice:
            return False
        if isinstance(above, ast.Call) and node is not above.func:
            if _called(above) in SIZING:
                return False
            is_used = True
        is_used = is_used or isinstance(above, ast.BinOp)
        if isinstance(above, ast.Assign) and _is_of_numbers(above.value, names):
            return False
        node = above
    return is_used


def _counted(node: ast.Call) -> Iterator[Read]:
    """The dimensions over which an operator counts: `h.mean(-1)`, `F.softmax(h, dim=1)`."""
    given = [keyword.value for keyword in node.keywords if keyword.arg == "dim"]
    receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
    places = list(node.args)
    if isinstance(receiver, ast.Name) and receiver.id not in ("torch", "F", "nn", "functional"):
        name = receiver.id
    elif places and isinstance(places[0], ast.Name):
        name = places.pop(0).id  # type: ignore[attr-defined]
    else:
        return
    if _called(node) in ("layer_norm", "rms_norm"):
        yield name, -1
        return
    where = given[0] if given else places[0] if places else ast.Constant(None)
    items = where.elts if isinstance(where, (ast.Tuple, ast.List)) else [where]
    for item in items:
        yield name, _whole_number(item)
