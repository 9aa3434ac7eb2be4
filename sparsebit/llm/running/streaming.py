"""`load_streamed`: runs a model larger than the device; each block is read when it is needed, one block ahead.

While a block computes, a thread reads the next one from the memory-mapped files and, for a GPU, copies it there on a
separate stream. After the last block comes the first again, for the next token. So two blocks are in memory, besides
embeddings, norms, the output layer and the cache of keys and values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.caching.cache_scheme import cache_codes
from sparsebit.llm.checkpoint.packed_source import PackedSource, packed_source
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.llm.models.skeleton import Skeleton, own_tensors, restore_buffers, set_tensor
from sparsebit.llm.running.loading import checked_skeleton, load_generation_config, pack_cache, read_layer


@dataclass
class StreamUsage:
    """The cost of streaming so far: blocks read, bytes read, and the largest size of blocks in memory at a time."""

    num_reads: int = 0
    num_bytes: int = 0
    peak_bytes: int = 0


@torch.no_grad()
def load_streamed(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    kv_cache: str = "folder",
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model of `folder`, packed or float, of which two blocks at a time are in memory.

    It computes the logits of `load`, and `generate` works; it is for inference only. `dtype` and `kv_cache` are
    as for `load`. `stream_usage(model)` returns the blocks and bytes read.
    """
    skeleton = checked_skeleton(folder, dtype, device, trust_remote_code=trust_remote_code)
    path = architecture_of(skeleton.model).blocks
    source, codes = packed_source(skeleton), cache_codes(skeleton, kv_cache)
    outside = [name for name in source.formats if not name.startswith(f"{path}.")]
    if outside:
        raise ConfigError(f"{outside[0]} is packed and in no block: this model cannot be streamed; load it whole")
    skeleton.fill("", without=[path])
    skeleton.model.tie_weights()
    for part in skeleton.model.get_submodule(path).modules():
        restore_buffers(skeleton.model, part, skeleton.device)
    load_generation_config(skeleton.model, skeleton.folder.path)
    skeleton.model.requires_grad_(False)
    pack_cache(skeleton.model, codes)
    skeleton.model._sparsebit_stream = _Stream(skeleton, source, path)
    return skeleton.model


def stream_usage(model: Any) -> StreamUsage:
    """The blocks and bytes read so far for a model of `load_streamed`."""
    if not hasattr(model, "_sparsebit_stream"):
        raise ConfigError("the model is not streamed; load it with sparsebit.llm.load_streamed")
    found: StreamUsage = model._sparsebit_stream.usage
    return found


@dataclass(frozen=True)
class _Block:
    """The weights of a block while it runs: tensors of its float modules, and whole packed layers, by name."""

    tensors: dict[str, Tensor]
    layers: dict[str, nn.Module]
    is_copied: Any  # an event of the stream that copies, or None

    def all_tensors(self) -> Iterator[Tensor]:
        yield from self.tensors.values()
        for layer in self.layers.values():
            yield from layer.parameters()
            yield from layer.buffers()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.all_tensors())


class _Stream:
    """Reads blocks ahead, puts them into the model before they run, and removes them afterwards."""

    def __init__(self, skeleton: Skeleton, source: PackedSource, path: str) -> None:
        self.skeleton, self.source, self.path = skeleton, source, path
        self.blocks = blocks_of(skeleton.model, architecture_of(skeleton.model))
        self.usage = StreamUsage()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sparsebit-blocks")
        self._ahead: dict[int, Future[_Block]] = {}
        self._held: dict[int, int] = {}  # bytes of the blocks in memory
        self._lock = threading.Lock()
        self._copies = torch.cuda.Stream(skeleton.device) if skeleton.device.type == "cuda" else None
        self._empty = {number: self._placeholders(number) for number in range(len(self.blocks))}
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._enter(number))
            block.register_forward_hook(lambda *_, number=number: self._leave(number), always_call=True)

    def _placeholders(self, number: int) -> _Block:
        """The block without weights: tensors on the meta device, and float layers in the places of packed ones."""
        tensors: dict[str, Tensor] = {}
        layers: dict[str, nn.Module] = {}
        path = f"{self.path}.{number}"
        for name, part in self.skeleton.model.get_submodule(path).named_modules(prefix=path):
            if name in self.source.formats:
                layers[name] = part
            else:
                own = own_tensors(part).items()
                tensors |= {f"{name}.{key}": tensor for key, tensor in own if tensor.is_meta}
        return _Block(tensors, layers, None)

    def _enter(self, number: int) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.blocks[number].parameters()):
            raise ConfigError("a streamed model is for inference alone; load it whole to train it")
        for other in [key for key in self._ahead if key != number]:  # left from an interrupted forward
            self._drop(self._ahead.pop(other), other)
        block = self._request(number).result()
        del self._ahead[number]
        if block.is_copied is not None:
            current = torch.cuda.current_stream(self.skeleton.device)
            current.wait_event(block.is_copied)
            for tensor in block.all_tensors():
                tensor.record_stream(current)
        self._put(block)
        if len(self.blocks) > 1:
            self._request((number + 1) % len(self.blocks))

    def _leave(self, number: int) -> None:
        self._put(self._empty[number])
        with self._lock:
            self._held.pop(number, None)

    def _drop(self, future: Future[_Block], number: int) -> None:
        if not future.cancel():
            future.exception()  # wait for the thread
        with self._lock:
            self._held.pop(number, None)

    def _request(self, number: int) -> Future[_Block]:
        if number not in self._ahead:
            self._ahead[number] = self._reader.submit(self._read, number)
        return self._ahead[number]

    def _put(self, block: _Block) -> None:
        model = self.skeleton.model
        for name, layer in block.layers.items():
            model.set_submodule(name, layer)
        for name, tensor in block.tensors.items():
            owner, _, own = name.rpartition(".")
            set_tensor(model.get_submodule(owner), own, tensor)

    @torch.no_grad()
    def _read(self, number: int) -> _Block:
        """Runs in the reader's thread, the only one that uses the files."""
        wanted, event = self._empty[number], None
        with torch.cuda.stream(self._copies):  # without effect on a CPU
            tensors = {name: self._moved(self.skeleton.read(name, tensor)) for name, tensor in wanted.tensors.items()}
            layers: dict[str, nn.Module] = {}
            for name, plain in wanted.layers.items():
                layers[name] = layer = read_layer(self.source, name, plain).eval()
                for own, tensor in own_tensors(layer).items():
                    set_tensor(layer, own, self._moved(tensor))
            if self._copies is not None:
                event = torch.cuda.Event()
                event.record(self._copies)
        self.skeleton.folder.close()
        block = _Block(tensors, layers, event)
        size = block.nbytes
        with self._lock:
            self._held[number] = size
            self.usage.num_reads += 1
            self.usage.num_bytes += size
            self.usage.peak_bytes = max(self.usage.peak_bytes, sum(self._held.values()))
        return block

    def _moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; on a CPU a copy, since a tensor of a mapped file is read only when it is used."""
        if self._copies is None:
            return tensor.clone()
        return tensor.pin_memory().to(self.skeleton.device, non_blocking=True)
