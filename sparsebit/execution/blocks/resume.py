"""`Resume`: stores each finished block of `run_blocks`, with the random state after it, in a `RunFolder`.

A resumed run computes the same bits as one that was not interrupted. The folder is identified by digests of the model,
the data, the blocks and the algorithm's settings.
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
from torch import Tensor, fx

from sparsebit.execution.blocks.find_blocks import Block
from sparsebit.execution.distributed import gather, is_main_process, once, rank, to_cpu
from sparsebit.execution.run_folder import RunFolder
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.tensor_files import digest

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_STATE, _RANDOM = "state.", "random."
InputsOf = Callable[[int], dict[str, Any]]  # the graph's inputs of a batch, by name


class Resume:
    """Finished blocks in `folder`. `state_of(block)` is the state to store, `load_state(block, state)` restores it.

    The state holds everything that a visit changes, the same on all ranks. `settings`: everything that decides the
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
        self._run: RunFolder | None = None
        self._name = f"resume({self.folder.name!r})"

    def start(self, root: fx.GraphModule, blocks: Sequence[Block], num_batches: int, inputs_of: InputsOf) -> None:
        """Begin a run, or continue the one in the folder."""
        parts = {
            "model": _model_digest(root),
            "data": _hash("".join(gather(_data_digest(num_batches, inputs_of)))),
            "blocks": _hash(json.dumps([[block.name, [node.name for node in block.nodes]] for block in blocks])),
            "settings": _hash(self.settings),
        }
        self._run, self._reached = RunFolder(self.folder, parts), 0
        once(self._name, self._run.open)
        files = [self._run.file(number).is_file() for number in range(len(blocks))]
        self.num_finished = gather([*files, False].index(False))[0]  # rank 0's count, because rank 0 writes the files

    def load(self, block: Block) -> bool:
        """Load the next block as its visit left it, if it is finished; returns whether it is."""
        if self._reached >= self.num_finished:
            return False
        assert self._run is not None
        found = self._run.read(self._reached, {"block": block.name}) if is_main_process() else None
        found = gather(found)[0]
        assert found is not None
        tensors = found[0]
        self.load_state(block, {k.removeprefix(_STATE): t for k, t in tensors.items() if k.startswith(_STATE)})
        _restore_random_state(tensors)
        self._reached += 1
        return True

    def save(self, block: Block) -> None:
        """Store the next block after its visit."""
        run, number = self._run, self._reached
        assert run is not None
        state = {f"{_STATE}{name}": tensor for name, tensor in to_cpu(dict(self.state_of(block))).items()}
        for random in gather(_random_state()):
            state.update(random)
        once(self._name, lambda: run.write(number, state, {"block": block.name}))
        self._reached += 1


def _model_digest(graph_module: fx.GraphModule) -> str:
    parameters = dict(graph_module.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(graph_module.named_buffers(remove_duplicate=False))}
    nodes = [[n.op, n.name, _called(graph_module, n), str(n.args), str(n.kwargs)] for n in graph_module.graph.nodes]
    return _hash(digest(tensors) + json.dumps(nodes))


def _called(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """The callee of the node, with the settings of a module (a stride, a slope), which parameters do not hold."""
    if node.op != "call_module":
        return torch.typename(node.target)
    return _ADDRESS.sub("", repr(graph_module.get_submodule(str(node.target))))


def _data_digest(num_batches: int, inputs_of: InputsOf) -> str:
    found = hashlib.sha256()
    for index in range(num_batches):
        given = inputs_of(index)
        found.update(digest({str(i): tensor for i, tensor in enumerate(tensors_of(given))}).encode())
        found.update(repr(map_nested(Tensor, lambda tensor: "a tensor", given)).encode())
    return found.hexdigest()


def _random_state() -> dict[str, Tensor]:
    """The state of torch's generators, by names of this rank's own."""
    state = {f"{_RANDOM}{rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state |= {f"{_RANDOM}{rank()}.cuda.{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def _restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    for name, state in tensors.items():
        if name == f"{_RANDOM}{rank()}.cpu":
            torch.set_rng_state(state)
        elif name.startswith(f"{_RANDOM}{rank()}.cuda.") and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, int(name.rpartition(".")[2]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
