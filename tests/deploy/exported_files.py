"""Exported files, read back and run: what the tests of the exporter share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, numpy_helper

from sparsebit.deploy.exporting.to_onnx import flat_inputs, flat_outputs
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.quantization import QuantModel

EXACT = 1e-6  # of an output's range: float32 sums in another order


def differences(
    qmodel: QuantModel,
    file: Path,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    runtime: str = "onnxruntime",
    optimize: bool = False,
    options: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Output -> the largest difference between file and simulation, as a share of the output's range."""
    kwargs = dict(kwargs or {})
    session = open_session(file, runtime, optimize=optimize, options=options)
    was_training = qmodel.training
    with torch.no_grad():
        expected = [tensor.numpy() for tensor in flat_outputs(qmodel.eval()(*args, **kwargs))]
    qmodel.train(was_training)
    feeds = zip(session.inputs, flat_inputs(args, kwargs), strict=True)
    found = session.run({name: tensor.numpy() for name, tensor in feeds})
    return {name: share_of_range(a, b) for name, a, b in zip(session.outputs, expected, found, strict=True)}


def share_of_range(expected: Any, found: Any) -> float:
    assert expected.shape == found.shape
    assert expected.dtype == found.dtype
    if expected.size == 0:
        return 0.0
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    return float(np.abs(expected - found).max() / (np.ptp(expected) or 1.0))


def worst(*args: Any, **settings: Any) -> float:
    return max(differences(*args, **settings).values())


def initializers(file: Path) -> dict[str, Any]:
    """Name -> numpy array."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(file)).graph.initializer}


def types(file: Path) -> dict[str, str]:
    """Initializer -> `INT4` and the like."""
    return {t.name: TensorProto.DataType.Name(t.data_type) for t in onnx.load(str(file)).graph.initializer}


def op_types(file: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(file)).graph.node)


def metadata(node: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def opset(file: Path) -> int:
    return next(entry.version for entry in onnx.load(str(file)).opset_import if entry.domain == "")


def optimized_ops(file: Path, folder: Path) -> Counter[str]:
    """What ONNX Runtime makes of the file."""
    made = folder / "optimized.onnx"
    open_session(file, optimized_file=made)
    return op_types(made)
