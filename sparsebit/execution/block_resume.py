"""`Resume`: a folder in which each finished block is kept, so that a killed run continues after the last one.

`run.json` tells what the run is of; `00003.safetensors` holds what block 3 became, and the random state after it. Each
file appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, fx

from sparsebit.errors import CheckpointError
from sparsebit.execution.blocks import Block
from sparsebit.execution.distributed import gather, is_main_process, once, to_cpu
from sparsebit.folders import flush, staging_folder
from sparsebit.graph.nested import map_nested, tensors_of
from sparsebit.tensor_files import digest, load_tensors, save_tensors

_RUN, _FORMAT = "run.json", 2
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_STATE, _RANDOM = "state.", "random."


class Resume:
    """Finished blocks in `folder`: written by `state_of(block)`, read back by `load_state(block, state)`.

    What a visit changes must be in the state, and on several ranks be the same on all. `settings`: whatever decides the
    result besides model, data and blocks (the options of the algorithm). A folder of another run is an error.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state_of: Callable[[Block], Mapping[str, Tensor]],
        load_state: Callable[[Block, dict[str, Tensor]], None],
        settings: str = "",
    ) -> None:
        self.folder, self.settings = Path(folder), settings
        self.state_of, self.load_state = state_of, load_state
        self.num_finished = self._reached = 0
        self._key = ""

    def start(
        self,
        graph_module: fx.GraphModule,
        blocks: Sequence[Block],
        num_batches: int,
        inputs_of: Callable[[int], dict[str, Any]],
    ) -> None:
        """Begin a run, or continue the one in the folder."""
        parts = {
            "model": _model_digest(graph_module),
            "data": _hash("".join(gather(_data_digest(num_batches, inputs_of)))),
            "blocks": _hash(json.dumps([[block.name, [node.name for node in block.nodes]] for block in blocks])),
            "settings": _hash(self.settings),
        }
        self._key, self._reached = _hash(json.dumps(parts)), 0
        once(f"resume({self.folder.name!r})", lambda: self._open(parts))
        files = [self._path(number).is_file() for number in range(len(blocks))]
        self.num_finished = gather([*files, False].index(False))[0]  # rank 0's: it writes them

    def load(self, block: Block) -> bool:
        """Whether the next block is finished; then it is as its visit left it."""
        if self._reached >= self.num_finished:
            return False
        tensors = self._read(block) if is_main_process() else None
        tensors = gather(tensors)[0]
        assert tensors is not None
        self.load_state(block, {k.removeprefix(_STATE): t for k, t in tensors.items() if k.startswith(_STATE)})
        _restore_random_state(tensors)
        self._reached += 1
        return True

    def save(self, block: Block) -> None:
        """The visit of the next block is done."""
        state = {f"{_STATE}{name}": tensor for name, tensor in to_cpu(dict(self.state_of(block))).items()}
        for random in gather(_random_state()):
            state.update(random)
        once(f"resume({self.folder.name!r})", lambda: self._write(block, state))
        self._reached += 1

    def _open(self, parts: dict[str, str]) -> None:
        path = self.folder / _RUN
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                known, version = dict(found["parts"]), found["format"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path} is damaged ({error!r}); delete {self.folder} to begin anew") from None
            differing = [name for name, value in parts.items() if known.get(name) != value]
            if version != _FORMAT or differing:
                is_old = version != _FORMAT
                why = f"its format is {version}" if is_old else f"its {', '.join(differing)} differ"
                raise CheckpointError(
                    f"{self.folder} holds a run of something else: {why} (compared by checksums); start with the same "
                    "model, data, blocks and settings, give another folder, or delete this one to begin anew"
                )
            return
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.glob("*.safetensors"))):
            raise CheckpointError(f"{self.folder} is a file, or holds tensors of something else; give another folder")
        text = json.dumps({"format": _FORMAT, "parts": parts}, indent=1)
        self._publish(path, lambda staged: staged.write_text(text, encoding="utf-8"))

    def _write(self, block: Block, state: dict[str, Tensor]) -> None:
        metadata = {"run": self._key, "block": block.name, "sha256": digest(state)}
        self._publish(self._path(self._reached), lambda staged: save_tensors(state, staged, metadata))

    def _read(self, block: Block) -> dict[str, Tensor]:
        path = self._path(self._reached)
        tensors, metadata = load_tensors(path)
        if (metadata.get("run"), metadata.get("block")) != (self._key, block.name):
            raise CheckpointError(f"{path} is of another run or block; delete {self.folder} to begin anew")
        if metadata.get("sha256") != digest(tensors):
            raise CheckpointError(f"{path} is damaged (its checksum differs); delete it to visit the block again")
        return tensors

    def _publish(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file beside its place and move it there in one step."""
        try:
            with staging_folder(path) as folder:
                write(folder / path.name)
                flush(folder / path.name)
                os.replace(folder / path.name, path)
                flush(path.parent)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be written ({error}); blocks before it are kept") from error

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"


def _model_digest(graph_module: fx.GraphModule) -> str:
    tensors = {
        **dict(graph_module.named_parameters(remove_duplicate=False)),
        **dict(graph_module.named_buffers(remove_duplicate=False)),
    }
    nodes = [
        [node.op, str(node.name), _called(graph_module, node), str(node.args), str(node.kwargs)]
        for node in graph_module.graph.nodes
    ]
    return _hash(digest(tensors) + json.dumps(nodes))


def _called(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """What the node calls, with the settings of a module (a stride, a slope): parameters do not tell them."""
    if node.op != "call_module":
        return torch.typename(node.target)
    return _ADDRESS.sub("", repr(graph_module.get_submodule(str(node.target))))


def _data_digest(num_batches: int, inputs_of: Callable[[int], dict[str, Any]]) -> str:
    found = hashlib.sha256()
    for index in range(num_batches):
        given = inputs_of(index)
        found.update(digest({str(i): tensor for i, tensor in enumerate(tensors_of(given))}).encode())
        found.update(repr(map_nested(Tensor, lambda tensor: "a tensor", given)).encode())
    return found.hexdigest()


def _random_state() -> dict[str, Tensor]:
    """The state of torch's generators, by names of this rank's own."""
    rank = torch.distributed.get_rank() if _has_ranks() else 0
    state = {f"{_RANDOM}{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state |= {f"{_RANDOM}{rank}.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def _restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    rank = torch.distributed.get_rank() if _has_ranks() else 0
    for name, state in tensors.items():
        if name == f"{_RANDOM}{rank}.cpu":
            torch.set_rng_state(state)
        elif name.startswith(f"{_RANDOM}{rank}.cuda.") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, int(name.rpartition(".")[2]))


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
