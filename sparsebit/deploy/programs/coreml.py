"""A program as an `.mlpackage` of Core ML, with its quantize and dequantize ops kept.

Core ML predicts on macOS only, so the package is not run here. Its stored numbers are those of the program, and its
metadata says that it was not run.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from sparsebit.deploy.exporting.export_errors import refused_as
from sparsebit.deploy.programs.program_target import ProgramTarget
from sparsebit.deploy.programs.quiet_conversion import quiet_conversion
from sparsebit.deploy.sessions.program_facts import KEY, ProgramFacts
from sparsebit.records.audit import Arithmetic, LayerRun

log = logging.getLogger(__name__)

NOT_RUN = "not run when it was written: Core ML predicts on macOS only"
_CHECKED = f"{KEY}.checked"
_HEAVY = {
    **dict.fromkeys(("conv",), "convolution"),
    "conv_transpose": "transposed convolution",
    "linear": "linear layer",
    "matmul": "matrix product",
}
_ABSORBED = frozenset({"relu", "relu6", "clip", "clamped_relu"})


def write_mlpackage(program: ExportedProgram, facts: ProgramFacts, path: Path) -> None:
    """Convert the program and write it; its facts are in the metadata. A warning says that it was not run."""
    with quiet_conversion():
        import coremltools

        with refused_as("coremltools does not take the program"):
            made = coremltools.convert(
                program.run_decompositions({}),
                source="pytorch",
                convert_to="mlprogram",
                minimum_deployment_target=coremltools.target.iOS17,  # the first with quantized activations
                compute_precision=coremltools.precision.FLOAT32,
                skip_model_load=True,
            )
            spec = made.get_spec()
            for ports, features in ((facts.inputs, spec.description.input), (facts.outputs, spec.description.output)):
                for port, old in zip(ports, [feature.name for feature in features], strict=True):
                    coremltools.utils.rename_feature(spec, old, port.name)
            layers = _layers(made._mil_program)
            package = coremltools.models.MLModel(spec, weights_dir=made.weights_dir, skip_model_load=True)
            package.user_defined_metadata[KEY] = replace(facts, layers=layers).to_json()
            package.user_defined_metadata[_CHECKED] = NOT_RUN
            package.save(str(path))
    log.warning("%s was %s; compare its predictions with the model's on a Mac", path.name, NOT_RUN)


def _layers(program: Any) -> tuple[LayerRun, ...]:
    """The layers as the package holds them; on the device Core ML chooses the processor, and so the arithmetic."""
    found = []
    for op in program.functions["main"].operations:
        if op.op_type not in _HEAVY:
            continue
        arithmetic = _arithmetic(op)
        cause = "its input, its weight or its result is not quantized" if arithmetic == "float" else ""
        shape = tuple(size if isinstance(size, int) else 0 for size in op.outputs[0].shape)
        kind = _HEAVY[op.op_type]
        found.append(LayerRun(op.name, op.op_type, kind, True, arithmetic, "Core ML, not run", cause, shape=shape))
    return tuple(found)


def _arithmetic(op: Any) -> Arithmetic:
    """`integer`: between dequantize and quantize ops, with an integer weight; a device may compute it in integers."""
    data, weight = op.inputs["x"], op.inputs["y" if op.op_type == "matmul" else "weight"]
    readers = op.outputs[0].child_ops
    while len(readers) == 1 and readers[0].op_type in _ABSORBED:
        readers = readers[0].outputs[0].child_ops
    has_weight = _is_dequantized(weight)
    is_written = bool(readers) and all(reader.op_type == "quantize" for reader in readers)
    if has_weight and _is_dequantized(data) and is_written:
        return "integer"
    return "weight-only" if has_weight else "float"


def _is_dequantized(value: Any) -> bool:
    return value.op is not None and "dequantize" in value.op.op_type


COREML = ProgramTarget(
    "coreml", ".mlpackage", write_mlpackage, modules=("coremltools",), extra="coreml", is_folder=True
)
