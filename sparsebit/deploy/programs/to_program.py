"""`to_program`: a module, as it runs on one example, as a `torch.export` program with quantize and dequantize ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from sparsebit.deploy.exporting.export_errors import export_fault, hides_interrupt, quiet
from sparsebit.deploy.exporting.to_onnx import branches_on_sizes
from sparsebit.deploy.programs.qdq_program import lower_program, part_readers, quantize_moves
from sparsebit.deploy.programs.site_outputs import SiteGrid, sites_as_outputs
from sparsebit.errors import DeploymentError, users_level


def to_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: Any = None,
    *,
    pairs_around_moves: bool = False,
    lay_out: Callable[[fx.GraphModule], None] | None = None,
    sites: dict[str, SiteGrid] | None = None,
) -> ExportedProgram:
    """The program. `shapes`: the `dynamic_shapes` of `torch.export.export`.

    `pairs_around_moves`: a reshape between quantized ops gets a quantize and a dequantize op of its own. `lay_out`:
    changes the operators of the graph to those that a runtime has, in place. `sites`: if it is given, the quantized
    tensors become outputs, behind the module's own, and it is filled with their grids in that order.
    """
    with quiet(), torch.no_grad(), branches_on_sizes() as branches:
        try:
            program = torch.export.export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
        except Exception as error:
            if hides_interrupt(error):
                raise KeyboardInterrupt from error
            raise DeploymentError(export_fault(error, module, [], "export_program")) from error
        for line in branches:
            warnings.warn(
                f"export_program: the model branches on a size that dynamic_shapes leaves open, at {line}; the program "
                "takes the example's branch and is wrong for sizes that would take another: leave that size fixed",
                stacklevel=users_level(),
            )
        graph = program.module()
        lower_program(graph)
        if lay_out is not None:
            lay_out(graph)
        if pairs_around_moves:
            quantize_moves(graph)
        part_readers(graph)
        if sites is not None:
            sites.update(sites_as_outputs(graph))
        return torch.export.export(graph, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
