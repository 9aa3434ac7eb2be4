"""Calls CUDA's driver by ctypes: launches programs that torch has compiled, and makes tensor maps.

torch's own launcher takes longer to convert the arguments than short programs take to run. And it cannot start a
program while the one before it ends (`overlapped`), which speeds up a chain of short programs in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
_UINT16, _NOT_INTERLEAVED, _SWIZZLE_128, _L2_256, _ZEROS_OUTSIDE = 1, 0, 3, 3, 0  # of CUDA's enumerations
_TILE_BYTES = 128  # of a row: the part that is swizzled
_ALLOWS_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the kind, padded to 8 bytes, and a union of 64."""

    _fields_ = (("kind", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


Argument = Tensor | int | ctypes.Structure


class CompiledKernel:
    """A kernel of `torch.cuda._compile_kernel` with `shared` bytes of shared memory that the launch adds."""

    def __init__(self, kernel: Any, shared: int) -> None:
        if shared:
            kernel.set_shared_memory_config(shared)
        self.kernel, self.shared = kernel, shared

    def launch(
        self, grid: tuple[int, int, int], threads: int, values: Sequence[Argument], *, overlapped: bool = False
    ) -> None:
        """Run it on the current stream. `values`: tensors on the GPU, as pointers; numbers of 32 bits; structures.

        `overlapped`: the program may start before the previous one on the stream has ended. It must wait for that
        itself (`griddepcontrol.wait`) before it reads or writes anything that others write.
        """
        numbers = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
        slots = (ctypes.c_int64 * len(numbers))(*(number if isinstance(number, int) else 0 for number in numbers))
        start = ctypes.addressof(slots)
        places = (ctypes.c_void_p * len(numbers))(*range(start, start + 8 * len(numbers), 8))
        for index, number in enumerate(numbers):
            if not isinstance(number, int):
                places[index] = ctypes.addressof(number)
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        if overlapped:
            attribute = _Attribute(_ALLOWS_OVERLAP, 0, (ctypes.c_int * 16)(1))
            config = _Config(grid, (threads, 1, 1), self.shared, stream, ctypes.pointer(attribute), 1)
            check(driver().cuLaunchKernelEx(ctypes.byref(config), self.kernel.func, places, None))
        else:
            check(
                driver().cuLaunchKernel(
                    self.kernel.func, *grid, threads, 1, 1, self.shared, ctypes.c_void_p(stream), places, None
                )
            )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, launches go to this GPU; does nothing if they do already."""
    if device.index == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(device)


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")


class TensorMap(ctypes.Structure):
    """CUtensorMap: its fields are the driver's."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def rows_map(x: Tensor, height: int) -> TensorMap:
    """Tiles of `height` rows and 64 numbers of 16 bits of the matrix x, swizzled; rows after its last one are zero.

    x is contiguous and begins at a multiple of 16 bytes; a row has a multiple of 8 numbers.
    """
    room = (ctypes.c_char * (ctypes.sizeof(TensorMap) + _ALIGNMENT))()
    found = TensorMap.from_buffer(room, -ctypes.addressof(room) % _ALIGNMENT)
    num_rows, num_columns = x.shape
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.byref(found),
            _UINT16,
            2,
            ctypes.c_void_p(x.data_ptr()),
            (ctypes.c_uint64 * 2)(num_columns, num_rows),
            (ctypes.c_uint64 * 1)(num_columns * x.element_size()),
            (ctypes.c_uint32 * 2)(_TILE_BYTES // x.element_size(), height),
            (ctypes.c_uint32 * 2)(1, 1),
            _NOT_INTERLEAVED,
            _SWIZZLE_128,
            _L2_256,
            _ZEROS_OUTSIDE,
        )
    )
    return found
