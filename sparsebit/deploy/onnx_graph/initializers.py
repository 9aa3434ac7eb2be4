"""Constants that a layout adds to a file: each is stored once, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


def stored_once(model: ir.Model, name: str, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
    """The initializer of this name, created from `array` if the file has none yet."""
    import onnx_ir as ir

    if name not in model.graph.initializers:
        tensor = ir.Tensor(array, dtype=dtype, name=name)
        shape = ir.Shape(list(array.shape))
        model.graph.register_initializer(
            ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
        )
    return model.graph.initializers[name]
