"""Gathers what data-driven criteria need: gradients of a loss, or statistics of the layers' inputs and outputs.

Each batch is added to sums whose size does not depend on the amount of data; under `torchrun` the sums of all
processes are added up, so that every process computes the same masks. Padded tokens (by an attention mask) do not
count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import as_call, to_device
from sparsebit.execution.distributed import gather
from sparsebit.graph.state.hooks import hooked
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.layer_matrix import LayerMatrix, layer_matrix
from sparsebit.sparse.scoring.criteria import Evidence, LayerMoments, Need
from sparsebit.sparse.scoring.padding import real_positions, real_rows

# (outputs of the model, the batch) -> a scalar to minimise
Loss = Callable[[Any, Any], Tensor]
# (name of the weight, layer, input, output, which rows are real if it is a linear layer's)
Note = Callable[[str, nn.Module, Tensor, Tensor, Tensor | None], None]
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
    found = {} if need is None else _needed(model, need, batches, loss, strategy)
    return {
        name: Evidence(name, owners[name], weight, **{kind: values.get(name) for kind, values in found.items()})
        for name, weight in weights.items()
    }


def _needed(
    model: nn.Module, need: Need, batches: Iterable[Any] | None, loss: Loss | None, strategy: str
) -> dict[str, Mapping[str, Any]]:
    """The fields of `Evidence` that a criterion needs, each by the names of the parameters."""
    wanted = "batches, loss=(outputs, batch) -> scalar" if need == "gradients" else "batches"
    if batches is None:
        raise CalibrationError(f"STRATEGY {strategy} needs data: calc_params({wanted})")
    if need == "moments":
        return {"moments": _input_moments(model, batches)}
    if need == "inputs":
        return {"input_norms": _input_norms(model, batches)}
    if need != "gradients":
        return {"outputs": _of_outputs(model, batches, _ranks if need == "ranks" else _share_above_zero)}
    if loss is None:
        raise CalibrationError(f"STRATEGY {strategy} needs a loss: calc_params({wanted})")
    first, second = _gradients(model, batches, loss)
    return {"gradient": first, "squared_gradient": second}


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
        args, kwargs = to_device(as_call(batch, model), device)
        value = loss(model(*args, **kwargs), to_device(batch, device))
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, found, strict=True):
            if gradient is not None:
                sums[f"1{name}"] += gradient
                sums[f"2{name}"] += gradient.square()
        count += 1
    merged, total = _merged(sums, count)
    frozen = {name: torch.zeros_like(p) for name, p in model.named_parameters() if not p.requires_grad}
    first, second = ({**frozen, **{name: merged[kind + name] / total for name in parameters}} for kind in ("1", "2"))
    return first, second


@torch.no_grad()
def _input_norms(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """The L2 norm of every input channel, for each weight of a convolution or a linear layer."""
    sums = {}
    for name, module in _weighted(model):
        weight = module.get_parameter("weight")
        sums[name] = torch.zeros(weight.shape[1], device=weight.device)
        sums[f"{_CALLED}{name}"] = torch.zeros((), device=weight.device)

    def add(name: str, layer: nn.Module, x: Tensor, output: Tensor, real: Tensor | None) -> None:
        sums[name] += _per_column(layer, _channels(layer, x, real).flatten(1).float().square().sum(1))
        sums[f"{_CALLED}{name}"] += 1

    merged, _ = _merged(sums, _run(model, batches, add))
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


def _channels(layer: nn.Module, x: Tensor, real: Tensor | None) -> Tensor:
    """(channels, ...) of a layer's input or output, without padded positions."""
    return real_rows(x, real).movedim(-1 if isinstance(layer, nn.Linear) else 1, 0)


