"""What autograd keeps for the backward, made smaller: cheap values are computed again instead of being kept.

A convolution keeps its input for the gradient of its weight. That input is a fake-quantized copy of a tensor which is
kept anyway, for the gradient of the scale: so the copy need not be. The same holds behind normalizations and activation
functions, which keep their own inputs. What is kept then is what the heavy ops gave, once; in the backward the same
kernels run again on the same numbers, so that gradients are equal bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.quantization.ops.quant_opr import QuantOpr
from sparsebit.quantization.ops.recipes import give_recipe, recipe_of, relu
from sparsebit.quantization.quantizers.base import Quantizer

# They keep their input for the backward, and are a few operations per element.
CHEAP = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
    *(nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6, nn.LeakyReLU, nn.ReLU),
)
CHEAP_ROWS = frozenset({"layer_norm", "group_norm", "gelu", "silu", "hardswish", "hardsigmoid", "hardtanh", "relu6"})
LARGE = 16 << 20  # bytes; below, starting a kernel again costs more than the memory is worth


def install(model: nn.Module, *, cheap_modules: bool) -> None:
    """Give tensors recipes where they come about: all of them, or large ones behind quantizers alone."""
    remove(model)
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.register_forward_hook(_note_quantized if cheap_modules else _note_large_quantized)
        elif cheap_modules and _is_cheap(module):
            module.register_forward_hook(_note_cheap, with_kwargs=True)
            if type(module) is nn.ReLU:
                module.forward = relu  # type: ignore[method-assign,assignment]


def remove(model: nn.Module) -> None:
    """Everything is kept again."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if hook in (_note_quantized, _note_large_quantized, _note_cheap):
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
        if module.__dict__.get("forward") is relu:
            del module.__dict__["forward"]


def _note_quantized(quantizer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if _is_recorded(output) and output is not args[0]:
        assert isinstance(quantizer, Quantizer)
        give_recipe(output, quantizer.fake_quantize, args, read=tuple(quantizer.parameters(recurse=False)))


def _note_large_quantized(quantizer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if isinstance(output, Tensor) and output.nbytes >= LARGE:
        _note_quantized(quantizer, args, output)


def _note_cheap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if not _is_recorded(output) or output is args[0]:  # a ReLU may be left to a quantizer
        return
    if isinstance(module, nn.ReLU) and recipe_of(args[0]) is None:
        return  # its input would be kept for its sake alone
    function = _Normalized(module) if isinstance(module, _BatchNorm) else module.forward
    give_recipe(output, function, args, kwargs, tuple(module.parameters()))


def _is_recorded(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling()


def _is_cheap(module: nn.Module) -> bool:
    if isinstance(module, QuantOpr):
        return type(module) is QuantOpr and module.weight_quantizer is None and module.row.name in CHEAP_ROWS
    return type(module) in CHEAP or isinstance(module, nn.ReLU)


class _Normalized:
    """A batch norm that leaves the running statistics alone: they have seen this batch."""

    def __init__(self, norm: _BatchNorm) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if norm.training or norm.running_mean is None:
            return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
