"""A pruned model as a folder: `model.safetensors` and `channels.json`, from which the unpruned class is made small.

The folder holds neither code nor pickled data. It appears as a whole: the files are completed in a hidden folder next
to it, which then replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsebit.checksums import sha256_of
from sparsebit.errors import CheckpointError
from sparsebit.folders import exchange, flush, staging_folder
from sparsebit.graph.checking.usable_model import require_values
from sparsebit.graph.values.copying import copy_model, uncompiled
from sparsebit.interrupts import ignored_interrupts
from sparsebit.records.model_folders import PrunedModel
from sparsebit.sparse.shrinking.surgery import ChannelPlan, apply_plan, plan_of
from sparsebit.tensor_files import load_tensors, save_tensors, without_ties
from sparsebit.version import __version__

TENSORS, CHANNELS = "model.safetensors", "channels.json"
_FORMAT = 2
_KEYS = frozenset(("format", "class", "aliases", "sha256", "plan"))
# Errors that a damaged plan, or one of another model, raises while it is applied.
_DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError)


def save(model: nn.Module, folder: str | os.PathLike[str], *, measured: PrunedModel | None = None) -> Path:
    """Write a model that `shrink` returned: its current weights, and the plan that makes the same model again.

    `measured`: facts about the model for the page of `sparsebit report`.
    """
    path, model = Path(folder), uncompiled(model)
    plan = plan_of(model)
    if plan is None:
        raise CheckpointError(
            f"{type(model).__name__} has no channel plan: save() takes a model that shrink() or load() returned; "
            "a model that was not pruned is saved with torch.save(model.state_dict(), ...)"
        )
    target, state = checked_folder(path), model.state_dict()
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"{other[0]} is not a tensor, and a folder holds tensors alone; take it out of the state")
    tensors, aliases = without_ties(dict(state))
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    description = {
        "format": _FORMAT, "sparsebit": __version__, "class": kind, "aliases": aliases, "versions": _versions(state),
    }  # fmt: skip
    if measured is not None:
        description["measured"] = measured.to_dict()
    try:
        with staging_folder(target) as staged:
            save_tensors(tensors, staged / TENSORS, {})
            description |= {"sha256": sha256_of(staged / TENSORS), "plan": plan.to_json()}
            description["checksum"] = _checksum(description)
            (staged / CHANNELS).write_text(json.dumps(description, indent=1), encoding="utf-8")
            for file in (staged / TENSORS, staged / CHANNELS, staged):
                flush(file)
            with ignored_interrupts():
                _publish(staged, target)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error})") from error
    return path


def checked_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder's true path if a pruned model may be written there."""
    target = Path(folder).expanduser().resolve()
    if target.exists() and (not target.is_dir() or set(os.listdir(target)) - {TENSORS, CHANNELS}):
        raise CheckpointError(f"{folder} holds something else than a pruned model; give another name")
    above = next(folder for folder in (target, *target.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder}: {above} cannot be written to; give another name")
    return target


def load(folder: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """The pruned model of a folder: a smaller copy of `model` with the saved weights.

    `model`: an instance of the original, unpruned class, as its constructor returns it.
    """
    require_values(model)
    path = Path(folder)
    description = _read(path / CHANNELS)
    try:
        found = sha256_of(path / TENSORS)
    except OSError as error:
        raise CheckpointError(f"{path / TENSORS} cannot be read ({error})") from None
    if found != description["sha256"]:
        raise CheckpointError(f"{path / TENSORS}: its checksum differs from that in {CHANNELS}; save the model again")
    tensors, _ = load_tensors(path / TENSORS)
    small = copy_model(uncompiled(model))
    if plan_of(small) is not None:
        raise CheckpointError(f"{type(model).__name__} is pruned already; load() takes a model of the unpruned class")
    try:
        state = OrderedDict({**tensors, **{name: tensors[other] for name, other in description["aliases"].items()}})
        apply_plan(small, ChannelPlan.from_json(description["plan"]))
        # torch's modules look up the layout version of a state in `_metadata`.
        versions = description.get("versions") or _versions(small.state_dict())
        state._metadata = OrderedDict({path: dict(entry) for path, entry in versions.items()})  # type: ignore[attr-defined]
        small.load_state_dict(state)
    except CheckpointError as error:
        raise CheckpointError(f"{path / CHANNELS}: {error}") from None
    except _DAMAGE as error:
        problem = error if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} holds a pruned {description['class']}, which {type(model).__name__} does not fit, or its plan is "
            f"damaged: {problem}"
        ) from None
    return small


def _versions(state: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """The version of each module's state: what torch keeps as `_metadata`."""
    metadata: Mapping[str, Mapping[str, Any]] = getattr(state, "_metadata", {})
    found = {path: entry.get("version") for path, entry in metadata.items()}
    return {path: {"version": number} for path, number in found.items() if isinstance(number, int)}


def _publish(staged: Path, target: Path) -> None:
    if target.exists() and not exchange(staged, target):
        shutil.rmtree(target)
    if not target.exists():
        os.rename(staged, target)
    flush(target.parent)


def _read(path: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); load() takes a folder that save() wrote") from None
    if not isinstance(description, dict) or not set(description) >= _KEYS:
        raise CheckpointError(f"{path} is damaged, or not of a pruned model; load() takes a folder that save() wrote")
    if (number := description["format"]) not in (1, _FORMAT):
        raise CheckpointError(f"{path} has format {number!r}; this Sparsebit ({__version__}) reads 1 to {_FORMAT}")
    checksum = description.pop("checksum", None)
    if (checksum is not None or description["format"] != 1) and checksum != _checksum(description):
        raise CheckpointError(f"{path} is damaged: its checksum differs from its content; save the model again")
    return description


def _checksum(description: Mapping[str, Any]) -> str:
    """SHA-256 of the description, however its JSON is laid out."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
