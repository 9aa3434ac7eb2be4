"""Training on the float model's predictions: better on other text, resumable with the same bytes, read by everyone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sparsebit.errors import CheckpointError, ConfigError
from sparsebit.llm import Calibration, Recipe, load, quantize
from sparsebit.llm.checkpoint.packed_folder import FinishedBlock
from sparsebit.llm.models.architectures import architecture_of, linears
from sparsebit.llm.models.model_folder import ModelFolder
from sparsebit.llm.models.skeleton import Skeleton
from sparsebit.llm.quantizing import end_to_end
from sparsebit.llm.quantizing.block_walk import BlockWalk
from sparsebit.llm.quantizing.end_to_end import EndToEndTraining, checks
from sparsebit.llm.quantizing.learned_block import LearnedBlock
from tests.llm.quantizing.test_quantize_folder import contents, logits
from tests.llm.tiny_models import loaded, saved, stopped_after, tiny_model, with_tokenizer, write_text

SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 2}
RECIPE = Recipe("rtn", 2, 32, scale_search="none", end_to_end=24)


def source_of(model: Any, folder: Path) -> Path:
    write_text(folder / "text.txt")
    return with_tokenizer(saved(model, folder / "model"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return source_of(tiny_model("llama", **SMALL), tmp_path)


def calibration(source: Path) -> Calibration:
    return Calibration(source.parent / "text.txt", num_samples=10, length=24)


def test_end_to_end(source: Path) -> None:
    pytest.importorskip("compressed_tensors")
    made = quantize(source, source.parent / "packed", RECIPE, calibration(source))
    assert made.check is not None and made.check.difference <= 1e-3  # of plain transformers
    found = made.end_to_end
    assert found is not None and found.kept_step in checks(24) and found.after < found.before
    assert found.num_windows + found.num_held == 108  # 24 steps of 4, and an eighth of that held out
    plain = quantize(source, source.parent / "plain", replace(RECIPE, end_to_end=0), check=False)
    wanted = logits(loaded(source)).log_softmax(-1)
    errors = [
        float(F.kl_div(logits(load(folder)).log_softmax(-1), wanted, log_target=True, reduction="batchmean"))
        for folder in (made.folder, plain.folder)
    ]
    assert errors[0] < errors[1]


def training(folder: Path, tokens: torch.Tensor, tmp_path: Path, steps: int = 8, budget: int = 1 << 30) -> Any:
    """A training of the blocks of a model that were rounded to nearest, and its run's folder."""
    made = quantize(folder, tmp_path / "start", replace(RECIPE, end_to_end=0), check=False)
    packed, skeleton = load(made.folder), Skeleton(ModelFolder(folder))
    row = architecture_of(skeleton.model)
    walk = BlockWalk(skeleton, row, tokens, with_float=False, batch_size=2, memory_budget=budget)
    paths = [f"{row.blocks}.{number}" for number in range(walk.num_blocks)]

    def finished(number: int) -> FinishedBlock:
        names = linears(skeleton.model.get_submodule(paths[number]))
        return FinishedBlock({name: packed.get_submodule(f"{paths[number]}.{name}").packed for name in names})

    return EndToEndTraining(walk, paths, finished, steps, [{} for _ in paths]), packed


