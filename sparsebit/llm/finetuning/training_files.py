"""States of a training on disk: adapters, optimizer and losses; each file appears whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.execution.run_folder import read_part, write_part

_NUM_KEPT = 2


@dataclass(frozen=True)
class TrainingState:
    """The state of a training after `step` steps. `losses`: of each of them."""

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
    }
    write_part(_file(folder, state.step), tensors, metadata)
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
    tensors, metadata = read_part(_file(folder, step))
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
