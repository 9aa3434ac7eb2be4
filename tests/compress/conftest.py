"""What tests of several rooms use."""

from __future__ import annotations

import pytest

from sparsebit.config.schema import default_device


@pytest.fixture
def asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever leaves its device to the default asks for a GPU, which is an error where there is none."""
    monkeypatch.setattr(default_device, "__code__", (lambda: "cuda").__code__)
