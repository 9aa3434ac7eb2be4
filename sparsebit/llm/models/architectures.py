"""The path of a decoder's blocks and the order in which their linear layers are quantized: a row per architecture.

The names are those of the modules of transformers 5. A row contains the path of the list of blocks, the linear layers
of a block in stages (layers of one stage read the same input), and which of them servers fuse into one matrix, so that
their number formats must be equal. Experts (`separate_experts.py`) are one entry for the stages of all of
them. An architecture without a row is examined: its blocks are the longest list of modules of
one class, and its stages are found by running a block.

>>> ARCHITECTURES["llama"].stages[0]
('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj')
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError
from sparsebit.llm.models.linear_layers import is_linear
from sparsebit.llm.models.separate_experts import experts_in

Stages = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Architecture:
    """`blocks`: the path of the list of blocks. `stages`: None if they are found by running a block.

    `fused`: linear layers that servers fuse; default: those of each stage.
    """

    blocks: str
    stages: Stages | None = None
    fused: Stages | None = None

    def stages_in(self, block: nn.Module) -> Stages | None:
        """The stages of one block, experts by name; None, if the row does not list them.

        Blocks differ: one has experts where another has an MLP. A stage that the block lacks is left out.
        """
        if self.stages is None:
            return None
        experts, known = experts_in(block), linears(block)
        found: list[tuple[str, ...]] = []
        for stage in self.stages:
            if stage[0] in experts:
                found += experts[stage[0]].stages(stage[0])
            elif all(name in known for name in stage):
                found.append(stage)
        left = known.keys() - {name for stage in found for name in stage}
        if left:
            missing = [name for stage in self.stages for name in stage if name not in known and name not in experts]
            raise ConfigError(
                f"{type(block).__name__} has no linear layers {', '.join(missing)}, which its row in "
                f"sparsebit/llm/models/architectures.py names; it has {', '.join(known)}"
            )
        return tuple(found)

    def fused_groups(self, stages: Stages) -> Stages:
        """Groups of two or more linear layers of a block whose number formats must be equal."""
        return tuple(group for group in (stages if self.fused is None else self.fused) if len(group) > 1)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_QKV_O = (_QKV, ("self_attn.o_proj",))
_GATED = Architecture(
    "model.layers",
    (*_QKV_O, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)),
)
# Some blocks of Qwen3-MoE have an MLP instead of experts.
_EXPERTS = Architecture(
    "model.layers",
    (*_QKV_O, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",), ("mlp.experts",)),
)
_PHI = Architecture(  # attention and MLP read the same normalized input
    "model.layers",
    ((*_QKV, "mlp.fc1"), ("self_attn.dense",), ("mlp.fc2",)),
    fused=(_QKV,),
)
_PHI3 = Architecture(
    "model.layers",
    (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",)),
)
_NEOX = Architecture(
    "gpt_neox.layers",
    (("attention.query_key_value",), ("attention.dense",), ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
)
_OPT = Architecture(
    "model.decoder.layers",
    (_QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",)),
)

# By `model_type` of the model's config.json.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gemma": _GATED,
    "gemma2": _GATED,
    "gemma3_text": _GATED,
    "phi": _PHI,
    "phi3": _PHI3,
    "gpt_neox": _NEOX,
    "opt": _OPT,
}


def architecture_of(model: nn.Module) -> Architecture:
    """The row of the model's architecture; without a row, the path of its blocks, found by examining its modules."""
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    row = ARCHITECTURES.get(str(model_type))
    if row is None:
        return Architecture(_longest_list(model, str(model_type)))
    for block in blocks_of(model, row):
        row.stages_in(block)
    return row


def blocks_of(model: nn.Module, architecture: Architecture) -> nn.ModuleList:
    """The blocks of the model, in order."""
    blocks = model.get_submodule(architecture.blocks)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise ConfigError(f"{architecture.blocks} of {type(model).__name__} is not a list of one block or more")
    return blocks


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    """The plain linear layers of a block by name. Raises for stacked weights, which would silently stay float.

    Convolutions over neighbouring tokens, as in linear attention, are small and stay float.
    """
    experts = [
        name
        for name, parameter in block.named_parameters()
        if parameter.ndim > 2 and not isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
    ]
    if experts:
        raise ConfigError(
            f"{type(block).__name__} has stacked weights ({', '.join(experts)}): only fused experts whose files hold a "
            "matrix for each expert are supported, without biases; this architecture cannot be quantized yet"
        )
    return {name: module for name, module in block.named_modules() if is_linear(module)}


def passes_of(block: nn.Module, stages: Stages) -> tuple[Stages, ...]:
    """The stages in groups that do not read one another's outputs: equal layers of all experts are one group."""
    experts = experts_in(block)

    def kind(stage: tuple[str, ...]) -> tuple[str, str]:
        path = next((path for path in experts if stage[0].startswith(f"{path}.")), None)
        return (stage[0], "") if path is None else (path, stage[0].rsplit(".", 1)[-1])

    return tuple(tuple(group) for _, group in itertools.groupby(stages, kind))


def stages_of(block: nn.Module, call: Callable[[], Any]) -> Stages:
    """The linear layers of a block in the order in which `call` runs them; neighbours with one input are a stage.

    Experts count as one module, since a call may not reach all of them.
    """
    reached: list[tuple[str, Tensor]] = []
    experts = experts_in(block)
    alone = {
        name: module
        for name, module in linears(block).items()
        if not any(name.startswith(f"{path}.") for path in experts)
    }
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: reached.append((name, args[0])))
        for name, module in {**alone, **experts}.items()
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    stages: list[list[str]] = []
    inputs: list[Tensor] = []  # kept alive, so that no two of them share an address
    for name, given in reached:
        same = [number for number, other in enumerate(inputs) if other is given]
        if name in experts:
            stages += [list(stage) for stage in experts[name].stages(name)]
            inputs += [torch.empty(0) for _ in experts[name].stages(name)]
        elif same:
            stages[same[0]].append(name)
        else:
            stages.append([name])
            inputs.append(given)
    names = [name for stage in stages for name in stage]
    if len(names) != len(set(names)):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(
            f"{type(block).__name__} calls {', '.join(repeated)} more than once: write a row for this architecture "
            "in sparsebit/llm/models/architectures.py"
        )
    return tuple(tuple(stage) for stage in stages)


def _longest_list(model: nn.Module, model_type: str) -> str:
    lists: dict[str, nn.ModuleList] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(part) for part in module}) == 1
        and any(is_linear(part) for part in module[0].modules())
        and not is_linear(module[0])
    }
    if not lists:
        raise ConfigError(
            f"model type {model_type!r} is not known, and it has no list of equal blocks with linear layers: add a row "
            f"to sparsebit/llm/models/architectures.py; known: {', '.join(ARCHITECTURES)}"
        )
    sizes = {name: sum(part.numel() for part in module.parameters()) for name, module in lists.items()}
    return max(sizes, key=lambda name: sizes[name])
