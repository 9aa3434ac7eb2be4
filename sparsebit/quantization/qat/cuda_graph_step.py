"""A training step as one CUDA graph, replayed without launching each kernel from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LossOf = Callable[..., Tensor]


class CudaGraphStep:
    """Forward and backward of a batch, captured at the first call on a GPU and replayed afterwards.

    >>> step = CudaGraphStep(qmodel, lambda model, x, y: F.cross_entropy(model(x), y))  # doctest: +SKIP
    >>> for x, y in loader:  # doctest: +SKIP
    ...     loss = step(x, y)  # sets the gradients of this batch
    ...     optimizer.step()

    `loss_of(model, *batch)` returns the loss of a batch of tensors, or of dicts and lists of them. Python runs it for
    the capture only: its prints and counters run once. `half`: autocast to that type. A batch of another shape (the
    last one of an epoch) is run without the graph, and so is everything on a CPU. Gradients are those of the last
    batch; they do not accumulate. The next call overwrites the returned loss.

    Create it after `init_QAT`, and again after anything that changes the computation: `freeze`, `set_quant`, folding.
    """

    WARM_UP = 3  # forwards and backwards before the capture, in which kernels are compiled and chosen

    def __init__(self, model: nn.Module, loss_of: LossOf, *, half: torch.dtype | None = None) -> None:
        self.model, self.loss_of, self.half = model, loss_of, half
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Any) -> Tensor:
        if self.graph is None and all(tensor.is_cuda for tensor in _tensors(batch)):
            self._capture(batch)
        if self.graph is None or _form(batch) != _form(self.inputs):
            for parameter in self.model.parameters():
                if not parameter.requires_grad:  # frozen since the capture: an optimizer skips it if it has no gradient
                    parameter.grad = None
                elif parameter.grad is not None:  # in place: the graph writes into it
                    parameter.grad.zero_()
            return self._run(batch)
        for one, other in zip(_tensors(self.inputs), _tensors(batch), strict=True):
            one.copy_(other)
        self.graph.replay()
        # The graph writes into the captured gradient tensors. `zero_grad(set_to_none=True)` may have removed some of
        # them, and a batch that ran without the graph may have put others in their place.
        for parameter, grad in self.grads:
            parameter.grad = grad
        return self.loss

    def _run(self, batch: tuple[Any, ...]) -> Tensor:
        device = next(tensor.device.type for tensor in _tensors(batch))
        with torch.autocast(device, self.half, enabled=self.half is not None, cache_enabled=False):
            loss = self.loss_of(self.model, *batch)
        loss.backward()
        return loss.detach()

    def _capture(self, batch: tuple[Any, ...]) -> None:
        self.inputs = pytree.tree_map_only(Tensor, torch.clone, batch)
        # The warm-up updates buffers (statistics of batch norms), so they are restored afterwards.
        buffers = {buffer: buffer.clone() for buffer in self.model.buffers()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self.WARM_UP):
                self.model.zero_grad(set_to_none=True)
                self._run(self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self.model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.loss = self._run(self.inputs)
        finally:
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)
        self.grads = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        self.graph = graph


CapturedStep = CudaGraphStep  # its former name


def _tensors(batch: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _form(batch: tuple[Any, ...]) -> Any:
    """A key that must stay the same for the graph to be replayed: shapes and types of tensors, and all other values."""
    leaves, structure = pytree.tree_flatten(batch)
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
