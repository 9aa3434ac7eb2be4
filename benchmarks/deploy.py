"""Quantized ONNX files of Sparsebit and its peers: speed against float, size, accuracy, parity with the simulation.

    python benchmarks/deploy.py                                   # both steps, every model whose data is here
    python benchmarks/deploy.py make --models resnet18,minilm --folder DIR [--tools sparsebit,ort_static,nncf]
    python benchmarks/deploy.py time --folder DIR --runtime onnxruntime [--threads 1,2] [--results FILE]

`make` needs torch and the tools. `time` needs numpy and the runtime, so that files made here can be timed elsewhere:
all files of a model are open side by side and take turns; batch 1. Prints one JSON line per model, tool and runtime.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # where files are timed, nothing is installed
MODELS = ("resnet18", "resnet50", "mobilenetv2", "efficientnet_lite0", "deit_tiny", "minilm", "yolov5n", "resnet20")
RUNTIMES = ("onnxruntime", "openvino")
NUM_CHECKED, LARGEST_CHECK = 8, 1 << 23  # samples, and bytes, of expected outputs that travel with a file
# What decides how fast, and on x86 how exactly, 8-bit products are summed.
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "amx_tile", "asimddp", "i8mm", "sve")

Feeds = Mapping[str, np.ndarray]
Run = Callable[[], Any]


# --- make: the files of a model, their accuracy and parity


def make(name: str, folder: Path, tools: Iterable[str]) -> None:
    """Write into `folder`: float.onnx, a file per tool, the outputs expected of each, an input, manifest.json."""
    from deploy_models import CASES
    from deploy_peers import TOOLS, export_float, fits

    note(f"{name}: model and data")
    case = CASES[name]()
    folder.mkdir(parents=True, exist_ok=True)
    first = case.evaluation[:NUM_CHECKED]
    np.savez_compressed(folder / "inputs.npz", **{key: np.concatenate([s[key] for s in first]) for key in first[0]})
    reference: list[np.ndarray] = []

    def work(tool: str) -> dict[str, Any]:
        start = time.perf_counter()
        found = {"float": export_float, **TOOLS}[tool](case, folder / "float.onnx", folder / f"{tool}.onnx")
        found["seconds"] = round(time.perf_counter() - start, 1)
        outputs = _outputs(folder / f"{tool}.onnx", case.evaluation)
        if tool == "float":
            reference.extend(outputs)
        return _figures(case, folder / tool, found, outputs, reference)

    for tool in ("float", *(tool for tool in tools if fits(tool, case))):
        record = _attempt(partial(work, tool), f"{name}: {tool}")
        _write_manifest(folder, {tool: record})
        if "error" in record:
            (folder / f"{tool}.onnx").unlink(missing_ok=True)
            if tool == "float":
                break


def _figures(
    case: Any, stem: Path, found: dict[str, Any], outputs: list[np.ndarray], reference: list[np.ndarray]
) -> dict[str, Any]:
    """Size, accuracy against the float file and, where the tool simulates, parity."""
    from deploy_models import parity, sqnr_db

    simulate = found.pop("simulate", None)
    expected = simulate() if simulate is not None else outputs
    np.save(stem.with_name(f"{stem.name}.npy"), np.concatenate(expected[: _num_checked(expected[0])]))
    size, floating_size = (stem.with_name(f"{name}.onnx").stat().st_size for name in (stem.name, "float"))
    record = found | {"bytes": size, "size_ratio": size / floating_size, "num_evaluated": len(outputs)}
    record |= case.judge(outputs, reference)
    if stem.name != "float":
        record.setdefault("sqnr_db", sqnr_db(reference, outputs))
    if simulate is not None:  # a file keeps its promise in the runtime that it is for
        if (runtime := found.get("parity_runtime", "onnxruntime")) != "onnxruntime":
            # A few are enough: on Arm, OpenVINO takes seconds for an integer convolution net.
            outputs = _outputs(stem.with_name(f"{stem.name}.onnx"), case.evaluation[:NUM_CHECKED], runtime)
        record |= parity(expected[: len(outputs)], outputs)
    return {key: _rounded(value) for key, value in record.items()}


def _outputs(file: Path, samples: list[Feeds], runtime: str = "onnxruntime") -> list[np.ndarray]:
    session = open_session(file, runtime, threads=os.cpu_count() or 1)
    return [session(sample)[0].copy() for sample in samples]  # OpenVINO writes the next one into the same memory


def _num_checked(output: np.ndarray) -> int:
    return max(1, min(NUM_CHECKED, LARGEST_CHECK // output.nbytes))


def _attempt(work: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
    """The record of a tool that worked, or of how it failed."""
    note(what)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for JSON lines
            record = work()
    except Exception as failure:  # a failure is a result here
        record = {"error": _short(failure), "where": traceback.format_exc()[-600:]}
    gc.collect()
    note(f"{what}: {json.dumps(record)}")
    return record


def _write_manifest(folder: Path, fresh: dict[str, dict[str, Any]]) -> None:
    """Tools of an earlier run stay in the manifest, as their files stay in the folder."""
    file = folder / "manifest.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    stamp = {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), **_versions()}
    file.write_text(json.dumps(known | {tool: r | {"made": stamp} for tool, r in fresh.items()}, indent=1) + "\n")


# --- time: the files of a model, side by side


def measure(folder: Path, runtime: str, threads: list[int], budget: float, results: Path | None) -> None:
    """One JSON line per file of `folder`: its time over the float file's, with each number of threads.

    `difference`: of the outputs here to those expected when the file was made, over their range.
    """
    from sparsebit.deploy.sessions.timing import interleaved  # needs nothing but Python

    records = json.loads((folder / "manifest.json").read_text())
    inputs = dict(np.load(folder / "inputs.npz"))
    samples = [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(NUM_CHECKED)]
    for count in threads:
        runs: dict[str, Run] = {}
        for tool, record in records.items():
            if "error" not in record:
                note(f"{folder.name}: {runtime}, {count} threads: opening {tool}")
                record |= _opened(folder / tool, runtime, count, samples, runs)
        if "float" not in runs:
            continue
        idle = _idle_percent()
        for tool, latency in interleaved(runs, budget_s=budget).items():
            figures = latency.to_dict()
            records[tool] |= {f"{key}_{count}": _rounded(value) for key, value in figures.items()}
            records[tool] |= {f"idle_percent_{count}": idle}
        runs.clear()
        gc.collect()
    alone, *_ = [records["float"].get(f"wall_ms_{count}") for count in threads]
    for tool, record in records.items():
        record.pop("where", None)
        # More threads and yet no gain: others had the cores, and the ratios say nothing (0.06 was seen).
        slow = [n for n in threads[1:] if alone and records["float"][f"wall_ms_{n}"] > 0.95 * alone]
        record |= {"disturbed": slow} if slow else {}
        emit({"benchmark": "deploy", "model": folder.name, "tool": tool, "runtime": runtime, **record}, results)


def _opened(stem: Path, runtime: str, threads: int, samples: list[Feeds], runs: dict[str, Run]) -> dict[str, Any]:
    """Put a file among the runs. A file that the runtime refuses is a result."""
    try:
        session = open_session(stem.with_name(f"{stem.name}.onnx"), runtime, threads=threads)
        expected = np.load(stem.with_name(f"{stem.name}.npy"))
        found = np.concatenate([session(sample)[0].copy() for sample in samples[: len(expected)]])
    except Exception as failure:
        return {"error": _short(failure)}
    runs[stem.name] = lambda: session(samples[0])
    return {"difference": _rounded(float(np.abs(found - expected).max()) / float(np.ptp(expected)))}


def _idle_percent(seconds: float = 1.0) -> int | None:
    """How much of the machine nobody uses, before the timing starts."""
    file = Path("/proc/stat")
    if not file.is_file():
        return None
    before = [int(word) for word in file.read_text().splitlines()[0].split()[1:]]
    time.sleep(seconds)
    after = [int(word) for word in file.read_text().splitlines()[0].split()[1:]]
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return round(100 * (spent[3] + spent[4]) / max(1, sum(spent)))  # idle, waiting for a disk


def open_session(file: Path, runtime: str, *, threads: int) -> Callable[[Feeds], list[np.ndarray]]:
    """A file ready to run. Inputs go by name where the file has the name, otherwise by order."""
    names: list[str]
    if runtime == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        # Or the threads of the file before go on spinning, and two threads seem slower than one.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        return lambda feeds: session.run(None, _named(feeds, names))
    import openvino

    # float32 is float32: on some CPUs the plugin would compute the float file in 16 bits.
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(str(file), "CPU", settings)
    request = compiled.create_infer_request()
    names = [port.get_any_name() for port in compiled.inputs]
    return lambda feeds: list(request.infer(_named(feeds, names), share_inputs=True).values())


def _named(feeds: Feeds, names: list[str]) -> dict[str, np.ndarray]:
    if set(names) == set(feeds):
        return dict(feeds)
    return dict(zip(names, feeds.values(), strict=True))


# --- records


def emit(record: dict[str, Any], file: Path | None = None) -> None:
    """As in common.py, which needs torch."""
    line = json.dumps({"date": time.strftime("%Y-%m-%d"), **record, "hardware": hardware()})
    print(line, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as handle:
            handle.write(line + "\n")


def hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    words = set(info.split())
    name = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    if not name and shutil.which("lscpu"):  # Arm: the kernel gives numbers, lscpu their names
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("Model name")), "")
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in words],
        "gpu": None,
        **_versions(),
    }


def _versions() -> dict[str, str | None]:
    """Of the packages that matter; importing none."""
    installed = {package.name: package.version for package in metadata.distributions()}
    return {name: installed.get(name) for name in ("torch", "onnx", "onnxscript", *RUNTIMES, "nncf")}


def _rounded(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _short(failure: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(failure)).strip().splitlines()
    return " ".join(lines[:3])[:400]


def note(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


# --- command line


def _models(options: argparse.Namespace) -> list[str]:
    names = options.models.split(",")
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        sys.exit(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    return names


@contextlib.contextmanager
def _reported(name: str) -> Iterator[None]:
    """A model whose weights, data or package are not here is left out."""
    try:
        yield
    except (Exception, SystemExit) as failure:
        note(f"{name}: left out: {_short(failure)}")


def _make(options: argparse.Namespace) -> None:
    from deploy_peers import GROUPS, TOOLS

    wanted = [tool for word in options.tools.split(",") for tool in GROUPS.get(word, (word,))]
    unknown = sorted(set(wanted) - set(TOOLS))
    if unknown:
        sys.exit(f"no such tool: {', '.join(unknown)}; there are {', '.join([*GROUPS, *TOOLS])}")
    for name in _models(options):
        with _reported(name):
            make(name, options.folder / name, dict.fromkeys(wanted))


def _time(options: argparse.Namespace) -> None:
    threads = [int(word) for word in options.threads.split(",")]
    for name in _models(options):
        if not (options.folder / name / "manifest.json").is_file():
            note(f"{name}: no files in {options.folder}")
            continue
        for runtime in options.runtime.split(","):
            measure(options.folder / name, runtime, threads, options.budget, options.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=("make", "time", "both"), default="both")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "deploy", help="a folder per model is in it")
    parser.add_argument("--tools", "--only", default="sparsebit,peers", help="groups or variants, for `make`")
    parser.add_argument("--runtime", default=",".join(RUNTIMES), help="one or both, for `time`")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--budget", type=float, default=20, help="seconds of timing per model, runtime, thread count")
    parser.add_argument("--results", type=Path, help="append the lines to this file")
    options = parser.parse_args()
    if options.step in ("make", "both"):
        _make(options)
    if options.step in ("time", "both"):
        _time(options)


if __name__ == "__main__":
    main()
