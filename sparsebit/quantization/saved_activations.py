"""What autograd keeps for the backward, made smaller: cheap values are computed again instead of being kept.

A convolution keeps its input for the gradient of its weight. That input is a fake-quantized copy of a tensor which is
kept anyway, for the gradient of the scale: so the copy need not be. The same holds behind normalizations and activation
functions, which keep their own inputs. What is kept then is what the heavy ops gave, once; in the backward the same
kernels run again on the same numbers, so that gradients are equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.patterns import is_itself
from sparsebit.numerics import dispatch
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.ops.cheap import CHEAP_MODULES, CHEAP_ROWS, CheapFunction
from sparsebit.quantization.ops.quant_opr import QuantOpr, WeightedQuantOpr
from sparsebit.quantization.ops.recipes import give_recipe, recipe_of, relu
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.quantizers.recognition import is_hooked, repeats

LARGE = 16 << 20  # bytes; below, starting a kernel again costs more than the memory is worth


def recompute(model: nn.Module, *, above: float) -> None:
    """Layers compute quantized inputs of `above` bytes and more again."""
    for module in model.modules():
        if isinstance(module, WeightedQuantOpr):
            module.kept_below = above


def install(model: nn.Module) -> None:
    """Give tensors recipes where they come about."""
    remove(model)
    recompute(model, above=0)
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.noted = _note_quantized
        elif _is_cheap(module):
            module.register_forward_hook(note_cheap, with_kwargs=True)
            if type(module) is nn.ReLU and not module.inplace:
                module.forward = relu  # type: ignore[method-assign,assignment]


def remove(model: nn.Module) -> None:
    """Everything is kept again."""
    recompute(model, above=math.inf)
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.noted = None
        for key, hook in list(module._forward_hooks.items()):
            if hook is note_cheap:
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
        if module.__dict__.get("forward") is relu:
            del module.__dict__["forward"]


def _note_quantized(quantizer: Quantizer, x: Tensor, output: Tensor) -> None:
    if output is x or not _is_recorded(output) or not repeats(quantizer):
        return
    function = _Requantized(quantizer.spec, quantizer.transform)
    give_recipe(output, function, (x, *quantizer.operands()), autocasts=False)


class _Requantized:
    def __init__(self, spec: TensorSpec, transform: Callable[[Tensor], Tensor]) -> None:
        self.spec, self.transform = spec, transform

    def __call__(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        return dispatch.fake_quantize(self.transform(x), scale, zero_point, self.spec)


def note_cheap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    x = next(iter((*args, *kwargs.values())))
    if not _is_recorded(output) or output is x:  # a ReLU may be left to a quantizer
        return
    # Somebody else's hooks may change what it gives, or count how often it is called.
    if len(module._forward_hooks) > 1 or module._forward_pre_hooks or any(map(is_hooked, module.children())):
        return
    if is_itself(module, nn.ReLU) and recipe_of(x) is None:
        return  # its input would be kept for its sake alone
    if not all(repeats(inner) for inner in module.modules() if isinstance(inner, Quantizer)):
        return
    function = _Normalized(module) if is_itself(module, _BatchNorm) else _Called(module)
    give_recipe(output, function, args, kwargs, (*module.parameters(), *function.buffers))


def _is_recorded(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling()


def _is_cheap(module: nn.Module) -> bool:
    if isinstance(module, CheapFunction):
        return True
    if isinstance(module, QuantOpr):
        return type(module) is QuantOpr and module.weight_quantizer is None and module.row.name in CHEAP_ROWS
    return (type(module) in CHEAP_MODULES or isinstance(module, nn.ReLU)) and not getattr(module, "inplace", False)


class _Normalized:
    """A batch norm that leaves the running statistics alone: they have seen this batch."""

    def __init__(self, norm: _BatchNorm) -> None:
        by_batch = norm.training or norm.running_mean is None
        self.statistics = (None, None) if by_batch else (norm.running_mean, norm.running_var)
        self.settings: dict[str, Any] = {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps}
        self.settings |= {"training": by_batch, "momentum": 0.0}
        self.buffers = [buffer for buffer in self.statistics if buffer is not None]

    def __call__(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, *self.statistics, **self.settings)


class _Called:
    """A module with the parameters that it has now."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.buffers = list(module.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.parameters:
            return self.module(*args, **kwargs)  # type: ignore[no-any-return]
        found: Tensor = torch.func.functional_call(self.module, self.parameters, args, kwargs)
        return found
