"""Gathers what data-driven criteria need: gradients of a loss, or statistics of the layers' inputs and outputs.

Each batch is added to sums whose size does not depend on the amount of data; under `torchrun` the sums of all
processes are added up, so that every process computes the same masks. Padded tokens (by an attention mask) do not
count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import as_call, to_device
from sparsebit.execution.distributed import gather
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.layer_matrix import LayerMatrix, layer_matrix
from sparsebit.sparse.scoring.criteria import Evidence, LayerMoments, Need
from sparsebit.sparse.scoring.padding import real_positions, real_rows

# (outputs of the model, the batch) -> a scalar to minimise
Loss = Callable[[Any, Any], Tensor]
_MOST_ROWS = 16384  # of a layer's input that are read of each batch
_CALLED = "calls of "  # a count that is merged over processes like the sums
_MULTIPLE = 16  # columns that very wide layers keep together: those of an N:M pattern


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
    if need == "moments":
        moments = _input_moments(model, batches)
        return {
            name: Evidence(name, owners[name], weight, moments=moments.get(name)) for name, weight in weights.items()
        }
    if need in ("signs", "ranks"):
        outputs = _of_outputs(model, batches, _positive if need == "signs" else _ranks)
        return {
            name: Evidence(name, owners[name], weight, outputs=outputs.get(name)) for name, weight in weights.items()
        }
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
    rows = _RealRows()
    handles = []
    for name, module in _weighted(model):

        def add(layer: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            channels = rows.of(layer, args[0]).movedim(-1 if isinstance(layer, nn.Linear) else 1, 0)
            squares = channels.flatten(1).float().square().sum(1)
            sums[name] += _per_column(layer, squares)
            sums[f"{_CALLED}{name}"] += 1

        handles.append(module.register_forward_pre_hook(add))
        weight: Any = module.weight
        sums[name] = torch.zeros(weight.shape[1], device=weight.device)
        sums[f"{_CALLED}{name}"] = torch.zeros((), device=weight.device)
    merged, _ = _merged(sums, _run(model, batches, handles, rows))
    return {
        name: value.sqrt() for name, value in merged.items() if _CALLED not in name and merged[f"{_CALLED}{name}"] > 0
    }


def _weighted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The convolutions and linear layers, by the name of its weight in `named_parameters()`; tied ones share it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) else None
        if weight is not None:
            yield names[id(weight)], module


class _RealRows:
    """Which positions of the batch that is running are real tokens."""

    def __init__(self) -> None:
        self.real: Tensor | None = None

    def of(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The rows of a linear layer's input or output that are real; maps of convolutions as they are."""
        return real_rows(x, self.real) if isinstance(layer, nn.Linear) else x


def _run(model: nn.Module, batches: Iterable[Any], handles: Iterable[RemovableHandle], rows: _RealRows) -> int:
    """Run all batches with the hooks, then remove the hooks; returns the number of batches."""
    count = 0
    try:
        for batch in batches:
            args, kwargs = as_call(batch, model)
            device = next(model.parameters()).device
            rows.real = real_positions((args, kwargs), model)
            model(*to_device(args, device), **to_device(kwargs, device))
            count += 1
    finally:
        for handle in handles:
            handle.remove()
    return count


@torch.no_grad()
def _input_moments(model: nn.Module, batches: Iterable[Any]) -> dict[str, LayerMoments]:
    """The second moments of the input of each convolution and linear layer, by the name of its weight."""
    found: dict[str, InputMoments] = {}
    forms: dict[str, LayerMatrix] = {}
    rows = _RealRows()
    handles = []
    for name, module in _weighted(model):
        if (form := layer_matrix(module)) is None:
            continue
        form = form.in_parts(module.get_parameter("weight"), _MULTIPLE)
        forms[name] = form
        found.setdefault(name, InputMoments())

        def add(layer: nn.Module, args: tuple[Tensor, ...], name: str = name, form: LayerMatrix = form) -> None:
            x = rows.of(layer, args[0])
            step = max(1, form.num_rows(x) // _MOST_ROWS)
            for patches in form.patches(x, step):
                found[name].add(patches)

        handles.append(module.register_forward_pre_hook(add))
    if not sum(gather(_run(model, batches, handles, rows))):
        raise CalibrationError("the data held no batch")
    merged = {name: InputMoments() for name in found}
    for states in gather({name: moments.state() for name, moments in found.items()}):
        for name, state in states.items():
            if state["num_rows"]:
                merged[name].merge(InputMoments.from_state(state, model.get_parameter(name).device))
    return {name: LayerMoments(forms[name], total.hessian()) for name, total in merged.items() if total.num_rows}


@torch.no_grad()
def _of_outputs(model: nn.Module, batches: Iterable[Any], measure: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The mean of `measure` (channels, ...) -> (channels,) over batches, of each layer's output, by its weight's name.

    Where a batch norm reads the layer's output, its own output is measured.
    """
    sums: dict[str, Tensor] = {}
    made_by: dict[int, tuple[str, Tensor]] = {}
    rows = _RealRows()
    handles = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str) -> None:
        made_by[id(output)] = (name, output)
        channels = rows.of(layer, output).movedim(-1 if isinstance(layer, nn.Linear) else 1, 0)
        now[name] = measure(channels)

    def read(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if id(args[0]) in made_by:
            now[made_by[id(args[0])][0]] = measure(output.movedim(1, 0))

    def end(*_: Any) -> None:
        for name, value in now.items():
            sums[name] = sums[name] + value if name in sums else value
        now.clear()
        made_by.clear()

    now: dict[str, Tensor] = {}
    for name, module in _weighted(model):
        handles.append(module.register_forward_hook(functools.partial(note, name=name)))
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    handles += [module.register_forward_hook(read) for module in norms]
    handles.append(model.register_forward_hook(end))
    merged, total = _merged(sums, _run(model, batches, handles, rows))
    return {name: value / total for name, value in merged.items()}


def _positive(channels: Tensor) -> Tensor:
    return (channels > 0).flatten(1).float().mean(1)


def _ranks(channels: Tensor) -> Tensor:
    """The mean rank of the maps of each channel; other outputs have rank 1 where they are not zero."""
    maps = channels if channels.dim() >= 4 else channels.flatten(1)[..., None, None]
    ranks: Tensor = torch.linalg.matrix_rank(maps.float())
    return ranks.flatten(1).float().mean(1)


def _per_column(layer: nn.Module, squares: Tensor) -> Tensor:
    """Squares of the input channels as one per column of the weight: groups share columns."""
    if isinstance(layer, nn.modules.conv._ConvNd):
        if layer.transposed:  # the columns of its weight are outputs; every one sees all inputs of its group
            return squares.mean().expand(layer.out_channels // layer.groups)
        if layer.groups > 1:
            return squares.view(layer.groups, -1).mean(0)
    return squares
