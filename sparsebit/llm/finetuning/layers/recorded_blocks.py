"""Blocks under gradient checkpointing as CUDA graphs: a training step launches a few graphs, not thousands of kernels.

Python takes longer to launch the kernels of a small model's step than a GPU to run them. Each block is recorded twice
for each form of its inputs: its forward, and the forward of the checkpoint with the backward. Both read their inputs
from tensors that all blocks share, and write their outputs to such tensors, so that one block's inner memory
serves all. A block must not draw random numbers: its second forward would draw other ones.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sparsebit.llm.finetuning.layers.adapted_product import weights_kept
from sparsebit.llm.models.architectures import ARCHITECTURES

log = logging.getLogger(__name__)
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_TOLERANCE = 0.02  # relative, between a recording and what it was recorded from: 16-bit sums in another order
Checkpoint = Callable[..., Any]


def record_blocks(model: nn.Module, shape: tuple[int, int], device: torch.device) -> BlockRecorder | None:
    """Let the checkpointed blocks of `model` be recorded and replayed; None if it may draw random numbers.

    `shape`: rows and length of the recorded batches; others are computed as before. How a batch is computed depends
    only on the batch, not on earlier ones, so a resumed run has the same numbers.
    """
    if may_draw(model):
        return None
    recorder = BlockRecorder(shape, device)
    for part in model.modules():
        checkpoint = getattr(part, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            setattr(part, "_gradient_checkpointing_func", functools.partial(recorder.call, checkpoint))  # noqa: B010
    return recorder


def may_draw(model: nn.Module) -> bool:
    """Whether a forward in training mode may draw random numbers, by modules and config; unknown architectures may."""
    config: Any = getattr(model, "config", None)
    if config is None or str(config.model_type) not in ARCHITECTURES:
        return True
    return _has_rate(config.to_dict()) or any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())


def _has_rate(settings: Mapping[Any, Any]) -> bool:
    """Whether a setting with the name of something random is above 0."""
    return any(
        _has_rate(value)
        if isinstance(value, Mapping)
        else isinstance(value, (int, float)) and value > 0 and re.search("drop|jitter|noise", str(name)) is not None
        for name, value in settings.items()
    )


@dataclass(frozen=True)
class _Call:
    """The arguments of a block: tensors, the first of them the hidden states, and how they are put together again."""

    block: nn.Module
    tensors: tuple[Tensor, ...]
    rest: tuple[Any, ...]  # all arguments; a tensor is None here
    is_tensor: tuple[bool, ...]
    spec: TreeSpec

    @property
    def form(self) -> Hashable:
        """Equal for two calls that may share tensors."""
        shapes = tuple((one.shape, one.dtype, one.requires_grad) for one in self.tensors)
        return shapes, self.rest, self.is_tensor, str(self.spec)

    def answer(self, tensors: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Any:
        """The block's output with these tensors and parameters instead of its own."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else leaf for is_tensor, leaf in zip(self.is_tensor, self.rest, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        own = {f"block.{name}": value for name, value in parameters.items()}
        return functional_call(_Unchecked(self.block), own, args, kwargs)


