"""`FusionSite`: the surroundings of one layer in a QDQ graph: how its operands are quantized, what reads its output.

Runtimes fuse a layer with the DequantizeLinear nodes before it and the QuantizeLinear after it, across an activation
that they absorb. The rows of `audit.fusion_reasons` are predicates on a `FusionSite`. "Behind" means the next nodes
after ops that only move elements.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sparsebit.deploy.onnx_graph.qdq_graph import FLOAT_KEY, MOVES, OFF_KEY, QUANTIZE, Graph, Quantization
from sparsebit.deploy.runtimes import PROFILES, RuntimeProfile

ABSORBED = frozenset({"Relu", "Clip"})

# The layers that take most of a model's time, by op, with the name for messages. `LIGHT` ops cost only memory traffic.
HEAVY = {
    "Conv": "convolution",
    "ConvTranspose": "transposed convolution",
    "Gemm": "linear layer",
    "MatMul": "matrix product",
    "Einsum": "einsum",
    "LSTM": "LSTM",
    "GRU": "GRU",
    "RNN": "RNN",
    "Attention": "attention",
}
_PRODUCTS = ("QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits")
INTEGER_HEAVY = {
    **dict.fromkeys(("QLinearConv", "ConvInteger"), "convolution"),
    **dict.fromkeys(_PRODUCTS, "matrix product"),
    "QGemm": "linear layer",
    "QAttention": "attention",
    "DynamicQuantizeLSTM": "LSTM",
}
LIGHT = frozenset(
    {"Add", "Sum", "Mul", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean",
     "Resize"}
)  # fmt: skip
_FLOATS = frozenset({"", "float", "float16", "bfloat16", "double"})


def is_layer(graph: Graph, node: Any) -> bool:
    """Whether the audit reports on this node: not on biases, arithmetic on shapes and ops that only move elements."""
    if node.op_type in HEAVY or node.op_type in INTEGER_HEAVY or node.op_type.startswith("QLinear"):
        return True
    if node.op_type not in LIGHT or graph.type_of(node.output[0]) not in _FLOATS:
        return False
    # A constant operand that is stored in float is a bias or a factor, part of the preceding layer.
    return node.op_type not in ("Add", "Mul") or not any(graph.is_weight(name) for name in node.input if name)


def kind(op: str) -> str:
    """`convolution`, `linear layer`, …; for a light op, its own name."""
    return HEAVY.get(op) or INTEGER_HEAVY.get(op) or op.removeprefix("QLinear")


def is_heavy(op: str) -> bool:
    return op in HEAVY or op in INTEGER_HEAVY


class FusionSite:
    """One float layer and its surroundings. `data` and `weight` are None if that operand is not quantized."""

    def __init__(self, graph: Graph, node: Any) -> None:
        self.graph, self.node = graph, node
        self.op: str = node.op_type
        self.heavy = is_heavy(self.op)

    @cached_property
    def operands(self) -> list[str]:
        """The operands: data and weight of a heavy layer, all data of a light one."""
        names = [name for name in self.node.input if name]
        if self.heavy:
            return names[:2]
        return names if self.op in ("Add", "Sum", "Mul", "Concat") else names[:1]

    @cached_property
    def quantizations(self) -> list[Quantization | None]:
        return [self.graph.dequantized(name) for name in self.operands]

    @property
    def data(self) -> Quantization | None:
        return self.quantizations[0] if self.quantizations else None

    @property
    def weight(self) -> Quantization | None:
        return self.quantizations[1] if self.heavy and len(self.quantizations) > 1 else None

    @property
    def has_weight(self) -> bool:
        """Whether the second operand is constant (an attention product has none)."""
        return self.heavy and len(self.operands) > 1 and self.graph.is_weight(self.operands[1])

    @property
    def has_float_weight(self) -> bool:
        """Whether the file stores the layer's weight in float."""
        return self.has_weight and self.weight is None

    @cached_property
    def bias_add(self) -> Any:
        """The Add of a constant directly after a MatMul, which ONNX Runtime joins to it; None if there is none."""
        behind = self.readers
        if self.op == "MatMul" and len(behind) == 1 and behind[0].op_type == "Add":
            return behind[0] if any(self.graph.is_weight(name) for name in behind[0].input) else None
        return None

    @property
    def has_float_bias(self) -> bool:
        if self.bias_add is not None:
            return all(self.graph.dequantized(name) is None for name in self.bias_add.input)
        return self._bias != "" and self.graph.dequantized(self._bias) is None

    @property
    def has_computed_bias(self) -> bool:
        """Whether the bias of a Conv or Gemm is computed at run time."""
        return self._bias != "" and not self.graph.is_weight(self._bias)

    @property
    def _bias(self) -> str:
        """The bias input of a Conv or Gemm; empty without one."""
        return str([*self.node.input[2:3], ""][0]) if self.op in ("Conv", "Gemm") else ""

    @property
    def switched_off(self) -> str:
        """The config key that keeps the layer in float, from the export's metadata; else empty."""
        return next((item.value for item in self.node.metadata_props if item.key == OFF_KEY), "")

    @property
    def is_meant_float(self) -> bool:
        """Whether the export marked the layer to be computed in float."""
        return any(item.key in (OFF_KEY, FLOAT_KEY) for item in self.node.metadata_props)

    @property
    def profile(self) -> RuntimeProfile | None:
        """The profile of the runtime that the file was exported for; None for `virtual` and files of other tools."""
        found = PROFILES.get(self.graph.backend)
        return found if found is not None and found.inputs is not None else None

    @cached_property
    def readers(self) -> list[Any]:
        """The nodes that read the output, through ops that only move elements."""
        return list(self.graph.behind(self.node.output[0]))

    @cached_property
    def activation(self) -> Any:
        """The Relu or Clip that is the only reader; None if there is none."""
        only = self.readers[0] if len(self.readers) == 1 else None
        return only if only is not None and only.op_type in ABSORBED else None

    @cached_property
    def end(self) -> str:
        """The value after the activation that may be absorbed, which is the one to be quantized."""
        return str((self.activation or self.node).output[0])

    @cached_property
    def quantizers(self) -> list[Quantization]:
        """The Q nodes that read the end."""
        return [self.graph.quantization(node) for node in self.graph.behind(self.end) if node.op_type == QUANTIZE]

    @cached_property
    def float_readers(self) -> list[Any]:
        """The nodes that read the end in float."""
        return [node for node in self.graph.behind(self.end) if node.op_type != QUANTIZE and node.op_type not in MOVES]

    @property
    def is_model_output(self) -> bool:
        return self.graph.reaches_output(self.node.output[0]) or self.graph.reaches_output(self.end)


def label(node: Any) -> str:
    """A node's name, or that of its first output."""
    return str(node.name or node.output[0])
