"""What every test gets: a fixed seed, one thread, an importable torchvision, and the data folder if there is one."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch

from sparsebit.deploy.audit import audit_file as audit_module
from sparsebit.deploy.sessions import timing
from sparsebit.deploy.sessions.cpu import saturates
from sparsebit.graph.values.failures import RAISE_VARIABLE
from sparsebit.quantization import QMODULE_MAP
from sparsebit.registry import ALGORITHMS, OBSERVERS, QUANTIZERS
from tests import export_caches, torchvision_shim

ROOT = Path(__file__).resolve().parent.parent

torchvision_shim.install()
os.environ[RAISE_VARIABLE] = "1"  # a bug of ours fails its test; users only get a warning
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its own library is made for one or the other
# Under xdist the workers share the cores. One thread is also the only count at which sums are the same everywhere.
torch.set_num_threads(1)
# The same examples on every run: a property that fails in CI fails on the desk too.
hypothesis.settings.register_profile("sparsebit", deadline=None, derandomize=True, max_examples=50, database=None)
hypothesis.settings.load_profile("sparsebit")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds every generator before each test."""
    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each device that is not there
    return 0


@pytest.fixture(autouse=True)
def _onednn() -> Iterator[None]:
    """A product in bfloat16 that a CPU cannot do makes torch switch oneDNN off, for all tests that follow."""
    was_enabled = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(was_enabled)


@pytest.fixture(autouse=True)
def _no_words_about_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits speak of the file, not of the processor that the tests run on."""
    monkeypatch.setattr(audit_module, "saturates", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def _short_timings() -> Iterator[None]:
    """Files are timed for as long as it takes to see that they are: no test looks at how fast they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_MAX_ROUNDS", 5)
        yield


@pytest.fixture(autouse=True)
def _known_names() -> Iterator[None]:
    """What a test, or a page of the documentation, registers is forgotten after it."""
    tables: list[dict[Any, Any]] = [QMODULE_MAP]
    for registry in (ALGORITHMS, OBSERVERS, QUANTIZERS):
        tables += [table for table in vars(registry).values() if isinstance(table, dict)]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture(autouse=True)
def _translations() -> None:
    export_caches.read_translations_once()


@pytest.fixture(scope="session", autouse=True)
def _composite_ops() -> Iterator[None]:
    with export_caches.composite_ops_once():
        yield


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


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _sample(items)
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(f"{item.nodeid}: an address in its name differs in every process; give it an id")
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.data)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("exact_sums") and saturates():
            item.add_marker(pytest.mark.skip(reason="this CPU has no VNNI: sums of 8-bit products clip at 16 bits"))


def _sample(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `sample(count)`, so many, evenly spread, are quick; the others are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        quick = {place * len(found) // count for place in range(count)}
        for place, item in enumerate(found):
            if place not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look at a million objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def interpreted_kernels() -> Iterator[dict[str, ModuleType]]:
    """The GPU's kernels, by module, run by triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here")
    names = ("fake_quant_programs", "fake_quant", "stacked", "foreach_fake_quant", "token_attention", "eight_bits")
    with _language_patched_once_a_kernel():
        yield {name: importlib.import_module(f"sparsebit.kernels.{name}") for name in names}


@contextlib.contextmanager
def _language_patched_once_a_kernel() -> Iterator[None]:
    """Triton's interpreter patches its language when a kernel begins, and again at each function that the kernel calls:
    half of the time of kernels with many small programs.
    """
    from triton import language
    from triton.runtime import interpreter

    def patch_new(function: Any) -> Any:
        used = [
            one for one in (language, language.core) if any(one is value for value in function.__globals__.values())
        ]
        if used and not any(language.core.is_builtin(one.load) for one in used):
            return interpreter._LangPatchScope()
        return patch_all(function)

    patch_all = interpreter._patch_lang
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_new)
        yield


@pytest.fixture(autouse=True)
def _enabled_loggers() -> None:
    """Other packages' set-up of logging switches existing loggers off: not for the next test."""
    logging.disable(logging.NOTSET)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("sparsebit") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            if logger.level != logging.NOTSET:  # setting it clears what every logger has cached
                logger.setLevel(logging.NOTSET)
