"""JSON lines of the benchmarks become the tables of a page, and the project's own page is in step with its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

HARDWARE = {"cpu": "some CPU", "machine": "x86_64", "cores": 2, "gpu": None, "torch": "2.13.0"}
NAMES = ("accuracy", "calibration time", "calibration memory", "calibration search", "zoo")
ACCURACY = {
    "benchmark": "accuracy",
    "task": "resnet20",
    "backend": "virtual",
    "observer": "mse",
    "bits": "W4A8",
    "metric": "top1",
    "float": 92.5,
    "quantized": 90.75,
    "loss": 1.75,
    "sqnr_db": 17.04,
    "agreement": 95.05,
}
ZOO = {
    "benchmark": "zoo",
    "model": "timm/resnet18",
    "ok": True,
    "float_difference": 1e-7,
    "sqnr_db": 31.44,
    "weighted_quantized": "21/21",
    "untraced": ["a: why @ here"],
    "unknown_ops": ["unknown op erf"],
}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark_tables.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def render(folder: Path, *records: dict[str, Any]) -> str:
    """The page that the script makes of `records`."""
    page = folder / "page.md"
    page.write_text("\n".join(f"# {name}\n<!-- begin: {name} -->\nold\n<!-- end: {name} -->" for name in NAMES))
    lines = [json.dumps({"date": "2030-01-02", **record, "hardware": HARDWARE}) for record in records]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n")
    done = run("--results", folder, "--page", page)
    assert done.returncode == 0, done.stderr
    return page.read_text()


def test_page_of_the_project_is_in_step() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_accuracy(tmp_path: Path) -> None:
    page = render(tmp_path, ACCURACY)
    assert "| resnet20 | W4A8 | virtual | mse | top1 | 92.50 | 90.75 | 1.75 | 95.0 % | 17.0 dB |" in page
    assert "*Measured 2030-01-02 on some CPU, 2 cores, torch 2.13.0.*" in page
    assert "old" not in page


def test_metric_without_agreement(tmp_path: Path) -> None:
    record = {key: value for key, value in ACCURACY.items() if key not in ("agreement", "sqnr_db")}
    page = render(tmp_path, record | {"metric": "spearman", "float": 0.8203, "quantized": 0.818, "loss": 0.0023})
    assert "| spearman | 0.8203 | 0.8180 | 0.0023 |  |  |" in page


def test_calibration(tmp_path: Path) -> None:
    time = {
        "what": "time",
        "observer": "mse",
        "images": 64,
        "ratio_wall": 1.234,
        "ratio_cpu": 1.5,
        "plain_seconds": 9.87,
    }
    memory = {"what": "memory", "case": "asym", "mib_64": 1234.5, "mib_1024": 1240.0, "growth": 0.0045}
    search = {
        "what": "search",
        "model": "resnet20",
        "images": 256,
        "observer": "mse",
        "cpu_seconds": 3.2,
        "seconds": 2.1,
    }
    page = render(tmp_path, *({"benchmark": "calibration", **record} for record in (time, memory, search)))
    assert "| mse | 64 | 1.23x | 1.50x | 9.9 s |" in page
    assert "| asym | 1,234 MiB | 1,240 MiB | +0.4% |" in page
    assert "| resnet20 | 256 | mse | 3.2 s | 2.1 s |" in page


def test_zoo_shows_failures(tmp_path: Path) -> None:
    failed = {"benchmark": "zoo", "model": "timm/strange", "ok": False, "error": "ValueError: no\nmore"}
    page = render(tmp_path, ZOO, failed)
    assert "1 of 2 architectures are captured." in page
    assert "| timm/resnet18 | yes | 21/21 | 31.4 dB | 1 | `erf` |" in page
    assert "| timm/strange | **no**: ValueError: no |" in page


def test_last_line_about_the_same_counts(tmp_path: Path) -> None:
    page = render(tmp_path, ACCURACY, ACCURACY | {"quantized": 91.0}, ACCURACY | {"observer": "minmax"})
    assert page.count("| resnet20 |") == 2 and "| 91.00 |" in page


def test_nothing_measured(tmp_path: Path) -> None:
    assert render(tmp_path).count("*Not measured yet.*") == len(NAMES)


def test_check_tells_and_writes_nothing(tmp_path: Path) -> None:
    render(tmp_path, ACCURACY)
    page = tmp_path / "page.md"
    assert run("--check", "--results", tmp_path, "--page", page).returncode == 0
    page.write_text(page.read_text().replace("90.75", "99.99"))
    done = run("--check", "--results", tmp_path, "--page", page)
    assert done.returncode == 1 and "out of step: run python scripts/benchmark_tables.py" in done.stderr
    assert "99.99" in page.read_text()


def test_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"benchmark": "zoo"\n')
    done = run("--results", tmp_path, "--page", ROOT / "docs" / "benchmarks.md", "--check")
    assert done.returncode != 0 and "some.jsonl:1 is not a JSON object" in done.stderr


def test_page_without_a_section_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- begin: zoo -->\n<!-- end: zoo -->\n")
    done = run("--results", tmp_path, "--page", tmp_path / "page.md")
    assert done.returncode != 0 and "the page marks ['zoo']" in done.stderr
