"""Which modules are linear layers whose weights can be packed, and which models only call such layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm.models.hub_classes import transformers_module
from sparsebit.llm.models.separate_experts import experts_in

# Subclasses of transformers that compute `x @ weight.T + bias` as nn.Linear does; others may compute something else.
_ALIKE = ("FalconLinear",)
_NUM_TOKENS = 8


class _WeightRead(Exception):
    """The model's code has read the weight of a linear layer. `name`: of the layer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


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
    try:
        with torch.no_grad(), _without_weights(model, layers):
            model(input_ids=torch.zeros((1, _NUM_TOKENS), dtype=torch.int64, device="meta"), use_cache=False)
    except _WeightRead as found:
        raise ConfigError(
            f"{type(model).__name__} reads the weight of {found.name} in its own code instead of calling the layer, "
            "and a packed layer has no float weight: this architecture cannot be quantized"
        ) from None
    except Exception:  # code that depends on values does not run without them
        pass


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
            f"transformers cannot load {type(model).__name__} with packed layers: when it loads one, the class "
            f"initializes weights that are not there ({error}). Write the folder without this check (--no-check): "
            "sparsebit.llm.load reads it"
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


@contextlib.contextmanager
def _without_weights(model: Any, names: list[str]) -> Iterator[None]:
    layers = {name: model.get_submodule(name) for name in names}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, _WithoutWeight(name, layer))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
