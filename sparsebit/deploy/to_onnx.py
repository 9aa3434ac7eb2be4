"""torch -> ONNX: a module, as it runs on one example, as an `onnx_ir.Model` in which each fake-quant is one node.

The node is `sparsebit::FakeQuantize(x, scale, zero_point)` with the site's name in `tag`; `qdq` lowers it to standard
ONNX. Inputs and outputs are flat and carry the user's names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.numerics.operator import OPERATOR

if TYPE_CHECKING:
    import onnx_ir as ir

DOMAIN, OP_TYPE = "sparsebit", "FakeQuantize"
NO_AXIS = -(1 << 20)  # ONNX attributes have no None
DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int]]


def to_onnx(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    signature: inspect.Signature,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: DynamicAxes | None = None,
    opset_version: int = 21,
    verbose: bool = False,
) -> ir.Model:
    """`module(*args, **kwargs)` as an ONNX model in memory.

    `signature`: names the inputs where the user does not. Tensors inside dicts, tuples and lists become inputs of
    their own (`batch.ids`, `pair.0`); all else in the call is fixed in the file. `verbose`: let torch tell its steps.
    """
    _require("onnx", "onnxscript", "onnx_ir")
    call = _Call(module, args, dict(kwargs))
    inputs = _named(call.input_paths(signature), input_names, "input_names")
    with torch.no_grad():
        outputs = _named(call.output_paths(), output_names, "output_names")
    shapes = _dynamic_shapes(inputs, call.tensors, dynamic_axes or {}, output_names or ())
    with contextlib.nullcontext() if verbose else _quiet(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                call,
                tuple(call.tensors),
                dynamo=True,
                optimize=True,
                opset_version=opset_version,
                dynamic_shapes=(shapes,) if any(shapes) else None,
                custom_translation_table={OPERATOR: _translation()},
                verbose=verbose,
            )
        except Exception as error:
            raise DeploymentError(_export_fault(error)) from error
    model: ir.Model = program.model
    _rename(model, inputs, outputs)
    return model


def input_names(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: inspect.Signature, given: Sequence[str] | None = None
) -> list[str]:
    """What the file's inputs are called, in the order of `flat_inputs`."""
    return _named(_Call(nn.Identity(), args, dict(kwargs)).input_paths(signature), given, "input_names")


def flat_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call, in the order of the file's inputs."""
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]


def flat_outputs(output: Any) -> list[Tensor]:
    """The tensors of a model's output, in the order of the file's outputs."""
    return [leaf for _, leaf in _leaves(output, "") if isinstance(leaf, Tensor)]


class _Call(nn.Module):
    """The module with a flat face: tensors in, tensors out. Inputs that are the same tensor twice stay two."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.places = [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors = [self.leaves[index] for index in self.places]
        self.paths = [path for path, _ in pytree.tree_flatten_with_path((args, kwargs))[0]]
        if not self.tensors:
            raise DeploymentError("export_onnx: the example call holds no tensor; a file needs at least one input")
        self.train(module.training)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return [leaf for _, leaf in self._outputs(tensors)]

    def output_paths(self) -> list[str]:
        """Names for the outputs; runs the model on the example."""
        return [path or "output" for path, _ in self._outputs(self.tensors)]

    def _outputs(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
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
    """Leaves with readable paths; mappings of any kind (a transformers output too) are entered."""
    if isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__")):
        for key in value.keys():  # noqa: SIM118 (not every mapping-like thing iterates over its keys)
            yield from _leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for key in value._fields:
            yield from _leaves(getattr(value, key), f"{path}.{key}" if path else key)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}" if path else f"output.{index}")
    else:
        leaves = pytree.tree_leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            yield path, value
        else:  # a registered class of the user's
            yield from ((f"{path}.{index}" if path else f"output.{index}", leaf) for index, leaf in enumerate(leaves))


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _named(paths: Sequence[str], given: Sequence[str] | None, key: str) -> list[str]:
    """The user's names for the first ones, then those of the call."""
    given = list(given or ())
    if len(given) > len(paths):
        raise DeploymentError(
            f"export_onnx: {len(given)} {key} ({', '.join(given)}) for {len(paths)} tensors: {', '.join(paths)}"
        )
    names = [*given, *paths[len(given) :]]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DeploymentError(f"export_onnx: {key} must differ; given more than once: {', '.join(repeated)}")
    return names


