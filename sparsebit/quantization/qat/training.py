"""`Training`: the part of a `QuantModel` that a training loop uses: fused steps, frozen parts, batch norms.

The plain modules are enough for training. `sparsebit.quantization.speed` replaces some of their forwards by fused steps
while the model is in train mode; without that folder everything works, but slower. This is the only file that imports
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from torch import nn

import sparsebit.kernels  # noqa: F401  # registers a GPU's kernels for the operator
from sparsebit.execution.norm_statistics import restarted_statistics
from sparsebit.quantization.calibrating.fold_batchnorm import fold_norms
from sparsebit.quantization.calibrating.model_state import require_calibrated, require_whole
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.quantization.qat import sharding
from sparsebit.quantization.qat.freezing import Part, chosen, hold, hold_statistics

if find_spec("sparsebit.quantization.speed") is not None:
    from sparsebit.quantization import speed
else:  # without that folder, which `scripts/without_speed.sh` tests
    speed = None  # type: ignore[assignment]


class Training:
    """The user's choices for training, and the fused steps that are currently in the model."""

    def __init__(self, qmodel: SimulatedModel) -> None:
        self.qmodel = qmodel
        self.packs_activations: bool | None = None  # None: not chosen by the user
        self.is_accelerated = True
        self.savings: speed.Savings | None = None
        self.fused: speed.Acceleration | None = None  # None in eval mode
        self.holds_statistics = False  # whether the statistics of batch norms are frozen

    # --- fused steps

    def accelerate(self, enabled: bool, without: Collection[str]) -> None:
        self.savings = None if speed is None else speed.Savings.without(without)
        self.is_accelerated = enabled
        self.choose_path()

    def pack_saved_activations(self, enabled: bool) -> None:
        self.packs_activations = enabled
        self.choose_path()

    def choose_path(self) -> None:
        """Insert, remove or replace the fused steps, as mode and settings now require."""
        qmodel, packs = self.qmodel, self.packs_activations
        if speed is None or not qmodel.training or not self.is_accelerated:
            if self.fused is not None:
                self.fused.undo()
            self.fused = None
        elif self.fused is None or not self.fused.is_for(qmodel.built.captured, packs, self.savings):
            self.fused = speed.Acceleration(qmodel.model, qmodel.built.captured, packs=packs, savings=self.savings)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Context for a forward of a training step."""
        self.choose_path()
        return contextlib.nullcontext() if self.fused is None else self.fused.step()

    def release_weights(self) -> None:
        """Called when the model's own code runs instead of its graph: its layers quantize their own weights."""
        if self.fused is not None:
            self.fused.release_weights()

    def mode_changed(self) -> None:
        """Called after `train` and `eval`."""
        self.choose_path()
        if self.holds_statistics:
            hold_statistics(self.qmodel.model, held=True)

    # --- freezing and sharding

    def hold(self, parts: tuple[Part, ...], *, held: bool) -> None:
        for part in chosen(self.qmodel.model, parts):
            if part == "batchnorm":
                self.holds_statistics = held
            hold(self.qmodel.model, part, held)

    def shard(self, blocks: Iterable[str], settings: dict[str, Any]) -> None:
        sharding.shard(self.qmodel, self.qmodel.model, self.qmodel.built.captured, blocks, settings)

    # --- batch norms

    @contextlib.contextmanager
    def batchnorm_tuning(self) -> Iterator[None]:
        """See `QuantModel.batchnorm_tuning`."""
        qmodel = self.qmodel
        require_whole(qmodel, "batchnorm_tuning")
        held = self.holds_statistics
        missing = (
            "batchnorm_tuning(): no batch norm with running statistics is left in the model; "
            "set SCHEDULE.BN_TUNING: true, which keeps them from being folded when the model is built"
        )
        with restarted_statistics(qmodel.model, missing) as ranks:
            try:
                qmodel.set_quant(w_quant=True, a_quant=True)
                self.holds_statistics = False
                qmodel.train()
                yield
            except BaseException:
                self.holds_statistics = held
                raise
            finally:
                qmodel.eval()
                qmodel.set_quant(w_quant=False, a_quant=False)
        # After a linear layer with outputs (N, L, C) the norm's channels are not those of the layer.
        fold_norms(qmodel, lambda _, layer, norm: not isinstance(layer, nn.Linear) or ranks.get(norm) == 2)

    def fold_batchnorm(self) -> None:
        """See `QuantModel.fold_batchnorm`."""
        require_whole(self.qmodel, "fold_batchnorm")
        require_calibrated(self.qmodel, "fold_batchnorm")
        fold_norms(self.qmodel, lambda _, layer, norm: not isinstance(layer, nn.Linear))


def compile_options(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Keyword arguments of `nn.Module.compile`, with options for inductor that speed up a training step."""
    if speed is None or options.get("backend", "inductor") != "inductor":
        return options
    return speed.with_options(options, device)
