from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.errors import RecordError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.recording import file_record, float_facts, model_facts
from sparsebit.records import RunRecord, extend_record, measured, read_record
from tests.quantization.tiny import TwoLayers

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def quantized(seed: int = 0, config: str = "onnxruntime") -> QuantModel:
    torch.manual_seed(seed)
    return sparsebit.quantize(TwoLayers(), [X], config)


def test_what_a_model_is_made_of() -> None:
    qmodel = quantized()
    made = sparsebit.record(qmodel, name="two layers")
    assert made.sections == ("model", "config", "plan", "graph", "coverage")
    assert made.model is not None and made.model.name == "two layers" and made.model.module_type == "TwoLayers"
    assert made.coverage == qmodel.coverage and made.config == qmodel.config.to_dict() and not made.runs
    again = RunRecord.from_json(made.to_json())
    assert again == made and again.plan is not None
    plan = Plan.from_dict({**again.plan, "config": again.config})
    assert plan.to_dict() == qmodel.plan.to_dict()


def test_a_run_is_measured() -> None:
    with measured("study") as run:
        qmodel = quantized()
        errors = qmodel.profile(X)
    made = sparsebit.record(qmodel, errors, None, run=run, warnings=("few samples",))
    (kept,) = made.runs
    assert list(kept.phases) == ["capture", "calibration", "profile"] and kept.made == ("model",)
    assert kept.sections == made.sections == ("model", "config", "plan", "graph", "coverage", "calibration", "errors")
    assert kept.environment.torch.startswith(torch.__version__.partition("+")[0]) and kept.environment.cpu
    assert kept.environment.sparsebit == sparsebit.__version__ and kept.warnings == ("few samples",)
    assert made.calibration is not None and made.calibration.num_samples == 16 and not made.calibration.asym


def test_the_same_numbers_are_the_same_model(tmp_path: Path) -> None:
    qmodel = quantized()
    facts = model_facts(qmodel)
    qmodel.set_quant(w_quant=False, a_quant=False)
    assert model_facts(qmodel) == facts == model_facts(quantized())
    qmodel.save(tmp_path / "saved")
    assert model_facts(QuantModel.load(tmp_path / "saved", TwoLayers())) == facts


def test_other_numbers_are_another_model() -> None:
    facts = model_facts(quantized())
    with torch.no_grad():
        moved = quantized()
        moved.quantizers()[0].scale.mul_(1.001)
    others = [model_facts(quantized(1)), model_facts(quantized(config="openvino")), model_facts(moved)]
    assert all(other.architecture == facts.architecture and other.numbers != facts.numbers for other in others)
    assert float_facts(nn.Linear(6, 8)).architecture != facts.architecture
    assert float_facts(TwoLayers()).architecture == facts.architecture


@pytest.mark.slow
def test_an_exported_and_audited_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from sparsebit.deploy.audit.audit_file import audit

    file, target = tmp_path / "net.onnx", tmp_path / "record.json"
    with measured("export") as run:
        qmodel = quantized()
        parity = qmodel.export_onnx(X[:1], file, check=[X[:1], X[1:2]])
    made = sparsebit.record(qmodel, parity, run=run)
    assert made.file is not None and made.file.num_bytes == file.stat().st_size and len(made.file.sha256) == 64
    assert made.file.float_bytes == 4 * sum(p.numel() for p in TwoLayers().parameters())
    assert list(made.runs[0].phases) == ["capture", "calibration", "export", "check"]
    assert made.runs[0].made == ("model", "file")
    extend_record(target, made)
    with measured("audit") as run:
        found = audit(file, repeats=0)
    extend_record(target, file_record(file, found, run=run))
    kept = read_record(target)
    assert (
        kept.audits == (found,)
        and kept.parity == made.parity
        and [one.verb for one in kept.runs] == ["export", "audit"]
    )
    qmodel.export_onnx(X[:2], file)
    with pytest.raises(RecordError, match="has changed since"):
        extend_record(target, file_record(file, run=run))


def test_results_that_do_not_belong_together(tmp_path: Path) -> None:
    qmodel = quantized()
    from tests.records.examples import audit

    with pytest.raises(RecordError, match=r"results of different files \(net.onnx, other.onnx\)"):
        sparsebit.record(qmodel, audit(), file="other.onnx")
    with pytest.raises(RecordError, match="a dict has no section in a record"):
        sparsebit.record(qmodel, {"fc": 0.1})  # type: ignore[arg-type]


def test_weights_alone() -> None:
    with measured("quantize") as run:
        qmodel = sparsebit.quantize(TwoLayers(), config="weights-only")
    made = sparsebit.record(qmodel, run=run)
    assert made.calibration is not None and made.calibration.num_samples == 0 and made.calibration.data is None
    assert list(run.phases) == ["capture", "calibration"]


def test_half_precision_has_a_checksum() -> None:
    one, other = (float_facts(TwoLayers().to(torch.bfloat16)) for _ in range(2))
    assert one.architecture == other.architecture and one.numbers != other.numbers
