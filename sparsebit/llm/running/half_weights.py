"""Keeps embeddings and the output layer in the half precision of their files, in a float32 model on a CPU.

They are the largest part of a small packed model, and a decoded token reads the whole output layer. Products of few
rows are computed in half precision, which reads half of the bytes; for more rows, where CPUs are slow in it, blocks of
the weight are converted to float32 one after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.llm.models.skeleton import Skeleton

HALVES = (torch.float16, torch.bfloat16)
_FEW_ROWS = 4
_BLOCK = 1 << 22  # elements of the weight that are float32 at a time: 16 MiB


class HalfEmbedding(nn.Embedding):
    """An embedding with a weight of half precision; its output is float32, or the type the model is converted to."""

    like: Tensor  # empty: only its type matters, which is that of the outputs

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device="meta")
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.like.dtype)


class HalfLinear(nn.Linear):
    """A linear layer with a weight of half precision, for float32 inputs."""

    def forward(self, input: Tensor) -> Tensor:
        weight, x = self.weight, input.reshape(-1, self.in_features)
        if len(x) <= _FEW_ROWS:
            y = F.linear(x.to(weight.dtype), weight).to(input.dtype)
        else:
            blocks = weight.split(max(_BLOCK // self.in_features, 1))
            y = torch.cat([F.linear(x, block.to(input.dtype)) for block in blocks], -1)
        y = y.reshape(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def keep_halves(skeleton: Skeleton) -> None:
    """Let the plain embeddings and the plain output layer of a filled model keep the type of the files.

    A model's own classes, and layers tied to them, are not changed.
    """
    model = skeleton.model
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    paths = {path: module for path, module in model.named_modules() if any(module is end for end in ends)}
    names = {id(tensor): name for name, tensor in model.named_parameters() if name in skeleton.names}
    others = {id(module.weight) for module in paths.values() if type(module) not in (nn.Embedding, nn.Linear)}
    kept: dict[str, nn.Module] = {}
    for path, module in paths.items():
        name = names.get(id(module.weight))
        dtype = None if name is None else skeleton.stored_type(name)
        if dtype in HALVES and id(module.weight) not in others:
            kept[path] = _half(module, dtype)
    for path, module in kept.items():
        model.set_submodule(path, module)
    model.tie_weights()


def _half(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    weight = nn.Parameter(module.get_parameter("weight").detach().to(dtype), requires_grad=False)
    if isinstance(module, nn.Embedding):
        found = HalfEmbedding(len(weight), weight.shape[1], module.padding_idx)
        found.weight = weight
        return found.train(module.training)
    assert isinstance(module, nn.Linear)
    linear = HalfLinear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    linear.weight, linear.bias = weight, module.bias
    return linear.train(module.training)
