"""`CalibrationRunner`: computes every quantizer's scale and zero point from the user's forward passes.

Without `asym`, statistics are gathered during the forwards and no activation is kept. With `asym`, layers are
calibrated in order, each on inputs that come from quantized predecessors; for that the *inputs* of the forwards are
kept (a little in memory, the rest on disk), and the values between layers only until their last reader.

Weights are observed once, at the end, except weights that a layer is called with instead of its own (by
`functional_call`, or by writes in forward): those are observed in each forward. On several ranks the statistics are
merged before any number is computed, so that all ranks get the same scales.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from sparsebit.errors import CalibrationError
from sparsebit.execution.blocks.engine import BlockData, run_blocks
from sparsebit.execution.blocks.find_blocks import single_layers
from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.execution.distributed import gather, is_distributed, to_cpu
from sparsebit.graph.state.hooks import hooked
from sparsebit.graph.values.nested import unwrapped
from sparsebit.progress import track
from sparsebit.quantization.calibrating.model_state import quantizers_of
from sparsebit.quantization.observers.leveled_histogram import LeveledHistogram
from sparsebit.quantization.ops.layer_call import current_weight
from sparsebit.quantization.ops.parameter_reads import QuantizedParameter
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.planning.float_reasons import HIDDEN, MASKED
from sparsebit.quantization.planning.sites import split_site
from sparsebit.quantization.quantizers.base import Quantizer

log = logging.getLogger(__name__)

# Inputs of past batches that stay in memory; the rest waits on disk in case `asym` asks for them.
_INPUT_BYTES = 32 * MIB


class CalibrationRunner:
    """One calibration, from `prepare` to `calc_qparams`. `root` is the graph to walk, None for an opaque model."""

    def __init__(self, model: nn.Module, root: fx.GraphModule | None, *, keep_inputs: bool, memory_budget: int) -> None:
        self.model, self.root = model, root
        self.memory_budget = memory_budget
        self.inputs = SharedData(device_bytes=0, host_bytes=min(_INPUT_BYTES, memory_budget)) if keep_inputs else None
        self.num_batches = 0
        self._substituted_weights: list[SubstitutedWeights] = []
        self._given: Any = None  # the inputs of the running forward
        self._handles: list[RemovableHandle] = []
        owners = (m for m in model.modules() if isinstance(m, WeightedQuantOpr | QuantizedParameter))
        self.layers = [layer for layer in owners if not layer.weight_quantizer.fake_fused]
        # Quantizers whose range comes from forwards: all except those of weights that layers own.
        owned = {id(layer.weight_quantizer) for layer in self.layers}
        self.data_quantizers = [q for q in quantizers_of(model) if id(q) not in owned and not q.fake_fused]
        # Quantizers that are reached only by calls off the captured path.
        nodes = () if root is None else root.graph.find_nodes(op="call_module")
        modules = (root.get_submodule(str(node.target)) for node in nodes if root is not None)
        called = {part for module in modules for part in module.modules()}
        self.uncalled_quantizers = [] if root is None else [q for q in self.data_quantizers if q not in called]

    def prepare(self) -> None:
        """Start observing."""
        for quantizer in self.data_quantizers:
            quantizer.start_observing()
        self._substituted_weights = [
            SubstitutedWeights(layer) for layer in self.layers if isinstance(layer, WeightedQuantOpr)
        ]
        self._handles = [self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)]

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for given in self._substituted_weights:
            given.note_own()
        if self.inputs is not None:  # a copy: the model, or the caller for the next batch, may write into them
            call = kwargs if self.root is not None else (args, kwargs)
            self._given = pytree.tree_map_only(torch.Tensor, torch.clone, call)

    def record(self, call: Any | None) -> None:
        """Called after a forward; None: it cannot be repeated from its inputs."""
        self.num_batches += 1
        if self.inputs is not None and call is not None:
            self.inputs.put(len(self.inputs), self._given)
        self._given = None

    def check(self, *, asym: bool) -> None:
        """Raise for states that cannot be calibrated, before anything is changed."""
        expected, fault = [q for q in self.data_quantizers if q not in self.uncalled_quantizers], ""
        saw_any = any(q.saw_infinity or not q.observer.is_empty for q in self.data_quantizers)
        saw_any, num_batches = any(gather(saw_any)), sum(gather(self.num_batches))
        if expected and not num_batches:
            fault = "no batch was run since prepare_calibration(); run the model on a few batches, then call this"
        elif expected and not saw_any:
            fault = (
                f"none of the {len(expected)} activation quantizers saw a float tensor in {self.num_batches} batches: "
                "they were empty, held integers, or ran the model's own code past all of them, or the model returned "
                "generators that were not read to their end; build the QuantModel with example_inputs like them, or "
                "set A.QUANTIZER.DISABLE: true to quantize weights alone"
            )
        elif asym and self.inputs is None:
            fault = "asym=True needs the calibration inputs again; call prepare_calibration() with keep_inputs=True"
        elif asym and self.inputs is not None and not sum(gather(len(self.inputs))):
            fault = (
                f"asym=True runs the graph layer by layer, and none of the {self.num_batches} batches has the form "
                "that it was captured for; build the QuantModel with example_inputs like them, or leave asym out"
            )
        if fault:
            raise CalibrationError(fault)

    def finish(self) -> None:
        """Stop observing, and drop all statistics and inputs."""
        for quantizer in self.data_quantizers:
            quantizer.observing = False
            quantizer.observer.reset()
        self._stop_watching()
        if self.inputs is not None:
            self.inputs.clear()

    def _stop_watching(self) -> None:
        for handle in self._handles:
            handle.remove()
        for given in self._substituted_weights:
            given.remove()
        self._handles, self._substituted_weights = [], []

    def calc_qparams(self, *, asym: bool, w_quant: bool, a_quant: bool) -> list[str]:
        """Calibrate every quantizer. Those that never saw a float tensor are switched off, and their names returned."""
        given = self._merged_substituted_weights()
        self._stop_watching()
        for layer in track(self.layers, "weights"):
            calibrate_weight(layer, with_observed=layer.weight_quantizer.name in given)
        seen = self._calibrate_in_order(w_quant, a_quant) if asym else self._calibrate_on_data(self.data_quantizers)
        unseen = [quantizer for quantizer in self.data_quantizers if id(quantizer) not in seen]
        for quantizer in unseen:
            quantizer.set_fake_fused()
            quantizer.was_unseen = True
        return [quantizer.name for quantizer in unseen]

    def _merged_substituted_weights(self) -> set[str]:
        """Merge the statistics of substituted weights over all ranks; returns the names of their quantizers."""
        own = {given.layer.weight_quantizer.name for given in self._substituted_weights if given.saw_any}
        seen: set[str] = set().union(*gather(own))
        quantizers = [given.layer.weight_quantizer for given in self._substituted_weights]
        merge_across_ranks([quantizer for quantizer in quantizers if quantizer.name in seen])
        return seen

    def _calibrate_on_data(self, quantizers: list[Quantizer]) -> set[int]:
        """Calibrate on the values observed on all ranks; returns the ids of the quantizers that had observed any."""
        merge_across_ranks(quantizers)
        infinite = set().union(*gather({q.name for q in quantizers if q.saw_infinity}))
        layers = {split_site(layer.weight_quantizer.name)[0] for layer in self.layers}
        # Infinite inputs of a layer with weights are an error; before a softmax they are a mask, which stays in float.
        if wrong := sorted(name for name in infinite if split_site(name)[0] in layers):
            raise CalibrationError(
                f"{wrong[0]}: infinite values, so no range can be computed; look into the calibration data"
            )
        hidden = infinite | _masked(quantizers, infinite)
        seen = [q for q in quantizers if not q.observer.is_empty and q.name not in hidden]
        _warn_of_far_samples(seen)
        for quantizer in track(seen, "ranges"):
            quantizer.calc_qparams()
        return {id(quantizer) for quantizer in seen}

    # --- in order

    def _calibrate_in_order(self, w_quant: bool, a_quant: bool) -> set[int]:
        # The graph does not call these quantizers, so they get the ranges that the forwards have observed.
        seen = self._calibrate_on_data(self.uncalled_quantizers)
        for quantizer in self.data_quantizers:
            quantizer.observing = False
            quantizer.observer.reset()
        for layer in self.layers:
            layer.weight_quantizer.use_quant = w_quant
        switches = {"weight": w_quant, "activation": a_quant}
        if self.root is None:
            return self._calibrate_inside(self.model, self._run_model, switches)
        observed = {id(quantizer) for quantizer in self.data_quantizers}
        layers = single_layers(self.root, lambda layer: any(id(part) in observed for part in layer.modules()))

        def visit(data: BlockData) -> None:
            (module,) = data.block.modules.values()
            seen.update(self._calibrate_inside(module, data.outputs, switches, seen))

        assert self.inputs is not None
        store = SharedData(device_bytes=self.memory_budget, host_bytes=self.memory_budget)
        run_blocks(self.root, layers, len(self.inputs), self.inputs.get, visit, store=store, what="layers")
        return seen

    @torch.no_grad()
    def _calibrate_inside(
        self, module: nn.Module, run: Callable[[], Iterator[Any]], switches: dict[str, bool], done: Iterable[int] = ()
    ) -> set[int]:
        """Calibrate the module's quantizers one after the other, in the order in which its code calls them."""
        wanted = {id(quantizer) for quantizer in self.data_quantizers}.difference(done)
        pending = [quantizer for quantizer in quantizers_of(module) if id(quantizer) in wanted]
        seen: set[int] = set()
        for group in _in_call_order(pending, run) if len(pending) > 1 else [pending]:
            for quantizer in group:
                quantizer.start_observing()
            for _ in run() if group else ():
                pass
            seen |= self._calibrate_on_data(group)
            for quantizer in group:
                quantizer.observing = False
                quantizer.use_quant = switches[quantizer.target] and id(quantizer) in seen
        return seen

    def _run_model(self) -> Iterator[Any]:
        assert self.inputs is not None
        for index in range(len(self.inputs)):
            # A copy: the model may write into its inputs, which are needed again.
            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, self.inputs.get(index))
            yield self.model(*args, **kwargs)


