"""JSON lines of the benchmarks become the tables of pages, and the project's own pages are in step with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

HARDWARE = {"cpu": "some CPU", "machine": "x86_64", "cores": 2, "gpu": None, "torch": "2.13.0"}
PAGES = {
    "accuracy": ("accuracy", "accuracy peers"),
    "architectures": ("zoo", "zoo export", "sparse zoo"),
    "calibration": ("calibration time", "calibration memory", "calibration search"),
    "files": ("deploy onnxruntime", "deploy openvino"),
    "onnx-input": ("onnx in", "onnx in opsets", "onnx in files"),
    "placement": ("placement limits",),
    "training": ("qat summary", "qat accuracy", "qat step", "qat ablation", "fake quant gpu", "fake quant cpu"),
}
ACCURACY = {
    "benchmark": "accuracy", "task": "resnet20", "backend": "virtual", "observer": "mse", "bits": "W4A8",
    "metric": "top1", "float": 92.5, "quantized": 90.75, "loss": 1.75, "sqnr_db": 17.04, "agreement": 95.05,
}  # fmt: skip
ZOO = {
    "benchmark": "zoo", "model": "timm/resnet18", "ok": True, "float_difference": 1e-7, "sqnr_db": 31.44,
    "weighted_quantized": "21/21", "parameters_quantized": 99.5, "untraced": ["a: why @ here"],
    "unknown_ops": ["unknown op erf"],
}  # fmt: skip
DEPLOY = {
    "benchmark": "deploy", "model": "resnet18", "tool": "sparsebit-onnxruntime", "runtime": "onnxruntime",
    "seconds": 31.4, "size_ratio": 0.2512, "sqnr_db": 28.04, "agreement": 98.0, "parity_max": 0.0,
    "cpu_ratio_1": 0.377, "wall_ratio_2": 0.391,
    "made": {"date": "2030-01-01", "machine": "aarch64", "torch": "2.13.0", "nncf": "3.4.0", "openvino": None},
}  # fmt: skip
EXPORTED = {"benchmark": "zoo_export", "model": "timm/resnet18", "float_exports": True, "ok": True, "exact": True}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark_tables.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def write_pages(folder: Path) -> None:
    for page, names in PAGES.items():
        sections = (f"# {name}\n<!-- begin: {name} -->\nold\n<!-- end: {name} -->" for name in names)
        (folder / f"{page}.md").write_text("\n".join(sections))


def render(folder: Path, *records: dict[str, Any]) -> str:
    """The pages that the script makes of `records`, one after the other."""
    write_pages(folder)
    lines = [json.dumps({"date": "2030-01-02", "hardware": HARDWARE, **record}) for record in records]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n")
    done = run("--results", folder, "--pages", folder)
    assert done.returncode == 0, done.stderr
    return "\n".join((folder / f"{page}.md").read_text() for page in PAGES)


def test_pages_of_the_project_are_in_step() -> None:
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


def test_accuracy_beside_peers(tmp_path: Path) -> None:
    shown = ("task", "bits", "metric", "float", "quantized", "loss", "sqnr_db", "agreement")
    record = {key: ACCURACY[key] for key in shown} | {"benchmark": "accuracy_peers", "weights": "per-tensor"}
    tool = {"tool": "brevitas-gptq", "settings": "GPTQ", "cpu_seconds": 20.4, "seconds": 30.0, "peak_mib": 1234}
    failed = {"tool": "aimet-cle", "settings": "CLE", "failed": "ImportError: no"}
    text = {"task": "minilm", "metric": "spearman", "float": 0.82, "quantized": 0.81, "loss": 0.01, "cosine": 0.99714}
    page = render(
        tmp_path,
        record | tool,
        {key: record[key] for key in ("benchmark", "bits", "sqnr_db")} | tool | text | {"weights": "per-channel"},
        {key: record[key] for key in ("benchmark", "task", "bits", "weights")} | failed,
    )
    row = "| resnet20, weights per tensor | W4A8 | brevitas | GPTQ | top1 | 92.50 | 90.75 | 1.75 | 17.0 dB | 95.0 % |"
    assert f"{row} 20 s | 1,234 MiB |" in page
    assert "| aimet | CLE | **fails**: `ImportError: no` |" in page
    assert "| minilm | W4A8 | brevitas | GPTQ | spearman | 0.8200 | 0.8100 | 0.0100 | 17.0 dB | 0.9971 |" in page
    assert page.index("| aimet | CLE |") < page.index("| minilm |")  # the tools of one case stand together


def test_calibration(tmp_path: Path) -> None:
    time = {"what": "time", "observer": "mse", "images": 64, "ratio_wall": 1.234, "ratio_cpu": 1.5}
    time["plain_seconds"] = 9.87
    memory = {"what": "memory", "case": "asym", "mib_64": 1234.5, "mib_1024": 1240.0, "growth": 0.0045}
    search = {"what": "search", "model": "resnet20", "images": 256, "observer": "mse"}
    search |= {"cpu_seconds": 3.2, "seconds": 2.1}
    page = render(tmp_path, *({"benchmark": "calibration", **record} for record in (time, memory, search)))
    assert "| mse | 64 | 1.23x | 1.50x | 9.9 s |" in page
    assert "| asym | 1,234 MiB | 1,240 MiB | +0.4% |" in page
    assert "| resnet20 | 256 | mse | 3.2 s | 2.1 s |" in page


def test_zoo_shows_failures(tmp_path: Path) -> None:
    failed = {"benchmark": "zoo", "model": "timm/strange", "ok": False, "error": "ValueError: no\nmore"}
    page = render(tmp_path, ZOO, failed)
    assert "1 of 2 architectures are captured." in page
    assert "| timm/resnet18 | yes | 21/21 | 99.5 % | 31.4 dB | 1 | `erf` |" in page
    assert "| timm/strange | **no**: ValueError: no |" in page


def test_zoo_says_what_is_wrong(tmp_path: Path) -> None:
    page = render(tmp_path, ZOO | {"ok": False, "sqnr_db": None}, ZOO | {"model": "b", "ok": False})
    assert "**no**: quantized outputs are not finite" in page and "**no**: float differs by 1.0e-07" in page


class TestDeploy:
    def test_file_with_random_weights(self, tmp_path: Path) -> None:
        page = render(tmp_path, DEPLOY)
        row = "| resnet18 | sparsebit |  | 0.38 | 0.39 | 0.25 |  | 28.0 dB | 98.0 % | exact | 31 s |"
        assert row in section(page, "deploy onnxruntime")
        assert "resnet18" not in section(page, "deploy openvino")

    def test_metrics(self, tmp_path: Path) -> None:
        lite = DEPLOY | {"model": "lite0", "metric": "top1", "quantized": 87.1, "loss": 0.31, "parity_max": 3.2e-7}
        minilm = DEPLOY | {"model": "minilm", "metric": "cosine", "quantized": 0.9931}
        page = render(tmp_path, lite, minilm)
        assert "| lite0 | sparsebit | top1 | 0.38 | 0.39 | 0.25 | 0.31 | 28.0 dB | 98.0 % | 3e-07 | 31 s |" in page
        assert "| minilm | sparsebit | cosine | 0.38 | 0.39 | 0.25 | 0.0069 |" in page

    def test_peer_has_no_parity(self, tmp_path: Path) -> None:
        peer = {key: value for key, value in DEPLOY.items() if key != "parity_max"}
        assert "| nncf |  | 0.38 | 0.39 | 0.25 |  | 28.0 dB | 98.0 % |  | 31 s |" in render(
            tmp_path, peer | {"tool": "nncf"}
        )

    def test_float_and_files_of_the_other_runtime_are_left_out(self, tmp_path: Path) -> None:
        others = [DEPLOY | {"tool": tool} for tool in ("float", "sparsebit-openvino")]
        assert render(tmp_path, DEPLOY, *others).count("| resnet18 |") == 1

    def test_both_kinds_of_cpu_are_kept(self, tmp_path: Path) -> None:
        arm = {**DEPLOY, "cpu_ratio_1": 0.25, "hardware": {**HARDWARE, "machine": "aarch64"}}
        page = render(tmp_path, DEPLOY, arm)
        assert "| x86 | resnet18 | sparsebit |  | 0.38 |" in page and "| Arm | resnet18 | sparsebit |  | 0.25 |" in page

    def test_one_table_per_runtime(self, tmp_path: Path) -> None:
        nncf = [DEPLOY | {"tool": "nncf", "runtime": runtime} for runtime in ("onnxruntime", "openvino")]
        page = render(tmp_path, *nncf)
        for runtime in ("onnxruntime", "openvino"):
            assert section(page, f"deploy {runtime}").count("| nncf |") == 1

    def test_failure(self, tmp_path: Path) -> None:
        page = render(tmp_path, DEPLOY | {"error": "\nRuntimeError: no `kernel` for a|b\nat node 7"})
        assert "| resnet18 | sparsebit | **fails**: `RuntimeError: no 'kernel' for a\\|b` |  |" in page

    def test_disturbed_wall_time_is_left_out(self, tmp_path: Path) -> None:
        assert "| 0.38 |  | 0.25 |" in render(tmp_path, DEPLOY | {"disturbed": [2]})

    def test_provenance(self, tmp_path: Path) -> None:
        hardware = HARDWARE | {"flags": ["avx2", "avx512_vnni"], "onnxruntime": "1.31.1", "nncf": None, "torch": None}
        page = render(tmp_path, DEPLOY | {"hardware": hardware})
        assert "*Measured 2030-01-02 on some CPU, 2 cores (avx2, avx512_vnni), onnxruntime 1.31.1.*" in page
        assert "*Files made 2030-01-01 on aarch64, torch 2.13.0, nncf 3.4.0.*" in page


class TestZooExport:
    def test_all_pass(self, tmp_path: Path) -> None:
        page = section(render(tmp_path, EXPORTED, EXPORTED | {"model": "b", "exact": False}), "zoo export")
        assert "2 of 2 architectures export, load in ONNX Runtime and pass the parity gate; bit-exact: 1." in page
        assert "| architecture |" not in page

    def test_failures_are_named(self, tmp_path: Path) -> None:
        failed = EXPORTED | {"model": "b", "ok": False, "exact": None, "error": "DeploymentError: no ONNX form\nmore"}
        page = section(render(tmp_path, EXPORTED, failed), "zoo export")
        assert page.count("| timm/resnet18 |") == 0 and "1 of 2 architectures" in page
        assert "| b | `DeploymentError: no ONNX form` | yes |" in page

    def test_models_that_torch_does_not_export(self, tmp_path: Path) -> None:
        alone = EXPORTED | {"model": "b", "float_exports": False, "float_error": "no symbol"}
        both = alone | {"model": "c", "ok": False, "error": "neither"}
        page = section(render(tmp_path, alone, both), "zoo export")
        assert "though torch does not export the float model:" in page
        assert "| b | `no symbol` |" in page and "| c | `neither` | no |" in page


class TestTraining:
    def test_step(self, tmp_path: Path) -> None:
        step = {"benchmark": "qat_step", "model": "resnet50", "batch": 128}
        plain = {**step, "way": "float_bf16", "step_ms": 30.29, "in_a_row_ms": 29.0, "peak_mib": 5814}
        ours = {**step, "way": "sparsebit_bf16", "start_us": 6.31, "step_ms": 36.3, "in_a_row_ms": 34.8}
        ours |= {"peak_mib": 6249, "time_ratio": 1.198, "in_a_row_ratio": 1.25, "memory_ratio": 1.07}
        page = render(tmp_path, plain, ours, {**step, "way": "torch_ao_bf16", "failed": "RuntimeError: no such type"})
        assert "| resnet50 | float bf16 | 30.3 ms |  | 29.0 ms |  | 5,814 MiB |  |" in page
        assert "| resnet50 | sparsebit bf16 | 36.3 ms | 1.20 | 34.8 ms | 1.25 | 6,249 MiB | 1.07 |" in page
        assert "**fails**: `RuntimeError: no such type`" in page
        assert "*Starting a kernel took the host 6.3 to 6.3 us.*" in page
        assert "| resnet50 | 1.20 |  |  |  | 1.07 |  |" in section(page, "qat summary")

    def test_accuracy(self, tmp_path: Path) -> None:
        scores = {"float": 91.7, "before training": 80.0, "quantized": 91.5, "in float32": 91.44, "file": 91.46}
        record = {"benchmark": "qat_accuracy", "recipe": "w4a4", "epochs": 40, "seconds": 61.4, "file_bytes": 203003}
        page = render(tmp_path, {**record, "scores": scores, "trained_on": HARDWARE | {"gpu": "some GPU"}})
        assert page.count("| w4a4 | 40 | 91.70 % | 80.00 % | 91.50 % | 91.44 % | 91.46 % | 0.20 MB | 61 s |") == 1
        assert "*Trained 2030-01-02 on some GPU, torch 2.13.0.*" in page

    def test_operator(self, tmp_path: Path) -> None:
        common = {"benchmark": "fake_quant", "granularity": "tensor"}
        gpu = {"device": "cuda", "work": "forward_backward_lsq", "layout": "channels_last", "dtype": "bfloat16"}
        ratios = {"sparsebit": 1.04, "torch_compile": 1.06, "torch_learnable": 2.03}
        ways = {"forward": 0.27, "forward_backward_ste": 0.39, "forward_backward_lsq": 0.68}
        page = render(
            tmp_path,
            {**common, **gpu, "limit_ms": 0.506, "ratio_to_limit": ratios},
            {**common, "device": "cpu", "shape": [2, 3], "ratio_to_torch_op": ways},
            {**common, "device": "cpu", "shape": [4, 3], "ratio_to_torch_op": ways},
        )
        row = "| forward + backward, lsq | per tensor | channels-last | bfloat16 | 0.51 ms | 1.04 | 1.06 | 2.03 |"
        assert row in page
        assert "| 2 x 3 | per tensor | 0.27 | 0.39 | 0.68 |" in page and "| 4 x 3 |" in page


PRUNED = {
    "benchmark": "sparse", "model": "a", "ok": True, "difference": 1e-7, "difference_float64": 1e-7, "macs_left": 0.6,
    "spared": [], "torch_pruning": {"ran": True, "macs_left": 0.5}, "date": "2026-11-17",
    "hardware": {"cpu": "some", "cores": 2, "gpu": None},
}  # fmt: skip


def test_sparse_zoo(tmp_path: Path) -> None:
    short = PRUNED | {"model": "b", "ok": False, "macs_left": 0.9, "spared": ["2 axes: why"]}
    short["torch_pruning"] = {"ran": False, "error": "x"}
    failed = {key: PRUNED[key] for key in ("benchmark", "date", "hardware")}
    failed |= {"model": "c", "ok": False, "error": "no"}
    page = section(render(tmp_path, PRUNED, short, failed), "sparse zoo")
    assert "1 of 3 architectures" in page and "of the 2 that ran to the end, 2 are equal" in page
    assert "Torch-Pruning: 1 still run, 1 of them" in page
    assert "| b | 0.90 | `2 axes: why` |" in page and "| c |  | `no` |" in page


def section(page: str, name: str) -> str:
    return page.partition(f"<!-- begin: {name} -->")[2].partition(f"<!-- end: {name} -->")[0]


def test_last_line_about_the_same_counts(tmp_path: Path) -> None:
    page = render(tmp_path, ACCURACY, ACCURACY | {"quantized": 91.0}, ACCURACY | {"observer": "minmax"})
    assert page.count("| resnet20 |") == 2 and "| 91.00 |" in page


def test_nothing_measured(tmp_path: Path) -> None:
    assert render(tmp_path).count("*Not measured yet.*") == sum(map(len, PAGES.values()))


def test_check_tells_and_writes_nothing(tmp_path: Path) -> None:
    render(tmp_path, ACCURACY)
    page = tmp_path / "accuracy.md"
    assert run("--check", "--results", tmp_path, "--pages", tmp_path).returncode == 0
    page.write_text(page.read_text().replace("90.75", "99.99"))
    done = run("--check", "--results", tmp_path, "--pages", tmp_path)
    assert done.returncode == 1 and "out of step: run python scripts/benchmark_tables.py" in done.stderr
    assert "99.99" in page.read_text()


def test_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"benchmark": "zoo"\n')
    done = run("--results", tmp_path, "--check")
    assert done.returncode != 0 and "some.jsonl:1 is not a JSON object" in done.stderr


def test_page_without_a_section_is_named(tmp_path: Path) -> None:
    write_pages(tmp_path)
    (tmp_path / "architectures.md").write_text("<!-- begin: zoo -->\n<!-- end: zoo -->\n")
    done = run("--results", tmp_path, "--pages", tmp_path)
    assert done.returncode != 0 and "the page marks ['zoo']" in done.stderr


def test_bounds_of_a_placement(tmp_path: Path) -> None:
    shares = {f"{kind} {side}": 0.0 for kind in ("dense", "depthwise", "other") for side in ("int", "float")}
    shares |= {"dense int": 0.4, "depthwise float": 0.1, "other int": 0.05, "conversions": 0.05}
    limits = {"float_ms": 10.0, "dense_gmacs": 0.1, "shares": {"measured": shares}, "free_conversions": 0.5}
    rates = {"default": {"int": 50.0}}
    record = {"benchmark": "placement_limits", "model": "net", "measured": {"ratio": 0.6}}
    fast = record | {"size": 96, "limits": limits | {"rates": rates}}
    slow = record | {"size": 224, "limits": limits | {"rates": {"default": {"int": 20.0}}}}
    page = render(tmp_path, fast, slow)
    for size in (96, 224):  # 0.1 GMAC at 50 GMAC/s: 2 of 10 ms
        assert f"| net | {size} | 0.60 | 0.40 | 0.10 | 0.05 | 0.05 | 0.50 | 0.40 |" in page
    assert "The best rate is 50 GMAC/s." in page


def test_files_as_models(tmp_path: Path) -> None:
    loaded = {"benchmark": "onnx_in", "model": "timm/resnet18", "ok": True, "difference": 2e-7}
    loaded |= {"layers": 21, "layers_loaded": 21, "same_names": 20}
    far = {**loaded, "model": "timm/far", "difference": 2e-3}
    failed = {"benchmark": "onnx_in", "model": "timm/other", "ok": False, "error": "node 'a' (Foo)"}
    step = {"benchmark": "onnx_in_opsets", "model": "resnet20", "ok": True}
    opset = {**step, "step": "load 11", "difference": 3.6e-7, "layers": 20, "same_names": 20}
    broken = {**step, "ok": False, "step": "load 13", "error": "no exporter"}
    file = {**step, "step": "opset 11", "loss": -0.2, "sqnr_db": 30.81}
    timed = {**step, "step": "time opset 11", "cpu_ratio": 0.377}
    page = render(tmp_path, loaded, far, failed, opset, broken, file, timed)
    assert "1 of 3 architectures load; the largest difference is 2e-07. 20 of 21 convolutions" in page
    assert "| timm/other | `node 'a' (Foo)` |" in page and "| timm/far |" in page
    assert "| resnet20 | 11 | 4e-07 | 20 of 20 |" in page and "| `no exporter` |" in page
    assert "| resnet20 | Sparsebit, from the file of opset 11 | -0.20 | 30.8 dB | 0.38 |" in page
