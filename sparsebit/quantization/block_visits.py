"""Runs the block engine on a quantized model: its batches, its float values, and the state of each block."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from sparsebit.errors import CalibrationError, CheckpointError
from sparsebit.execution.batches import Call
from sparsebit.execution.block_engine import BlockData, Visit, run_blocks
from sparsebit.execution.block_resume import Resume
from sparsebit.execution.block_runner import BlockRunner
from sparsebit.execution.block_search import find_blocks
from sparsebit.execution.blocks import Block, Flow, single_layers, whole_graph
from sparsebit.execution.distributed import gather
from sparsebit.execution.held_out import HoldOut, Split, split_samples
from sparsebit.execution.image_views import has_images, view_of, with_views
from sparsebit.execution.value_store import MIB, SharedData
from sparsebit.graph.example import GuardError
from sparsebit.graph.region import Region
from sparsebit.quantization.float_parameters import FloatParameters
from sparsebit.quantization.quantizers.base import Quantizer

log = logging.getLogger(__name__)

# Calibration batches that stay in memory; the rest waits on disk.
_INPUT_BYTES = 32 * MIB
Blocks = Sequence[str] | Literal["layers", "network"] | None


@dataclass(frozen=True)
class FloatRun:
    """What an algorithm needs to run the float model before the first block is visited.

    `inputs_of(i)`: the graph's inputs of batch i by name. Inside `as_float(block)` a block computes what it computes in
    the float model.
    """

    graph_module: fx.GraphModule
    blocks: Sequence[Block]
    num_batches: int
    inputs_of: Callable[[int], dict[str, Any]]
    as_float: Callable[[Block], AbstractContextManager[None]]


def visit_blocks(
    root: Region,
    batches: Iterable[Call],
    visit: Visit,
    *,
    blocks: Blocks,
    memory_budget: int,
    resume: str | os.PathLike[str] | None,
    settings: str,
    float_parameters: FloatParameters,
    prepare: Callable[[FloatRun], None] | None = None,
    hold_out: HoldOut | None = None,
    views: int = 1,
) -> None:
    """Call `visit` for each block of a calibrated graph whose quantization is on. `batches`: calls of the model.

    `float_parameters`: of what visits changed, now and earlier; the float model's values come from them. `hold_out`:
    the samples that a visit gets as `held_out`. `views`: of each image (`image_views.py`).
    """
    graph_module = root.graph_module
    float_parameters.drop_outdated(graph_module)
    inputs = SharedData(device_bytes=0, host_bytes=min(_INPUT_BYTES, memory_budget))
    for args, kwargs in batches:
        bound = root.bind(args, kwargs)
        if bound is None:
            raise CalibrationError(
                f"batch {len(inputs)} has another form than the model was captured for; build the QuantModel with "
                "example_inputs like the batches"
            )
        inputs.put(len(inputs), bound)
    if not len(inputs):
        raise CalibrationError("no batch was given; visit_blocks() needs at least one on every rank")
    settings += float_parameters.checksum()

    def keeping_visit(data: BlockData) -> None:
        with float_parameters.keeping(data.block):
            visit(data)

    def keeping_load(block: Block, state: dict[str, Tensor]) -> None:
        with float_parameters.keeping(block):
            load_block_state(block, state)

    @contextlib.contextmanager
    def in_float(block: Block) -> Iterator[None]:
        with as_float(block), float_parameters.original(block):
            yield

    wanted = _blocks(graph_module, blocks)
    kept = None if resume is None else Resume(resume, block_state, keeping_load, settings)
    store = SharedData(device_bytes=memory_budget, host_bytes=memory_budget)
    try:
        split = split_samples(len(inputs), inputs.get, _float_network(graph_module, in_float), hold_out)
        if views > 1:
            split = _with_views(split, views, inputs.get(0))
        pieces, held, seed = split.pieces, len(split.held), 0 if hold_out is None else hold_out.seed
        num_held = held if any(gather(held)) else None

        def inputs_of(index: int) -> dict[str, Any]:
            return view_of(pieces[index], inputs.get(pieces[index].batch), seed)

        if prepare is not None:
            prepare(FloatRun(graph_module, wanted, len(pieces), inputs_of, in_float))
        run_blocks(
            *(graph_module, wanted, len(pieces), inputs_of, keeping_visit),
            as_float=in_float,
            store=store,
            resume=kept,
            num_held=num_held,
        )
    except GuardError as error:
        raise CalibrationError(f"{error}, and a batch differs; give example_inputs like the batches") from error
    finally:
        inputs.clear()


def _with_views(split: Split, views: int, inputs: dict[str, Any]) -> Split:
    if has_images(inputs):
        return with_views(split, views)
    log.info("views=%d: no input is a batch of images (N, C, H, W), so that each sample has one view", views)
    return split


def _float_network(
    graph_module: fx.GraphModule, in_float: Callable[[Block], AbstractContextManager[None]]
) -> Callable[[dict[str, Any]], Any]:
    """The float model as a function of the graph's inputs by name."""

    def run(inputs: dict[str, Any]) -> Any:
        (network,) = whole_graph(graph_module)
        interpreter = fx.Interpreter(graph_module, garbage_collect_values=False)
        runner = BlockRunner(interpreter, network, Flow(graph_module).written(network.nodes))
        defaults = {node: node.args[0] if node.args else None for node in network.inputs}
        values = tuple(inputs.get(str(node.target), default) for node, default in defaults.items())
        with in_float(network), torch.inference_mode(False), torch.no_grad():
            return runner(values)

    return run


def _blocks(graph_module: fx.GraphModule, blocks: Blocks) -> list[Block]:
    if blocks == "layers":
        return single_layers(graph_module)
    if blocks == "network":
        return whole_graph(graph_module)
    return find_blocks(graph_module, blocks)


@contextlib.contextmanager
def as_float(block: Block) -> Iterator[None]:
    """Inside, the quantizers of the block are off."""
    found = [part for module in block.modules.values() for part in module.modules() if isinstance(part, Quantizer)]
    before = [(quantizer, quantizer.use_quant) for quantizer in dict.fromkeys(found)]
    for quantizer, _ in before:
        quantizer.use_quant = False
    try:
        yield
    finally:
        for quantizer, was_on in before:
            quantizer.use_quant = was_on


def block_state(block: Block) -> Mapping[str, Tensor]:
    """Every parameter and buffer that the block uses, by its path in the graph."""
    return _tensors(block)


@torch.no_grad()
def load_block_state(block: Block, state: dict[str, Tensor]) -> None:
    """Write into the block's parameters and buffers what `block_state` gave."""
    here = _tensors(block)
    if {path: t.shape for path, t in here.items()} != {path: t.shape for path, t in state.items()}:
        raise CheckpointError(
            f"block {block.name!r}: the kept parameters and buffers have other names or shapes than the model has; "
            "a visit must not add, remove or reshape them where the run is to be resumed"
        )
    for path, tensor in here.items():
        tensor.copy_(state[path])


def _tensors(block: Block) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in block.modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[f"{path}.{name}"] = tensor.detach()
    graph_module = block.nodes[0].graph.owning_module
    assert isinstance(graph_module, fx.GraphModule)
    own = {**dict(graph_module.named_parameters()), **dict(graph_module.named_buffers())}
    read = {str(n.target) for node in block.nodes for n in node.all_input_nodes if n.op == "get_attr"}
    return found | {path: own[path].detach() for path in read if path in own}
