"""Writes the tables of docs/benchmarks/*.md out of benchmarks/results/*.jsonl: these figures are never typed by hand.

`python scripts/benchmark_tables.py` writes the pages; `--check` writes nothing and fails if a page is out of step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from marked_sections import table, update
from placement_tables import placement_limits

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
Sections = dict[str, tuple[Callable[[list[Record]], str], Record]]

# What a record is about: of several with the same, the last one counts.
SUBJECT = (
    "benchmark",
    "what",
    "task",
    "model",
    "tool",
    "step",
    "runtime",
    "case",
    "backend",
    "observer",
    "bits",
    "config",
    "images",
    "way",
    "device",
    "work",
    "granularity",
    "layout",
    "dtype",
    "shape",
    "recipe",
    "size",
)
CPUS = {"x86_64": "x86", "aarch64": "Arm"}
PACKAGES = ("onnxruntime", "openvino", "torch", "onnx", "onnxscript", "nncf")


def read(folder: Path) -> list[Record]:
    """The records of every file, in the order of first appearance, each with its newest figures."""
    latest: dict[tuple[Any, ...], Record] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                machine = record.get("hardware", {}).get("machine") if record.get("benchmark") == "deploy" else None
                latest[(machine, *(_hashable(record.get(key)) for key in SUBJECT))] = record
            except (json.JSONDecodeError, AttributeError) as error:
                raise SystemExit(f"{file}:{number} is not a JSON object: {error}") from None
    return list(latest.values())


def _hashable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value


def accuracy(records: list[Record]) -> str:
    head = ("model", "bits", "backend", "observer", "metric", "float", "quantized", "loss", "same answer", "SQNR")
    rows = [
        (
            _config_name(record),
            record["bits"],
            record["backend"],
            record["observer"],
            record["metric"],
            *(_score(record[key], record["metric"]) for key in ("float", "quantized", "loss")),
            _number(record.get("agreement"), ".1f", " %"),
            _number(record.get("sqnr_db"), ".1f", " dB"),
        )
        for record in records
    ]
    return table(head, rows, numeric=5)


def accuracy_peers(records: list[Record]) -> str:
    head = (
        *("model", "bits", "tool", "settings", "metric", "float", "quantized", "loss"),
        *("SQNR", "same answer or cosine", "CPU time", "peak memory"),
    )
    rows = [
        (
            f"{record['task']}, weights per tensor" if record["weights"] == "per-tensor" else record["task"],
            record["bits"],
            record["tool"].partition("-")[0],
            record["settings"],
            *_compared(record),
        )
        for record in _by_case(records)
    ]
    return table(head, rows, numeric=7)


def _by_case(records: list[Record]) -> list[Record]:
    """The tools of one model at the same bits one after the other; cases and tools in the order they are found."""
    cases: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        cases.setdefault((record["task"], record["weights"], record["bits"]), []).append(record)
    return [record for rows in cases.values() for record in rows]


def _compared(record: Record) -> tuple[str, ...]:
    if "failed" in record:
        return (f"**fails**: {_code(record['failed'])}", *[""] * 7)
    likeness = _number(record.get("agreement"), ".1f", " %") or _number(record.get("cosine"), ".4f")
    return (
        record["metric"],
        *(_score(record[key], record["metric"]) for key in ("float", "quantized", "loss")),
        _number(record.get("sqnr_db"), ".1f", " dB"),
        likeness,
        _number(record["cpu_seconds"], ".0f", " s"),
        _number(record["peak_mib"], ",.0f", " MiB"),
    )


def calibration_time(records: list[Record]) -> str:
    head = ("observer", "images", "wall time", "CPU time", "plain forwards")
    rows = [
        (
            record["observer"],
            str(record["images"]),
            _number(record["ratio_wall"], ".2f", "x"),
            _number(record["ratio_cpu"], ".2f", "x"),
            _number(record["plain_seconds"], ".1f", " s"),
        )
        for record in records
    ]
    return table(head, rows, numeric=4)


def calibration_memory(records: list[Record]) -> str:
    head = ("observer", "64 images", "1,024 images", "growth")
    rows = [
        (
            record["case"],
            _number(record["mib_64"], ",.0f", " MiB"),
            _number(record["mib_1024"], ",.0f", " MiB"),
            _number(record["growth"], "+.1%"),
        )
        for record in records
    ]
    return table(head, rows, numeric=3)


def calibration_search(records: list[Record]) -> str:
    head = ("model", "images", "observer", "CPU time", "wall time")
    rows = [
        (
            record["model"],
            str(record["images"]),
            record["observer"],
            _number(record["cpu_seconds"], ".1f", " s"),
            _number(record["seconds"], ".1f", " s"),
        )
        for record in records
    ]
    return table(head, rows, numeric=2)


def qat_step(records: list[Record]) -> str:
    head = ("model", "way", "step", "to float", "in a row", "to float", "peak memory", "to float")
    rows = [
        (
            record["model"],
            record["way"].replace("_", " "),
            _number(record.get("step_ms"), ".1f", " ms") or f"**fails**: {_code(record['failed'])}",
            _number(record.get("time_ratio"), ".2f"),
            _number(record.get("in_a_row_ms"), ".1f", " ms"),
            _number(record.get("in_a_row_ratio"), ".2f"),
            _number(record.get("peak_mib"), ",.0f", " MiB"),
            _number(record.get("memory_ratio"), ".2f"),
        )
        for record in records
    ]
    starts = sorted({record["start_us"] for record in records if "start_us" in record})
    told = f"\n\n*Starting a kernel took the host {starts[0]:.1f} to {starts[-1]:.1f} us.*" if starts else ""
    return table(head, rows, numeric=6) + told


def qat_ablation(records: list[Record]) -> str:
    """One line for each saving that was left out alone."""
    head = ("model", "left out", "as a CUDA graph", "time", "eager", "time", "peak memory", "memory")
    found = {(record["model"], record["way"]): record for record in records}
    rows = []
    for (model, way), eager in found.items():
        if way.endswith("_graphed"):
            continue
        graphed = found.get((model, f"{way}_graphed"), {})
        told = {"all": "nothing", "plain": "everything", "compiled_all": "nothing, compiled"}.get(way)
        rows.append(
            (
                model,
                told or way.replace("without_", "").replace("_", " "),
                _number(graphed.get("step_ms"), ".1f", " ms"),
                _number(graphed.get("time_ratio"), ".2f"),
                _number(eager.get("step_ms"), ".1f", " ms"),
                _number(eager.get("time_ratio"), ".2f"),
                _number(eager.get("peak_mib"), ",.0f", " MiB"),
                _number(eager.get("memory_ratio"), ".2f"),
            )
        )
    return table(head, rows, numeric=6)


def qat_summary(records: list[Record]) -> str:
    """Ratios to the float model alone, one line for each model."""
    head = ("model", "eager", "as a CUDA graph", "compiled", "compiled, as a CUDA graph", "memory", "memory, packed")
    found = {(record["model"], record["way"]): record for record in records}
    columns = (
        *((way, "time_ratio") for way in ("", "_graphed", "_compiled", "_compiled_graphed")),
        *((way, "memory_ratio") for way in ("", "_packed")),
    )
    rows = [
        (
            model,
            *(_number(found.get((model, f"sparsebit_bf16{way}"), {}).get(figure), ".2f") for way, figure in columns),
        )
        for model in dict.fromkeys(record["model"] for record in records)
    ]
    return table(head, rows, numeric=6)


def fake_quant_gpu(records: list[Record]) -> str:
    head = ("work", "scales", "layout", "type", "limit", "sparsebit", "torch.compile", "torch's operator")
    rows = [
        (
            record["work"].replace("_", " + ").replace("+ backward + ", "+ backward, "),
            f"per {record['granularity']}",
            record["layout"].replace("_", "-"),
            record["dtype"],
            _number(record["limit_ms"], ".2f", " ms"),
            *(
                _number(next((r[name] for name in names if name in r), None), ".2f")
                for r in (record["ratio_to_limit"],)
                for names in (("sparsebit",), ("torch_compile",), ("torch_op", "torch_learnable"))
            ),
        )
        for record in records
    ]
    return table(head, rows, numeric=4)


def fake_quant_cpu(records: list[Record]) -> str:
    head = ("tensor", "scales", "forward", "forward + backward, STE", "forward + backward, LSQ")
    works = ("forward", "forward_backward_ste", "forward_backward_lsq")
    rows = [
        (
            " x ".join(map(str, record["shape"])),
            f"per {record['granularity']}",
            *(_number(record["ratio_to_torch_op"][work], ".2f") for work in works),
        )
        for record in records
    ]
    return table(head, rows, numeric=3)


def qat_accuracy(records: list[Record]) -> str:
    head = ("recipe", "epochs", "float", "before training", "trained", "in float32", "file", "file size", "time")
    scores = ("float", "before training", "quantized", "in float32", "file")
    rows = [
        (
            record["recipe"],
            str(record["epochs"]),
            *(_number(record["scores"].get(name), ".2f", " %") for name in scores),
            _number(record["file_bytes"] / 1e6, ".2f", " MB"),
            _number(record["seconds"], ".0f", " s"),
        )
        for record in records
    ]
    return table(head, rows, numeric=8)


def zoo(records: list[Record]) -> str:
    head = (
        *("architecture", "captured", "weighted layers quantized", "parameters quantized", "SQNR"),
        *("untraced modules", "unknown ops"),
    )
    total = f"{sum(record['ok'] for record in records)} of {len(records)} architectures are captured.\n\n"
    return total + table(head, map(_architecture, records))


def deploy(records: list[Record]) -> str:
    """Every quantized file in one runtime, against the float file of the same model."""
    head = (
        *("CPU", "model", "tool", "metric", "CPU time, 1 thread", "wall time, 2 threads", "file size"),
        *("loss", "SQNR", "same answer", "parity", "made in"),
    )
    rows = [(CPUS[record["hardware"]["machine"]], *_file(record)) for record in records if _is_compared(record)]
    return table(head, sorted(rows, key=lambda row: row[0], reverse=True), numeric=8)


def zoo_export(records: list[Record]) -> str:
    """How many pass, then only those that do not, and those that torch itself does not export."""
    passed = [record for record in records if record["ok"]]
    exact = sum(bool(record.get("exact")) for record in passed)
    total = f"{len(passed)} of {len(records)} architectures export, load in ONNX Runtime and pass the parity gate"
    refused = sum(bool(record.get("refused")) for record in records)
    lines = [f"{total}; bit-exact: {exact}." + (f" Refused with a reason: {refused}." if refused else "")]
    failed = [record for record in records if not record["ok"]]
    if failed:
        rows = [
            (record["model"], _code(record.get("error", "")), "yes" if record["float_exports"] else "no")
            for record in failed
        ]
        lines.append(table(("architecture", "why it does not", "torch exports the float model"), rows))
    unexported = [record for record in passed if not record["float_exports"]]
    if unexported:
        lines.append("Quantized they export, though torch does not export the float model:")
        rows = [(record["model"], _code(record.get("float_error", ""))) for record in unexported]
        lines.append(table(("architecture", "what torch says"), rows))
    return "\n\n".join(lines)


def sparse_zoo(records: list[Record]) -> str:
    """How many shrink, and Torch-Pruning beside them; then those that do not, with the first reason."""
    ran = [record for record in records if "error" not in record]
    equal = sum(min(record["difference"], record["difference_float64"]) <= 1e-5 for record in ran)
    peers = [record["torch_pruning"] for record in ran if record["torch_pruning"]["ran"]]
    num_ok, num_less = sum(record["ok"] for record in records), sum(peer["macs_left"] <= 0.8 for peer in peers)
    first = f"{num_ok} of {len(records)} architectures lose a fifth of their MACs or more and equal their masked selves"
    second = f"of the {len(ran)} that ran to the end, {equal} are equal"
    third = f"Torch-Pruning: {len(peers)} still run, {num_less} of them with a fifth of the MACs gone"
    lines = [f"{first}; {second}. {third}."]
    rows = [
        (
            record["model"],
            "" if "error" in record else f"{record['macs_left']:.2f}",
            _code(record["error"] if "error" in record else next(iter(record["spared"]), "")),
        )
        for record in records
        if not record["ok"]
    ]
    if rows:
        lines.append(table(("architecture", "MACs left", "what most axes are spared for"), rows))
    return "\n\n".join(lines)


def onnx_in(records: list[Record]) -> str:
    """How many load, how near they are to ONNX Runtime and how many layers keep their names; then those that do not."""
    passed = [record for record in records if record["ok"] and record["difference"] <= 1e-4]
    layers, same = (sum(record[key] for record in passed) for key in ("layers", "same_names"))
    largest = max((record["difference"] for record in passed), default=0.0)
    total = f"{len(passed)} of {len(records)} architectures load; the largest difference is {largest:.0e}. {same:,} of "
    total += f"{layers:,} convolutions, linear layers and embeddings have their PyTorch names."
    failed = [(record["model"], _code(record.get("error", ""))) for record in records if record not in passed]
    return "\n\n".join([total, table(("architecture", "why it does not"), failed)] if failed else [total])


def onnx_in_opsets(records: list[Record]) -> str:
    """Per model and opset: the difference of the loaded module, and how many layers keep their names."""
    rows = [
        (
            record["model"],
            record["step"].removeprefix("load "),
            _number(record.get("difference"), ".0e"),
            f"{record['same_names']} of {record['layers']}" if record["ok"] else _code(record["error"]),
        )
        for record in records
        if record["step"].startswith("load ")
    ]
    return table(("model", "opset", "largest difference", "layers with their PyTorch names"), rows, numeric=2)


def onnx_in_files(records: list[Record]) -> str:
    """The int8 files of each model: accuracy, and CPU time against the float file."""
    times = {(record["model"], record["step"].removeprefix("time ")): record for record in records}
    names = {"pytorch": "Sparsebit, from PyTorch", "onnxruntime": "onnxruntime.quantization", "nncf": "NNCF"}
    names |= {f"opset {opset}": f"Sparsebit, from the file of opset {opset}" for opset in (11, 13, 17, 21)}
    names |= {"nncf tuned": "NNCF, set for ONNX Runtime", "aimet-onnx": "AIMET-ONNX"}
    rows = [
        (
            record["model"],
            names[record["step"]],
            *(
                (_number(record.get("loss"), ".2f"), _number(record["sqnr_db"], ".1f", " dB"))
                if record["ok"]
                else (_code(record["error"]), "")
            ),
            _number(times.get((record["model"], record["step"]), {}).get("cpu_ratio"), ".2f"),
        )
        for record in records
        if record["step"] in names
    ]
    return table(("model", "file of", "loss", "SQNR", "CPU time, 1 thread"), rows, numeric=2)


SECTIONS: Sections = {
    "accuracy": (accuracy, {"benchmark": "accuracy"}),
    "accuracy peers": (accuracy_peers, {"benchmark": "accuracy_peers"}),
    "calibration time": (calibration_time, {"benchmark": "calibration", "what": "time"}),
    "calibration memory": (calibration_memory, {"benchmark": "calibration", "what": "memory"}),
    "calibration search": (calibration_search, {"benchmark": "calibration", "what": "search"}),
    "deploy onnxruntime": (deploy, {"benchmark": "deploy", "runtime": "onnxruntime"}),
    "deploy openvino": (deploy, {"benchmark": "deploy", "runtime": "openvino"}),
    "qat summary": (qat_summary, {"benchmark": "qat_step"}),
    "qat step": (qat_step, {"benchmark": "qat_step"}),
    "qat ablation": (qat_ablation, {"benchmark": "qat_ablation"}),
    "qat accuracy": (qat_accuracy, {"benchmark": "qat_accuracy"}),
    "fake quant gpu": (fake_quant_gpu, {"benchmark": "fake_quant", "device": "cuda"}),
    "fake quant cpu": (fake_quant_cpu, {"benchmark": "fake_quant", "device": "cpu"}),
    "onnx in": (onnx_in, {"benchmark": "onnx_in"}),
    "onnx in opsets": (onnx_in_opsets, {"benchmark": "onnx_in_opsets"}),
    "onnx in files": (onnx_in_files, {"benchmark": "onnx_in_opsets"}),
    "zoo": (zoo, {"benchmark": "zoo"}),
    "zoo export": (zoo_export, {"benchmark": "zoo_export"}),
    "sparse zoo": (sparse_zoo, {"benchmark": "sparse"}),
    "placement limits": (placement_limits, {"benchmark": "placement_limits"}),
}


# The sections of each page, `docs/benchmarks/NAME.md`.
PAGES: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy", "accuracy peers"),
    "architectures": ("zoo", "zoo export", "sparse zoo"),
    "calibration": ("calibration time", "calibration memory", "calibration search"),
    "files": ("deploy onnxruntime", "deploy openvino"),
    "onnx-input": ("onnx in", "onnx in opsets", "onnx in files"),
    "placement": ("placement limits",),
    "training": ("qat summary", "qat accuracy", "qat step", "qat ablation", "fake quant gpu", "fake quant cpu"),
}


def render(records: list[Record], names: Iterable[str]) -> dict[str, str]:
    """The named sections: each a table and where it was measured, or that nothing was."""
    sections = {}
    for name in names:
        write, wanted = SECTIONS[name]
        chosen = [record for record in records if wanted.items() <= record.items()]
        sections[name] = f"{write(chosen)}\n\n{_provenance(chosen)}" if chosen else "*Not measured yet.*"
    return sections


def _architecture(record: Record) -> tuple[str, ...]:
    if "error" in record:
        return record["model"], f"**no**: {record['error'].splitlines()[0]}", "", "", "", "", ""
    return (
        record["model"],
        _captured(record),
        record["weighted_quantized"],
        _number(record.get("parameters_quantized"), ".1f", " %"),
        _number(record["sqnr_db"], ".1f", " dB"),
        str(len(record["untraced"])),
        ", ".join(f"`{op.removeprefix('unknown op ')}`" for op in record["unknown_ops"]),
    )


def _captured(record: Record) -> str:
    if record["ok"]:
        return "yes"
    if record["sqnr_db"] is None:
        return "**no**: quantized outputs are not finite"
    return f"**no**: float differs by {record['float_difference']:.1e}"


def _is_compared(record: Record) -> bool:
    """Not the float file itself, nor one that Sparsebit wrote for another runtime."""
    tool = record["tool"]
    return tool != "float" and (not tool.startswith("sparsebit-") or tool == f"sparsebit-{record['runtime']}")


def _file(record: Record) -> tuple[str, ...]:
    name = record["tool"].partition("-")[0] if record["tool"].startswith("sparsebit-") else record["tool"]
    if "error" in record:
        return record["model"], name, f"**fails**: {_code(record['error'])}", *[""] * 8
    metric = record.get("metric", "")
    is_cosine = metric == "cosine"  # to the float embeddings: the figure itself is the loss
    loss = 1 - record["quantized"] if is_cosine else record.get("loss")
    return (
        record["model"],
        name,
        metric,
        _number(record.get("cpu_ratio_1"), ".2f"),
        "" if 2 in record.get("disturbed", ()) else _number(record.get("wall_ratio_2"), ".2f"),
        _number(record.get("size_ratio"), ".2f"),
        "" if loss is None else _score(loss, metric),
        _number(record.get("sqnr_db"), ".1f", " dB"),
        _number(record.get("agreement"), ".1f", " %"),
        _parity(record.get("parity_max")),
        _number(record.get("seconds"), ".0f", " s"),
    )


def _parity(largest: float | None) -> str:
    return "exact" if largest == 0 else _number(largest, ".0e")


def _provenance(records: Iterable[Record]) -> str:
    """When and on what the figures were measured, and where the files were made; once where all are alike."""
    records = list(records)
    measured: dict[str, set[str]] = {}
    made: dict[str, set[str]] = {}
    for record in records:
        measured.setdefault(_machine(record["hardware"]), set()).add(record["date"])
        if "made" in record:
            made.setdefault(_maker(record["made"]), set()).add(record["made"]["date"])
    lines = [f"*Measured {_when(dates)} on {machine}.*" for machine, dates in measured.items()]
    trained = {(_machine(record["trained_on"]), record["date"]) for record in records if "trained_on" in record}
    lines += [f"*Trained {date} on {machine}.*" for machine, date in sorted(trained)]
    lines += [f"*Files made {_when(dates)} on {machine}.*" for machine, dates in made.items()]
    return "\n".join(lines)


def _machine(hardware: Record) -> str:
    parts = [hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"]
    if hardware.get("flags"):
        parts[0] += f" ({', '.join(hardware['flags'])})"
    return ", ".join([*parts, *_versions(hardware)])


def _maker(made: Record) -> str:
    return ", ".join([made["machine"], *_versions(made)])


def _versions(record: Record) -> list[str]:
    """`torch 2.13.0`, …: of the packages that were there."""
    return [f"{package} {record[package]}" for package in PACKAGES if record.get(package)]


def _when(dates: set[str]) -> str:
    return min(dates) if len(dates) == 1 else f"{min(dates)} to {max(dates)}"


def _code(text: str) -> str:
    """The first line, as it was said."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"`{line.replace('`', chr(39))}`" if line else ""


def _config_name(record: Record) -> str:
    return f"{record['task']} ({record['config']})" if record.get("config") else str(record["task"])


def _score(value: float, metric: str) -> str:
    return _number(value, ".2f" if metric == "top1" else ".4f")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--pages", type=Path, default=ROOT / "docs" / "benchmarks", help="the folder of the pages")
    options = parser.parse_args()
    records = read(options.results)
    codes = [
        update(options.pages / f"{page}.md", render(records, names), check=options.check)
        for page, names in PAGES.items()
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
