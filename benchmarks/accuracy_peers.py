"""Sparsebit beside Brevitas, AIMET and NNCF: the same float model, calibration data and evaluation.

    python benchmarks/accuracy_peers.py [--cases resnet20-W4A8,...] [--tools sparsebit-good,brevitas-gptq] [--json FILE]
    python benchmarks/accuracy.py --peers [...]      # the same

Each row is a process of its own, so that its peak memory is its own (up to the end of the quantization, with the model,
the data and the tool's code). Seconds do not include imports. All models are simulated in torch. A tool that fails has
a row with the reason.

`SPARSEBIT_PEERS` names a folder with one folder per package (brevitas, aimet_torch, nncf), each made by `pip install
--no-deps --target`: packages that want other versions of the same dependency stay apart. Without it they come from the
environment. NNCF compiles an extension at its first call; where that was killed, a file `lock` is left in
`~/.cache/torch_extensions`, and every later call waits for it: delete it, or name another `TORCH_EXTENSIONS_DIR`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accuracy_tools import TOOLS, Case
from common import emit, sqnr_db
from models import TASKS, Task, top1, torchvision_shim

ROUNDING = (
    *("sparsebit-fast", "sparsebit-good", "brevitas", "brevitas-gptq", "brevitas-layerwise"),
    *("brevitas-gpfq", "brevitas-qronos", "aimet-adaround"),
)
COMPARED: dict[str, tuple[Case, tuple[str, ...]]] = {
    "resnet20-W4A8": (Case("resnet20", 4, 8), ROUNDING),
    "resnet20-W4A4": (Case("resnet20", 4, 4), ROUNDING),
    "resnet20-W8A8": (Case("resnet20", 8, 8), ("sparsebit-fast", "brevitas", "aimet-cle", "nncf")),
    "mobilenetv2-W8A8-per-tensor": (
        Case("mobilenetv2", 8, 8, "per-tensor"),
        ("sparsebit", "sparsebit-equalize", "brevitas", "aimet", "aimet-cle"),
    ),
    "efficientnet_lite0-W4A8": (
        Case("efficientnet_lite0", 4, 8),
        ("sparsebit-fast", "sparsebit-good", "brevitas-gptq", "brevitas-qronos"),
    ),
    "minilm-W8A8": (Case("minilm", 8, 8), ("sparsebit-encoder", "sparsebit-smooth", "nncf")),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(COMPARED))
    parser.add_argument("--tools", default="", help="only these")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", nargs=3, metavar=("CASE", "TOOL", "FLOAT"), help="one row, in this process")
    options = parser.parse_args(arguments)
    if options.row:
        print(json.dumps(row(*options.row)))
        return
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            reference = f"{folder}/float.pt"
            in_own_process(case, "float", reference)
            for tool in COMPARED[case][1]:
                if not options.tools or tool in options.tools.split(","):
                    emit({"benchmark": "accuracy_peers", **in_own_process(case, tool, reference)}, options.json)


def in_own_process(case: str, tool: str, reference: str) -> dict[str, Any]:
    """What `row` gives in a process that finds the tool's package; where it fails, the last line of its error."""
    command = [sys.executable, "-W", "ignore", __file__, "--row", case, tool, reference]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(TOOLS[tool].package))
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    return {**subject(case, tool), "failed": done.stderr.strip().splitlines()[-1]}


def environment(package: str) -> dict[str, str]:
    found = {"NNCF_EXTENSION_LOAD_TIMEOUT": "0", **os.environ}  # NNCF compiles at its first call: minutes if busy
    folder = Path(found.get("SPARSEBIT_PEERS", "")) / package
    if "SPARSEBIT_PEERS" in found and folder.is_dir():
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (found.get("PYTHONPATH"), str(folder.resolve()))))
    return found


def subject(case: str, tool: str) -> dict[str, Any]:
    what, used = COMPARED[case][0], TOOLS[tool]
    return {
        "task": what.task,
        "bits": what.bits,
        "weights": what.weights,
        "tool": tool,
        "settings": used.settings,
    }


def row(case: str, tool: str, reference: str) -> dict[str, Any]:
    """One row; the tool "float" evaluates the float model and writes what the others compare with to `reference`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torchvision_shim.install()  # AIMET imports torchvision
    what, used = COMPARED[case][0], TOOLS[tool]
    for module in used.modules:
        importlib.import_module(module)
    task = TASKS[what.task]()
    if tool == "float":
        torch.save(task.evaluate(task.model), reference)
        return subject(case, tool)
    wall, cpu = time.perf_counter(), time.process_time()
    quantized = used.quantize(task, what)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {
        **subject(case, tool),
        "version": importlib.metadata.version(used.package.replace("_", "-")),
        **compare(task, torch.load(reference), task.evaluate(quantized)),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_mib": peak,
    }


Evaluated = tuple[float, torch.Tensor | None]


def compare(task: Task, reference: Evaluated, quantized: Evaluated) -> dict[str, Any]:
    """Scores and their difference; SQNR of the outputs; agreement (on 2,000 images) or cosine."""
    (score, outputs), (own, found) = reference, quantized
    record: dict[str, Any] = {
        "metric": task.metric,
        "float": round(score, 4),
        "quantized": round(own, 4),
        "loss": round(score - own, 4),
    }
    if outputs is None or found is None:
        return record
    if task.labels is not None:
        outputs, found = outputs[:2000], found[:2000]
        record["agreement"] = round(100 * float((found.argmax(1) == outputs.argmax(1)).float().mean()), 2)
        record["top1_first_2000"] = round(top1(found, task.labels[:2000]), 2)
    else:
        cosines = torch.nn.functional.cosine_similarity(outputs, found)
        record |= {"cosine": round(float(cosines.mean()), 5), "cosine_min": round(float(cosines.min()), 5)}
    record["sqnr_db"] = round(sqnr_db(outputs, found), 2)
    return record


if __name__ == "__main__":
    main()
