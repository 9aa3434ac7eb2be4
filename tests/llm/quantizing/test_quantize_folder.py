"""`quantize` from folder to folder: it loads everywhere, survives SIGKILL with the same bytes, and refuses in time."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import CheckpointError, ConfigError, DeploymentError
from sparsebit.execution.run_folder import RunFolder
from sparsebit.llm import Calibration, QuantLinear, Recipe, load, quantize, resident_bytes
from sparsebit.llm.converting import load_check as load_check_module
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.quantizing import quantize_folder as quantizing_module
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.records.model_folders import FILE, PackedModel
from tests.conftest import ROOT
from tests.llm.tiny_models import loaded, saved, stopped_after, tiny_model, with_tokenizer, write_text

pytest.importorskip("compressed_tensors")
TOKENS = torch.arange(3, 35)[None]
FAST = Recipe(method="rtn", scale_search="none", group_size=32)
GPTQ = Recipe(bits=3, group_size=32, sweeps=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return with_tokenizer(saved(tiny_model(), tmp_path / "model"))


def calibration(source: Path) -> Calibration:
    return Calibration(source.parent / "text.txt", num_samples=6, length=24)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "phi3", "opt", "gpt_neox"])
def test_architectures_load_with_transformers(model_type: str, tmp_path: Path) -> None:
    folder = saved(tiny_model(model_type), tmp_path / "model", dtype=torch.bfloat16)
    made = quantize(folder, tmp_path / "packed", FAST)
    assert made.check is not None and made.check.difference <= 1e-3
    assert made.packed_bytes < made.float_bytes


def test_gptq_end_to_end(source: Path) -> None:
    plenty = replace(calibration(source), num_samples=120)  # 144 tokens would not determine 128 columns
    made = quantize(source, source.parent / "packed", GPTQ, plenty, batch_size=32)
    assert made.check is not None and made.check.difference <= 1e-3
    assert "3 bits" in made.check.vllm[0]
    packed = load(made.folder)
    layers = [module for module in packed.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == len(made.formats) == 21
    assert all(layer.bits == 3 and layer.zeros is not None for layer in layers)
    assert resident_bytes(packed) < 0.6 * resident_bytes(loaded(source))
    nearest = quantize(source, source.parent / "nearest", replace(FAST, bits=3), check=False)
    wanted = logits(loaded(source))
    errors = [float((logits(load(folder)) - wanted).square().mean()) for folder in (made.folder, nearest.folder)]
    assert errors[0] < errors[1]
    assert not (source.parent / "packed.partial").exists()


def test_files_beside_the_weights_are_kept(source: Path) -> None:
    (source / "LICENSE").write_text("words")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    made = quantize(source, source.parent / "packed", FAST)
    assert set(load_tokenizer(made.folder).chat_template) == {"default", "tools"}
    names = {path.name for path in made.folder.iterdir()}
    assert {"LICENSE", "tokenizer.json", "generation_config.json", "config.json"} <= names


def test_the_record_has_the_error_of_each_layer(source: Path) -> None:
    made = quantize(source, source.parent / "packed", GPTQ, calibration(source), check=False)
    record = PackedModel.from_dict(json.loads((made.folder / FILE).read_text()), FILE)
    assert {layer.name for layer in record.layers} == set(made.formats) and record.measured_on == "outputs"
    assert record.bits_per_weight == made.bits_per_weight and record.num_windows == 6
    for layer in record.layers:
        assert layer.error is not None and layer.nearest_error is not None and 0 < layer.error < layer.nearest_error
    learned = replace(FAST, method="autoround", steps=2)
    made = quantize(source, source.parent / "learned", learned, calibration(source), check=False)
    record = PackedModel.from_dict(json.loads((made.folder / FILE).read_text()), FILE)
    assert all(layer.error is None and layer.float_bytes for layer in record.layers)


def test_generation_works_packed(source: Path) -> None:
    made = quantize(source, source.parent / "packed", FAST)
    model = load(made.folder)
    found = model.generate(TOKENS, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(TOKENS))
    assert found.shape == (1, 36)


def test_a_float_folder_is_loaded_as_it_is(source: Path) -> None:
    assert torch.equal(logits(load(source)), logits(loaded(source)))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 1 << 30], ids=["on-disk", "in-memory"])
def test_the_budget_does_not_change_the_result(source: Path, budget: int) -> None:
    usual = quantize(source, source.parent / "usual", GPTQ, calibration(source), check=False)
    other = quantize(source, source.parent / "other", GPTQ, calibration(source), check=False, memory_budget=budget)
    assert contents(usual.folder) == contents(other.folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_may_compute_in_half_types(source: Path, dtype: torch.dtype) -> None:
    plenty = replace(calibration(source), num_samples=120)
    exact = quantize(source, source.parent / "exact", GPTQ, plenty, batch_size=32, check=False)
    half = quantize(source, source.parent / "half", GPTQ, plenty, batch_size=32, dtype=dtype)
    wanted = logits(loaded(source))
    errors = [float((logits(load(made.folder)) - wanted).square().mean()) for made in (exact, half)]
    assert contents(exact.folder) != contents(half.folder)
    assert errors[1] < 1.2 * errors[0]


def test_types_that_a_method_does_not_have_are_refused(source: Path) -> None:
    for recipe in (Recipe("awq"), Recipe(candidate_bits=(2, 4), average_bits=3.0)):
        with pytest.raises(ConfigError, match="half types are for rtn and gptq"):
            quantize(source, source.parent / "packed", recipe, calibration(source), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="allowed: float32, bfloat16, float16"):
        quantize(source, source.parent / "packed", FAST, dtype=torch.float64)


class TestInterruption:
    def interrupted(self, source: Path, num_blocks: int = 2, **changes: Any) -> Path:
        target = source.parent / "packed"
        with stopped_after(num_blocks):
            quantize(source, target, GPTQ, calibration(source), check=False, **changes)
        assert not target.exists()
        return target

    def test_another_type_is_another_run(self, source: Path) -> None:
        target = self.interrupted(source)
        with pytest.raises(CheckpointError, match="type of the calibration"):
            quantize(source, target, GPTQ, calibration(source), check=False, dtype=torch.bfloat16)

    def test_the_same_bytes_after_it(self, source: Path) -> None:
        target = self.interrupted(source)
        again = quantize(source, target, GPTQ, calibration(source), check=False)
        whole = quantize(source, source.parent / "whole", GPTQ, calibration(source), check=False)
        assert (again.num_resumed, whole.num_resumed) == (2, 0)
        assert contents(again.folder) == contents(whole.folder)
        assert again.formats == whole.formats and again.bits_per_weight == whole.bits_per_weight

    def test_finished_blocks_are_not_run_again(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = self.interrupted(source, 3)
        with monkeypatch.context() as patch:
            patch.setattr(BlockWalk, "start", lambda _: pytest.fail("all blocks are finished"))
            again = quantize(source, target, GPTQ, calibration(source), check=False)
        whole = quantize(source, source.parent / "whole", GPTQ, calibration(source), check=False)
        assert again.num_resumed == 3 and contents(again.folder) == contents(whole.folder)

    @pytest.mark.slow
    def test_mixed_bits_continue_with_the_same_bytes(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("scipy")
        mixed = Recipe(method="rtn", candidate_bits=(2, 4), average_bits=3.0, group_size=32)
        text, write = calibration(source), RunFolder.write

        def stop(self: RunFolder, number: int, *rest: Any) -> None:
            write(self, number, *rest)
            if number == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(RunFolder, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, source.parent / "packed", mixed, text, check=False)
        monkeypatch.setattr(RunFolder, "write", write)
        again = quantize(source, source.parent / "packed", mixed, text, check=False)
        whole = quantize(source, source.parent / "whole", mixed, text, check=False)
        assert again.num_resumed == 2 and contents(again.folder) == contents(whole.folder)

    def test_other_settings_are_refused(self, source: Path) -> None:
        target = self.interrupted(source)
        with pytest.raises(CheckpointError, match="its recipe differ"):
            quantize(source, target, Recipe(bits=4, group_size=32), calibration(source), check=False)
        other = Calibration(source.parent / "text.txt", num_samples=6, length=24, seed=1)
        with pytest.raises(CheckpointError, match="its tokens differ"):
            quantize(source, target, GPTQ, other, check=False)

    def test_other_weights_are_refused(self, source: Path) -> None:
        target = self.interrupted(source)
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(2)
        saved(model, source)
        with pytest.raises(CheckpointError, match="its weights differ"):
            quantize(source, target, GPTQ, calibration(source), check=False)

    def test_a_damaged_block_is_told(self, source: Path) -> None:
        target = self.interrupted(source)
        block = target.with_name("packed.partial") / "00001.safetensors"
        data = bytearray(block.read_bytes())
        data[-5] ^= 1
        block.write_bytes(data)
        with pytest.raises(CheckpointError, match="is damaged"):
            quantize(source, target, GPTQ, calibration(source), check=False)

    @pytest.mark.slow
    def test_kill_9(self, source: Path) -> None:
        code = (
            "from tests import torchvision_shim; torchvision_shim.install()\n"
            "import os, signal, sys, torch\n"
            "from pathlib import Path\n"
            "torch.set_num_threads(1)\n"
            "from sparsebit.execution.run_folder import RunFolder\n"
            "from tests.llm.quantizing.test_quantize_folder import GPTQ, calibration, quantize\n"
            "write = RunFolder.write\n"
            "def killed(self, number, *rest):\n"
            "    write(self, number, *rest)\n"
            "    number == 1 and os.kill(os.getpid(), signal.SIGKILL)\n"
            "RunFolder.write = killed\n"
            "source = Path(sys.argv[1])\n"
            "quantize(source, source.parent / 'packed', GPTQ, calibration(source), check=False)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(source)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == -9, done.stderr
        again = quantize(source, source.parent / "packed", GPTQ, calibration(source), check=False)
        whole = quantize(source, source.parent / "whole", GPTQ, calibration(source), check=False)
        assert again.num_resumed == 2
        assert contents(again.folder) == contents(whole.folder)


@pytest.mark.parametrize("change", [{"num_samples": 0}, {"num_samples": -1}, {"length": 1}, {"seed": -1}], ids=str)
def test_numbers_of_a_calibration(change: dict[str, int]) -> None:
    """A negative number of samples took all windows but some."""
    name, value = next(iter(change.items()))
    with pytest.raises(ConfigError, match=f"{name}={value}: allowed: "):
        Calibration(Path("text"), **change)


def test_too_little_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPTQ on 512 tokens lost more than twice as much of book-llama's perplexity as rounding to nearest."""
    folder = with_tokenizer(saved(tiny_model(num_hidden_layers=1), tmp_path / "model"))
    text = write_text(tmp_path / "text.txt")
    with caplog.at_level(logging.WARNING):
        quantize(folder, tmp_path / "a", Recipe(group_size=32), Calibration(text, 12, 32), check=False)
        assert not caplog.records
        quantize(folder, tmp_path / "b", Recipe("rtn", group_size=32), Calibration(text, 1, 32), check=False)
        assert not caplog.records
        quantize(folder, tmp_path / "c", Recipe(group_size=32), Calibration(text, 11, 32), check=False)
    assert "352 tokens of text, and layers with 128 columns" in caplog.text and "give 384 tokens" in caplog.text


