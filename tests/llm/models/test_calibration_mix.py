"""Calibration windows of several kinds of text, as many as the widest layer needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebit.errors import ConfigError
from sparsebit.llm.models.calibration_text import (
    LEAST_TOKENS,
    MOST_TOKENS,
    default_num_windows,
    draw_windows,
    even_shares,
)


class Letters:
    """A token for each letter."""

    def __call__(self, text: str, **how: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}


def write(path: Path, letter: str, num_letters: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(letter * num_letters)
    return path


def draw(*texts: Path, **how: Any) -> Any:
    return draw_windows(texts, Letters(), **{"num_samples": 8, "length": 4, "widest": 16, **how})


def test_each_text_gives_as_many_windows(tmp_path: Path) -> None:
    texts = [write(tmp_path / f"{letter}.txt", letter, size) for letter, size in (("a", 4000), ("b", 8), ("c", 400))]
    found = draw(*texts)
    assert found.shares == dict(zip(map(str, texts), (3, 2, 3), strict=True))
    counts = {chr(letter): int((found.tokens[:, 0] == letter).sum()) for letter in found.tokens[:, 0].tolist()}
    assert counts == {"a": 3, "b": 2, "c": 3}
    assert found.tokens.tolist() == draw(*texts).tokens.tolist() != draw(*texts, seed=1).tokens.tolist()


def test_windows_of_one_text_are_those_of_before(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + number % 90) for number in range(400)))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))[:8]
    every = Letters()(text.read_text())["input_ids"][0].view(100, 4)
    assert draw(text, seed=3).tokens.tolist() == every[order].tolist()


def test_a_limit_is_not_a_demand(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "a", 20)
    assert len(draw(text, is_limit=True).tokens) == 5
    with pytest.raises(ConfigError, match="5"):
        draw(text)


def test_files_of_a_folder_are_kinds(tmp_path: Path) -> None:
    first, second = (write(tmp_path / "texts" / f"{letter}.txt", letter, 400) for letter in "ab")
    assert draw(tmp_path / "texts").shares == {str(first): 4, str(second): 4}
    write(tmp_path / "texts" / "c.txt", "c", 3)  # fills no window: all are one kind
    assert draw(tmp_path / "texts").shares == {str(tmp_path / "texts"): 8}
    for number in range(20):
        write(tmp_path / "many" / f"{number}.txt", "a", 40)
    assert draw(tmp_path / "many").shares == {str(tmp_path / "many"): 8}


@pytest.mark.parametrize(
    ("widest", "length", "wanted"),
    [(16, 512, 64), (4096, 512, 64), (8192, 512, 128), (14336, 512, 224), (60000, 512, 256), (14336, 2048, 56)],
)
def test_the_number_of_windows_follows_the_widest_layer(widest: int, length: int, wanted: int) -> None:
    found = default_num_windows(widest, length)
    assert found == wanted and LEAST_TOKENS <= found * length <= MOST_TOKENS


def test_a_text_that_is_shorter_than_the_default(tmp_path: Path) -> None:
    """At least 64 windows of 512 tokens, as many as there are."""
    text = write(tmp_path / "text.txt", "a", 100 * 512)
    assert len(draw(text, num_samples=None, length=512, widest=14336).tokens) == 100
    assert len(draw(text, num_samples=None, length=512, widest=64).tokens) == 64
    with pytest.raises(ConfigError, match="has 100 windows of 512 tokens, and 101 are wanted"):
        draw(text, num_samples=101, length=512)
    short = write(tmp_path / "short.txt", "a", 10 * 512)
    with pytest.raises(ConfigError, match="has 10 windows of 512 tokens, and 64 are wanted"):
        draw(short, num_samples=None, length=512)


def test_shares() -> None:
    assert even_shares({"a": 1, "b": 100, "c": 100}, 10) == {"a": 1, "b": 5, "c": 4}
    assert even_shares({"a": 2, "b": 2}, 10) == {"a": 2, "b": 2}
