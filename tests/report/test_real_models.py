"""Pages of real models, from the model to the browser."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sparsebit
from sparsebit.cli.main import app
from sparsebit.report import read_run
from sparsebit.report.page_data import Run
from sparsebit.report.read_record import run_of_record

pytestmark = pytest.mark.slow


@pytest.fixture
def cifar_models(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that loads the trained networks."""
    monkeypatch.syspath_prepend(str(shared_data / "cifar10" / "models"))
    return importlib.import_module("cifar_models")


def quantized(model: nn.Module, size: int) -> Run:
    """The run of a model in 8 bits, with the errors of its layers on random images."""
    batch = torch.randn(2, 3, size, size)
    qmodel = sparsebit.quantize(model.eval(), [batch], "onnxruntime")
    return run_of_record(sparsebit.record(qmodel, qmodel.profile(batch)), type(model).__name__)


def checked(opened: Any, run: Run, file: Path) -> Any:
    """The page, after its size, its width, its graph and its search were looked at."""
    page = opened(run)
    assert file.stat().st_size <= 400_000 + 1000 * len(run.layers)
    assert page.is_as_wide_as_the_window() and page.page.locator("rect.tile").count() > 0
    last = run.layers[-1].name
    page.page.locator("#search").fill(last)
    page.page.keyboard.press("Enter")
    assert page.page.locator("#details h3").first.inner_text() == last
    page.page.wait_for_selector(f'rect.chosen[data-name="{last}"]')
    return page


def test_resnet_50(opened: Any, tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    run = quantized(models.resnet50(weights=None), 64)
    page = checked(opened, run, tmp_path / "page.html")
    assert sum(layer.op == "conv" for layer in run.layers) == 53
    page.page.get_by_label("Show all").click()
    page.page.wait_for_function("document.querySelectorAll('rect.folded').length >= 4")
    page.page.locator("#layers tbody tr", has_text="layer3.2.conv2").click()
    assert page.page.locator("#details svg .bars").count() > 32


def test_a_vision_transformer(opened: Any, cifar_models: Any, tmp_path: Path) -> None:
    run = quantized(cifar_models.load("vit"), 32)
    page = checked(opened, run, tmp_path / "page.html")
    assert any(layer.op == "matmul" or "attention" in layer.op for layer in run.layers)
    page.page.get_by_role("button", name="Integer or float").click()
    assert "integer" in page.page.locator("#legend").inner_text()


def test_a_pruned_mobilenet(opened: Any, cifar_models: Any, shared_data: Path, tmp_path: Path) -> None:
    del cifar_models  # the command imports it by name
    images, target = shared_data / "cifar10" / "test_5k.npz", tmp_path / "small"
    words = ["-m", "cifar_models:load", "--model-args", '["mobilenetv2"]', "-d", str(images), "--num-samples", "64"]
    words += ["--ratio", "0.3", "--no-reconstruct", "-o", str(target)]
    answer = CliRunner().invoke(app, ["prune", *words])
    assert answer.exit_code == 0, answer.output
    run = read_run(target)
    assert {"Top-1 accuracy", "Multiplications", "Parameters", "Output SQNR"} <= {card.label for card in run.cards}
    page = checked(opened, run, tmp_path / "page.html")
    assert page.texts('#graph [aria-pressed="true"]') == ["What stays"]
    assert "→" in page.page.locator("#layers").inner_text()


def test_a_language_model(opened: Any, shared_data: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from sparsebit.llm import Recipe, quantize

    recipe = Recipe(method="rtn", scale_search="none", group_size=64)
    made = quantize(shared_data / "book_llama", tmp_path / "packed", recipe, check=False)
    run = read_run(made.folder)
    page = checked(opened, run, tmp_path / "page.html")
    assert len(run.layers) == 42 and all(layer.bits == 4 for layer in run.layers)
    assert "model.embed_tokens.weight" in [row[0] for table in run.tables for row in table.rows]
    assert "SQNR is that of the weights" in page.page.locator("ul.notes").inner_text()
