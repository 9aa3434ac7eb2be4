"""Scales the channels of a calibrated model: watches values on data, applies factors, and proves the result.

The float model must compute the same before and after. Its outputs are compared on the data; a pair that changes them
is undone.
"""

from __future__ import annotations

import contextlib
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
from sparsebit.progress import track
from sparsebit.quantization.algorithms.rescaling.channel_pairs import ChannelPair, find_pairs
from sparsebit.quantization.algorithms.rescaling.channel_pairs_rules import Value
from sparsebit.quantization.algorithms.rescaling.held_out_pairs import HeldOutJudge
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)

# Batches that stay in memory; the rest waits on disk.
_INPUT_BYTES = 32 * MIB
Factors = dict[str, Tensor]  # by the pair's name, `(channels,)` float64


# A callback for each node of a run and its value.
Watch = Callable[[fx.Node, Any], None]


class FloatRuns:
    """The float model's graph and its batches: pairs, values on the data, and comparison before and after."""

    def __init__(self, qmodel: QuantModel, data: Any, *, verb: str, memory_budget: int) -> None:
        if not any(quantizer.is_calibrated for quantizer in qmodel.quantizers()):
            raise CalibrationError(f"{verb}() needs a calibrated model; call calc_qparams() first")
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
        self.is_held = False  # whether the samples that are observed now are held out
        self._judge: HeldOutJudge | None = None
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._numbers = {q: {key: value.clone() for key, value in q.state_dict().items()} for q in qmodel.quantizers()}

    def _made_up_call(self) -> Call:
        """A call like the example that the model was captured with, used if no activation needs data."""
        quantizers = self.qmodel.quantizers()
        if any(q.target == "activation" and q.is_calibrated and not q.fake_fused for q in quantizers):
            raise CalibrationError(
                f"{self.verb}(): activations are quantized, and their ranges will change; give the calibration data"
            )
        if self.qmodel.example_inputs is None:
            raise CalibrationError(
                f"{self.verb}(): without data it needs the form of a call; build the QuantModel with example_inputs"
            )
        generator = torch.Generator().manual_seed(0)

        def made_up(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.qmodel.device)
            return torch.randn(tensor.shape, generator=generator).to(self.qmodel.device, tensor.dtype)

        call: Call = map_nested(Tensor, made_up, self.qmodel.example_inputs)
        return call

    def close(self) -> None:
        self.batches.clear()
        self.outputs.clear()

    def calls(self) -> Iterator[tuple[int, Any]]:
        for index in range(len(self.batches)):
            yield index, self.batches.get(index)

    @property
    def judge(self) -> HeldOutJudge:
        """Decides on held-out samples; created on first access, with quantization off."""
        if self._judge is None:
            self._judge = HeldOutJudge(self.qmodel, self.batches)
        return self._judge

    def keep_better(
        self, pairs: Sequence[ChannelPair], change: Callable[[Sequence[ChannelPair]], None], *, asym: bool
    ) -> list[ChannelPair]:
        """Apply the changes of those pairs that do not raise the quantization error on held-out samples; returns
        them.
        """
        if not self.has_data:
            change(pairs)
            return list(pairs)
        return self.judge.kept(self.verb, pairs, change, asym=asym)

    def pairs(self) -> list[ChannelPair]:
        """The pairs of the graph, found on the first batch."""
        found: dict[fx.Node, Value] = {}

        def note(node: fx.Node, value: Any) -> None:
            found[node] = Value.of(value)

        args, kwargs = self.batches.get(0)
        with interpreted(self.root, note), torch.no_grad():
            self.qmodel(*args, **kwargs)
        if not found:
            raise CalibrationError(
                f"{self.verb}(): the first batch has another form than the model was captured for; build the "
                "QuantModel with example_inputs like the batches"
            )
        return find_pairs(self.root, found)

    def observe(self, watch: Watch) -> None:
        """Run all batches through the float model: `watch` gets every node and its value; outputs are kept."""
        with torch.no_grad(), full_float32(), interpreted(self.root, watch):
            for index, (piece, is_held) in enumerate(track(self.judge.pieces, self.verb)):
                self.is_held = is_held
                args, kwargs = self.judge.inputs(piece)
                self.outputs.put(index, self.qmodel(*args, **kwargs))

    def changed(self) -> str | None:
        """The first difference from the kept outputs, on any process; None if there is none."""
        found = None
        with torch.no_grad(), full_float32():
            for index, (piece, _) in enumerate(self.judge.pieces):
                args, kwargs = self.judge.inputs(piece)
                found = found or difference(self.qmodel(*args, **kwargs), self.outputs.get(index))
                if found:
                    break
        return next(filter(None, gather(found)), None)

    # --- effects of earlier algorithms

    @torch.no_grad()
    def start_from_float(self) -> None:
        """Reset the parameters that algorithms have changed to the float model's values; the algorithms' work is lost.

        The ranges change with the channels, so weights that were rounded for the old ranges would be rounded twice.
        """
        changed = self.qmodel.float_parameters.changed(self.root)
        for parameter, value in changed:
            self._rounded.append((parameter, parameter.detach().clone()))
            parameter.copy_(value)
        if changed:
            log.warning(
                "%s(): algorithms have changed %d weights and biases of this model, for ranges that change now: they "
                "are the float model's again. Call %s() first, and the others after it",
                *(self.verb, len(changed), self.verb),
            )
        elif self.qmodel.float_values_are_lost:
            log.warning(
                "%s(): algorithms changed weights of this model before it was saved or pickled, for ranges that change "
                "now: they are rounded a second time. Start from the float model",
                self.verb,
            )

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore every parameter, scale and zero point after an error."""
        self.restore()
        for quantizer, state in self._numbers.items():
            quantizer.load_state_dict(state)
        for parameter, before in self._rounded:
            parameter.copy_(before)

    # --- factors

    @torch.no_grad()
    def apply(self, pairs: Sequence[ChannelPair], factors: Factors) -> None:
        """Divide the sources by the factors and multiply the readers by them. The previous values are kept."""
        for pair in pairs:
            factor = factors[pair.name].double()
            for parameter, spread in pair.divided:
                self.remember(parameter)
                parameter.copy_(parameter.double() / spread(factor).to(parameter.device))
            for reader in pair.readers:
                parameter, spread = reader.multiplied
                self.remember(parameter)
                parameter.copy_(parameter.double() * spread(factor).to(parameter.device))

    def remember(self, parameter: Tensor) -> None:
        """Keep the parameter's value, on the first call for it."""
        self._saved.setdefault(id(parameter), (parameter, parameter.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every parameter to its value before the first factor."""
        for parameter, before in self._saved.values():
            parameter.copy_(before)

    def apply_proved(self, pairs: Sequence[ChannelPair], factors: Factors) -> dict[str, str]:
        """Apply the factors that leave the float output unchanged; returns the other pairs, each with the reason."""
        refused: dict[str, str] = {}
        kept = self._proved([], list(pairs), factors, refused)
        self.restore()
        self.apply(kept, factors)
        for name, why in refused.items():
            log.warning("%s: %s is undone: the float output would change: %s", self.verb, name, why)
        return refused

    def _proved(
        self, kept: list[ChannelPair], tried: list[ChannelPair], factors: Factors, refused: dict[str, str]
    ) -> list[ChannelPair]:
        """`kept` plus those of `tried` that change nothing in addition to it; if all together do, each half is
        tried.
        """
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

    # --- afterwards

    def calibrate_again(self, *, asym: bool, memory_budget: int) -> None:
        """Ranges of all weights and activations, from the batches."""
        qmodel = self.qmodel
        qmodel.prepare_calibration(keep_inputs=asym, memory_budget=memory_budget)
        with torch.no_grad():
            for _, (args, kwargs) in self.calls() if self.has_data else ():
                qmodel(*args, **kwargs)
        qmodel.calc_qparams(asym=asym)


@contextlib.contextmanager
def float_runs(qmodel: QuantModel, data: Any, *, verb: str, asym: bool, memory_budget: int) -> Iterator[FloatRuns]:
    """Inside, quantization is off; afterwards ranges are calibrated again, and the switches are as they were.

    After an error the parameters are as they were too.
    """
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
def interpreted(root: fx.GraphModule, watch: Watch) -> Iterator[None]:
    """Inside, the graph runs node by node, and `watch` gets the value of each."""
    placeholders = [(node, str(node.target)) for node in root.graph.find_nodes(op="placeholder")]

    class Watched(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
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
