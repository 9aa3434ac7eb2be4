"""Which scaled pairs are kept: those that do not raise the quantization error on held-out samples.

Scaled channels fit the ranges of the samples that were seen. With few samples, others exceed these ranges. So some
samples are held out; for each choice of pairs the model is calibrated on the others and judged on them. With fewer than
32 samples, each is held out once, in up to 4 folds, because a handful of samples would decide by chance. With fewer
than 8, a change has to lower the error clearly, and the user is warned that the judgement may be wrong.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebit.execution.batches import Call
from sparsebit.execution.blocks.value_store import SharedData
from sparsebit.execution.distributed import gather
from sparsebit.execution.held_out import HoldOut, Piece, Split, find_samples
from sparsebit.graph.values.nested import map_nested, tensors_of
from sparsebit.quantization.algorithms.rescaling.channel_pairs import ChannelPair
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)

REVERTED = "it raises the quantization error on held-out samples: reverted"
_HOLD_OUT, _ENOUGH, _NUM_FOLDS = HoldOut(1 / 8), 32, 4
_MOST_TRIALS = 7  # calibrations: all pairs, then halves and quarters
_NOISE = 1.02  # a difference of 0.1 dB on a few samples is noise
_FEW, _CLEAR = 8, 0.8  # with fewer samples, only a clear gain counts


class HeldOutJudge:
    """Samples of the batches on which quantized models are compared. A single one serves calibration and judgement."""

    def __init__(self, qmodel: QuantModel, batches: SharedData) -> None:
        self.qmodel, self.batches = qmodel, batches
        # The part of the last error that comes from the first split, whose held-out samples no factor was fitted on.
        self._first_noise = 0.0
        samples = find_samples(len(batches), batches.get, self._answer)
        self.num_samples = fewest = min(gather(len(samples)))  # all processes must run the same number of calibrations
        if fewest >= _ENOUGH:
            self.splits: tuple[Split, ...] = (samples.split(_HOLD_OUT),)
        elif fewest > 1:
            self.splits = samples.folds(min(_NUM_FOLDS, fewest))
        else:
            every = samples.split(HoldOut(0)).learned
            self.splits = (Split(every, every),)

    @property
    def pieces(self) -> list[tuple[Piece, bool]]:
        """All samples, once: pieces of batches, and whether the first split holds them out."""
        split = self.splits[0]
        return [(p, p in split.held and p not in split.learned) for p in dict.fromkeys(split.pieces)]

    def inputs(self, piece: Piece) -> Call:
        call: Call = piece.of(self.batches.get(piece.batch))
        return call

    def kept(
        self, verb: str, pairs: Sequence[ChannelPair], change: Callable[[Sequence[ChannelPair]], None], *, asym: bool
    ) -> list[ChannelPair]:
        """The pairs that are kept; their change is applied. All are tried first, then, if the error rises, halves."""
        change([])
        if not pairs:
            return []
        limit = _NOISE
        if self.num_samples < _FEW:
            limit = _CLEAR
            log.warning(
                "%s: %d calibration samples are too few to judge on held-out ones: the quantized model may be worse on "
                "other data than without %s; give at least %d samples, better %d",
                *(verb, self.num_samples, verb, _FEW, _ENOUGH),
            )
        targets = [[self._outputs(piece) for piece in split.held] for split in self.splits]
        start = best = self._error(targets, asym)
        first = self._first_noise
        found: list[ChannelPair] = []
        waiting, worst = [list(pairs)], 0.0
        for part in itertools.islice(waiting, _MOST_TRIALS):  # the list grows while it is read
            change([*found, *part])
            error, half = self._error(targets, asym), len(part) // 2
            if error <= best * limit and self._first_noise <= first * limit:
                found, best, first = [*found, *part], min(error, best), min(self._first_noise, first)
            else:
                worst = max(worst, error)
                waiting += [part[:half], part[half:]] if half else []
        change(found)
        if len(found) < len(pairs):
            names = ", ".join(pair.name for pair in pairs if pair not in found)
            log.warning(
                "%s: reverted for %d of %d sources of channels (%s): on held-out samples the error of the quantized "
                "model would rise from %.3g to %.3g of the output; give more calibration samples",
                *(verb, len(pairs) - len(found), len(pairs), names, start, worst),
            )
        return found

    def _error(self, targets: list[list[list[Tensor]]], asym: bool) -> float:
        """The squared error on held-out samples, relative to the float outputs, calibrated on the others."""
        noise = signal = 0.0
        for split, expected in zip(self.splits, targets, strict=True):
            self.qmodel.prepare_calibration(keep_inputs=asym)
            for piece in split.learned:
                self._answer(self.inputs(piece))
            self.qmodel.calc_qparams(asym=asym)
            self.qmodel.set_quant(w_quant=True, a_quant=True)
            for piece, outputs in zip(split.held, expected, strict=True):
                for output, target in zip(self._outputs(piece), outputs, strict=True):
                    noise += float((output - target).square().sum())
                    signal += float(target.square().sum())
            if split is self.splits[0]:
                self._first_noise = sum(gather(noise))
        self.qmodel.set_quant(w_quant=False, a_quant=False)
        parts: list[tuple[float, float]] = gather((noise, signal))
        return sum(part[0] for part in parts) / max(sum(part[1] for part in parts), 1e-30)

    def _outputs(self, piece: Piece) -> list[Tensor]:
        found = tensors_of(self._answer(self.inputs(piece)))
        return [torch.nan_to_num(tensor.double()) for tensor in found if tensor.is_floating_point()]

    @torch.no_grad()
    def _answer(self, call: Any) -> Any:
        args, kwargs = map_nested(Tensor, torch.clone, call)  # a model may write into its inputs
        return self.qmodel(*args, **kwargs)
