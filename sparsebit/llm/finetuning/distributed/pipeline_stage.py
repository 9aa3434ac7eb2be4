"""One stage of a pipeline: some neighbouring blocks of a model, with the embeddings or the output layer at its ends.

Each process only holds the weights of its own stage. The other blocks are placeholders without weights, so that names
and numbers of blocks are those of the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.checkpoint.packed_source import packed_source
from sparsebit.llm.finetuning.layers.packed_lora import blocks_path
from sparsebit.llm.layers.quant_linear import QuantLinear
from sparsebit.llm.models.architectures import architecture_of, blocks_of
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.process_group import Rank
from sparsebit.llm.running.loading import read_layer


class _LeftStage(Exception):
    """Ends a forward after the last block of the stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _OtherStage(nn.Module):
    """Replaces a block of another stage: before the stage, hidden states pass through; after it, the forward ends."""

    def __init__(self, block: nn.Module, *, is_behind: bool) -> None:
        super().__init__()
        self.is_behind = is_behind
        for name, value in vars(block).items():  # read by models, such as `attention_type`
            if not name.startswith("_") and isinstance(value, (str, int, bool)) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.is_behind:
            raise _LeftStage(hidden_states)
        return hidden_states


class PipelineStageModule(nn.Module):
    """`model`: of transformers, with the blocks of this stage. Tokens or hidden states in, hidden states or logits out.

    Hidden states are `(rows, length, channels)`; `positions` are given to every stage.
    """

    def __init__(self, model: Any, *, is_first: bool, is_last: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.model, self.is_first, self.is_last = model, is_first, is_last

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        if x.is_meta:  # torch asks for the shapes before the first step
            return self.output_like(x.shape, x.device)
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        if self.is_last:
            logits: Tensor = self.model(**given, position_ids=positions, use_cache=False).logits
            return logits
        try:
            self.model.base_model(**given, position_ids=positions, use_cache=False)
        except _LeftStage as left:
            return left.hidden
        raise AssertionError("the forward did not reach the next stage")

    def output_like(self, shape: Sequence[int], device: torch.device | str) -> Tensor:
        """An empty tensor like the stage's output for this many rows and tokens."""
        config = self.model.config.get_text_config()
        width = config.vocab_size if self.is_last else config.hidden_size
        return torch.empty(*shape[:2], width, dtype=self.dtype, device=device, requires_grad=True)


def stage_blocks(num_blocks: int, number: int, count: int) -> range:
    """The blocks of a stage; the first stages have one more if they cannot be equal.

    >>> [list(stage_blocks(5, number, 2)) for number in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    share, rest = divmod(num_blocks, count)
    start = number * share + min(number, rest)
    return range(start, start + share + (number < rest))


@torch.no_grad()
def load_stage(
    folder: str | os.PathLike[str], rank: Rank, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> PipelineStageModule:
    """The stage of this process, with the weights that it needs and no others."""
    files = ModelFolder(folder)
    files.check_files()
    skeleton = Skeleton(files, dtype=dtype, device=rank.device, trust_remote_code=trust_remote_code)
    model = skeleton.model
    architecture = architecture_of(model)
    blocks = blocks_of(model, architecture)
    if len(blocks) < rank.count:
        raise ConfigError(f"{len(blocks)} blocks for a pipeline of {rank.count} processes; start fewer")
    own = stage_blocks(len(blocks), rank.number, rank.count)
    is_first, is_last = rank.number == 0, rank.number == rank.count - 1
    source = packed_source(skeleton)
    for name in () if source is None else source.formats:
        if any(name.startswith(f"{architecture.blocks}.{number}.") for number in own):
            assert source is not None
            layer = read_layer(source, name, model.get_submodule(name)).to(rank.device)
            if isinstance(layer, QuantLinear):
                layer.prepare(dtype)
            model.set_submodule(name, layer)
    for number, block in enumerate(blocks):
        if number not in own:
            blocks[number] = _OtherStage(block, is_behind=number >= own.stop)
    skeleton.fill("", without=_unused(model, is_first=is_first, is_last=is_last))
    model.tie_weights()
    skeleton.folder.close()
    stage = PipelineStageModule(model, is_first=is_first, is_last=is_last, dtype=dtype)
    _check_embeddings(stage, own, dtype, rank.device)
    return stage


def _unused(model: Any, *, is_first: bool, is_last: bool) -> list[str]:
    """Paths of embeddings and output layer, if the stage does not need them; tied ones are on every stage."""
    if dict(model.all_tied_weights_keys):
        return []
    parts = {model.get_input_embeddings(): is_first, model.get_output_embeddings(): is_last}
    return [name for name, part in model.named_modules() if part in parts and not parts[part]]


@torch.no_grad()
def _check_embeddings(stage: PipelineStageModule, own: range, dtype: torch.dtype, device: torch.device) -> None:
    """Raise for a model that changes its embeddings before the blocks, as it would do so again on every stage."""
    if stage.is_first:
        return
    seen: list[Tensor] = []

    class _Seen(Exception):
        pass

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])
        raise _Seen

    model = stage.model
    hidden = torch.ones(1, 2, model.config.get_text_config().hidden_size, dtype=dtype, device=device)
    block = model.get_submodule(blocks_path(model))[own.start]
    hook = block.register_forward_pre_hook(look, with_kwargs=True)
    try:
        stage(hidden, positions=torch.arange(2, device=hidden.device)[None])
    except _Seen:
        pass
    finally:
        hook.remove()
    if not seen or not torch.equal(seen[0], hidden):
        raise ConfigError(
            f"{type(model).__name__} changes its embeddings before the first block: it cannot be cut into stages; "
            "train it with data parallel processes"
        )
