"""`QuantModel`: the life of a quantized model, one verb per method."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparsebit.config.schema import QuantConfig
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CalibrationError, CaptureError
from sparsebit.execution.batches import as_call, calls, to_device
from sparsebit.execution.value_store import MIB
from sparsebit.graph.capture import VARYING, CallForm, Captured, Region, call_form, capture
from sparsebit.graph.draw import to_mermaid
from sparsebit.graph.example import GuardError
from sparsebit.graph.passes.fold_batchnorm import fold_batchnorm
from sparsebit.graph.passes.functionalize import functionalize
from sparsebit.graph.passes.normalize import normalize
from sparsebit.graph.passes.simplify import simplify
from sparsebit.graph.tracer import LeafPolicy
from sparsebit.quantization import checkpoint
from sparsebit.quantization.calibration import CalibrationRunner
from sparsebit.quantization.coverage import describe_coverage
from sparsebit.quantization.error_profiler import profile_errors
from sparsebit.quantization.ops.quant_opr import QIdentity, QuantOpr
from sparsebit.quantization.ops.table import registered_module_types
from sparsebit.quantization.passes.attach_quantizers import attach_quantizers
from sparsebit.quantization.plan import Plan, make_plan
from sparsebit.quantization.quantizers.base import Quantizer, Target
from sparsebit.records import Coverage

log = logging.getLogger(__name__)


class QuantModel(nn.Module):
    """A copy of `model` with quantizers where the config and the backend want them; `model` itself is never changed.

    Optional arguments of `forward` are taken as not given until a call (before calibration) or `example_inputs` shows
    otherwise. `example_inputs`, one batch, also lets modules be captured that are called with optional arguments inside
    code that cannot be traced.
    """

    model: nn.Module

    def __init__(
        self, model: nn.Module, config: QuantConfig, *, example_inputs: Any = None, call_form: CallForm | None = None
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise CaptureError(f"QuantModel wants an nn.Module, not {type(model).__name__}")
        if not isinstance(config, QuantConfig):
            raise CaptureError(f"QuantModel wants the config that parse_qconfig() gives, not {type(config).__name__}")
        self.config = config
        self._runner: CalibrationRunner | None = None
        # In a tuple: the original is kept to capture again if the first call shows another form, and is not our module.
        self.__dict__["_original"] = (model,)
        self._build(_example_call(example_inputs, model), call_form)

    # --- building

    def _build(self, example: Any, form: CallForm | None) -> None:
        (model,) = self.__dict__["_original"]
        policy = LeafPolicy(skip=self.config.SKIP_TRACE_MODULES, extra=registered_module_types())
        captured = capture(model, policy, example=example, form=form)
        fold = self._folds_batchnorm()
        for region in captured.regions.values():
            _prepare(region, fold)
        plan = make_plan(captured, self.config)
        attach_quantizers(captured, plan, self.config.BACKEND)
        self.__dict__["_parts"] = (captured, plan)
        self.model = captured.model.graph_module if isinstance(captured.model, Region) else captured.model
        self.to(self.config.DEVICE)
        self._tell(plan)

    def _folds_batchnorm(self) -> bool:
        schedule = self.config.SCHEDULE
        if schedule.BN_TUNING or self.config.is_set("SCHEDULE.FUSE_BN"):
            return schedule.fuse_bn_now
        return PROFILES[self.config.BACKEND].folds_batchnorm

    def _tell(self, plan: Plan) -> None:
        for unmatched in self.config.unmatched_globs(plan.layers):
            warnings.warn(str(unmatched), stacklevel=4)
        for cost in plan.warnings:
            warnings.warn(cost, stacklevel=4)
        log.info("captured: %s", str(self.coverage).splitlines()[0])

    @property
    def _captured(self) -> Captured:
        captured: Captured = self.__dict__["_parts"][0]
        return captured

    @property
    def _root(self) -> Region | None:
        return self._captured.regions.get("")

    @property
    def call_form(self) -> CallForm | None:
        """How `forward` is called: parameters held constant by their value, the others as varying; None for an opaque model."""
        if self._root is None:
            return None
        names = [node.target for node in self._root.graph_module.graph.nodes if node.op == "placeholder"]
        return {**self._root.constants, **dict.fromkeys(map(str, names), VARYING)}

    # --- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._root is None:
            if self._runner is not None:
                self._runner.record((args, kwargs))
            return self.model(*args, **kwargs)
        inputs = self._root.bind(args, kwargs)
        if inputs is None:
            inputs = self._bind_anew(args, kwargs)
            if inputs is None:
                return self(*args, **kwargs)
        try:
            output = self.model(**inputs)
        except GuardError as error:
            log.debug("%s; this call runs the model's own code", error)
            return self._root.source(*args, **kwargs)
        if self._runner is not None:
            self._runner.record(inputs)
        return output

    def _bind_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Capture again for a call of another form, as long as nothing has been calibrated."""
        assert self._root is not None
        form = call_form(self._root.source, args, kwargs)
        if any(q.is_calibrated for q in self.quantizers()) or (self._runner is not None and self._runner.num_batches):
            raise CaptureError(
                f"this call gives {_shown(form)}, but the model was captured and calibrated for {_shown(self.call_form or {})}; "
                "build the QuantModel with example_inputs of this form"
            )
        log.info("captured again for a call that gives %s", _shown(form))
        calibrating, training = self._runner is not None, self.training
        self._build(None, form)
        self.train(training)
        if calibrating:
            self.prepare_calibration()
        return self._root.bind(args, kwargs) if self._root is not None else None

    # --- the verbs

    def prepare_calibration(self, *, keep_inputs: bool = True, memory_budget: int = 1024 * MIB) -> None:
        """From now on forwards gather statistics, with quantization off, in eval mode.

        `keep_inputs=False`: do not keep the inputs (32 MiB in memory, the rest on disk) that `calc_qparams(asym=True)`
        would need. `memory_budget`: bytes of activations that `asym` may hold in memory at once.
        """
        self.set_quant(w_quant=False, a_quant=False)
        self.eval()
        root = self._root.graph_module if self._root is not None else None
        self._runner = CalibrationRunner(self.model, root, keep_inputs=keep_inputs, memory_budget=memory_budget)
        self._runner.prepare()

    def calc_qparams(self, asym: bool = False, w_quant: bool = False, a_quant: bool = False) -> None:
        """Scales and zero points from what was gathered.

        `asym`: layer by layer, each with its predecessors already quantized: their weights (`w_quant`), their activations
        (`a_quant`), or, where neither is asked for by itself, both.
        """
        if self._runner is None:
            raise CalibrationError("calc_qparams() before prepare_calibration(); call that, run a few batches, then call this")
        if asym and not (w_quant or a_quant):
            w_quant = a_quant = True
        try:
            unseen = self._runner.calc_qparams(asym=asym, w_quant=w_quant, a_quant=a_quant)
        finally:
            self._runner.finish()
        self._runner = None
        self.set_quant(w_quant=False, a_quant=False)
        if unseen:
            log.info("%d quantizers never saw a float tensor and stay off: %s", len(unseen), ", ".join(unseen))

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch weight and activation quantization on or off."""
        for quantizer in self.quantizers():
            if w_quant if quantizer.target == "weight" else a_quant:
                quantizer.enable_quant()
            else:
                quantizer.disable_quant()

    def init_QAT(self) -> None:
        """Fix first scales from the batches run so far and switch everything on: ready for an ordinary training loop."""
        self.calc_qparams()
        self.set_quant(w_quant=True, a_quant=True)

    # --- looking inside

    def quantizers(self) -> list[Quantizer]:
        return [module for module in self.model.modules() if isinstance(module, Quantizer)]

    def is_quantized(self, target: Target) -> bool:
        return any(q.is_enable for q in self.quantizers() if q.target == target)

    @property
    def coverage(self) -> Coverage:
        """What is quantized, what is float and why."""
        captured, plan = self.__dict__["_parts"]
        return describe_coverage(self.model, captured, plan)

    def get_quantization_error(
        self, data: Any, checker: Callable[[Tensor, Tensor], Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, float]:
        """`{layer: checker(quantized output, float output)}` on one batch or an iterable of batches.

        `is_async`: each layer quantized alone; else all layers quantized.
        """
        if not any(q.is_calibrated for q in self.quantizers()):
            raise CalibrationError("get_quantization_error() needs a calibrated model; call calc_qparams() first")
        batches: Iterable[Any] = [data] if isinstance(data, (Tensor, dict)) or _is_one_call(data) else data
        device = torch.device(self.config.DEVICE)
        source = self.__dict__["_original"][0]
        return profile_errors(self, calls(batches, source, device), checker, is_async=is_async)

    def dump_mermaid(self, file: str | os.PathLike[str] | None = None) -> str:
        """The graph (every captured one) as a Mermaid diagram; written to `file` where one is given."""
        parts = []
        for path, region in self._captured.regions.items():
            root = region.graph_module
            text = to_mermaid(root.graph, lambda node, root=root: _label(node, root), lambda node, root=root: _style(node, root))
            parts.append(f"%% {path or 'model'}\n{text}" if len(self._captured.regions) > 1 else text)
        if not parts:
            raise CaptureError("nothing of this model could be traced, so there is no graph to draw; see coverage")
        diagram = "\n".join(parts)
        if file is not None:
            Path(file).write_text(diagram)
        return diagram

    # --- keeping

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a self-describing folder (safetensors + JSON)."""
        return checkpoint.save(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: nn.Module) -> QuantModel:
        """The saved model again, around a float `model` of the same architecture (its weights do not matter)."""
        manifest = checkpoint.read_manifest(folder)
        qmodel = checkpoint.fresh(model, manifest)
        checkpoint.load_into(qmodel, folder, manifest)
        return qmodel.eval()


