"""Training with sharded blocks (FSDP2): each process keeps a share of every tensor of every block.

Packed words are integer buffers, which `fully_shard` would leave whole on each process. So they first become frozen
parameters: it shards these, whatever their type, and gathers a block's tensors while the block computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.sample_packing import Batch, make_batch
from sparsebit.llm.finetuning.layers.packed_lora import blocks_path
from sparsebit.llm.finetuning.training_loop import (
    OPTIMIZERS,
    TrainingLoop,
    TrainingState,
    clip_over_processes,
    newest_state,
    save_state,
)
from sparsebit.llm.finetuning.tuning import Tuning
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.process_group import Rank


class ShardedTraining(TrainingLoop):
    """The share of this process: of the blocks, of the adapters in them and of the optimizer's state."""

    can_record = False  # the weights of a block are elsewhere in each step

    def __init__(
        self, backbone: Any, samples: Sequence[Sample], tuning: Tuning, rank: Rank, pad_token: int, base: str
    ) -> None:
        if OPTIMIZERS.get(tuning.optimizer) is not None:
            raise ConfigError(f"optimizer={tuning.optimizer!r} with fsdp: bitsandbytes takes no shards; use 'adamw'")
        super().__init__(backbone, samples, tuning, rank, pad_token, base)

    def place(self) -> None:
        """Move one block after another to the device and keep the share of this process there."""
        shard_blocks(self.model, self.rank)

    def parts_of(self, number: int) -> list[tuple[int, Batch]]:
        """The same number for each process, because computing a block needs communication between all of them."""
        found = super().parts_of(number)
        rows, size = self.steps[number], self.tuning.micro_batch_size
        most = -(-len(rows) // (size * self.rank.count))
        while len(found) < most:  # nothing is learned from it
            found.append((len(rows), make_batch(self.samples, [[]], self.pad_token, width=2)))
        return found

    def add_up(self, loss: Tensor) -> Tensor:
        """The gradients were summed while they were computed."""
        dist.all_reduce(loss)
        return loss

    def clip(self) -> None:
        """Clip to the norm over the shares of all processes."""
        gradients = [local(one.grad) for one in self.parameters.values() if one.grad is not None]
        clip_over_processes(gradients, self.tuning.max_grad_norm, self.rank.device)

    def resume(self, folder: Path) -> int:
        """Load the newest state, which has the form of a training without shards."""
        parameters, found = self.parameters, self.rank.from_first(lambda: newest_state(folder, self.optimizer))
        if found is None:
            return 0
        values = {name: _shard(value, parameters.get(name)) for name, value in found.parameters.items()}
        entries = {
            index: {key: _shard(value, one) for key, value in found.optimizer["state"].get(index, {}).items()}
            for index, one in enumerate(parameters.values())
        }
        optimizer = {**found.optimizer, "state": entries}
        return self.continue_from(replace(found, parameters=values, optimizer=optimizer))

    def keep(self, folder: Path, step: int) -> None:
        state = self.state(step)  # all processes take part in it
        if self.rank.is_first:
            save_state(folder, state)

    def state(self, step: int) -> TrainingState:
        optimizer = self.optimizer.state_dict()
        entries = {index: {key: _whole(one) for key, one in own.items()} for index, own in optimizer["state"].items()}
        values = {name: _whole(one.detach()) for name, one in self.parameters.items()}
        return TrainingState(step, tuple(self.losses), values, {**optimizer, "state": entries})

    def adapter_tensors(self) -> dict[str, Tensor] | None:
        return {f"base_model.model.{name}": _whole(one.detach()).cpu() for name, one in self.parameters.items()}


def shard_blocks(model: Any, rank: Rank) -> None:
    """Shard each block of the model over all processes, with the adapters in it; the rest stays whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.count,))
    blocks: Any = model.get_submodule(blocks_path(model))
    for block in blocks:
        block.to(rank.device)  # here packed layers choose their kernel
        for part in [part for part in block.modules() if isinstance(part, QuantLinear)]:
            for name, tensor in list(part.named_buffers(recurse=False)):  # read under the same names afterwards
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=False))
        fully_shard(block, mesh=mesh)
    model.to(rank.device)
    # Sharding the decoder, which has no parameters of its own, lets blocks be gathered while the previous one runs.
    inner = {id(one) for block in blocks for one in block.parameters()}
    outer = {one for one in model.parameters() if id(one) not in inner}
    fully_shard(model.base_model, mesh=mesh, ignored_params=outer)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # sums, as in one process, and not means
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def local(tensor: Any) -> Tensor:
    """The part of a tensor on this process: its share, or all of one that is not sharded."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _whole(value: Any) -> Any:
    """A sharded tensor in one piece, on every process; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _shard(value: Any, like: Any) -> Any:
    """A whole tensor as `like` is sharded, if both have one shape; anything else as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
