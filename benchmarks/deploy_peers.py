"""The tools that write a quantized ONNX file: Sparsebit, ONNX Runtime's own quantizer, NNCF. One function per variant.

A tool gets the case, the float file and the path to write. It gives its settings, in words, and what else it measured.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from deploy_models import Case, Feeds, batch, batches, run

ROOT = Path(__file__).resolve().parent.parent
Tool = Callable[[Case, Path, Path], dict[str, Any]]

OPSET = 21
OBSERVER = "mse"  # of activations: what the accuracy benchmark finds best at 8 bits


def export_float(case: Case, _: Path, file: Path) -> dict[str, Any]:
    """The float file that the peers start from and that every other is compared with."""
    import torch

    example = batch(case.evaluation[:1])
    args, kwargs = ((), example) if isinstance(example, dict) else ((example,), {})
    torch.onnx.export(
        case.model,
        args,
        str(file),
        kwargs=kwargs,
        input_names=list(case.evaluation[0]),
        opset_version=OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    return {"simulate": partial(run, case.model, case.evaluation)}


def sparsebit(case: Case, _: Path, file: Path, *, backend: str) -> dict[str, Any]:
    """Also `export_seconds`; `simulate`, the torch simulation on the evaluation inputs; the runtime to compare in."""
    from sparsebit import PROFILES, quantize
    from sparsebit.quantization import parse_qconfig

    if case.config is not None:
        config = parse_qconfig(ROOT / case.config).replace("BACKEND", backend)
    else:
        settings = PROFILES[backend].recommended()
        settings["A"] = {**settings["A"], "OBSERVER": {"TYPE": OBSERVER}}
        config = parse_qconfig(settings)
    config = config.replace("DEVICE", "cpu")  # the evaluation inputs are there
    qmodel = quantize(case.model, list(batches(case.calibration, case.calibration_batch)), config)
    start = time.perf_counter()
    qmodel.export_onnx(batch(case.evaluation[:1]), str(file))
    return {
        "settings": case.config or f"{backend}, observer {OBSERVER}",
        "export_seconds": round(time.perf_counter() - start, 1),
        "simulate": partial(run, qmodel, case.evaluation),
        "parity_runtime": backend,
    }


def ort_static(case: Case, floating: Path, file: Path, *, everything: bool = False) -> dict[str, Any]:
    """`everything`: the tool's default choice of operators, which for transformers and detectors is not its best."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    linears = case.is_transformer and not everything
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(floating, prepared, auto_merge=True)
        excluded = [] if everything else tail(onnx.load(prepared), case.float_from)
        quantize_static(
            prepared,
            file,
            _reader(case.calibration),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=["MatMul", "Gemm"] if linears else None,
            nodes_to_exclude=excluded,
            extra_options={"MatMulConstBOnly": linears},
        )
    chosen = "MatMul and Gemm with constant weights" if linears else "default operators"
    return {"settings": f"pre-process, QDQ, u8s8 per-channel, min-max, {chosen}{_without(excluded)}"}


def ort_dynamic(case: Case, floating: Path, file: Path) -> dict[str, Any]:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(floating, prepared, auto_merge=True)
        quantize_dynamic(prepared, file, per_channel=True, weight_type=QuantType.QInt8)
    return {"settings": "pre-process, s8 weights per-channel"}


def nncf(case: Case, floating: Path, file: Path, *, tuned: bool = False) -> dict[str, Any]:
    """`tuned`: one scale per activation tensor, uint8 where signed too (ONNX Runtime fuses nothing else), the whole
    range where images come one by one (the mean of their extremes clips: 20 dB instead of 28 on ResNet-20).
    """
    import nncf as tool
    import onnx
    from nncf.quantization.advanced_parameters import OverflowFix, QuantizationParameters
    from nncf.quantization.range_estimator import RangeEstimatorParametersSet

    logging.getLogger("nncf").setLevel(logging.WARNING)
    model = onnx.load(floating)
    excluded = tail(model, case.float_from)
    settings: dict[str, Any] = {}
    if tuned:
        settings["preset"] = tool.QuantizationPreset.MIXED
        settings["advanced_parameters"] = tool.AdvancedQuantizationParameters(
            overflow_fix=OverflowFix.DISABLE,
            activations_quantization_params=QuantizationParameters(per_channel=False),
            **(
                {}
                if case.is_transformer
                else {"activations_range_estimator_params": RangeEstimatorParametersSet.MINMAX}
            ),
        )
    if case.is_transformer:
        settings["model_type"] = tool.ModelType.TRANSFORMER
    if excluded:
        settings["ignored_scope"] = tool.IgnoredScope(names=excluded)
    data = tool.Dataset(case.calibration)
    onnx.save(tool.quantize(model, data, subset_size=len(case.calibration), **settings), file)
    words = "mixed preset, per-tensor activations, no overflow fix" if tuned else "defaults"
    words += ", min-max" if tuned and not case.is_transformer else ""
    return {"settings": f"{words}{', transformer' if case.is_transformer else ''}{_without(excluded)}"}


TOOLS: dict[str, Tool] = {
    "sparsebit-onnxruntime": partial(sparsebit, backend="onnxruntime"),
    "sparsebit-openvino": partial(sparsebit, backend="openvino"),
    "ort_static": ort_static,
    "ort_static_all": partial(ort_static, everything=True),
    "ort_dynamic": ort_dynamic,
    "nncf": nncf,
    "nncf_tuned": partial(nncf, tuned=True),
}
GROUPS = {
    "sparsebit": ("sparsebit-onnxruntime", "sparsebit-openvino"),
    "ort_static": ("ort_static", "ort_static_all"),
    "ort_dynamic": ("ort_dynamic",),
    "nncf": ("nncf", "nncf_tuned"),
}
GROUPS["peers"] = GROUPS["ort_static"] + GROUPS["ort_dynamic"] + GROUPS["nncf"]


def fits(tool: str, case: Case) -> bool:
    """Whether a variant says anything about this kind of model."""
    if tool == "ort_dynamic":  # ORT has no fast convolution for it
        return case.is_transformer
    if tool == "nncf_tuned":  # transformers get the same from the defaults
        return not case.is_transformer
    return tool != "ort_static_all" or case.is_transformer or case.float_from is not None


def tail(model: Any, prefix: str | None) -> list[str]:
    """Names of the nodes that read a weight whose name starts with `prefix`, and of all that depend on them."""
    reached: set[str] = set()
    names = []
    for node in model.graph.node if prefix is not None else ():
        if any(value in reached or value.startswith(str(prefix)) for value in node.input):
            reached.update(node.output)
            names.append(node.name)
    return names


def _without(excluded: list[str]) -> str:
    return f", {len(excluded)} nodes of the head in float" if excluded else ""


def _reader(samples: list[Feeds]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples: Iterator[Feeds] = iter(samples)

        def get_next(self) -> Feeds | None:
            return next(self.samples, None)

    return Reader()
