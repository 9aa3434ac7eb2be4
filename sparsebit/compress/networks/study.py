"""`Study`: the measurements on the calibration data that rungs of networks may ask for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparsebit.backends import BACKENDS
from sparsebit.compress.judging.metrics import noise
from sparsebit.compress.judging.samples import pieces_of
from sparsebit.compress.networks.bench import Bench
from sparsebit.compress.networks.joint_search import JointChoice, choose_channels_and_bits
from sparsebit.compress.networks.recipe import DEVICE, Recipe
from sparsebit.compress.networks.teaching import BATCH
from sparsebit.compress.networks.trial import load
from sparsebit.config.schema import QuantConfig
from sparsebit.execution.batches import as_call
from sparsebit.folders import replace_text
from sparsebit.quantization.mixed_precision.search import search_bits
from sparsebit.quantization.post_training import quantize
from sparsebit.quantization.quant_config import as_qconfig
from sparsebit.records.ladder import LadderStep
from sparsebit.sparse.sparse_model import SparseModel

_CHANNELS = f"{{DEVICE: {DEVICE}, SPARSER: {{TYPE: structured}}}}"
WORST_LAYERS = "worst_layers.json"  # in the folder of a candidate
_NUM_WORST, _FEW_SAMPLES = 8, 8
# Passes of one training step, each as long as a forward; and the operations per second of two ordinary cores. Constants
# instead of a measurement, so that a repeated search proposes the same number of steps.
_TEACHER_PASSES, _STUDENT_PASSES, _OPERATIONS_PER_S = 1, 3, 4e10
_LEARNING_SHARE, _MOST_LEARNING_STEPS = 0.25, 2000


@dataclass(frozen=True)
class Study:
    """Measurements on the calibration data that a rung may ask for. `root`: the folder of the run."""

    bench: Bench
    root: Path

    def recipe(self, values: dict[str, Any]) -> Recipe:
        return Recipe.from_dict(values)

    @property
    def low_bit_config(self) -> QuantConfig:
        """4-bit weights in the target's formats; activations of 8 bits where the target runs both, else float."""
        target = self.bench.goal.target
        config = as_qconfig(target).replace("DEVICE", DEVICE)
        if 4 not in BACKENDS[target].weight.bits:
            config = config.replace("A.QUANTIZER.DISABLE", True)
        return config.replace("W.QUANTIZER.BIT", 4)

    @property
    def low_bits(self) -> tuple[int, ...]:
        """The bits from 2 to 8 that the target's files store weights in, the fewest first."""
        backend = BACKENDS[self.bench.goal.target]
        allowed = backend.weight.bits if 4 in backend.weight.bits else backend.weight_only.bits
        return tuple(bits for bits in (2, 4, 8) if bits in allowed)

    def has_depthwise(self) -> bool:
        """Whether some convolution has one weight per channel, whose ranges differ widely."""
        convs = (m for m in self.bench.model.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
        return any(conv.groups > 1 and conv.groups == conv.in_channels for conv in convs)

    def has_linears(self) -> bool:
        """Whether the model multiplies matrices, as transformers do, whose inputs have outlier channels."""
        return sum(isinstance(module, nn.Linear) for module in self.bench.model.modules()) > 1

    def worst_layers(self, step: LadderStep) -> list[str]:
        """The layers of a finished candidate that cost the most accuracy, the worst first, by a few samples.

        The model runs twice for every layer, which takes longer than anything else in a search; the folder keeps the
        result.
        """
        known = self.root / step.folder / WORST_LAYERS
        if known.is_file():
            found: list[str] = json.loads(known.read_text(encoding="utf-8"))
            return found
        _, qmodel = load(self.bench, step, self.root / step.folder)
        batch = pieces_of(self.bench.calibration[:1], _FEW_SAMPLES)[0]
        args, kwargs = as_call(batch, self.bench.model)
        with torch.no_grad():
            reference = self.bench.model(*args, **kwargs)

        def exactness(model: Any) -> float:
            with torch.no_grad():
                return float(noise(model(*args, **kwargs), batch, reference).mean())

        gains = qmodel.accuracy_gains([batch], exactness, num_layers=_NUM_WORST)
        found = [row.layer for row in gains.layers if row.gain > 0]
        replace_text(known, json.dumps(found) + "\n")
        return found

    def bits_under(self, config: QuantConfig, share: float, weight_bits: tuple[int, ...]) -> QuantConfig:
        """The config with the bits per layer that lose least at this share of the float weights' bytes."""
        plain = config.replace("ALGORITHMS", [])
        qmodel = quantize(self.bench.model, self.bench.calibration, plain)
        float_bytes = sum(one.float_bytes for one in qmodel.coverage.parameters if one.is_quantized)
        limit = {"bytes": share * float_bytes}
        found = search_bits(qmodel, self.bench.calibration, limit, weight_bits=weight_bits)
        steps = [step.to_entry() for step in config.ALGORITHMS]
        return found.config.replace("ALGORITHMS", steps) if steps else found.config

    def channels_and_bits(self, config: QuantConfig, share: float, weight_bits: tuple[int, ...]) -> JointChoice:
        """Channels to remove, and bits of the rest, at this share of the float model's bytes."""
        model, batches, plain = self.bench.model, self.bench.calibration, config.replace("ALGORITHMS", [])
        limit = {"bytes": share}
        return choose_channels_and_bits(
            model, batches, limit, sconfig=_CHANNELS, qconfig=plain, weight_bits=weight_bits
        )

    def learning_steps(self, minutes: float) -> int:
        """How many steps of learning fit into a quarter of the time, by the model's size: equal in every run."""
        operations = 2 * self.bench.float_cost.macs * (_TEACHER_PASSES + _STUDENT_PASSES) * BATCH
        return min(_MOST_LEARNING_STEPS, int(_LEARNING_SHARE * 60 * minutes * _OPERATIONS_PER_S / max(operations, 1)))

    def channels(self, budget: Mapping[str, float]) -> tuple[Any, int]:
        """The config that removes channels until the float model keeps the budget, and the width it rounds to."""
        smodel = SparseModel(self.bench.model, _CHANNELS, self.bench.calibration[0]).eval()
        choice = smodel.choose_ratios(dict(budget), self.bench.calibration, round_to=(16, 8, 1))
        return smodel.config_of(choice.ratios), choice.round_to
