"""`CalibratedModel`: a model that gathers statistics and gets its scales and zero points from them."""

from __future__ import annotations

import logging
from typing import Any

from sparsebit.errors import CalibrationError, CaptureError, ConfigError
from sparsebit.execution.batches import Call
from sparsebit.execution.distributed import gather
from sparsebit.execution.value_store import MIB
from sparsebit.graph.call_form import call_form
from sparsebit.graph.inference_mode import ordinary_tensors
from sparsebit.quantization.calibration import CalibrationRunner
from sparsebit.quantization.simulation import shown
from sparsebit.quantization.training import TrainableModel

log = logging.getLogger(__name__)


class CalibratedModel(TrainableModel):
    """What `QuantModel` does between its making and `calc_qparams`."""

    _runner: CalibrationRunner | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._first_call_is_due and self._runner is None:
            self._verify_first_call((args, kwargs))
        if self._proof_is_due and self._runner is not None:
            return self._verified((args, kwargs), "the first calibration batch", super().forward)
        return super().forward(*args, **kwargs)

    # --- calibrating

    def _record(self, call: Any) -> None:
        if self._runner is None:
            return
        if self.training and not self._runner.num_batches:
            log.warning(
                "calibrating in train mode: dropout and the statistics of batches are in what is seen; call eval()"
            )
        self._runner.record(call)

    def _capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._root is not None
        runner = self._runner
        if any(q.is_calibrated for q in self.quantizers()) or (runner is not None and runner.num_batches):
            raise CaptureError(
                f"this call gives {shown(call_form(self._root.source, args, kwargs))}, but the model was captured and "
                f"calibrated for {shown(self.call_form or {})}; build the QuantModel with example_inputs of this form"
            )
        super()._capture_again(args, kwargs)

    def _rebuild(self, example: Call | None) -> None:
        runner, training = self._runner, self.training
        super()._rebuild(example)
        if runner is not None:
            runner.finish()
            self.prepare_calibration(keep_inputs=runner.inputs is not None, memory_budget=runner.memory_budget)
            self.train(training)

    def prepare_calibration(self, *, keep_inputs: bool = True, memory_budget: int = 1024 * MIB) -> None:
        """Make every following forward gather statistics, with quantization off, in eval mode.

        `keep_inputs=False`: do not keep the inputs (32 MiB in memory, the rest on disk) that `calc_qparams(asym=True)`
        would need. `memory_budget`: bytes of activations that `asym` may hold in memory at once.
        """
        self._require_whole("prepare_calibration")
        for quantizer in self.quantizers():
            quantizer.revive()
        self.set_quant(w_quant=False, a_quant=False)
        self.eval()
        root = self._root.graph_module if self._root is not None else None
        self._runner = CalibrationRunner(self.model, root, keep_inputs=keep_inputs, memory_budget=memory_budget)
        self._runner.prepare()
        self._proof_is_due, self._first_call_is_due = bool(self._verifies), False

    @ordinary_tensors()
    def calc_qparams(self, asym: bool = False, w_quant: bool = False, a_quant: bool = False) -> None:
        """Scales and zero points from what was gathered.

        `asym`: layer by layer, each with its predecessors already quantized: their weights (`w_quant`), their
        activations (`a_quant`), or, where neither is asked for by itself, both.
        """
        if self._runner is None:
            raise CalibrationError(
                "calc_qparams() before prepare_calibration(); call that, run a few batches, then call this"
            )
        if asym and not (w_quant or a_quant):
            w_quant = a_quant = True
        self._runner.check(asym=asym)
        if len({repr(sorted(cuts)) for cuts in gather([*self._policy.own_code, *self._policy.untouched])}) > 1:
            raise CalibrationError(
                "on some ranks a module runs its own code, since its graph differed on the first batch there, and on "
                "others it does not (see coverage); build the QuantModel on all ranks with the same example_inputs"
            )
        try:
            unseen = self._runner.calc_qparams(asym=asym, w_quant=w_quant, a_quant=a_quant)
        finally:
            self._runner.finish()
            self._runner = None
            self.set_quant(w_quant=False, a_quant=False)
        self._make_room_for_biases()
        if unseen:
            log.info("%d quantizers never saw a float tensor and stay off: %s", len(unseen), ", ".join(unseen))

    def init_QAT(self, *, follow_ranges: bool = False) -> None:
        """Fix first scales from the batches run so far and switch everything on: ready for a training loop.

        `follow_ranges`: scales that are not learned move with the weights and, by a moving average (EMA_RATIO), with
        the activations that training shows them, until `freeze("observers")`. By default they stay.
        """
        if follow_ranges and all(quantizer.learns_numbers or quantizer.fake_fused for quantizer in self.quantizers()):
            raise ConfigError(
                "init_QAT(follow_ranges=True): every quantizer learns its numbers, none would follow its data; leave "
                "it out, or set QUANTIZER.TYPE: uniform"
            )
        self.calc_qparams()
        self.eval()
        self.set_quant(w_quant=True, a_quant=True)
        for quantizer in self.quantizers():
            quantizer.follow_range(follow_ranges)

    def _require_settled(self, verb: str) -> None:
        self._require_whole(verb)
        if self._runner is not None:
            raise CalibrationError(
                f"{verb}() during calibration, which would overwrite it; call it before prepare_calibration() or after "
                "calc_qparams()"
            )
