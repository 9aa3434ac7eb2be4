"""`export_program`: a calibrated model as a program of `torch.export`, for runtimes that take one."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from sparsebit.deploy.programs.to_program import to_program
from sparsebit.graph.state.modes import evaluating
from sparsebit.quantization.calibrating.model_state import check_ready, require_whole, switched_on
from sparsebit.quantization.exporting.export import export_call
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from sparsebit.quantization.faithful.simulation import SimulatedModel
from sparsebit.records.phases import EXPORT, phase


@phase(EXPORT)
def export_program(
    qmodel: SimulatedModel, dummy_data: Any, *, dynamic_shapes: Any = None, pairs_around_moves: bool = False
) -> ExportedProgram:
    """The model as a `torch.export` program that computes the same as the simulation, with weights as integers.

    Quantizers are `quantized_decomposed` quantize and dequantize ops, the form that ExecuTorch, AOTInductor, LiteRT and
    vendors' PT2E back ends lower. All integers are signed. Biases are floats: what their integers stand for.

    `dummy_data`: one batch in any form that calibration accepts; the program has its shapes except for
    `dynamic_shapes`, which is that of `torch.export.export`: `{"x": {0: torch.export.Dim("batch")}}`.
    `pairs_around_moves`: quantize and dequantize ops also behind reshapes and slices of quantized numbers, where
    runtimes that fuse them with their neighbours look for them.

    >>> program = qmodel.export_program(batches[0])  # doctest: +SKIP
    >>> torch.export.save(program, "model.pt2")  # doctest: +SKIP
    """
    require_whole(qmodel, "export_program")
    check_ready(qmodel, "export_program")
    args, kwargs = export_call(qmodel, dummy_data)
    with switched_on(qmodel), evaluating(qmodel), quantizers_as_constants(qmodel):
        return to_program(_Named(qmodel), args, kwargs, dynamic_shapes, pairs_around_moves=pairs_around_moves)


class _Named(nn.Module):
    """The simulation with the parameters of the original's `forward`, which name the program's inputs."""

    def __init__(self, qmodel: SimulatedModel) -> None:
        super().__init__()
        self.qmodel = qmodel

        def forward(*args: Any, **kwargs: Any) -> Any:
            return qmodel(*args, **kwargs)

        forward.__signature__ = inspect.signature(qmodel.original.forward)  # type: ignore[attr-defined]
        self.forward = forward
        self.eval()
