"""What the installed transformers reads is found out before the run, whichever version it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import DeploymentError
from sparsebit.llm import Calibration, Recipe, load, quantize
from sparsebit.llm.converting.load_check import TOLERANCE, relative_difference
from sparsebit.llm.quantizing import reader_probe
from sparsebit.llm.quantizing.block_rounding import BlockRounding
from sparsebit.llm.quantizing.reader_probe import need_readable
from tests.llm.tiny_models import loaded, saved, tiny_model, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")
NEAREST = Recipe("rtn", group_size=32, scale_search="none")
MIXED = Recipe(candidate_bits=(2, 4, 8), average_bits=4.0, group_size=32)


@pytest.fixture(autouse=True)
def _no_earlier_answers() -> Iterator[None]:
    reader_probe._refusal.cache_clear()
    yield
    reader_probe._refusal.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return with_tokenizer(saved(tiny_model(), tmp_path / "model"))


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Recipe(group_size=0), Recipe(bits=3), Recipe(symmetric=True), Recipe("fp8"), Recipe("mxfp4")],
    ids=["default", "rows", "3 bits", "symmetric", "fp8", "mxfp4"],
)
def test_the_installed_version_reads_each_format_of_one_kind(recipe: Recipe) -> None:
    before = torch.random.get_rng_state()
    need_readable(recipe)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("recipe", [Recipe(symmetric=True), Recipe("fp8")], ids=["int", "fp8"])
def test_the_installed_version_reads_experts(recipe: Recipe) -> None:
    need_readable(recipe, has_experts=True)


def test_a_folder_with_zero_points_is_read_by_plain_transformers(model: Path, tmp_path: Path) -> None:
    made = quantize(model, tmp_path / "packed", NEAREST)
    assert made.check is not None and made.check.difference <= TOLERANCE
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        theirs, ours = (found(tokens).logits for found in (loaded(made.folder), load(made.folder)))
    assert relative_difference(theirs, ours) < 3e-3  # some versions round the unpacked weights to float16


def test_mixed_bits_with_zero_points_are_read_or_refused_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = reader_probe._refusal(reader_probe._to_nearest(MIXED), False)
    if refusal is None:
        return
    monkeypatch.setattr(BlockRounding, "round", _not_reached)
    text = Calibration(write_text(tmp_path / "text.txt"), 4, 32)
    with pytest.raises(DeploymentError, match=r"2, 4, 8 bits, groups of 32, with zero points.*--symmetric"):
        quantize(model, tmp_path / "packed", MIXED, text)


def test_a_version_that_fails_to_load_is_refused_before_the_first_block(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(BlockRounding, "round", _not_reached)
    version = transformers.__version__
    message = (
        rf"transformers {version} with compressed-tensors [\d.]+ does not read weights of 4 bits, groups of 32, with"
    )
    with pytest.raises(DeploymentError, match=message) as refused:
        quantize(model, tmp_path / "packed", NEAREST)
    assert "no such tensor" in str(refused.value) and "pip install transformers==" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_version_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_probe, "difference_of_transformers", lambda *_, **__: 0.5)
    with pytest.raises(DeploymentError, match=r"fp8 weights.*its logits differ by 0\.5") as refused:
        need_readable(Recipe("fp8"))
    assert "--symmetric" not in str(refused.value)


def test_nothing_is_tried_where_the_check_is_switched_off(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_probe, "difference_of_transformers", _not_reached)
    assert quantize(model, tmp_path / "packed", NEAREST, check=False).check is None


def _not_reached(*_: Any, **__: Any) -> None:
    raise AssertionError("not to be reached")
