"""`flat_program`: a simulated model as a program whose inputs and outputs are flat lists of tensors with names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from sparsebit.deploy.exporting.to_onnx import FlatCall
from sparsebit.deploy.onnx_graph.io_names import DynamicAxes, apart, dynamic_shapes, named
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.programs.site_outputs import SiteGrid
from sparsebit.deploy.programs.to_program import to_program
from sparsebit.deploy.sessions.program_facts import Port, ProgramFacts


class FlatProgram(NamedTuple):
    """A program and the names, types and shapes of its inputs and outputs."""

    program: ExportedProgram
    facts: ProgramFacts


def flat_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    signature: inspect.Signature,
    target: ProgramTarget,
    axes: DynamicAxes | None = None,
    sites: dict[str, SiteGrid] | None = None,
) -> FlatProgram:
    """`module(*args, **kwargs)` for a target. `axes`: the open sizes of its inputs, as for an ONNX file.

    `sites`: as in `to_program`; their outputs have the names of the sites.
    """
    call = FlatCall(module, args, dict(kwargs))
    inputs = named(call.input_paths(signature), None, "input_names")
    with torch.no_grad():
        found = call.outputs(call.tensors)
    outputs = apart(inputs, named([path or "output" for path, _ in found], None, "output_names"), 0)
    shapes = dynamic_shapes(inputs, call.tensors, axes or {}, outputs)
    labels = {label for axes_of in shapes for label in axes_of.values()}
    sizes = {label: Dim(f"size{place}", max=target.largest_size) for place, label in enumerate(sorted(labels))}
    flat = _Flat(call)
    open_sizes = {
        name: {axis: sizes[label] for axis, label in one.items()} or None
        for name, one in zip(flat.names, shapes, strict=True)
    }
    how: dict[str, Any] = {"pairs_around_moves": target.pairs_around_moves, "lay_out": target.lay_out, "sites": sites}
    # Strides of the example (images as NHWC) would become those that the program takes.
    tensors = tuple(tensor.contiguous() for tensor in call.tensors)
    program = to_program(flat, tensors, {}, open_sizes if labels else None, **how)
    outputs = [*outputs, *(sites or {})]
    values = [node.meta["val"] for node in program.graph.find_nodes(op="output")[0].args[0]]
    users = set(program.graph_signature.user_inputs)
    given = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder") if node.name in users]
    return FlatProgram(
        program, ProgramFacts(target.name, tuple(map(_port, inputs, given)), tuple(map(_port, outputs, values)))
    )


def _port(name: str, value: Any) -> Port:
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Port(name, str(value.dtype).removeprefix("torch."), shape)


class _Flat(nn.Module):
    """The call with a parameter for each tensor: torch.export has no open sizes for `*tensors` of a program."""

    def __init__(self, call: FlatCall) -> None:
        super().__init__()
        self.call = call
        self.names = [f"input{place}" for place in range(len(call.tensors))]

        def forward(*tensors: Any) -> Any:
            return call(*tensors)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in self.names])  # type: ignore[attr-defined]
        self.forward = forward
        self.eval()
