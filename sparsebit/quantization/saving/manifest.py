"""`sparsebit.json`, the manifest of a saved model: how it is written, and how it is checked on reading.

It holds a checksum of itself and of the file of tensors. `graphs` holds the structure of the captured graphs, which is
compared when the folder is loaded.
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
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "sparsebit": __version__,
        "torch": str(torch.__version__),
        "key": key,
        **description,
        "aliases": aliases,
        "files": files,
    }
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=2) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The manifest, checked."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        if path.exists():
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
        raise CheckpointError(f"{path.parent} holds no {NAME}; give a folder that QuantModel.save() wrote") from None
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a sparsebit checkpoint; give a folder that QuantModel.save() wrote")
    version = manifest.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this sparsebit reads version {VERSION}; save the model again"
        )
    if manifest.pop("checksum", None) != _checksum(manifest):
        raise _damaged(path, "it is not what was saved: its checksum differs")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].lower()}" for fault in error.errors()[:3]]
        raise _damaged(path, "; ".join(faults)) from None
    return manifest


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({how}); save the model again, or take the file from a copy")


def _checksum(manifest: Mapping[str, Any]) -> str:
    """A checksum of the values, not of the text: a manifest that a tool has indented differently is still valid."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
