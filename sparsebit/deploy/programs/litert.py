"""A program as a `.tflite` file of LiteRT, with integers between the layers.

LiteRT's converter takes a weight as float -> quantize -> dequantize, and computes the integers itself: they are those
of the program, since its floats are on the grid. It is loaded by `litert-torch`, which needs jax.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.ao.quantization.fx import _decomposed  # noqa: F401 (the import defines the operators)
from torch.export import ExportedProgram

from sparsebit.deploy.exporting.export_errors import refused_as
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.programs.quiet_conversion import quiet_conversion
from sparsebit.deploy.programs.xnnpack_patterns import lay_out_for_xnnpack
from sparsebit.deploy.sessions.litert_session import Operator, operators, with_facts
from sparsebit.deploy.sessions.program_facts import ProgramFacts
from sparsebit.deploy.sessions.sealed_file import seal
from sparsebit.errors import DeploymentError
from sparsebit.records.audit import LayerRun

_OPS = torch.ops.quantized_decomposed
_QUANTIZE = {
    _OPS.dequantize_per_tensor.default: _OPS.quantize_per_tensor.default,
    _OPS.dequantize_per_channel.default: _OPS.quantize_per_channel.default,
}
_HEAVY = {
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D"), "convolution"),
    "TRANSPOSE_CONV": "transposed convolution",
    "FULLY_CONNECTED": "linear layer",
    "BATCH_MATMUL": "matrix product",
}
_LIGHT = frozenset({"ADD", "SUB", "MUL", "MEAN", "CONCATENATION", "MAX_POOL_2D", "AVERAGE_POOL_2D", "SOFTMAX"})
_CONVERSIONS = ("QUANTIZE", "DEQUANTIZE")
_PATH = re.compile(r"(?:^|/)(?:\w+\.)*[A-Za-z0-9]+_([\w.]+)")  # `/torch.nn.modules.conv.Conv2d_conv1`


def write_tflite(program: ExportedProgram, facts: ProgramFacts, path: Path) -> None:
    """Convert the program and write it; its facts are an entry of the file's metadata."""
    module: Any = program.module()
    _quantize_stored(module)
    _check_joins(module)
    args, _ = program.example_inputs or ((), {})
    with quiet_conversion() as read:
        import litert_torch
        from litert_torch.quantize.quant_config import QuantConfig

        # The converter asks the quantizer for one thing only: whether ranges are computed at run time.
        static = SimpleNamespace(global_config=SimpleNamespace(is_dynamic=False))
        with refused_as("litert-torch does not take the program", read):
            made = litert_torch.convert(module, tuple(args), quant_config=QuantConfig(pt2e_quantizer=static))
            with tempfile.TemporaryDirectory() as folder:
                plain = Path(folder) / "model.tflite"
                made.export(str(plain))
                data = plain.read_bytes()
        layers, leftovers = _layers(operators(data))
    path.write_bytes(with_facts(data, replace(facts, layers=layers, leftovers=leftovers)))
    seal(path)


def _quantize_stored(module: fx.GraphModule) -> None:
    """Stored integers -> their floats and a quantize op, in place."""
    for node in list(module.graph.nodes):
        quantize = _QUANTIZE.get(node.target)
        codes = node.args[0] if quantize is not None else None
        if quantize is None or not isinstance(codes, fx.Node) or codes.op != "get_attr":
            continue
        values = [_stored(module, arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        name = f"{codes.target}_float".replace(".", "_")
        module.register_buffer(name, node.target(*values))
        with module.graph.inserting_before(node):
            floats = module.graph.get_attr(name)
            node.replace_input_with(codes, module.graph.call_function(quantize, (floats, *node.args[1:])))
    module.graph.eliminate_dead_code()
    module.recompile()


def _check_joins(module: fx.GraphModule) -> None:
    """Raise for a concat of several grids: the converter reads all inputs on the grid of one, about 20 dB off."""
    for node in module.graph.nodes:
        if node.target is not torch.ops.aten.cat.default:
            continue
        joined = {one.args[1:] for one in node.args[0] if one.target is _OPS.dequantize_per_tensor.default}
        results = {user.args[1:] for user in node.users if user.target is _OPS.quantize_per_tensor.default}
        if joined and len(joined | results) > 1:
            raise DeploymentError(
                f"{node.name}: a concat of tensors with different scales, which litert-torch computes wrongly; keep "
                "the layers before it in float (SPECIFIC, QUANTIZER.DISABLE), or use BACKEND: executorch or onnxruntime"
            )


def _stored(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _layers(found: list[Operator]) -> tuple[tuple[LayerRun, ...], dict[str, int]]:
    """The layers of a file as LiteRT runs them, and its conversions between integers and floats."""
    layers = []
    for place, one in enumerate(found):
        if one.op not in _HEAVY and one.op not in _LIGHT:
            continue
        is_integer = one.is_integer
        by_weight = one.reads_integers and not is_integer
        layers.append(
            LayerRun(
                *(_layer_name(one.name) or f"{one.op.lower()}_{place}", one.op, _HEAVY.get(one.op, one.op.lower())),
                *(one.op in _HEAVY, "integer" if is_integer else "weight-only" if by_weight else "float", "LiteRT"),
                "" if is_integer or by_weight else "it is not quantized, or its result is not",
                shape=one.shape,
            )
        )
    left = Counter(one.op for one in found if one.op in _CONVERSIONS)
    return tuple(layers), dict(left)


def _layer_name(value: str) -> str:
    """`…/…QuantModel_qmodel/….Conv2d_conv1;1` -> `conv1`: the converter names values after the module's path."""
    _, _, inner = value.partition("QuantModel_")
    return ".".join(name for name in _PATH.findall(inner.partition(";")[0]) if name not in ("op", "qmodel"))


LITERT = ProgramTarget(
    "litert",
    ".tflite",
    write_tflite,
    modules=("litert_torch", "ai_edge_litert"),
    extra="litert",
    pairs_around_moves=True,
    lay_out=lay_out_for_xnnpack,
)
