"""The user's names and dynamic axes of a file's inputs and outputs, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsebit.deploy.onnx_graph.packages import ir
from sparsebit.errors import DeploymentError

DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int]]


def named(paths: Sequence[str], given: Sequence[str] | None, key: str) -> list[str]:
    """The user's names for the first ones, then those of the call."""
    listed = [] if isinstance(given, str) else list(given or ())
    names = [*listed, *paths[len(listed) :]]
    are_texts = all(isinstance(name, str) and name for name in listed)
    if isinstance(given, str) or not are_texts or len(names) > len(paths) or len(set(names)) < len(names):
        raise DeploymentError(
            f"export_onnx: {key}={given!r}; allowed: a list of up to {len(paths)} names, not empty and all different, "
            f"also from those that stay; in order they rename {', '.join(paths)}"
        )
    return names


def apart(inputs: Sequence[str], outputs: Sequence[str], num_given: int) -> list[str]:
    """Names for the outputs that differ from the inputs', because ONNX has one namespace.

    An output that the model itself names like an input (`{"x": …}`) becomes `output.x`; the first `num_given` names,
    which the user chose, are not changed.
    """
    if both := [name for name in outputs[:num_given] if name in inputs]:
        shown = ", ".join(both)
        raise DeploymentError(
            f"export_onnx: {shown} is an input and an output; choose other input_names or output_names"
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
    if unknown := [str(name) for name in axes if name not in inputs and name not in outputs]:
        shown = ", ".join(unknown)
        raise DeploymentError(f"export_onnx: dynamic_axes names {shown}; the inputs are {', '.join(inputs)}")
    return tuple(_free_axes(name, tensor, axes.get(name, {})) for name, tensor in zip(inputs, tensors, strict=True))


def _free_axes(name: str, tensor: Tensor, wanted: Any) -> dict[int, str]:
    labels = dict(wanted) if isinstance(wanted, Mapping) else {axis: f"{name}_{axis}" for axis in wanted}
    if wrong := [axis for axis in labels if not isinstance(axis, int) or not -tensor.ndim <= axis < tensor.ndim]:
        shape = tuple(tensor.shape)
        raise DeploymentError(
            f"export_onnx: dynamic_axes[{name!r}] has axis {wrong[0]!r}, and {name} has shape {shape}"
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
    for value in ports:  # first to names that are free: the user may swap two names
        value.name = _free(str(value.name), taken)
    for value, name in zip(ports, names, strict=True):
        value.name = name


def _free(name: str, taken: set[str | None]) -> str:
    while name in taken:
        name = f"{name}_"
    taken.add(name)
    return name
