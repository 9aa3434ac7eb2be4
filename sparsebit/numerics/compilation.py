"""Getting along with torch's compilers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

Made = TypeVar("Made")
HAS_TRITON = find_spec("triton") is not None
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_exporting() -> bool:
    """Whether `torch.export` traces this. `torch.compiler.is_exporting()` of torch 2.11 says so of every compiler."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def shows_kernels(x: Tensor) -> bool:
    """Whether a compiler is shown our kernels for such a tensor (`show_kernels`)."""
    return x.is_cuda and HAS_TRITON and x.dtype in KERNEL_DTYPES


def made_aside(make: Callable[[], Made]) -> Made:
    """What an operator keeps for its next calls, made in a thread of its own.

    A compiler that is about to record a CUDA graph takes all memory of its own thread for the graph's.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(make).result()


def show_kernels(library: Any, name: str, function: Callable[..., Any], *, x_at: int) -> None:
    """A compiler looks into the operator of that name: where argument `x_at` is on a GPU, it sees what `function` does
    with `in_graph=True`, and starts the kernels in there as it does its own, without a detour through Python.
    """

    def rule(mode: Any, operation: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not shows_kernels(args[x_at]):
            return mode.__torch_dispatch__(operation, types, args, kwargs)
        with mode:
            return function(*args, in_graph=True)

    torch.library.register_torch_dispatch(f"{library.ns}::{name}", FunctionalTensorMode, rule, lib=library)
