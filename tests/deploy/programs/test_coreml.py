from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from sparsebit.deploy.programs.coreml import NOT_RUN
from sparsebit.deploy.sessions.program_facts import ProgramFacts
from sparsebit.errors import DeploymentError
from tests.quantization.tiny import Residual, calibrated, qconfig

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_it_is_not_compared_here(tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="writes .mlpackage folders: the extra coreml")
    qmodel = calibrated(Residual().eval(), [IMAGES], qconfig(backend="coreml"))
    with pytest.raises(DeploymentError, match="check: no runtime here runs files for coreml"):
        qmodel.export(tmp_path / "m.mlpackage", IMAGES, check=[IMAGES])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_package_holds_the_programs_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coremltools = pytest.importorskip("coremltools", reason="writes .mlpackage folders: the extra coreml")
    qmodel = calibrated(Residual().eval(), [IMAGES], qconfig(backend="coreml"))
    file = tmp_path / "m.mlpackage"
    with caplog.at_level(logging.WARNING):
        assert qmodel.export(file, IMAGES) is None
    assert f"m.mlpackage was {NOT_RUN}" in caplog.text
    package = coremltools.models.MLModel(str(file), skip_model_load=True)
    assert package.user_defined_metadata["sparsebit.checked"] == NOT_RUN
    facts = ProgramFacts.from_json(package.user_defined_metadata["sparsebit"], "m")
    assert [layer.arithmetic for layer in facts.layers] == ["integer"] * 3
    spec = package.get_spec()
    assert [one.name for one in spec.description.input] == ["x"] and len(spec.description.output) == 1
    wanted = {
        tuple(value.shape): value for value in qmodel.export_program(IMAGES).buffers() if value.dtype == torch.int8
    }
    weights = (file / "Data" / "com.apple.CoreML" / "weights" / "weight.bin").read_bytes()
    for shape, codes in wanted.items():
        assert codes.numpy().tobytes() in weights, shape
    operations = next(iter(spec.mlProgram.functions["main"].block_specializations.values())).operations
    kinds = [operation.type for operation in operations]
    assert kinds.count("dequantize") >= kinds.count("quantize") >= 4


@pytest.mark.slow
def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="writes .mlpackage folders: the extra coreml")
    qmodel = calibrated(Residual().eval(), [IMAGES], qconfig(backend="coreml"))
    qmodel.export(tmp_path / "m.mlpackage", IMAGES)
    (tmp_path / "m.mlpackage" / "stray").write_text("older")
    qmodel.export(tmp_path / "m.mlpackage", IMAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["m.mlpackage"]
    assert not (tmp_path / "m.mlpackage" / "stray").exists()
