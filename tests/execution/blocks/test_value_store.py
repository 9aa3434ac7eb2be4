from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.execution.blocks import value_store
from sparsebit.execution.blocks.value_store import MIB, SharedData
from sparsebit.graph.values.nested import tensors_of


def floats(count: int) -> Tensor:
    return torch.randn(count)


def files(store: SharedData) -> list[Path]:
    return sorted(store._folder.iterdir()) if store._folder is not None and store._folder.exists() else []


@dataclass
class Record:
    x: Tensor
    note: str


NESTS: dict[str, Any] = {
    "tensor": floats(10),
    "tuple": (floats(3), [floats(4), None], {"x": floats(5), "n": 3}),
    "dataclass": Record(floats(6), "note"),
    "number": 3,
    "path": Path("some/path"),
    "none": None,
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(2.5),
    "bool": torch.rand(9) > 0.5,
    "bfloat16": floats(8).bfloat16(),
    "transposed": floats(12).reshape(3, 4).T,
    "channels-last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": floats(3).expand(100, 3),
    "parameter": torch.nn.Parameter(floats(4)),
}


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["host", "disk"])
@pytest.mark.parametrize("name", NESTS)
def test_what_goes_in_comes_out(name: str, host_bytes: int) -> None:
    store = SharedData(host_bytes=host_bytes)
    value = NESTS[name]
    store.put("key", value)
    got = store.get("key")
    assert type(got) is (Tensor if isinstance(value, Tensor) else type(value))
    for one, other in zip(tensors_of(got), tensors_of(value), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        assert not one.requires_grad
    if not tensors_of(value):
        assert got == value
    store.drop("key")
    assert (store.host_bytes, store.disk_bytes, len(store), files(store)) == (0, 0, 0, [])


def test_budgets_are_in_bytes() -> None:
    store = SharedData(host_bytes=400)
    store.put(0, floats(60))
    store.put(1, floats(40))
    assert store.host_bytes == 400 and not files(store)
    store.put(2, floats(1))
    assert store.host_bytes == 400 and len(files(store)) == 1 and store.disk_bytes > 4
    store.drop(1)
    assert store.host_bytes == 240
    store.put(3, (floats(39), floats(39)))
    assert store.host_bytes == 396 and len(files(store)) == 2
    store.put(0, floats(1))  # a key put again gives its place free first
    assert store.host_bytes == 160
    store.clear()
    assert (store.host_bytes, store.disk_bytes, files(store)) == (0, 0, [])


@pytest.mark.parametrize("host_bytes", [1 << 20, 0], ids=["host", "disk"])
def test_a_view_does_not_drag_its_storage(host_bytes: int) -> None:
    store = SharedData(host_bytes=host_bytes)
    large = floats(100_000)
    store.put("view", large[:60_000][:10])
    stored = store.get("view")
    assert stored.untyped_storage().nbytes() == 40 and torch.equal(stored, large[:10])
    assert store.host_bytes in (0, 40) and store.disk_bytes < 5_000


def test_an_expanded_value_counts_what_it_takes() -> None:
    store = SharedData(host_bytes=100)
    store.put("mask", floats(4).expand(1000, 4))
    assert store.host_bytes == 16 and not files(store)


def test_files_go_with_drop_clear_and_the_store_itself() -> None:
    store = SharedData(host_bytes=0)
    for key in range(3):
        store.put(key, floats(5))
    folder = store._folder
    assert folder is not None and len(files(store)) == 3
    store.drop(1)
    assert len(files(store)) == 2
    store.drop("unknown")
    store.clear()
    assert files(store) == [] and 0 not in store
    store.put(0, floats(5))
    assert 0 in store and len(files(store)) == 1
    del store
    gc.collect()
    assert not folder.exists()


def test_a_copy_owns_its_files() -> None:
    store = SharedData(host_bytes=8)
    first, second = floats(2), floats(5)
    store.put("a", first)
    store.put("b", [second])
    twin = copy.deepcopy(store)
    store.get("a").zero_()
    store.clear()
    del store
    gc.collect()
    assert torch.equal(twin.get("b")[0], second) and not torch.equal(twin.get("a"), torch.zeros(2))
    assert twin.host_bytes == 8


def test_an_unknown_key() -> None:
    with pytest.raises(KeyError):
        SharedData().get("nothing")


@pytest.mark.gpu
def test_pinned_memory_that_is_used_again_at_once_holds_the_right_values() -> None:
    """Copies do not wait: a place that is dropped and given to another value must not be read too late."""
    store = SharedData(device_bytes=0, host_bytes=1 << 26)
    total, expected = torch.zeros((), device="cuda"), 0.0
    for number in range(50):
        store.put("x", torch.full((1 << 22,), float(number), device="cuda"))
        total += store.get("x").mean()
        store.drop("x")
        expected += number
    assert float(total) == expected


@pytest.mark.gpu
def test_device_then_host_then_disk() -> None:
    store = SharedData(device_bytes=40, host_bytes=40)
    values = [floats(10).cuda() for _ in range(3)]
    for key, value in enumerate(values):
        store.put(key, value)
    assert (store.device_bytes, store.host_bytes, len(files(store))) == (40, 40, 1)
    for key, value in enumerate(values):
        assert store.get(key).is_cuda and torch.equal(store.get(key), value)
    store.clear()
    assert (store.device_bytes, store.host_bytes, store.disk_bytes) == (0, 0, 0)


@pytest.mark.parametrize(("text", "expected"), [
    ("MemTotal: 99 kB\nMemAvailable: 8388608 kB\n", 4096), ("MemAvailable: 99999999 kB\n", 8192),
    ("MemAvailable: 1000 kB\n", 1024), ("nothing\n", 1024), (None, 1024),
], ids=["half", "not all of much", "not too little", "unknown", "no such file"])  # fmt: skip
def test_the_default_budget_follows_the_free_memory(
    text: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "meminfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(value_store, "_MEMINFO", path)
    assert value_store.default_memory_budget() == expected * MIB
