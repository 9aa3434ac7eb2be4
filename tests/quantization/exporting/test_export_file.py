"""`export` picks the writer by backend and ending; the file replaces an older one only after it has passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebit.deploy.comparing.parity import Tolerance
from sparsebit.deploy.programs.targets import TARGETS
from sparsebit.deploy.runtimes import PROFILES
from sparsebit.deploy.sessions.runtime_sessions import open_session
from sparsebit.errors import DeploymentError, MissingExtraError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.exporting import export_file
from sparsebit.quantization.exporting.export_file import check_program, export
from tests.quantization.tiny import Residual, TwoLayers, calibrated, qconfig

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def quantized(backend: str, model: type[nn.Module] = TwoLayers, data: torch.Tensor = ROWS) -> QuantModel:
    torch.manual_seed(0)
    return calibrated(model().eval(), [data], qconfig(backend=backend))


@pytest.mark.parametrize("backend", ["onnxruntime", "virtual"])
def test_an_onnx_backend_writes_an_onnx_file(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    parity = quantized(backend).export(tmp_path / "m.onnx", ROWS, check=[ROWS])
    assert parity is not None and (tmp_path / "m.onnx").is_file()


@pytest.mark.parametrize("name", TARGETS)
def test_an_ending_of_another_backend_is_refused(name: str, tmp_path: Path) -> None:
    ending = TARGETS[name].ending
    with pytest.raises(DeploymentError, match=rf"{ending} is the file of BACKEND: {name}.*quantized for onnxruntime"):
        quantized("onnxruntime").export(tmp_path / f"m{ending}", ROWS)
    with pytest.raises(DeploymentError, match=rf"BACKEND: {name} ends in {ending}; write .*m{ending}"):
        quantized(name).export(tmp_path / "m.onnx", ROWS)
    with pytest.raises(DeploymentError, match=rf"{name}.*export\("):
        quantized(name).export_onnx(ROWS, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS[name]
    if not target.modules:
        pytest.skip(f"{name} needs torch alone")
    qmodel = quantized(name)
    monkeypatch.setattr(export_file, "TARGETS", {name: _with(target, modules=("no_such_module",))})
    with pytest.raises(MissingExtraError, match="no-such-module"):
        export(qmodel, tmp_path / f"m{target.ending}", ROWS)


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_older_file_stays_until_the_new_one_is_complete(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qmodel, file = quantized("executorch"), tmp_path / "m.pte"
    inner = file / "data" if is_folder else file
    inner.parent.mkdir(exist_ok=True)
    inner.write_text("older")
    faults = ["the compiler failed"]

    def write(_: Any, __: Any, path: Path) -> None:
        made = path / "data" if is_folder else path
        made.parent.mkdir(exist_ok=True)
        made.write_text("newer")
        for fault in faults:
            raise DeploymentError(fault)

    changed = _with(TARGETS["executorch"], write=write, modules=(), is_folder=is_folder)
    monkeypatch.setattr(export_file, "TARGETS", {"executorch": changed})
    with pytest.raises(DeploymentError, match="the compiler failed"):
        export(qmodel, file, ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pte"] and inner.read_text() == "older"
    faults.clear()
    export(qmodel, file, ROWS)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pte"] and inner.read_text() == "newer"


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="does not exist"):
        quantized("executorch").export(tmp_path / "none" / "m.pte", ROWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_float_types(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = quantized("executorch").to(dtype)
    changed = _with(TARGETS["executorch"], modules=())
    monkeypatch.setattr(export_file, "TARGETS", {"executorch": changed})
    with pytest.raises(DeploymentError, match=r"computes in (float64|bfloat16), .*executorch.*qmodel\.float\(\)"):
        export(qmodel, tmp_path / "m.pte", ROWS.to(dtype))
    assert not list(tmp_path.iterdir())


def test_algorithms_that_were_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = calibrated(TwoLayers().eval(), [ROWS], qconfig({"ALGORITHMS": ["gptq"]}, backend="executorch"))
    changed = _with(TARGETS["executorch"], modules=(), write=lambda _, __, path: path.write_text("program"))
    monkeypatch.setattr(export_file, "TARGETS", {"executorch": changed})
    with pytest.warns(UserWarning, match="export: ALGORITHMS were not run on this model"):
        export(qmodel, tmp_path / "m.pte", ROWS)


def _with(target: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(target, **changes)


# --- in the runtimes themselves


@pytest.fixture(params=sorted(name for name in TARGETS if PROFILES[name].executes))
def target(request: pytest.FixtureRequest) -> Any:
    found = TARGETS[request.param]
    for module in found.modules:
        pytest.importorskip(module)
    return found


@pytest.mark.slow
@torch.no_grad()
def test_the_file_computes_the_simulation(target: Any, tmp_path: Path) -> None:
    qmodel = quantized(target.name, Residual, IMAGES)
    file = tmp_path / f"m{target.ending}"
    parity = qmodel.export(file, IMAGES, check=[IMAGES])
    assert parity is not None and parity.is_exact and parity.worst.num_samples == 4
    session = open_session(file, target.name, num_threads=1)
    assert session.inputs == ("x",) and session.input_shapes == {"x": (4, 3, 8, 8)}
    (found,) = session.run({"x": IMAGES.numpy()})
    assert torch.equal(torch.from_numpy(found), qmodel(IMAGES))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with pytest.raises(DeploymentError, match=r"x is float32 \(2, 3, 8, 8\), and the program takes float32"):
        session.run({"x": IMAGES[:2].numpy()})
    with pytest.raises(DeploymentError, match="missing: x"):
        session.run({"y": IMAGES.numpy()})


@pytest.mark.slow
def test_a_file_of_another_model_does_not_pass(target: Any, tmp_path: Path) -> None:
    first, file = quantized(target.name), tmp_path / f"m{target.ending}"
    first.export(file, ROWS)
    torch.manual_seed(1)
    other = calibrated(TwoLayers().eval(), [ROWS], qconfig(backend=target.name))
    with pytest.raises(DeploymentError, match=r"does not compute what was simulated .*SQNR.*another model's"):
        check_program(other, file, [ROWS])
    # AOTInductor's products are exact; the compiler may fuse the product and the sum in float behind them.
    exact = None if target.name == "aot_inductor" else True
    assert check_program(first, file, [ROWS], tolerance=Tolerance(exact=exact)).worst.max_difference < 1e-7
