"""`QuantModel`: the life of a quantized model, one verb per method."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from sparsebit.deploy.model_file import checked_path, staged, write
from sparsebit.deploy.parity import Parity, Tolerance
from sparsebit.deploy.ports import DynamicAxes
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions import require_runtime
from sparsebit.errors import CalibrationError, CaptureError, CheckpointError
from sparsebit.execution.batches import Call, as_call, calls
from sparsebit.execution.distributed import gather_shards, is_sharded, once
from sparsebit.execution.value_store import MIB
from sparsebit.graph.capture import Captured, call_form
from sparsebit.graph.example import GuardError
from sparsebit.quantization import checkpoint, freezing, saved_activations, sharding
from sparsebit.quantization.algorithms.batchnorm_tuning import (
    MayFold,
    fold_quantized_batchnorm,
    restarted_statistics,
)
from sparsebit.quantization.calibration import CalibrationRunner
from sparsebit.quantization.error_profiler import profile_errors
from sparsebit.quantization.export import build_onnx, check_ready, describe
from sparsebit.quantization.freezing import Part
from sparsebit.quantization.gate import check_parity, check_rules
from sparsebit.quantization.mermaid import draw
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, WeightedQuantOpr
from sparsebit.quantization.ops.recipes import packing
from sparsebit.quantization.parameter_groups import parameter_groups
from sparsebit.quantization.passes.attach_integer_ops import attach_integer_ops
from sparsebit.quantization.passes.defer_relus import choose, defer_relus
from sparsebit.quantization.passes.join_selects import join_selects
from sparsebit.quantization.passes.wrap_cheap_functions import wrap_cheap_functions
from sparsebit.quantization.quant_config import parse_qconfig
from sparsebit.quantization.quantizers.base import Target
from sparsebit.quantization.simulation import SimulatedModel, shown
from sparsebit.quantization.weight_batches import WeightBatches

log = logging.getLogger(__name__)


class QuantModel(SimulatedModel):
    """A model with quantizers, and the verbs of its life. The float model that it is made from is never changed.

    Optional arguments of `forward` are taken as not given until a call (before calibration) or `example_inputs`, one
    batch, shows otherwise.
    """

    _runner: CalibrationRunner | None = None
    _packs: bool | None = None  # whether a whole forward is packed; None: nobody has decided yet
    _weights: WeightBatches | None = None
    _rewritten: Captured | None = None  # whose graph is rewritten for training
    _holds_statistics = False  # of batch norms

    # --- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with packing() if self._packs else contextlib.nullcontext(), self._batched_weights():
            return super().forward(*args, **kwargs)

    def _batched_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside, layers find their weights quantized (on a GPU)."""
        if self._root is None:
            return contextlib.nullcontext()
        if self._weights is None or self._weights.root is not self._root:
            self._weights = WeightBatches(self._root)
        return self._weights.ready()

    def _warn_of_source(self, error: GuardError) -> None:
        super()._warn_of_source(error)
        if self._weights is not None:  # the model's own code may run a layer again in the backward
            self._weights.clear()

    def _record(self, call: Any) -> None:
        if self._runner is not None:
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
        if runner is not None:
            self.prepare_calibration(keep_inputs=runner.inputs is not None, memory_budget=runner.memory_budget)

    # --- the verbs

    def prepare_calibration(self, *, keep_inputs: bool = True, memory_budget: int = 1024 * MIB) -> None:
        """From now on forwards gather statistics, with quantization off, in eval mode.

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
        try:
            unseen = self._runner.calc_qparams(asym=asym, w_quant=w_quant, a_quant=a_quant)
        finally:
            self._runner.finish()
            self._runner = None
            self.set_quant(w_quant=False, a_quant=False)
        self._make_room_for_biases()
        if unseen:
            log.info("%d quantizers never saw a float tensor and stay off: %s", len(unseen), ", ".join(unseen))

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch weight and activation quantization on or off."""
        wanted = {"weight": w_quant, "feature": a_quant}
        quantizers = sorted(self.quantizers(), key=lambda q: q.is_calibrated)  # one that refuses does so first
        for quantizer in quantizers:
            if wanted[quantizer.target]:
                quantizer.enable_quant()
        for quantizer in quantizers:
            if not wanted[quantizer.target]:
                quantizer.disable_quant()

    def init_QAT(self, *, follow_ranges: bool = False) -> None:
        """Fix first scales from the batches run so far and switch everything on: ready for a training loop.

        `follow_ranges`: scales that are not learned move with the weights and, by a moving average (EMA_RATIO), with
        the activations that training shows them, until `freeze("observers")`. By default they stay.
        """
        self.calc_qparams()
        self.set_quant(w_quant=True, a_quant=True)
        for quantizer in self.quantizers():
            quantizer.follow_range(follow_ranges)
        if follow_ranges:
            freezing.chosen(self.model, ("observers",))

    def shard(self, blocks: Iterable[str] = (), **settings: Any) -> None:
        """Spread the parameters over the ranks with `torch.distributed.fsdp.fully_shard`, after `init_QAT`.

        `blocks`: names of modules of the float model (`layers.0`, ...), each gathered for its own part of the forward
        only. `settings`: those of `fully_shard`, such as `mesh` and `mp_policy`; learned scales stay float32.
        """
        sharding.shard(self, self.model, self._captured, blocks, settings)

    def _require_whole(self, verb: str) -> None:
        if is_sharded(self):
            raise CalibrationError(
                f"{verb}() on parameters that are spread over the ranks; call it before shard(), or save() the model "
                "on all ranks and go on with QuantModel.load() in one process"
            )

    def parameter_groups(
        self, lr: float | None = None, *, scale_lr: float | None = None, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """For any optimizer: weights with decay; biases and norms without; learned scales with `scale_lr`, without.

        Every parameter that requires a gradient once. What is None is the optimizer's default; `scale_lr` is `lr` then.
        """
        return parameter_groups(self, lr, scale_lr=scale_lr, weight_decay=weight_decay)

    def freeze(self, *parts: Part) -> None:
        """Hold "observers" (ranges that follow the data), "batchnorm" (statistics) or "scales" (learned) as they are.

        Without names, all that the model has. `train()` does not undo it, `unfreeze` does; like `requires_grad`, it is
        in no state_dict. `FreezeSchedule` does it after so many iterations.
        """
        self._hold(parts, held=True)

    def unfreeze(self, *parts: Part) -> None:
        """Let go of what `freeze` holds."""
        self._hold(parts, held=False)

    def _hold(self, parts: tuple[Part, ...], *, held: bool) -> None:
        for part in freezing.chosen(self.model, parts):
            if part == "batchnorm":
                self._holds_statistics = held
            freezing.HOLD[part](self.model, held)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if mode and self.is_quantized("feature"):
            if self._rewritten is not self._captured:
                defer_relus(self._captured)
                join_selects(self._captured)
                self._rewritten = self._captured
                if self._packs:
                    self._install_packing()
            choose(self.model)
            if self._packs is None and self.device.type == "cuda":
                saved_activations.recompute(self.model, above=saved_activations.LARGE)
        if self._holds_statistics:
            freezing.hold_statistics(self.model, held=True)
        return self

    def pack_saved_activations(self, enabled: bool = True) -> None:
        """Train in less memory than the float model takes; gradients stay the same, bit by bit.

        What normalizations, activation functions and quantizers give is not kept for the backward but computed again
        there. `False` keeps everything. Without a call, on a GPU, large quantized copies alone are computed again.
        Under `torch.compile` the compiler decides by itself.
        """
        saved_activations.remove(self.model)
        if enabled:
            self._install_packing()
        self._packs = enabled

    def _install_packing(self) -> None:
        wrap_cheap_functions(self._captured)
        saved_activations.install(self.model)

    @contextlib.contextmanager
    def batchnorm_tuning(self) -> Iterator[None]:
        """Inside: train mode, quantization on, batch-norm statistics start from nothing; run forwards (under no_grad).

        On leaving: eval mode, batch norms folded into the layers in front of them, quantization off. For a calibrated
        model that kept its norms (SCHEDULE.BN_TUNING, or FUSE_BN: false), before or after training: scales per channel
        take in the norms' factors, so that the integers of the weights stay what they were.
        """
        self._require_whole("batchnorm_tuning")
        held = self._holds_statistics
        with restarted_statistics(self.model) as ranks:
            try:
                self.set_quant(w_quant=True, a_quant=True)
                self._holds_statistics = False
                self.train()
                yield
            except BaseException:
                self._holds_statistics = held
                raise
            finally:
                self.eval()
                self.set_quant(w_quant=False, a_quant=False)
        # Behind a linear of (N, L, C) a norm's channels are not the layer's.
        self._fold_norms(lambda _, layer, norm: not isinstance(layer, nn.Linear) or ranks.get(norm) == 2)

    def fold_batchnorm(self) -> None:
        """Batch norms, with the statistics that they have, into the layers in front of them.

        For statistics that were frozen in training; else `batchnorm_tuning` finds better ones first. The integers of
        the weights stay. Norms behind linear layers stay too: only a forward tells whether their channels are the
        layer's.
        """
        self._require_whole("fold_batchnorm")
        if not any(quantizer.is_calibrated for quantizer in self.quantizers()):
            raise CalibrationError("fold_batchnorm() needs a calibrated model; call calc_qparams() first")
        self._fold_norms(lambda _, layer, norm: not isinstance(layer, nn.Linear))

    def _fold_norms(self, may_fold: MayFold) -> None:
        """Batch norms into the quantized layers in front of them; these have biases and outputs of their own then."""
        self._folded_layers += fold_quantized_batchnorm(self._captured, may_fold)
        attach_integer_ops(self._captured, PROFILES[self.config.BACKEND])
        self._make_room_for_biases()

    def _make_room_for_biases(self) -> None:
        for layer in self.model.modules():
            if isinstance(layer, (WeightedQuantOpr, FunctionalWeightedQuantOpr)) and layer.bias_rounding is not None:
                bias = layer.stored_bias()
                if bias is not None:
                    layer.bias_rounding.make_room(bias)

    # --- looking inside

    def is_quantized(self, target: Target) -> bool:
        return any(q.is_enable for q in self.quantizers() if q.target == target)

    def get_quantization_error(
        self, data: Any, checker: Callable[[Tensor, Tensor], Any] = F.mse_loss, is_async: bool = True
    ) -> dict[str, float]:
        """`{layer: checker(quantized output, float output)}` on one batch or an iterable of batches.

        `is_async`: each layer quantized alone; else all layers quantized.
        """
        if not any(q.is_calibrated for q in self.quantizers()):
            raise CalibrationError("get_quantization_error() needs a calibrated model; call calc_qparams() first")
        is_batch = isinstance(data, (Tensor, Mapping)) or (
            isinstance(data, tuple) and any(isinstance(x, Tensor) for x in data)
        )
        batches: Iterable[Any] = [data] if is_batch else data
        return profile_errors(self, calls(batches, self._original[0], self.device), checker, is_async=is_async)

    def dump_mermaid(self, file: str | os.PathLike[str] | None = None) -> str:
        """The graph (every captured one) as a Mermaid diagram; written to `file` where one is given."""
        diagram = draw(self._captured)
        if file is not None:
            Path(file).write_text(diagram)
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
        An older file of that name stays until the new one is whole and has passed.
        """
        self._require_whole("export_onnx")
        check_ready(self)
        target = checked_path(name)
        if check is not None:
            require_runtime(PROFILES[self.config.BACKEND].executes or "onnxruntime")
        extra = checked_path(target.with_name(f"{target.stem}_extra.onnx")) if extra_info else None
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
            if check is not None:
                parity = check_parity(self, path, check, tolerance=tolerance, name=str(target))
        if extra is not None:
            describe(model, self, sites)
            with staged(extra) as path:
                write(model, path)
        return parity

    def check_onnx(self, file: str | os.PathLike[str], data: Any, *, tolerance: Tolerance | None = None) -> Parity:
        """Run an exported file in its runtime on `data` (batches as for calibration), beside the simulation."""
        return check_parity(self, Path(file), data, tolerance=tolerance)

    # --- keeping

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a self-describing folder (safetensors + JSON).

        With several processes rank 0 writes, and the others return when it has. Call it on all of them, or on rank 0
        alone; on all where the parameters are sharded, as they are gathered.
        """
        tensors = gather_shards(self.state_dict(keep_vars=True))
        # By its last name: machines may keep it under different paths.
        once(f"save({Path(folder).name!r})", lambda: checkpoint.write(folder, self._description(), tensors))
        return Path(folder)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], model: nn.Module, *, example_inputs: Any = None, device: str | None = None
    ) -> Self:
        """The saved model again, around a float `model` of the same architecture (its weights do not matter).

        `device`: in the place of the saved DEVICE. `example_inputs`: only where those of the saved model had no form in
        JSON.
        """
        description, tensors = checkpoint.read(folder)
        if device is not None:
            description["config"]["DEVICE"] = device
        example = (
            checkpoint.decode(description["example"]) if example_inputs is None else as_call(example_inputs, model)
        )
        try:
            return cls._revived(model, description, example, tensors)
        except RuntimeError as error:
            raise CheckpointError(
                f"{folder} was saved from another model than the {type(model).__name__} given, or needs the "
                f"example_inputs that it was built with:\n{error}"
            ) from None

    def _description(self) -> dict[str, Any]:
        """What makes this model again, besides the float model and the tensors; goes to JSON."""
        return {
            "config": self.config.to_dict(),
            "example": checkpoint.encode(self._example),
            "switches": {"weight": self.is_quantized("weight"), "feature": self.is_quantized("feature")},
            "folded_layers": self._folded_layers,
            "sites": {q.name: q.describe() for q in self.quantizers() if not q.fake_fused},
        }

    @classmethod
    def _revived(
        cls, model: nn.Module, description: dict[str, Any], example: Call | None, tensors: dict[str, Tensor]
    ) -> Self:
        qmodel = cls.__new__(cls)
        nn.Module.__init__(qmodel)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user was warned when the model was built first
            qmodel._set_up(model, parse_qconfig(description["config"]), example)
        qmodel._fold_norms(lambda name, *_: name in description["folded_layers"])
        for quantizer in qmodel.quantizers():
            quantizer.set_bit(description["sites"].get(quantizer.name, {}).get("bits", quantizer.spec.bits))
        qmodel.load_state_dict(tensors)
        qmodel.set_quant(w_quant=description["switches"]["weight"], a_quant=description["switches"]["feature"])
        return qmodel.eval()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what makes it again: torch.fx graphs do not survive a pickle."""
        parts = (*self._original, self._description(), self._example, self.state_dict())
        return _unpickled, (type(self), self.training, *parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        own = {key: value for key, value in self.__dict__.items() if key != "_weights"}  # made again when needed
        new.__dict__.update(copy.deepcopy(own, memo))
        return new


def _unpickled(kind: type[QuantModel], training: bool, *parts: Any) -> QuantModel:
    return kind._revived(*parts).train(training)
