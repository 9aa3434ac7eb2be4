"""`CapturedStep`: a training step as one CUDA graph, replayed without launching each kernel from Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebit.graph.values.nested import map_nested, tensors_of

log = logging.getLogger(__name__)

_WARM_UP = 3  # steps before the capture, in which kernels are compiled and chosen; they are undone


class CapturedStep:
    """`step(*values)`: the result of `learn(*values)`, a tensor; `learn` changes parameters and an optimizer's state.

    It is captured at the first call with tensors on a GPU, and must then depend on the tensors in `values`, on
    `parameters` and on other tensors that stay where they are, but on no other number that changes. Values of another
    form are run without the graph, and so is everything on a CPU, or if the capture fails.

    `parameters`: all that `learn` changes, before the first step; the optimizer's state is then zeros.
    """

    def __init__(
        self,
        learn: Callable[..., Tensor],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        is_wanted: bool = True,
    ) -> None:
        self._learn, self._parameters, self._optimizer = learn, parameters, optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_wanted = is_wanted and all(parameter.is_cuda for parameter in parameters)

    def __call__(self, *values: Any) -> Tensor:
        if self._is_wanted and all(tensor.is_cuda for tensor in tensors_of(values)):
            self._is_wanted = False
            self._capture(values)
        if self._graph is None or _form(values) != self._form:
            return self._learn(*values)
        for own, given in zip(self._inputs, tensors_of(values), strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._found

    def _capture(self, values: tuple[Any, ...]) -> None:
        values = map_nested(Tensor, torch.clone, values)
        self._inputs, self._form = tensors_of(values), _form(values)
        before = [parameter.detach().clone() for parameter in self._parameters]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._learn(*values)
        torch.cuda.current_stream().wait_stream(aside)
        self._restart(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._found = self._learn(*values)
        except RuntimeError as error:
            log.info("a training step could not be captured as a CUDA graph, and runs without: %s", error)
            self._restart(before)
        else:
            self._graph = graph

    @torch.no_grad()
    def _restart(self, before: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, before, strict=True):
            parameter.copy_(value)
        for tensor in tensors_of([list(state.values()) for state in self._optimizer.state.values()]):
            tensor.zero_()


def _form(values: tuple[Any, ...]) -> Any:
    """All that must stay the same for the graph to be replayed: shapes and types of tensors, and all other values."""
    return repr(map_nested(Tensor, lambda tensor: (tuple(tensor.shape), tensor.dtype), values))
