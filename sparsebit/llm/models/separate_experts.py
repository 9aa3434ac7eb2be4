"""`SeparateExperts`: the experts of a block as separate linear layers, each with its own input.

transformers 5 keeps the experts of a block in two stacked tensors, `gate_up_proj (experts, 2 * inner, hidden)` and
`down_proj (experts, hidden, inner)`; checkpoints have a matrix for each expert. Here each of those is a linear layer,
named as in the checkpoint, so that it is hooked, quantized, packed and written as any other layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SeparateExperts(nn.Module):
    """Computes the same as the stacked `fused`; `names`: of its matrices in a checkpoint, `3.w1` for expert 3.

    Weights are not copied: `fused` is on the meta device, and they are read from files afterwards.
    """

    def __init__(self, fused: Any, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.num_experts, self.names = int(fused.gate_up_proj.shape[0]), names
        stacked: Tensor = fused.gate_up_proj
        inner, hidden = stacked.shape[1] // 2, stacked.shape[2]
        kind: dict[str, Any] = {"bias": False, "dtype": stacked.dtype, "device": stacked.device}
        for number in range(self.num_experts):
            expert = nn.Module()
            for name, sizes in zip(names, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
                expert.add_module(name, nn.Linear(*sizes, **kind))
            self.add_module(str(number), expert)
        del fused.gate_up_proj, fused.down_proj
        self.gating = fused  # used for its activation function and its way to join gate and up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states (tokens, hidden)`, `top_k_index (tokens, k)`: the experts of each token, and their weights."""
        output = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            tokens, place = torch.where(top_k_index == number)
            if len(tokens) == 0:
                continue
            expert = self.get_submodule(str(number))
            x = hidden_states[tokens]
            gate, up, down = map(expert.get_submodule, self.names)
            inner = self.gating._apply_gate(torch.cat([gate(x), up(x)], -1))
            found = down(inner) * top_k_weights[tokens, place, None]
            output = output.index_add(0, tokens, found.to(output.dtype))
        return output

    def stages(self, path: str) -> tuple[tuple[str, ...], ...]:
        """The layers in stages, by their names in a block that has this module at `path`: gates and ups first."""
        numbers = range(self.num_experts)
        first = tuple((f"{path}.{n}.{self.names[0]}", f"{path}.{n}.{self.names[1]}") for n in numbers)
        return first + tuple((f"{path}.{n}.{self.names[2]}",) for n in numbers)


def separate_experts(model: nn.Module, converters: Sequence[Any]) -> list[Any]:
    """Replace stacked experts by `SeparateExperts` if checkpoints have a matrix for each and no other layout.
    `converters`: transformers' rules that build stacked tensors from single ones; returns the remaining ones.
    """
    used: list[Any] = []
    for path, module in [(path, module) for path, module in model.named_modules() if _is_stacked(module)]:
        first = _sources(converters, f"{path}.gate_up_proj", 2)
        second = _sources(converters, f"{path}.down_proj", 1)
        if first is None or second is None:
            continue
        gate, up, down = map(_matrix_name, (*first.source_patterns, *second.source_patterns))
        model.set_submodule(path, SeparateExperts(module, (gate, up, down)))
        used += [first, second]
    return [converter for converter in converters if not any(converter is one for one in used)]


def experts_in(block: nn.Module) -> dict[str, SeparateExperts]:
    """The experts of a block by their path in it."""
    return {name: module for name, module in block.named_modules() if isinstance(module, SeparateExperts)}


def experts_prefixes(block: nn.Module) -> tuple[str, ...]:
    """The beginnings of the names of the experts' layers, for `str.startswith`."""
    return tuple(f"{path}." for path in experts_in(block))


def routers(skeleton: Any) -> list[str]:
    """The names in the files of the modules that choose among experts: matrices that stay float."""
    paths = [path.rpartition(".")[0] for path in experts_in(skeleton.model)]
    return [
        skeleton.names[f"{name}.weight"].removesuffix(".weight")
        for name, module in skeleton.model.named_modules()
        if type(module) is not nn.Linear and name.rpartition(".")[0] in paths and f"{name}.weight" in skeleton.names
    ]


def _is_stacked(module: Any) -> bool:
    stacked = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    usual = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
    usual["has_post_expert_norm"] = False
    return (
        all(isinstance(tensor, nn.Parameter) and tensor.ndim == 3 for tensor in stacked)
        and hasattr(module, "_apply_gate")
        and all(bool(getattr(module, name, value)) == value for name, value in usual.items())
    )


def _sources(converters: Sequence[Any], name: str, count: int) -> Any:
    """The rule that makes the tensor `name` from `count` matrices of every expert."""
    for converter in converters:
        targets, sources = list(converter.target_patterns), list(converter.source_patterns)
        is_made = len(targets) == 1 and name.endswith(str(targets[0]).lstrip("."))
        if is_made and len(sources) == count and all(_matrix_name(text) for text in sources):
            return converter
    return None


def _matrix_name(pattern: str) -> str:
    """`w1` of `.experts.*.w1.weight`; empty, if it is not the weight of one expert."""
    found = re.search(r"\.\*\.(\w+)\.weight\$?$", pattern)
    return "" if found is None else found.group(1)