def _masked(quantizers: list[Quantizer], infinite: set[str]) -> set[str]:
    """The names of sites that hold a mask's numbers; they stay float, which is recorded and reported."""
    found = {}
    for quantizer in quantizers:
        if quantizer.name in infinite:
            quantizer.float_reason = HIDDEN
        elif (apart := quantizer.masked_numbers()) is not None:
            quantizer.float_reason = f"{MASKED} ({apart})"
            found[quantizer.name] = apart
    if found:
        log.warning(
            "%d sites stay float, since they hold numbers of a mask, far from all other values: a grid that reaches "
            "them would have one code for all others: %s. If they are data, clip them, or call store_qparams()",
            *(len(found), "; ".join(f"{name}: {apart}" for name, apart in found.items())),
        )
    return set(found)


def _warn_of_far_samples(quantizers: list[Quantizer]) -> None:
    statistics = ((q.name, q.observer.statistic) for q in quantizers)
    if far := [(name, s) for name, s in statistics if isinstance(s, LeveledHistogram) and s.num_far]:
        name, first = far[0]
        log.warning(
            "%s, and %d sites more: %d of %d samples are far larger than nearly all others, and hardly count in ranges "
            "by mse; if they are what matters, take another observer there (minmax)",
            *(name, len(far) - 1, first.num_far, first.num_samples.total()),
        )


