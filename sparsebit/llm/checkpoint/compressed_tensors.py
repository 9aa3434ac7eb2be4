"""The formats of compressed-tensors, which transformers and vLLM read: two for whole numbers, and three for floats.

A packed layer `NAME` has `NAME.weight_packed (out, words)`, `NAME.weight_scale (out, groups)`, `NAME.weight_shape`, and
if it is not symmetric `NAME.weight_zero_point`, packed along the outputs, `(words, groups)`. A float layer has
`NAME.weight` (fp8) or `NAME.weight_packed` (two 4-bit numbers in a byte), `NAME.weight_scale`, and for nvfp4
`NAME.weight_global_scale`, by which the scales are divided. A layer whose inputs are rounded to int8 has its codes in
`NAME.weight`, one in a byte; constant scales of inputs are `NAME.input_scale`, or `NAME.input_global_scale` for nvfp4.
The config's `quantization_config` says which layers have which number format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import CheckpointError, DeploymentError
from sparsebit.llm.checkpoint.layer_format import LayerFormat, WeightKind, layer_parts
from sparsebit.llm.layers.float_kinds import GROUPS, FloatKind
from sparsebit.llm.layers.float_weight import FloatWeight, Weight
from sparsebit.llm.layers.input_kinds import SCHEMES, InputFormat
from sparsebit.llm.layers.input_rounding import InputRounding
from sparsebit.llm.layers.packed_weight import PackedWeight
from sparsebit.numerics.packing import WORD, num_words, pack, unpack

_SUFFIXES: dict[WeightKind, tuple[str, ...]] = {
    "int": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    "fp8": ("weight", "weight_scale"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
}
_DENSE = ("weight", "weight_scale", "weight_zero_point")
_INPUTS = ("input_scale", "input_zero_point")
_GLOBAL = ("input_global_scale",)
FORMATS: dict[WeightKind, str] = {"int": "pack-quantized", "fp8": "float-quantized"}
FORMATS |= {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
# The types of the scales, as compressed-tensors names them; without them it takes a group of 32 for other 4-bit floats.
_FLOATS: dict[FloatKind, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "strategy": "channel", "observer": "minmax"},
    "mxfp4": {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "nvfp4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
}
_DENSE_FORMATS = ("int-quantized", "naive-quantized")
_EXPERTS = re.compile(r"\.experts\.\d+\.")
_EXPERTS_TARGET = r"re:.*\.experts\.\d+\..*"


def suffixes(layer: LayerFormat) -> tuple[str, ...]:
    """The suffixes of a layer's tensors in the files; the first is always there."""
    given = () if layer.inputs is None else _GLOBAL if layer.inputs.kind == "nvfp4" else _INPUTS
    return (*(_DENSE if layer.is_dense else _SUFFIXES[layer.kind]), *given)


def layer_tensors(name: str, packed: Weight, *, is_dense: bool = False) -> dict[str, Tensor]:
    """The tensors of a file for the layer that the file calls `name`; `is_dense`: one code in a byte."""
    if isinstance(packed, FloatWeight):
        values = (packed.qweight, packed.scales, *(() if packed.divisor is None else (packed.divisor,)))
        return {f"{name}.{suffix}": value for suffix, value in zip(_SUFFIXES[packed.kind], values, strict=True)}
    if is_dense:
        codes = (packed.codes().to(torch.int16) - (1 << packed.bits - 1)).to(torch.int8)
        return {f"{name}.weight": codes, f"{name}.weight_scale": packed.scales}
    tensors = {
        f"{name}.weight_packed": packed.qweight,
        f"{name}.weight_scale": packed.scales,
        f"{name}.weight_shape": torch.tensor([packed.out_features, packed.in_features]),
    }
    if packed.zeros is not None:
        tensors[f"{name}.weight_zero_point"] = pack(packed.zeros.mT, packed.bits).mT.contiguous()
    return tensors


