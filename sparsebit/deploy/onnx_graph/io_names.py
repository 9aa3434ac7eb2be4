"""The user's names and dynamic axes of a file's inputs and outputs, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparsebit.errors import DeploymentError

if TYPE_CHECKING:
    import onnx_ir as ir

DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int]]


def named(paths: Sequence[str], given: Sequence[str] | None, key: str) -> list[str]:
    """The user's names for the first ones, then those of the call."""
    if isinstance(given, str):
        raise DeploymentError(f"export_onnx: {key}={given!r}: a list of names is needed, such as [{given!r}]")
    given = list(given or ())
    wrong = [name for name in given if not isinstance(name, str) or not name]
    if wrong:
        raise DeploymentError(f"export_onnx: {key} holds {wrong[0]!r}; a name is a text that is not empty")
    if len(given) > len(paths):
        raise DeploymentError(
            f"export_onnx: {len(given)} {key} ({', '.join(given)}) for {len(paths)} tensors: {', '.join(paths)}; "
            f"allowed: {len(paths)} or fewer, in that order"
        )
    names = [*given, *paths[len(given) :]]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DeploymentError(
            f"export_onnx: {key} must differ; more than one would be called {', '.join(repeated)}; in order they "
            f"rename {', '.join(paths)}"
        )
    return names


def apart(inputs: Sequence[str], outputs: Sequence[str], num_given: int) -> list[str]:
    """Names for the outputs that differ from the inputs', because ONNX has one namespace.

    An output that the model itself names like an input (`{"x": …}`) becomes `output.x`; the first `num_given` names,
    which the user chose, are not changed.
    """
    both = [name for name in outputs[:num_given] if name in inputs]
    if both:
        raise DeploymentError(
            f"export_onnx: {', '.join(both)} is an input and an output; choose other input_names or output_names"
        )
    taken = {*inputs, *outputs}
    names = list(outputs)
    for index, name in enumerate(outputs):
        while names[index] in inputs or (names[index] != name and names[index] in taken):
            names[index] = f"output.{names[index]}"
    return names


def dynamic_shapes(
    inputs: Sequence[str], tensors: Sequence[Tensor], axes: DynamicAxes, outputs: Sequence[str]
) -> tuple[dict[int, str], ...]:
    """One {axis: name} per input. Axes of outputs follow from those of the inputs."""
    unknown = [name for name in axes if name not in inputs and name not in outputs]
    if unknown:
        raise DeploymentError(
            f"export_onnx: dynamic_axes names {', '.join(map(str, unknown))}; the inputs are {', '.join(inputs)}"
        )
    return tuple(_free_axes(name, tensor, axes.get(name, {})) for name, tensor in zip(inputs, tensors, strict=True))


def _free_axes(name: str, tensor: Tensor, wanted: Any) -> dict[int, str]:
    labels = dict(wanted) if isinstance(wanted, Mapping) else {axis: f"{name}_{axis}" for axis in wanted}
    for axis in labels:
        if not isinstance(axis, int) or not -tensor.ndim <= axis < tensor.ndim:
            raise DeploymentError(
                f"export_onnx: dynamic_axes[{name!r}] has axis {axis!r}, and {name} has shape {tuple(tensor.shape)}"
            )
    return {axis % tensor.ndim: str(label) for axis, label in labels.items()}


def rename_ports(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename the graph's inputs and outputs; an inner value with one of these names is renamed first."""
    ports = [*model.graph.inputs, *model.graph.outputs]
    names = [*inputs, *outputs]
    inside = [value for node in model.graph for value in node.outputs] + list(model.graph.initializers.values())
    taken = {value.name for value in inside} | set(names)
    for value in inside:
        if value.name in names and all(value is not port for port in ports):
            value.name = _free(str(value.name), taken)
    for value in ports:  # first out of each other's way: names may be swapped
        value.name = _free(str(value.name), taken)
    for value, name in zip(ports, names, strict=True):
        value.name = name


def _free(name: str, taken: set[str | None]) -> str:
    while name in taken:
        name = f"{name}_"
    taken.add(name)
    return name
