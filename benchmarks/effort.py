"""What `effort` costs and gives: accuracy, seconds and memory of "fast", "good" and "best" on the same images.

    python benchmarks/effort.py [--tasks resnet20,mobilenetv2,vit] [--bits W4A8,W4A4] [--images 256] [--device cuda]
        [--json FILE]
    python benchmarks/effort.py --tasks efficientnet_lite0 --bits W4A8 --views 4   # crops of its 63 calibration images
    python benchmarks/effort.py --efforts good --gptq '{"keep_variance": true}'    # with other options of GPTQ
    python benchmarks/effort.py --efforts best --reconstruct '{"held_out": 0}'     # or of the reconstruction
    python benchmarks/effort.py --efforts good --distill '{"views": 8}'            # then the whole network is trained
    python benchmarks/effort.py --other CIFAR WEIGHTS --tasks regnet,mixer         # of other_networks_train.py

`ratio`: CPU seconds (on a GPU: seconds) by those of "fast" in the same run. Each row is a process of its own, so that
its peak memory is its own; it includes the model's and the data's.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import emit, sqnr_db

EFFORTS = ("fast", "good", "best")
STEPS = ("gptq", "reconstruct")  # of an effort, that can get other options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="resnet20,mobilenetv2,vit")
    parser.add_argument("--bits", default="W4A8,W4A4")
    parser.add_argument("--efforts", default=",".join(EFFORTS))
    parser.add_argument("--images", type=int, default=256, help="for calibration")
    parser.add_argument("--views", type=int, default=1, help="crops of each image, for efficientnet_lite0")
    for step in STEPS:
        parser.add_argument(
            f"--{step}", type=json.loads, default={}, help=f"JSON: options of {step} that replace those"
        )
    parser.add_argument("--distill", type=json.loads, help='JSON: after the effort, reconstruct(method="distill", ...)')
    parser.add_argument("--first", type=int, default=0, help="the first image for calibration, of CIFAR-10")
    parser.add_argument("--other", nargs=2, type=Path, metavar=("CIFAR", "WEIGHTS"), help="networks trained for this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", nargs=3, metavar=("TASK", "BITS", "EFFORT"), help="one row, in this process")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(*options.row, options)))
        return
    for task in options.tasks.split(","):
        for bits in options.bits.split(","):
            cost = None
            for effort in options.efforts.split(","):
                found = in_own_process(task, bits, effort, options)
                spent = found["cpu_seconds"] if options.device == "cpu" else found["seconds"]
                cost = spent if effort == "fast" else cost
                found["ratio"] = None if cost is None else round(spent / cost, 1)
                emit({"benchmark": "effort", **found}, options.json)


def in_own_process(task: str, bits: str, effort: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", task, bits, effort]
    for name in STEPS:
        command += [f"--{name}", json.dumps(getattr(options, name))]
    if options.distill is not None:
        command += ["--distill", json.dumps(options.distill)]
    if options.other is not None:
        command += ["--other", *map(str, options.other)]
    for name in ("images", "views", "first", "device"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(name: str, bits: str, effort: Any, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from accuracy import config
    from models import cifar, efficientnet_lite0, other_network

    import sparsebit
    from sparsebit.quantization import parse_qconfig
    from sparsebit.quantization.effort import with_effort

    torch.set_num_threads(1)
    device = options.device
    if options.other is not None:
        task = other_network(name, *options.other, options.images)
    elif name == "efficientnet_lite0":
        task = efficientnet_lite0(options.views)
    else:
        task = cifar(name, 5000, options.images, options.first)
    task.model.to(device)
    score, outputs = task.evaluate(task.model)
    weight, activation = map(int, re.findall(r"\d+", bits))
    # The first call pays for imports and start-up; that is not the method's.
    sparsebit.quantize(task.model, task.calibration[:1], config("virtual", "mse", 8, 8, device))
    wall, cpu = time.perf_counter(), time.process_time()
    settings = with_effort(parse_qconfig(config("virtual", "mse", weight, activation, device)), effort)
    given = {name: getattr(options, name) for name in STEPS if getattr(options, name)}
    steps = [
        {step.name: step.options.to_dict() | {key.upper(): value for key, value in given.get(step.name, {}).items()}}
        for step in settings.ALGORITHMS
    ]
    if options.distill is not None:
        given["distill"] = options.distill
        chosen = {key.upper(): value for key, value in options.distill.items()}
        steps.append({"reconstruct": {"METHOD": "distill", **chosen}})
    qmodel = sparsebit.quantize(task.model, task.calibration, settings.replace("ALGORITHMS", steps))
    if device != "cpu":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    quantized, own = task.evaluate(qmodel)
    assert outputs is not None and own is not None
    return {
        "task": name,
        "bits": bits,
        "images": sum(map(len, task.calibration)),
        **({"first": options.first} if options.first else {}),
        "effort": effort,
        **given,
        "metric": task.metric,
        "float": round(score, 2),
        "quantized": round(quantized, 2),
        "loss": round(score - quantized, 2),
        "sqnr_db": round(sqnr_db(outputs[:2000], own[:2000]), 2),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    main()
