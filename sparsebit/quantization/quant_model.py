"""`QuantModel`: a quantized model with a method for each step: calibrate, train, inspect, export, save."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebit.deploy.model_file import checked_path, staged, write
from sparsebit.deploy.parity import Parity, Tolerance
from sparsebit.deploy.ports import DynamicAxes
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions import require_runtime
from sparsebit.errors import CalibrationError, CaptureError, ConfigError
from sparsebit.execution.batches import Call, calls
from sparsebit.execution.block_engine import Visit
from sparsebit.execution.held_out import HoldOut
from sparsebit.execution.value_store import MIB
from sparsebit.quantization.accuracy_gains import NUM_LAYERS, FloatLayers, Metric, check_metric, measure_gains
from sparsebit.quantization.algorithms.applying import require_repeatable
from sparsebit.quantization.block_visits import Blocks, FloatRun, visit_blocks
from sparsebit.quantization.calibration import calibrate_weight
from sparsebit.quantization.error_profiler import profile_errors, profile_model
from sparsebit.quantization.export import build_onnx, check_ready, describe, switched_on
from sparsebit.quantization.export_checks import check_loads, check_parity, check_rules
from sparsebit.quantization.export_constants import evaluating
from sparsebit.quantization.mermaid import draw
from sparsebit.quantization.ops.quant_opr import WeightedQuantOpr
from sparsebit.quantization.passes.attach_integer_ops import attach_integer_ops
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.saved_model import SavableModel
from sparsebit.quantization.site_changes import quantizer_at, replaced
from sparsebit.quantization.sites import Site
from sparsebit.records import AccuracyGains, ErrorProfile

log = logging.getLogger(__name__)


class QuantModel(SavableModel):
    """A copy of a float model with quantizers in it: it is calibrated, trained, saved and exported.

    The float model itself is never changed.

    Optional arguments of `forward` are taken as not given until a call (before calibration) or `example_inputs`, one
    batch, shows otherwise.
    """

    # The `PlacementProfile` by which it was placed; None: as the backend's profile says. A saved model has the plan.
    placement: Any = None

    def visit_blocks(
        self,
        data: Any,
        visit: Visit,
        *,
        blocks: Blocks = None,
        memory_budget: int = 1024 * MIB,
        resume: str | os.PathLike[str] | None = None,
        prepare: Callable[[FloatRun], None] | None = None,
        hold_out: HoldOut | None = None,
        views: int = 1,
    ) -> None:
        """Call `visit(block_data)` for each block in order: its inputs from the quantized blocks in front of it, its
        float inputs and targets, on `data` (batches as for calibration), with all that is calibrated switched on.

        `blocks`: module paths, "layers" for single layers, "network" for all as one, or None to find them. `resume`: a
        folder that keeps each finished block; a run that was killed goes on after them. `memory_budget`: bytes of
        activations in memory. `prepare`: called once, before the first block, with a `FloatRun`. `hold_out`: some
        samples are not among those of `block_data`, but in `block_data.held_out`. `views`: so many of each image
        (itself, and copies that are mirrored and shifted).
        """
        self._require_whole("visit_blocks")
        check_ready(self, "visit_blocks")
        if self._root is None:
            raise CaptureError(
                "visit_blocks() needs a graph of the whole model, which could not be traced: see coverage"
            )
        if self.float_values_are_lost:
            log.warning(
                "algorithms changed weights of this model before it was saved or pickled, or tuned its batch norms: "
                "the float model's values are not in what was saved, and blocks are compared with the changed weights. "
                "Start from the float model"
            )
        self.eval()
        with switched_on(self):
            visit_blocks(
                self._root,
                calls(data, self.original, self.device),
                visit,
                blocks=blocks,
                memory_budget=memory_budget,
                resume=resume,
                settings=str(self.config.to_dict()),
                float_parameters=self.float_parameters,
                prepare=prepare,
                hold_out=hold_out,
                views=views,
            )
        self._make_room_for_biases()

    # --- changing single sites

    def replace_quantizer(self, site: str, quantizer: Quantizer | Site | Mapping[str, Any]) -> Quantizer:
        """Put another quantizer at a site of the plan, and into `plan`; gives it back.

        `quantizer`: a new one, of a registered class and with the site's target; or, to have it built, a `Site` or the
        fields of the site to change (`{"bits": 4}`, as for `plan.replace`). It gets the name, the device and the
        switches of the one that it replaces. If that was calibrated and the new one is not, a weight's scales are
        computed from the weight, and those of an activation from its calibrated range. An optimizer does not know the
        new parameters. What the backend cannot run is refused. Where an algorithm has rounded the layer's weight for
        another format, weight and bias are those of the float model again, and that is logged.
        """
        self._require_settled("replace_quantizer")
        before = self.sites.get(site)
        has_range = isinstance(quantizer, Quantizer) and quantizer.is_calibrated
        is_unchanged = self._weights_now() == self._built_weights
        with evaluating(self):  # fused steps of training are chosen for the quantizers that there are
            self.plan, new = replaced(self.model, self.plan, site, quantizer)
        if before is not None and before.target == "weight" and before.spec != new.spec:
            self._unround(new, needs_range=before.is_calibrated and not has_range)
        new.train(self.training)
        self._given_plan = self.plan  # a saved model is built from it
        attach_integer_ops(self._captured, PROFILES[self.config.BACKEND])
        self._make_room_for_biases()
        if is_unchanged:
            self._built_weights = self._weights_now()
        return new

    @torch.no_grad()
    def _unround(self, quantizer: Quantizer, *, needs_range: bool) -> None:
        """Give the layer of a weight's new quantizer its float parameters, where algorithms have changed them."""
        originals = self._originals_of([quantizer.name])
        if not originals:
            return
        for parameter in self.model.parameters():
            if id(parameter) in originals:
                parameter.copy_(originals[id(parameter)])
        log.warning(
            "%s: its weight was rounded for another format (%s), and is the float model's again; run the algorithms "
            "after replace_quantizer()",
            *(quantizer.name, ", ".join(self.applied_algorithms)),
        )
        if needs_range:
            owners = (m for m in self.model.modules() if isinstance(m, WeightedQuantOpr))
            calibrate_weight(next(m for m in owners if m.weight_quantizer is quantizer))

    def store_qparams(self, site: str, scale: Tensor | float, zero_point: Tensor | float = 0) -> None:
        """Set scale and zero point of a site's quantizer, which counts as calibrated then.

        One number for all channels or groups, or one for each. The tensors stay the same objects, as an optimizer may
        hold them. Numbers that the number format or the backend does not have are refused. A weight's scale is raised
        where the layer's bias would not fit into int32 otherwise.
        """
        self._require_settled("store_qparams")
        quantizer_at(self.model, self.plan, site).store_qparams(scale, zero_point)
        self._make_room_for_biases()

    # --- looking inside

    def get_quantization_error(
        self, data: Any, checker: Callable[[Tensor, Tensor], Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, float]:
        """`{layer: checker(quantized output, float output)}` on one batch or an iterable of batches.

        `is_async`: each layer quantized alone; else all layers quantized.
        """
        self._tell_of_changed_weights("get_quantization_error")
        return profile_errors(self, self._calls("get_quantization_error", data), checker, is_async=is_async)

    def profile(self, data: Any, *, sync: bool = False, histograms: bool = True) -> ErrorProfile:
        """Mean squared error and SQNR of every layer's output and of every quantized tensor, on one batch or several.

        `sync`: the layers' errors with all layers quantized together; else each layer quantized alone. `histograms`:
        also at most 64 bins of the float values of each tensor, beside the range that quantization clips them to.
        """
        self._tell_of_changed_weights("profile")
        return profile_model(self, self._calls("profile", data), sync=sync, histograms=histograms)

    def _tell_of_changed_weights(self, verb: str) -> None:
        if len(self.float_parameters) or self.float_values_are_lost:
            log.warning(
                "%s(): algorithms have changed weights (%s); errors are counted from the changed weights, so that what "
                "their rounding costs is not in them",
                *(verb, ", ".join(self.applied_algorithms) or "before the model was saved"),
            )

    def accuracy_gains(
        self, data: Any, metric: str | Metric = "accuracy", *, num_layers: int = NUM_LAYERS
    ) -> AccuracyGains:
        """Which layers cost accuracy: the score that comes back when each of the worst layers is float.

        The `num_layers` layers (0: all) that, made float, bring the outputs of 32 samples nearest to the float model's
        are made float one at a time: weight, inputs, and what algorithms made of the parameters. `data`: a batch or a
        list of them, `(inputs, labels)` or mappings with `labels`. `metric`: "accuracy" (top-1); "agreement" with the
        float model's top-1, which needs no labels; or a function that gets the model and gives a score, higher is
        better. The model is left as it was, also after an error.

        >>> print(qmodel.accuracy_gains(test_loader, num_layers=3))  # doctest: +SKIP
        top-1 accuracy on 1000 samples: float 0.9120, quantized 0.8560
        in float                   score     gain  SQNR alone
        layer3.0.conv1            0.8710  +0.0150     17.2 dB
        """
        if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 0:
            raise ConfigError(f"num_layers={num_layers!r}: allowed: whole numbers from 0 (all layers)")
        self._require_settled("accuracy_gains")
        batches = _as_batches(data)
        require_repeatable(batches, "accuracy_gains()")
        check_metric(self, batches, metric)
        if self.float_values_are_lost:
            log.warning(
                "algorithms changed weights of this model before it was saved or pickled, or tuned its batch norms: "
                "the float model's values are not in what was saved, and the changed weights count as float. Start "
                "from the float model"
            )
        errors = profile_model(self, self._calls("accuracy_gains", batches), histograms=False).layers
        float_layers = FloatLayers(self._captured, self.float_parameters)
        return measure_gains(self, batches, metric, errors, float_layers, num_layers=num_layers)

    def _calls(self, verb: str, data: Any) -> Iterator[Call]:
        """One batch, or an iterable of them, as calls of a calibrated model."""
        if not any(q.is_calibrated for q in self.quantizers()):
            raise CalibrationError(f"{verb}() needs a calibrated model; call calc_qparams() first")
        return calls(_as_batches(data), self.original, self.device)

    def dump_mermaid(self, file: str | os.PathLike[str] | IO[str] | None = None) -> str:
        """The graph (every captured one) as a Mermaid diagram; written to `file`, a path or an open file, if given."""
        diagram = draw(self._captured)
        if isinstance(file, (str, os.PathLike)):
            Path(file).write_text(diagram)
        elif file is not None:
            file.write(diagram)
        return diagram

    # --- deploying

    def export_onnx(
        self,
        dummy_data: Any,
        name: str | os.PathLike[str],
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic_axes: DynamicAxes | None = None,
        opset_version: int | None = None,
        verbose: bool = False,
        extra_info: bool = False,
        *,
        check: Any = None,
        tolerance: Tolerance | None = None,
    ) -> Parity | None:
        """Write a QDQ-ONNX file that computes what the simulation computes, with weights and biases as integers.

        `dummy_data`: one batch in any form that calibration takes; the file has its shapes but for `dynamic_axes`
        (`{"x": {0: "batch"}}`). Inputs are named after forward's parameters unless `input_names` says otherwise.
        `opset_version`: by default the lowest that has all the number formats, 21 or more (tensorrt: 20). `verbose`:
        torch tells its steps. `extra_info`: also write `<name>_extra.onnx`, with bits, format and observer of every
        site in its metadata.

        `check`: data (batches as for calibration) on which the file is run in its runtime and compared with the
        simulation; beyond `tolerance` that is an error which names the first site that differs. Gives what was found.
        An older file of that name stays until the new one is whole and has passed. A calibrated model whose
        quantization is off is exported quantized, and is off again afterwards.
        """
        self._require_whole("export_onnx")
        check_ready(self, "export_onnx")
        target = checked_path(name)
        if check is not None:
            require_runtime(PROFILES[self.config.BACKEND].executes or "onnxruntime")
        extra = checked_path(target.with_name(f"{target.stem}_extra.onnx")) if extra_info else None
        with switched_on(self):
            model, sites = build_onnx(
                self,
                dummy_data,
                input_names=input_names,
                output_names=output_names,
                dynamic_axes=dynamic_axes,
                opset_version=opset_version,
                verbose=verbose,
            )
            parity = None
            with staged(target) as path:
                write(model, path)
                if self.config.BACKEND == "tensorrt":
                    check_rules(path, str(target))
                check_loads(self, path, str(target))
                if check is not None:
                    parity = check_parity(self, path, check, tolerance=tolerance, name=str(target))
            if extra is not None:
                describe(model, self, sites)
                with staged(extra) as path:
                    write(model, path)
        return parity

    def check_onnx(self, file: str | os.PathLike[str], data: Any, *, tolerance: Tolerance | None = None) -> Parity:
        """Run an exported file in its runtime on `data` (batches as for calibration), beside the simulation."""
        with switched_on(self):
            return check_parity(self, Path(file), data, tolerance=tolerance)


def _as_batches(data: Any) -> Iterable[Any]:
    """One batch, or an iterable of them, as an iterable."""
    is_batch = isinstance(data, (Tensor, Mapping)) or (
        isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data)
    )
    return [data] if is_batch else data
