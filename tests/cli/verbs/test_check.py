"""`sparsebit check`: a file beside itself as it is written, and beside the float file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Sparsebit

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np
import onnx

from sparsebit.deploy.comparing.check import runtime_of
from sparsebit.deploy.comparing.float_twin import float_twin
from tests.deploy.tiny_files import Tiny


def two_convolutions(shape: tuple[int | str, ...] = ("batch", 8, 8, 8)) -> Tiny:
    t = Tiny(shape)
    y = t.quantized(t.conv(t.quantized("x"), "first"), scale=0.02)
    y = t.quantized(t.conv(y, "second"), scale=0.02)
    t.node("Flatten", [t.node("GlobalAveragePool", [y], "pool")], "scores")
    return t


def two_linears() -> Tiny:
    t = Tiny(("batch", 8))
    y = t.quantized("x")
    for name in ("first", "second"):
        weight, bias = t.weight(f"{name}_w", (8, 8), axis=1), t.bias(f"{name}_b", 8)
        y = t.quantized(t.node("Gemm", [y, weight, bias], name))
    t.node("Identity", [y], "scores")
    return t


def save(tiny: Tiny, file: str, **factors: float) -> Path:
    """The file, with some initializers multiplied."""
    model = tiny.model("scores_out")
    for tensor in model.graph.initializer:
        if tensor.name in factors:
            array = onnx.numpy_helper.to_array(tensor) * np.float32(factors[tensor.name])
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, file)
    return Path(file)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds a quantized file, its float twin and data."""
    monkeypatch.chdir(tmp_path)
    save(two_convolutions(), "net.onnx")
    onnx.save(float_twin("net.onnx"), "float.onnx")
    np.savez("data.npz", x=np.random.default_rng(1).standard_normal((12, 8, 8, 8)).astype(np.float32))
    return tmp_path


COMMAND = ("check", "net.onnx", "-d", "data.npz")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.exact_sums
class TestAsWritten:
    def test_table(self, sparsebit: Sparsebit, folder: Path) -> None:
        answer = sparsebit(*COMMAND)
        assert answer.code == 0, answer.err
        assert answer.err == "running net.onnx in onnxruntime, and node by node as it is written\n"
        assert "scores_out" in answer.out and "100.00%" in answer.out and "12" in answer.out
        assert "onnxruntime against the file as it is written" in words(answer.out) or "bit-exact" in answer.out

    def test_json(self, sparsebit: Sparsebit, folder: Path) -> None:
        record = sparsebit(*COMMAND, "--json", "-n", 5).json
        assert record["runtime"] == "onnxruntime" and record["fault"] is None
        (output,) = record["outputs"]
        assert output["num_samples"] == 5 and output["noise_db"] < 60 and output["max_difference"] < 1e-3
        assert record["data"].startswith("5 of 12 samples")

    def test_quiet_is_one_line(self, sparsebit: Sparsebit, folder: Path) -> None:
        answer = sparsebit(*COMMAND, "-q")
        assert answer.code == 0 and answer.err == "" and "─" not in answer.out

    def test_arrays_are_chosen(self, sparsebit: Sparsebit, folder: Path) -> None:
        with np.load("data.npz") as data:
            np.savez("more.npz", images=data["x"], other=np.zeros(3))
        assert sparsebit("check", "net.onnx", "-d", "more.npz", "-q", "--input", "images").code == 0

    def test_runtime_that_computes_something_else(self, sparsebit: Sparsebit, folder: Path) -> None:
        # ONNX Runtime's integer Gemm takes a bias on the grid of input times weight, whatever its scale says.
        save(two_linears(), "net.onnx", second_b_scale=30.0)
        np.savez("data.npz", x=np.random.default_rng(1).standard_normal((12, 8)).astype(np.float32))
        answer = sparsebit(*COMMAND)
        assert answer.code == 1 and "scores_out" in answer.out
        told = words(answer.err)
        assert "error: net.onnx: onnxruntime does not compute what the file says" in told
        assert "the first site that differs is second_out/q" in told and "of its codes differ" in told
        record = sparsebit(*COMMAND, "--json").json
        assert "second_out/q" in record["first_divergence"]["site"] and record["first_divergence"]["largest"] > 1
        assert record["fault"].startswith("onnxruntime does not compute what the file says")

    def test_fixed_batch(self, sparsebit: Sparsebit, folder: Path) -> None:
        save(two_convolutions((1, 8, 8, 8)), "net.onnx")
        assert sparsebit(*COMMAND, "--json").json["outputs"][0]["num_samples"] == 12

    def test_openvino(self, sparsebit: Sparsebit, folder: Path) -> None:
        pytest.importorskip("openvino")
        save(two_convolutions((1, 8, 8, 8)), "net.onnx")
        answer = sparsebit(*COMMAND, "--runtime", "openvino", "--json")
        assert answer.code == 0, answer.err
        assert answer.json["runtime"] == "openvino"

    def test_file_without_quantization(self, sparsebit: Sparsebit, folder: Path) -> None:
        assert sparsebit("check", "float.onnx", "-d", "data.npz").code == 0


