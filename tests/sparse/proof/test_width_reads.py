"""Sizes that code uses as numbers are told from sizes that make shapes."""

from __future__ import annotations

import ast

import pytest

from sparsebit.sparse.proof.width_reads import numbers_read

CASES = {
    "h = h / h.shape[-1] ** 0.5": {("h", -1)},
    "scale = h.size(-1) ** -0.5\nh = h * scale": {("h", -1)},
    "n, c = h.shape\nh = h / math.sqrt(c)": {("h", 1)},
    "h = h.mean(-1, keepdim=True)": {("h", -1)},
    "h = F.softmax(h, dim=1)": {("h", 1)},
    "h = h.view(h.shape[0], -1, h.shape[-1] // 4)": set(),
    "n, c = h.shape\nd = c // 4\nh = h.reshape(n, 4, d)": set(),
    "x = x[:, : h.shape[1]]": set(),
    "if h.shape[1] > 4:\n    h = h * 2": set(),
}


@pytest.mark.parametrize("code", CASES)
def test_numbers(code: str) -> None:
    tree = ast.parse(code)
    assert numbers_read(tree.body, tree) == CASES[code]
