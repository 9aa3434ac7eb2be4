"""`CalibrationRunner`: the user's forward passes -> every quantizer's scale and zero point.

Plainly, statistics are gathered during the forwards themselves and no activation is kept. With `asym`, layers are calibrated
in order, each on inputs that come from quantized predecessors; for that the *inputs* of the forwards are kept (a little in
memory, the rest on disk), and the values between layers only until their last reader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from sparsebit.errors import CalibrationError
from sparsebit.execution.distributed import gather, is_distributed, to_cpu
from sparsebit.execution.value_store import MIB, SharedData
from sparsebit.execution.visitor import GraphVisitor
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.progress import track
from sparsebit.quantization.quantizers.base import Quantizer

log = logging.getLogger(__name__)

# Inputs of past batches that stay in memory; the rest waits on disk in case `asym` asks for them.
_INPUT_BYTES = 32 * MIB


class CalibrationRunner:
    """One calibration, from `prepare` to `calc_qparams`. `root` is the graph to walk, None where the model is opaque."""

    def __init__(self, model: nn.Module, root: fx.GraphModule | None, *, keep_inputs: bool, memory_budget: int) -> None:
        self.model, self.root = model, root
        self.memory_budget = memory_budget
        self.inputs = SharedData(device_bytes=0, host_bytes=min(_INPUT_BYTES, memory_budget)) if keep_inputs else None
        self.num_batches = 0

    def prepare(self) -> None:
        for quantizer in self.features():
            quantizer.observer.reset()
            quantizer.observing = not quantizer.fake_fused

    def record(self, call: Any) -> None:
        """Note one forward's inputs: by name for a graph, (args, kwargs) for an opaque model."""
        if self.inputs is not None:
            self.inputs.put(self.num_batches, call)
        self.num_batches += 1

    def finish(self) -> None:
        for quantizer in self.features():
            quantizer.observing = False
        if self.inputs is not None:
            self.inputs.clear()

    def calc_qparams(self, *, asym: bool, w_quant: bool, a_quant: bool) -> list[str]:
        """Fill every quantizer; gives the names of those that never saw a float tensor (they are off from now on)."""
        if self.num_batches == 0 and any(True for q in self.features() if not q.fake_fused):
            raise CalibrationError("no batch was run since prepare_calibration(); run the model on a few batches, then call calc_qparams()")
        self._calibrate_weights()
        if asym:
            self._calibrate_in_order(w_quant, a_quant)
        else:
            self._calibrate_features()
        unseen = [q for q in self.features() if not q.fake_fused and not q.is_calibrated]
        for quantizer in unseen:
            quantizer.set_fake_fused()
            quantizer.was_unseen = True
        return [quantizer.name for quantizer in unseen]

    # --- plain

    def _calibrate_weights(self) -> None:
        layers = [m for m in self.model.modules() if isinstance(m, WeightedQuantOpr) and not m.weight_quantizer.fake_fused]
        for layer in track(layers, "weights"):
            layer.weight_quantizer.observer.reset()
            layer.weight_quantizer.update_observer(getattr(layer.op, layer.row.weight or "weight"))
            layer.weight_quantizer.calc_qparams()

    def _calibrate_features(self) -> None:
        active = [q for q in self.features() if not q.fake_fused]
        merge_across_ranks(active)
        for quantizer in track(active, "ranges"):
            if not quantizer.observer.is_empty:
                quantizer.calc_qparams()

    def features(self) -> list[Quantizer]:
        """Quantizers that learn their range from forwards: all but those of weights that layers own."""
        owned = {id(m.weight_quantizer) for m in self.model.modules() if isinstance(m, WeightedQuantOpr)}
        return [m for m in self.model.modules() if isinstance(m, Quantizer) and id(m) not in owned]

    # --- in order

    def _calibrate_in_order(self, w_quant: bool, a_quant: bool) -> None:
        if self.inputs is None:
            raise CalibrationError("asym=True needs the calibration inputs again; call prepare_calibration() with keep_inputs=True")
        for quantizer in self.features():
            quantizer.observing = False
            quantizer.observer.reset()
            quantizer.calibrated.fill_(False)
        self._switch_weights(w_quant)
        if self.root is None:
            self._calibrate_inside(self.model, lambda: (self.model(*args, **kwargs) for args, kwargs in self._recorded()), a_quant)
        else:
            store = SharedData(device_bytes=self.memory_budget, host_bytes=self.memory_budget)
            nodes = sum(node.op == "call_module" for node in self.root.graph.nodes)
            progress = iter(track(range(nodes), "layers"))

            def visit(node: fx.Node, run: Callable[[], Iterator[Any]]) -> None:
                if node.op == "call_module":
                    next(progress, None)
                    assert self.root is not None
                    self._calibrate_inside(self.root.get_submodule(str(node.target)), run, a_quant)

            GraphVisitor(self.root, store).run(self.num_batches, self.inputs.get, visit)
            next(progress, None)
        for quantizer in (m for m in self.model.modules() if isinstance(m, Quantizer)):
            quantizer.disable_quant()

    @torch.no_grad()
    def _calibrate_inside(self, module: nn.Module, run: Callable[[], Iterator[Any]], a_quant: bool) -> None:
        """Calibrate the module's feature quantizers one after the other in the order in which its code reaches them."""
        owned = {id(q) for q in self.features()}
        pending = [m for m in module.modules() if isinstance(m, Quantizer) and id(m) in owned and not m.fake_fused and not m.is_calibrated]
        if len(pending) > 1:
            pending = _in_call_order(pending, run)
        for quantizer in pending:
            quantizer.observing = True
            for _ in run():
                pass
            quantizer.observing = False
            merge_across_ranks([quantizer])
            if not quantizer.observer.is_empty:
                quantizer.calc_qparams()
                quantizer.use_quant = a_quant

    def _recorded(self) -> Iterator[Any]:
        assert self.inputs is not None
        for index in range(self.num_batches):
            yield self.inputs.get(index)

    def _switch_weights(self, on: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, WeightedQuantOpr) and on and not module.weight_quantizer.fake_fused:
                module.weight_quantizer.enable_quant()


def merge_across_ranks(quantizers: list[Quantizer]) -> None:
    """Every rank's statistics into every rank's observers, in rank order, so that all compute the same numbers."""
    if not is_distributed():
        return
    states = gather({q.name: to_cpu(q.observer.state()) for q in quantizers if not q.observer.is_empty})
    for quantizer in quantizers:
        merged = None
        for state in states:
            if quantizer.name in state:
                part = quantizer._new_observer()
                part.load_state(state[quantizer.name])
                if merged is None:
                    merged = part
                else:
                    merged.merge(part)
        if merged is not None:
            quantizer.observer = merged


def _in_call_order(quantizers: list[Quantizer], run: Callable[[], Iterator[Any]]) -> list[Quantizer]:
    """Those quantizers that one batch reaches, in the order of their first call."""
    order: dict[Quantizer, None] = {}
    handles = [q.register_forward_pre_hook(lambda module, args: order.setdefault(module)) for q in quantizers]
    try:
        next(run(), None)
    finally:
        for handle in handles:
            handle.remove()
    return list(order)