class TestAgainst:
    @pytest.mark.exact_sums
    def test_differences(self, sparsebit: Sparsebit, folder: Path) -> None:
        answer = sparsebit(*COMMAND, "--against", "float.onnx", "--json")
        assert answer.code == 0, answer.err
        (output,) = answer.json["outputs"]
        assert 15 < output["sqnr_db"] < 60 and output["noise_db"] is None and answer.json["against"] == "float.onnx"
        assert 0 < output["mean_difference"] < output["max_difference"] < 0.2
        assert answer.json["first_divergence"] is None

    def test_far_off_is_no_fault_of_its_own(self, sparsebit: Sparsebit, folder: Path) -> None:
        save(two_convolutions(), "net.onnx", second_w_scale=4.0)
        answer = sparsebit(*COMMAND, "--against", "float.onnx")
        assert answer.code == 0, answer.err

    @pytest.mark.parametrize(
        ("limit", "told"),
        [(["--min-sqnr", "80"], "output scores_out: SQNR "), (["--min-top1", "1"], "asks for 100.00%")],
        ids=["sqnr", "top1"],
    )
    def test_limits(self, sparsebit: Sparsebit, folder: Path, limit: list[str], told: str) -> None:
        save(two_convolutions(), "net.onnx", second_w_scale=4.0)
        answer = sparsebit(*COMMAND, "--against", "float.onnx", *limit)
        assert answer.code == 1 and told in words(answer.err) and answer.out != ""
        kept = sparsebit("check", "float.onnx", "-d", "data.npz", "--against", "float.onnx", *limit)
        assert kept.code == 0 and "bit-exact" in kept.out

    def test_every_sample_counts(self, sparsebit: Sparsebit, folder: Path) -> None:
        """Top-1 against float is plain agreement: near ties are not left out."""
        from sparsebit.deploy.comparing.parity import Comparison

        expected, found = np.array([[1.0, 0.99], [0.0, 1.0]]), np.array([[0.9, 1.0], [0.0, 1.0]])
        plain, lenient = (Comparison(["y"], judge_all=flag) for flag in (True, False))
        for comparison in (plain, lenient):
            comparison.add([expected], [found])
        assert [one.result("f", "r", "a").outputs[0].top1 for one in (plain, lenient)] == [0.5, 1.0]


