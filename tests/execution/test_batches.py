from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError
from sparsebit.execution.batches import as_call, calls, num_samples, num_samples_run, rows_of, to_device

X, Y, Z = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


def model(forward: Any) -> nn.Module:
    return type("Model", (nn.Module,), {"forward": forward})()  # type: ignore[no-any-return]


one = model(lambda self, x, mask=None: x)
two = model(lambda self, x, y, mask=None: x)
keyword_only = model(lambda self, x, *, y: x)
many = model(lambda self, *xs: xs)
anything = model(lambda self, x, **rest: x)
nothing_required = model(lambda self, x=None, y=None: x)


@pytest.mark.parametrize(
    ("module", "batch", "expected"),
    [
        pytest.param(one, X, ((X,), {}), id="tensor"),
        pytest.param(one, (X, Y), ((X,), {}), id="labels-are-cut"),
        pytest.param(one, [X, Y], ((X,), {}), id="list"),
        pytest.param(two, (X, Y, Z), ((X, Y), {}), id="two-required"),
        pytest.param(two, Batch(X, Y), ((X, Y), {}), id="namedtuple"),
        pytest.param(many, (X, Y, Z), ((X, Y, Z), {}), id="variable"),
        pytest.param(nothing_required, (X, Y), ((X,), {}), id="at-least-one"),
        pytest.param(one, {"x": X, "mask": Y}, ((), {"x": X, "mask": Y}), id="mapping"),
        pytest.param(one, {"x": X, "labels": Y}, ((), {"x": X}), id="mapping-labels-are-cut"),
        pytest.param(anything, {"x": X, "labels": Y}, ((), {"x": X, "labels": Y}), id="mapping-anything-goes"),
        pytest.param(one, UserDict(x=X), ((), {"x": X}), id="tokenizer-output"),
        pytest.param(keyword_only, {"x": X, "y": Y}, ((), {"x": X, "y": Y}), id="keyword-only"),
        pytest.param(one, {"a": X, "b": Y}, (({"a": X, "b": Y},), {}), id="the-mapping-is-the-argument"),
        pytest.param(two, {"a": X}, ((), {"a": X}), id="mapping-that-fits-nothing"),
    ],
)
def test_as_call(module: nn.Module, batch: Any, expected: Any) -> None:
    assert as_call(batch, module) == expected


@pytest.mark.parametrize("batch", [3, "text", None])
def test_what_is_no_batch(batch: Any) -> None:
    with pytest.raises(CalibrationError, match=rf"type {type(batch).__name__} cannot be fed .* yield a tensor"):
        as_call(batch, one)


def test_calls() -> None:
    assert list(calls([X, (Y, Z)], one)) == [((X,), {}), ((Y,), {})]
    assert list(calls(X, one)) == [((X,), {})]
    assert list(calls({"x": X}, one)) == [((), {"x": X})]
    assert list(calls(iter([X]), one)) == [((X,), {})]
    assert list(calls([], one)) == []
    with pytest.raises(CalibrationError, match="type int is not iterable; pass a DataLoader"):
        list(calls(3, one))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


def test_to_device() -> None:
    nest = {"a": [X, (Y, 3)], "b": Record(X, "n"), "c": UserDict(x=X)}
    moved = to_device(nest, "meta")
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == 3
    assert moved["b"].x.is_meta and moved["b"].name == "n" and moved["c"]["x"].is_meta
    assert to_device(nest, None) is nest and not X.is_meta


def test_calls_are_moved() -> None:
    ((args, kwargs),) = calls([{"x": X}], one, "meta")
    assert args == () and kwargs["x"].is_meta


MASK, IMAGES = torch.zeros(5, 5), torch.zeros(4, 5, 6)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ((IMAGES,), torch.zeros(20, 3), 4),
        ((IMAGES, torch.zeros(())), torch.zeros(4, 3), 4),
        ((IMAGES, MASK), torch.zeros(4, 3), 4),
        ((MASK, IMAGES), torch.zeros(4, 3), 4),
        (({"mask": MASK}, [IMAGES]), (torch.zeros(()), {"scores": torch.zeros(4, 3)}), 4),
        ((MASK, IMAGES), torch.zeros(7), 1),
        ((3, "a"), torch.zeros(4), 1),
    ],
    ids=["one", "with a number", "mask last", "mask first", "nested", "no output has them", "no tensor"],
)
def test_num_samples(inputs: Any, outputs: Any, expected: int) -> None:
    assert num_samples(inputs, outputs) == expected
    assert num_samples_run((inputs, {}), lambda *_: outputs) == expected


def test_a_model_is_run_only_where_its_inputs_differ() -> None:
    def written(mask: Tensor, x: Tensor) -> Tensor:
        return x.add_(1)

    assert num_samples_run(((IMAGES, IMAGES), {}), lambda *_: pytest.fail("was run")) == 4
    assert num_samples_run(((MASK, IMAGES), {}), written) == 4 and not IMAGES.any()


def test_rows_of() -> None:
    mask, x = rows_of((MASK, IMAGES), 4, 2, 1)
    assert mask is MASK and x.shape == (1, 5, 6)


def test_calls_are_copies_because_a_model_may_write_into_its_inputs() -> None:
    given, named = torch.zeros(2, 3), torch.zeros(2, 3)
    for args, kwargs in calls([given, {"input": named}], nn.Linear(3, 3)):
        for tensor in (*args, *kwargs.values()):
            tensor.fill_(1.0)
    assert not given.any() and not named.any()
