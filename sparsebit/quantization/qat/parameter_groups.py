"""A model's parameters in the groups that an optimizer should treat differently."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.quantization.quantizers.base import Quantizer

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_groups(
    model: nn.Module, lr: float | None = None, *, scale_lr: float | None = None, weight_decay: float | None = None
) -> list[dict[str, Any]]:
    """`weights` with decay; `biases` (and norms, and all other vectors) and `scales` of quantizers without.

    Every parameter that requires a gradient is in one group, once. Arguments that are None use the optimizer's default;
    `scale_lr` defaults to `lr`. A group carries its `name` and the `param_names` of its `params`; empty ones are left
    out.
    """
    groups: dict[str, dict[str, Any]] = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "biases": {"lr": lr, "weight_decay": 0.0},
        "scales": {"lr": lr if scale_lr is None else scale_lr, "weight_decay": 0.0},
    }
    owners = {id(parameter): module for module in model.modules() for parameter in module._parameters.values()}
    for group in groups.values():
        group.update(params=[], param_names=[])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner = owners[id(parameter)]
            is_vector = parameter.ndim < 2 or isinstance(owner, NORMS) or name.endswith("bias")
            group = groups["scales" if isinstance(owner, Quantizer) else "biases" if is_vector else "weights"]
            group["params"].append(parameter)
            group["param_names"].append(name)
    return [
        {"name": name, **{key: value for key, value in group.items() if value is not None}}
        for name, group in groups.items()
        if group["params"]
    ]
