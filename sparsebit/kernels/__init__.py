"""GPU kernels for fake-quant, in Triton. Importing this package registers them for CUDA tensors.

They are compiled at first use. Without Triton, plain torch runs, and a warning says so once.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from torch import Tensor

from sparsebit.numerics.fake_quant.dispatch import PLAIN, Kernels, register_kernels

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _gpu_kernels() -> Kernels:
    try:
        from sparsebit.kernels.fake_quant import KERNELS
    except ImportError as error:
        log.warning("fake-quant runs as plain torch on this GPU, several times slower: %s; pip install triton", error)
        return PLAIN
    register_kernels("cuda", KERNELS)  # the next calls go there directly
    return KERNELS


def _forward_on_gpu(*arguments: Any) -> Tensor:
    return _gpu_kernels().forward(*arguments)


def _backward_on_gpu(*arguments: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return _gpu_kernels().backward(*arguments)


register_kernels("cuda", Kernels(_forward_on_gpu, _backward_on_gpu))
