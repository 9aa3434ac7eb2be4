"""Kernels in Triton: interpreted on a CPU, and for real where there is a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import pytest

NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(params=[pytest.param("cpu", marks=NO_TRITON), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def load_kernels(device: str, request: pytest.FixtureRequest) -> Callable[[str], ModuleType]:
    """Gives a module of `sparsebit.kernels` for the device."""
    if device == "cpu":
        return request.getfixturevalue("interpreted_kernels").__getitem__  # type: ignore[no-any-return]
    return lambda name: importlib.import_module(f"sparsebit.kernels.{name}")
