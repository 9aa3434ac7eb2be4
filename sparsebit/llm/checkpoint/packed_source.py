"""`PackedSource`: the packed layers of a model folder, independent of the format of its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError
from sparsebit.folders import write_text
from sparsebit.llm.checkpoint import compressed_tensors, gptq
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import copy_small_files
from sparsebit.llm.layers.float_weight import Weight
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.llm.models.file_checksums import write_checksums
from sparsebit.llm.models.linear_layers import is_linear
from sparsebit.llm.models.separate_experts import routers
from sparsebit.llm.models.shards import Shards
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.progress import track

_Found = TypeVar("_Found")
_Reader = Callable[[Mapping[str, Tensor], str, LayerFormat], Weight]


@dataclass(frozen=True)
class PackedSource:
    """`formats`: of each packed layer by module name. `suffixes`: endings after a layer's name in the files."""

    skeleton: Skeleton
    formats: Mapping[str, LayerFormat]
    suffixes: Callable[[LayerFormat], tuple[str, ...]]
    reader: _Reader

    def file_name(self, layer: str) -> str:
        """The name of the layer in the files."""
        first = self.suffixes(self.formats[layer])[0]
        if f"{layer}.{first}" not in self.skeleton.names:
            raise CheckpointError(
                f"{self.skeleton.folder.path} has no {first} of layer {layer}, which its config names"
            )
        return self.skeleton.names[f"{layer}.{first}"].removesuffix(f".{first}")

    def keys(self, layer: str) -> list[str]:
        """The names in the files of the layer's packed tensors."""
        name = self.file_name(layer)
        suffixes = self.suffixes(self.formats[layer])
        return [f"{name}.{suffix}" for suffix in suffixes if f"{name}.{suffix}" in self.skeleton.folder]

    def read(self, layer: str) -> Weight:
        tensors = {key: self.skeleton.folder.tensor(key) for key in self.keys(layer)}
        return self.reader(tensors, self.file_name(layer), self.formats[layer])

    def float_layers(self) -> list[str]:
        """The linear layers that are not packed, and the routers of experts, which are layers in vLLM."""
        linear_names = (name for name, part in self.skeleton.model.named_modules() if is_linear(part))
        return [*(name for name in linear_names if name not in self.formats), *routers(self.skeleton)]

    @torch.no_grad()
    def rewrite(
        self,
        target: Path,
        config: Mapping[str, Any],
        layer_tensors: Callable[[str], Mapping[str, Tensor]],
        changed: Callable[[str, Tensor], Tensor] = lambda key, value: value,
        what: str = "writing files",
    ) -> None:
        """A model folder with the shards of this one: a layer is in the file where its codes were.

        `layer_tensors(layer)`: the new tensors of a packed layer. `changed(key, value)`: the new value of another
        tensor.
        """
        folder = self.skeleton.folder
        target.mkdir(parents=True)
        copy_small_files(folder.path, target)
        write_text(target / "config.json", json.dumps(config, indent=2) + "\n")
        packed_keys = {key for layer in self.formats for key in self.keys(layer)}
        layers_of: dict[Path, list[str]] = {}
        for layer in self.formats:
            layers_of.setdefault(folder.files[self.keys(layer)[0]], []).append(layer)
        files = list(dict.fromkeys(folder.files.values()))
        shards = Shards(target, len(files))
        for file in track(files, what):
            kept = [key for key, path in folder.files.items() if path == file and key not in packed_keys]
            tensors = {key: changed(key, folder.tensor(key)) for key in kept}
            for layer in layers_of.get(file, ()):
                tensors |= layer_tensors(layer)
            shards.write(tensors)
            folder.close()
        shards.finish()
        write_checksums(target)


def unpacked_source(skeleton: Skeleton) -> PackedSource:
    """A float model as a source without packed layers."""
    return PackedSource(skeleton, {}, compressed_tensors.suffixes, compressed_tensors.read_layer)


def packed_source(skeleton: Skeleton) -> PackedSource | None:
    """The packed layers of the skeleton's folder; None if it holds a float model."""
    config = skeleton.folder.config.get("quantization_config")
    if config is None:
        return None
    names = [name for name, part in skeleton.model.named_modules() if is_linear(part)]
    method = config.get("quant_method")
    if method == "compressed-tensors":
        formats = _parsed(lambda: compressed_tensors.read_config(config, names), skeleton)
        return PackedSource(skeleton, formats, compressed_tensors.suffixes, compressed_tensors.read_layer)
    if method == "gptq":
        packed = [name for name in names if f"{name}.qweight" in skeleton.names]
        formats, version = _parsed(lambda: gptq.read_config(config, packed), skeleton)

        def read(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat) -> PackedWeight:
            return gptq.read_layer(tensors, name, layer, version)

        return PackedSource(skeleton, formats, lambda _: gptq.SUFFIXES, read)
    raise CheckpointError(f"quantization {method!r}: allowed: compressed-tensors, gptq")


def _parsed(read: Callable[[], _Found], skeleton: Skeleton) -> _Found:
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{skeleton.folder.path}: the quantization_config in its config.json is not understood ({error!r})"
        ) from error
