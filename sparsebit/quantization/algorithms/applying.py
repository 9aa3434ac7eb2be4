"""`apply_algorithms`: the algorithms that the config names, one after the other, on a calibrated model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsebit.execution.batches import require_repeatable
from sparsebit.execution.blocks.value_store import MIB
from sparsebit.quantization.algorithms.registration import run_step
from sparsebit.quantization.model.quant_model import QuantModel

log = logging.getLogger(__name__)


def apply_algorithms(
    qmodel: QuantModel,
    data: Iterable[Any],
    *,
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
) -> list[tuple[str, Any]]:
    """Run the `ALGORITHMS` of the config on a calibrated model, in place; returns each one's name and result.

    `data`: batches as for calibration. Every algorithm reads them from the start, so it must be a list or a DataLoader,
    not an iterator. `memory_budget`: bytes of activations in memory. `resume`: a folder that keeps finished work; a
    run that was killed continues from there.

    >>> apply_algorithms(qmodel, batches)  # doctest: +SKIP
    [('gptq', {'conv1': LayerRounding(nearest=0.0113, rounded=0.0021), ...})]
    """
    if qmodel.config.ALGORITHMS:  # without any, a generator will do
        require_repeatable(data, f"ALGORITHMS ({', '.join(step.name for step in qmodel.config.ALGORITHMS)})")
    results = []
    for number, step in enumerate(qmodel.config.ALGORITHMS):
        folder = None if resume is None else Path(resume) / f"{number}-{step.name}"
        log.info("%s", step.name)
        results.append((step.name, run_step(step, qmodel, data, memory_budget=memory_budget, resume=folder)))
    return results
