"""`tune_batchnorms`: batch-norm tuning as a step of `ALGORITHMS`; `calibrating/fold_batchnorm.py` folds the norms."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from sparsebit.config.algorithm_steps import BATCHNORM_TUNING
from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import calls
from sparsebit.execution.norm_statistics import restarted_statistics
from sparsebit.graph.rewriting.patterns import is_itself
from sparsebit.progress import track
from sparsebit.quantization.algorithms.registration import register_algorithm
from sparsebit.quantization.calibrating.model_state import forget_float_parameters, in_float, switched
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)

Method = Literal["difference", "replace"]
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_TINY = 1e-30


class Statistics(NamedTuple):
    """A norm's running mean and variance per channel, and its number of batches."""

    mean: Tensor
    variance: Tensor
    num_batches: Tensor


@register_algorithm(BATCHNORM_TUNING, aliases=("bn_tuning",))
@torch.no_grad()
def tune_batchnorms(qmodel: QuantModel, data: Iterable[Any], *, method: Method = "difference") -> dict[str, float]:
    """Re-estimate the statistics of batch norms, with the calibrated model quantized, on `data` (batches as for
    calibration, no labels), and fold the norms into their layers, in place.

    Quantization shifts the means and variances that norms were trained with. Dropout stays off, so the result is
    deterministic. The integers of the weights do not change. The model must have kept its norms: a config with
    `ALGORITHMS: [batchnorm_tuning]` or `SCHEDULE.BN_TUNING: true` does that. It is the last step, since it discards the
    float model's statistics.

    `method`: "difference" runs the data through the float model too, and changes the trained means and variances so
    that each norm's output has the mean and the variance that it has in the float model. "replace" uses the
    statistics of the data directly, as `batchnorm_tuning()` does: for data that is like the training data of the norms,
    augmentation included, and much of it.

    Returns the change of each norm's mean: the largest of its channels, in standard deviations.

    >>> tune_batchnorms(qmodel, batches)  # doctest: +SKIP
    {'layer1.0.bn1': 0.12, ...}
    """
    modules = ((name, module) for name, module in qmodel.model.named_modules() if is_itself(module, _BatchNorm))
    norms = {name: norm for name, norm in modules if norm.running_mean is not None}
    if not norms:
        remedy = qmodel.config.without_batchnorm_tuning or "set SCHEDULE.BN_TUNING: true, which keeps them unfolded"
        raise CalibrationError(
            f"batchnorm_tuning: no batch norm with running statistics is in the model, or they are folded; {remedy}"
        )
    expected = trained = {norm: _statistics(norm) for norm in norms.values()}
    if method == "difference":  # measured first, while the float model's outputs can still be computed
        with in_float(qmodel):
            expected = _float_statistics(qmodel, norms.values(), data)
    moved: dict[str, float] = {}
    with switched(qmodel.quantizers()), qmodel.batchnorm_tuning():
        _run(qmodel, norms.values(), data)
        for name, norm in norms.items():
            if method == "difference" and norm.num_batches_tracked:
                _store(norm, _corrected(trained[norm], expected[norm], _statistics(norm), norm.eps))
            mean, variance, _ = trained[norm]
            moved[name] = float(((norm.get_buffer("running_mean") - mean).abs() / (variance + norm.eps).sqrt()).max())
    forget_float_parameters(qmodel)
    log.info("batch-norm tuning: %d norms", len(moved))
    return moved


def _float_statistics(qmodel: QuantModel, norms: Iterable[_BatchNorm], data: Any) -> dict[_BatchNorm, Statistics]:
    """The statistics that the float model's norms find on the data; the norms' own are restored afterwards."""
    before = {norm: _statistics(norm) for norm in norms}
    try:
        with restarted_statistics(qmodel.model, "batchnorm_tuning: no batch norm with running statistics"):
            _run(qmodel, norms, data)
        return {norm: _statistics(norm) for norm in norms}
    finally:
        for norm, statistics in before.items():
            _store(norm, statistics)
        qmodel.eval()


def _run(qmodel: QuantModel, norms: Iterable[_BatchNorm], data: Any) -> None:
    qmodel.eval()  # only the norms run in train mode: dropout would be random
    for norm in norms:
        norm.train()
    try:
        for args, kwargs in track(calls(data, qmodel.original, qmodel.device), "batch-norm tuning"):
            qmodel(*args, **kwargs)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise CalibrationError(f"batchnorm_tuning: {error}; give batches of several samples (16 or more)") from error


def _statistics(norm: _BatchNorm) -> Statistics:
    return Statistics(*(norm.get_buffer(name).detach().clone() for name in _BUFFERS))


def _store(norm: _BatchNorm, statistics: Statistics) -> None:
    for name, value in zip(_BUFFERS, statistics, strict=True):
        norm.get_buffer(name).copy_(value)


def _corrected(trained: Statistics, expected: Statistics, seen: Statistics, eps: float) -> Statistics:
    """Statistics for which the norm's output has the mean and the variance of the float model's.

    With mean m and variance v of the float model on the data, m' and v' of the quantized one, and the trained M, V:
    `V' + eps = (V + eps) v' / v` and `M' = m' - sqrt(v' / v) (m - M)`. A channel that is constant keeps its variance.
    """
    is_live = (expected.variance > 0) & (seen.variance > 0)
    ratio = torch.where(is_live, seen.variance / expected.variance.clamp_min(_TINY), 1.0)
    mean = seen.mean - ratio.sqrt() * (expected.mean - trained.mean)
    return Statistics(mean, ((trained.variance + eps) * ratio - eps).clamp_min(0), seen.num_batches)
