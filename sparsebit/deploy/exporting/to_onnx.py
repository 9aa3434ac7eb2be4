"""Converts a module, as it runs on one example, to an `onnx_ir.Model` in which each fake-quant is one node.

The node is `sparsebit::FakeQuantize(x, scale, zero_point)`, or `FakeFloat8(x, scale)`, with the site's name in `tag`;
`qdq` lowers it to standard ONNX. Inputs and outputs are flat and carry the user's names; every caller that feeds a file
must flatten its call in the same way (`flat_inputs`, `in_order`). The file holds the branches that the example takes;
a branch on an open size causes a warning (`branches_on_sizes`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import linecache
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.deploy.exporting.export_errors import export_fault, hides_interrupt, quiet
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes, apart, dynamic_shapes, named, rename_ports
from sparsebit.deploy.onnx_graph.packages import ir, onnx
from sparsebit.errors import DeploymentError, MissingExtraError, users_level
from sparsebit.graph.nodes.example import guard
from sparsebit.numerics import float8
from sparsebit.numerics.fake_quant.operator import OPERATOR

DOMAIN, OP_TYPE, FLOAT8_TYPE = "sparsebit", "FakeQuantize", "FakeFloat8"
NO_AXIS = -(1 << 20)  # ONNX attributes have no None
_OPSET = 21


@dataclasses.dataclass(frozen=True)
class OnnxOptions:
    """Arguments of `torch.onnx.export`, under the same names. `opset_version`: None is the usual one."""

    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: DynamicAxes | None = None
    opset_version: int | None = None
    verbose: bool = False


def to_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: OnnxOptions | None = None,
    *,
    signature: inspect.Signature,
) -> ir.Model:
    """`module(*args, **kwargs)` as an ONNX model in memory.

    `signature`: names the inputs where the options do not. Tensors inside dicts, tuples and lists become inputs of
    their own (`batch.ids`, `pair.0`); all else in the call is fixed in the file.
    """
    options = options or OnnxOptions()
    for package in ("onnx", "onnxscript", "onnx_ir"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package.replace("_", "-"), "onnx", "exporting to ONNX")
    call = FlatCall(module, args, dict(kwargs))
    inputs = named(call.input_paths(signature), options.input_names, "input_names")
    with torch.no_grad():
        paths = [path or "output" for path, _ in call.outputs(call.tensors)]
        outputs = named(paths, options.output_names, "output_names")
    outputs = apart(inputs, outputs, len(options.output_names or ()))
    shapes = dynamic_shapes(inputs, call.tensors, options.dynamic_axes or {}, outputs)
    with contextlib.nullcontext() if options.verbose else quiet(), torch.no_grad(), branches_on_sizes() as branches:
        try:
            program: Any = torch.onnx.export(
                call,
                tuple(call.tensors),
                dynamo=True,
                optimize=True,
                opset_version=_OPSET if options.opset_version is None else options.opset_version,
                dynamic_shapes=(shapes,) if any(shapes) else None,
                custom_translation_table={OPERATOR: _translation(), float8.OPERATOR: _float8_translation()},
                verbose=options.verbose,
            )
        except Exception as error:
            if hides_interrupt(error):
                raise KeyboardInterrupt from error
            raise DeploymentError(export_fault(error, module, inputs)) from error
    for line in branches:
        warnings.warn(
            f"export_onnx: the model branches on a size that dynamic_axes leaves open, at {line}; the file takes the "
            "example's branch and is wrong for sizes that would take another: leave that dimension out of dynamic_axes",
            stacklevel=users_level(),
        )
    model: ir.Model = program.model
    rename_ports(model, inputs, outputs)
    return model


def input_names(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: inspect.Signature, given: Sequence[str] | None = None
) -> list[str]:
    """The names of the file's inputs, in the order of `flat_inputs`."""
    return named(FlatCall(nn.Identity(), args, dict(kwargs)).input_paths(signature), given, "input_names")


def in_order(kwargs: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Keywords in the order of forward's parameters, which is that of the file's inputs, for any order in a call."""
    places = {name: place for place, name in enumerate(signature.parameters)}
    return dict(sorted(kwargs.items(), key=lambda item: places.get(item[0], len(places))))


def flat_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call, in the order of the file's inputs."""
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]


def flat_outputs(output: Any) -> list[Tensor]:
    """The tensors of a model's output, in the order of the file's outputs."""
    return [leaf for _, leaf in _leaves(output, "") if isinstance(leaf, Tensor)]


