"""Gathers what data-driven criteria need: gradients of a loss, or norms of the layers' inputs.

Each batch is added to sums whose size does not depend on the amount of data; under `torchrun` the sums of all
processes are added up, so that every process computes the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import as_call, to_device
from sparsebit.execution.distributed import gather
from sparsebit.sparse.criteria import Evidence, Need

# (outputs of the model, the batch) -> a scalar to minimise
Loss = Callable[[Any, Any], Tensor]


def gather_evidence(
    model: nn.Module, need: Need | None, batches: Iterable[Any] | None, loss: Loss | None, strategy: str
) -> dict[str, Evidence]:
    """Evidence about every parameter, by name."""
    owners = {
        f"{path}.{name}" if path else name: module
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if need is None:
        return {name: Evidence(name, owners[name], weight) for name, weight in weights.items()}
    if batches is None:
        wanted = "batches, loss=(outputs, batch) -> scalar" if need == "gradients" else "batches"
        raise CalibrationError(f"STRATEGY {strategy} needs data: calc_params({wanted})")
    if need == "inputs":
        norms = _input_norms(model, batches)
        return {
            name: Evidence(name, owners[name], weight, input_norms=norms.get(name)) for name, weight in weights.items()
        }
    if loss is None:
        raise CalibrationError(
            f"STRATEGY {strategy} needs a loss: calc_params(batches, loss=(outputs, batch) -> scalar)"
        )
    first, second = _gradients(model, batches, loss)
    return {name: Evidence(name, owners[name], weight, first[name], second[name]) for name, weight in weights.items()}


def _merged(sums: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], int]:
    parts = gather(({name: value.cpu() for name, value in sums.items()}, count))
    total = sum(number for _, number in parts)
    if not total:
        raise CalibrationError("the data held no batch")
    if len(parts) == 1:
        return sums, total
    return {name: torch.stack([part[name] for part, _ in parts]).sum(0).to(sums[name]) for name in sums}, total


def _gradients(model: nn.Module, batches: Iterable[Any], loss: Loss) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {f"{kind}{name}": torch.zeros_like(p) for kind in ("1", "2") for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    count = 0
    for batch in batches:
        args, kwargs = as_call(batch, model)
        value = loss(model(*to_device(args, device), **to_device(kwargs, device)), to_device(batch, device))
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                sums[f"1{name}"] += gradient
                sums[f"2{name}"] += gradient.square()
        count += 1
    merged, total = _merged(sums, count)
    frozen = {name: torch.zeros_like(p) for name, p in model.named_parameters() if not p.requires_grad}
    return (
        {**frozen, **{name: merged[f"1{name}"] / total for name in parameters}},
        {**frozen, **{name: merged[f"2{name}"] / total for name in parameters}},
    )


@torch.no_grad()
def _input_norms(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """The L2 norm of every input channel, for each weight of a convolution or a linear layer."""
    sums: dict[str, Tensor] = {}
    handles = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            continue

        def add(layer: nn.Module, args: tuple[Tensor, ...], name: str = f"{path}.weight" if path else "weight") -> None:
            channels = args[0].movedim(-1, 0) if isinstance(layer, nn.Linear) else args[0].movedim(1, 0)
            squares = channels.flatten(1).float().square().sum(1)
            sums[name] += _per_column(layer, squares)

        handles.append(module.register_forward_pre_hook(add))
        weight: Any = module.weight
        sums[f"{path}.weight" if path else "weight"] = torch.zeros(weight.shape[1], device=weight.device)
    count = 0
    try:
        for batch in batches:
            args, kwargs = as_call(batch, model)
            device = next(model.parameters()).device
            model(*to_device(args, device), **to_device(kwargs, device))
            count += 1
    finally:
        for handle in handles:
            handle.remove()
    merged, _ = _merged(sums, count)
    return {name: value.sqrt() for name, value in merged.items()}


def _per_column(layer: nn.Module, squares: Tensor) -> Tensor:
    """Squares of the input channels as one per column of the weight: groups share columns."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        if layer.transposed:  # the columns of its weight are outputs; every one sees all inputs of its group
            return squares.mean().expand(layer.out_channels // layer.groups)
        if layer.groups > 1:
            return squares.view(layer.groups, -1).mean(0)
    return squares
