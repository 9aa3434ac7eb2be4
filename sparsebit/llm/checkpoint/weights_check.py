"""`check_weights`: detects damage of a float model before the first block, not hours later."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sparsebit.errors import CheckpointError
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.progress import track

log = logging.getLogger(__name__)
_CHUNK = 1 << 24  # numbers that are checked together


def check_weights(skeleton: Skeleton, *, scan: bool) -> None:
    """Read the headers of all files, and raise for missing tensors and wrong shapes; `scan`: also NaN and infinity.

    Matrices of zeros cause a warning: an interrupted download may leave them in a file of full size. Files are
    mapped, and a part of one tensor is in memory at a time.
    """
    skeleton.check_shapes()
    if scan:
        zeros = [
            name
            for name in track(list(skeleton.folder), "looking for NaN in the weights")
            if not _need_finite(skeleton.folder, name)
        ]
        if zeros:
            log.warning(
                "%s: %d weights are all zero (%s): if the model was not trained so, its download is not whole",
                *(skeleton.folder.path, len(zeros), ", ".join(zeros[:3])),
            )
    skeleton.folder.close()


def _need_finite(folder: ModelFolder, name: str) -> bool:
    """Raise for NaN and infinity; returns whether a number is not zero (vectors, such as biases, may be all zero)."""
    part: Any = folder.part(name)
    shape = part.get_shape()
    rows = max(1, _CHUNK * shape[0] // max(1, torch.Size(shape).numel())) if shape else 1
    has_values = len(shape) < 2
    for start in range(0, shape[0] if shape else 1, rows):
        values = part[start : start + rows] if shape else folder.tensor(name)
        if not values.is_floating_point():
            return True
        has_values = has_values or bool(values[0].any()) or bool(values.any())
        # A sum is five times faster than `isfinite`, and is not finite where a value is not.
        if not values.sum(dtype=torch.float32).isfinite() and not values.float().isfinite().all():
            raise CheckpointError(
                f"{folder.files[name]}: {name} has NaN or infinite values: the float model is damaged; download it "
                "again"
            )
    return has_values
