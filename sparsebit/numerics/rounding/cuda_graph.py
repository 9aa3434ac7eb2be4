"""`Replayed`: a function of tensors that is called many times; on a GPU its kernels are launched as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Replayed:
    """`function(*reads, *writes)` for tensors of the same shapes at each call; it only writes into `writes`.

    Small kernels take less time than their launches. The first call on a GPU runs directly, the second is recorded, and
    from then on only copies in and out are launched besides the graph. Tensors of other shapes run directly. The
    function must not wait for the GPU.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._form: list[torch.Size] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._own: list[Tensor] = []

    def __call__(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        tensors = [*reads, *writes]
        form = [tensor.shape for tensor in tensors]
        is_known, self._form = form == self._form, self._form or form
        if not is_known or not all(tensor.is_cuda for tensor in tensors) or torch.cuda.is_current_stream_capturing():
            self.function(*tensors)
            return
        if self._graph is None:
            self._graph = self._recorded(tensors)
        for own, tensor in zip(self._own, tensors, strict=True):
            own.copy_(tensor)
        self._graph.replay()
        for own, tensor in zip(self._own[len(reads) :], writes, strict=True):
            tensor.copy_(own)

    def _recorded(self, tensors: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Record without `torch.cuda.graph`, which frees all cached memory first: that takes longer than most loops."""
        self._own = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.device(tensors[0].device), torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.function(*self._own)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(tensors[0].device).wait_stream(stream)
        return graph
