"""Which row an op of a model is, and which arguments of a call are its input, weight and bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.nn.modules.padding import _ConstantPadNd
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.errors import ConfigError
from sparsebit.graph.nodes.graph_module import module_of
from sparsebit.graph.ops.op_rows import ROWS, OpRow


class OpTable(dict[Any, OpRow]):
    """Source (module class, function, method's name) -> row. `quantization.register_qmodule` adds to it."""

    def __setitem__(self, source: Any, row: OpRow) -> None:
        if not isinstance(row, OpRow):
            raise ConfigError(
                f"QMODULE_MAP[{source!r}] holds rows, not {row!r}: @register_qmodule(sources=[...]) on a class"
            )
        super().__setitem__(source, row)


QMODULE_MAP = OpTable({source: row for row in ROWS for source in (*row.modules, *row.functions, *row.methods)})
_BY_NAME: dict[str, OpRow] = {name: row for row in ROWS for name in row.names}


def row_of(node: fx.Node, root: fx.GraphModule) -> OpRow | None:
    """The row of a graph node; None for an op that is not registered."""
    if (module := module_of(node, root)) is not None:
        return row_of_module(module)
    if node.op in ("call_function", "call_method"):
        return QMODULE_MAP.get(node.target) or row_of_name(getattr(node.target, "__name__", ""))
    return None


def row_of_module(module: nn.Module) -> OpRow | None:
    """The row of a module's class, or of the nearest torch.nn base of a childless subclass (`Conv2dSame`)."""
    row = QMODULE_MAP.get(type(module)) or row_of_name(type(module).__name__)
    if row is not None or (any(True for _ in module.children()) and not is_parametrized(module)):
        return row
    return next((QMODULE_MAP[base] for base in type(module).__mro__ if base in QMODULE_MAP), None)


def row_of_name(name: str) -> OpRow | None:
    """The row of a class or function of a package that is not imported (`StochasticDepth`)."""
    return _BY_NAME.get(name)


_GRID_KEEPERS = frozenset({
    "max_pool", "adaptive_max_pool", "flatten", "unflatten", "reshape", "permute", "squeeze", "chunk", "getitem",
    "expand", "roll", "identity", "dropout",
})  # fmt: skip


def keeps_grid(row: OpRow, node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether the op only moves, repeats or selects values or adds zeros, so that its output is on its input's grid."""
    module = module_of(node, root)
    if row.name == "upsample":
        mode = node.kwargs.get("mode", "nearest") if module is None else getattr(module, "mode", None)
        return bool(mode in ("nearest", "nearest-exact"))
    if row.name != "pad":
        return row.name in _GRID_KEEPERS
    if module is not None:
        return isinstance(module, _ConstantPadNd) and module.value == 0
    given = {**dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)), **node.kwargs}
    return given.get("mode") in (None, "constant") and given.get("value") in (None, 0, 0.0)


def tensor_arguments(row: OpRow, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """The row's tensor inputs in a call, by position or name."""
    found: dict[int | str, Any] = {}
    for position, name in enumerate(row.inputs):
        if name.startswith("*"):
            found.update(enumerate(args[position:], position))
        elif name in kwargs:
            found[name] = kwargs[name]
        elif position < len(args) and name:
            found[position] = args[position]
    return found


def input_argument(row: OpRow, args: Sequence[Any], kwargs: dict[str, Any], *, is_module: bool) -> int | str | None:
    """Where the one input of a unary or weighted op is in a call; None if it is missing.

    For a module that is the first argument, because its forward may use any name for it.
    """
    known = next(iter(tensor_arguments(row, args, kwargs)), None)
    if known is not None or not is_module or not row.inputs:
        return known
    return 0 if args else next(iter(kwargs), None)


def weight_argument(row: OpRow, args: Sequence[Any], kwargs: dict[str, Any]) -> int | str | None:
    """Where a function's weight is in a call."""
    if row.weight in kwargs:
        return row.weight
    return row.weight_position if row.weight_position < len(args) else None


def bias_argument(row: OpRow, args: Sequence[Any], kwargs: dict[str, Any]) -> int | str | None:
    """Where a function's bias is in a call; None if it has no bias."""
    if row.bias is None:
        return None
    place = row.bias if row.bias in kwargs else row.bias_position
    value = kwargs[place] if isinstance(place, str) else args[place] if place < len(args) else None
    return None if value is None else place
