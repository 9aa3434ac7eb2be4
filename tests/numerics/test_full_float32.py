from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sparsebit.numerics import full_float32 as module
from sparsebit.numerics.full_float32 import full_float32

_BACKENDS = torch.backends


def _read(switch: Callable[[], Any]) -> Any:
    try:
        return switch()
    except RuntimeError:  # torch's, where the settings of the ops disagree
        return "mixed"


def _old_switches() -> list[Any]:
    cublas, cudnn = lambda: _BACKENDS.cuda.matmul.allow_tf32, lambda: _BACKENDS.cudnn.allow_tf32
    return [_read(switch) for switch in (cudnn, cublas, torch.get_float32_matmul_precision)]


def _settings() -> tuple[Any, ...]:
    return [module._precision(op) for op in module._OPS], _old_switches(), _BACKENDS.fp32_precision


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Torch's settings, as they are when a process starts."""
    yield
    _BACKENDS.fp32_precision = "none"
    for op in module._OPS:
        module._set_precision(op, "none")
    torch.set_float32_matmul_precision("highest")
    _BACKENDS.cudnn.allow_tf32 = True


def _nothing() -> None:
    pass


def _old_convolutions() -> None:
    _BACKENDS.cudnn.allow_tf32 = False


def _old_products() -> None:
    _BACKENDS.cuda.matmul.allow_tf32 = True


def _high() -> None:
    torch.set_float32_matmul_precision("high")


def _medium() -> None:
    torch.set_float32_matmul_precision("medium")


def _all_new() -> None:
    _BACKENDS.fp32_precision = "tf32"


def _one_new() -> None:
    _BACKENDS.cudnn.conv.fp32_precision = "ieee"


def _one_new_of_products() -> None:
    _BACKENDS.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize(
    "choose",
    [_nothing, _old_convolutions, _old_products, _high, _medium, _all_new, _one_new, _one_new_of_products],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_rounds_inside_and_settings_are_back_afterwards(choose: Callable[[], None], fails: bool) -> None:
    choose()
    before = _settings()
    with contextlib.suppress(KeyError), full_float32(), full_float32():
        assert {module._precision(op) for op in module._OPS} <= {"ieee", "none"}
        assert torch.get_float32_matmul_precision() == "highest"
        if "mixed" not in before[1]:  # then torch refuses to read the old switch, inside and outside
            assert not _BACKENDS.cudnn.allow_tf32
            with _BACKENDS.cudnn.flags(enabled=False, allow_tf32=True):  # as code of models does it
                pass
        if fails:
            raise KeyError
    assert _settings() == before


def test_an_op_still_follows_its_backend_afterwards() -> None:
    _BACKENDS.fp32_precision = "tf32"
    with full_float32():
        assert module._precision(("mkldnn", "conv")) == "ieee"
    assert module._precision(("mkldnn", "conv")) == "tf32"
    _BACKENDS.fp32_precision = "ieee"
    assert module._precision(("mkldnn", "conv")) == "ieee"


def test_blocks_of_two_threads_overlap() -> None:
    _high()
    before = _settings()
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with full_float32():
            is_inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=stay)
    with full_float32():
        thread.start()
        is_inside.wait(10)
    assert torch.get_float32_matmul_precision() == "highest"
    may_leave.set()
    thread.join(10)
    assert _settings() == before
