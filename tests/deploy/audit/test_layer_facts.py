"""What a file says about its layers: edges, shapes, multiplications, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparsebit.deploy.audit.audit_file import audit
from tests.deploy.tiny_files import Tiny


def layers_of(tiny: Tiny, output: str, folder: Path, **how: Any) -> dict[str, Any]:
    file = tiny.save(folder / "net.onnx", output)
    return {layer.name: layer for layer in audit(file, repeats=0, **how).layers}


def test_edges_pass_through_what_is_not_a_layer(tmp_path: Path) -> None:
    t = Tiny()
    y = t.quantized(t.conv(t.quantized("x"), "stem"))
    moved = t.node("Transpose", [y], "moved", perm=[0, 1, 3, 2])
    y = t.node("Add", [t.conv(moved, "conv"), y], "add")
    found = layers_of(t, y, tmp_path)
    assert found["stem"].inputs == () and found["conv"].inputs == ("stem",)
    assert set(found["add"].inputs) == {"conv", "stem"}


def test_multiplications_and_the_stored_weight(tmp_path: Path) -> None:
    t = Tiny()
    found = layers_of(t, t.quantized(t.conv(t.quantized("x"), "conv")), tmp_path)["conv"]
    (samples, channels, height, width), weights = found.shape, found.num_bytes
    assert found.macs == height * width * weights and found.weight_bits == 8
    assert (samples, channels, weights) == (1, 8, 8 * 8 * 3 * 3)


def test_products_of_matrices(tmp_path: Path) -> None:
    t = Tiny((2, 5, 8))
    weight = t.constant("w", np.zeros((8, 3), np.float32))
    product = t.node("MatMul", ["x", weight], "linear")
    found = layers_of(t, t.node("MatMul", ["x", t.node("Transpose", ["x"], "t", perm=[0, 2, 1])], "scores"), tmp_path)
    assert found["scores"].macs == 2 * 5 * 5 * 8 and found["scores"].num_bytes is None
    linear = layers_of(t, product, tmp_path)["linear"]
    assert linear.macs == 2 * 5 * 3 * 8 and (linear.num_bytes, linear.weight_bits) == (96, 32)


def test_open_sizes_count_as_one_and_unknown_ones_are_not_guessed(tmp_path: Path) -> None:
    t = Tiny(("batch", 8, 6, 6))
    found = layers_of(t, t.conv(t.quantized("x"), "conv"), tmp_path)["conv"]
    assert found.shape[0] == 0 and found.macs == found.num_bytes * found.shape[2] * found.shape[3]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_layers_have_times_in_both_files(tmp_path: Path, runtime: str) -> None:
    pytest.importorskip(runtime)
    t = Tiny()
    file = t.save(tmp_path / "net.onnx", t.quantized(t.conv(t.quantized(t.conv(t.quantized("x"), "a")), "b")))
    found = audit(file, runtime=runtime, repeats=1, budget_s=0.1)
    assert all(layer.ms is not None and layer.float_ms is not None for layer in found.heavy)
    assert all(layer.ms is None for layer in audit(file, runtime=runtime, repeats=0).layers)
