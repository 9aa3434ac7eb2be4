"""Reconstruction: fits the remaining weights after pruning so that each layer reproduces the dense layer's output.

Layers are visited in the order of the forward, each with its current input in the pruned model and its input in the
dense one. Its remaining weights are the solution of a least squares problem in closed form
(`sparsebit.numerics.rounding.pruning_math`): the remaining input channels compensate for the removed ones. The mean
error goes into the bias, or into the running mean of the batch norm after the layer. No labels, no gradients.
Padded positions (by an attention mask) do not count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from sparsebit.errors import CalibrationError, CaptureError
from sparsebit.execution.batches import Call, calls
from sparsebit.execution.blocks.engine import BatchValues, BlockData, run_blocks
from sparsebit.execution.blocks.find_blocks import Block, single_layers
from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.execution.distributed import gather
from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.example import GuardError
from sparsebit.graph.nodes.graph_module import source_path
from sparsebit.graph.region import Region
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.state.modes import evaluating
from sparsebit.graph.values.copying import copy_model
from sparsebit.numerics.rounding.hessian import InputMoments
from sparsebit.numerics.rounding.layer_matrix import LayerMatrix, layer_matrix
from sparsebit.numerics.rounding.pruning_math import fit_masked, held_out_damping, output_error
from sparsebit.progress import track
from sparsebit.sparse.scoring.padding import real_positions, real_rows

log = logging.getLogger(__name__)

# (input of the pruned model, input of the dense one) of each batch
Inputs = Callable[[], Iterable[tuple[Tensor, Tensor]]]
_DAMPING = 0.01  # of a single batch, which has no second half to judge by


@dataclass(frozen=True)
class LayerFit:
    """The squared error of one layer's output and the energy of the dense output, before and after the fit."""

    before: float
    after: float


@dataclass(frozen=True)
class _Layer:
    """A layer in both models. `running_mean`: of the norm that is the only reader of its output, if there is one."""

    name: str
    pruned: nn.Module
    dense: nn.Module
    form: LayerMatrix
    running_mean: Tensor | None
    dense_running_mean: Tensor | None
    masks: Mapping[str, Tensor]
    max_rows: int
    # Of each batch: the positions that are real (`padding.py`).
    real: Sequence[Tensor | None]


@torch.no_grad()
def fit_layers(
    pruned: nn.Module,
    dense: nn.Module,
    masks: Mapping[str, Tensor],
    batches: Iterable[Any],
    *,
    max_rows: int = 32768,
    memory_budget: int = 1024 * MIB,
) -> dict[str, LayerFit]:
    """Fit the convolutions and linear layers of `pruned` to those of `dense`, in place; zeros of the masks stay.

    Both models have the same layers and shapes. `max_rows`: about so many positions of a layer's input are read, or 8
    for each column of its weight where that is more.
    """
    device = next((p.device for p in pruned.parameters()), torch.device("cpu"))
    listed = list(calls(batches, pruned, device))
    if not listed:
        raise CalibrationError("reconstruct: no batch was given; give a few batches of inputs")
    dense = copy_model(dense).to(device).eval()
    with evaluating(pruned):
        session = _Session(pruned, dense, masks, max_rows, [real_positions(call, pruned) for call in listed])
        if not session.by_graph(listed, memory_budget):
            session.by_hooks(listed)
    return session.found


