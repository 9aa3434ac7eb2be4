"""Turns convolutions that compute their weight from parameters (weight standardization) into plain ones.

A weight that is standardized over its input channels changes when some of them are removed, so a smaller layer of the
same class would compute another function. In a pruned model such a layer holds its computed weight as a constant.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparsebit.execution.batches import Call
from sparsebit.graph.values.copying import copy_model
from sparsebit.graph.values.nested import map_nested
from sparsebit.sparse.channels.parametrized_weights import FOLDED, fold_parametrizations

_PLAIN: tuple[type[nn.modules.conv._ConvNd], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class SamePaddedConv2d(nn.Conv2d):
    """A convolution whose padding depends on the size of its input, as TensorFlow's SAME."""

    def forward(self, input: Tensor) -> Tensor:
        pads: list[int] = []
        for size, kernel, stride, dilation in zip(
            input.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], self.dilation[::-1], strict=True
        ):
            missing = max((-(size // -stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(input, pads))


def computed_layers(model: nn.Module, call: Call) -> dict[str, str]:
    """The convolutions whose weight mixes input channels of their parameter, and their new form: `plain` or `same`.

    Each is compared with its plain form on its input in the model.
    """
    candidates = [path for path, part in model.named_modules() if path and _has_own_code(part) and _mixes_inputs(part)]
    if not candidates:
        return {}
    watched = copy_model(model, share_parameters=True)
    seen: dict[str, tuple[Any, Any]] = {}
    for path in candidates:

        def note(_: nn.Module, args: tuple[Any, ...], output: Any, path: str = path) -> None:
            if path not in seen:  # cloned: later code may write into them
                seen[path] = map_nested(Tensor, torch.clone, (args, output))

        watched.get_submodule(path).register_forward_hook(note)
    with torch.no_grad():
        watched(*call[0], **call[1])
    ran = [path for path in candidates if path in seen]
    return {path: form for path in ran if (form := _form(watched.get_submodule(path), *seen[path]))}


def make_plain(model: nn.Module, layers: Mapping[str, str]) -> None:
    """Replace the weights of these layers by their computed values, in place."""
    for path, form in layers.items():
        if form == FOLDED:
            fold_parametrizations(model.get_submodule(path))
        else:
            _make_plain(model.get_submodule(path), form)


def folded_copy(model: nn.Module, layers: Mapping[str, str]) -> nn.Module:
    """A copy whose layers hold their computed weights; the model itself if there are none."""
    if not layers:
        return model
    copied = copy_model(model)
    make_plain(copied, layers)
    return copied


def _make_plain(module: nn.Module, form: str) -> None:
    weight = _computed_weight(module)
    assert weight is not None
    for name in module._parameters.keys() - {"weight", "bias"}:
        module._parameters[name] = None
    module.weight = nn.Parameter(weight.detach().clone(), requires_grad=module.get_parameter("weight").requires_grad)
    module.__dict__.pop("forward", None)
    module.__class__ = SamePaddedConv2d if form == "same" else next(kind for kind in _PLAIN if isinstance(module, kind))


def _has_own_code(module: nn.Module) -> bool:
    """Whether a convolution is of a class with a forward of its own."""
    if not isinstance(module, _PLAIN) or type(module) in _PLAIN or "parametrizations" in module._modules:
        return False
    weight: Any = module._parameters.get("weight")
    is_own = all(type(module).forward is not kind.forward for kind in _PLAIN)
    return isinstance(weight, nn.Parameter) and weight.shape[1] > 1 and is_own


def _mixes_inputs(module: nn.Module) -> bool:
    """Whether the weight of one input channel depends on the parameter of another."""
    changed = copy.deepcopy(module)
    weight = changed.get_parameter("weight")
    half = weight.shape[1] // 2
    with torch.no_grad():
        weight[:, :half] += torch.rand_like(weight[:, :half]) + 0.5
    before, after = _computed_weight(module), _computed_weight(changed)
    return before is not None and after is not None and not torch.equal(before[:, half:], after[:, half:])


def _form(module: nn.Module, args: tuple[Any, ...], output: Any) -> str | None:
    """The form that a convolution with a plain weight needs for the same output; None if neither form fits."""
    for form in ("plain", "same") if isinstance(module, nn.Conv2d) else ("plain",):
        twin = copy.deepcopy(module)
        twin._forward_hooks.clear()
        try:
            with torch.no_grad():
                _make_plain(twin, form)
                found = twin(*args)
        except (RuntimeError, TypeError):
            continue
        if found.shape == output.shape and torch.allclose(found, output, rtol=1e-5, atol=1e-6):
            return form
    return None


class _Weights(TorchDispatchMode):
    """Records the weights of convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "convolution" in str(op._schema.name):
            self.found.append(args[1])
        return op(*args, **(kwargs or {}))


def _computed_weight(module: nn.Module) -> Tensor | None:
    """The weight that a convolution uses; None if that is not one tensor of the parameter's shape."""
    assert isinstance(module, nn.modules.conv._ConvNd)
    extent = [size * step for size, step in zip(module.kernel_size, module.dilation, strict=True)]
    blank = torch.zeros(1, module.in_channels, *extent, dtype=module.weight.dtype, device=module.weight.device)
    weights = _Weights()
    try:
        with torch.no_grad(), weights:
            module.forward(blank)
    except (RuntimeError, TypeError):
        return None
    is_one = len(weights.found) == 1 and weights.found[0].shape == module.weight.shape
    return weights.found[0] if is_one else None
