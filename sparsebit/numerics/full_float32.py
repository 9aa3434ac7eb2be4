"""Float32 arithmetic in full: inside a block no convolution or product of float32 tensors uses TF32 or bfloat16."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

# (backend, op) of torch's settings; each has "ieee", "tf32", "bf16" or "none": the backend's own setting.
_OPS = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("conv", "rnn", "matmul"))
_LOCK = threading.Lock()
_num_open = 0
_before = contextlib.ExitStack()  # restores the user's settings when it is closed


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Inside, float32 convolutions, recurrent layers and matrix products round to 24 bits, on CPU and GPU.

    By default cuDNN rounds the inputs of float32 convolutions to TF32, of 11 bits: the same function in another order
    then differs by 1e-3, which is more than a comparison of float outputs allows. Afterwards, also after an error, the
    user's settings are restored. Also a decorator: `@full_float32()`.

    The settings are those of the whole process. Blocks may be nested and may overlap in several threads: the first one
    saves the settings, the last one restores them. Meanwhile other threads also compute in full float32, and a
    setting that they change is lost.

    >>> with full_float32():
    ...     torch.backends.cudnn.allow_tf32
    False
    """
    global _num_open
    with _LOCK:
        if not _num_open:
            _before.callback(_switch_off())
        _num_open += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_open -= 1
            if not _num_open:
                _before.close()


def _switch_off() -> Callable[[], None]:
    """Switch to full float32; returns a function that restores the settings.

    torch has old switches (`allow_tf32`, `set_float32_matmul_precision`) and newer settings for each op. Reading an old
    switch raises an error if the settings of its ops disagree. So the old ones are set where they can be read, which
    also sets their ops; after that the remaining ops are set.
    """
    before = {op: _precision(op) for op in _OPS}
    allows_tf32, product = _readable(torch._C._get_cudnn_allow_tf32), _readable(torch.get_float32_matmul_precision)
    with _no_words_about_old_switches():
        if allows_tf32:
            torch._C._set_cudnn_allow_tf32(False)
        if product not in (None, "highest"):
            torch.set_float32_matmul_precision("highest")
    for op in _OPS:
        if _precision(op) not in ("ieee", "none"):
            _set_precision(op, "ieee")

    def restore() -> None:
        with _no_words_about_old_switches():
            if allows_tf32:
                torch._C._set_cudnn_allow_tf32(True)
            if product not in (None, "highest"):
                torch.set_float32_matmul_precision(product)
        for op, precision in before.items():
            if _precision(op) != precision:
                _set_precision(op, "none")  # possibly its old value: the backend's precision
            if _precision(op) != precision:
                _set_precision(op, precision)

    return restore


def _readable(read: Callable[[], Any]) -> Any:
    """The value of an old switch; None if its ops have settings that it cannot express."""
    try:
        with _no_words_about_old_switches():
            return read()
    except RuntimeError:
        return None


@contextlib.contextmanager
def _no_words_about_old_switches() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _precision(op: tuple[str, str]) -> str:
    return str(torch._C._get_fp32_precision_getter(*op))


def _set_precision(op: tuple[str, str], precision: str) -> None:
    torch._C._set_fp32_precision_setter(*op, precision)
