"""Perplexity: known values, windows without context, and the float figure of a real model."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.llm.models.calibration_text import token_stream, windows
from sparsebit.llm.models.hub_classes import load_tokenizer
from sparsebit.llm.running.perplexity import perplexity
from tests.llm.tiny_models import loaded, tiny_model


class Bigrams(nn.Module):
    """Predicts each token from the one in front of it, by a table of logits."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not self.training and not use_cache
        return SimpleNamespace(logits=self.table[input_ids])


def test_equal_chances() -> None:
    found = perplexity(Bigrams(torch.zeros(7, 7)), torch.randint(0, 7, (5, 4)), batch_size=2)
    assert found.value == pytest.approx(7.0)
    assert (found.num_windows, found.num_predictions) == (5, 15)


def test_a_known_table() -> None:
    table = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    found = perplexity(Bigrams(table), torch.tensor([[0, 0, 1]]))
    assert found.value == pytest.approx(math.sqrt(1 / (0.75 * 0.25)))


def test_the_mode_of_training_comes_back() -> None:
    model = Bigrams(torch.zeros(2, 2)).train()
    perplexity(model, torch.zeros(1, 3, dtype=torch.int64))
    assert model.training


def test_batches_do_not_matter() -> None:
    model, tokens = tiny_model(), torch.randint(3, 96, (5, 16))
    assert perplexity(model, tokens, batch_size=1).value == pytest.approx(perplexity(model, tokens).value, rel=1e-5)


def test_nan_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="not finite"):
        perplexity(Bigrams(torch.full((2, 2), torch.nan)), torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.slow
def test_book_llama(shared_data: Path) -> None:
    folder = shared_data / "book_llama"
    stream = token_stream(shared_data / "text" / "books_heldout.txt", load_tokenizer(folder))
    found = perplexity(loaded(folder), windows(stream, 512, 4))
    assert found.value == pytest.approx(34.95, abs=0.01)  # 42.98 on the first 60 windows


def test_windows_beyond_the_positions_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    tokens = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(0))
    perplexity(tiny_model(num_hidden_layers=1, max_position_embeddings=24), tokens)
    assert not caplog.text
    perplexity(tiny_model(num_hidden_layers=1, max_position_embeddings=16), tokens)
    assert "24 tokens in a row, and the model was made for 16" in caplog.text
    with pytest.raises(ConfigError, match="has 16 positions"):
        perplexity(tiny_model("opt", num_hidden_layers=1, max_position_embeddings=16), tokens)


@pytest.mark.parametrize("shape", [(0, 8), (2, 1), (8,)], ids=["no windows", "one token", "one dimension"])
def test_windows_without_a_prediction(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="of length 2 or more"):
        perplexity(Bigrams(torch.zeros(2, 2)), torch.zeros(shape, dtype=torch.int64))


def test_numbers_that_do_not_exist() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ConfigError, match="batch_size=0"):
        perplexity(Bigrams(torch.zeros(2, 2)), tokens, batch_size=0)
    with pytest.raises(ConfigError, match="the token -1"):
        perplexity(tiny_model(), tokens - 1)
    with pytest.raises(ConfigError, match="num_windows=-1"):
        windows(tokens.flatten(), 4, -1)