class TestFaults:
    @pytest.mark.parametrize(
        ("arguments", "code", "told"),
        [
            (["no.onnx"], 1, "no.onnx: no such file"),
            (["."], 1, ". is a folder; name the ONNX file. `sparsebit export` writes one from a saved model"),
            (["no.onnx", "--min-sqnr", "nan"], 2, "nan: write a number of decibels"),
            (["data.npz"], 1, "data.npz is not an ONNX file"),
            (["net.onnx", "--against", "no.onnx"], 1, "no.onnx: no such file"),
            (["net.onnx", "--runtime", "tensorrt"], 1, "allowed: onnxruntime, openvino"),
            (["net.onnx", "--size", "8"], 2, "--size cannot be used with data.npz"),
            (["net.onnx", "--min-top1", "99"], 2, "--min-top1"),
            (["maps.onnx", "--min-top1", "0.9"], 1, "no output of maps.onnx is (samples, classes)"),
            (["net.onnx", "--against", "pair.onnx"], 1, "samples of x, x2: not the same model"),
            (["one.onnx", "--against", "two.onnx"], 1, "one.onnx takes 1 samples of "),
            (["net.onnx", "-d", "small.npz"], 1, "net.onnx cannot run this data (x (12, 8, 8) float32)"),
            (["net.onnx", "-d", "two.npz"], 1, "other is not one of the inputs of net.onnx (x)"),
        ],
    )
    def test_told(self, sparsebit: Sparsebit, folder: Path, arguments: list[str], code: int, told: str) -> None:
        t = Tiny()
        onnx.save(t.model(t.quantized("x")), "maps.onnx")
        t = two_convolutions()
        t.inputs.append(onnx.helper.make_tensor_value_info("x2", onnx.TensorProto.FLOAT, (1,)))
        save(t, "pair.onnx")
        for size, name in ((1, "one"), (2, "two")):
            save(two_convolutions((size, 8, 8, 8)), f"{name}.onnx")
        np.savez("small.npz", x=np.zeros((12, 8, 8), np.float32))
        np.savez("two.npz", x=np.zeros((12, 8, 8, 8), np.float32), other=np.zeros(12))
        answer = sparsebit("check", "-d", "data.npz", *arguments)
        assert answer.code == code and told in words(answer.err) and "Traceback" not in answer.err

    def test_no_runtime(self, sparsebit: Sparsebit, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        answer = sparsebit(*COMMAND)
        assert answer.code == 1 and "pip install 'onnx-ir>=" in answer.err


class TestData:
    def test_two_inputs_by_name_or_in_order(self, sparsebit: Sparsebit, folder: Path) -> None:
        t = Tiny(("batch", 4))
        t.inputs.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.INT64, ("batch", 4)))
        y = t.node("Mul", [t.quantized("x"), t.node("Cast", ["mask"], "float", to=onnx.TensorProto.FLOAT)], "masked")
        onnx.save(t.model(y), "pair.onnx")
        arrays: dict[str, Any] = {"x": np.ones((3, 4), np.float64), "mask": np.ones((3, 4), np.int32)}
        np.savez("named.npz", **dict(reversed(arrays.items())))
        np.savez("ordered.npz", first=arrays["x"], second=arrays["mask"])
        for name in ("named.npz", "ordered.npz"):
            answer = sparsebit("check", "pair.onnx", "-d", name, "-q")
            assert answer.code == 0 and "bit-exact in onnxruntime" in answer.out, answer.err

    def test_bytes_are_bytes_where_the_file_takes_them(self, sparsebit: Sparsebit, folder: Path) -> None:
        t = Tiny()
        t.inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ("batch", 3, 4, 4))]
        scale, zero = t.constant("scale", np.float32(0.5)), t.constant("zero", np.uint8(0))
        onnx.save(t.model(t.node("DequantizeLinear", ["x", scale, zero], "dq")), "bytes.onnx")
        np.savez("bytes.npz", x=np.arange(96, dtype=np.uint8).reshape(2, 3, 4, 4))
        answer = sparsebit("check", "bytes.onnx", "-d", "bytes.npz", "-q")
        assert answer.code == 0 and "bit-exact" in answer.out, answer.err

    def test_image_folder(self, sparsebit: Sparsebit, folder: Path) -> None:
        image = pytest.importorskip("PIL.Image")
        t = Tiny((1, 3, 8, 8))
        onnx.save(t.model(t.quantized(t.conv(t.quantized("x"), channels=3))), "net.onnx")
        (folder / "photos").mkdir()
        for index in range(3):
            image.effect_noise((12, 10), 60).convert("RGB").save(folder / "photos" / f"{index}.png")
        answer = sparsebit("check", "net.onnx", "-d", "photos", "--size", 8, "--mean", 0.5, "--json")
        assert answer.code == 0 and answer.json["outputs"][0]["num_samples"] == 3, answer.err


def test_runtime_by_the_files_own_word(folder: Path) -> None:
    model = onnx.load("net.onnx")
    for backend, runtime in (("openvino", "openvino"), ("tensorrt", "onnxruntime"), ("other", "onnxruntime")):
        del model.metadata_props[:]
        model.metadata_props.add(key="sparsebit.backend", value=backend)
        onnx.save(model, "net.onnx")
        assert runtime_of(Path("net.onnx")) == runtime