def _dynamic_shapes(
    names: Sequence[str], tensors: Sequence[Tensor], axes: DynamicAxes, output_names: Sequence[str]
) -> tuple[dict[int, Any], ...]:
    """One {axis: name} per input. Axes of outputs follow from those of the inputs."""
    unknown = [name for name in axes if name not in names and name not in output_names]
    if unknown:
        raise DeploymentError(
            f"export_onnx: dynamic_axes names {', '.join(unknown)}; the inputs are {', '.join(names)}"
        )
    shapes: list[dict[int, Any]] = []
    for name, tensor in zip(names, tensors, strict=True):
        wanted = axes.get(name, {})
        named = dict(wanted) if isinstance(wanted, Mapping) else {axis: f"{name}_{axis}" for axis in wanted}
        shape: dict[int, Any] = {}
        for axis, label in named.items():
            if not -tensor.ndim <= axis < tensor.ndim:
                raise DeploymentError(
                    f"export_onnx: dynamic_axes[{name!r}] has axis {axis}, and {name} has shape {tuple(tensor.shape)}"
                )
            shape[axis % tensor.ndim] = str(label)
        shapes.append(shape)
    return tuple(shapes)


def _translation() -> Any:
    import onnx
    import onnxscript

    schema = onnx.defs.OpSchema
    floats = [f"tensor({kind})" for kind in ("float", "double", "float16", "bfloat16")]
    definition = schema(
        OP_TYPE,
        DOMAIN,
        1,
        inputs=[schema.FormalParameter("x", "T")]
        + [schema.FormalParameter(name, "S") for name in ("scale", "zero_point")],
        outputs=[schema.FormalParameter("y", "T")],
        type_constraints=[("T", floats, ""), ("S", floats, "")],
        attributes=[schema.Attribute(name, schema.AttrType.INT, "") for name in ("axis", "group_size", "qmin", "qmax")]
        + [schema.Attribute("tag", schema.AttrType.STRING, "")],
    )
    node = onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), OP_TYPE, definition)

    def translate(
        x: Any,
        scale: Any,
        zero_point: Any,
        axis: int | None,
        group_size: int,
        qmin: int,
        qmax: int,
        gradient: str,
        tag: str,
    ) -> Any:
        place = NO_AXIS if axis is None else axis
        return node(x, scale, zero_point, axis=place, group_size=group_size, qmin=qmin, qmax=qmax, tag=tag)

    return translate


def _rename(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    taken = {value.name for node in model.graph for value in node.outputs} | set(model.graph.initializers)
    wanted = [*zip(model.graph.inputs, inputs, strict=True), *zip(model.graph.outputs, outputs, strict=True)]
    clashes = taken & {name for _, name in wanted}
    for node in model.graph:
        for value in node.outputs:
            if value.name in clashes and all(value is not output for output in model.graph.outputs):
                value.name = f"{value.name}_"
    for value, name in wanted:
        value.name = name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells its steps on stdout and in warnings of torch's own; faults still raise."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _export_fault(error: Exception) -> str:
    """The innermost cause in a few lines: torch's own message is pages long."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    text = "\n".join(lines[:6])
    if "ConversionError" in type(error).__name__ or "DispatchError" in type(cause).__name__:
        return f"export_onnx: an op has no ONNX form: {text}\nkeep its module out of the file, or write it in other ops"
    if "torch.export" in str(error):
        return (
            f"export_onnx: torch.export cannot follow the model: {text}\n"
            "a dimension that the code compares or bakes in cannot be dynamic; data-dependent branches need torch.cond"
        )
    return f"export_onnx: {type(cause).__name__}: {text}"


def _require(*packages: str) -> None:
    missing = next((package for package in packages if importlib.util.find_spec(package) is None), None)
    if missing is not None:
        raise MissingExtraError(missing.replace("_", "-"), "onnx", "exporting to ONNX")
