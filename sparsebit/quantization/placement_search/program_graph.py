"""`ProgramGraph`: a traced model whose placements are compiled as programs of its runtime."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebit.deploy.programs.flat_program import flat_program
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.runtimes import RuntimeProfile
from sparsebit.execution.batches import Call
from sparsebit.graph.state.modes import evaluating
from sparsebit.quantization.calibrating.model_state import switched, switched_on
from sparsebit.quantization.exporting.export_constants import quantizers_as_constants
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.placement_search.traced_graph import TracedGraph

if TYPE_CHECKING:
    import onnx_ir as ir


class ProgramGraph(TracedGraph):
    """Units and links are those of the ONNX trace; a file is compiled of the model with some quantizers off."""

    def __init__(
        self, qmodel: QuantModel, sample: Call, model: ir.Model, opset: int, owners: Mapping[str, str]
    ) -> None:
        super().__init__(model, opset, owners, pads_channels=False)
        self.qmodel, self.sample = qmodel, sample

    def file(self, left_out: Iterable[str], profile: RuntimeProfile) -> bytes:
        gone, target, qmodel = set(left_out), TARGETS[profile.name], self.qmodel
        off = [quantizer for quantizer in qmodel.quantizers() if quantizer.name in gone]
        signature = inspect.signature(qmodel.original.forward)
        with switched_on(qmodel), switched(off, to=False), evaluating(qmodel), quantizers_as_constants(qmodel):
            program, facts = flat_program(qmodel, *self.sample, signature, target)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"model{target.ending}"
            target.write(program, facts, file)
            return file.read_bytes()
