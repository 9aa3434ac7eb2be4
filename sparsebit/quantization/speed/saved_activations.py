"""Reduces the tensors that autograd keeps for the backward: cheap values are recomputed instead of being kept.

A convolution keeps its input for the gradient of its weight. That input is a fake-quantized copy of a tensor which is
kept anyway, for the gradient of the scale, so the copy need not be kept. The same holds after normalizations and
activation functions, which keep their own inputs. Then only the outputs of the heavy ops are kept, once; in the
backward the same kernels run again on the same numbers, so that gradients are equal bit by bit.

This file chooses the modules and functions; `recomputation.py` has the mechanism. Active if the user calls
`pack_saved_activations()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.numerics.fake_quant import dispatch
from sparsebit.numerics.spec import TensorSpec
from sparsebit.quantization.ops.layer_call import is_hooked
from sparsebit.quantization.ops.quant_opr import QuantOpr
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.speed.fusion_guards import Substitute, is_deterministic, substitute, substitute_of
from sparsebit.quantization.speed.recomputation import attach_recompute, recompute_of, relu
from sparsebit.quantization.speed.training_graph import Draft, FusedStep

# Cheap ops that keep their input for the backward, by their names in the table of ops: module class and functions. ReLU
# keeps its output instead, and has its own function (`recomputation.relu`).
_RECOMPUTED: dict[str, tuple[type[nn.Module], tuple[Callable[..., Any], ...]]] = {
    "layer_norm": (nn.LayerNorm, (F.layer_norm, torch.layer_norm)),
    "group_norm": (nn.GroupNorm, (F.group_norm, torch.group_norm)),
    "gelu": (nn.GELU, (F.gelu,)),
    "silu": (nn.SiLU, (F.silu,)),
    "hardswish": (nn.Hardswish, (F.hardswish,)),
    "hardsigmoid": (nn.Hardsigmoid, (F.hardsigmoid,)),
    "hardtanh": (nn.Hardtanh, (F.hardtanh,)),
    "relu6": (nn.ReLU6, (F.relu6,)),
    "leaky_relu": (nn.LeakyReLU, (F.leaky_relu,)),
}
_FUNCTIONS = frozenset(function for _, functions in _RECOMPUTED.values() for function in functions)
_RELUS = frozenset({F.relu, torch.relu})
_MODULES = frozenset(
    {module for module, _ in _RECOMPUTED.values()} | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU}
)


def record_modules(model: nn.Module) -> None:
    """Replace the forwards of quantizers and cheap modules by ones that attach a recompute function to the output."""
    for module in model.modules():
        if is_itself(module, Quantizer):
            substitute(module, RecordedQuantizer(module))
        elif _is_recomputed(module):
            substitute(module, RecordedModule(module))


def record_functions(draft: Draft) -> None:
    """The same for functions that a training graph calls."""
    for node in draft.graph.nodes:
        is_known = node.op == "call_function" and node.target in _FUNCTIONS | _RELUS
        if is_known and not node.kwargs.get("inplace"):
            node.target = RecordedFunction(relu if node.target in _RELUS else node.target)


class RecordedQuantizer(Substitute):
    """A quantizer whose output is recomputed."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer

    def forward(self, x: Any) -> Any:
        output = type(self.quantizer).forward(self.quantizer, x)
        if output is not x:
            note_quantized(self.quantizer, x, output)
        return output


def note_quantized(quantizer: Quantizer, x: Tensor, output: Tensor) -> None:
    """Attach a recompute function to the quantizer's output for `x`, if activations are packed."""
    is_packed = isinstance(substitute_of(quantizer), RecordedQuantizer)
    if not is_packed or not _is_kept(output) or not is_deterministic(quantizer):
        return
    function = partial(_requantized, quantizer.spec, quantizer.transform)
    attach_recompute(output, function, (x, *quantizer.operands()), autocasts=False)


def _requantized(
    spec: TensorSpec, transform: Callable[[Tensor], Tensor], x: Tensor, scale: Tensor, zero: Tensor
) -> Any:
    return dispatch.fake_quantize(transform(x), scale, zero, spec)


class RecordedModule(Substitute):
    """A module whose output is recomputed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        is_relu = type(module) is nn.ReLU
        output = relu(*args, **kwargs) if is_relu else type(module).forward(module, *args, **kwargs)
        # Hooks may change its arguments, or count how often it is called.
        if _is_kept(output) and not any(map(is_hooked, module.modules())):
            self._note(output, args, kwargs)
        return output

    def _note(self, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = self.module
        x = next(iter((*args, *kwargs.values())))
        if type(module) is nn.ReLU and recompute_of(x) is None:
            return  # the input of this ReLU would be kept only for recomputing its output: nothing is saved
        if not all(is_deterministic(inner) for inner in module.modules() if is_itself(inner, Quantizer)):
            return
        function = _Normalized(module) if is_itself(module, _BatchNorm) else _Called(module)
        attach_recompute(output, function, args, kwargs, (*module.parameters(), *function.buffers))


class RecordedFunction(FusedStep):
    """A function whose output is recomputed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(f"recorded_{function.__name__}")
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.function(*args, **kwargs)
        x = next(iter((*args, *kwargs.values())))
        if _is_kept(output) and (self.function is not relu or recompute_of(x) is not None):
            attach_recompute(output, self.function, args, kwargs)
        return output


def _is_kept(output: Any) -> bool:
    """Whether autograd may keep it for a backward."""
    return isinstance(output, Tensor) and output.requires_grad and not torch.compiler.is_compiling()


def _is_recomputed(module: nn.Module) -> bool:
    if is_itself(module, QuantOpr):
        return type(module) is QuantOpr and module.weight_quantizer is None and module.row.name in _RECOMPUTED
    return type(module) in _MODULES and not getattr(module, "inplace", False)


class _Normalized:
    """A batch norm as a function that does not update the running statistics, which contain this batch already."""

    def __init__(self, norm: _BatchNorm) -> None:
        by_batch = norm.training or norm.running_mean is None
        self.statistics = (None, None) if by_batch else (norm.running_mean, norm.running_var)
        self.settings: dict[str, Any] = {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps}
        self.settings |= {"training": by_batch, "momentum": 0.0}
        self.buffers = [buffer for buffer in self.statistics if buffer is not None]

    def __call__(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, *self.statistics, **self.settings)


class _Called:
    """A module as a function with its current parameters, whatever the module holds when it is called."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.buffers = list(module.buffers())

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.parameters:
            return self.module(*args, **kwargs)  # type: ignore[no-any-return]
        found: Tensor = torch.func.functional_call(self.module, self.parameters, args, kwargs)
        return found
