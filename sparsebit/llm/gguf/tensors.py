"""`GgufTensor`: a tensor of a GGUF file, and how its bytes are made from the model's files.

In `llama` files the rows of q and k are in another order, since llama.cpp rotates neighbouring pairs; blocks are within
rows, so whole rows of blocks are moved. Vectors become float32; matrices that are not rounded keep their type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import DeploymentError
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_source import PackedSource
from sparsebit.llm.gguf.blocks import (
    BLOCK,
    BYTES,
    block_type,
    blocks_of,
    rounded_blocks,
    values_of,
    why_not,
)
from sparsebit.llm.gguf.mixes import KType, Mix, fitting
from sparsebit.llm.layers.float_weight import Weight, integers

_EXPERT = re.compile(r"(\.experts)\.\d+\.(\w+)$")
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class GgufTensor:
    """`kind`: its type in the file. `shape`: in elements of `numpy_type`. `read()`: returns the data.

    `parameters`: its name in the model; the names of all experts, if it contains theirs. `order`: of its rows.
    `is_rounded`: its values are not those of the model.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: tuple[str, ...]
    order: Tensor | None
    is_rounded: bool
    data: Callable[[], Tensor]

    @property
    def numpy_type(self) -> Any:
        import numpy

        return {"F32": numpy.float32, "F16": numpy.float16}.get(self.kind, numpy.uint8)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * {"F32": 4, "F16": 2}.get(self.kind, 1)

    def read(self) -> Tensor:
        found = self.data()
        return found if self.order is None else found[self.order]


def gguf_tensors(
    source: PackedSource,
    name_of: Callable[[str], str | None],
    architecture: str,
    rotates_pairs: bool,
    mix: Mix | None,
    norm_offset: float = 0.0,
) -> list[GgufTensor]:
    """All tensors of the model. `name_of(module)`: its name in files of `architecture`.

    `norm_offset`: is added to the weights of norms.
    """
    skeleton = source.skeleton
    folder, config = skeleton.folder, skeleton.model.config
    num_blocks, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    key_heads = int(config.num_key_value_heads or heads)

    def known_name(module: str, key: str) -> str:
        """`key`: its name in the files, if that is another one."""
        stem = key.removesuffix(".weight").removesuffix(".bias")
        found = next(filter(None, (name_of(_EXPERT.sub(r"\1.\2", name)) for name in (module, stem))), None)
        if found is None:
            raise DeploymentError(f"tensor {key} has no name in GGUF files of {architecture}")
        return found

    def order(module: str, count: int) -> Tensor | None:
        if not rotates_pairs or not module.endswith(("q_proj", "k_proj")):
            return None
        return _pairs(count, heads if module.endswith("q_proj") else key_heads)

    shapes = folder.shapes()
    model_names = {file: model for model, file in reversed(list(skeleton.names.items()))}
    floats: list[tuple[str, str, str]] = []
    for key in _float_keys(source, model_names):
        module, _, suffix = model_names[key].rpartition(".")
        floats.append((key, module, f"{known_name(module, key)}.{suffix}"))
    is_tied = all(name != "output.weight" for _, _, name in floats)
    found: list[GgufTensor] = []
    for key, module, name in floats:
        wanted = None
        if mix is not None and len(shapes[key]) == 2:
            wanted = mix.type_of(name, num_blocks, is_tied=is_tied)
        place = _Place(name, shapes[key], model_names[key], order(module, shapes[key][0]))
        if wanted is None:
            offset = norm_offset if module.endswith("norm") else 0.0
            found.append(place.floats(partial(_shifted, folder.tensor, key, offset), folder.tensor(key).dtype))
        else:
            found.append(place.rounded(partial(folder.tensor, key), wanted))
    for layer, number_format in source.formats.items():
        shape = tuple(skeleton.model.get_submodule(layer).weight.shape)
        name = f"{known_name(layer, source.file_name(layer))}.weight"
        place = _Place(name, shape, f"{layer}.weight", order(layer, shape[0]))
        wanted = None if mix is None else mix.type_of(name, num_blocks, is_tied=is_tied)
        if wanted is None or (fitting(wanted, shape[1]) != wanted and _holds_codes(number_format, shape[1])):
            kind = block_type(number_format.bits, number_format.symmetric)
            found.append(place.blocks(partial(_exact, source.read, layer), kind, is_rounded=False))
        else:
            found.append(place.rounded(partial(source.read, layer), wanted))
    return with_stacked_experts(found)


def _float_keys(source: PackedSource, model_names: Mapping[str, str]) -> list[str]:
    """The tensors of the files that the model has and that are not packed: old files hold rotary frequencies too."""
    packed = {key for layer in source.formats for key in source.keys(layer)}
    known = source.skeleton.model.state_dict()
    return [key for key in source.skeleton.folder if key not in packed and model_names.get(key) in known]


def constant_tensor(name: str, value: Tensor) -> GgufTensor:
    """A float32 tensor that is not a parameter of the model."""
    return GgufTensor(name, "F32", tuple(value.shape), (), None, False, value.clone)


