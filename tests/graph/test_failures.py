from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from sparsebit.graph.example import GuardError, guard
from sparsebit.graph.failures import describe_failure, forward_line, reraise_own_fault, user_line


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.reshape(-1)])  # inside torch


def failure_of(module: nn.Module) -> Exception:
    try:
        module(torch.randn(2, 2))
    except Exception as error:
        return error
    raise AssertionError


def test_a_failure_names_module_line_and_reason() -> None:
    failure = describe_failure(failure_of(Fails()), "body.0", Fails())
    assert (failure.path, failure.module_type) == ("body.0", "Fails")
    assert failure.reason.startswith("RuntimeError: ") and "\n" not in failure.reason
    assert failure.line.endswith("return torch.cat([x, x.reshape(-1)])  # inside torch")
    assert "test_failures.py:" in failure.line


def test_a_failure_without_words_or_lines() -> None:
    failure = describe_failure(ValueError(), "", Fails())
    assert failure.reason == "ValueError: ValueError" and failure.line == forward_line(Fails())
    assert failure.line.endswith(": def forward") and "test_failures.py:" in failure.line


def test_the_running_line_is_the_users() -> None:
    assert user_line().endswith("# this line")  # this line


def test_errors_of_our_own_lines_are_not_the_models_fault() -> None:
    try:
        guard(1, 2, "here")
    except GuardError as error:
        with pytest.raises(GuardError):
            reraise_own_fault(error)
    reraise_own_fault(failure_of(Fails()))
    reraise_own_fault(fx.proxy.TraceError("the trace cannot go on"))
