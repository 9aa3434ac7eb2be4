"""Rows of samples: each sample once, rows full, positions and targets of each sample its own."""

from __future__ import annotations

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm.finetuning.data.instructions import Sample
from sparsebit.llm.finetuning.data.sample_packing import IGNORED, check_packing, make_batch, pack_samples, plan_epochs
from sparsebit.llm.finetuning.data.token_loss import choose_loss, forward, summed_loss, summed_loss_in_blocks
from tests.llm.tiny_models import tiny_model


def sample(*tokens: int, prompt: int = 1) -> Sample:
    return Sample(tokens, (False,) * prompt + (True,) * (len(tokens) - prompt))


def random_samples(count: int = 40, most: int = 20) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, most, (count,), generator=generator).tolist()
    return [sample(*torch.randint(3, 90, (size,), generator=generator).tolist()) for size in sizes]


def test_a_known_batch() -> None:
    batch = make_batch([sample(5, 6, 7), sample(8, 9), sample(1, 2, 3, 4, prompt=3)], [[0, 1], [2]], pad_token=0)
    no = IGNORED
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.targets.tolist() == [[6, 7, no, 9, no], [no, no, 4, no, no]]
    assert int((batch.targets != IGNORED).sum()) == 4


def test_every_sample_once_and_no_row_too_long() -> None:
    samples = random_samples(300)
    rows = pack_samples(samples, range(300), 32, packing=True)
    assert sorted(number for row in rows for number in row) == list(range(300))
    sizes = [sum(len(samples[number].tokens) for number in row) for row in rows]
    assert max(sizes) <= 32 and sum(sizes) / (32 * len(rows)) > 0.95
    assert pack_samples(samples, [2, 0, 1], 32, packing=False) == [[2], [0], [1]]


def test_epochs_have_different_orders_of_the_same_samples() -> None:
    samples = random_samples(10)
    how = {"packing": False, "num_epochs": 2, "batch_size": 4, "seed": 3}
    steps = plan_epochs(samples, 32, **how)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = ([row[0] for step in steps[part] for row in step] for part in (slice(0, 3), slice(3, 6)))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert steps == plan_epochs(samples, 32, **how) != plan_epochs(samples, 32, **how | {"seed": 4})


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi", "phi3"])
def test_a_packed_row_has_the_loss_of_its_samples(kind: str) -> None:
    model, samples = tiny_model(kind), random_samples(6)
    check_packing(model, samples, lambda batch: forward(model, batch).logits)
    with torch.no_grad():
        packed = summed_loss(model, make_batch(samples, [[0, 1, 2], [3, 4, 5]], 0))
        apart = sum(summed_loss(model, make_batch(samples, [[number]], 0)) for number in range(6))
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-3)


def test_a_model_that_mixes_samples_is_refused() -> None:
    model = tiny_model()
    original = model.forward
    model.forward = lambda *args, position_ids=None, **kwargs: original(*args, **kwargs)
    with pytest.raises(ConfigError, match="would see each other; switch packing off"):
        check_packing(model, random_samples(6), lambda batch: forward(model, batch).logits)


@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_the_loss_in_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebit.llm.finetuning.data.token_loss._BLOCK_ELEMENTS", 7 * 96)
    model, batch = tiny_model(kind), make_batch(random_samples(6), [[0, 1, 2], [3, 4, 5]], 0)
    model.requires_grad_(False)
    layer = model.model.layers[0].mlp
    weight = next(layer.parameters()).requires_grad_(True)
    assert choose_loss(model, batch) is summed_loss_in_blocks
    ours, theirs = summed_loss_in_blocks(model, batch), summed_loss(model, batch)
    torch.testing.assert_close(ours, theirs)
    (found,), (wanted,) = (torch.autograd.grad(loss, weight) for loss in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_logits_that_the_model_changes_are_taken_whole() -> None:
    model = tiny_model("gemma2", final_logit_softcapping=2.0)
    model.requires_grad_(False)
    assert choose_loss(model, make_batch(random_samples(6), [[0, 1, 2]], 0)) is summed_loss
