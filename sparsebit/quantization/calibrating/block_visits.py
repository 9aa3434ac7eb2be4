"""`visit_blocks`: runs the block engine (`execution/blocks`) on a quantized model, for algorithms that go by blocks.

For each block, an algorithm gets the inputs that the quantized blocks before it produce, and the outputs that the float
model has there (the targets). This file adds what the engine does not know: quantizers are on for the inputs and off
for the targets; the float model's parameters are used for the targets although earlier visits have changed them; and a
finished block can be saved and loaded (`resume`). Needs a graph of the whole model.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from sparsebit.errors import CalibrationError, CaptureError, CheckpointError
from sparsebit.execution.batches import calls
from sparsebit.execution.blocks.engine import BlockData, Visit, run_blocks
from sparsebit.execution.blocks.find_blocks import Block, Flow, single_layers, whole_graph
from sparsebit.execution.blocks.resume import Resume
from sparsebit.execution.blocks.runner import BlockRunner
from sparsebit.execution.blocks.search import find_blocks
from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.execution.distributed import gather
from sparsebit.execution.held_out import HoldOut, split_samples
from sparsebit.execution.image_views import has_images, view_of, with_views
from sparsebit.graph.nodes.example import GuardError
from sparsebit.graph.region import Region
from sparsebit.quantization.building.attach_integer_ops import make_room_for_biases
from sparsebit.quantization.building.float_parameters import FloatParameters
from sparsebit.quantization.calibrating.model_state import (
    check_ready,
    quantizers_of,
    require_whole,
    switched,
    switched_on,
    warn_if_lost,
)
from sparsebit.quantization.faithful.carried_state import LIKE_THIS
from sparsebit.quantization.faithful.simulation import SimulatedModel

log = logging.getLogger(__name__)

# Calibration batches that stay in memory; the rest waits on disk.
_INPUT_BYTES = 32 * MIB
Blocks = Sequence[str] | Literal["layers", "network"] | None


@dataclass(frozen=True)
class FloatRun:
    """The means for an algorithm to run the float model before the first block is visited.

    `inputs_of(i)`: the graph's inputs of batch i by name. Inside `as_float(block)` a block computes the same as in
    the float model.
    """

    graph_module: fx.GraphModule
    blocks: Sequence[Block]
    num_batches: int
    inputs_of: Callable[[int], dict[str, Any]]
    as_float: Callable[[Block], AbstractContextManager[None]]


def visit_blocks(
    qmodel: SimulatedModel,
    data: Any,
    visit: Visit,
    *,
    blocks: Blocks = None,
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
    prepare: Callable[[FloatRun], None] | None = None,
    hold_out: HoldOut | None = None,
    views: int = 1,
    held_views: int | None = None,
) -> None:
    """Call `visit(block_data)` for each block in order, with all calibrated quantizers switched on.

    `block_data` has the block's inputs from the quantized blocks before it, its inputs in the float model, and the
    float model's outputs as targets, for `data` (batches as for calibration).
    `blocks`: module paths, "layers" for single layers, "network" for all as one, or None to find them. `resume`: a
    folder that keeps each finished block; a run that was killed continues after them. `memory_budget`: bytes of
    activations in memory. `prepare`: called once, before the first block, with a `FloatRun`. `hold_out`: some
    samples are not among those of `block_data`, but in `block_data.held_out`. `views`: the number of views of each
    image (itself, and copies that are mirrored and shifted); `held_views`: of held-out ones, if that is another number.
    """
    require_whole(qmodel, "visit_blocks")
    check_ready(qmodel, "visit_blocks")
    root, float_parameters = qmodel.built.root, qmodel.float_parameters
    if root is None:
        raise CaptureError("visit_blocks() needs a graph of the whole model, which could not be traced: see coverage")
    warn_if_lost(qmodel, "blocks are compared with the changed weights")
    qmodel.eval()
    float_parameters.drop_outdated(root.graph_module)
    settings = str(qmodel.config.to_dict()) + float_parameters.checksum()

    floats, wanted = _FloatBlocks(float_parameters, visit), _blocks(root.graph_module, blocks)
    kept = None if resume is None else Resume(resume, block_state, floats.load, settings)
    store = SharedData(device_bytes=memory_budget, host_bytes=memory_budget)
    # Samples are held out before the first visit, so that no block has been fitted to them.
    with switched_on(qmodel), _bound_inputs(qmodel, root, data, memory_budget) as inputs:
        split = split_samples(len(inputs), inputs.get, _float_network(root.graph_module, floats.original), hold_out)
        if max(views, held_views or 0) > 1 and has_images(inputs.get(0)):
            split = with_views(split, views, held_views)
        elif max(views, held_views or 0) > 1:
            log.info("views: the input is not one batch of images (N, C, H, W), so that each sample has one view")
        pieces, held, seed = split.pieces, len(split.held), 0 if hold_out is None else hold_out.seed

        def inputs_of(index: int) -> dict[str, Any]:
            return view_of(pieces[index], inputs.get(pieces[index].batch), seed)

        if prepare is not None:
            prepare(FloatRun(root.graph_module, wanted, len(pieces), inputs_of, floats.original))
        run_blocks(
            *(root.graph_module, wanted, len(pieces), inputs_of, floats.visit),
            as_float=floats.original,
            store=store,
            resume=kept,
            num_held=held if any(gather(held)) else None,
        )
    make_room_for_biases(qmodel.model)


class _FloatBlocks:
    """Runs blocks with the float model's parameters, and keeps these before a visit changes them."""

    def __init__(self, float_parameters: FloatParameters, visit: Visit) -> None:
        self._parameters, self._visit = float_parameters, visit

    def visit(self, data: BlockData) -> None:
        with self._parameters.keeping(data.block):
            self._visit(data)

    def load(self, block: Block, state: dict[str, Tensor]) -> None:
        with self._parameters.keeping(block):
            load_block_state(block, state)

    @contextlib.contextmanager
    def original(self, block: Block) -> Iterator[None]:
        with as_float(block), self._parameters.original(block):
            yield


