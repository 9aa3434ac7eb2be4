"""`TrainableModel`: a simulated model that trains, and the verbs of training."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

import sparsebit.kernels  # noqa: F401  # puts a GPU's kernels behind the operator
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.errors import CalibrationError
from sparsebit.execution.distributed import is_sharded
from sparsebit.execution.norm_statistics import restarted_statistics
from sparsebit.graph.example import GuardError
from sparsebit.quantization import held_parts, sharding
from sparsebit.quantization.algorithms.batchnorm_tuning import (
    MayFold,
    fold_quantized_batchnorm,
)
from sparsebit.quantization.first_calls import CheckedModel
from sparsebit.quantization.held_parts import Part
from sparsebit.quantization.ops.quant_opr import FunctionalWeightedQuantOpr, WeightedQuantOpr
from sparsebit.quantization.parameter_groups import parameter_groups
from sparsebit.quantization.passes.attach_integer_ops import attach_integer_ops

if find_spec("sparsebit.quantization.speed") is not None:
    from sparsebit.quantization import speed
else:  # the plain path needs nothing of it
    speed = None  # type: ignore[assignment]


class TrainableModel(CheckedModel):
    """What `QuantModel` does between `init_QAT` and the export."""

    _packs: bool | None = None  # what `pack_saved_activations` was told
    _is_accelerated = True  # what `accelerate` was told
    _savings: speed.Savings | None = None
    _speed: speed.Acceleration | None = None  # in training
    _holds_statistics = False  # of batch norms

    # --- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        self._choose_path()
        with contextlib.nullcontext() if self._speed is None else self._speed.step():
            return super().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self._choose_path()
        if self._holds_statistics:
            held_parts.hold_statistics(self.model, held=True)
        return self

    def accelerate(self, enabled: bool = True, *, without: Collection[str] = ()) -> None:
        """Whether training runs fused steps, as it does by default, or the plain modules one by one.

        Values and gradients are the same, but for the order of sums; the plain path is slower and takes more memory.
        `without`: savings to leave out, by name, to find out what each gives: `fused_layers`, `first_layer`,
        `weight_batches`, `relus`, `activations`, `joined_selects`, `stacked_quantizers`, `recomputed_copies`.
        """
        self._savings = None if speed is None else speed.Savings.without(without)
        self._is_accelerated = enabled
        self._choose_path()

    def _choose_path(self) -> None:
        """Put the fused steps in, or take them out."""
        if speed is None or not self.training or not self._is_accelerated:
            if self._speed is not None:
                self._speed.undo()
            self._speed = None
        elif self._speed is None or not self._speed.is_for(self._captured, self._packs, self._savings):
            self._speed = speed.accelerate(self.model, self._captured, packs=self._packs, savings=self._savings)

    def _warn_of_source(self, error: GuardError) -> None:
        super()._warn_of_source(error)
        if self._speed is not None:
            self._speed.release_weights()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`, with options for inductor that make a training step faster; yours are added to them.

        `torch.compile(qmodel)` gives the same values.
        """
        if speed is not None and not args and kwargs.get("backend", "inductor") == "inductor":
            kwargs = speed.with_options(kwargs, self.device.type)
        super().compile(*args, **kwargs)

    # --- switches

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
        for part in held_parts.chosen(self.model, parts):
            if part == "batchnorm":
                self._holds_statistics = held
            held_parts.HOLD[part](self.model, held)

    def pack_saved_activations(self, enabled: bool = True) -> None:
        """Train in less memory than the float model takes; gradients stay the same, bit by bit.

        What normalizations, activation functions and quantizers give is not kept for the backward but computed again
        there. `False` keeps everything. Without a call, on a GPU, large quantized copies alone are computed again.
        Under `torch.compile` the compiler decides by itself.
        """
        self._packs = enabled
        self._choose_path()

    # --- for the training loop

    def parameter_groups(
        self, lr: float | None = None, *, scale_lr: float | None = None, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """For any optimizer: weights with decay; biases and norms without; learned scales with `scale_lr`, without.

        Every parameter that requires a gradient once. What is None is the optimizer's default; `scale_lr` is `lr` then.
        """
        return parameter_groups(self, lr, scale_lr=scale_lr, weight_decay=weight_decay)

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

    # --- batch norms

    @contextlib.contextmanager
    def batchnorm_tuning(self) -> Iterator[None]:
        """Inside: train mode, quantization on, batch-norm statistics start from nothing; run forwards (under no_grad).

        On leaving: eval mode, batch norms folded into the layers in front of them, quantization off. For a calibrated
        model that kept its norms (SCHEDULE.BN_TUNING, or FUSE_BN: false), before or after training: scales per channel
        take in the norms' factors, so that the integers of the weights stay what they were.
        """
        self._require_whole("batchnorm_tuning")
        held = self._holds_statistics
        missing = (
            "batchnorm_tuning(): no batch norm with running statistics is left in the model; "
            "set SCHEDULE.BN_TUNING: true, which keeps them from being folded when the model is built"
        )
        with restarted_statistics(self.model, missing) as ranks:
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
            if isinstance(layer, (WeightedQuantOpr, FunctionalWeightedQuantOpr)):
                bias = layer.stored_bias()
                for rounding, _ in layer.arithmetics:
                    if bias is not None and rounding is not None:
                        rounding.make_room(bias)
