"""Warnings where a GGUF file needs more bits than were asked for."""

from __future__ import annotations

import logging

import pytest
import torch

from sparsebit.llm.checkpoint.layer_format import LayerFormat
from sparsebit.llm.gguf.file import warn_of_growth
from sparsebit.llm.gguf.tensors import GgufTensor


def tensor(kind: str, *parameters: str, is_rounded: bool = False) -> GgufTensor:
    return GgufTensor("blk.0.attn_q.weight", kind, (1,), parameters, None, is_rounded, lambda: torch.zeros(1))


@pytest.mark.parametrize(
    ("bits", "symmetric", "kind", "words"),
    [
        (4, False, "Q5_0", "2 layers of 4 bits with zero points are stored as Q5_0, 5.5 bits a weight"),
        (3, True, "Q4_0", "2 layers of 3 bits are stored as Q4_0, 4.5 bits a weight"),
        (4, True, "Q4_0", None),
        (8, True, "Q8_0", None),
    ],
)
def test_codes_in_larger_types(
    bits: int, symmetric: bool, kind: str, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    formats = {name: LayerFormat(bits, 32, symmetric) for name in ("a", "b")}
    with caplog.at_level(logging.WARNING):
        warn_of_growth([tensor(kind, "a.weight", "b.weight"), tensor("F32", "norm.weight")], formats)
    assert len(caplog.messages) == (words is not None)
    if words is not None:
        assert caplog.messages[0].startswith(words) and "--for llama.cpp" in caplog.messages[0]


def test_rows_that_the_asked_type_does_not_fill(caplog: pytest.LogCaptureFixture) -> None:
    tensors = [tensor("Q5_0", "a.weight", is_rounded=True), tensor("Q4_K", "b.weight", is_rounded=True)]
    warn_of_growth([*tensors, tensor("Q6_K", "c.weight", is_rounded=True)], {"a": LayerFormat(4, 32, True)})
    (message,) = caplog.messages
    assert message.startswith("1 tensors are stored as Q5_0, 5.5 bits a weight, instead of Q4_K, 4.5 bits")
