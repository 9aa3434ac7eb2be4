"""`Calibrator`: the part of a `QuantModel` that gathers statistics and computes scales and zero points from them.

It holds the state between `prepare_calibration` and `calc_qparams`: a `CalibrationRunner`, which does the work.
"""

from __future__ import annotations

import logging
from typing import Any

from sparsebit.errors import CalibrationError, CaptureError, ConfigError
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.execution.distributed import gather
from sparsebit.graph.values.call_form import call_form
from sparsebit.graph.values.inference_mode import ordinary_tensors
from sparsebit.quantization.building.attach_integer_ops import make_room_for_biases
from sparsebit.quantization.calibrating.model_state import require_whole
from sparsebit.quantization.calibrating.runner import CalibrationRunner
from sparsebit.quantization.faithful.carried_state import LIKE_THIS
from sparsebit.quantization.faithful.proof import Proof
from sparsebit.quantization.faithful.simulation import SimulatedModel, shown

log = logging.getLogger(__name__)


class Calibrator:
    """`runner` observes every forward between `prepare` and `calc_qparams`; otherwise it is None."""

    def __init__(self, qmodel: SimulatedModel, proof: Proof) -> None:
        self.qmodel, self.proof = qmodel, proof
        self.runner: CalibrationRunner | None = None

    def prepare(self, *, keep_inputs: bool = True, memory_budget: int = 1024 * MIB) -> None:
        """Make every following forward gather statistics; see `QuantModel.prepare_calibration`."""
        qmodel = self.qmodel
        require_whole(qmodel, "prepare_calibration")
        for quantizer in qmodel.quantizers():
            quantizer.revive()
        qmodel.set_quant(w_quant=False, a_quant=False)
        qmodel.eval()
        root = qmodel.built.root.graph_module if qmodel.built.root is not None else None
        self.runner = CalibrationRunner(qmodel.model, root, keep_inputs=keep_inputs, memory_budget=memory_budget)
        self.runner.prepare()
        qmodel.is_calibrating = True
        self.proof.calibration_begins()

    def record(self, inputs: dict[str, Any] | tuple[Any, ...] | None) -> None:
        """Called after every forward; `inputs` is None if the forward cannot be repeated from them."""
        if self.runner is None:
            return
        if self.qmodel.training and not self.runner.num_batches:
            log.warning(
                "calibrating in train mode: dropout and batch statistics change the observed values; call eval()"
            )
        self.runner.record(inputs)

    def require_no_statistics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if calibration has begun, because capturing the model again for this call would discard it."""
        qmodel, has_batches = self.qmodel, self.runner is not None and self.runner.num_batches
        if has_batches or any(quantizer.is_calibrated for quantizer in qmodel.quantizers()):
            form, known = shown(call_form(qmodel.source, args, kwargs)), shown(qmodel.call_form or {})
            raise CaptureError(
                f"this call has {form}, but the model was captured and calibrated for {known}; {LIKE_THIS}"
            )

    def restart(self) -> None:
        """Called after the model was captured again and has new quantizers."""
        if self.runner is not None:
            training = self.qmodel.training
            self.runner.finish()
            self.prepare(keep_inputs=self.runner.inputs is not None, memory_budget=self.runner.memory_budget)
            self.qmodel.train(training)

    @ordinary_tensors()
    def calc_qparams(self, asym: bool = False, w_quant: bool = False, a_quant: bool = False) -> None:
        """Scales and zero points from the gathered statistics; see `QuantModel.calc_qparams`."""
        qmodel, runner = self.qmodel, self.runner
        if runner is None:
            raise CalibrationError("calc_qparams() before prepare_calibration(); call that, and run a few batches")
        if asym and not (w_quant or a_quant):
            w_quant = a_quant = True
        runner.check(asym=asym)
        # Ranks merge statistics by site, so all must have captured the same graphs.
        policy = qmodel.blueprint.policy
        if len({repr(sorted(cuts)) for cuts in gather([*policy.own_code, *policy.untouched])}) > 1:
            where = "a module runs its own code on some ranks only, where its graph differed on the first batch"
            raise CalibrationError(f"{where}; build the QuantModel on all ranks with the same example_inputs")
        try:
            unseen = runner.calc_qparams(asym=asym, w_quant=w_quant, a_quant=a_quant)
        finally:
            runner.finish()
            self.runner, qmodel.is_calibrating = None, False
            qmodel.set_quant(w_quant=False, a_quant=False)
        make_room_for_biases(qmodel.model)
        if unseen:
            log.info("%d quantizers never saw a float tensor and stay off: %s", len(unseen), ", ".join(unseen))

    def init_qat(self, *, follow_ranges: bool) -> None:
        """Compute initial scales and switch all quantizers on; see `QuantModel.init_QAT`."""
        quantizers = self.qmodel.quantizers()
        if follow_ranges and all(quantizer.learns_numbers or quantizer.fake_fused for quantizer in quantizers):
            raise ConfigError("init_QAT(follow_ranges=True): all learn their numbers, none would follow its data")
        self.calc_qparams()
        self.qmodel.eval()
        self.qmodel.set_quant(w_quant=True, a_quant=True)
        for quantizer in quantizers:
            quantizer.follow_range(follow_ranges)
