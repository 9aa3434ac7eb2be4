"""Draws docs/assets/results.svg, the picture of the README and of the site, from benchmarks/results/*.jsonl.

`python scripts/results_picture.py` writes it; with `--check` it writes nothing and fails where the picture is out of
step. `figures` has the numbers of the README's table of results, which a test compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmark_tables import Record, read

ROOT = Path(__file__).resolve().parent.parent

WIDTH, LABEL, BAR = 540, 222, 176  # of the picture, of the names on the left, and of the longest bar
OURS, THEIRS, FLOAT = "#4f5bd5", "#a3a9b5", "#d3d7df"
STYLE = """
  text { font: 15px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 17px }
  .small { font-size: 13px; fill: #57606a }
  .card { fill: #f6f8fa }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .card { fill: #161b22 }
    .float { fill: #4b535d }
    .theirs { fill: #7d8590 }
    .ours { fill: #8c96ff }
  }
"""


class Bar(NamedTuple):
    name: str
    value: float
    text: str
    kind: str


class Panel(NamedTuple):
    title: str
    subtitle: str
    bars: tuple[Bar, ...]


class Results:
    """The newest record of each subject, found by what it is about."""

    def __init__(self, folder: Path) -> None:
        self.records = read(folder)

    def one(self, **subject: str) -> Record:
        """The only record with these entries."""
        found = [r for r in self.records if all(r.get(key) == value for key, value in subject.items())]
        if len(found) != 1:
            raise SystemExit(f"{len(found)} records about {subject}, not one")
        return found[0]

    def accuracy(self, task: str, bits: str, tool: str) -> Record:
        return self.one(benchmark="accuracy_peers", task=task, bits=bits, tool=tool)

    def file_on_arm(self, model: str, tool: str) -> Record:
        found = [
            r
            for r in self.records
            if r.get("benchmark") == "deploy"
            and (r["model"], r["tool"], r["runtime"], r["hardware"]["machine"])
            == (model, tool, "onnxruntime", "aarch64")
        ]
        (record,) = found
        return record


def panels(results: Results) -> tuple[Panel, ...]:
    """Every bar starts at zero: accuracy is shown as what is lost."""
    low_bits = (
        ("Sparsebit", "sparsebit-good", "ours"),
        ("AIMET, AdaRound", "aimet-adaround", "theirs"),
        ("Brevitas, first layer 8 bits", "brevitas-layerwise", "theirs"),
    )
    tools = (
        ("Sparsebit", "sparsebit-onnxruntime", "ours"),
        ("ONNX Runtime's own tool", "ort_static", "theirs"),
        ("NNCF", "nncf_tuned", "theirs"),
    )
    losses = [(name, results.accuracy("resnet20", "W4A4", tool)["loss"], kind) for name, tool, kind in low_bits]
    speeds = [(name, times_faster(results.file_on_arm("efficientnet_lite0", tool)), kind) for name, tool, kind in tools]
    detected = [(name, 100 * results.file_on_arm("yolov5n", tool)["loss"], kind) for name, tool, kind in tools]
    return (
        Panel(
            "Accuracy lost with 4-bit weights and activations",
            "ResNet-20 on CIFAR-10, no labels, points of top-1: shorter is better",
            tuple(Bar(name, loss, _points(loss), kind) for name, loss, kind in losses),
        ),
        Panel(
            "Speed of the int8 file",
            "EfficientNet-Lite0 in ONNX Runtime on one Arm core: longer is better",
            (
                Bar("float file", 1, "1", "float"),
                *(Bar(name, speed, f"{speed:.1f} times faster", kind) for name, speed, kind in speeds),
            ),
        ),
        Panel(
            "Accuracy lost by the int8 file",
            "YOLOv5n on 50 COCO images, points of mAP: shorter is better",
            tuple(Bar(name, loss, _points(loss), kind) for name, loss, kind in detected),
        ),
    )


def _points(loss: float) -> str:
    return f"{loss:.1f} points" if loss > 0 else f"0 (gains {-loss:.1f})"


def times_faster(record: Record) -> float:
    return float(1 / record["cpu_ratio_1"])


def picture(shown: Iterable[Panel]) -> str:
    """The panels, one below the other, on a card of its own colour: readable on any page, light or dark."""
    rows: list[str] = []
    y = 18
    for panel in shown:
        y += 24
        rows.append(f'<text class="title" x="20" y="{y}">{escape(panel.title)}</text>')
        y += 20
        rows.append(f'<text class="small" x="20" y="{y}">{escape(panel.subtitle)}</text>')
        longest = max(bar.value for bar in panel.bars)
        y += 10
        for bar in panel.bars:
            length = max(2, round(BAR * bar.value / longest))
            colour = {"ours": OURS, "theirs": THEIRS, "float": FLOAT}[bar.kind]
            weight = ' font-weight="600"' if bar.kind == "ours" else ""
            rows += [
                f'<text x="{LABEL - 10}" y="{y + 17}" text-anchor="end"{weight}>{escape(bar.name)}</text>',
                f'<rect class="{bar.kind}" fill="{colour}" x="{LABEL}" y="{y + 3}" width="{length}" height="19"/>',
                f'<text x="{LABEL + length + 8}" y="{y + 17}"{weight}>{escape(bar.text)}</text>',
            ]
            y += 26
        y += 8
    size = f'viewBox="0 0 {WIDTH} {y + 8}" width="{WIDTH}" height="{y + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>Sparsebit and other tools: accuracy at 4 bits, speed and accuracy of int8 files</title>"
    card = f'<rect class="card" width="{WIDTH}" height="{y + 8}" rx="10"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", card, *rows, "</svg>"]) + "\n"


def figures(results: Results) -> list[tuple[str, ...]]:
    """What the table of results in README.md and README.zh-CN.md says, row by row: tests compare."""
    sparsebit, ort, nncf = "sparsebit-onnxruntime", "ort_static", "nncf_tuned"
    low = [results.accuracy("resnet20", "W4A4", tool) for tool in ("sparsebit-good", "aimet-adaround")]
    low.append(results.accuracy("resnet20", "W4A4", "brevitas-layerwise"))
    lite = [results.accuracy("efficientnet_lite0", "W4A8", tool) for tool in ("sparsebit-good", "brevitas-gptq")]
    speeds = [times_faster(results.file_on_arm("efficientnet_lite0", tool)) for tool in (sparsebit, ort, nncf)]
    detected = [results.file_on_arm("yolov5n", tool)["quantized"] for tool in ("float", sparsebit, ort, nncf)]
    steps = [
        results.one(benchmark="qat_step", model="resnet50", way=way)["time_ratio"]
        for way in ("sparsebit_tf32", "torch_ao_tf32")
    ]
    pruned = [r for r in results.records if r.get("benchmark") == "sparse"]
    peers = [r["torch_pruning"] for r in pruned if r["torch_pruning"]["ran"]]
    return [
        (f"{low[0]['float']:.1f} %", *(f"{r['quantized']:.1f} %" for r in low)),
        (f"{lite[0]['float']:.1f} %", *(f"{r['quantized']:.1f} %" for r in lite)),
        tuple(f"{speed:.1f}" for speed in speeds),
        tuple(f"{score:.3f}" for score in detected),
        tuple(f"{step:.1f}" for step in steps),
        (str(len(pruned)), str(sum(r["ok"] for r in pruned)), str(sum(peer["macs_left"] <= 0.8 for peer in peers))),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the picture is out of step")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "assets" / "results.svg")
    options = parser.parse_args()
    drawn = picture(panels(Results(options.results)))
    if not options.check:
        options.picture.write_text(drawn, encoding="utf-8")
    elif not options.picture.is_file() or options.picture.read_text(encoding="utf-8") != drawn:
        sys.stderr.write(f"{options.picture} is out of step: run python scripts/results_picture.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
