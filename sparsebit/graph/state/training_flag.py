"""`TrainingFlag`: the value of one module's `training` while its forward is traced."""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from sparsebit.graph.values.failures import forward_line, user_line


class TrainingFlag:
    """Passed on as an argument it is read at run time; as a condition it is False, as in eval mode, and is reported.

    A module without weights that branches on it is not traced: it runs its own code, in both modes.
    """

    def __init__(self, tracer: Any, path: str, owner: nn.Module) -> None:
        self.tracer, self.path = tracer, path
        self.is_stateless = is_stateless(owner)

    def __bool__(self) -> bool:
        note_eval_branch(self.tracer, self.path, self.is_stateless, user_line())
        return False


def _on_bool(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(bool(self), *others)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq, "hash": hash, "int": int, "index": int, "float": float, "str": str,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "rand": operator.and_, "ror": operator.or_, "rxor": operator.xor,
}  # fmt: skip
for _name, _function in _OPERATIONS.items():
    setattr(TrainingFlag, f"__{_name}__", _on_bool(_function))


def is_stateless(module: nn.Module) -> bool:
    return not module._modules and not module._parameters and not module._buffers


def note_eval_branch(tracer: Any, path: str, stateless: bool, line: str) -> None:
    if stateless:
        tracer.refuse("branches on self.training and has no weights: kept as it is for both modes")
    tracer.eval_branches.setdefault(path, line)


def note_identity_test(tracer: Any, path: str, module: nn.Module) -> None:
    """For a module that is given a real False because its code tests `self.training is False`."""
    if module.__dict__.get("training") is False:
        note_eval_branch(tracer, path, is_stateless(module), forward_line(module))


@functools.cache
def tests_identity(kind: Any) -> bool:
    """Whether a method of the class reads `training` and compares something with True or False by `is`.

    No object but False itself passes such a test.
    """
    own = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    members = (value for base in own for value in vars(base).values())
    return any(isinstance(value, types.FunctionType) and _tests_identity(value.__code__) for value in members)


def _tests_identity(code: types.CodeType) -> bool:
    pairs = itertools.pairwise(dis.get_instructions(code) if "training" in code.co_names else ())
    return any(type(first.argval) is bool and second.opname == "IS_OP" for first, second in pairs)
