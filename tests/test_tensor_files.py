from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from sparsebit.errors import CheckpointError
from sparsebit.tensor_files import StoredTensor, digest, load_tensors, save_tensors, stored_tensors


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).T,
        "half": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    save_tensors(tensors, tmp_path / "file", {"key": "value"})
    loaded, metadata = load_tensors(tmp_path / "file")
    assert metadata == {"key": "value"} and loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert digest(loaded) == digest(tensors)


def test_a_header_tells_shapes_and_bytes(tmp_path: Path) -> None:
    tensors = {
        "half": torch.zeros(5, 2, dtype=torch.bfloat16),
        "eighth": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
    }
    save_tensors(tensors, tmp_path / "file", {})
    assert stored_tensors(tmp_path / "file") == {
        "half": StoredTensor("BF16", (5, 2), 20),
        "eighth": StoredTensor("F8_E4M3", (3,), 3),
        "flags": StoredTensor("BOOL", (2,), 2),
        "scalar": StoredTensor("I64", (), 8),
    }


def test_a_digest_sees_names_types_shapes_and_values() -> None:
    ones = torch.ones(4)
    others = [{"b": ones}, {"a": ones.double()}, {"a": ones.reshape(2, 2)}, {"a": 2 * ones}, {}]
    assert len({digest(tensors) for tensors in ({"a": ones}, *others)}) == 6


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(tmp_path / "file")


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_rights_are_those_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save_tensors({"a": torch.ones(1)}, tmp_path / "file", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
