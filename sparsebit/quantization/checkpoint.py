"""A calibrated model as a folder: `model.safetensors` (every tensor) and `sparsebit.json` (config, capture, number formats).

The folder describes itself, holds no code and nothing pickled, and appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sparsebit.errors import CheckpointError
from sparsebit.quantization.quantizers.base import Quantizer

if TYPE_CHECKING:
    from sparsebit.quantization.quant_model import QuantModel

FORMAT = "sparsebit-quantized"
FORMAT_VERSION = 1
_TENSORS, _MANIFEST = "model.safetensors", "sparsebit.json"


def save(qmodel: QuantModel, folder: str | os.PathLike[str]) -> Path:
    """Write the folder; an older one under the same name is replaced file by file, each by an atomic rename."""
    from sparsebit import __version__

    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; save() writes a folder: give another name")
    path.mkdir(parents=True, exist_ok=True)
    tensors, aliases = _distinct(qmodel.state_dict())
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "sparsebit": __version__,
        "torch": str(torch.__version__),
        "config": qmodel.config.to_dict(),
        "call_form": qmodel.call_form,
        "switches": {"weight": qmodel.is_quantized("weight"), "feature": qmodel.is_quantized("feature")},
        "off": sorted(q.name for q in qmodel.quantizers() if q.was_unseen),
        "aliases": aliases,
        "sites": {q.name: _site(q) for q in qmodel.quantizers() if not q.fake_fused},
    }
    _atomically(path / _TENSORS, lambda temporary: save_file(tensors, temporary))
    _atomically(path / _MANIFEST, lambda temporary: Path(temporary).write_text(json.dumps(manifest, indent=2) + "\n"))
    return path


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The folder's description, checked."""
    path = Path(folder) / _MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {_MANIFEST}; give a folder that QuantModel.save() wrote")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is damaged ({error}); save the model again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a sparsebit checkpoint")
    if manifest.get("version") != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {manifest.get('version')}; this sparsebit reads version {FORMAT_VERSION}")
    return manifest


def load_into(qmodel: QuantModel, folder: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
    """Fill a freshly captured model from the folder and switch it as it was."""
    path = Path(folder) / _TENSORS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; save the model again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); save the model again") from None
    for name, other in manifest["aliases"].items():
        tensors[name] = tensors[other]
    for quantizer in qmodel.quantizers():
        if quantizer.name in manifest["off"]:
            quantizer.set_fake_fused()
            quantizer.was_unseen = True
    try:
        qmodel.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder} was saved from another model than the one given ({type(qmodel.model).__name__}):\n{error}"
        ) from None
    qmodel.set_quant(w_quant=manifest["switches"]["weight"], a_quant=manifest["switches"]["feature"])


def _site(quantizer: Quantizer) -> dict[str, Any]:
    spec = quantizer.spec
    return {
        "quantizer": quantizer.TYPE,
        "bits": spec.bits,
        "symmetric": spec.symmetric,
        "granularity": repr(spec.granularity),
        "observer": quantizer.observer_name,
        "calibrated": quantizer.is_calibrated,
    }


def _distinct(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that share memory (tied weights) once, the other names as aliases of the first."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor.detach().contiguous().clone()
    return tensors, aliases


def _atomically(path: Path, write: Any) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def fresh(model: nn.Module, manifest: dict[str, Any]) -> QuantModel:
    """The uncalibrated `QuantModel` that a manifest describes, around `model`."""
    from sparsebit.quantization.quant_config import parse_qconfig
    from sparsebit.quantization.quant_model import QuantModel

    return QuantModel(model, parse_qconfig(manifest["config"]), call_form=manifest["call_form"])
