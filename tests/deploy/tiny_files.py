"""Tiny ONNX files for the tests of the audit: `Tiny` writes Q/DQ around nodes as an exporter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Tiny:
    """A graph under construction. Every method gives the name of the value that it adds."""

    def __init__(self, shape: tuple[int | str, ...] = (1, 8, 8, 8), *, opset: int = 21) -> None:
        self.rng = np.random.default_rng(0)
        self.backend = ""
        self.opset = opset
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]

    def constant(self, name: str, value: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def quantized(
        self, value: str, zero_point: int = 128, dtype: Any = np.uint8, scale: Any = 0.03, **attributes: Any
    ) -> str:
        """QuantizeLinear and DequantizeLinear behind `value`."""
        number = len(self.nodes)
        scale = np.asarray(scale, np.float32)
        parameters = [
            self.constant(f"{value}_scale{number}", scale),
            self.constant(f"{value}_zero{number}", np.full(scale.shape, zero_point, dtype)),
        ]
        q = self.node("QuantizeLinear", [value, *parameters], f"{value}/q{number}", **attributes)
        return self.node("DequantizeLinear", [q, *parameters], f"{value}/dq{number}", **attributes)

    def weight(
        self, name: str, shape: tuple[int, ...], *, axis: int | None = 0, zero_point: int = 0, dtype: Any = np.int8
    ) -> str:
        """A stored integer weight and its DequantizeLinear; `axis=None`: one scale for the tensor."""
        low = 0 if np.dtype(dtype).kind == "u" else -128
        values = self.rng.integers(low + 1, low + 256, shape).astype(dtype)
        scale = np.float32(0.002) if axis is None else np.full(shape[axis], 0.002, np.float32)
        inputs = [
            self.constant(name, values),
            self.constant(f"{name}_scale", scale),
            self.constant(f"{name}_zero", np.full(np.shape(scale), zero_point, dtype)),
        ]
        return self.node("DequantizeLinear", inputs, f"{name}/dq", **({} if axis is None else {"axis": axis}))

    def float_weight(self, name: str, shape: tuple[int, ...]) -> str:
        return self.constant(name, self.rng.normal(0, 0.1, shape).astype(np.float32))

    def bias(self, name: str, size: int, scale: float = 0.03 * 0.002) -> str:
        """An int32 bias with its DequantizeLinear; `scale` is the input's times the weight's."""
        inputs = [
            self.constant(name, self.rng.integers(-2000, 2000, size).astype(np.int32)),
            self.constant(f"{name}_scale", np.full(size, scale, np.float32)),
            self.constant(f"{name}_zero", np.zeros(size, np.int32)),
        ]
        return self.node("DequantizeLinear", inputs, f"{name}/dq", axis=0)

    def conv(self, x: str, name: str = "conv", channels: int = 8, kernel: int = 3, **weight: Any) -> str:
        """A Conv with an int8 weight and an int32 bias, `channels` in and out; `x` should be dequantized."""
        w = self.weight(f"{name}_w", (channels, channels, kernel, kernel), **weight)
        inputs = [x, w, self.bias(f"{name}_b", channels)]
        return self.node("Conv", inputs, name, pads=[kernel // 2] * 4, kernel_shape=[kernel, kernel])

    def model(self, *outputs: str) -> Any:
        values = [helper.make_empty_tensor_value_info(output) for output in outputs]
        graph = helper.make_graph(self.nodes, "tiny", self.inputs, values, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        if self.backend:
            helper.set_model_props(model, {"sparsebit.backend": self.backend})
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)

    def save(self, file: Path, *outputs: str) -> Path:
        onnx.save(self.model(*outputs), file)
        return file
