"""`register_qmodule`: how users add their own ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.first_sparsebit import refuse_former_methods
from sparsebit.graph.ops.op_rows import OpKind, OpRow
from sparsebit.graph.ops.op_table import QMODULE_MAP

Implementation = TypeVar("Implementation", bound=type[nn.Module])


def register_qmodule(
    sources: Sequence[Any],
    *,
    kind: OpKind | None = None,
    name: str | None = None,
    inputs: tuple[str, ...] = ("input",),
    weight: str | None = None,
) -> Callable[[Implementation], Implementation]:
    """Register a `QuantOpr` subclass as the quantizable form of `sources`: module classes, functions, tensor methods.

    A method is given as `torch.Tensor.erf` or by its name. The class defines the op in `compute` (or `_forward`).

    Module classes named here are leaves of the capture. A Python function is one op if `torch.fx.wrap` marks it so,
    otherwise the ops inside it are captured. `kind` defaults to UNARY, to MULTI for a `MultipleInputsQuantOpr` (name
    its `inputs`), and to WEIGHTED if `weight` names the op's weight.

    >>> import torch
    >>> from sparsebit.quantization.ops.quant_opr import QuantOpr
    >>> @register_qmodule(sources=[torch.erf])
    ... class QErf(QuantOpr):
    ...     def compute(self, x):
    ...         return torch.erf(x)
    """
    # `torch.Tensor.erf` is the method that graphs call by its name.
    methods = [source.__name__ for source in sources if _is_method(source)]

    def decorate(implementation: Implementation) -> Implementation:
        refuse_former_methods(implementation, "build_quantizer", "prepare_input_quantizer")
        if "_forward" in vars(implementation) and not {"compute", "forward"} & vars(implementation).keys():
            implementation.compute = vars(implementation)["_forward"]  # type: ignore[attr-defined]
        guess = OpKind.WEIGHTED if weight else getattr(implementation, "KIND", None)
        if guess is None or not all(isinstance(source, str) or callable(source) for source in sources):
            raise ConfigError(
                f"register_qmodule({list(sources)}) on {implementation!r}: allowed: module classes, functions and "
                "names of a tensor's methods, on a subclass of QuantOpr"
            )
        name_of_op = name or implementation.__name__.lower()
        row = OpRow(name_of_op, kind or guess, inputs=inputs, weight=weight, implementation=implementation)
        QMODULE_MAP.update(dict.fromkeys([*sources, *methods], row))
        return implementation

    return decorate


def _is_method(source: Any) -> bool:
    name = getattr(source, "__name__", "")
    return not isinstance(source, (type, str)) and bool(name) and getattr(Tensor, name, None) is source


def registered_module_types() -> tuple[type[nn.Module], ...]:
    """Module classes that users registered: leaves of the capture."""
    found = [source for source, row in QMODULE_MAP.items() if row.implementation is not None]
    return tuple(source for source in found if isinstance(source, type) and issubclass(source, nn.Module))
