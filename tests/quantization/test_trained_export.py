"""What was trained is what the file holds: every trainable quantizer in one model, batch norms folded at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.quantization import QuantModel
from tests.quantization.tiny import run, site
from tests.quantization.tiny_training import SOME_WAYS, Net, data, ready, train

pytest.importorskip("onnxruntime")

MIXED: dict[str, Any] = {
    "W.QUANTIZER.TYPE": "lsq",
    "W.SPECIFIC": [{"conv2": ["QUANTIZER.TYPE", "dorefa"]}, {"fc": ["QUANTIZER.TYPE", "lsq+"]}],
    "A.QUANTIZER.TYPE": "lsq+",
    "A.SPECIFIC": [
        {"conv1": ["QUANTIZER.TYPE", "uniform"]},
        {"conv2": ["QUANTIZER.TYPE", "pact", "QUANTIZER.PACT.ALPHA_VALUE", 3.0]},
    ],
}


def exported(qmodel: QuantModel, path: Path) -> Tensor:
    """Exports with the parity gate in a real session; gives the simulation's outputs."""
    torch.manual_seed(5)
    x, _ = data(12)
    parity = qmodel.eval().export_onnx(x, path, check=x.split(6), dynamic_axes={"x": {0: "batch"}})
    assert parity is not None
    return qmodel(x).detach()


def kinds(qmodel: QuantModel) -> dict[str, str]:
    return {q.name: q.TYPE for q in qmodel.quantizers() if not q.fake_fused}


@pytest.mark.parametrize(("folds", "backend"), [
    pytest.param(True, "virtual", marks=pytest.mark.slow), (True, "onnxruntime"), (False, "virtual"),
    pytest.param(False, "onnxruntime", marks=pytest.mark.slow),
], ids=lambda value: {True: "folded before", False: "folded after"}.get(value, value))  # fmt: skip
@pytest.mark.slow
def test_all_types_in_one_model(backend: str, folds: bool, tmp_path: Path) -> None:
    schedule = {"SCHEDULE.FUSE_BN": folds} if folds or backend == "virtual" else {"SCHEDULE.BN_TUNING": True}
    qmodel = ready("fixed", {**MIXED, **schedule}, bits=8, backend=backend)
    found = kinds(qmodel)
    assert {found[f"{layer}.weight"] for layer in ("conv1", "conv2", "fc")} == {"lsq", "dorefa", "lsq+"}
    assert set(found.values()) == {"lsq", "lsq+", "pact", "dorefa", "uniform"}
    untrained = exported(qmodel, tmp_path / "before.onnx") if folds else None
    train(qmodel.train(), 4)
    if not folds:
        tune(qmodel)
    outputs = exported(qmodel, tmp_path / "after.onnx")
    assert untrained is None or not torch.allclose(outputs, untrained)


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME_WAYS)
def test_norms_trained_and_folded_at_the_end(way: str, tmp_path: Path) -> None:
    qmodel = train(ready(way, {"SCHEDULE.BN_TUNING": True}, bits=8, backend="onnxruntime"), 4)
    x, _ = data()
    reference = tune(qmodel, x)
    outputs = qmodel.eval()(x)
    # The same integers, but for int32 biases and the runtime's own rounding of outputs.
    assert (outputs - reference).abs().max() < 0.1 * reference.std()
    exported(qmodel, tmp_path / "tuned.onnx")
    loaded = QuantModel.load(qmodel.save(tmp_path / "folder"), Net())
    assert torch.equal(loaded(x), outputs)


def tune(qmodel: QuantModel, x: Tensor | None = None) -> Tensor:
    """Batch norms re-estimated and folded; gives what the model computes with the new statistics before the folding."""
    x = data()[0] if x is None else x
    with torch.no_grad(), qmodel.batchnorm_tuning():
        run(qmodel, x.split(8))
        qmodel.eval()
        reference = qmodel(x)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return reference


def test_a_trained_scale_is_in_the_file(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    qmodel = train(ready("lsq", {"SCHEDULE.FUSE_BN": True}, bits=8, backend="onnxruntime"), 4)
    exported(qmodel, tmp_path / "trained.onnx")
    model = onnx.load(tmp_path / "trained.onnx")
    held = [torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in model.graph.initializer]
    for name in ("conv1.weight", "fc.input"):
        scale = site(qmodel, name).qparams()[0].detach()
        assert any(tensor.shape == scale.shape and torch.equal(tensor.float(), scale) for tensor in held), name
