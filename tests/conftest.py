"""What every test gets: a fixed seed, one thread, an importable torchvision, and the data folder if there is one."""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
import torch

from tests import torchvision_shim

ROOT = Path(__file__).resolve().parent.parent

torchvision_shim.install()
# Under xdist the workers share the cores. One thread is also the only count at which sums are the same everywhere.
torch.set_num_threads(1)
# The same examples on every run: a property that fails in CI fails on the desk too.
hypothesis.settings.register_profile("sparsebit", deadline=None, derandomize=True, max_examples=50, database=None)
hypothesis.settings.load_profile("sparsebit")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds every generator before each test."""
    random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def project_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real weights and data; a test that asks for it is skipped where there is none."""
    named = os.environ.get("SPARSEBIT_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if folder.is_dir():
        return folder
    if named:
        pytest.fail(f"SPARSEBIT_DATA={named} is no folder; unset it to skip the tests on real data")
    pytest.skip("no data folder: set SPARSEBIT_DATA to run the tests on real data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.data)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


KERNEL_MODULES = [f"sparsebit.numerics.{name}" for name in ("triton_programs", "triton_kernels", "row_batch")]


@pytest.fixture(scope="module")
def interpreted_kernels() -> Iterator[dict[str, ModuleType]]:
    """The GPU's kernels, by module, run by triton's interpreter; modules that others hold stay as they are."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    before = {name: sys.modules.pop(name, None) for name in KERNEL_MODULES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in KERNEL_MODULES}
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
