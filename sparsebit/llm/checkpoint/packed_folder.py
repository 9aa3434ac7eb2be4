"""Writes a packed model: a shard for each block, in the names and with the other tensors of the original folder.

`FinishedBlock` is the result of one block, in memory and (by `to_tensors`) in the folder of a run that can continue.
`write_packed_folder` puts all blocks together, one in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsebit.folders import write_text
from sparsebit.llm.checkpoint.compressed_tensors import layer_tensors, make_config
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.layers.float_kinds import FLOAT_KINDS
from sparsebit.llm.layers.float_weight import FloatWeight, Weight
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.architectures import Stages
from sparsebit.llm.models.file_checksums import CHECKSUMS
from sparsebit.llm.models.input_scaling import ScaledInput
from sparsebit.llm.models.model_folder import Shards
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.records import model_folders

_OTHER = "other:"


@dataclass(frozen=True)
class Measured:
    """Facts about a layer from its rounding, as in `PackedLayer`."""

    float_bytes: int
    error: float | None = None
    nearest_error: float | None = None


@dataclass(frozen=True)
class FinishedBlock:
    """The result for a block: its packed layers by name, and `others`, its other tensors that have changed.

    `tokens`: how many calibration tokens each expert layer has read. `scales`: how inputs were scaled. `stages`:
    groups of layers that read one input. `measured`: by the names of layers.
    """

    layers: Mapping[str, Weight]
    tokens: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, ScaledInput] = field(default_factory=dict)
    stages: Stages = ()
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors and facts of a file."""
        tensors: dict[str, Tensor] = {f"{_OTHER}{name}": value for name, value in self.others.items()}
        for name, packed in self.layers.items():
            tensors |= packed.to_tensors(name)
        facts = {
            "tokens": json.dumps(dict(self.tokens)),
            "stages": json.dumps(self.stages),
            "scales": json.dumps({name: asdict(scaled) for name, scaled in self.scales.items()}),
            "measured": json.dumps({name: asdict(found) for name, found in self.measured.items()}),
        }
        return tensors, facts

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> FinishedBlock:
        """The block that `to_tensors` wrote."""
        names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        layers: dict[str, Weight] = {name: PackedWeight.from_tensors(tensors, name) for name in names}
        for kind in FLOAT_KINDS:
            floats = [name.removesuffix(f".{kind}") for name in tensors if name.endswith(f".{kind}")]
            layers |= {name: FloatWeight.from_tensors(tensors, name) for name in floats}
        others = {name.removeprefix(_OTHER): value for name, value in tensors.items() if name.startswith(_OTHER)}
        scales = {name: ScaledInput(**record) for name, record in json.loads(facts["scales"]).items()}
        stages = tuple(map(tuple, json.loads(facts["stages"])))
        measured = {name: Measured(**found) for name, found in json.loads(facts.get("measured", "{}")).items()}
        return cls(layers, json.loads(facts["tokens"]), others, scales, stages, measured)


_RECORDS = (model_folders.FILE, model_folders.PERPLEXITY_FILE)  # they describe the source folder, not the new one
_NOT_COPIED = (
    *(CHECKSUMS, *_RECORDS),
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json"),
)
_TEMPLATES = "additional_chat_templates"  # where transformers keeps all but the usual one


def write_packed_folder(
    target: Path,
    skeleton: Skeleton,
    block_paths: Sequence[str],
    block_of: Callable[[int], FinishedBlock],
    formats: Mapping[str, LayerFormat],
    ignored: Sequence[str],
) -> None:
    """Write config, tokenizer and shards, one block in memory at a time; `formats`: of all layers by module name.

    The config says nothing of formats of inputs with calibrated scales: `write_input_scales` adds both.
    """
    target.mkdir(parents=True, exist_ok=True)
    copy_small_files(skeleton.folder.path, target)
    written = {name: _uncalibrated(layer) for name, layer in formats.items()}
    write_config(target, skeleton.folder.config | {"quantization_config": make_config(written, ignored)})
    replaced = {skeleton.names[f"{name}.weight"] for name in formats}
    owner = {
        file: number
        for name, file in skeleton.names.items()
        for number, path in enumerate(block_paths)
        if name.startswith(f"{path}.")
    }
    shards = Shards(target, len(block_paths) + 1)
    for number in range(-1, len(block_paths)):  # -1: what is in no block
        names = [name for name in skeleton.folder if owner.get(name, -1) == number and name not in replaced]
        tensors: dict[str, Tensor] = {name: skeleton.folder.tensor(name) for name in names}
        if number >= 0:
            tensors |= _made(skeleton, block_paths[number], block_of(number), formats)
        shards.write(tensors)
        skeleton.folder.close()
    shards.finish()


def write_config(target: Path, config: Mapping[str, Any]) -> None:
    write_text(target / "config.json", json.dumps(config, indent=2) + "\n")


def _uncalibrated(layer: LayerFormat) -> LayerFormat:
    return replace(layer, inputs=None) if layer.inputs is not None and layer.inputs.is_calibrated else layer


def _made(skeleton: Skeleton, path: str, block: FinishedBlock, formats: Mapping[str, LayerFormat]) -> dict[str, Tensor]:
    """The packed layers of a block, and its other tensors that have changed, by their names in the files."""
    others = {f"{path}.{name}": value for name, value in block.others.items()}
    tensors = {skeleton.names[name]: skeleton.in_files(name, value) for name, value in others.items()}
    for name, packed in block.layers.items():
        file_name = skeleton.names[f"{path}.{name}.weight"].removesuffix(".weight")
        tensors |= layer_tensors(file_name, packed, is_dense=formats[f"{path}.{name}"].is_dense)
    return tensors


def copy_small_files(source: Path, target: Path) -> None:
    """Copy every file without weights: tokenizer, generation config, chat templates, licence."""
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, target / _TEMPLATES, dirs_exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, target / path.name)
