"""One batch through the float model."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sparsebit.cli.inputs.data import Data
from sparsebit.cli.inputs.first_batch import run_first_batch
from sparsebit.cli.inputs.loading import LoadingError
from sparsebit.deploy.comparing.parity import decibels
from sparsebit.errors import CalibrationError
from tests.quantization.tiny import MaskFirst, masked_batches


def data(*batches: Any) -> Data:
    def walk() -> Iterator[Any]:
        yield from batches

    return Data("test data", walk)


class Two(NamedTuple):
    sums: Tensor
    places: Tensor


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"two": Two(x + 1, x.argmax(1)), "list": [2 * x]}


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"two": Two(x + 1, x.argmax(1)), "list": [2 * x + 0.2]}


def test_outputs_are_the_float_tensors_of_any_nest() -> None:
    first_batch = run_first_batch(Nested(), data(torch.ones(4, 2)))
    assert [output.mean().item() for output in first_batch.outputs] == [2.0, 2.0] and first_batch.num_samples == 4


def test_sqnr_is_over_all_outputs() -> None:
    first_batch = run_first_batch(Nested(), data(torch.ones(4, 2)))
    assert first_batch.sqnr_db(Nested(), "cpu") == math.inf
    assert first_batch.sqnr_db(Noisy(), "cpu") == pytest.approx(10 * math.log10(8 * (4 + 4) / (8 * 0.04)), abs=1e-3)


def test_misfit_names_shapes_and_reason() -> None:
    with pytest.raises(LoadingError, match=r"cannot run this data \(\(4, 3\) float32\): RuntimeError: "):
        run_first_batch(nn.Linear(2, 2), data(torch.ones(4, 3)))


def test_misfit_of_keywords() -> None:
    with pytest.raises(LoadingError, match=r"\(input=\(4, 3\) float32\): RuntimeError"):
        run_first_batch(nn.Linear(2, 2), data({"input": torch.ones(4, 3)}))


@pytest.mark.parametrize(
    ("batch", "hint"),
    [
        (torch.rand(2, 8, 8, 3), "channels last"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "images of uint8"),
        ((torch.rand(2, 3, 8, 8).numpy(), [1, 2]), "torch.from_numpy"),
    ],
)
def test_misfit_of_images_has_a_hint(batch: Any, hint: str) -> None:
    with pytest.raises(LoadingError, match=f"cannot run this data .*Error: .*; .*{hint}"):
        run_first_batch(nn.Conv2d(3, 4, 3), data(batch))


def test_a_lone_array_has_a_hint() -> None:
    with pytest.raises(CalibrationError, match=r"type ndarray .*torch\.from_numpy"):
        run_first_batch(nn.Conv2d(3, 4, 3), data(torch.rand(2, 3, 8, 8).numpy()))


def test_pixels_up_to_255_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run_first_batch(nn.Conv2d(3, 4, 3), data(torch.rand(2, 3, 8, 8)))
    assert not caplog.records
    run_first_batch(nn.Conv2d(3, 4, 3), data(255 * torch.rand(2, 3, 8, 8)))
    assert "test data: pixels are from" in caplog.text and "divide by 255" in caplog.text


def test_no_batch() -> None:
    with pytest.raises(LoadingError, match="test data gave no batch"):
        run_first_batch(nn.Linear(2, 2), data())


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [(100.0, 1.0, 20.0), (1.0, 0.0, math.inf), (0.0, 0.0, math.inf), (0.0, 1.0, -math.inf)],
)
def test_decibels(signal: float, noise: float, expected: float) -> None:
    assert decibels(signal, noise) == expected


class Leaving(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        sys.exit("no license")


def test_no_samples() -> None:
    with pytest.raises(LoadingError, match="test data gave no batch, or a first one without samples"):
        run_first_batch(nn.ReLU(), data(torch.ones(0, 2)))


class OwnKind(BaseException):
    pass


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise OwnKind("odd")


def test_a_model_that_raises_no_exception_but_a_base_of_them() -> None:
    with pytest.raises(LoadingError, match="OwnKind: odd"):
        run_first_batch(Odd(), data(torch.ones(4, 2)))


def test_a_model_that_ends_the_process() -> None:
    with pytest.raises(LoadingError, match=r"cannot run this data .* it called sys.exit\('no license'\) \("):
        run_first_batch(Leaving(), data(torch.ones(4, 2)))


def test_samples_are_counted_whichever_argument_comes_first() -> None:
    assert run_first_batch(MaskFirst(), data(*masked_batches(first=True))).num_samples == 4
