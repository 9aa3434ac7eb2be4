"""Time against float in ONNX Runtime: default placement, measured placement, and ONNX Runtime's own static tool.

    python benchmarks/placement.py --json placement.jsonl [--workers 8] [--only 'mobilenet*,resnet*'] [--sizes 96,224]
    python benchmarks/placement.py --summary placement.jsonl
    python benchmarks/placement.py --limits --json placement_limits.jsonl   # why it is not faster: placement_limits.py

Random weights (YOLOv5n: its own, with the mAP of every file where pycocotools is installed), batch 1, one thread. The
files of a model are open side by side in one process and take turns. All come from one trace: float and default as
`measure_placement` writes them, the peer's from the float file. Networks that train with branches (`BRANCHED`) are
compared with the float file that torch exports of the model as it is, and so is the peer, which starts from it;
`merged_float` is the float file with one convolution in place of the branches. `ratio`: of CPU time
(`time.process_time`), which other processes on the machine hardly change; `wall_ratio` beside it. `sqnr_db`: of the
outputs against the float file's, on images of the calibration.

Each model and size has a process of its own, pinned to one CPU; `--workers` of them run at once, each on its own core.
Prints one JSON line for each. A run that is started again skips the lines that `--json` has and repeats failures.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import math
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import ROOT, emit, sqnr_db
from torch import nn

sys.path.insert(0, str(ROOT / "tests"))
import torchvision_shim

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the files run on the CPU: no GPU is part of what was measured

# The slow ones first, so that the last worker does not end long after the others.
MODELS = (
    "densenet121", "resnet50", "yolov5n", "tf_efficientnetv2_b0", "efficientnet_b0", "fastvit_t8", "resnet18",
    "vit_tiny_patch16_224", "mobileone_s0", "convnext_atto", "efficientnet_lite0", "mobilenetv2_100",
    "mobilenetv3_large_100", "ghostnet_100", "repghostnet_100", "mnasnet_100", "regnetx_002", "squeezenet1_1",
    "shufflenet_v2_x1_0", "lcnet_100",
)  # fmt: skip
_TORCHVISION = ("squeezenet1_1", "shufflenet_v2_x1_0")
_SIZES = {"yolov5n": (640,), "vit_tiny_patch16_224": (224,)}
_TRANSFORMERS = ("vit_tiny_patch16_224",)
BRANCHED = ("mobileone_s0", "repghostnet_100", "fastvit_t8")
KINDS = ("default", "measured", "ort")
NUM_SAMPLES = 8


Score = Callable[[nn.Module], float]


def build(name: str, size: int) -> tuple[nn.Module, list[torch.Tensor], str, Score | None]:
    """The model, calibration batches, the config, and what scores a model where there are labels."""
    from zoo import spread

    torch.manual_seed(0)
    if name == "yolov5n":
        from models import yolov5n

        task = yolov5n()
        score = (lambda m: float(task.evaluate(m)[0])) if find_spec("pycocotools") else None
        return task.model, task.calibration, str(ROOT / "examples/configs/yolo_w8a8.yaml"), score
    torchvision_shim.install()
    if name in _TORCHVISION:
        from torchvision import models

        model = models.get_model(name, weights=None).eval()
    else:
        import timm

        model = timm.create_model(name, pretrained=False).eval()
    spread(model)
    return model, [torch.randn(NUM_SAMPLES, 3, size, size)], "onnxruntime", None


def measure(name: str, size: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The record of one model at one size."""
    import sparsebit
    from sparsebit.deploy.sessions.timing import interleaved
    from sparsebit.quantization import measure_placement

    model, batches, config, score = build(name, size)
    images = torch.cat(batches)[:NUM_SAMPLES]
    record: dict[str, Any] = {"model": name, "size": size}
    qmodel = sparsebit.quantize(model, batches, config)
    start = time.perf_counter()
    found = measure_placement(
        qmodel, batches, seconds=options.seconds, keep=folder, metric=score, metric_margin=options.margin
    )
    record |= {"placement_seconds": round(time.perf_counter() - start, 1), "placement": found.profile.words}
    record["tried"] = [[one.name, round(one.ratio, 3), one.verdict] for one in found.profile.choices]
    if options.check:
        record["parity"] = str(found.qmodel.export_onnx(images[:1], folder / "measured.onnx", check=[images]))
    if name in BRANCHED:
        (folder / "float.onnx").rename(folder / "merged_float.onnx")
        torch.onnx.export(model, (images[:1],), folder / "float.onnx", dynamo=True, verbose=False)
    try:
        _ort_static(images, folder, is_transformer=name in _TRANSFORMERS)
    except Exception as failure:  # the peer's failure is a result
        record["ort_error"] = str(failure)[:200]
    opened = {
        kind: sparsebit.open_session(folder / f"{kind}.onnx", num_threads=1)
        for kind in ("float", *KINDS, "merged_float")
        if (folder / f"{kind}.onnx").is_file()
    }
    runs = {kind: partial(session.run, {session.inputs[0]: images[:1].numpy()}) for kind, session in opened.items()}
    outputs = {kind: _outputs(session, images) for kind, session in opened.items()}
    for kind, latency in interleaved(runs, budget_s=options.budget).items():
        record[kind] = {
            "ratio": round(latency.cpu_ratio, 3),
            "wall_ratio": round(latency.wall_ratio, 3),
            "cpu_ms": round(latency.cpu_ms, 3),
            "cpu_quartiles_ms": [round(one, 3) for one in latency.cpu_quartiles_ms],
            "sqnr_db": None if kind == "float" else round(sqnr_db(outputs["float"], outputs[kind]), 1),
        }
        if score is not None:
            record[kind]["score"] = round(score(_File(opened[kind])), 4)
    if options.limits:
        from placement_limits import limits

        ratios = {kind: record[kind]["ratio"] for kind in ("float", "default", "measured")}
        record["limits"] = limits(folder, qmodel, batches, ratios, record["float"]["cpu_ms"])
    return record