@contextlib.contextmanager
def _bound_inputs(qmodel: SimulatedModel, root: Region, data: Any, memory_budget: int) -> Iterator[SharedData]:
    """Each batch as the graph's inputs by name. Inside, a failing guard of the graph becomes a `CalibrationError`."""
    inputs = SharedData(device_bytes=0, host_bytes=min(_INPUT_BYTES, memory_budget))
    for args, kwargs in calls(data, qmodel.original, qmodel.device):
        bound = root.bind(args, kwargs)
        if bound is None:
            raise CalibrationError(f"batch {len(inputs)} has another form than the example; {LIKE_THIS}")
        inputs.put(len(inputs), bound)
    if not len(inputs):
        raise CalibrationError("no batch was given; visit_blocks() needs at least one on every rank")
    try:
        yield inputs
    except GuardError as error:
        raise CalibrationError(f"{error}; {error.advice}") from error
    finally:
        inputs.clear()


def _float_network(
    graph_module: fx.GraphModule, in_float: Callable[[Block], AbstractContextManager[None]]
) -> Callable[[dict[str, Any]], Any]:
    """The float model as a function of the graph's inputs by name."""

    def run(inputs: dict[str, Any]) -> Any:
        (network,) = whole_graph(graph_module)
        interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
        runner = BlockRunner(interpreter, network, Flow(graph_module).written(network.nodes))
        values = tuple(inputs.get(str(n.target), n.args[0] if n.args else None) for n in network.inputs)
        with in_float(network), torch.inference_mode(False), torch.no_grad():
            return runner(values)

    return run


def _blocks(graph_module: fx.GraphModule, blocks: Blocks) -> list[Block]:
    if blocks == "layers":
        return single_layers(graph_module)
    if blocks == "network":
        return whole_graph(graph_module)
    return find_blocks(graph_module, blocks)


def as_float(block: Block) -> AbstractContextManager[None]:
    """Inside, the quantizers of the block are off."""
    return switched(quantizers_of(*block.modules.values()), to=False)


@torch.no_grad()
def load_block_state(block: Block, state: dict[str, Tensor]) -> None:
    """Write a result of `block_state` into the block's parameters and buffers."""
    here = block_state(block)
    if {path: t.shape for path, t in here.items()} != {path: t.shape for path, t in state.items()}:
        raise CheckpointError(f"block {block.name!r}: a visit changed the names or shapes of its tensors")
    for path, tensor in here.items():
        tensor.copy_(state[path])


def block_state(block: Block) -> dict[str, Tensor]:
    """Every parameter and buffer that the block uses, by its path in the graph."""
    found: dict[str, Tensor] = {}
    for path, module in block.modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[f"{path}.{name}"] = tensor.detach()
    graph_module: Any = block.nodes[0].graph.owning_module
    own = {**dict(graph_module.named_parameters()), **dict(graph_module.named_buffers())}
    read = {str(n.target) for node in block.nodes for n in node.all_input_nodes if n.op == "get_attr"}
    return found | {path: own[path].detach() for path in read if path in own}
