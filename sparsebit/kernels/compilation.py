"""How the kernels are made visible to torch's compilers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

HAS_TRITON = find_spec("triton") is not None
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def shows_kernels(x: Tensor) -> bool:
    """Whether a compiler sees our kernels for such a tensor (`show_kernels`)."""
    return x.is_cuda and HAS_TRITON and x.dtype in KERNEL_DTYPES


def show_kernels(library: Any, name: str, function: Callable[..., Any], *, x_at: int) -> None:
    """Let compilers trace into the operator of that name if argument `x_at` is on a GPU.

    They trace `function` with `in_graph=True`, and launch its kernels as they launch their own, without calling
    Python.
    """

    def rule(mode: Any, operation: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not shows_kernels(args[x_at]):
            return mode.__torch_dispatch__(operation, types, args, kwargs)
        with mode:
            return function(*args, in_graph=True)

    torch.library.register_torch_dispatch(f"{library.ns}::{name}", FunctionalTensorMode, rule, lib=library)