def _prepare(region: Region, fold: bool) -> None:
    """The native passes, in order."""
    functionalize(region.graph_module)
    simplify(region.graph_module)
    normalize(region.graph_module, region.source)
    if fold:
        fold_batchnorm(region.graph_module)


def _example_call(example: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if example is None:
        return None
    device = next((p.device for p in model.parameters()), None)
    args, kwargs = as_call(example, model)
    return to_device(args, device), to_device(kwargs, device)


def _is_one_call(data: Any) -> bool:
    """A tuple or list whose first item is no batch by itself: (x, y) of one call, not a list of batches."""
    return isinstance(data, tuple) and bool(data) and isinstance(data[0], Tensor)


def _shown(form: CallForm) -> str:
    given = [name for name, value in form.items() if value == VARYING]
    fixed = [f"{name}={value!r}" for name, value in form.items() if value != VARYING and value is not None]
    return ", ".join([*given, *fixed]) or "nothing"


def _label(node: fx.Node, root: fx.GraphModule) -> str:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return f"{node.target}<br/>{module!r}" if isinstance(module, (QuantOpr, QIdentity)) else f"{node.target}<br/>{type(module).__name__}"
    return node.name if node.op in ("placeholder", "output", "get_attr") else f"{node.name}<br/>{getattr(node.target, '__name__', node.target)}"


def _style(node: fx.Node, root: fx.GraphModule) -> str:
    if node.op != "call_module":
        return ""
    module = root.get_submodule(str(node.target))
    return "quantized" if isinstance(module, (QuantOpr, QIdentity)) else "float"
