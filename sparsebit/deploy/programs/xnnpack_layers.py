"""Which operators of a lowered program XNNPACK computes, in integers or in float, and why it leaves others."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from sparsebit.records.audit import Arithmetic, LayerRun

_RULES = "executorch.backends.xnnpack.partition.config"
_FILES = ("gemm_configs", "generic_node_configs", "xnnpack_config")
_HEAVY = {
    **dict.fromkeys(("convolution", "conv2d"), "convolution"),
    **dict.fromkeys(("linear", "addmm", "mm"), "linear layer"),
    **dict.fromkeys(("bmm", "matmul", "scaled_dot_product_attention"), "matrix product"),
}
_MOVES = frozenset(
    {
        *("view_copy", "permute_copy", "slice_copy", "select_copy", "squeeze_copy", "unsqueeze_copy", "expand_copy"),
        *("clone", "t_copy", "alias_copy", "split_with_sizes_copy", "unbind_copy", "as_strided_copy", "_to_copy"),
        *("_to_dim_order_copy", "_clone_dim_order", "lift_fresh_copy", "full", "scalar_tensor", "arange", "sym_size"),
    }
)
_NO_KERNEL = "XNNPACK has no kernel for {op}"


@contextlib.contextmanager
def refusals() -> Iterator[dict[str, str]]:
    """Inside, collects XNNPACK's reason for each node that its rules refuse, by the node's name."""
    found: dict[str, str] = {}

    class Kept(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            message: Any = record.msg
            if isinstance(node := getattr(message, "node", None), fx.Node):
                found.setdefault(node.name, message.reason)
            return False

    loggers = [
        logging.getLogger(f"{_RULES}.{name}") for name in ("gemm_configs", "generic_node_configs", "xnnpack_config")
    ]
    levels, kept, before = [logger.level for logger in loggers], Kept(), logging.root.manager.disable
    logging.disable(logging.NOTSET)
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.addFilter(kept)
    try:
        yield found
    finally:
        logging.disable(before)
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeFilter(kept)
            logger.setLevel(level)


def delegation(edge: ExportedProgram, refused: dict[str, str]) -> dict[str, Any]:
    """The fields of `ProgramFacts` that describe how the program is executed."""
    layers: list[LayerRun] = []
    leftovers: Counter[str] = Counter()
    inside = outside = 0
    for node in edge.graph.nodes:
        if node.op != "call_function":
            continue
        if _op(node) == "executorch_call_delegate":
            part = getattr(edge.graph_module, str(node.args[0].target)).original_module
            inside += sum(_counts(inner) for inner in part.graph.nodes)
            layers += _layers(part, None)
        elif _counts(node):
            outside += 1
            if _is_conversion(node):
                leftovers[_op(node)] += 1
    layers += _layers(edge, refused)
    return {
        "layers": tuple(layers),
        "leftovers": dict(leftovers),
        "num_inside": inside,
        "num_outside": outside,
    }


def _layers(part: ExportedProgram, refused: dict[str, str] | None) -> Iterator[LayerRun]:
    """`refused`: None for what XNNPACK executes."""
    for node in part.graph.nodes:
        op = _op(node)
        if not _counts(node) or op in _MOVES or _is_conversion(node):
            continue
        weight = _weight_of(node, part) if op in _HEAVY else None
        arithmetic, cause = _arithmetic(node, refused)
        name = node.name if weight is None else weight
        kernel = "XNNPACK" if refused is None else "ExecuTorch's portable kernels"
        shape = tuple(size if isinstance(size, int) else 0 for size in _sizes(node))
        yield LayerRun(
            name,
            op,
            _HEAVY.get(op, op),
            op in _HEAVY,
            arithmetic,
            kernel,
            cause,
            shape=shape,
            # The profile quantizes no product of two activations: XNNPACK has none in integers.
            on_purpose=_HEAVY.get(op) == "matrix product" and arithmetic == "float" and refused is None,
        )


def _arithmetic(node: fx.Node, refused: dict[str, str] | None) -> tuple[Arithmetic, str]:
    """In integers if all its numbers come from integers and its result becomes integers; otherwise the cause."""
    op = _op(node)
    if refused is not None:
        weight_only = op == "embedding_byte" or (op in _HEAVY and any(map(_is_dequantized, node.all_input_nodes)))
        cause = f"XNNPACK does not take it: {refused.get(node.name) or _NO_KERNEL.format(op=op)}"
        return "weight-only" if weight_only else "float", cause
    tensors = [source for source in node.all_input_nodes if not _is_constant(source)]
    reads = bool(tensors) and all(map(_is_dequantized, tensors))
    if op == "constant_pad_nd" and reads:
        return "integer", ""
    readers = list(node.users)
    while len(readers) == 1 and _op(readers[0]) in ("relu", "hardtanh", "clamp"):
        readers = list(readers[0].users)
    writes = bool(readers) and all("quantize_per" in _op(reader) and not _is_dequantized(reader) for reader in readers)
    if op in ("relu", "hardtanh", "clamp") and _op(node.all_input_nodes[0]) in (*_HEAVY, "add", "mul", "sub"):
        return _arithmetic(node.all_input_nodes[0], None)
    if reads and writes:
        return "integer", ""
    if op not in _HEAVY or _HEAVY[op] == "matrix product":
        return "float", "by design: XNNPACK computes it in float"
    return "float", "it is not quantized" if not reads else "its result is not quantized"


def _weight_of(node: fx.Node, part: ExportedProgram) -> str | None:
    """The layer's name in the model: that of its stored weight."""
    names = {**part.graph_signature.inputs_to_buffers, **part.graph_signature.inputs_to_parameters}
    for source in node.all_input_nodes[1:] if len(node.all_input_nodes) > 1 else ():
        while source.op == "call_function" and source.all_input_nodes:
            source = source.all_input_nodes[0]
        if source.name in names:
            return layer_of(names[source.name])
    return None


def layer_of(stored: str) -> str:
    """The name of the layer whose weight a program stores under this name."""
    for ending in (".weight_codes", "_weight_codes", ".weight", ".op.weight", "_weight"):
        stored = stored.removesuffix(ending)
    return stored


def _op(node: fx.Node) -> str:
    """`convolution` for `aten.convolution.default`."""
    name = str(getattr(node.target, "_name", None) or getattr(node.target, "__name__", node.target))
    name = name.rpartition("::")[2]
    return name.partition(".")[0]


def _counts(node: fx.Node) -> bool:
    return node.op == "call_function" and _op(node) not in ("getitem", "executorch_call_delegate")


def _is_conversion(node: fx.Node) -> bool:
    return "quantize_per" in _op(node)


def _is_dequantized(node: fx.Node) -> bool:
    """Also after a padding, which XNNPACK's compiler quantizes on the same grid."""
    if _op(node) == "constant_pad_nd":
        node = node.all_input_nodes[0]
    return _op(node).startswith("dequantize")


def _is_constant(node: fx.Node) -> bool:
    """Whether it depends on no input: a weight, its scales."""
    if node.op == "placeholder":
        return node.name.startswith(("b_", "p_", "c_")) or node.meta.get("val") is None
    return node.op == "get_attr" or (bool(node.all_input_nodes) and all(map(_is_constant, node.all_input_nodes)))


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, (tuple, list)) and value else value
    return tuple(getattr(value, "shape", ()))
