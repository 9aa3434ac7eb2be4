from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsebit.deploy.exporting.export_errors import quiet
from sparsebit.deploy.exporting.to_onnx import OnnxOptions, to_onnx
from sparsebit.errors import DeploymentError

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


@torch.library.custom_op("sparsebit_tests::strange", mutates_args=())
def strange(x: Tensor) -> Tensor:
    return x * 2


strange.register_fake(torch.empty_like)


class Strange(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return strange(torch.relu(x))


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 1e6:
            return x
        return x + 1


def fault(module: nn.Module, **options: object) -> str:
    model = nn.Sequential(nn.Linear(6, 6), module)
    with pytest.raises(DeploymentError) as caught:
        to_onnx(model, (X,), {}, OnnxOptions(**options), signature=inspect.signature(nn.Sequential.forward))  # type: ignore[arg-type]
    return str(caught.value)


def test_an_op_without_onnx_form_is_named_with_its_line() -> None:
    text = fault(Strange())
    assert "the op sparsebit_tests.strange has no ONNX form" in text
    assert "strange(torch.relu(x))" in text


def test_a_branch_on_data_is_named_with_its_module_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    text = fault(Branches())
    assert "torch.export cannot follow the model at 1 (Branches)" in text
    assert Path(__file__).name in text and "if float(x.abs().max()) > 1e6:" in text
    assert "torch.cond" in text
    assert len(text.splitlines()) <= 4
    assert "".join(capfd.readouterr()) == ""


def test_a_dimension_that_is_fixed_is_named_by_its_input() -> None:
    text = fault(nn.Identity(), input_names=["image"], dynamic_axes={"image": {1: "width"}})
    assert "image.shape[1]" in text and "cannot be dynamic" in text


def test_a_model_that_fails_by_itself_says_so() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if not torch.compiler.is_compiling() else x.reshape(5)

    text = fault(Fails())
    assert "1 (Fails)" in text and "shape '[5]' is invalid" in text


def test_quiet_only_while_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.onnx")
    level = logger.level

    def fails() -> None:
        with quiet():
            sys.stdout.write("a step")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert logger.level == level
    assert capsys.readouterr().out == ""