def test_files_of_float64(tmp_path: Path) -> None:
    source = with_tokenizer(saved(tiny_model(num_hidden_layers=1), tmp_path / "model", dtype=torch.float64))
    text = Calibration(write_text(tmp_path / "text.txt"), 12, 32)
    mixed = Recipe(group_size=32, sweeps=0, candidate_bits=(4, 8), average_bits=6.0)
    made = quantize(source, tmp_path / "packed", mixed, text)
    assert made.check is not None and made.check.difference < 1e-5
    layers = [part for part in load(made.folder).modules() if isinstance(part, QuantLinear)]
    assert {layer.scales.dtype for layer in layers} == {torch.float32}


def test_batches_without_samples(tmp_path: Path) -> None:
    folder = saved(tiny_model(num_hidden_layers=1), tmp_path / "model")
    with pytest.raises(ConfigError, match="batch_size=0: allowed: 1 or more"):
        quantize(folder, tmp_path / "out", Recipe("rtn", scale_search="none"), batch_size=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class TestRefusals:
    def test_an_output_that_exists(self, source: Path) -> None:
        with pytest.raises(ConfigError, match="exists"):
            quantize(source, source, FAST)

    def test_no_text(self, source: Path) -> None:
        with pytest.raises(ConfigError, match="needs calibration text"):
            quantize(source, source.parent / "packed", GPTQ)

    def test_a_quantized_model(self, source: Path) -> None:
        made = quantize(source, source.parent / "packed", FAST, check=False)
        with pytest.raises(ConfigError, match="quantized already"):
            quantize(made.folder, source.parent / "twice", FAST)

    def test_a_folder_of_something_else(self, source: Path) -> None:
        other = source.parent / "packed.partial"
        other.mkdir()
        (other / "thesis.txt").write_text("words")
        with pytest.raises(CheckpointError, match="not the folder of an interrupted run"):
            quantize(source, source.parent / "packed", FAST)

    def test_logits_that_differ_are_not_kept(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quantizing_module, "need_readable", lambda *_, **__: None)  # it would refuse first
        theirs = load_check_module._logits_of_transformers
        monkeypatch.setattr(load_check_module, "_logits_of_transformers", lambda *args: theirs(*args) * 1.01)
        with pytest.raises(DeploymentError, match=r"logits differ by 0\.0"):
            quantize(source, source.parent / "packed", FAST)
        assert not (source.parent / "packed").exists()
