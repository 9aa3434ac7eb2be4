"""The path of a decoder's blocks and the order in which their linear layers are quantized: a row per architecture.

Names are those of the modules of transformers 5. A row: the path of the list of blocks; the linear layers of a block in
stages (layers of one stage read the same input); and those that servers fuse into one matrix, whose number formats must
be equal. Experts (`separate_experts.py`) are one entry. An architecture without a row is examined: its blocks are the
longest list of modules of one class, and its stages are found by running a block.

>>> ARCHITECTURES["llama"].stages[0]
('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj')
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm.models.hub_classes import transformers_module
from sparsebit.llm.models.separate_experts import experts_in, experts_prefixes

# Subclasses of transformers that compute `x @ weight.T + bias` as nn.Linear does; others may compute something else.
_ALIKE = ("FalconLinear",)
_NUM_TOKENS = 8


class _WeightRead(Exception):
    """The model's code has read the weight of the linear layer of this name."""


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is a plain linear layer."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and type(module).__name__ in _ALIKE)


def as_linear_layers(model: nn.Module) -> frozenset[str]:
    """Replace `Conv1D` layers (of GPT-2 and related models) by linear layers, on the meta device: the same product,
    with the weight transposed. Returns the names of their weights, which files still store as `(in, out)`.
    """
    kind = transformers_module().pytorch_utils.Conv1D
    found = {name: module for name, module in model.named_modules() if type(module) is kind}
    for name, module in found.items():
        inputs, outputs = module.weight.shape
        model.set_submodule(name, nn.Linear(inputs, outputs, device="meta", dtype=module.weight.dtype))
    return frozenset(f"{name}.weight" for name in found)


