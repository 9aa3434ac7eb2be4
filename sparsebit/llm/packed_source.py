"""`PackedSource`: the packed layers of a model folder, whichever format its files have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.llm.checkpoint import compressed_tensors, gptq
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.float_weight import Weight
from sparsebit.llm.packed_weight import PackedWeight
from sparsebit.llm.skeleton import Skeleton

_Found = TypeVar("_Found")
_Reader = Callable[[Mapping[str, Tensor], str, LayerFormat], Weight]


@dataclass(frozen=True)
class PackedSource:
    """`formats`: of each packed layer by module name. `suffixes`: what follows a layer's name in files."""

    skeleton: Skeleton
    formats: Mapping[str, LayerFormat]
    suffixes: Callable[[LayerFormat], tuple[str, ...]]
    reader: _Reader

    def file_name(self, layer: str) -> str:
        """What the files call the layer."""
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


def unpacked_source(skeleton: Skeleton) -> PackedSource:
    """A float model as a source without packed layers."""
    return PackedSource(skeleton, {}, compressed_tensors.suffixes, compressed_tensors.read_layer)


def packed_source(skeleton: Skeleton) -> PackedSource | None:
    """The packed layers of the skeleton's folder; None if it holds a float model."""
    config = skeleton.folder.config.get("quantization_config")
    if config is None:
        return None
    names = [name for name, part in skeleton.model.named_modules() if type(part) is nn.Linear]
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
