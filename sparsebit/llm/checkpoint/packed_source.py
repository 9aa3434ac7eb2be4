"""`PackedSource`: the packed layers of a model folder, independent of the format of its files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint import auto_round, awq, compressed_tensors, gptq
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_folder import copy_small_files, write_config
from sparsebit.llm.layers.float_weight import Weight
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.models.architectures import is_linear
from sparsebit.llm.models.file_checksums import write_checksums
from sparsebit.llm.models.model_folder import Shards
from sparsebit.llm.models.separate_experts import routers
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.progress import track


@dataclass(frozen=True)
class PackedSource:
    """`formats`: of each packed layer by module name. `suffixes`: endings after a layer's name in the files."""

    skeleton: Skeleton
    formats: Mapping[str, LayerFormat]
    suffixes: Callable[[LayerFormat], tuple[str, ...]]
    reader: Callable[[Mapping[str, Tensor], str, LayerFormat], Weight]

    def file_name(self, layer: str) -> str:
        """The name of the layer in the files."""
        first = self.suffixes(self.formats[layer])[0]
        if f"{layer}.{first}" not in self.skeleton.names:
            path = self.skeleton.folder.path
            raise CheckpointError(f"{path} has no {first} of layer {layer}, which its config names")
        return self.skeleton.names[f"{layer}.{first}"].removesuffix(f".{first}")

    def keys(self, layer: str) -> list[str]:
        """The names in the files of the layer's packed tensors."""
        name = self.file_name(layer)
        suffixes = self.suffixes(self.formats[layer])
        return [f"{name}.{suffix}" for suffix in suffixes if f"{name}.{suffix}" in self.skeleton.folder]

    def read(self, layer: str) -> Weight:
        tensors = {key: self.skeleton.folder.tensor(key) for key in self.keys(layer)}
        return self.reader(tensors, self.file_name(layer), self.formats[layer])

    def input_rounding(self, layer: str) -> InputRounding | None:
        """How the inputs of the layer are rounded, if the config of the folder says so."""
        if self.formats[layer].inputs is None:
            return None
        tensors = {key: self.skeleton.folder.tensor(key) for key in self.keys(layer)}
        return compressed_tensors.input_rounding(tensors, self.file_name(layer), self.formats[layer])

    def need_float_inputs(self) -> None:
        """Raise for layers that round their inputs, which a folder of packed weights alone would not do."""
        found = next((name for name, layer in self.formats.items() if layer.inputs is not None), None)
        if found is not None:
            raise DeploymentError(
                f"{self.skeleton.folder.path}: {found} rounds its inputs ({self.formats[found].inputs}); files of "
                "weights alone would compute something else: load, eval and generate run this folder as it is"
            )

    @torch.no_grad()
    def rewrite(
        self,
        target: Path,
        config: Mapping[str, Any],
        layer_tensors: Callable[[str], Mapping[str, Tensor]],
        changed: Callable[[str, Tensor], Tensor] = lambda key, value: value,
        what: str = "writing files",
        dropped: Collection[str] = (),
    ) -> None:
        """A model folder with the shards of this one: a layer is in the file where its codes were.

        `layer_tensors(layer)`: the new tensors of a packed layer. `changed(key, value)`: the new value of others.
        `dropped`: tensors that the new folder does not have.
        """
        self.need_float_inputs()
        folder = self.skeleton.folder
        target.mkdir(parents=True)
        copy_small_files(folder.path, target)
        write_config(target, config)
        packed_keys = {*dropped, *(key for layer in self.formats for key in self.keys(layer))}
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


def float_layers(skeleton: Skeleton, packed: Mapping[str, Any]) -> list[str]:
    """The linear layers that are not packed, and the routers of experts, which are layers in vLLM."""
    return [*(name for name in _linear_names(skeleton) if name not in packed), *routers(skeleton)]


def _linear_names(skeleton: Skeleton) -> list[str]:
    return [name for name, part in skeleton.model.named_modules() if is_linear(part)]


def packed_source(skeleton: Skeleton) -> PackedSource:
    """The packed layers of the skeleton's folder, without any if it holds a float model."""
    config: Any = skeleton.folder.config.get("quantization_config")
    names = _linear_names(skeleton)
    try:
        method = "compressed-tensors" if config is None else config.get("quant_method")
        if method == "compressed-tensors":
            formats = {} if config is None else compressed_tensors.read_config(config, names)
            return PackedSource(skeleton, formats, compressed_tensors.suffixes, compressed_tensors.read_layer)
        packed = [name for name in names if f"{name}.qweight" in skeleton.names]
        if method == "gptq":
            formats, version = gptq.read_config(config, packed)
            read = functools.partial(gptq.read_layer, version=version)
            return PackedSource(skeleton, formats, lambda _: gptq.SUFFIXES, read)
        if method == "awq":
            return PackedSource(skeleton, awq.read_config(config, packed), lambda _: awq.SUFFIXES, awq.read_layer)
        if method in auto_round.METHODS:
            formats, suffixes, reader = auto_round.read_config(config, packed)
            return PackedSource(skeleton, formats, lambda _: suffixes, reader)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"the quantization_config in its config.json is not understood ({error!r})"
        raise CheckpointError(f"{skeleton.folder.path}: {problem}") from error
    raise CheckpointError(f"quantization {method!r}: allowed: compressed-tensors, gptq, awq, auto-round")