class _Unchecked(nn.Module):
    """A block without its checkpoint."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


class BlockRecorder:
    """Replaces `torch.utils.checkpoint.checkpoint` in the blocks of one model. A block is recorded at its first call
    with a form of inputs, and computed as before if that fails, as with experts whose shapes depend on values.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.num_replays = 0
        self._recordings: dict[Hashable, _Recording] = {}
        self._buffers: dict[Hashable, _Buffers] = {}
        self._can_record = True
        is_cuda = device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if is_cuda else None
        # One for all: the memory of a recording serves those of the same stream alone.
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def call(self, checkpoint: Checkpoint, function: Any, *args: Any) -> Any:
        """`function`: the call of a block with its named arguments, as transformers hands it to a checkpoint."""
        call = self._call_of(function, args)
        if call is None:
            return checkpoint(function, *args)
        key = id(call.block), call.form
        recording = self._recordings.get(key) or self._recorded(call)
        if recording is None:
            return checkpoint(function, *args)
        self._recordings[key] = recording
        self.num_replays += 1
        return _Replayed.apply(recording, call.tensors[1:], call.tensors[0], *recording.parameters)  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """GPU memory that the recordings keep for the inside of a block; torch does not count it as used."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))

    def _call_of(self, function: Any, args: tuple[Any, ...]) -> _Call | None:
        """The call, if it can be recorded: of a module without hooks, with tensors and plain values."""
        block = getattr(getattr(function, "func", None), "__self__", None)
        is_block = isinstance(function, functools.partial) and isinstance(block, nn.Module)
        if not self._can_record or not is_block or function.args or not torch.is_grad_enabled():
            return None
        if torch.is_autocast_enabled(self.device.type) or torch._C._autograd._top_saved_tensors_default_hooks(False):
            return None
        hooks = block._forward_hooks, block._forward_pre_hooks, block._backward_hooks, block._backward_pre_hooks
        leaves, spec = tree_flatten((args, function.keywords))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        is_plain = all(type(leaf) in _PLAIN for leaf in rest) and all(type(one) is Tensor for one in tensors)
        takes = tensors and args and tensors[0] is args[0] and not any(one.requires_grad for one in tensors[1:])
        is_here = takes and tensors[0].device.type == self.device.type and tensors[0].shape[:2] == self.shape
        if any(hooks) or not is_plain or not is_here or any(one.device != args[0].device for one in tensors):
            return None
        return _Call(block, tensors, rest, tuple(isinstance(leaf, Tensor) for leaf in leaves), spec)

    def _recorded(self, call: _Call) -> _Recording | None:
        try:
            recording = _Recording(call, self._buffers.get(call.form), self._stream, self._pool)
        except (RuntimeError, _NotRecorded) as reason:
            self._can_record = False
            log.info("%s is not recorded as CUDA graphs: %s", type(call.block).__name__, str(reason).splitlines()[0])
            return None
        self._buffers[call.form] = recording.buffers
        return recording


class _NotRecorded(Exception):
    """A block cannot be recorded, with the reason."""


@dataclass(frozen=True)
class _Buffers:
    """Tensors that recordings use: inputs, the output, and gradients: of the output, hidden states, parameters."""

    inputs: tuple[Tensor, ...]
    output: Tensor
    of_output: Tensor
    of_hidden: Tensor | None
    of_parameters: Tensor


class _Computation:
    """A block on inputs with fixed addresses: its output, and the gradients of hidden states and parameters."""

    def __init__(self, call: _Call, inputs: Sequence[Tensor]) -> None:
        self.call, self.inputs = call, inputs
        self.named = {name: one for name, one in call.block.named_parameters() if one.requires_grad}
        self.needs_hidden = call.tensors[0].requires_grad

    def output(self) -> Tensor:
        return self._run()[1].detach()

    def gradients(self, of_output: Tensor) -> tuple[Tensor, ...]:
        with weights_kept():
            leaves, output = self._run()
            return torch.autograd.grad(output, leaves, of_output)

    def _run(self) -> tuple[list[Tensor], Tensor]:
        """The tensors whose gradients are computed, and the output."""
        hidden = self.inputs[0].detach().requires_grad_(self.needs_hidden)
        # Not the parameters themselves, but tensors in the same memory: autograd may know those from another stream.
        own = {name: one.detach().requires_grad_() for name, one in self.named.items()}
        with torch.enable_grad():
            output = self.call.answer([hidden, *self.inputs[1:]], own)
        if type(output) is not Tensor:
            raise _NotRecorded(f"it answers with a {type(output).__name__}, not a tensor")
        return [*([hidden] if self.needs_hidden else []), *own.values()], output


class _Recording:
    """One block for one form of inputs."""

    def __init__(self, call: _Call, buffers: _Buffers | None, stream: torch.cuda.Stream | None, pool: Any) -> None:
        inputs = tuple(torch.empty_like(one) for one in call.tensors) if buffers is None else buffers.inputs
        block = _Computation(call, inputs)
        self.parameters = list(block.named.values())
        if len({one.dtype for one in self.parameters}) != 1:
            raise _NotRecorded("its trained parameters do not have one type")
        _copy(inputs, call.tensors)
        with _on(stream):  # a first run, outside: kernels are compiled, and there is something to compare
            expected = block.output()
            of_expected = torch.randn(expected.shape, device=expected.device).to(expected.dtype)
            expected_gradients = block.gradients(of_expected)
        count, dtype = sum(one.numel() for one in self.parameters), self.parameters[0].dtype
        self.buffers = own = buffers or _Buffers(
            *(inputs, torch.empty_like(expected), torch.empty_like(expected)),
            torch.empty_like(inputs[0]) if block.needs_hidden else None,
            torch.empty(count, dtype=dtype, device=inputs[0].device),
        )
        if own.of_parameters.numel() != count:
            raise _NotRecorded("another block has other trained parameters")

        def write_output() -> None:
            own.output.copy_(block.output())

        def write_gradients() -> None:
            found = block.gradients(own.of_output)
            if own.of_hidden is not None:
                own.of_hidden.copy_(found[0])
            torch.cat([one.reshape(-1) for one in found[int(block.needs_hidden) :]], out=own.of_parameters)

        self._run_forward = _recorded(write_output, stream, pool)
        self._run_backward = _recorded(write_gradients, stream, pool)
        _compare([self.forward(call.tensors)], [expected])
        found = self.backward(call.tensors, of_expected)
        _compare([one for one in found if one is not None], expected_gradients)

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        _copy(self.buffers.inputs, tensors)
        self._run_forward()
        return self.buffers.output.clone()

    def backward(self, tensors: Sequence[Tensor], of_output: Tensor) -> list[Tensor | None]:
        """The gradients of the hidden states and of each parameter."""
        _copy([*self.buffers.inputs, self.buffers.of_output], [*tensors, of_output])
        self._run_backward()
        of_hidden = None if self.buffers.of_hidden is None else self.buffers.of_hidden.clone()
        parts = self.buffers.of_parameters.clone().split([one.numel() for one in self.parameters])
        return [of_hidden, *(part.view_as(one) for part, one in zip(parts, self.parameters, strict=True))]


class _Replayed(torch.autograd.Function):
    """A block by its recordings; keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, others: tuple[Tensor, ...], hidden: Tensor, *_: Tensor) -> Tensor:
        ctx.recording = recording
        ctx.save_for_backward(hidden, *others)
        return recording.forward([hidden, *others])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recording.backward(ctx.saved_tensors, of_output)


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Inside, work goes to that stream, after the current stream's work; the current stream then waits for it."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _recorded(function: Callable[[], None], stream: torch.cuda.Stream | None, pool: Any) -> Callable[[], None]:
    """The function as a CUDA graph; without a GPU the function itself, which has the same effect."""
    if stream is None:
        return function
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        function()
    replay: Callable[[], None] = graph.replay
    return replay


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        difference, size = (ours.float() - theirs.float()).norm(), theirs.float().norm()
        if not bool(difference <= _TOLERANCE * size):
            raise _NotRecorded(f"its recording differs from it by {float(difference / size):.2g}")
