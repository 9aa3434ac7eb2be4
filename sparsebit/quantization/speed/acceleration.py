"""`Acceleration`: inserts everything that speeds up a training step into a captured model, and removes it again.

The model's modules and graphs do not change. In training, the forwards of layers and graphs are replaced by ones
that fuse steps, with the same values and gradients:

    layers            `fused_layer`: a layer and its input's quantizer as one autograd node; `first_layer`
    graphs            `training_graph` with `fused_activations`, `stacked_selects`
    weights           `weight_batches`: all weights quantized in a few kernels before a forward
    saved tensors     `saved_activations`: cheap values are recomputed in the backward (on request)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from sparsebit.graph.capture import Captured
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.speed.fused_activations import fuse_activations, fuse_relus
from sparsebit.quantization.speed.fused_layer import FusedLayer
from sparsebit.quantization.speed.fusion_guards import restore, substitute, substitute_of
from sparsebit.quantization.speed.recomputation import packing
from sparsebit.quantization.speed.saved_activations import record_functions, record_modules
from sparsebit.quantization.speed.savings import Savings
from sparsebit.quantization.speed.stacked_selects import join_selects, stack_quantizers
from sparsebit.quantization.speed.training_graph import FusedStep, Rewrite, TrainingGraph
from sparsebit.quantization.speed.weight_batches import WeightBatches


class Acceleration:
    """The active replacements for `captured`, until `undo`. A copy of the model has none: it is accelerated again."""

    def __init__(
        self, model: nn.Module, captured: Captured, *, packs: bool | None = None, savings: Savings | None = None
    ) -> None:
        """`packs`: as in `QuantModel.pack_saved_activations`; None: only large copies are recomputed."""
        self.model, self.captured, self.packs = model, captured, packs
        self.savings = savings = savings or Savings()
        self.undo()
        for module in model.modules():
            if type(module) is WeightedQuantOpr:
                substitute(module, FusedLayer(module, packs, savings))
        rewrites = self._rewrites()
        for region in captured.regions.values():
            substitute(region.graph_module, TrainingGraph(region.graph_module, rewrites))
        if packs:
            record_modules(model)
        root = captured.regions.get("")
        self.weights = WeightBatches(root) if root is not None and savings.weight_batches else None

    def _rewrites(self) -> tuple[Rewrite, ...]:
        savings = self.savings
        wanted = {fuse_relus: savings.relus, fuse_activations: savings.activations}
        wanted[stack_quantizers] = savings.joined_selects and savings.stacked_quantizers
        wanted |= {join_selects: savings.joined_selects, record_functions: bool(self.packs)}
        return tuple(rewrite for rewrite, is_wanted in wanted.items() if is_wanted)

    def is_for(self, captured: Captured, packs: bool | None, savings: Savings | None) -> bool:
        """Whether these arguments would make the same object."""
        return self.captured is captured and self.packs is packs and self.savings == (savings or Savings())

    def undo(self) -> None:
        """Restore the modules' own forwards."""
        for module in self.model.modules():
            restore(module)
        for region in self.captured.regions.values():
            restore(region.graph_module)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context for one forward with gradients."""
        weights = contextlib.nullcontext() if self.weights is None else self.weights.ready()
        with packing() if self.packs else contextlib.nullcontext(), weights:
            yield

    @property
    def steps(self) -> list[FusedStep]:
        """The fused steps of all graphs."""
        graphs = (substitute_of(region.graph_module) for region in self.captured.regions.values())
        return [step for graph in graphs if isinstance(graph, TrainingGraph) for step in graph.steps]

    def release_weights(self) -> None:
        """Let layers quantize their own weights again: a module's own code may run a layer again in the backward."""
        if self.weights is not None:
            self.weights.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
