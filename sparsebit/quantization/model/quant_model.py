"""`QuantModel`: a quantized model with a method for each step: calibrate, train, inspect, export, save.

The class only connects its parts, each in the room of its name. Parts that keep state between calls are objects of the
model (`proof`, `first_calls`, `calibration`, `qat`); parts without state are functions of the model, bound as
methods at the end of the class. `SimulatedModel`, the base, is the captured copy: it holds the blueprint, the graphs,
and the code that runs a call through them. The float model that was given is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from sparsebit.config.reading import Source
from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CaptureError, ConfigError
from sparsebit.execution.batches import as_call
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.graph.nodes.example import GuardError
from sparsebit.quantization import reporting
from sparsebit.quantization.building.build import Blueprint
from sparsebit.quantization.building.stages import Transform
from sparsebit.quantization.calibrating import block_visits, site_changes
from sparsebit.quantization.calibrating.calibration import Calibrator
from sparsebit.quantization.exporting import export, export_checks, export_file, program
from sparsebit.quantization.faithful import gradient_check
from sparsebit.quantization.faithful.first_calls import FirstCalls
from sparsebit.quantization.faithful.proof import Proof, Verify
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.first_sparsebit import refuse_first_sparsebit
from sparsebit.quantization.inspecting import accuracy_gains, error_profiler, mermaid
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.qat import parameter_groups
from sparsebit.quantization.qat.freezing import Part
from sparsebit.quantization.qat.training import Training, compile_options
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.quantization.saving import store


class QuantModel(SimulatedModel):
    """A copy of a float model with quantizers in it: it is calibrated, trained, saved and exported.

    The float model itself is never changed.

    Optional arguments of `forward` are assumed not to be passed until a call (before calibration) or `example_inputs`,
    one batch, shows otherwise. With `example_inputs`, modules can also be captured that are called with optional
    arguments inside code that cannot be traced. `verify`: the comparisons with the model's own code, see `Proof`.
    """

    proof: Proof
    first_calls: FirstCalls
    calibration: Calibrator
    qat: Training
    # The `PlacementProfile` of its placement; None: the backend's default. A saved model contains the plan.
    placement: Any = None

    def __init__(
        self,
        model: nn.Module,
        config: Source | QuantConfig | None = None,
        *,
        plan: Plan | None = None,
        transforms: Sequence[Transform] = (),
        example_inputs: Any = None,
        verify: Verify = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
            raise CaptureError(
                f"QuantModel takes an nn.Module, not {type(model).__name__}; TorchScript has no Python code to trace: "
                "give the nn.Module that it was made from"
            )
        if any(isinstance(module, SimulatedModel) for module in model.modules()):
            raise CaptureError("the model is, or holds, a QuantModel, which is quantized already; give the float model")
        if (config is None) == (plan is None):
            raise ConfigError("QuantModel takes a config, or a plan, which contains its config: give one of the two")
        example = None if example_inputs is None else as_call(example_inputs, model)
        wanted = config if plan is None else plan.config
        assert wanted is not None
        self._set_up(Blueprint.of(model, as_qconfig(wanted), plan=plan, transforms=transforms), example)
        self.first_calls.compares_sources = False
        self.proof.begin(verify, example)
        self.first_calls.compares_sources = bool(verify)

    def _set_up(self, *args: Any, **kwargs: Any) -> None:
        """Make the parts, then build: `_build` uses them already.

        Parts are plain objects, not child modules: they are not in the `state_dict`, and are copied with the model.
        """
        self.proof = Proof(self)
        self.first_calls = FirstCalls(self, self.proof)
        self.calibration = Calibrator(self, self.proof)
        self.qat = Training(self)
        super()._set_up(*args, **kwargs)

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super()._build(*args, **kwargs)
        self.first_calls.watch()

    # --- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The first call is compared on a copy of its inputs, and then runs normally. A calibration batch is compared on
        # the same forward that gathers statistics: its outcome is returned, and the batch does not run twice.
        if self.proof.first_call_is_due and not self.is_calibrating:
            self.first_calls.verify((args, kwargs))
        if self.proof.is_due and self.is_calibrating:
            return self.proof.verified((args, kwargs), "the first calibration batch", self._run)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with self.qat.step():
            return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.qat.mode_changed()
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`, with additional options for inductor that speed up a training step.

        `torch.compile(qmodel)` computes the same values.
        """
        super().compile(*args, **(kwargs if args else compile_options(kwargs, self.device.type)))

    # Hooks that the base class calls while it runs.

    def _record(self, call: Any) -> None:
        self.calibration.record(call)

    def capture_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calibration.require_no_statistics(args, kwargs)
        super().capture_again(args, kwargs)

    def rebuild(self, example: Any) -> None:
        super().rebuild(example)
        self.calibration.restart()

    def _warn_of_source(self, error: GuardError) -> None:
        super()._warn_of_source(error)
        self.qat.release_weights()

    # --- calibrating

    def prepare_calibration(self, *, keep_inputs: bool = True, memory_budget: int = 1024 * MIB) -> None:
        """Make every following forward gather statistics, with quantization off, in eval mode.

        `keep_inputs=False`: do not keep the inputs (32 MiB in memory, the rest on disk) that `calc_qparams(asym=True)`
        would need. `memory_budget`: bytes of activations that `asym` may hold in memory at once.
        """
        self.calibration.prepare(keep_inputs=keep_inputs, memory_budget=memory_budget)

    def calc_qparams(self, asym: bool = False, w_quant: bool = False, a_quant: bool = False) -> None:
        """Scales and zero points from the gathered statistics.

        `asym`: layer by layer, each with its predecessors already quantized: their weights (`w_quant`), their
        activations (`a_quant`), or, if neither is set, both.
        """
        self.calibration.calc_qparams(asym, w_quant, a_quant)

    def init_QAT(self, *, follow_ranges: bool = False) -> None:
        """Compute initial scales from the batches run so far and switch everything on: ready for a training loop.

        `follow_ranges`: scales that are not learned follow the weights and, by a moving average (EMA_RATIO), the
        activations of training, until `freeze("observers")`. By default they are fixed.
        """
        self.calibration.init_qat(follow_ranges=follow_ranges)

    # --- training

    def accelerate(self, enabled: bool = True, *, without: Collection[str] = ()) -> None:
        """Whether training runs fused steps, which is the default, or the plain modules one by one.

        Values and gradients are the same, except for the order of sums; the plain path is slower and takes more memory.
        `without`: savings to leave out, by name, to measure the effect of each: `fused_layers`, `first_layer`,
        `weight_batches`, `relus`, `activations`, `joined_selects`, `stacked_quantizers`, `recomputed_copies`.
        """
        self.qat.accelerate(enabled, without)

    def pack_saved_activations(self, enabled: bool = True) -> None:
        """Train in less memory than the float model takes; gradients stay the same, bit by bit.

        The outputs of normalizations, activation functions and quantizers are not kept for the backward but recomputed
        there. `False` keeps everything. Without a call of this method, only large quantized copies are recomputed, on a
        GPU. Under `torch.compile` the compiler decides.
        """
        self.qat.pack_saved_activations(enabled)

    def freeze(self, *parts: Part) -> None:
        """Hold "observers" (ranges that follow the data), "batchnorm" (statistics) or "scales" (learned) as they are.

        Without names, everything that the model has. `train()` does not undo it, `unfreeze` does; like `requires_grad`,
        it is not in the state_dict. `FreezeSchedule` freezes after a number of iterations.
        """
        self.qat.hold(parts, held=True)

    def unfreeze(self, *parts: Part) -> None:
        """Undo `freeze`."""
        self.qat.hold(parts, held=False)

    def shard(self, blocks: Iterable[str] = (), **settings: Any) -> None:
        """Spread the parameters over the ranks with `torch.distributed.fsdp.fully_shard`, after `init_QAT`.

        `blocks`: names of modules of the float model (`layers.0`, ...), each gathered for its own part of the forward
        only. `settings`: those of `fully_shard`, such as `mesh` and `mp_policy`; learned scales stay float32.
        """
        self.qat.shard(blocks, settings)

    def batchnorm_tuning(self) -> AbstractContextManager[None]:
        """Inside: train mode, quantization on, batch-norm statistics start from zero; run forwards (under no_grad).

        On leaving: eval mode, batch norms folded into the layers before them, quantization off. For a calibrated
        model that kept its norms (SCHEDULE.BN_TUNING, or FUSE_BN: false), before or after training: scales per channel
        absorb the norms' factors, so that the integers of the weights do not change.
        """
        return self.qat.batchnorm_tuning()

    def fold_batchnorm(self) -> None:
        """Fold batch norms, with their current statistics, into the layers before them.

        For statistics that were frozen in training; otherwise `batchnorm_tuning` finds better ones first. The integers
        of the weights do not change. Norms after linear layers are not folded: only a forward shows whether their
        channels are the layer's.
        """
        self.qat.fold_batchnorm()

    # --- saving

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
        """Load a saved model around a float `model` of the same architecture (its weights do not matter).

        `device`: replaces the saved DEVICE. `example_inputs`: only needed if those of the saved model could not be
        stored as JSON. `transforms`: those that the saved model was built with; they are code, which a folder does not
        hold.
        """
        return store.load(cls, folder, model, example_inputs=example_inputs, device=device, transforms=transforms)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module; a state_dict of the first Sparsebit raises an error that explains how to convert it."""
        refuse_first_sparsebit(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def __reduce__(self) -> tuple[Any, ...]:
        return store.reduced(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return store.deep_copied(self, memo)

    # --- functions of the model, as methods

    save = store.save
    with_plan = store.with_plan

    visit_blocks = block_visits.visit_blocks
    replace_quantizer = site_changes.replace_quantizer
    store_qparams = site_changes.store_qparams

    verify_training = gradient_check.verify_training
    parameter_groups = parameter_groups.parameter_groups

    get_quantization_error = error_profiler.get_quantization_error
    profile = error_profiler.profile
    accuracy_gains = accuracy_gains.accuracy_gains
    dump_mermaid = mermaid.dump_mermaid
    report = reporting.report
    _repr_html_ = reporting.in_notebook

    export_onnx = export.export_onnx
    export_program = program.export_program
    check_onnx = export_checks.check_onnx
    export = export_file.export