def with_stacked_experts(tensors: list[GgufTensor]) -> list[GgufTensor]:
    """Tensors of one name, those of the experts of a block, become one: `(experts, rows, columns)`."""
    by_name: dict[str, list[GgufTensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    return [group[0] if len(group) == 1 else _stacked(group) for group in by_name.values()]


def _stacked(experts: list[GgufTensor]) -> GgufTensor:
    experts = sorted(experts, key=lambda expert: [int(part) for part in re.findall(r"\d+", expert.parameters[0])])
    first = experts[0]
    kinds = sorted({expert.kind for expert in experts})
    if len(kinds) > 1:
        raise DeploymentError(
            f"tensor {first.name} holds all experts in one type, and they need {', '.join(kinds)}: quantize them to "
            "the same bits"
        )
    return GgufTensor(
        first.name,
        first.kind,
        (len(experts), *first.shape),
        tuple(name for expert in experts for name in expert.parameters),
        None,
        any(expert.is_rounded for expert in experts),
        lambda: torch.stack([expert.read() for expert in experts]),
    )


@torch.no_grad()
def rounded_values(path: Path, tensors: list[GgufTensor]) -> dict[str, Tensor]:
    """The values of rounded tensors in the file, decoded here, by their names in the model."""
    wanted = [tensor for tensor in tensors if tensor.is_rounded]
    return _values(path, wanted, lambda kind, data: values_of(kind.name, torch.from_numpy(data.copy())))


@torch.no_grad()
def all_values(path: Path, tensors: list[GgufTensor]) -> dict[str, Tensor]:
    """The values of all parameters as the package gguf decodes the file, by their names in the model."""
    import gguf

    def decode(kind: Any, data: Any) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(data, kind).copy())

    return _values(path, [tensor for tensor in tensors if tensor.parameters], decode)


def _values(path: Path, tensors: list[GgufTensor], decode: Callable[[Any, Any], Tensor]) -> dict[str, Tensor]:
    """`decode(type, data)`: returns the values of a matrix or a vector."""
    import gguf

    wanted = {tensor.name: tensor for tensor in tensors}
    found: dict[str, Tensor] = {}
    for stored in gguf.GGUFReader(path).tensors:
        tensor = wanted.get(stored.name)
        if tensor is None:
            continue
        for parameter, data in zip(
            tensor.parameters, stored.data if stored.data.ndim == 3 else [stored.data], strict=True
        ):
            values = decode(stored.tensor_type, data)
            if tensor.order is not None:
                values = torch.empty_like(values).index_copy_(0, tensor.order, values)
            found[parameter] = values
    return found


@dataclass(frozen=True)
class _Place:
    """The place of a tensor: its name in the file, its shape and name in the model, and the order of its rows."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    order: Tensor | None

    def floats(self, read: Callable[[], Tensor], stored: torch.dtype) -> GgufTensor:
        """Vectors as float32, matrices in the type of the model's files."""
        dtype = torch.float32 if len(self.shape) == 1 or stored not in _FLOATS else stored

        def data() -> Tensor:
            value = read().to(dtype).contiguous()
            return value.view(torch.uint8) if dtype == torch.bfloat16 else value

        # numpy has no bfloat16: bytes.
        shape = (*self.shape[:-1], 2 * self.shape[-1]) if dtype == torch.bfloat16 else self.shape
        return GgufTensor(self.name, _FLOATS[dtype], shape, (self.parameter,), self.order, False, data)

    def rounded(self, read: Callable[[], Weight | Tensor], wanted: KType) -> GgufTensor:
        """Rounded to the type, or to one with smaller blocks where its blocks do not fill the rows."""
        kind = fitting(wanted, self.shape[1])
        return self.blocks(lambda: rounded_blocks(read(), kind), kind, is_rounded=True)

    def blocks(self, data: Callable[[], Tensor], kind: str, *, is_rounded: bool) -> GgufTensor:
        columns, (weights, size) = self.shape[1], BYTES[kind]
        if columns % weights:
            raise DeploymentError(f"tensor {self.name} has {columns} columns: GGUF blocks need a multiple of {BLOCK}")
        shape = (self.shape[0], columns // weights * size)
        return GgufTensor(self.name, kind, shape, (self.parameter,), self.order, is_rounded, data)


def _exact(read: Callable[[str], Weight], layer: str) -> Tensor:
    packed = integers(read(layer))
    reason = why_not(packed)
    if reason is not None:
        raise DeploymentError(f"layer {layer}: {reason}")
    return blocks_of(packed)


def _shifted(read: Callable[[str], Tensor], key: str, offset: float) -> Tensor:
    return read(key).float() + offset if offset else read(key)


def _holds_codes(layer: LayerFormat, columns: int) -> bool:
    """Whether blocks of 32 can hold the codes without rounding; scales are checked when they are read."""
    size = layer.group_size or columns
    return layer.kind == "int" and size % BLOCK == 0 and (layer.bits <= 4 or layer.symmetric)


def _pairs(count: int, heads: int) -> Tensor:
    """The rows of a head's halves, alternating: llama.cpp rotates neighbours, transformers the halves."""
    return torch.arange(count).view(heads, 2, -1).transpose(1, 2).flatten()
