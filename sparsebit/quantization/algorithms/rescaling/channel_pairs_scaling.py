"""`FloatRuns`: the steps that equalization and smoothing share, around the choice of their factors.

In order: reset parameters to the float model's (`start_from_float`), run the data and keep the float outputs
(`observe`), apply factors, undo pairs that change the float outputs (`_proved`) or raise the quantization error on
held-out samples (`HeldOutJudge`), and calibrate again, because all ranges have changed. `float_runs` is the context
manager around these; after an error everything is as before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from sparsebit.errors import CalibrationError, CaptureError
from sparsebit.execution.batches import Call, calls, input_rows
from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.execution.distributed import gather
from sparsebit.graph.values.comparison import difference
from sparsebit.graph.values.nested import map_nested
from sparsebit.numerics.full_float32 import full_float32
from sparsebit.numerics.layer_channels import along_inputs
from sparsebit.progress import track
from sparsebit.quantization.algorithms.rescaling.channel_pairs import ChannelPair, find_pairs
from sparsebit.quantization.algorithms.rescaling.channel_pairs_rules import Value
from sparsebit.quantization.algorithms.rescaling.held_out_pairs import REVERTED, HeldOutJudge
from sparsebit.quantization.calibrating.model_state import require_calibrated
from sparsebit.quantization.faithful.carried_state import LIKE_THIS
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)

# Batches that stay in memory; the rest waits on disk.
_INPUT_BYTES = 32 * MIB
Factors = dict[str, Tensor]  # by the pair's name, `(channels,)` float64
Watch = Callable[[fx.Node, Any], None]  # a callback for each node of a run and its value


class FloatRuns:
    """The float model's graph and its batches, and the changes that are made to its parameters."""

    def __init__(self, qmodel: QuantModel, data: Any, *, verb: str, memory_budget: int) -> None:
        require_calibrated(qmodel, verb)
        if not isinstance(qmodel.model, fx.GraphModule):
            raise CaptureError(f"{verb}() needs a graph of the whole model, which could not be traced: see coverage")
        self.qmodel, self.root, self.verb = qmodel, qmodel.model, verb
        self.batches = SharedData(device_bytes=0, host_bytes=_INPUT_BYTES)
        self.outputs = SharedData(device_bytes=0, host_bytes=min(_INPUT_BYTES, memory_budget))
        self.has_data = data is not None
        for call in calls(data, qmodel.original, qmodel.device) if data is not None else [self._made_up_call()]:
            if input_rows(call) != {0}:  # an empty batch shows nothing
                self.batches.put(len(self.batches), call)
        if not len(self.batches):
            raise CalibrationError(f"{verb}(): no batch with samples was given; it needs those of the calibration")
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._numbers = {q: {key: value.clone() for key, value in q.state_dict().items()} for q in qmodel.quantizers()}

    def _made_up_call(self) -> Call:
        """A call with random values in the shapes of the example, for a model whose activations stay in float."""
        example, quantizers = self.qmodel.example_inputs, self.qmodel.quantizers()
        is_known = any(q.target == "activation" and q.is_calibrated and not q.fake_fused for q in quantizers)
        if is_known or example is None:
            raise CalibrationError(
                f"{self.verb}(): give the calibration data, or, for weights alone, example_inputs before"
            )
        generator = torch.Generator().manual_seed(0)

        def made_up(tensor: Tensor) -> Tensor:
            values = torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else torch.zeros(())
            return values.expand(tensor.shape).to(self.qmodel.device, tensor.dtype, copy=True)

        call: Call = map_nested(Tensor, made_up, example)
        return call

    def close(self) -> None:
        self.batches.clear()
        self.outputs.clear()

    @functools.cached_property
    def judge(self) -> HeldOutJudge:
        """Decides on held-out samples; created on first access, with quantization off."""
        return HeldOutJudge(self.qmodel, self.batches)

    def pairs(self) -> list[ChannelPair]:
        """The pairs of the graph, found on the first batch."""
        found: dict[fx.Node, Value] = {}
        args, kwargs = self.batches.get(0)
        with interpreted(self.root, lambda node, value: found.update({node: Value.of(value)})), torch.no_grad():
            self.qmodel(*args, **kwargs)
        if not found:
            raise CalibrationError(f"{self.verb}(): the first batch has another form than the example; {LIKE_THIS}")
        return find_pairs(self.root, found)

    def observe(self, watch: Watch, *learned: Watch) -> None:
        """Run all batches, and keep the outputs; held-out samples are hidden from `learned`, not from `watch`."""
        with torch.no_grad(), full_float32():
            for index, (piece, is_held) in enumerate(track(self.judge.pieces, self.verb)):
                args, kwargs = self.judge.inputs(piece)
                with interpreted(self.root, watch, *(() if is_held else learned)):
                    self.outputs.put(index, self.qmodel(*args, **kwargs))

    def changed(self) -> str | None:
        """The first difference from the kept outputs, on any process; None if there is none."""
        with torch.no_grad(), full_float32():
            calls = enumerate(self.judge.inputs(piece) for piece, _ in self.judge.pieces)
            found = (difference(self.qmodel(*args, **kwargs), self.outputs.get(i)) for i, (args, kwargs) in calls)
            first = next(filter(None, found), None)
        return next(filter(None, gather(first)), None)

    @torch.no_grad()
    def start_from_float(self) -> None:
        """Reset parameters that algorithms have rounded: their codes fit the old ranges, and would be rounded twice."""
        changed = self.qmodel.float_parameters.changed(self.root)
        for parameter, value in changed:
            self._rounded.append((parameter, parameter.detach().clone()))
            parameter.copy_(value)
        before = f"{self.verb}(): algorithms have changed weights of this model for ranges that change now: they are"
        if changed:
            log.warning("%s the float model's again. Call %s() first, and the others after it", before, self.verb)
        elif self.qmodel.float_values_are_lost:
            log.warning("%s rounded a second time, as a saved model has no other. Start from the float model", before)

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore every parameter, scale and zero point after an error."""
        self.restore()
        for quantizer, state in self._numbers.items():
            quantizer.load_state_dict(state)
        for parameter, before in self._rounded:
            parameter.copy_(before)

    @torch.no_grad()
    def apply(self, pairs: Sequence[ChannelPair], factors: Factors) -> None:
        """Divide the sources by the factors and multiply the readers by them. The previous values are kept."""
        for pair in pairs:
            factor = factors[pair.name].double()
            for parameter, spread in pair.divided:
                self.remember(parameter)
                parameter.copy_(parameter.double() / spread(factor).to(parameter.device))
            for reader in pair.readers:
                weight = reader.layer.get_parameter("weight")
                self.remember(weight)
                weight.copy_(weight.double() * along_inputs(reader.layer, reader.factors(factor)).to(weight.device))

    def remember(self, parameter: Tensor) -> None:
        """Keep the parameter's value, on the first call for it."""
        self._saved.setdefault(id(parameter), (parameter, parameter.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every parameter to its value before the first factor."""
        for parameter, before in self._saved.values():
            parameter.copy_(before)

    def apply_best(
        self,
        pairs: Sequence[ChannelPair],
        factors: Factors,
        *,
        asym: bool,
        then: Callable[[Sequence[ChannelPair]], None] = lambda pairs: None,
    ) -> dict[str, str]:
        """Apply the factors that leave the float output unchanged and do not raise the quantization error on held-out
        samples; returns the other pairs, each with the reason. `then`: called whenever factors of pairs were applied.
        """
        refused: dict[str, str] = {}
        proved = self._proved([], list(pairs), factors, refused)
        for name, why in refused.items():
            log.warning("%s: %s is undone: the float output would change: %s", self.verb, name, why)

        def change(chosen: Sequence[ChannelPair]) -> None:
            self.restore()
            self.apply(chosen, factors)
            then(chosen)

        if not self.has_data:
            change(proved)
            return refused
        kept = self.judge.kept(self.verb, proved, change, asym=asym)
        return refused | {pair.name: REVERTED for pair in proved if pair not in kept}

    def _proved(
        self, kept: list[ChannelPair], tried: list[ChannelPair], factors: Factors, refused: dict[str, str]
    ) -> list[ChannelPair]:
        """`kept` and those of `tried` that leave the float outputs unchanged, found by bisection."""
        if not tried:
            return kept
        self.restore()
        self.apply([*kept, *tried], factors)
        found = self.changed()
        if found is None:
            return [*kept, *tried]
        if len(tried) == 1:
            refused[tried[0].name] = found
            return kept
        half = len(tried) // 2
        return self._proved(self._proved(kept, tried[:half], factors, refused), tried[half:], factors, refused)

    def calibrate_again(self, *, asym: bool, memory_budget: int) -> None:
        """Ranges of all weights and activations, from the batches."""
        qmodel = self.qmodel
        qmodel.prepare_calibration(keep_inputs=asym, memory_budget=memory_budget)
        with torch.no_grad():
            for index in range(len(self.batches) if self.has_data else 0):
                args, kwargs = self.batches.get(index)
                qmodel(*args, **kwargs)
        qmodel.calc_qparams(asym=asym)


@contextlib.contextmanager
def float_runs(qmodel: QuantModel, data: Any, *, verb: str, asym: bool, memory_budget: int) -> Iterator[FloatRuns]:
    """Inside, quantization is off. Afterwards ranges are calibrated again; after an error everything is restored."""
    runs = FloatRuns(qmodel, data, verb=verb, memory_budget=memory_budget)
    switches = qmodel.is_quantized("weight"), qmodel.is_quantized("activation")
    qmodel.eval()
    qmodel.set_quant(w_quant=False, a_quant=False)
    try:
        runs.start_from_float()
        yield runs
        runs.calibrate_again(asym=asym, memory_budget=memory_budget)
        qmodel.float_parameters.clear()
    except BaseException:
        runs.put_back()
        raise
    finally:
        runs.close()
        qmodel.set_quant(*switches)


@contextlib.contextmanager
def interpreted(root: fx.GraphModule, *watches: Watch) -> Iterator[None]:
    """Inside, the graph runs node by node, and the watches are called with each node and its value."""
    placeholders = [(node, str(node.target)) for node in root.graph.find_nodes(op="placeholder")]

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            for watch in watches:
                watch(n, value)
            return value

    def run(**inputs: Any) -> Any:
        given = [inputs.get(name, node.args[0] if node.args else None) for node, name in placeholders]
        return Watched(root).run(*given)

    before = root.__dict__.get("forward")
    root.__dict__["forward"] = run
    try:
        yield
    finally:
        del root.__dict__["forward"]
        if before is not None:
            root.__dict__["forward"] = before
