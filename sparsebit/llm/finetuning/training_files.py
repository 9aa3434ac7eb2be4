"""States of a training on disk: adapters, optimizer and losses; each file appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.folders import flush, staging_folder
from sparsebit.tensor_files import digest, load_tensors, save_tensors

_NUM_KEPT = 2


@dataclass(frozen=True)
class TrainingState:
    """What a training is after `step` steps. `losses`: of each of them."""

    step: int
    losses: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]


def save_state(folder: Path, state: TrainingState) -> None:
    """Keep the state; older ones are removed once it is on the disk."""
    tensors = {f"parameter.{name}": value for name, value in state.parameters.items()}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in state.optimizer["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    metadata = {
        "step": str(state.step),
        "losses": json.dumps(state.losses),
        "optimizer": json.dumps(numbers),
        "sha256": digest(tensors),
    }
    path = _file(folder, state.step)
    try:
        with staging_folder(path) as staging:
            save_tensors(tensors, staging / path.name, metadata)
            flush(staging / path.name)
            os.replace(staging / path.name, path)
            flush(folder)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}); earlier states are kept") from error
    for old in _files(folder)[:-_NUM_KEPT]:
        old.unlink(missing_ok=True)


def newest_state(folder: Path, optimizer: torch.optim.Optimizer) -> TrainingState | None:
    """The last state that was kept; None if there is none."""
    steps = saved_steps(folder)
    return state_at(folder, steps[-1], optimizer) if steps else None


def saved_steps(folder: Path) -> list[int]:
    """After how many steps states were kept that are still there, in order."""
    return [int(path.stem.removeprefix("step-")) for path in _files(folder)]


def state_at(folder: Path, step: int, optimizer: torch.optim.Optimizer) -> TrainingState:
    """The state that was kept after so many steps."""
    path = _file(folder, step)
    tensors, metadata = load_tensors(path)
    if metadata.get("sha256") != digest(tensors):
        raise CheckpointError(f"{path} is damaged (its checksum differs); remove it to go on from an earlier one")
    entries: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in json.loads(metadata["optimizer"]).items()
    }
    parameters: dict[str, Tensor] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "parameter":
            parameters[rest] = value
        else:
            index, _, entry = rest.partition(".")
            entries.setdefault(int(index), {})[entry] = value
    whole = {"state": entries, "param_groups": optimizer.state_dict()["param_groups"]}
    return TrainingState(int(metadata["step"]), tuple(json.loads(metadata["losses"])), parameters, whole)


@torch.no_grad()
def restore_parameters(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Put the values of a state into the parameters of the same names."""
    if parameters.keys() != values.keys():
        raise CheckpointError("the state of the training has other adapters than the model; remove it to begin anew")
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}.safetensors"


def _files(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("step-*.safetensors"))
