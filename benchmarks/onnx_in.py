"""Every architecture of `zoo.py` as a float ONNX file of torch.onnx.export, loaded by `sparsebit.load_onnx`.

    python benchmarks/onnx_in.py [--only GLOB] [--json FILE]

Prints one JSON line per architecture: whether torch exports it, the largest difference of the loaded module from ONNX
Runtime (as a share of the output's range; more than 1e-4 is a failure), how many of its layers have the names of the
PyTorch model, and the seconds of loading. `ONNX_IN_INT8=1` also quantizes both for ONNX Runtime and compares the files:
signal to quantization noise against the float model, and milliseconds per call. `ONNX_IN_OPSET=13` writes that opset.
`ONNX_IN_FILES=FOLDER` keeps the float files there and uses those that it finds.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import sqnr_db
from torch import nn
from torch.utils import _pytree as pytree
from zoo import spread
from zoo_models import ZOO
from zoo_runner import run_zoo

LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)


def examine(name: str) -> dict[str, Any]:
    """One architecture's record; a failure is a result here."""
    record: dict[str, Any] = {"model": name, "exports": False, "ok": False}
    try:
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(os.environ.get("ONNX_IN_FILES", folder))
            _examine(name, kept, Path(folder), record)
    except Exception as error:
        record["error"] = "".join(traceback.format_exception_only(error)).strip()[:600]
        record["refused"] = type(error).__module__ == "sparsebit.errors"  # with a reason, not by a fault
    return record


def _examine(name: str, kept: Path, folder: Path, record: dict[str, Any]) -> None:
    import sparsebit

    torch.manual_seed(0)
    net, batch = ZOO[name]()
    spread(net.eval())
    file = kept / f"{name.replace('/', '__')}.onnx"
    if not file.is_file():
        _export(net, batch, file)
    record["exports"] = True
    session = sparsebit.open_session(file, optimize=False)
    inputs = _inputs(session, batch)
    start = time.perf_counter()
    model = sparsebit.load_onnx(file, [inputs])
    record["seconds"] = round(time.perf_counter() - start, 1)
    expected = session.run({key: value.numpy() for key, value in inputs.items()})
    with torch.no_grad():
        found = pytree.tree_leaves(model(*inputs.values()))
    record["difference"] = max(map(_difference, map(torch.from_numpy, expected), found))
    own = {path for path, module in net.named_modules() if isinstance(module, LAYERS)}
    names = {path for path, module in model.named_modules() if isinstance(module, LAYERS)}
    record |= {"layers": len(own), "layers_loaded": len(names), "same_names": len(own & names), "ok": True}
    if os.environ.get("ONNX_IN_INT8"):
        record["int8"] = {
            "file": _int8(model, tuple(inputs.values()), expected, folder / "a.onnx"),
            "pytorch": _int8(net, batch, expected, folder / "b.onnx"),
        }


def _export(net: nn.Module, batch: Any, file: Path) -> None:
    args, kwargs = ((), dict(batch)) if isinstance(batch, dict) else ((batch,), {})
    opset = int(os.environ["ONNX_IN_OPSET"]) if "ONNX_IN_OPSET" in os.environ else None
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        torch.onnx.export(
            net, args, str(file), kwargs=kwargs, dynamo=True, opset_version=opset, external_data=False, verbose=False
        )


def _inputs(session: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The batch by the names of the file; an input that the exporter dropped is left out."""
    if isinstance(batch, dict) and all(name in batch for name in session.inputs):
        return {name: batch[name] for name in session.inputs}
    return dict(zip(session.inputs, pytree.tree_leaves(batch), strict=False))


def _difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    if not expected.is_floating_point() or not expected.numel():
        return 0.0
    return float((expected - found).abs().max() / (expected.max() - expected.min()).clamp_min(1e-12))


def _int8(model: nn.Module, batch: Any, expected: list[Any], file: Path) -> dict[str, float]:
    """The quantized file's signal-to-noise ratio against the float outputs, and its time on one thread."""
    import sparsebit

    qmodel = sparsebit.quantize(model, [batch], "onnxruntime")
    example = batch if isinstance(batch, tuple | dict) else (batch,)
    qmodel.export_onnx(batch, file, check=[batch])
    session = sparsebit.open_session(file, num_threads=1)
    leaves = pytree.tree_leaves(example)
    feeds = {name: leaf.numpy() for name, leaf in zip(session.inputs, leaves, strict=False)}
    found = session.run(feeds)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - start)
    wanted, have = (torch.cat([torch.as_tensor(one).flatten().float() for one in many]) for many in (expected, found))
    return {"sqnr_db": round(sqnr_db(wanted, have), 2), "ms": round(1e3 * min(times), 2)}


if __name__ == "__main__":
    run_zoo("onnx_in", examine, __doc__)
