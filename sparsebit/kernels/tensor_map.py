"""Descriptions of matrices for the unit of Hopper GPUs that copies tiles of them into shared memory."""

from __future__ import annotations

import ctypes

from torch import Tensor

from sparsebit.kernels.launching import check, driver

_ALIGNMENT = 64
_UINT16, _NOT_INTERLEAVED, _SWIZZLE_128, _L2_256, _ZEROS_OUTSIDE = 1, 0, 3, 3, 0  # of CUDA's enumerations
_TILE_BYTES = 128  # of a row: what is swizzled


class TensorMap(ctypes.Structure):
    """CUtensorMap: its fields are the driver's."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def rows_map(x: Tensor, height: int) -> TensorMap:
    """Tiles of `height` rows and 64 numbers of 16 bits of the matrix x, swizzled; rows behind its last are zero.

    x is in one piece and begins at a multiple of 16 bytes; a row has a multiple of 8 numbers.
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