# --- weights that a layer is called with instead of its own


class SubstitutedWeights:
    """Observes weights that `functional_call`, or a write in forward, puts in the place of a layer's own.

    The layer's own weight is observed once, at the end of calibration. `compute_layer` of the instance is replaced
    until `remove`.
    """

    def __init__(self, layer: WeightedQuantOpr) -> None:
        self.layer, self.saw_any = layer, False
        self.note_own()
        layer.weight_quantizer.observer.reset()
        layer.__dict__["compute_layer"] = self.compute_layer

    def note_own(self) -> None:
        """Called before each forward of the model: the parameters at that time are the layer's own."""
        self.own = list(map(_Content, self.layer.op.parameters()))

    def remove(self) -> None:
        self.layer.__dict__.pop("compute_layer", None)

    def compute_layer(self, *args: Any, **kwargs: Any) -> Any:
        if list(map(_Content, self.layer.op.parameters())) != self.own:
            self.saw_any = True
            for weight in unwrapped(current_weight(self.layer.op).detach()):
                self.layer.weight_quantizer.update_observer(weight)
        return type(self.layer).compute_layer(self.layer, *args, **kwargs)


class _Content:
    """A tensor and its version: equal to another only if it is the same tensor with the same content."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not is_wrapped and not tensor.is_inference()
        self.state = (tensor.data_ptr(), tensor._version) if is_plain else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Content) and self.tensor is other.tensor and self.state == other.state

    __hash__ = None  # type: ignore[assignment]


# --- statistics


def calibrate_weight(layer: WeightedQuantOpr | QuantizedParameter, *, with_observed: bool = False) -> None:
    """Calibrate on the layer's current weight; `with_observed`: and on the weights observed before."""
    weight = layer.parameter if isinstance(layer, QuantizedParameter) else current_weight(layer.op)
    if not with_observed:
        layer.weight_quantizer.observer.reset()
    layer.weight_quantizer.update_observer(weight)
    layer.weight_quantizer.calc_qparams()


def merge_across_ranks(quantizers: list[Quantizer]) -> None:
    """Merge all ranks' statistics into every rank's observers, in rank order, so that all compute the same numbers."""
    if not is_distributed():
        return
    states = gather({q.name: to_cpu(q.observer.state()) for q in quantizers if not q.observer.is_empty})
    magnitudes = gather({q.name: q.magnitudes for q in quantizers})
    for quantizer in quantizers:
        for others in magnitudes:
            if quantizer.name in others:
                quantizer.magnitudes.merge(others[quantizer.name])
        merged = quantizer._new_observer()
        for state in (state[quantizer.name] for state in states if quantizer.name in state):
            part = quantizer._new_observer()
            part.load_state(state)
            merged.merge(part)
        quantizer.observer = merged


def _in_call_order(quantizers: list[Quantizer], run: Callable[[], Iterator[Any]]) -> list[list[Quantizer]]:
    """Groups of quantizers to calibrate together: each that the first batch reaches, in call order, then all others.

    The order is that of one rank, for all ranks: they merge their statistics group by group.
    """
    order: dict[str, None] = {}
    handles = [q.register_forward_pre_hook(lambda module, _: order.setdefault(str(module.name))) for q in quantizers]
    with hooked(handles):
        next(run(), None)
    names: list[str] = next(filter(None, gather(list(order))), [])
    by_name = {quantizer.name: quantizer for quantizer in quantizers}
    others = [quantizer for quantizer in quantizers if quantizer.name not in names]
    return [*([by_name[name]] for name in names), *([others] if others else [])]
