from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from sparsebit.graph.capture import capture
from sparsebit.graph.nodes.example import GuardError, guard
from sparsebit.graph.tracing.tracer import LeafTracer
from sparsebit.graph.values.failures import RAISE_VARIABLE, describe_failure, forward_line, report_own_fault, user_line


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


def own_fault() -> Exception:
    try:
        guard(1, 2, "here")
    except GuardError as error:
        return error
    raise AssertionError


def test_errors_of_our_own_lines_fail_tests() -> None:
    with pytest.raises(GuardError):
        report_own_fault(own_fault())
    report_own_fault(failure_of(Fails()))
    report_own_fault(fx.proxy.TraceError("the trace cannot go on"))


def test_users_only_get_a_warning_of_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(RAISE_VARIABLE)
    caplog.set_level("DEBUG")
    report_own_fault(own_fault())
    warning, traceback = (record for record in caplog.records if record.name.startswith("sparsebit"))
    assert warning.levelname == "WARNING" and "example.py:" in warning.getMessage()
    assert traceback.levelname == "DEBUG" and traceback.exc_info is not None


def test_a_fault_in_a_trace_leaves_the_modules_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAISE_VARIABLE)
    monkeypatch.setattr(LeafTracer, "write", lambda *_: 1 / 0)

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y += 1
            return y

    model, x = nn.Sequential(Writes(), nn.Linear(2, 2)), torch.randn(2, 2)
    captured = capture(model)
    assert list(captured.untraced) == ["0"] and "ZeroDivisionError" in captured.untraced["0"].reason
    torch.testing.assert_close(captured.model(x), model(x))