def need_called_layers(model: Any, layers: list[str]) -> None:
    """Raise for a model whose code reads the weights of these linear layers instead of calling the layers.

    Packed layers have no float weight, so such a model would fail after quantization. `model`, on the meta
    device, is run on a few tokens. Code that does not run there is not examined.
    """
    parts = {name: model.get_submodule(name) for name in layers}
    try:
        for name, layer in parts.items():
            model.set_submodule(name, _WithoutWeight(name, layer))
        with torch.no_grad():
            model(input_ids=torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta"), use_cache=False)
    except _WeightRead as found:
        raise ConfigError(
            f"{type(model).__name__} reads the weight of {found} in its own code instead of calling the layer, and a "
            "packed layer has no float weight: this architecture cannot be quantized"
        ) from None
    except Exception:  # code that depends on values does not run without them
        pass
    finally:
        for name, layer in parts.items():
            model.set_submodule(name, layer)


def need_loadable_layers(model: Any, layers: list[str]) -> None:
    """Raise for a class that transformers cannot load with these layers packed: it then initializes their weights.
    Experts are not affected: it unpacks them into its stacked tensors.
    """
    parts = [model.get_submodule(name) for name in layers]
    weights = [part._parameters.pop("weight") for part in parts]
    experts = {inner for one in experts_in(model).values() for inner in one.modules()}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for module in model.modules():
                if module not in experts:
                    model._init_weights(module)
    except AttributeError as error:
        raise DeploymentError(
            f"transformers cannot load {type(model).__name__} with packed layers: it initializes weights that are not "
            f"there ({error}). Write the folder without this check (--no-check): sparsebit.llm.load reads it"
        ) from error
    finally:
        for part, weight in zip(parts, weights, strict=True):
            part._parameters["weight"] = weight


class _WithoutWeight(nn.Module):
    """Replaces a linear layer: its output has the right shape, and its weight must not be read."""

    def __init__(self, name: str, layer: nn.Linear) -> None:
        super().__init__()
        self.name, self.in_features, self.out_features = name, layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.out_features))

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise _WeightRead(self.name)
        return None if name == "bias" else super().__getattr__(name)


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
        """The stages of one block, experts by name, without those that the block lacks; None, if the row has none."""
        if self.stages is None:
            return None
        experts, known = experts_in(block), linears(block)
        found: list[tuple[str, ...]] = []
        for stage in self.stages:
            if stage[0] in experts:
                found += experts[stage[0]].stages(stage[0])
            elif all(name in known for name in stage):
                found.append(stage)
        if known.keys() - {name for stage in found for name in stage}:
            missing = [name for stage in self.stages for name in stage if name not in known and name not in experts]
            raise ConfigError(
                f"{type(block).__name__} has no linear layers {', '.join(missing)}, as its row in "
                f"sparsebit/llm/models/architectures.py says; it has {', '.join(known)}"
            )
        return tuple(found)

    def fused_groups(self, stages: Stages) -> Stages:
        """Groups of two or more linear layers of a block whose number formats must be equal."""
        return tuple(group for group in (stages if self.fused is None else self.fused) if len(group) > 1)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED_STAGES = (_QKV, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
_GATED = Architecture("model.layers", _GATED_STAGES)
# Some blocks of Qwen3-MoE have an MLP instead of experts.
_EXPERTS = Architecture("model.layers", (*_GATED_STAGES, ("mlp.experts",)))
# By `model_type` of the model's config.json.
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _GATED),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _EXPERTS),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GATED),
    # Attention and MLP read the same normalized input.
    "phi": Architecture("model.layers", ((*_QKV, "mlp.fc1"), ("self_attn.dense",), ("mlp.fc2",)), fused=(_QKV,)),
    "phi3": Architecture(
        "model.layers", (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",))
    ),
    "gpt_neox": Architecture(
        "gpt_neox.layers",
        (("attention.query_key_value",), ("attention.dense",), ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
    ),
    "opt": Architecture("model.decoder.layers", (_QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",))),
}


# Models with images: where the blocks of their language model are. Its row is that of the config's `text_config`.
LANGUAGE_PARTS = {
    **dict.fromkeys(("qwen2_5_vl", "llava", "gemma3"), "model.language_model.layers"),
    **dict.fromkeys(("idefics3", "smolvlm"), "model.text_model.layers"),
}


def known_row(model: nn.Module) -> Architecture | None:
    """The row of the model's architecture, if it has one; for a model with images, of its language model."""
    config: Any = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", ""))
    if not reads_images(model):
        return ARCHITECTURES.get(model_type)
    if model_type not in LANGUAGE_PARTS:
        return None
    text_type = str(config.text_config.model_type)
    row = ARCHITECTURES.get({"qwen2_5_vl_text": "qwen2"}.get(text_type, text_type), Architecture(""))
    return replace(row, blocks=LANGUAGE_PARTS[model_type])


def reads_images(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "vision_config", None) is not None


def architecture_of(model: nn.Module) -> Architecture:
    """The row of the model's architecture; without a row, the path of its blocks, found by examining its modules. A
    model with images needs a row: the longest list of blocks may be that of its images.
    """
    model_type = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    row = known_row(model)
    if row is None and reads_images(model):
        raise ConfigError(
            f"model type {model_type!r} reads images, and the place of its language model is not known; allowed: "
            f"{', '.join(LANGUAGE_PARTS)}; others need a row in sparsebit/llm/models/architectures.py"
        )
    if row is None:
        return Architecture(_longest_list(model, model_type))
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
    stacked = [
        name
        for name, parameter in block.named_parameters()
        if parameter.ndim > 2 and not isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
    ]
    if stacked:
        raise ConfigError(
            f"{type(block).__name__} has stacked weights ({', '.join(stacked)}): allowed: fused experts without biases "
            "whose files hold a matrix for each; this architecture cannot be quantized yet"
        )
    return {name: module for name, module in block.named_modules() if is_linear(module)}


def block_linears(model: nn.Module, architecture: Architecture) -> list[str]:
    """The names in the model of the linear layers of all blocks."""
    blocks = enumerate(blocks_of(model, architecture))
    return [f"{architecture.blocks}.{number}.{name}" for number, block in blocks for name in linears(block)]


def passes_of(block: nn.Module, stages: Stages) -> tuple[Stages, ...]:
    """The stages in groups that do not read one another's outputs: equal layers of all experts are one group."""
    experts = experts_in(block)

    def kind(stage: tuple[str, ...]) -> tuple[str, str]:
        path = next((path for path in experts if stage[0].startswith(f"{path}.")), None)
        return (stage[0], "") if path is None else (path, stage[0].rsplit(".", 1)[-1])

    return tuple(tuple(group) for _, group in itertools.groupby(stages, kind))


def stages_of(block: nn.Module, call: Callable[[], Any]) -> Stages:
    """The linear layers in the order in which `call` runs them; neighbours with one input, or experts, are a stage."""
    reached: list[tuple[str, Tensor]] = []
    experts, inside = experts_in(block), experts_prefixes(block)
    alone = {name: module for name, module in linears(block).items() if not name.startswith(inside)}
    with contextlib.ExitStack() as hooks:
        for name, module in {**alone, **experts}.items():
            hook = module.register_forward_pre_hook(lambda _, args, name=name: reached.append((name, args[0])))
            hooks.enter_context(hook)
        call()
    stages: list[list[str]] = []
    inputs: list[Tensor] = []  # kept alive, so that no two of them share an address
    for name, given in reached:
        same = [number for number, other in enumerate(inputs) if other is given]
        if name in experts:
            found = experts[name].stages(name)
            stages += map(list, found)
            inputs += [torch.empty(0) for _ in found]
        elif same:
            stages[same[0]].append(name)
        else:
            stages.append([name])
            inputs.append(given)
    names = [name for stage in stages for name in stage]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"{type(block).__name__} calls {', '.join(repeated)} more than once: add a row for this architecture to "
            "sparsebit/llm/models/architectures.py"
        )
    return tuple(map(tuple, stages))


def _longest_list(model: nn.Module, model_type: str) -> str:
    sizes: dict[str, int] = {
        name: sum(part.numel() for part in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(part) for part in module}) == 1
        and any(map(is_linear, module[0].modules()))
        and not is_linear(module[0])
    }
    if not sizes:
        raise ConfigError(
            f"model type {model_type!r} is not known, and it has no list of equal blocks with linear layers: add a row "
            f"to sparsebit/llm/models/architectures.py; known: {', '.join(ARCHITECTURES)}"
        )
    return max(sizes, key=lambda name: sizes[name])