class _File(nn.Module):
    """A file as a model of one image after the other."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session
        self.place = nn.Parameter(torch.zeros(1))  # says which device it is on

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        name = self.session.inputs[0]
        return torch.cat([torch.from_numpy(self.session.run({name: image[None].numpy()})[0]) for image in images])


def _outputs(session: Any, images: torch.Tensor) -> torch.Tensor:
    """All outputs of all images, in one row."""
    found = [session.run({session.inputs[0]: image[None].numpy()}) for image in images]
    return torch.cat([torch.from_numpy(array).flatten() for arrays in found for array in arrays])


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
    """A table of the lines, the geometric means, and how many are slower than float or behind the peer."""
    lines = {(line["model"], line["size"]): line for line in map(json.loads, file.read_text().splitlines())}
    print("| model | size | float ms | default | measured | ORT's own static tool |\n|---|---|---|---|---|---|")
    good = {key: line for key, line in sorted(lines.items()) if "error" not in line}
    for (name, size), line in good.items():
        cells = [f"{line[kind]['ratio']:.2f}" if kind in line else "-" for kind in KINDS]
        print(f"| {name} | {size} | {line['float']['cpu_ms']:.1f} | {' | '.join(cells)} |")
    for size in sorted({size for _, size in good}):
        print(f"| geometric mean | {size} | | {' | '.join(_means([*good.values()], size))} |")
    print(f"| geometric mean | all | | {' | '.join(_means([*good.values()]))} |")
    slower = [key for key, line in good.items() if line["measured"]["ratio"] > 1.01]
    behind = [
        (*key, round(line["measured"]["ratio"] / line["ort"]["ratio"], 2))
        for key, line in good.items()
        if "ort" in line and line["measured"]["ratio"] > 1.03 * line["ort"]["ratio"]
    ]
    for (name, _), line in good.items():
        scores = {kind: line[kind]["score"] for kind in ("float", *KINDS) if "score" in line.get(kind, {})}
        if scores:
            print(f"\n{name}: score {scores}")
    print(f"\nslower than float: {slower}\nmore than 3 % behind the peer: {behind}")
    print(f"failed: {[(*key, line['error'][-200:]) for key, line in lines.items() if 'error' in line]}")


def _means(lines: list[dict[str, Any]], size: int | None = None) -> list[str]:
    cells = []
    for kind in KINDS:
        ratios = [line[kind]["ratio"] for line in lines if kind in line and size in (None, line["size"])]
        cells.append(f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}" if ratios else "-")
    return cells


def cores(count: int) -> list[int]:
    """CPUs of different cores: two threads of one core slow each other, and not float and integers alike."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(file.read_text().strip() if file.is_file() else str(cpu), cpu)
    free = [*found.values()]
    if count > len(free):
        sys.exit(f"--workers {count}: there are {len(free)} cores; workers that share one would time each other")
    return free[:count]


