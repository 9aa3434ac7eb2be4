"""`GgufTensor`: a tensor of a GGUF file, how its bytes are made from the model's files, and `Mix`: to which type.

In `llama` files the rows of q and k are in another order, since llama.cpp rotates neighbouring pairs; blocks are within
rows, so whole rows of blocks are moved. Vectors become float32; matrices that are not rounded keep their type. `Q4_K_M`
is llama.cpp's: more bits for the output layer, and for v (or q, k and v in one matrix) and down, whose errors cost
most, in half of the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebit.errors import ConfigError, DeploymentError
from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.checkpoint.packed_source import PackedSource
from sparsebit.llm.gguf.blocks import BLOCK, BYTES, block_type, blocks_of, rounded_blocks, values_of, why_not
from sparsebit.llm.gguf.k_quant_math import SUPER_BLOCK
from sparsebit.llm.layers.float_weight import Weight, integers

KType = Literal["Q4_K", "Q6_K"]
EXACT = "exact"
_SENSITIVE = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps")
_ROUTER = "ffn_gate_inp"  # selects the experts: a rounding error would select others
# llama.cpp's choice for rows that are not a whole number of blocks: types with blocks of 32.
SMALL_BLOCKS: dict[KType, Literal["Q5_0", "Q8_0"]] = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


@dataclass(frozen=True)
class Mix:
    """`file_type`: llama.cpp's name. `usual`: of the blocks' layers. None of the others: as in the model's files.

    `sensitive`: of v, of q, k and v in one matrix, and of down, in the first and last eighth of the blocks, and in
    every third between them.
    """

    file_type: str
    usual: KType
    sensitive: KType | None = None
    embedding: KType | None = None
    output: KType | None = None

    def type_of(self, name: str, num_blocks: int, *, is_tied: bool) -> KType | None:
        """The type of a matrix by its name in the file; None: not rounded. `is_tied`: the embedding is the output."""
        if name == "token_embd.weight":
            return self.output if is_tied else self.embedding
        if name == "output.weight":
            return self.output
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if found is None or found[2] == _ROUTER:
            return None
        block, eighth = int(found[1]), num_blocks // 8
        has_more_bits = block < eighth or block >= 7 * num_blocks // 8 or (block - eighth) % 3 == 2
        return self.sensitive if self.sensitive and found[2] in _SENSITIVE and has_more_bits else self.usual


MIXES = {
    "Q4_K": Mix("MOSTLY_Q4_K_S", "Q4_K"),
    "Q6_K": Mix("MOSTLY_Q6_K", "Q6_K"),
    "Q4_K_M": Mix("MOSTLY_Q4_K_M", "Q4_K", sensitive="Q6_K", embedding="Q4_K", output="Q6_K"),
}


def mix_of(gguf_type: str) -> Mix | None:
    """The mix by its name; None for types that hold the codes of a packed model without rounding."""
    if gguf_type != EXACT and gguf_type not in MIXES:
        raise ConfigError(f"gguf_type={gguf_type!r}: allowed: {EXACT}, {', '.join(MIXES)}")
    return MIXES.get(gguf_type)


def fitting(kind: KType, columns: int) -> str:
    """The type itself, or the one with small blocks if `columns` is not a multiple of 256."""
    return kind if columns % SUPER_BLOCK == 0 else SMALL_BLOCKS[kind]


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
    """All tensors of the model. `name_of(module)`: its name in files. `norm_offset`: is added to weights of norms."""
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

    def wanted(name: str, is_matrix: bool = True) -> KType | None:
        return mix.type_of(name, num_blocks, is_tied=is_tied) if mix is not None and is_matrix else None

    shapes, known = folder.shapes(), skeleton.model.state_dict()
    model_names = {file: model for model, file in reversed(list(skeleton.names.items()))}
    packed = {key for layer in source.formats for key in source.keys(layer)}
    floats: dict[str, str] = {}  # by key, without old files' rotary frequencies, which the model has not
    for key in [key for key in folder if key not in packed and model_names.get(key) in known]:
        module, _, suffix = model_names[key].rpartition(".")
        floats[key] = f"{known_name(module, key)}.{suffix}"
    is_tied = "output.weight" not in floats.values()
    found: list[GgufTensor] = []
    for key, name in floats.items():
        module = model_names[key].rpartition(".")[0]
        place = _Place(name, shapes[key], model_names[key], order(module, shapes[key][0]))
        kind = wanted(name, len(shapes[key]) == 2)
        if kind is None:
            offset = norm_offset if module.endswith("norm") else 0.0
            found.append(place.floats(partial(_shifted, folder.tensor, key, offset), folder.tensor(key).dtype))
        else:
            found.append(place.rounded(partial(folder.tensor, key), kind))
    for layer, number_format in source.formats.items():
        shape = tuple(skeleton.model.get_submodule(layer).weight.shape)
        name = f"{known_name(layer, source.file_name(layer))}.weight"
        place, kind = _Place(name, shape, f"{layer}.weight", order(layer, shape[0])), wanted(name)
        if kind is None or (fitting(kind, shape[1]) != kind and _holds_codes(number_format, shape[1])):
            exact = block_type(number_format.bits, number_format.symmetric)
            found.append(place.blocks(partial(_exact, source.read, layer), exact, is_rounded=False))
        else:
            found.append(place.rounded(partial(source.read, layer), kind))
    return with_stacked_experts(found)


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
            f"tensor {first.name} holds all experts in one type, and they need {', '.join(kinds)}: quantize them alike"
        )
    names = tuple(name for expert in experts for name in expert.parameters)
    is_rounded = any(expert.is_rounded for expert in experts)
    shape = (len(experts), *first.shape)
    return GgufTensor(
        first.name, first.kind, shape, names, None, is_rounded, lambda: torch.stack([one.read() for one in experts])
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
        if stored.name not in wanted:
            continue
        tensor, parts = wanted[stored.name], stored.data if stored.data.ndim == 3 else [stored.data]
        for parameter, data in zip(tensor.parameters, parts, strict=True):
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
