from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from sparsebit.graph.values.comparison import difference


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass
class Record:
    x: Any


X = torch.linspace(-1, 1, 8)


@pytest.mark.parametrize(("got", "expected"), [
    (X, X + 1e-6), (X.double(), X.double()), (X.bfloat16(), (X + 0.001).bfloat16()),
    (torch.tensor([float("nan"), float("-inf"), 1.0]), torch.tensor([float("nan"), float("-inf"), 1.0])),
    (X[:0], X[:0]), (torch.zeros(3), torch.zeros(3)), ({"a": (X, [None, 3, "s"])}, {"a": (X.clone(), [None, 3, "s"])}),
    (Pair(X, 1.5), Pair(X, 1.5)), (Record(X), Record(X)),
    (torch.view_as_complex(X.reshape(4, 2)), torch.view_as_complex(X.reshape(4, 2))), (X.to_sparse(), X.to_sparse()),
])  # fmt: skip
def test_the_same(got: Any, expected: Any) -> None:
    assert difference(got, expected) is None


@pytest.mark.parametrize(
    ("got", "expected", "says"),
    [
        (X, X + 1e-3, "differs by 0.001 where the largest value is 1"),
        (X, X.double(), "float32 tensor of shape (8,) in place of a float64 tensor"),
        (X, X[None], "in place of a float32 tensor of shape (1, 8)"),
        (X, None, "in place of NoneType"),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), "finite, infinite or NaN"),
        (torch.tensor([1.0]), torch.tensor([float("inf")]), "finite, infinite or NaN"),
        (torch.tensor([float("-inf")]), torch.tensor([float("inf")]), "finite, infinite or NaN"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 elements"),
        ({"a": X}, {"b": X}, "keys ['a'] in place of dict with the keys ['b']"),
        ([X], (X,), "list of 1 in place of tuple of 1"),
        (Pair(X, X), Pair(X, -X), "the output[1]"),
        (Record(X), Record(-X), "the output.x"),
        ((1, "a"), (1, "b"), "the output[1] is 'a' in place of 'b'"),
        (torch.zeros(2), torch.full((2,), 1e-20), "differs by"),
    ],
)
def test_what_differs(got: Any, expected: Any, says: str) -> None:
    found = difference(got, expected)
    assert found is not None and says in found