def in_processes(jobs: list[tuple[str, int]], options: argparse.Namespace) -> None:
    """Each job in a process of its own, on a core of its own."""
    free: queue.Queue[int] = queue.Queue()
    for cpu in cores(options.workers):
        free.put(cpu)

    def one(job: tuple[str, int]) -> None:
        cpu = free.get()
        try:
            emit(
                {"benchmark": "placement_limits" if options.limits else "placement", **_in_process(job, cpu, options)},
                options.json,
            )
        finally:
            free.put(cpu)

    with ThreadPoolExecutor(options.workers) as pool:
        for future in [pool.submit(one, job) for job in jobs]:
            future.result()


def _in_process(job: tuple[str, int], cpu: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", job[0], "--sizes", str(job[1]), "--seconds", str(options.seconds)]
    command += ["--budget", str(options.budget), *(["--check"] if options.check else [])]
    command += ["--margin", str(options.margin), *(["--limits"] if options.limits else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    failure: dict[str, Any] = {"model": job[0], "size": job[1]}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(os.sched_setaffinity, 0, {cpu}),
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=options.limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {**failure, "error": f"took more than {options.limit:g} s"}
    lines = output.splitlines()
    if process.returncode or not lines:
        return {**failure, "error": f"exit status {process.returncode}: {errors[-800:]}"}
    record: dict[str, Any] = json.loads(lines[-1])
    return {**record, "cpu": cpu, "workers": options.workers}


def alone(name: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The record of one model, in this process; a failure is a record too."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return measure(name, size, Path(folder), options)
        except Exception as failure:
            return {"model": name, "size": size, "error": "".join(traceback.format_exception(failure))[-800:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="globs on the names, with commas between them")
    parser.add_argument("--models", default=",".join(MODELS), help="names of timm or torchvision, or yolov5n")
    parser.add_argument("--sizes", default="224,96")
    parser.add_argument("--workers", type=int, default=1, help="models at once, each on a core of its own")
    parser.add_argument("--seconds", type=float, default=60, help="of a search")
    parser.add_argument("--budget", type=float, default=8, help="seconds of the last comparison")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one model at one size")
    parser.add_argument("--check", action="store_true", help="also export the result through the parity gate")
    parser.add_argument(
        "--margin", type=float, default=0.001, help="of the score (YOLOv5n), below the default placement's"
    )
    parser.add_argument("--limits", action="store_true", help="also profile the files: what keeps them slow")
    parser.add_argument("--json", type=Path, help="append the lines to this file; what it has is skipped")
    parser.add_argument("--summary", type=Path, help="only print the table of this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = tuple(map(int, options.sizes.split(",")))
    if options.one:
        print(json.dumps(alone(options.one, sizes[0], options)))
        return
    if options.summary:
        summary(options.summary)
        return
    globs, names = options.only.split(","), options.models.split(",")
    known = options.json.read_text().splitlines() if options.json and options.json.is_file() else []
    done = {(line["model"], line["size"]) for line in map(json.loads, known) if "error" not in line}
    jobs = [
        (name, size)
        for name in names
        if any(fnmatch.fnmatch(name, glob) for glob in globs)
        for size in _SIZES.get(name, sizes)
    ]
    in_processes([job for job in jobs if job not in done], options)


if __name__ == "__main__":
    main()
