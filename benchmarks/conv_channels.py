"""How the time of ONNX Runtime's integer convolutions depends on the number of channels and on the width of groups.

    python benchmarks/conv_channels.py --json conv_channels.jsonl
    python benchmarks/conv_channels.py --models regnetx_002,mnasnet_100 --sizes 96,224   # files with it and without

Chains of equal `QLinearConv` (uint8 activations, int8 weights per channel), batch 1, one thread; the best of several
rounds. `ns`: per element of an output, `float_ns`: of the same layers in float32. What is widened by
`sparsebit/deploy/layouts/channel_layout.py`, and from where on, comes from these figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import emit
from onnx import TensorProto, helper, numpy_helper

LAYERS = 6
DEPTHWISE = ((3, 28), (5, 28))  # kernel, size of the image
DEPTHWISE_CHANNELS = (8, 12, 16, 20, 24, 32, 36, 48, 58, 64, 72, 80, 116, 120, 128, 184, 192, 200, 208, 240)
DENSE_CHANNELS = (24, 32, 56, 58, 60, 64, 116, 128, 232, 240)
GROUPED = ((128, 28), (256, 14), (384, 14))  # channels, size of the image
WIDTHS = (4, 8, 16, 32, 64, 128)
IMAGES = ((32, 3, 2, 224), (32, 3, 2, 96), (64, 7, 2, 224), (16, 6, 2, 640), (192, 16, 16, 224))


def chain(channels: int, kernel: int, groups: int, size: int, *, in_float: bool) -> bytes:
    """The file of a chain of layers from `channels` to as many."""
    draw = np.random.default_rng(0)
    shape = (channels, channels // groups, kernel, kernel)
    stored = {"scale": np.float32(0.02), "zero": np.uint8(10)}
    nodes, x = [], "x"
    settings: dict[str, Any] = {"group": groups, "kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4}
    for layer in range(LAYERS):
        w, y = f"w{layer}", f"y{layer}"
        if in_float:
            stored |= {w: draw.normal(size=shape).astype(np.float32) / 10, f"{w}b": np.zeros(channels, np.float32)}
            nodes += [
                helper.make_node("Conv", [x, w, f"{w}b"], [f"{y}c"], **settings),
                helper.make_node("Relu", [f"{y}c"], [y]),
            ]
        else:
            stored |= {w: draw.integers(-127, 128, shape).astype(np.int8), f"{w}z": np.zeros(channels, np.int8)}
            stored |= {f"{w}s": np.full(channels, 1e-3, np.float32), f"{w}b": np.zeros(channels, np.int32)}
            inputs = [x, "scale", "zero", w, f"{w}s", f"{w}z", "scale", "zero", f"{w}b"]
            nodes.append(helper.make_node("QLinearConv", inputs, [y], **settings))
        x = y
    kind = TensorProto.FLOAT if in_float else TensorProto.UINT8
    return file_of(nodes, stored, ("x", kind, [1, channels, size, size]), (x, kind))


def image_layer(outputs: int, kernel: int, stride: int, size: int, *, channels: int) -> bytes:
    """The file of a first layer that reads a float image of 3 channels; `channels`: of the codes, 3 or 4."""
    draw = np.random.default_rng(0)
    weight = draw.integers(-127, 128, (outputs, channels, kernel, kernel)).astype(np.int8)
    stored = {"scale": np.float32(0.02), "zero": np.uint8(128), "w": weight, "ws": np.full(outputs, 1e-3, np.float32)}
    stored |= {"wz": np.zeros(outputs, np.int8), "b": np.zeros(outputs, np.int32)}
    nodes, x = [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"])], "codes"
    if channels > 3:
        stored["pads"] = np.array([0, 0, 0, 0, 0, channels - 3, 0, 0])
        nodes.append(helper.make_node("Pad", [x, "pads"], ["padded"]))
        x = "padded"
    inputs = [x, "scale", "zero", "w", "ws", "wz", "scale", "zero", "b"]
    settings = {
        "kernel_shape": [kernel] * 2,
        "strides": [stride] * 2,
        "pads": [kernel // 2 if stride < kernel else 0] * 4,
    }
    nodes.append(helper.make_node("QLinearConv", inputs, ["y"], **settings))
    return file_of(nodes, stored, ("x", TensorProto.FLOAT, [1, 3, size, size]), ("y", TensorProto.UINT8))


def file_of(nodes: list[Any], stored: dict[str, Any], x: tuple[str, int, list[int]], y: tuple[str, int]) -> bytes:
    used = {name for node in nodes for name in node.input}
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items() if name in used]
    output = helper.make_tensor_value_info(*y, None)
    graph = helper.make_graph(nodes, "chain", [helper.make_tensor_value_info(*x)], [output], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def seconds(file: bytes, rounds: int = 9) -> float:
    """Of one run, the best of some rounds."""
    import sparsebit

    session = sparsebit.open_session(file, num_threads=1)
    shape = [size or 1 for size in session.input_shapes["x"]]
    array = np.random.default_rng(0).integers(0, 255, shape).astype(session.input_types["x"])
    session.run({"x": array})
    start = time.process_time()
    session.run({"x": array})
    count = max(1, int(0.05 / max(time.process_time() - start, 1e-4)))
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(count):
            session.run({"x": array})
        best = min(best, (time.process_time() - start) / count)
    return best


def measured(kind: str, channels: int, kernel: int, groups: int, size: int) -> dict[str, Any]:
    found = {
        name: seconds(chain(channels, kernel, groups, size, in_float=in_float)) / LAYERS
        for name, in_float in (("ns", False), ("float_ns", True))
    }
    elements = channels * size * size
    products = channels // groups * kernel * kernel
    return {
        "kind": kind,
        "channels": channels,
        "kernel": kernel,
        "size": size,
        "group_width": channels // groups,
        **{name: round(1e9 * one / elements, 2) for name, one in found.items()},
        "gmacs": round(elements * products / found["ns"] / 1e9, 1),
        "float_gmacs": round(elements * products / found["float_ns"] / 1e9, 1),
    }


def whole_model(name: str, size: int, folder: Path, budget_s: float) -> dict[str, Any]:
    """The files of a model with the layout and without it, and the float file, in turns."""
    import placement
    import torch

    import sparsebit
    from sparsebit.deploy.sessions.timing import interleaved
    from sparsebit.quantization import parse_qconfig

    torch.set_num_threads(1)
    model, batches, backend, _ = placement.build(name, size)
    image = batches[0][:1]
    files = {kind: folder / f"{kind}.onnx" for kind in ("float", "without", "with")}
    torch.onnx.export(model, (image,), files["float"], dynamo=True, verbose=False)
    for kind in ("without", "with"):
        config = parse_qconfig(backend).replace("SCHEDULE.PAD_CHANNELS", kind == "with")
        sparsebit.quantize(model, batches, config).export_onnx(image, files[kind])
    sessions = {kind: sparsebit.open_session(file, num_threads=1) for kind, file in files.items()}
    runs = {kind: partial(one.run, {one.inputs[0]: image.numpy()}) for kind, one in sessions.items()}
    outputs = {kind: run()[0] for kind, run in runs.items()}
    ratios = {kind: round(one.cpu_ratio, 3) for kind, one in interleaved(runs, budget_s=budget_s).items()}
    return {
        "model": name,
        "size": size,
        "without": ratios["without"],
        "with": ratios["with"],
        "bytes": round(files["with"].stat().st_size / files["without"].stat().st_size, 3),
        "equal": bool(np.array_equal(outputs["with"], outputs["without"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--models", help="names as in placement.py: time whole files instead of single layers")
    parser.add_argument("--sizes", default="96,224")
    parser.add_argument("--budget", type=float, default=8, help="seconds for a model at a size")
    options = parser.parse_args()
    if options.models:
        for name in options.models.split(","):
            for size in map(int, options.sizes.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    record = whole_model(name, size, Path(folder), options.budget)
                emit({"benchmark": "conv_channels", "kind": "model", **record}, options.json)
        return
    jobs = [("depthwise", c, kernel, c, size) for kernel, size in DEPTHWISE for c in DEPTHWISE_CHANNELS]
    jobs += [("dense", c, 1, 1, 28) for c in DENSE_CHANNELS]
    jobs += [("groups", c, 3, c // w, size) for c, size in GROUPED for w in WIDTHS if w <= c]
    for job in jobs:
        emit({"benchmark": "conv_channels", **measured(*job)}, options.json)
    for outputs, kernel, stride, size in IMAGES:
        ms = {
            f"ms_{channels}": round(1e3 * seconds(image_layer(outputs, kernel, stride, size, channels=channels)), 3)
            for channels in (3, 4)
        }
        record = {"kind": "image", "outputs": outputs, "kernel": kernel, "stride": stride, "size": size, **ms}
        emit({"benchmark": "conv_channels", **record}, options.json)


if __name__ == "__main__":
    main()
