"""One call under a goal, beside the accuracy control of NNCF and the autotune of Neural Compressor.

    python benchmarks/compress.py [--tasks resnet20,...] [--tools sparsebit,...] [--minutes 15] [--json FILE]

Every tool gets the same model, calibration samples, samples to select by, 0.5 points of loss and minutes, in a process
of its own; one that takes longer than 1.5 times the minutes is stopped. What comes out is judged on samples that no
tool has seen, against the float model on the same samples. The files of a task are then timed in turns, one sample and
one thread. `sparsebit bytes` has a budget of 0.12 of the float file's bytes instead, beside 4 bits everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import emit


def main(arguments: list[str] | None = None) -> None:
    from compress_cases import CASES
    from compress_tools import MAX_LOSS, TOOLS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(CASES))
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--at-once", type=int, default=1, help="how many tools run side by side; each wants a core")
    parser.add_argument("--folder", type=Path, help="where the files stay; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the table of such a file, and nothing else")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "TOOL", "FOLDER"), help="one row, in this process")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(options.summary))
        return
    if options.one:
        task, tool, folder = options.one
        print(json.dumps(row(task, tool, Path(folder), options.minutes)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for task in options.tasks.split(","):
            folder = (options.folder or Path(temporary)) / task
            with ThreadPoolExecutor(options.at_once) as pool:
                run = partial(_in_own_process, task, folder=folder, minutes=options.minutes)
                rows = list(pool.map(run, options.tools.split(",")))
            times = timed(task, {one["tool"]: one["file"] for one in rows if one.get("file")})
            for one in rows:
                file = one.pop("file", None)
                size = Path(file).stat().st_size if file else None
                emit(
                    {
                        "benchmark": "compress",
                        "task": task,
                        "max_loss": MAX_LOSS,
                        "minutes": options.minutes,
                        **one,
                        "latency": times.get(one["tool"]),
                        "bytes": size,
                        "bytes_ratio": size and round(size / times["float bytes"], 4),
                    },
                    options.json,
                )


def summary(file: Path) -> str:
    """A Markdown table; the last row of a task and a tool counts."""
    rows = {(row["task"], row["tool"]): row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    lines = ["| task | tool | loss on unseen samples | time | bytes | took |", "|---|---|---|---|---|---|"]
    for (task, tool), row in rows.items():
        judged = row.get("unseen")
        bound = f" ± {judged['bound']:.2f}" if judged and judged["bound"] is not None else ""
        loss = row.get("fault") or (f"{judged['loss']:.2f}{bound}" if judged else row["says"])
        numbers = ["" if row.get(name) is None else f"{row[name]:.3f}" for name in ("latency", "bytes_ratio")]
        lines.append(f"| {task} | {tool} | {loss} | {' | '.join(numbers)} | {row['seconds']} s |")
    return "\n".join(lines)


def _in_own_process(task: str, tool: str, folder: Path, minutes: float) -> dict[str, Any]:
    place = folder / tool.replace(" ", "-")
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--one", task, tool, str(place), "--minutes", str(minutes)]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90 * minutes, check=False)
    except subprocess.TimeoutExpired:
        return {
            "tool": tool,
            "seconds": round(time.monotonic() - start),
            "fault": f"no result in {1.5 * minutes:g} min",
        }
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return {"tool": tool, "seconds": round(time.monotonic() - start), "fault": lines[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(task: str, tool: str, folder: Path, minutes: float) -> dict[str, Any]:
    """What the tool made, judged on the samples that it has not seen."""
    import torch
    from compress_cases import CASES
    from compress_tools import MAX_LOSS, TOOLS, measured

    from sparsebit.compress.judging.judges import judge_of
    from sparsebit.compress.judging.runtime_model import RuntimeModel
    from sparsebit.compress.networks.bench import example_of

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    case = CASES[task]()
    start = time.monotonic()
    made = TOOLS[tool](case, folder, minutes)
    found = {"tool": tool, "seconds": round(time.monotonic() - start), "says": made.says}
    if made.file is None and made.module is None:
        return found
    outputs = example_of(case.model, case.calibration).outputs
    model = made.module if made.file is None else RuntimeModel(made.file, "onnxruntime", case.model, outputs)
    judged = judge_of(measured(case), case.model, [], case.unseen).conclude(model, MAX_LOSS)
    return {**found, "unseen": asdict(judged), "file": None if made.file is None else str(made.file)}


def timed(task: str, files: dict[str, str]) -> dict[str, float]:
    """The time of each file over that of the float file, and `float bytes`."""
    from compress_cases import CASES
    from compress_tools import write_float

    from sparsebit.compress.climbing.goal import read_goal
    from sparsebit.compress.networks.bench import example_of, stopwatch_for

    case = CASES[task]()
    example = example_of(case.model, case.calibration)
    goal = read_goal("onnxruntime", "", max_loss=1.0, budget=None, prefer=None, minutes=1.0)
    stopwatch = stopwatch_for(goal, example, case.model)
    assert stopwatch is not None
    with tempfile.TemporaryDirectory() as folder:
        floating = Path(folder) / "float.onnx"
        write_float(case, floating)
        read = {"float": floating.read_bytes(), **{tool: Path(file).read_bytes() for tool, file in files.items()}}
    ratios = stopwatch.ratios(read, 20.0)
    return {"float bytes": len(read["float"]), **{tool: round(ratios[tool].ratio, 4) for tool in files}}


if __name__ == "__main__":
    main()
