"""Time against float in ONNX Runtime: default placement, measured placement, and ONNX Runtime's own static tool.

    python benchmarks/placement.py [--models resnet18,lcnet_050] [--sizes 96,224] [--seconds 60] [--json FILE]

timm models with random weights, batch 1, one thread. The four files of a model are open side by side and take turns.
All come from one trace: float and default as `measure_placement` writes them, the peer's from the float file.
`ratio`: of CPU time (`time.process_time`), which other processes on the machine hardly change; `wall_ratio` beside it.
Prints one JSON line per model and size; `--summary FILE` prints a table of the lines in a file.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit
from torch import nn

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

MODELS = (
    "resnet18", "lcnet_050", "mobilenetv3_small_100", "efficientnet_lite0", "mobilenetv2_100", "fastvit_t8",
    "tf_efficientnetv2_b0", "repghostnet_050", "lcnet_100", "ghostnet_100", "repghostnet_100", "resnet50",
    "vit_tiny_patch16_224", "regnetx_002", "mnasnet_100", "efficientnet_b0", "mobilenetv3_large_100", "convnext_atto",
    "repvgg_a0", "hrnet_w18_small", "densenet121", "yolov5n",
)  # fmt: skip
_FIXED_SIZE = ("vit_tiny_patch16_224",)
NUM_SAMPLES = 8


def build(name: str, size: int) -> tuple[nn.Module, torch.Tensor]:
    """The model and calibration images."""
    from zoo import spread

    torch.manual_seed(0)
    if name == "yolov5n":
        from models import yolov5n

        task = yolov5n()
        return task.model, torch.cat(task.calibration[:NUM_SAMPLES])
    torchvision_shim.install()
    import timm

    extra = {"img_size": size} if name in _FIXED_SIZE else {}
    model = timm.create_model(name, pretrained=False, **extra).eval()
    spread(model)
    return model, torch.randn(NUM_SAMPLES, 3, size, size)


def measure(name: str, size: int, seconds: float, folder: Path, budget_s: float, *, check: bool) -> dict[str, Any]:
    """The record of one model at one size."""
    import sparsebit
    from sparsebit.deploy.timing import interleaved
    from sparsebit.quantization import measure_placement

    model, images = build(name, size)
    record: dict[str, Any] = {"model": name, "size": size}
    qmodel = sparsebit.quantize(model, [images], "onnxruntime")
    start = time.perf_counter()
    found = measure_placement(qmodel, [images], seconds=seconds, keep=folder)
    record |= {"placement_seconds": round(time.perf_counter() - start, 1), "placement": found.profile.words}
    record["tried"] = [[one.name, round(one.ratio, 3), one.verdict] for one in found.profile.choices]
    if check:
        record["parity"] = str(found.qmodel.export_onnx(images[:1], folder / "measured.onnx", check=[images]))
    try:
        _ort_static(images, folder, is_transformer=name in _FIXED_SIZE)
    except Exception as failure:  # the peer's failure is a result
        record["ort_error"] = str(failure)[:200]
    runs = {}
    for kind in ("float", "default", "measured", "ort"):
        if (folder / f"{kind}.onnx").is_file():
            session = sparsebit.open_session(folder / f"{kind}.onnx", num_threads=1)
            runs[kind] = partial(session.run, {session.inputs[0]: images[:1].numpy()})
    for kind, latency in interleaved(runs, budget_s=budget_s).items():
        record[kind] = {
            "ratio": round(latency.cpu_ratio, 3),
            "wall_ratio": round(latency.wall_ratio, 3),
            "cpu_ms": round(latency.cpu_ms, 3),
            "cpu_quartiles_ms": [round(one, 3) for one in latency.cpu_quartiles_ms],
        }
    return record


def _ort_static(images: torch.Tensor, folder: Path, *, is_transformer: bool) -> None:
    """ONNX Runtime's tool as its documentation advises: pre-process, QDQ, uint8 activations, int8 per channel."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logging.getLogger().setLevel(logging.ERROR)
    name = onnxruntime.InferenceSession(str(folder / "float.onnx")).get_inputs()[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc, no-any-unimported]
        def __init__(self) -> None:
            self.left = iter([{name: image[None].numpy()} for image in images[:4]])

        def get_next(self) -> Any:
            return next(self.left, None)

    quant_pre_process(folder / "float.onnx", folder / "prepared.onnx", auto_merge=True)
    quantize_static(
        folder / "prepared.onnx",
        folder / "ort.onnx",
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul", "Gemm"] if is_transformer else None,
        extra_options={"MatMulConstBOnly": is_transformer},
    )


def summary(file: Path) -> None:
    """A table of the lines, and the geometric means."""
    lines = {(line["model"], line["size"]): line for line in map(json.loads, file.read_text().splitlines())}
    print("| model | size | float ms | default | measured | ORT tool |\n|---|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {}
    for (name, size), line in lines.items():
        if "error" in line:
            print(f"| {name} | {size} | {line['error'][:60]} | | | |")
            continue
        cells = []
        for kind in ("default", "measured", "ort"):
            ratio = line.get(kind, {}).get("ratio")
            cells.append("-" if ratio is None else f"{ratio:.2f}")
            if ratio is not None:
                ratios.setdefault(kind, []).append(ratio)
        print(f"| {name} | {size} | {line['float']['cpu_ms']:.1f} | {' | '.join(cells)} |")
    means = [math.exp(sum(map(math.log, ratios[kind])) / len(ratios[kind])) for kind in ("default", "measured", "ort")]
    print(f"| geometric mean | | | {' | '.join(f'{mean:.2f}' for mean in means)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sizes", default="96,224")
    parser.add_argument("--seconds", type=float, default=60, help="of a search")
    parser.add_argument("--budget", type=float, default=8, help="seconds of the last comparison")
    parser.add_argument("--check", action="store_true", help="also export the result through the parity gate")
    parser.add_argument("--json", type=Path, help="append the lines to this file; what it has is skipped")
    parser.add_argument("--summary", type=Path, help="only print the table of this file")
    options = parser.parse_args()
    if options.summary:
        summary(options.summary)
        return
    torch.set_num_threads(1)
    known = options.json.read_text().splitlines() if options.json and options.json.is_file() else []
    done = {(line["model"], line["size"]) for line in map(json.loads, known)}
    for name in options.models.split(","):
        for size in (640,) if name == "yolov5n" else tuple(map(int, options.sizes.split(","))):
            if (name, size) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    record = measure(name, size, options.seconds, Path(folder), options.budget, check=options.check)
                except Exception as failure:  # a failure is a result
                    record = {"model": name, "size": size, "error": "".join(traceback.format_exception(failure))[-800:]}
            emit({"benchmark": "placement", **record}, options.json)


if __name__ == "__main__":
    main()
