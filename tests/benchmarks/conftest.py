"""Modules of `benchmarks/`, which import each other by name, as scripts do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark by name. Others have a `common` too, so that nothing stays imported, here or there."""
    own = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} | {"torchvision_shim"}
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    yield importlib.import_module
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(before)