def read_layer(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat) -> Weight:
    """The inverse of `layer_tensors`; the number format is that of the config."""
    if layer.kind == "fp8":  # one scale for each row, or one for all
        values, scale = layer_parts(tensors, name, _SUFFIXES["fp8"])
        return FloatWeight("fp8", values, scale.reshape(-1, 1).expand(len(values), 1).contiguous())
    if layer.kind != "int":
        return FloatWeight(layer.kind, *layer_parts(tensors, name, _SUFFIXES[layer.kind]))
    if layer.is_dense:
        return _dense_layer(tensors, name, layer)
    words, scales, shape, *_ = layer_parts(tensors, name, _SUFFIXES["int"][: 3 if layer.symmetric else 4])
    out_features, in_features = shape.tolist()
    # compressed-tensors before 0.18 packed 3 bits so that no code reaches into the next word.
    has_gaps = num_words(in_features, layer.bits) != words.shape[-1] == -(-in_features // (WORD // layer.bits))

    def dense(words: Tensor, num_codes: int) -> Tensor:
        return _without_gaps(words, layer.bits, num_codes) if has_gaps else words

    problem = zeros = None
    stored, size = tensors.get(f"{name}.weight_zero_point"), layer.group_size or in_features
    if stored is not None and stored.dtype == torch.int32:
        zeros = unpack(dense(stored.mT.contiguous(), out_features), layer.bits, out_features).mT.contiguous()
    if layer.symmetric and stored is not None:
        if bool(stored.any() if zeros is None else (zeros != 1 << layer.bits - 1).any()):
            problem = "zero points, and its config says that it is symmetric"
        zeros = None
    elif not layer.symmetric and zeros is None:
        problem = "zero points that are not packed: only packed ones are read"
    order = tensors.get(f"{name}.weight_g_idx")
    if order is not None and not bool(((order < 0) | (order == torch.arange(in_features) // size)).all()):
        problem = "columns in groups by activation (weight_g_idx), not side by side: only static groups are read"
    if problem is not None:
        raise CheckpointError(f"layer {name} has {problem}")
    return PackedWeight(dense(words, in_features), scales, zeros, layer.bits, size, in_features)


def _dense_layer(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat) -> PackedWeight:
    """A weight whose codes, from `-2^(bits - 1)` on, are in a tensor of int8; its scales: of groups, rows or all."""
    codes, scales = layer_parts(tensors, name, _DENSE[:2])
    first, zeros = 1 << layer.bits - 1, tensors.get(f"{name}.weight_zero_point")
    if codes.dtype != torch.int8 or not -first <= int(codes.min()) <= int(codes.max()) < first:
        raise CheckpointError(f"layer {name} has codes of {codes.dtype} that are not int8 of {layer.bits} bits")
    if layer.symmetric and zeros is not None and bool(zeros.any()):
        raise CheckpointError(f"layer {name} has zero points, and its config says that it is symmetric")
    if not layer.symmetric and zeros is None:
        raise CheckpointError(f"layer {name} has no weight_zero_point: the files and their config do not fit")
    shape = (len(codes), -1 if scales.numel() >= len(codes) else 1)
    scales = scales.reshape(shape) if scales.numel() >= len(codes) else scales.reshape(1, 1).expand(shape[0], 1)
    offsets = None
    if zeros is not None and not layer.symmetric:
        offsets = (zeros.reshape(-1, scales.shape[1]).expand(scales.shape).to(torch.int16) + first).contiguous()
    return PackedWeight.from_codes(codes.to(torch.int16) + first, scales.contiguous(), offsets, layer.bits)


def input_rounding(tensors: Mapping[str, Tensor], name: str, layer: LayerFormat) -> InputRounding | None:
    """How the inputs of a layer are rounded, if its config says so; `tensors`: those of the layer in the files."""
    if layer.inputs is None:
        return None
    if not layer.inputs.is_calibrated:
        return InputRounding(layer.inputs)
    scale = layer_parts(tensors, name, _GLOBAL if layer.inputs.kind == "nvfp4" else _INPUTS[:1])[0]
    zero = tensors.get(f"{name}.input_zero_point", torch.zeros(1))
    problem = None
    if scale.numel() != 1 or zero.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
        problem = f"a scale of inputs {scale.tolist()}: one finite number above 0 is read"
    elif layer.inputs.symmetric and bool(zero.any()):
        problem = "an input_zero_point, and its config says that it is symmetric"
    if problem is not None:
        raise CheckpointError(f"layer {name} has {problem}")
    return InputRounding(layer.inputs, float(scale), float(zero))


def _without_gaps(words: Tensor, bits: int, num_codes: int) -> Tensor:
    """The words as `pack` makes them."""
    places = bits * torch.arange(WORD // bits, dtype=torch.int32)
    codes = words[..., None] >> places & (1 << bits) - 1
    return pack(codes.flatten(-2)[..., :num_codes], bits)


def make_config(layers: Mapping[str, LayerFormat], ignored: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a model: the format of each layer by module name, and the layers that are float.

    One format for all layers is written for the class `Linear`, several for layers by name. Experts have one format in
    all blocks, in one pattern: transformers finds it by the word `experts`, and reads no zero points.
    """
    of_experts = {layer for name, layer in layers.items() if _EXPERTS.search(name)}
    if len(of_experts) > 1 or any(not layer.symmetric for layer in of_experts):
        given = ", ".join(map(str, of_experts))
        raise DeploymentError(f"experts of the formats {given}: transformers reads one symmetric format for all")
    formats = list(dict.fromkeys(layers.values()))
    groups: dict[str, Any] = {}
    for number, layer in enumerate(formats):
        names = [name for name, found in layers.items() if found == layer]
        targets = [f"re:^{re.escape(name)}$" for name in names if not _EXPERTS.search(name)]
        targets += [_EXPERTS_TARGET] if layer in of_experts else []
        groups[f"group_{number}"] = {"targets": ["Linear"] if len(formats) == 1 else targets, **_scheme(layer)}
    found = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": found.pop() if len(found) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        # transformers 5.23 reads packed zero points only if it unpacks weights while loading, and then assumes one
        # format for all of them: with several it would compute wrong logits. Earlier versions unpack at the first
        # forward in any case; vLLM ignores the key.
        **({"dequantize": True} if len(formats) == 1 and not formats[0].symmetric else {}),
    }


def _scheme(layer: LayerFormat) -> dict[str, Any]:
    """The settings of a group of the config, besides its targets."""
    if layer.kind == "int":
        strategy = "group" if layer.group_size else "channel"
        weights = {"num_bits": layer.bits, "type": "int", "symmetric": layer.symmetric, "strategy": strategy}
        weights |= {"group_size": layer.group_size or None, "dynamic": False, "observer": "minmax"}
    else:
        weights = {**_FLOATS[layer.kind], "type": "float", "symmetric": True, "dynamic": False}
        weights |= {} if layer.kind == "fp8" else {"zp_dtype": weights["scale_dtype"]}
    given = SCHEMES["fp8"] if layer.inputs is None and layer.kind == "fp8" else layer.inputs
    inputs, form = (
        None if given is None else input_scheme(given),
        _DENSE_FORMATS[0] if layer.is_dense else FORMATS[layer.kind],
    )
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": form}


def input_scheme(inputs: InputFormat) -> dict[str, Any]:
    """The entry of the config for the rounding of inputs."""
    kind = inputs.kind
    if kind == "nvfp4" or kind == "mxfp4":
        found = {**_FLOATS[kind], "type": "float", "symmetric": True, "zp_dtype": _FLOATS[kind]["scale_dtype"]}
        return found | ({"dynamic": "local", "observer": "static_minmax"} if kind == "nvfp4" else {"dynamic": True})
    found = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": inputs.symmetric}
    return found | {"strategy": "token" if inputs.dynamic else "tensor", "dynamic": inputs.dynamic}


def read_config(config: Mapping[str, Any], linear_names: Sequence[str]) -> dict[str, LayerFormat]:
    """The format of each quantized layer of a model whose linear layers have these names."""
    known, method, form = (*FORMATS.values(), *_DENSE_FORMATS), config.get("quant_method"), config.get("format")
    unread = {key: config[key] for key in ("transform_config", "sparsity_config") if config.get(key)}
    if method != "compressed-tensors" or form not in known or unread:
        raise CheckpointError(
            f"quantization {method!r} of format {form!r} with {unread or 'no transforms'}: allowed: compressed-tensors "
            f"of format {', '.join(known)}, without transforms and sparsity"
        )
    found: dict[str, LayerFormat] = {}
    for name in linear_names:
        if any(_specificity(target, name) in (0, 1) for target in config.get("ignore") or ()):
            continue
        matching = [
            (kind, target, group)
            for group in config["config_groups"].values()
            for target in group["targets"]
            if (kind := _specificity(target, name)) is not None
        ]
        if matching:
            group = min(matching, key=lambda entry: entry[:2])[2]
            found[name] = _layer_format(group, name, is_dense=(group.get("format") or form) in _DENSE_FORMATS)
    return found


def _layer_format(group: Mapping[str, Any], name: str, *, is_dense: bool = False) -> LayerFormat:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    strategy, kind = weights.get("strategy"), weights.get("type", "int")
    given = {key: weights.get(key) for key in ("num_bits", "strategy", "symmetric")}
    rounded = _input_format(inputs)
    for name_of, wanted in _FLOATS.items() if kind == "float" else ():
        is_grouped = GROUPS[name_of] in (0, weights.get("group_size"))
        is_same = given == {"num_bits": wanted["num_bits"], "strategy": wanted["strategy"], "symmetric": True}
        if name_of == "fp8":
            is_same = is_same or given == {"num_bits": 8, "strategy": "tensor", "symmetric": True}
            if is_same and rounded is not None and rounded.kind == "fp8":
                return LayerFormat(8, 0, True, "fp8", None if rounded.dynamic else rounded)
        elif is_same and is_grouped and (not inputs or (rounded is not None and rounded.kind == name_of)):
            return LayerFormat(wanted["num_bits"], GROUPS[name_of], True, name_of, rounded)
    is_known = strategy in ("group", "channel") or (strategy == "tensor" and is_dense)
    is_known = is_known and (rounded is None or rounded.kind in ("int8", "fp8"))
    if kind != "int" or not is_known or bool(inputs) != (rounded is not None) or group.get("output_activations"):
        raise CheckpointError(
            f"layer {name}: {kind} weights {weights} with activations {inputs or group.get('output_activations')}: "
            "allowed: int weights of strategy group or channel, mxfp4 and nvfp4, with float activations; int weights "
            "with activations of 8 bits, int or float, and fp8 weights with fp8 activations: with constant scales of "
            "strategy tensor, or dynamic ones of strategy token; mxfp4 and nvfp4 with activations of the same format"
        )
    size = int(weights["group_size"]) if strategy == "group" else 0
    return LayerFormat(
        int(weights["num_bits"]), size, bool(weights.get("symmetric", True)), inputs=rounded, is_dense=is_dense
    )


def _input_format(inputs: Mapping[str, Any]) -> InputFormat | None:
    """The rounding of inputs that an entry of the config describes; None for one that is not read, or for none."""
    for name in ("nvfp4", "mxfp4"):
        wanted = input_scheme(SCHEMES[name])
        if all(inputs.get(key) == wanted[key] for key in ("num_bits", "type", "strategy", "group_size", "dynamic")):
            return SCHEMES[name]
    scheme = inputs.get("strategy"), inputs.get("dynamic", False)
    is_symmetric, kind = bool(inputs.get("symmetric", True)), "fp8" if inputs.get("type", "int") == "float" else "int8"
    if inputs.get("num_bits") != 8 or scheme not in (("token", True), ("tensor", False)):
        return None
    if kind == "fp8":
        return InputFormat("fp8", scheme[1]) if is_symmetric else None
    return InputFormat("int8", scheme[1], is_symmetric)


def _specificity(target: str, name: str) -> int | None:
    """0: the layer's name; 1: a pattern that matches; 2: its class; None: not it. The smallest decides among groups."""
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), name) else None
    return 0 if target == name else 2 if target == "Linear" else None
