"""Which functions and methods of torch may return (a view of) their first input, by torch's own schemas."""

from __future__ import annotations

from functools import cache

import torch

# What the schemas do not say: attributes, conversions to the type or form that a tensor has already, dropout in eval
# mode, views that autograd does not track, and Python's own operators.
_UNSAID = {
    "alpha_dropout", "as_tensor", "asarray", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "bool", "byte",
    "cdouble", "cfloat", "chalf", "char", "conj_physical", "copy", "data", "dequantize", "double", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "feature_dropout", "float", "getitem", "half",
    "attention_layout", "clear_padding", "int", "long", "pos", "rename", "resize", "resize_as", "short", "sum_to_size",
    "T", "H", "to_dense", "type", "type_as", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes",
}  # fmt: skip


def may_be_view(name: str) -> bool:
    """Whether the result of an op of that name may share memory with the op's first input."""
    return name in _UNSAID or name in _views()


def may_hold_view(attribute: str) -> bool:
    """Whether an attribute may share memory with what it is read from: a tensor's view, or the field of a container."""
    of_tensor = getattr(torch.Tensor, attribute, None)
    return may_be_view(attribute) or of_tensor is None or callable(of_tensor)


@cache
def _views() -> frozenset[str]:
    """The names of all ops with a result that the schema marks as an alias, and not as a write."""
    return frozenset(
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    )