def _run(model: nn.Module, batches: Iterable[Any], note: Note, *handles: RemovableHandle) -> int:
    """The number of batches, all run with `handles`; `note` sees every call of a convolution or linear layer."""
    count = 0
    real: Tensor | None = None

    def see(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str) -> None:
        note(name, layer, args[0], output, real if isinstance(layer, nn.Linear) else None)

    hooks = [module.register_forward_hook(functools.partial(see, name=name)) for name, module in _weighted(model)]
    with hooked((*hooks, *handles)):
        for batch in batches:
            call = as_call(batch, model)
            real = real_positions(call, model)
            args, kwargs = to_device(call, next(model.parameters()).device)
            model(*args, **kwargs)
            count += 1
    return count


@torch.no_grad()
def _input_moments(model: nn.Module, batches: Iterable[Any]) -> dict[str, LayerMoments]:
    """The second moments of the input of each convolution and linear layer, by the name of its weight."""
    forms: dict[nn.Module, LayerMatrix] = {}
    for _, module in _weighted(model):
        if (form := layer_matrix(module)) is not None:
            forms[module] = form.in_parts(module.get_parameter("weight"), _MULTIPLE)
    form_of = {name: forms[module] for name, module in _weighted(model) if module in forms}
    found = {name: InputMoments() for name in form_of}

    def add(name: str, layer: nn.Module, x: Tensor, output: Tensor, real: Tensor | None) -> None:
        if form := forms.get(layer):
            x = real_rows(x, real)
            for patches in form.patches(x, max(1, form.num_rows(x) // _MOST_ROWS)):
                found[name].add(patches)

    if not sum(gather(_run(model, batches, add))):
        raise CalibrationError("the data held no batch")
    merged = {name: InputMoments() for name in found}
    for states in gather({name: moments.state() for name, moments in found.items()}):
        for name, state in states.items():
            if state["num_rows"]:
                merged[name].merge(InputMoments.from_state(state, model.get_parameter(name).device))
    return {name: LayerMoments(form_of[name], total.hessian()) for name, total in merged.items() if total.num_rows}


@torch.no_grad()
def _of_outputs(model: nn.Module, batches: Iterable[Any], measure: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The mean of `measure` (channels, ...) -> (channels,) over batches, of each layer's output, by its weight's name.

    Where a batch norm reads the layer's output, its own output is measured.
    """
    sums: dict[str, Tensor] = {}
    now: dict[str, Tensor] = {}
    made_by: dict[int, tuple[str, Tensor]] = {}

    def note(name: str, layer: nn.Module, x: Tensor, output: Tensor, real: Tensor | None) -> None:
        made_by[id(output)] = (name, output)
        now[name] = measure(_channels(layer, output, real))

    def read(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if id(args[0]) in made_by:
            now[made_by[id(args[0])][0]] = measure(output.movedim(1, 0))

    def end(*_: Any) -> None:
        for name, value in now.items():
            sums[name] = sums[name] + value if name in sums else value
        now.clear()
        made_by.clear()

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    handles = [module.register_forward_hook(read) for module in norms]
    merged, total = _merged(sums, _run(model, batches, note, *handles, model.register_forward_hook(end)))
    return {name: value / total for name, value in merged.items()}


def _share_above_zero(channels: Tensor) -> Tensor:
    return (channels > 0).flatten(1).float().mean(1)


def _ranks(channels: Tensor) -> Tensor:
    """The mean rank of the maps of each channel; other outputs have rank 1 where they are not zero."""
    maps = channels if channels.dim() >= 4 else channels.flatten(1)[..., None, None]
    ranks: Tensor = torch.linalg.matrix_rank(maps.float())
    return ranks.flatten(1).float().mean(1)


def _per_column(layer: nn.Module, squares: Tensor) -> Tensor:
    """Squares of the input channels as one per column of the weight: groups share columns."""
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return squares
    if layer.transposed:  # the columns of its weight are outputs; every one sees all inputs of its group
        return squares.mean().expand(layer.out_channels // layer.groups)
    return squares.view(layer.groups, -1).mean(0)
