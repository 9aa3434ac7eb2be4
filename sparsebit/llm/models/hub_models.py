"""Models of the Hugging Face hub by name: `org/name` becomes a folder in the local cache, at a known commit."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm.models.hub_classes import package

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The files of a repository that a model folder needs: neither pickles nor copies in other formats.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*"]
_NOT_WANTED = ["consolidated*", "original/*", "onnx/*", "openvino/*"]
_SECONDS = 5.0  # timeout for the hub


@dataclass(frozen=True)
class HubSource:
    """The hub's model in a folder: `revision` is a commit, so that it can be fetched again."""

    name: str
    revision: str


def local_folder(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a model: `model` itself if it exists, else that of the hub's model `org/name`.

    The latter is in the local cache; missing files are downloaded. `revision`: its branch, tag or commit.
    """
    path = Path(model)
    if path.exists():
        if revision is not None:
            raise ConfigError(f"revision={revision!r} with the folder {path}: only models of the hub have revisions")
        return path
    name = os.fspath(model)
    is_name = _ID.fullmatch(name) and not name.endswith((".safetensors", ".json", ".gguf"))
    if not is_name or path.parent.is_dir():  # a folder with this parent was probably mistyped; the hub would hide that
        is_one, advice = "", "give the folder of a model, or a model of the hub as ORG/NAME"
        if is_name:
            is_one = f", and {path.parent} is one"
            advice = "if a model of the hub is meant, run the command in another folder"
        raise CheckpointError(f"{name} is not a folder{is_one}{_alike(path)}; {advice}")
    return _downloaded(name, revision)


def hub_source(folder: Path) -> HubSource | None:
    """Model and commit of a folder in the hub's cache, `models--ORG--NAME/snapshots/COMMIT`; None for other folders."""
    if folder.parent.name != "snapshots" or not folder.parent.parent.name.startswith("models--"):
        return None
    return HubSource(folder.parent.parent.name.removeprefix("models--").replace("--", "/"), folder.name)


def _downloaded(name: str, revision: str | None) -> Path:
    hub = package("huggingface-hub", "llm", "models of the hub")
    from huggingface_hub import constants, errors

    given, at = (name, "") if revision is None else (f"{name} at revision {revision}", f" --revision {revision}")
    try:
        found = hub.snapshot_download(
            name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_NOT_WANTED, etag_timeout=_SECONDS
        )
    except Exception as error:  # of the hub, of the network, of the cache, of offline mode
        first = (str(error).strip().splitlines() or [""])[0][:200]
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{type(error).__name__}: {first}"
        reasons = {  # the first that fits: a gated repository is one that was not found
            errors.GatedRepoError: ": its owner wants you to accept conditions: do so on the model's page, then log in "
            "(hf auth login)",
            errors.RepositoryNotFoundError: " is neither a folder here nor a model of the hub that you may read: "
            "correct the path or the name; for a private model log in (hf auth login)",
            errors.RevisionNotFoundError: ": the model has no such branch, tag or commit",
            Exception: f" is not a folder here and not in the local cache, and the hub cannot be reached ({why}): "
            f"correct the path; or where there is a network, run `hf download {name}{at} --local-dir DIR`, copy DIR "
            "here and give it",
        }
        reason = next(text for kind, text in reasons.items() if isinstance(error, kind))
        raise ConfigError(f"{given}{reason}") from error
    return Path(found)


def _alike(path: Path) -> str:
    """Folders with names similar to the path."""
    try:
        names = [found.name for found in path.parent.iterdir() if found.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=2)
    return f" (did you mean {' or '.join(str(path.parent / name) for name in near)}?)" if near else ""