TOKENS = torch.randint(3, 96, (7, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_whole_model(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, with weights that are built again for each block, as autograd through all of them at once."""
    small = SMALL if model_type == "llama" else {}
    source = saved(tiny_model(model_type, **small), tmp_path / "model", dtype=torch.float32)
    found, packed = training(source, TOKENS, tmp_path)
    found._prepare()
    seen: dict[int, Any] = {}
    monkeypatch.setattr(LearnedBlock, "step", lambda block, _, gradients, *__: seen.update({id(block): gradients}))
    loss = found._step(0, 0)
    for number in range(len(found.blocks)):
        found._take(number)
    hidden = found.walk.store.get(("first", 0))
    for number, block in enumerate(found.blocks):
        hidden = found.walk.run(block.block, number, 0, hidden)
    mine = found.walk.behind_blocks(TOKENS[:2], hidden).log_softmax(-1)
    with torch.no_grad():
        wanted = loaded(source)(TOKENS[:2], use_cache=False).logits.log_softmax(-1)
        torch.testing.assert_close(mine, packed(TOKENS[:2], use_cache=False).logits.log_softmax(-1))
    whole = F.kl_div(mine, wanted, log_target=True, reduction="sum") / TOKENS[:2].numel()
    assert loss == pytest.approx(float(whole.detach()), rel=1e-4)
    for block in found.blocks:
        expected = torch.autograd.grad(whole, block.parameters(), retain_graph=True)
        for one, other in zip(seen[id(block)], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("num_parts", [6, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 5, 9, 12))])
def test_a_killed_run_ends_with_the_same_bytes(source: Path, num_parts: int) -> None:
    """Killed before the training, while the first or a later state is written, and before it counts."""
    whole = quantize(source, source.parent / "whole", RECIPE, calibration(source), check=False)
    again = source.parent / "again"
    with stopped_after(num_parts):
        quantize(source, again, RECIPE, calibration(source), check=False)
    with pytest.raises(CheckpointError, match="its recipe, tokens of the training end to end differ"):
        quantize(source, again, replace(RECIPE, end_to_end=25), calibration(source), check=False)
    made = quantize(source, again, RECIPE, calibration(source), check=False)
    assert contents(made.folder) == contents(whole.folder) and made.end_to_end == whole.end_to_end
    assert made.num_resumed == 2 and not again.with_name("again.partial").exists()


@pytest.mark.slow
def test_states_on_disk_give_the_same_result(source: Path) -> None:
    made = [
        quantize(source, source.parent / str(budget), RECIPE, calibration(source), check=False, memory_budget=budget)
        for budget in (1, 1 << 30)
    ]
    assert contents(made[0].folder) == contents(made[1].folder)


def test_what_is_worse_on_held_out_text_is_not_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_to_end, "LATENT_RATES", (3.0, 0.3))  # it jumps about
    made = quantize(source, source.parent / "packed", replace(RECIPE, end_to_end=4), calibration(source), check=False)
    plain = quantize(source, source.parent / "plain", replace(RECIPE, end_to_end=0), check=False)
    assert made.end_to_end is not None and made.end_to_end.kept_step == 0
    assert made.end_to_end.after == made.end_to_end.before
    assert torch.equal(logits(load(made.folder)), logits(load(plain.folder)))


def test_a_damaged_note_is_an_error(source: Path) -> None:
    with stopped_after(9):
        quantize(source, source.parent / "packed", RECIPE, calibration(source), check=False)
    (source.parent / "packed.partial" / end_to_end.NOTE).write_text('{"step": ')
    with pytest.raises(CheckpointError, match=r"end_to_end.json is damaged"):
        quantize(source, source.parent / "packed", RECIPE, calibration(source), check=False)


def test_wrong_options_are_refused(source: Path) -> None:
    with pytest.raises(ConfigError, match="end_to_end=-1"):
        Recipe(end_to_end=-1)
    with pytest.raises(ConfigError, match="end_to_end=5 with method='fp8'"):
        Recipe("fp8", end_to_end=5)
    with pytest.raises(ConfigError, match="end_to_end=24 needs calibration text"):
        quantize(source, source.parent / "packed", RECIPE)
    with pytest.raises(ConfigError, match="end_to_end=24: these compute in float32"):
        quantize(source, source.parent / "packed", RECIPE, calibration(source), dtype=torch.bfloat16)


MIXTRAL = {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "sizes", "dtype", "changes"),
    [
        ("mixtral", MIXTRAL, torch.float16, {"symmetric": True}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, torch.float16, {}),
        ("gemma2", {}, torch.bfloat16, {"bits": 3}),
        ("opt", {}, torch.float32, {"group_size": 0}),
        ("llama", SMALL, torch.float16, {"method": "awq", "scale_search": "nearest"}),
        ("llama", SMALL, torch.float16, {"method": "gptq", "scale_search": "nearest", "rotate": True}),
        ("llama", {**SMALL, "num_hidden_layers": 1}, torch.float16, {"bits": 8, "method": "efficientqat", "steps": 3}),
    ],
    ids=["experts", "transposed", "bfloat16", "rows", "awq", "rotated", "one block"],
)
def test_other_models_and_methods(
    model_type: str, sizes: dict[str, Any], dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The folder is what the readers compute, and what was measured on held-out text."""
    pytest.importorskip("compressed_tensors")
    write_text(tmp_path / "text.txt")
    source = with_tokenizer(saved(tiny_model(model_type, **sizes), tmp_path / "model", dtype=dtype))
    recipe = replace(RECIPE, **changes, end_to_end=12)
    with torch.random.fork_rng():
        made = quantize(source, tmp_path / "packed", recipe, calibration(source))
    assert made.check is not None and made.check.difference <= 1e-3
    assert made.end_to_end is not None and made.end_to_end.after <= made.end_to_end.before
    if model_type != "gpt2":
        plain = quantize(source, tmp_path / "plain", replace(recipe, end_to_end=0), calibration(source), check=False)
        is_other = not torch.equal(logits(load(made.folder)), logits(load(plain.folder)))
        assert is_other == bool(made.end_to_end.kept_step)


def test_a_text_of_one_batch_is_an_error(source: Path) -> None:
    (source.parent / "text.txt").write_text("ab" * 60)  # 5 windows of 24
    short = Calibration(source.parent / "text.txt", num_samples=4, length=24)
    with pytest.raises(ConfigError, match="5 windows of text in batches of 8: end-to-end training learns on one"):
        quantize(source, source.parent / "packed", RECIPE, short, check=False, batch_size=8)
