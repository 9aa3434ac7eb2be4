"""Prune, then quantize, then export: one file that is smaller, in integers, and has passed the parity gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparsebit
from sparsebit.quantization import QuantModel
from sparsebit.sparse import SparseModel, load, save
from tests.sparse.nets import Chain, Residual, images


def test_the_file_is_smaller_and_in_integers(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    batches = [images(), images()]
    config = {"DEVICE": "cpu", "SPARSER": {"TYPE": "structured", "STRATEGY": "l1norm", "RATIO": 0.5}}
    dense = Residual().eval()
    smodel = SparseModel(dense, config, batches[0]).eval()
    smodel.calc_params()
    smodel.reconstruct(batches)
    small = load(save(smodel.shrink(), tmp_path / "small"), Residual()).eval()

    files = {}
    for name, model in {"small": small, "dense": dense}.items():
        qmodel = sparsebit.quantize(model, batches, "onnxruntime")
        files[name] = tmp_path / f"{name}.onnx"
        parity = qmodel.export_onnx(batches[0], files[name], check=batches)
        assert parity is not None
    sizes = {
        name: sum(len(tensor.raw_data) for tensor in onnx.load(file).graph.initializer) for name, file in files.items()
    }
    assert sizes["small"] < 0.75 * sizes["dense"]
    kinds = {tensor.data_type for tensor in onnx.load(files["small"]).graph.initializer if len(tensor.dims) > 1}
    assert kinds <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}

    qmodel = sparsebit.quantize(small, batches, "onnxruntime")
    qmodel.save(tmp_path / "kept")
    again = QuantModel.load(tmp_path / "kept", load(tmp_path / "small", Residual()))
    assert torch.equal(again(batches[0]), qmodel(batches[0]))


@pytest.mark.parametrize("scheme", ["per-tensor-affine", "per-channel-affine"])
def test_pruned_weights_are_zero_in_fake_quantized_models(scheme: str) -> None:
    """A zero is a code of its own in every range, so that sparsity survives: before and in training."""
    torch.manual_seed(0)
    smodel = SparseModel(Chain(), {"DEVICE": "cpu", "SPARSER": {"TYPE": "unstructured", "RATIO": 0.5}}, images())
    with torch.no_grad():
        smodel.model.head.weight.add_(1.0)  # all above zero: a range that does not begin at zero would lose it
    smodel.calc_params()
    masks = {name: mask.clone() for name, mask in smodel.masks.items()}
    config = {
        "BACKEND": "virtual",
        "DEVICE": "cpu",
        "W": {"QSCHEME": scheme, "QUANTIZER": {"TYPE": "uniform", "BIT": 4}, "OBSERVER": {"TYPE": "MINMAX"}},
        "A": {
            "QSCHEME": "per-tensor-affine",
            "QUANTIZER": {"TYPE": "uniform", "BIT": 8},
            "OBSERVER": {"TYPE": "MINMAX"},
        },
    }
    qmodel = sparsebit.quantize(smodel.masked_model().eval(), [images(), images()], config)
    seen = 0
    for name, layer in qmodel.named_modules():
        fake_quant = getattr(layer, "weight_quantizer", None)
        mask = next((mask for key, mask in masks.items() if name.endswith(key.removesuffix(".weight"))), None)
        if fake_quant is None or mask is None or mask.shape != layer.weight.shape or bool(mask.all()):
            continue
        found = fake_quant(layer.weight)
        assert not found[~mask].any() and found[mask].any()
        seen += 1
    assert seen == 3
