"""`sparsebit.json`, the manifest of a saved model, with a checksum of itself and of the file of tensors.

`key` is random and also written in the header of the tensors' file: it says which two files belong together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from sparsebit.errors import CheckpointError
from sparsebit.version import __version__

NAME = "sparsebit.json"
FORMAT = "sparsebit-quantized"
VERSION = 5  # the first that was released
_WANTED = "give a folder that QuantModel.save() wrote"


class _Switches(BaseModel):
    weight: bool
    activation: bool


class _Site(BaseModel):
    model_config = ConfigDict(extra="allow")
    bits: int


class _File(BaseModel):
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    """The fields that loading reads."""

    model_config = ConfigDict(strict=True)
    key: str
    config: dict[str, Any]
    example: dict[str, Any] | None
    switches: _Switches
    sites: dict[str, _Site]
    aliases: dict[str, str]
    folded_layers: list[str]
    files: dict[str, _File]
    graphs: dict[str, list[str]]


def written(description: Mapping[str, Any], key: str, aliases: Mapping[str, str], files: Mapping[str, Any]) -> str:
    """The manifest as text. `files`: `bytes` and `sha256` of each file next to it."""
    head = {"format": FORMAT, "version": VERSION, "sparsebit": __version__, "torch": str(torch.__version__), "key": key}
    manifest = {**head, **description, "aliases": aliases, "files": files}
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=2) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The manifest, checked."""
    try:
        manifest = json.loads(path.read_bytes())
        is_ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
        if is_ours and (version := manifest.get("version")) == VERSION:
            if manifest.pop("checksum", None) == _checksum(manifest):
                _Manifest.model_validate(manifest)
                return dict(manifest)
            fault = f"{path} {_damaged('it is not what was saved: its checksum differs')}"
        elif is_ours:
            fault = f"{path} has format version {version}; this sparsebit reads version {VERSION}; save the model again"
        else:
            fault = f"{path} is not a sparsebit checkpoint; {_WANTED}"
    except OSError as error:
        is_there = path.exists()
        fault = f"{path} cannot be read ({error.strerror})" if is_there else f"{path.parent} holds no {NAME}; {_WANTED}"
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}" for fault in error.errors()[:3]]
        fault = f"{path} {_damaged('; '.join(faults))}"
    except (ValueError, RecursionError) as error:
        fault = f"{path} {_damaged(str(error))}"
    raise CheckpointError(fault)


def _damaged(how: str) -> str:
    return f"is damaged ({how}); save the model again, or take the file from a copy"


def _checksum(manifest: Mapping[str, Any]) -> str:
    """A checksum of the values, not of the text: a manifest that a tool has indented differently is still valid."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
