"""A training step as one CUDA graph: the GPU runs it without waiting for Python to start its kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

LossOf = Callable[..., Tensor]


class CapturedStep:
    """Forward and backward of a batch, captured at the first call on a GPU and replayed afterwards.

    >>> step = CapturedStep(qmodel, lambda model, x, y: F.cross_entropy(model(x), y))  # doctest: +SKIP
    >>> for x, y in loader:  # doctest: +SKIP
    ...     loss = step(x, y)  # gradients are in their places, those of this batch alone
    ...     optimizer.step()

    `loss_of(model, *batch)` gives the loss, and is run by Python only for the capture: what it prints or counts happens
    once. `half`: autocast to that type. A batch of another shape (the last one of an epoch) is not captured but run as
    usual, and so is everything on a CPU. The loss that is returned is overwritten by the next call.

    Capture after `init_QAT`, and anew after anything that changes what is run: `freeze`, `set_quant`, folding.
    """

    WARM_UP = 3  # forwards and backwards before the capture, in which kernels are compiled and chosen

    def __init__(self, model: nn.Module, loss_of: LossOf, *, half: torch.dtype | None = None) -> None:
        self.model, self.loss_of, self.half = model, loss_of, half
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        if self.graph is None and all(tensor.is_cuda for tensor in batch):
            self._capture(batch)
        if self.graph is None or any(
            one.shape != other.shape or one.dtype != other.dtype for one, other in zip(batch, self.inputs, strict=True)
        ):
            for parameter in self.model.parameters():  # in place: the graph writes into these gradients
                if parameter.grad is not None:
                    parameter.grad.zero_()
            return self._run(batch)
        for one, other in zip(self.inputs, batch, strict=True):
            one.copy_(other)
        self.graph.replay()
        # An optimizer may have let go of some; a batch run as usual may have left more.
        for parameter, grad in self.grads:
            parameter.grad = grad
        return self.loss

    def _run(self, batch: tuple[Tensor, ...]) -> Tensor:
        device = batch[0].device.type
        with torch.autocast(device, self.half, enabled=self.half is not None, cache_enabled=False):
            loss = self.loss_of(self.model, *batch)
        loss.backward()
        return loss.detach()

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(tensor.clone() for tensor in batch)
        # Batch norms and the like count what is run on the way: it is undone.
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
