from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from sparsebit.deploy.onnx_graph import model_file
from sparsebit.deploy.onnx_graph.model_file import all_files, checked_path, data_files, file_facts, staged, write
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError


def scaled(factor: float, size: int = 1000, op: str = "Mul") -> ir.Model:
    """The input times a constant."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape((size,)), type=kind)
    array = np.full(size, factor, np.float32)
    weight = ir.Value(name="w", const_value=ir.tensor(array, name="w"), shape=ir.Shape((size,)), type=kind)
    node = ir.node(op, [x, weight], name="mul")
    y = node.outputs[0]
    y.name, y.shape, y.type = "y", ir.Shape((size,)), kind
    return ir.Model(
        ir.Graph([x], [y], nodes=[node], initializers=[weight], opset_imports={"": 21}, name="g"), ir_version=10
    )


def save(model: ir.Model, target: Path, **settings: int) -> None:
    with staged(target) as path:
        write(model, path, **settings)


def answer(file: Path) -> float:
    return float(open_session(file).run({"x": np.ones(1000, np.float32)})[0][0])


def test_one_file(tmp_path: Path) -> None:
    save(scaled(2.0), tmp_path / "m.onnx")
    assert answer(tmp_path / "m.onnx") == 2.0
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_data_beside_the_model_and_the_older_data_goes(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    save(scaled(2.0), target, largest_single_file=100)
    (first,) = data_files(target)
    assert first.parent == tmp_path and first.is_file() and answer(target) == 2.0
    assert target.stat().st_size < 1000
    save(scaled(3.0), target, largest_single_file=100)
    (second,) = data_files(target)
    assert second != first and not first.exists() and answer(target) == 3.0
    save(scaled(4.0), target)
    assert os.listdir(tmp_path) == ["m.onnx"] and answer(target) == 4.0


def test_a_model_can_be_written_twice(tmp_path: Path) -> None:
    model = scaled(5.0)
    for name in ("m.onnx", "m_extra.onnx"):
        save(model, tmp_path / name, largest_single_file=100)
    assert data_files(tmp_path / "m.onnx") != data_files(tmp_path / "m_extra.onnx")
    assert answer(tmp_path / "m.onnx") == answer(tmp_path / "m_extra.onnx") == 5.0


def test_a_name_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = checked_path("m.onnx")
    save(scaled(2.0), target, largest_single_file=100)
    assert answer(target) == 2.0 and len(os.listdir(tmp_path)) == 2


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save(scaled(2.0), tmp_path / "real" / "a.onnx")
    link = tmp_path / "m.onnx"
    link.symlink_to(tmp_path / "real" / "a.onnx")
    save(scaled(3.0), link, largest_single_file=100)
    assert link.is_symlink() and answer(tmp_path / "real" / "a.onnx") == 3.0
    assert os.listdir(tmp_path) != [] and {path.parent.name for path in data_files(link)} == {"real"}


@pytest.mark.parametrize("largest", [100, 1 << 30], ids=["with_data", "one_file"])
def test_a_fault_leaves_the_older_file_bit_by_bit(
    largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.onnx"
    save(scaled(2.0), target, largest_single_file=largest)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    def fails() -> None:
        with staged(target) as path:
            write(scaled(3.0), path, largest_single_file=largest)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    monkeypatch.setattr(ir, "save", full)
    with pytest.raises(DeploymentError, match=r"cannot be written: .*No space left"):
        save(scaled(3.0), target)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_graph_that_is_not_onnx_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="the exported graph is not valid ONNX"):
        save(scaled(2.0, op="NoSuchOp"), tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_paths_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeploymentError, match=r"is a folder; name a file in it, such as .*model\.onnx"):
        checked_path(tmp_path)
    with pytest.raises(DeploymentError, match=r"the folder .*nowhere does not exist; create it first"):
        checked_path(tmp_path / "nowhere" / "m.onnx")
    monkeypatch.setattr(model_file.os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(DeploymentError, match="cannot be written to"):
        checked_path(tmp_path / "m.onnx")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DeploymentError, match="cannot be written to"):
        checked_path(tmp_path / "m.onnx")


def test_what_is_no_model_has_no_data(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("not a model")
    assert data_files(tmp_path / "m.onnx") == set()
    save(scaled(2.0), tmp_path / "m.onnx")
    assert answer(tmp_path / "m.onnx") == 2.0


def test_facts_of_a_file_and_its_data(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(b"not a model")
    with pytest.raises(DeploymentError, match=r"net\.onnx is not an ONNX file"):
        file_facts(file)
    with pytest.raises(DeploymentError, match="no such file"):
        file_facts(tmp_path / "none.onnx")
    save(scaled(2.0), file, largest_single_file=100)
    parts = all_files(file)
    assert len(parts) == 2 and parts[0] == file
    found = file_facts(file, float_bytes=7)
    assert found.sha256 == hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    assert found.num_bytes == sum(part.stat().st_size for part in parts) and found.float_bytes == 7