@dataclass
class _Session:
    pruned: nn.Module
    dense: nn.Module
    masks: Mapping[str, Tensor]
    max_rows: int
    real: Sequence[Tensor | None]
    found: dict[str, LayerFit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owners = Counter(id(p) for module in self.pruned.modules() for p in module._parameters.values())

    # --- through the captured graph: every layer runs once

    def by_graph(self, listed: list[Call], memory_budget: int) -> bool:
        """False, without any change, if the model's own code cannot be captured as one graph."""
        try:
            root, dense_root = (capture(model, example=listed[0]).model for model in (self.pruned, self.dense))
        except CaptureError as error:
            log.debug("reconstruction runs the model's own code: %s", error)
            return False
        if not isinstance(root, Region) or not isinstance(dense_root, Region):
            return False
        inputs = [root.bind(*call) for call in listed]
        if any(bound is None for bound in inputs):
            return False
        graph, dense_graph = root.graph_module, dense_root.graph_module
        nodes = Counter(str(node.target) for node in graph.graph.find_nodes(op="call_module"))
        blocks = single_layers(graph, lambda module: layer_matrix(module) is not None)

        def visit(data: BlockData) -> None:
            node = data.block.nodes[0]
            path = str(node.target)
            norm = _norm_behind(graph, node)
            layer = self._layer(source_path(path), graph, dense_graph, path, norm)
            if nodes[path] == 1 and len(node.all_input_nodes) == 1 and layer is not None:
                self._fit(layer, lambda: zip(_firsts(data.inputs), _firsts(data.float_inputs), strict=True))

        as_dense = _swapped(graph, dense_graph)
        store = SharedData(device_bytes=memory_budget, host_bytes=memory_budget)
        try:
            run_blocks(
                graph, blocks, len(inputs), lambda i: inputs[i] or {}, visit, as_float=as_dense, store=store,
                what="reconstruction",
            )  # fmt: skip
        except GuardError:
            self.found.clear()
            return False
        self._take(graph)
        return True

    def _take(self, graph: fx.GraphModule) -> None:
        """Copy the weights fitted in the captured copy into the model itself."""
        own = {**dict(self.pruned.named_parameters()), **dict(self.pruned.named_buffers())}
        for name, tensor in itertools.chain(graph.named_parameters(), graph.named_buffers()):
            target = own.get(source_path(name))
            # Counters of batches are not copied: they are integers, and no fit has changed them.
            if target is not None and target.shape == tensor.shape and target.is_floating_point():
                target.copy_(tensor)

    # --- through the model's own code: it runs as far as the layer, once for each layer

    def by_hooks(self, listed: list[Call]) -> None:
        order: list[str] = []
        with contextlib.ExitStack() as hooks:
            for name, module in self.pruned.named_modules():
                if layer_matrix(module) is not None:
                    handle = module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
                    hooks.callback(handle.remove)
            self.pruned(*listed[0][0], **listed[0][1])
        times = Counter(order)
        for name in track([name for name in order if times[name] == 1], "reconstruction"):
            if (layer := self._layer(name, self.pruned, self.dense, name, None)) is not None:
                self._fit(layer, functools.partial(self._observed, layer, listed))

    def _observed(self, layer: _Layer, listed: list[Call]) -> Iterator[tuple[Tensor, Tensor]]:
        for call in listed:
            yield _input(self.pruned, layer.pruned, call), _input(self.dense, layer.dense, call)

    # --- one layer

    def _layer(self, name: str, pruned: nn.Module, dense: nn.Module, path: str, norm: str | None) -> _Layer | None:
        own, other = pruned.get_submodule(path), dense.get_submodule(path)
        form, weight = layer_matrix(own), own._parameters.get("weight")
        original = dict(self.pruned.named_parameters(remove_duplicate=False)).get(f"{name}.weight")
        if form is None or weight is None or original is None or is_parametrized(own):
            return None
        if self.owners[id(original)] > 1 or original.shape != weight.shape:
            return None
        behind = [model.get_buffer(f"{norm}.running_mean") if norm else None for model in (pruned, dense)]
        masks = {key: self.masks[f"{name}.{key}"] for key in ("weight", "bias") if f"{name}.{key}" in self.masks}
        return _Layer(name, own, other, form.in_parts(weight), behind[0], behind[1], masks, self.max_rows, self.real)

    def _fit(self, layer: _Layer, inputs: Inputs) -> None:
        self.found[layer.name] = fit = fit_layer(layer, inputs)
        log.debug("%s: error %.4g before, %.4g after the fit", layer.name, fit.before, fit.after)


@torch.no_grad()
def fit_layer(layer: _Layer, inputs: Inputs) -> LayerFit:
    """Fit one layer; its bias, or the running mean after it, absorbs the mean error."""
    form, weight, bias = layer.form, layer.pruned.get_parameter("weight"), layer.pruned._parameters.get("bias")
    halves, energy = _moments(layer, inputs)
    moments = InputMoments(halves[0].dtype)
    for half in halves:
        moments.merge(half)
    has_shift = bias is not None or layer.running_mean is not None
    H, C = moments.hessian(centered=has_shift), moments.cross(centered=has_shift)
    W = form.matrix(layer.dense.get_parameter("weight")).to(H)
    M = form.matrix(layer.masks["weight"]).to(H.device) if "weight" in layer.masks else torch.ones_like(W).bool()
    # The damping is chosen on held-out data: fitted on one half of the batches, judged on the other.
    sides = [(half.hessian(centered=has_shift), half.cross(centered=has_shift)) for half in halves if half.num_rows]
    damping = held_out_damping(W, M, sides) if len(sides) > 1 else _DAMPING
    before = form.matrix(weight).to(H)
    V = W * M if damping is None else fit_masked(W, H, C, M, damping)
    weight.copy_(form.weight(V, weight.shape))
    means = (W @ moments.original_mean[..., None])[..., 0], (V @ moments.mean[..., None])[..., 0]
    shift = form.outputs(means[0] - means[1])
    if bias is not None:
        wanted = layer.dense.get_parameter("bias") + shift.to(bias)
        bias.copy_(wanted * layer.masks["bias"] if "bias" in layer.masks else wanted)
    # Without a bias the norm after the layer absorbs the mean error: it subtracts a mean that is smaller by `shift`.
    elif layer.running_mean is not None and layer.dense_running_mean is not None:
        layer.running_mean.copy_(layer.dense_running_mean - shift)
    live = M.any(-1)
    total = energy - (means[0].square() if has_shift else 0)  # of each row, as the fit sees it

    def share(found: Tensor) -> float:
        error = (output_error(W, found, H, C) + total)[live].sum().clamp_min(0)
        return float(error / total[live].sum().clamp_min(torch.finfo(H.dtype).tiny))

    return LayerFit(share(before), share(V))


def _moments(layer: _Layer, inputs: Inputs) -> tuple[tuple[InputMoments, InputMoments], Tensor]:
    """Input moments of both models over all processes, for each half of the batches; mean energy of dense outputs."""
    weight = layer.dense.get_parameter("weight")
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    W = layer.form.matrix(weight).to(dtype)
    halves = (InputMoments(dtype), InputMoments(dtype))
    energy = torch.zeros(W.shape[:2], dtype=torch.float64, device=W.device)
    step = 0
    for index, (x, original) in enumerate(inputs()):
        if layer.form.num_dims == 0:
            x, original = (real_rows(values, layer.real[index]) for values in (x, original))
        if not step:  # batches are alike
            rows = layer.form.num_rows(x) * len(layer.real)
            step = max(1, rows // max(layer.max_rows, 8 * W.shape[-1]))
        parts = zip(layer.form.patches(x, step), layer.form.patches(original, step), strict=True)
        for patches, others in parts:
            # Batches alternate between the halves, so that data that is sorted (by class, by time) is in both.
            halves[index % 2].add(patches, others)
            energy += (others.to(dtype) @ W.mT).square().sum(1, dtype=torch.float64)
    merged = (InputMoments(dtype), InputMoments(dtype))
    total = torch.zeros_like(energy)
    for states, part in gather(([half.state() for half in halves], energy.cpu())):
        total += part.to(total)
        for own, state in zip(merged, states, strict=True):
            if state["num_rows"]:
                own.merge(InputMoments.from_state(state, weight.device))
    return merged, total / max(1, sum(half.num_rows for half in merged))


# --- graphs


def _firsts(values: BatchValues) -> Iterator[Tensor]:
    return (batch[0] for batch in values)


def _norm_behind(graph: fx.GraphModule, node: fx.Node) -> str | None:
    """The batch norm with running statistics that alone reads the node, and is called once."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if user.op != "call_module" or user.args[:1] != (node,):
        return None
    module = graph.get_submodule(str(user.target))
    times = sum(other.target == user.target for other in graph.graph.nodes)
    is_norm = isinstance(module, _BatchNorm) and module.running_mean is not None
    return str(user.target) if is_norm and times == 1 else None


def _swapped(graph: fx.GraphModule, other: fx.GraphModule) -> Callable[[Block], AbstractContextManager[None]]:
    """`with swapped(block)`: the graph has the parameters and buffers of another one of the same form."""
    modules = dict(other.named_modules(remove_duplicate=False))
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for path, module in graph.named_modules():
        if path in modules:
            pairs += [(module._parameters, modules[path]._parameters), (module._buffers, modules[path]._buffers)]

    @contextlib.contextmanager
    def swapped(block: Block) -> Iterator[None]:
        before = [(here, dict(here)) for here, _ in pairs]
        for here, there in pairs:
            here.update({name: there[name] for name in here if name in there})
        try:
            yield
        finally:
            for here, values in before:
                here.update(values)

    return swapped


# --- hooks


class _Reached(Exception):
    """The layer was reached: the rest of the forward is not needed."""


def _input(model: nn.Module, layer: nn.Module, call: Call) -> Tensor:
    """The input of the layer in a run of the model."""
    found: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else next(iter(kwargs.values())))
        raise _Reached

    with contextlib.suppress(_Reached), hooked([layer.register_forward_pre_hook(stop, with_kwargs=True)]):
        model(*call[0], **call[1])
    return found[0]
