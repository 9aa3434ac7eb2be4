"""`QuantModel`: a quantized model with a method for each step: calibrate, train, inspect, export, save."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from sparsebit.deploy.model_file import checked_path, staged, write
from sparsebit.deploy.parity import Parity, Tolerance
from sparsebit.deploy.ports import DynamicAxes
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions import require_runtime
from sparsebit.errors import CalibrationError, CaptureError, CheckpointError, ConfigError, SparsebitError
from sparsebit.execution.batches import Call, as_call, calls
from sparsebit.execution.block_engine import Visit
from sparsebit.execution.distributed import gather, gather_shards, once
from sparsebit.execution.value_store import MIB
from sparsebit.graph.capture import call_form
from sparsebit.graph.copying import rebind_functions, without_history
from sparsebit.quantization import checkpoint, manifest
from sparsebit.quantization.block_visits import Blocks, FloatRun, visit_blocks
from sparsebit.quantization.calibration import CalibrationRunner
from sparsebit.quantization.error_profiler import profile_errors, profile_model
from sparsebit.quantization.export import build_onnx, check_ready, describe, switched_on
from sparsebit.quantization.export_checks import check_loads, check_parity, check_rules
from sparsebit.quantization.export_constants import evaluating
from sparsebit.quantization.first_sparsebit import refuse_first_sparsebit
from sparsebit.quantization.float_parameters import FloatParameters
from sparsebit.quantization.inserted_factors import InsertedFactor, insert, remove
from sparsebit.quantization.mermaid import draw
from sparsebit.quantization.passes.attach_integer_ops import attach_integer_ops
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quantizers.base import Quantizer
from sparsebit.quantization.simulation import shown
from sparsebit.quantization.site_changes import quantizer_at, replaced
from sparsebit.quantization.sites import Plan, Site
from sparsebit.quantization.stages import Transform, name_of
from sparsebit.quantization.training import TrainableModel
from sparsebit.records import ErrorProfile

log = logging.getLogger(__name__)


class QuantModel(TrainableModel):
    """A copy of a float model with quantizers in it: it is calibrated, trained, saved and exported.

    The float model itself is never changed.

    Optional arguments of `forward` are taken as not given until a call (before calibration) or `example_inputs`, one
    batch, shows otherwise.
    """

    _runner: CalibrationRunner | None = None
    # The `PlacementProfile` by which it was placed; None: as the backend's profile says. A saved model has the plan.
    placement: Any = None
    # Whether algorithms changed weights before the model was saved; `float_parameters` is empty then.
    _float_values_are_lost = False

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

    def visit_blocks(
        self,
        data: Any,
        visit: Visit,
        *,
        blocks: Blocks = None,
        memory_budget: int = 1024 * MIB,
        resume: str | os.PathLike[str] | None = None,
        prepare: Callable[[FloatRun], None] | None = None,
    ) -> None:
        """Call `visit(block_data)` for each block in order: its inputs from the quantized blocks in front of it, its
        float inputs and targets, on `data` (batches as for calibration), with all that is calibrated switched on.

        `blocks`: module paths, "layers" for single layers, "network" for all as one, or None to find them. `resume`: a
        folder that keeps each finished block; a run that was killed goes on after them. `memory_budget`: bytes of
        activations in memory. `prepare`: called once, before the first block, with a `FloatRun`.
        """
        self._require_whole("visit_blocks")
        check_ready(self, "visit_blocks")
        if self._root is None:
            raise CaptureError(
                "visit_blocks() needs a graph of the whole model, which could not be traced: see coverage"
            )
        if self._float_values_are_lost:
            log.warning(
                "algorithms changed weights of this model before it was saved or pickled, and the float model's values "
                "are not in what was saved: blocks are compared with the changed weights. Start from the float model"
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
            )
        self._make_room_for_biases()

    @property
    def float_parameters(self) -> FloatParameters:
        """What weights and biases were in the float model, of those that algorithms have changed."""
        kept: FloatParameters = self.__dict__.setdefault("_float_parameters", FloatParameters())
        return kept

    # --- changing single sites

    def replace_quantizer(self, site: str, quantizer: Quantizer | Site | Mapping[str, Any]) -> Quantizer:
        """Put another quantizer at a site of the plan, and into `plan`; gives it back.

        `quantizer`: a new one, of a registered class and with the site's target; or, to have it built, a `Site` or the
        fields of the site to change (`{"bits": 4}`, as for `plan.replace`). It gets the name, the device and the
        switches of the one that it replaces. If that was calibrated and the new one is not, a weight's scales are
        computed from the weight, and those of an activation from its calibrated range. An optimizer does not know the
        new parameters. What the backend cannot run is refused.
        """
        self._require_settled("replace_quantizer")
        is_unchanged = self._weights_now() == self._built_weights
        with evaluating(self):  # fused steps of training are chosen for the quantizers that there are
            self.plan, new = replaced(self.model, self.plan, site, quantizer)
        new.train(self.training)
        self._given_plan = self.plan  # a saved model is built from it
        attach_integer_ops(self._captured, PROFILES[self.config.BACKEND])
        self._make_room_for_biases()
        if is_unchanged:
            self._built_weights = self._weights_now()
        return new

    def insert_factors(self, factors: Sequence[InsertedFactor]) -> None:
        """Put multiplications by a factor per channel (one, at first) into the graph; a saved model has them too."""
        self._require_settled("insert_factors")
        if self._root is None:
            raise CaptureError(
                "insert_factors() needs a graph of the whole model, which could not be traced: see coverage"
            )
        insert(self._root.graph_module, factors)
        self._inserted_factors += tuple(factors)

    def remove_factors(self, names: Iterable[str]) -> None:
        """Take inserted multiplications out of the graph; what they multiplied by is lost."""
        self._require_settled("remove_factors")
        gone = [factor for factor in self._inserted_factors if factor.name in set(names)]
        if gone and self._root is not None:
            remove(self._root.graph_module, gone)
        self._inserted_factors = tuple(factor for factor in self._inserted_factors if factor not in gone)

    def store_qparams(self, site: str, scale: Tensor | float, zero_point: Tensor | float = 0) -> None:
        """Set scale and zero point of a site's quantizer, which counts as calibrated then.

        One number for all channels or groups, or one for each. The tensors stay the same objects, as an optimizer may
        hold them. Numbers that the number format or the backend does not have are refused. A weight's scale is raised
        where the layer's bias would not fit into int32 otherwise.
        """
        self._require_settled("store_qparams")
        quantizer_at(self.model, self.plan, site).store_qparams(scale, zero_point)
        self._make_room_for_biases()

    def with_plan(self, plan: Plan) -> Self:
        """A copy of this calibrated model with the sites of `plan` alone, which are among its own; the rest is float.

        Weights and the numbers of the quantizers that stay are those of this model: nothing is calibrated again.
        """
        self._require_settled("with_plan")
        if missing := plan.missing_in(self.plan):
            raise ConfigError(f"the plan has sites that the model has not: {', '.join(missing[:5])}")
        description = {**self._description(), "plan": plan.to_dict()}
        old, kept = self.sites, set(plan.sites)
        tensors = {key: value.clone() for key, value in self.state_dict().items()}
        new = type(self)._revived(self.original, description, self._example, tensors, self._transforms, sites=kept)
        for name, quantizer in new.sites.items():
            quantizer.load_state_dict(old[name].state_dict())
            quantizer.use_quant = old[name].use_quant
        new.__dict__["_float_parameters"] = copy.copy(self.float_parameters)
        new._float_values_are_lost = self._float_values_are_lost
        new._make_room_for_biases()
        return new

    def _require_settled(self, verb: str) -> None:
        self._require_whole(verb)
        if self._runner is not None:
            raise CalibrationError(
                f"{verb}() during calibration, which would overwrite it; call it before prepare_calibration() or after "
                "calc_qparams()"
            )

    # --- looking inside

    def get_quantization_error(
        self, data: Any, checker: Callable[[Tensor, Tensor], Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, float]:
        """`{layer: checker(quantized output, float output)}` on one batch or an iterable of batches.

        `is_async`: each layer quantized alone; else all layers quantized.
        """
        return profile_errors(self, self._calls("get_quantization_error", data), checker, is_async=is_async)

    def profile(self, data: Any, *, sync: bool = False, histograms: bool = True) -> ErrorProfile:
        """Mean squared error and SQNR of every layer's output and of every quantized tensor, on one batch or several.

        `sync`: the layers' errors with all layers quantized together; else each layer quantized alone. `histograms`:
        also at most 64 bins of the float values of each tensor, beside the range that quantization clips them to.
        """
        return profile_model(self, self._calls("profile", data), sync=sync, histograms=histograms)

    def _calls(self, verb: str, data: Any) -> Iterator[Call]:
        """One batch, or an iterable of them, as calls of a calibrated model."""
        if not any(q.is_calibrated for q in self.quantizers()):
            raise CalibrationError(f"{verb}() needs a calibrated model; call calc_qparams() first")
        is_batch = isinstance(data, (Tensor, Mapping)) or (
            isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data)
        )
        batches: Iterable[Any] = [data] if is_batch else data
        return calls(batches, self.original, self.device)

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

    # --- keeping

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a self-describing folder (safetensors + JSON), as a whole: a process that reads it meanwhile, or finds
        it after a kill, sees the older saving or this one.

        With several processes rank 0 writes, and the others return when it has. Call it on all of them, or on rank 0
        alone; on all where the parameters are sharded, as they are gathered.
        """
        tensors = gather_shards(self.state_dict(keep_vars=True))
        # By its last name: machines may keep it under different paths.
        once(f"save({Path(folder).name!r})", lambda: checkpoint.write(folder, self._description(), tensors))
        return Path(folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        model: nn.Module,
        *,
        example_inputs: Any = None,
        device: str | None = None,
        transforms: Sequence[Transform] = (),
    ) -> Self:
        """The saved model again, around a float `model` of the same architecture (its weights do not matter).

        `device`: in the place of the saved DEVICE. `example_inputs`: only where those of the saved model had no form in
        JSON. `transforms`: those that the saved model was built with; they are code, which a folder does not hold.
        """
        description, tensors = checkpoint.read(folder)
        saved, given = description.get("transforms", []), [name_of(step) for step in transforms]
        if saved != given:
            raise CheckpointError(
                f"{folder} was built with transforms={saved}, load() is given {given}; give those functions"
            )
        if device is not None:
            description["config"]["DEVICE"] = device
        example = (
            checkpoint.decode(description["example"]) if example_inputs is None else as_call(example_inputs, model)
        )
        try:
            return cls._revived(model, description, example, tensors, transforms)
        except ConfigError as error:  # a GPU that is not here, a quantizer that is not registered, ...
            raise CheckpointError(f"{folder}: {error}") from error
        except SparsebitError:
            raise
        except Exception as error:  # whatever torch and the model's own code raise when the tensors do not fit
            raise CheckpointError(
                f"{folder} was saved from another model than the {type(model).__name__} given, or needs the "
                f"example_inputs that it was built with{manifest.naming_notice(description)}:\n{error}"
            ) from error

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; a state_dict of the first Sparsebit is an error that says how to convert it."""
        refuse_first_sparsebit(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _description(self) -> dict[str, Any]:
        """What makes this model again, besides the float model and the tensors; goes to JSON."""
        return {
            "config": self.config.to_dict(),
            "example": checkpoint.encode(self._example),
            "switches": {"weight": self.is_quantized("weight"), "activation": self.is_quantized("activation")},
            "folded_layers": self._folded_layers,
            "inserted_factors": [factor.to_dict() for factor in self._inserted_factors],
            "own_code": dict(self._policy.own_code),
            "untouched": dict(self._policy.untouched),
            "transforms": [name_of(step) for step in self._transforms],
            "plan": None if self._given_plan is None else self._given_plan.to_dict(),
            "algorithms": list(self.applied_algorithms),
            "weights_changed": self._float_values_are_lost or bool(len(self.float_parameters)),
            "sites": {q.name: q.describe() for q in self.quantizers() if not q.fake_fused},
        }

    @classmethod
    def _revived(
        cls,
        model: nn.Module,
        description: dict[str, Any],
        example: Call | None,
        tensors: dict[str, Tensor],
        transforms: Sequence[Transform] = (),
        *,
        sites: set[str] | None = None,
    ) -> Self:
        """`sites`: those that the new model has, where it has fewer than `tensors` are of; their numbers stay out."""
        qmodel = cls.__new__(cls)
        nn.Module.__init__(qmodel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user was warned when the model was built first
            config, saved = parse_qconfig(description["config"]), description.get("plan")
            plan = Plan.from_dict({**saved, "config": config.to_dict()}) if saved else None
            cuts = {name: description.get(name, {}) for name in ("own_code", "untouched")}
            policy = cls._leaf_policy(config, **cuts)
            qmodel._set_up(model, config, example, policy, plan=plan, transforms=transforms)
        qmodel._fold_norms(lambda name, *_: name in description["folded_layers"])
        if inserted := [InsertedFactor.from_dict(record) for record in description.get("inserted_factors", [])]:
            qmodel.insert_factors(inserted)
        for quantizer in (q for q in qmodel.quantizers() if not q.fake_fused):
            site = manifest.site_of(description, quantizer.name)
            quantizer.set_bit(site.get("bits", quantizer.spec.bits))
        if sites is None:
            qmodel.load_state_dict(tensors)
            qmodel.set_quant(*manifest.switches_of(description))
        else:
            qmodel._load_all_but_quantizers(tensors)
        qmodel.applied_algorithms = tuple(description.get("algorithms", ()))
        qmodel._float_values_are_lost = bool(description.get("weights_changed", False))
        return qmodel.eval()

    def _load_all_but_quantizers(self, tensors: dict[str, Tensor]) -> None:
        quantizers = [name for name, module in self.named_modules() if isinstance(module, Quantizer)]
        own = self.state_dict()
        rest = {key for key in own if not key.startswith(tuple(f"{name}." for name in quantizers))}
        self.load_state_dict({key: tensors.get(key, value) if key in rest else value for key, value in own.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what makes it again: torch.fx graphs do not survive a pickle."""
        parts = (self.original, self._description(), self._example, self.state_dict(), self._transforms)
        return _unpickled, (type(self), self.training, *parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo.update(without_history(self) | without_history(self.original))
        made_again = ("_weights", "_built_state")
        own = {key: value for key, value in self.__dict__.items() if key not in made_again}
        new.__dict__.update(copy.deepcopy(own, memo))
        rebind_functions(self._code_modules(), new._code_modules(), memo)
        if self._weights_now() == self._built_weights:
            new._built_weights = new._weights_now()
        new._built_state = self._built_state.of_copy(new.original, new.source)
        return new


def _unpickled(kind: type[QuantModel], training: bool, *parts: Any) -> QuantModel:
    return kind._revived(*parts).train(training)
