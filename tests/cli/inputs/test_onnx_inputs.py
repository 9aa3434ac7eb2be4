"""Batches -> arrays for a file's inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("numpy")

import numpy

from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.cli.inputs.onnx_inputs import feeds
from sparsebit.deploy.comparing.file_model import as_feeds
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError


class Fake(Session):
    """A file with these inputs."""

    def __init__(self, sizes: tuple[int | None, ...] | None = None, **types: str) -> None:
        self.inputs, self.input_types = tuple(types), types
        self.input_shapes = {name: (size, None) for name, size in zip(types, sizes or [None] * len(types), strict=True)}

    def run(self, feeds: Any) -> list[Any]:
        raise NotImplementedError


IMAGE = Fake(image="float32")
PAIR = Fake(ids="int64", mask="bool")
X, IDS, MASK = torch.randn(4, 3), torch.arange(4), torch.ones(4)


@pytest.mark.parametrize(
    "batch",
    [X, (X, torch.zeros(4)), [X], {"image": X, "label": 1}, {"pixels": X}, (X.numpy(),)],
    ids=["tensor", "with labels", "list", "by name", "other name", "array"],
)
def test_one_input(batch: Any) -> None:
    found = as_feeds(batch, IMAGE, "net.onnx")
    assert list(found) == ["image"] and numpy.array_equal(found["image"], X.numpy())


@pytest.mark.parametrize(
    "batch",
    [(IDS, MASK.bool()), {"mask": MASK.long(), "ids": IDS}, {"a": IDS, "b": MASK.int()}],
    ids=["in order", "by name", "other names"],
)
def test_two_inputs_with_their_types(batch: Any) -> None:
    found = as_feeds(batch, PAIR, "net.onnx")
    assert found["ids"].tolist() == [0, 1, 2, 3] and found["mask"].all()
    assert (found["ids"].dtype, found["mask"].dtype) == (numpy.int64, numpy.bool_)


def test_half_precision() -> None:
    assert as_feeds(X.bfloat16(), IMAGE, "net.onnx")["image"].dtype == numpy.float32
    assert as_feeds(X, Fake(image="float16"), "net.onnx")["image"].dtype == numpy.float16


@pytest.mark.parametrize(
    ("batch", "session", "told"),
    [
        (X, PAIR, r"net\.onnx takes 2 inputs \(ids, mask\); a batch of the data holds 1 arrays"),
        ({"ids": IDS}, PAIR, "takes ids, mask; the data has no mask"),
        ({"a": X, "b": X}, IMAGE, "takes 1 inputs"),
        ((X, MASK), PAIR, "input ids is of type int64, the data of type float32"),
    ],
    ids=["too few", "name", "too many", "type"],
)
def test_what_does_not_fit(batch: Any, session: Session, told: str) -> None:
    with pytest.raises(DeploymentError, match=told):
        as_feeds(batch, session, "net.onnx")


def test_batch_size_of_the_file() -> None:
    data = [torch.arange(4.0).view(4, 1), torch.arange(4.0, 7.0).view(3, 1)]

    def rows(size: int | None) -> list[list[float]]:
        return [one["image"].ravel().tolist() for one in feeds(data, IMAGE, "net.onnx", size)]

    assert rows(None) == [[0, 1, 2, 3], [4, 5, 6]]
    assert rows(1) == [[0], [1], [2], [3], [4], [5], [6]]
    assert rows(2) == [[0, 1], [2, 3], [4, 5]]  # a rest that fills no batch is left out
    with pytest.raises(
        LoadingError, match=r"takes 8 samples at once, and a batch of the data has 4; give --batch-size 8"
    ):
        rows(8)


@pytest.mark.parametrize(
    ("sizes", "mask_rows"),
    [((3, 2), 3), ((3, None), 3), ((6, 2), 6), ((2, 2), 2)],
    ids=["", "free", "as many", "alike"],
)
def test_a_mask_beside_the_samples_is_not_cut(sizes: tuple[int | None, ...], mask_rows: int) -> None:
    session = Fake(sizes, mask="float32", x="float32")
    mask, x = torch.eye(mask_rows), torch.arange(6.0).view(6, 1)
    found = list(feeds([(mask, x)], session, "net.onnx", 2))
    assert [one["x"].ravel().tolist() for one in found] == [[0, 1], [2, 3], [4, 5]]
    assert all(numpy.array_equal(one["mask"], mask.numpy()) for one in found)
