"""`finetune`: it learns on packed weights, goes on where it was killed, and peft reads what it writes."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.folders import alone_in
from sparsebit.llm import QuantLinear, finetune, load, load_adapter
from sparsebit.llm.finetuning import training, training_loop
from sparsebit.llm.finetuning.layers.packed_lora import add_adapter
from sparsebit.llm.models.model_folder import ModelFolder
from tests.llm.finetuning.tasks import TUNING, instructions, packed_model
from tests.llm.tiny_models import loaded, saved, tiny_model, with_tokenizer
from tests.parameters import first_fast

peft = pytest.importorskip("peft")
TOKENS = torch.arange(3, 35)[None]
# The shim makes torchvision importable beside a CPU-only torch.
RUNNER = """
import sys
from tests import torchvision_shim
torchvision_shim.install()
from sparsebit.cli.main import app
app(sys.argv[1:])
"""


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("bits", first_fast([3, 4, 2, 8], 2))
def test_it_learns_and_is_loaded_again(bits: int, tmp_path: Path) -> None:
    model, data = packed_model(tmp_path, bits), instructions(tmp_path)
    made = finetune(model, data, tmp_path / "adapter", replace(TUNING, num_epochs=6))
    assert made.losses[-1] < 0.8 * made.losses[0] and made.num_samples == 16
    assert made.num_learned == 6 * 16 * 5  # four letters and the end
    record = json.loads((made.folder / "training.json").read_text())
    assert record["losses"] == list(made.losses) and record["tuning"]["rank"] == 4
    assert not (tmp_path / "adapter.partial").exists()
    tuned = load_adapter(load(model), made.folder)
    assert sum(isinstance(part, QuantLinear) for part in tuned.modules()) == 7
    with torch.no_grad():
        before, found = load(model)(TOKENS).logits, tuned(TOKENS).logits
        # peft alone, on the model with dequantized weights: the format is its own.
        dense = loaded(tmp_path / "float-llama")
        for name, part in load(model).named_modules():
            if isinstance(part, QuantLinear):
                dense.get_submodule(name).weight.copy_(part.packed.dequantize(torch.float32))
        expected = peft.PeftModel.from_pretrained(dense, str(made.folder))(TOKENS).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert float((found - before).abs().max()) > 0.1


def test_the_step_is_that_of_peft_on_dequantized_weights(tmp_path: Path) -> None:
    """Same data, same adapters, weights as floats: the same losses."""
    model, data = packed_model(tmp_path), instructions(tmp_path)
    dense = loaded(tmp_path / "float-llama")
    with torch.no_grad():
        for name, part in load(model).named_modules():
            if isinstance(part, QuantLinear):
                dense.get_submodule(name).weight.copy_(part.packed.dequantize(torch.float32))
    floats = with_tokenizer(saved(dense, tmp_path / "dense", dtype=torch.float32))
    packed, plain = (
        finetune(folder, data, tmp_path / f"adapter-{folder.name}", replace(TUNING, dropout=0.0))
        for folder in (model, floats)
    )
    assert packed.losses == pytest.approx(plain.losses, rel=1e-4)


def test_options_that_do_not_change_the_result(tmp_path: Path) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    plain = replace(TUNING, dropout=0.0, num_epochs=1, packing=False)
    expected = finetune(model, data, tmp_path / "0", plain)
    changes: list[dict[str, Any]] = [{"gradient_checkpointing": False}, {"micro_batch_size": 4}]
    for number, change in enumerate(changes, 1):
        found = finetune(model, data, tmp_path / str(number), replace(plain, **change))
        assert found.losses == pytest.approx(expected.losses, rel=1e-4), change


class Killed(Exception):
    """Stands for a signal."""


def test_an_interrupted_run_goes_on_with_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    whole = finetune(model, data, tmp_path / "whole", TUNING)
    number = len(whole.losses)
    original = training_loop.TrainingLoop.step

    def dying(self: Any, step: int) -> None:
        if step == number - 1:
            raise Killed
        original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(training_loop.TrainingLoop, "step", dying)
        with pytest.raises(Killed):
            finetune(model, data, tmp_path / "parted", TUNING, save_every=2)
    states = sorted((tmp_path / "parted.partial").glob("step-*"))
    assert states and not (tmp_path / "parted").exists()
    with pytest.raises(CheckpointError, match="its tuning differ"):
        finetune(model, data, tmp_path / "parted", replace(TUNING, seed=1))
    resumed = finetune(model, data, tmp_path / "parted", TUNING, save_every=2)
    assert 0 < resumed.num_resumed < number
    assert resumed.losses == whole.losses and weights(resumed.folder) == weights(whole.folder)


@pytest.mark.parametrize("changed", ["last weight", "config"])
def test_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    monkeypatch.setattr(training, "_write", lambda *_: None)  # the states stay
    finetune(model, data, tmp_path / "out", replace(TUNING, max_steps=1), save_every=1)
    (model / "checksums.json").unlink()
    if changed == "config":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    else:
        file = ModelFolder(model).files["model.embed_tokens.weight"]
        tensors = load_file(file)
        tensors["model.embed_tokens.weight"][-1, -1] += 1
        save_file(tensors, file)
    with pytest.raises(CheckpointError, match="its model differ"):
        finetune(model, data, tmp_path / "out", replace(TUNING, max_steps=1), save_every=1)


def test_a_damaged_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    monkeypatch.setattr(training, "_write", lambda *_: None)  # the states stay
    finetune(model, data, tmp_path / "out", replace(TUNING, max_steps=1), save_every=1)
    (state,) = (tmp_path / "out.partial").glob("step-*")
    content = bytearray(state.read_bytes())
    content[-3] ^= 1
    state.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        finetune(model, data, tmp_path / "out", replace(TUNING, max_steps=1), save_every=1)


@pytest.mark.slow  # two imports of torch, transformers and peft
def test_a_killed_process_goes_on(tmp_path: Path, project_root: Path) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"}

    def command(output: str) -> list[str]:
        options = "--rank 4 --length 24 --batch-size 2 --epochs 8 --learning-rate 0.005 --dropout 0.1 --save-every 3 -q"
        return [
            sys.executable,
            "-c",
            RUNNER,
            "llm",
            "finetune",
            *map(str, (model, data)),
            "-o",
            output,
            *options.split(),
        ]

    how: Any = {"cwd": tmp_path, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command("whole"), check=True, **how)
    started = subprocess.Popen(command("parted"), **how)
    partial = tmp_path / "parted.partial"
    while started.poll() is None and not list(partial.glob("step-*")):
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL and not (tmp_path / "parted").exists()
    subprocess.run(command("parted"), check=True, **how)
    one, other = (json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "parted"))
    assert other["num_resumed"] >= 3 and other["losses"] == one["losses"]
    assert weights(tmp_path / "parted") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("nothing",)}, "no layer is called so; there are .*q_proj"),
        ({"optimizer": "adamw8bit"}, "bitsandbytes runs on GPUs"),
        ({"learning_rate": 1e20, "num_epochs": 4, "max_grad_norm": 0.0}, "is not finite"),
    ],
    ids=str,
)
def test_what_cannot_be_done(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    with pytest.raises(ConfigError, match=message):
        finetune(model, data, tmp_path / "out", replace(TUNING, **change))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"rank": 0}, {"dropout": 1.0}, {"schedule": "x"}, {"too_long": "x"}], ids=str)
def test_values_that_do_not_exist(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed:"):
        replace(TUNING, **change)


def test_an_adapter_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        load_adapter(tiny_model(), tmp_path)
    model = packed_model(tmp_path)
    made = finetune(model, instructions(tmp_path), tmp_path / "out", replace(TUNING, max_steps=1, targets=("q_proj",)))
    names = json.loads((made.folder / "adapter_config.json").read_text())["target_modules"]
    assert names == ["q_proj"]
    other = copy.deepcopy(tiny_model(hidden_size=32, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_adapter(other, made.folder)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_an_adapter_of_a_model_with_other_blocks(num_blocks: int, tmp_path: Path) -> None:
    model = packed_model(tmp_path, num_hidden_layers=2)
    made = finetune(model, instructions(tmp_path), tmp_path / "out", replace(TUNING, max_steps=1, targets=("q_proj",)))
    with pytest.raises(CheckpointError, match="2 tensors are missing" if num_blocks == 3 else "2 are left over"):
        load_adapter(tiny_model(num_hidden_layers=num_blocks), made.folder)


def test_layers_of_experts_without_an_adapter_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(saved(tiny_model("mixtral", num_hidden_layers=1), tmp_path / "model"))
    config = add_adapter(model).peft_config["default"]
    assert "12 layers get no adapter (w1, w2, w3)" in caplog.text
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"} and not config.target_parameters
    for targets in (("w1", "w2", "w3", "q_proj"), ("w1",)):
        with pytest.raises(ConfigError, match="no adapter"):
            add_adapter(load(tmp_path / "model"), targets=targets)


def test_a_second_process_on_the_same_output_is_refused(tmp_path: Path) -> None:
    model, data, partial = packed_model(tmp_path), instructions(tmp_path), tmp_path / "out.partial"
    partial.mkdir()
    with alone_in(partial), pytest.raises(CheckpointError, match="another process works in"):
        finetune(model, data, tmp_path / "out", replace(TUNING, max_steps=1))
    assert finetune(model, data, tmp_path / "out", replace(TUNING, max_steps=1)).folder.is_dir()


def test_an_adapter_that_took_its_first_values_from_the_weight_is_refused(tmp_path: Path) -> None:
    model = packed_model(tmp_path, 4)
    made = finetune(model, instructions(tmp_path), tmp_path / "adapter", TUNING)
    expected = load_adapter(load(model), made.folder)(TOKENS).logits
    file = made.folder / "adapter_config.json"
    config = json.loads(file.read_text())
    (made.folder / "checksums.json").unlink()
    file.write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    with pytest.raises(CheckpointError, match="changed the weights below the adapter"):
        load_adapter(load(model), made.folder)
    file.write_text(json.dumps(config | {"init_lora_weights": "orthogonal"}))
    assert torch.equal(load_adapter(load(model), made.folder)(TOKENS).logits, expected)


def test_a_flipped_bit_of_an_adapter_or_of_its_model_is_found(tmp_path: Path) -> None:
    model, data = packed_model(tmp_path), instructions(tmp_path)
    made = finetune(model, data, tmp_path / "adapter", TUNING)
    whole = load(model)
    flip_a_bit(made.folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: damaged"):
        load_adapter(whole, made.folder)
    flip_a_bit(sorted(model.glob("*.safetensors"))[1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-.*safetensors: damaged"):
        finetune(model, data, tmp_path / "other", TUNING)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
