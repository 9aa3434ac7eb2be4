"""Which row an op of a model is, where its tensors are in a call, and how users add ops of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, fx, nn
from torch.nn.modules.padding import _ConstantPadNd
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.errors import ConfigError
from sparsebit.quantization.ops.rows import ROWS, OpKind, OpRow

# Source (module class, function, method's name) -> row. `register_qmodule` adds to it.
QMODULE_MAP: dict[Any, OpRow] = {source: row for row in ROWS for source in (*row.modules, *row.functions, *row.methods)}
_BY_NAME: dict[str, OpRow] = {name: row for row in ROWS for name in row.names}

Implementation = TypeVar("Implementation", bound=type[nn.Module])


def register_qmodule(
    sources: Sequence[Any],
    *,
    kind: OpKind | None = None,
    name: str | None = None,
    inputs: tuple[str, ...] = ("input",),
    weight: str | None = None,
) -> Callable[[Implementation], Implementation]:
    """File a `QuantOpr` subclass as the quantizable form of `sources`: module classes, functions, methods of tensors.

    A method is given as `torch.Tensor.erf` or by its name. The class says what the op is in `compute` (or `_forward`).

    Module classes named here are leaves of the capture. A Python function is one op where `torch.fx.wrap` says so, else
    the ops inside it are seen. `kind` defaults to UNARY, to MULTI for a `MultipleInputsQuantOpr` (name its `inputs`),
    and to WEIGHTED where `weight` names the op's weight.

    >>> import torch
    >>> from sparsebit.quantization.ops.quant_opr import QuantOpr
    >>> @register_qmodule(sources=[torch.erf])
    ... class QErf(QuantOpr):
    ...     def compute(self, x):
    ...         return torch.erf(x)
    """
    for source in sources:
        if not (isinstance(source, str) or callable(source)):
            raise ConfigError(
                f"register_qmodule: {source!r} is neither a module class, a function nor the name of a tensor's method"
            )

    # `torch.Tensor.erf` is the method that graphs call by its name.
    methods = [source.__name__ for source in sources if _is_method(source)]

    def file(implementation: Implementation) -> Implementation:
        if "_forward" in vars(implementation) and not {"compute", "forward"} & vars(implementation).keys():
            implementation.compute = vars(implementation)["_forward"]  # type: ignore[attr-defined]
        guess = OpKind.WEIGHTED if weight else getattr(implementation, "KIND", None)
        if guess is None:
            raise ConfigError(f"register_qmodule: {implementation!r} is no subclass of QuantOpr")
        row = OpRow(
            name or implementation.__name__.lower(),
            kind or guess,
            inputs=inputs,
            weight=weight,
            implementation=implementation,
        )
        QMODULE_MAP.update(dict.fromkeys([*sources, *methods], row))
        return implementation

    return file


def _is_method(source: Any) -> bool:
    name = getattr(source, "__name__", "")
    return not isinstance(source, (type, str)) and bool(name) and getattr(Tensor, name, None) is source


def registered_module_types() -> tuple[type[nn.Module], ...]:
    """Module classes that users registered: leaves of the capture."""
    return tuple(
        source
        for source, row in QMODULE_MAP.items()
        if row.implementation is not None and isinstance(source, type) and issubclass(source, nn.Module)
    )


def row_of(node: fx.Node, root: fx.GraphModule) -> OpRow | None:
    """The row of a graph node; None for an op that nobody registered."""
    if node.op == "call_module":
        return row_of_module(root.get_submodule(str(node.target)))
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


_GRID_KEEPERS = frozenset(
    {
        "max_pool",
        "adaptive_max_pool",
        "flatten",
        "unflatten",
        "reshape",
        "permute",
        "squeeze",
        "chunk",
        "getitem",
        "expand",
    }
    | {"roll", "identity", "dropout"}
)


def keeps_grid(row: OpRow, node: fx.Node, root: fx.GraphModule) -> bool:
    """Whether the op only moves, repeats or selects values or adds zeros, so that its output is on its input's grid."""
    if row.name == "upsample":
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        mode = getattr(module, "mode", None) if module is not None else node.kwargs.get("mode", "nearest")
        return bool(mode in ("nearest", "nearest-exact"))
    if row.name == "pad":
        return _pads_zeros(node, root)
    return row.name in _GRID_KEEPERS


def _pads_zeros(node: fx.Node, root: fx.GraphModule) -> bool:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return isinstance(module, _ConstantPadNd) and module.value == 0
    mode, value = (
        node.args[place] if len(node.args) > place else node.kwargs.get(name)
        for place, name in ((2, "mode"), (3, "value"))
    )
    return mode in (None, "constant") and value in (None, 0, 0.0)


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
    """Where the one input of a unary or weighted op is in a call. A module's parameters have names of its own."""
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
    """Where a function's bias is in a call; None where it has none."""
    if row.bias is None:
        return None
    place = row.bias if row.bias in kwargs else row.bias_position
    value = kwargs[place] if isinstance(place, str) else args[place] if place < len(args) else None
    return None if value is None else place