class FlatCall(nn.Module):
    """The module with flat tensor inputs and outputs. The same tensor passed twice stays two inputs."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.places = [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        given: list[Tensor] = [self.leaves[index] for index in self.places]
        # torch.export treats one tensor object that is passed twice as one input.
        is_first = [all(tensor is not other for other in given[:index]) for index, tensor in enumerate(given)]
        self.tensors = [t if first else t.clone() for t, first in zip(given, is_first, strict=True)]
        self.paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
        for leaf in self.leaves:
            if not isinstance(leaf, Tensor) and any(isinstance(part, Tensor) for _, part in _leaves(leaf, "")):
                raise DeploymentError(
                    f"export_onnx: an argument of type {type(leaf).__name__} holds tensors, which the file would "
                    "fix; pass them in a dict, a tuple or a list, or register the class with torch.utils._pytree"
                )
        if not self.tensors:
            raise DeploymentError("export_onnx: the example call holds no tensor; a file needs at least one input")
        self.training = module.training

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return [leaf for _, leaf in self.outputs(tensors)]

    def outputs(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        leaves = list(self.leaves)
        for index, tensor in zip(self.places, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = [(path, leaf) for path, leaf in _leaves(self.module(*args, **kwargs), "") if isinstance(leaf, Tensor)]
        if not found:
            raise DeploymentError("export_onnx: the model's output holds no tensor")
        return found

    def input_paths(self, signature: inspect.Signature) -> list[str]:
        parameters = list(signature.parameters.values())
        variadic = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = []
        for index in self.places:
            (part, argument, *rest) = [_key(key) for key in self.paths[index]]
            if part == "0":
                number = int(argument)
                is_named = number < len(positional)
                argument = positional[number] if is_named else f"{variadic.name if variadic else 'input'}.{number}"
            names.append(".".join([argument, *rest]))
        return names


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves with readable paths; mappings of any kind (a transformers output too) and dataclasses are entered."""
    before, numbered = (f"{path}.", f"{path}.") if path else ("", "output.")
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        inner = [(f"{before}{key}", value[key]) for key in value.keys()]  # noqa: SIM118 (mapping-like things too)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = [(f"{before}{key}", getattr(value, key)) for key in value._fields]
    elif isinstance(value, (tuple, list)):
        inner = [(f"{numbered}{index}", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(f"{before}{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        leaves = pytree.tree_leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            yield path, value
        else:  # a class that the user registered
            yield from ((f"{numbered}{index}", leaf) for index, leaf in enumerate(leaves))
        return
    for place, item in inner:
        yield from _leaves(item, place)


def _key(entry: Any) -> str:
    return str(next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), entry))


def _node(op_type: str, parameters: Sequence[str], numbers: Sequence[str]) -> Any:
    """Our own operator `op_type(x, *parameters)`, with whole numbers and the site's tag as attributes."""
    import onnxscript

    schema = onnx.defs.OpSchema
    floats = [f"tensor({kind})" for kind in ("float", "double", "float16", "bfloat16")]
    definition = schema(
        *(op_type, DOMAIN, 1),
        inputs=[schema.FormalParameter("x", "T"), *(schema.FormalParameter(name, "S") for name in parameters)],
        outputs=[schema.FormalParameter("y", "T")],
        type_constraints=[("T", floats, ""), ("S", floats, "")],
        attributes=[
            *(schema.Attribute(name, schema.AttrType.INT, "") for name in numbers),
            schema.Attribute("tag", schema.AttrType.STRING, ""),
        ],
    )
    return onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), op_type, definition)


def _float8_translation() -> Any:
    node = _node(FLOAT8_TYPE, ["scale"], ["axis"])

    def translate(x: Any, scale: Any, axis: int | None, tag: str) -> Any:
        return node(x, scale, axis=NO_AXIS if axis is None else axis, tag=tag)

    return translate


def _translation() -> Any:
    node = _node(OP_TYPE, ["scale", "zero_point"], ["axis", "group_size", "qmin", "qmax"])

    def translate(x: Any, scale: Any, zero_point: Any, *settings: Any) -> Any:
        axis, group_size, qmin, qmax, _, tag = settings
        place = NO_AXIS if axis is None else axis
        return node(x, scale, zero_point, axis=place, group_size=group_size, qmin=qmin, qmax=qmax, tag=tag)

    return translate


# --- branches on dynamic sizes: a file holds the branch that the example takes, for every size


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep  # the whole package


@contextlib.contextmanager
def branches_on_sizes() -> Iterator[list[str]]:
    """Inside, during an export, collects the lines of the model's code that branch on a dynamic size.

    An `assert` is left out: if it fails, the model does not run either. Branches in torch's own code are left out too.
    """
    found: list[str] = []
    thread = threading.get_ident()
    # torch has no hook for the moment when code branches on a symbolic size, so this method is patched meanwhile.
    original: Any = torch.SymBool.__bool__

    def answer(question: torch.SymBool) -> bool:
        if threading.get_ident() == thread and _is_open(question):
            line = _asking_line(sys._getframe(1))
            if line is not None and line not in found and not line.split(": ", 1)[-1].startswith("assert"):
                found.append(line)
        return bool(original(question))

    torch.SymBool.__bool__ = answer  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.SymBool.__bool__ = original  # type: ignore[method-assign]


def _is_open(question: torch.SymBool) -> bool:
    """Whether it is true for some sizes and false for others."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(question) and not statically_known_true(torch.sym_not(question))


def _asking_line(frame: types.FrameType | None) -> str | None:
    """`file:line: code` of the model's own code that branches; None if torch's code does."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code is guard.__code__:  # checked when the model was captured
            return str(frame.f_locals["line"])
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"
