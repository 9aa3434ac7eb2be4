"""`apply_algorithms`: the algorithms that the config names, one after the other, on a calibrated model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import CalibrationError
from sparsebit.execution.value_store import MIB
from sparsebit.quantization.algorithms.registration import run_step

log = logging.getLogger(__name__)


class ConfiguredModel(Protocol):
    """What is needed of a `QuantModel`, which is built on top of the algorithms."""

    config: QuantConfig
    applied_algorithms: tuple[str, ...]


def apply_algorithms(
    qmodel: ConfiguredModel,
    data: Iterable[Any],
    *,
    memory_budget: int = 1024 * MIB,
    resume: str | os.PathLike[str] | None = None,
) -> list[tuple[str, Any]]:
    """Run the `ALGORITHMS` of the config on a calibrated model, in place; gives each one's name and result.

    `data`: batches as for calibration. Every algorithm reads them from the start, so that it is a list or a DataLoader,
    not an iterator. `memory_budget`: bytes of activations in memory. `resume`: a folder that keeps what is finished; a
    run that was killed goes on after it.

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


def require_repeatable(data: object, reader: str) -> None:
    """An error for data that can be read only once."""
    if isinstance(data, Iterator):
        raise CalibrationError(
            f"{reader} read the calibration data more than once, and an iterator ({type(data).__name__}) gives it "
            "once; pass a list of batches or a DataLoader"
        )


def not_applied(qmodel: ConfiguredModel) -> list[str]:
    """The algorithms of the config that were not run on the model."""
    return [step.name for step in qmodel.config.ALGORITHMS if step.name not in qmodel.applied_algorithms]
