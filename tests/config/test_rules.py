"""Rules between keys: bits, quantizers, backends, BN tuning; for the whole config and for every override alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparsebit.backends import BACKENDS
from sparsebit.config.rules import quantizers_for, schemes
from sparsebit.config.schema import QuantConfig
from tests.config.conftest import config

Told = Callable[[dict[str, object]], str]
RUNTIMES = [name for name, backend in BACKENDS.items() if name != "virtual" and 4 in backend.weight_only.bits]
ORT_W, ORT_A = BACKENDS["onnxruntime"].weight.advice, BACKENDS["onnxruntime"].activation.advice
TRT_W, TRT_A = BACKENDS["tensorrt"].weight.advice, BACKENDS["tensorrt"].activation.advice
VINO_W = BACKENDS["openvino"].weight.advice
WEIGHT_ONLY = "A.QUANTIZER.DISABLE: true to quantize weights only"
UNGROUPED = "per-tensor-symmetric, per-tensor-affine, per-channel-symmetric or per-channel-affine"
BROKEN = [
    ("onnxruntime", "W", "QUANTIZER.BIT", 4, f"{ORT_W}; set 8, or {WEIGHT_ONLY}"),
    ("onnxruntime", "W", "QUANTIZER.BIT", 3, f"{ORT_W}; set 8"),
    ("onnxruntime", "A", "QUANTIZER.BIT", 4, f"{ORT_A}; set 8"),
    ("onnxruntime", "A", "QSCHEME", "per-channel-affine", f"{ORT_A}; set per-tensor-symmetric or per-tensor-affine"),
    ("openvino", "W", "QUANTIZER.BIT", 2, f"{VINO_W}; set 8"),
    ("openvino", "W", "QSCHEME", "per-group-affine", f"{VINO_W}; set {UNGROUPED}"),
    ("tensorrt", "W", "QSCHEME", "per-tensor-symmetric", f"{TRT_W}; set per-channel-symmetric"),
    ("tensorrt", "W", "QSCHEME", "per-channel-affine", f"{TRT_W}; set per-channel-symmetric"),
    ("tensorrt", "A", "QSCHEME", "per-tensor-affine", f"{TRT_A}; set per-tensor-symmetric"),
    ("tensorrt", "A", "QUANTIZER.BIT", 4, f"{TRT_A}; set 8"),
]
IDS = [f"{backend}-{kind}-{value}" for backend, kind, _, value, _ in BROKEN]


class TestBackends:
    @pytest.mark.parametrize(("backend", "kind", "key", "value", "reason"), BROKEN, ids=IDS)
    def test_whole_config(self, backend: str, kind: str, key: str, value: object, reason: str, message: Told) -> None:
        assert (
            message({"BACKEND": backend, f"{kind}.{key}": value})
            == f"{kind}.{key}={value}: {reason}, or BACKEND: virtual"
        )

    @pytest.mark.parametrize(("backend", "kind", "key", "value", "reason"), BROKEN, ids=IDS)
    def test_override(self, backend: str, kind: str, key: str, value: object, reason: str, message: Told) -> None:
        told = message({"BACKEND": backend, f"{kind}.SPECIFIC": [{"layer1.*": [key, value]}]})
        assert told == f"{kind}.{key}={value} at layer1.*: {reason}, or BACKEND: virtual"

    @pytest.mark.parametrize(("backend", "kind", "key", "value", "reason"), BROKEN, ids=IDS)
    def test_virtual_runs_it_all(self, backend: str, kind: str, key: str, value: object, reason: str) -> None:
        QuantConfig.from_dict(config({f"{kind}.{key}": value, f"{kind}.SPECIFIC": [{"fc": [key, value]}]}))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_defaults_run_everywhere(self, backend: str) -> None:
        made = QuantConfig.from_dict(config({"BACKEND": backend.upper()}))
        scheme = "per-tensor-symmetric" if backend == "tensorrt" else "per-tensor-affine"
        assert scheme == made.A.QSCHEME
        assert made.resolve("A", "fc").QSCHEME == made.A.QSCHEME
        assert not made.is_set("A.QSCHEME") and not made.resolve("A", "fc").is_set("QSCHEME")

    def test_float_tensors_obey_no_backend(self) -> None:
        values = {"W.QSCHEME": "per-tensor-affine", "W.QUANTIZER.BIT": 3, "W.QUANTIZER.DISABLE": True}
        assert QuantConfig.from_dict(config({"BACKEND": "tensorrt", **values})).W.QUANTIZER.DISABLE

    def test_everything_broken_is_told(self, message: Told) -> None:
        told = message(
            {"BACKEND": "tensorrt", "W.QUANTIZER.BIT": 4, "A.QUANTIZER.BIT": 4, "A.QSCHEME": "per-tensor-affine"}
        )
        assert told.startswith("3 faults in the config:")

    def test_fault_of_the_whole_is_not_repeated_for_its_layers(self, message: Told) -> None:
        told = message({"BACKEND": "tensorrt", "A.QUANTIZER.BIT": 4, "A.SPECIFIC": [{"fc": ["OBSERVER.TYPE", "mse"]}]})
        assert told.startswith("A.QUANTIZER.BIT=4: ")

    def test_schemes(self) -> None:
        assert schemes(BACKENDS["tensorrt"].weight_only) == ["per-channel-symmetric", "per-group-symmetric"]


class TestWeightOnly:
    @pytest.mark.parametrize("backend", RUNTIMES)
    @pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-group-symmetric"])
    def test_four_bits(self, backend: str, scheme: str) -> None:
        changes = {"W.QUANTIZER.BIT": 4, "W.QSCHEME": scheme, "A.QUANTIZER.BIT": ..., "A.QUANTIZER.DISABLE": True}
        assert QuantConfig.from_dict(config({"BACKEND": backend, **changes})).W.QUANTIZER.BIT == 4

    @pytest.mark.parametrize("backend", RUNTIMES)
    def test_three_bits_run_nowhere(self, backend: str, message: Told) -> None:
        told = message({"BACKEND": backend, "W.QUANTIZER.BIT": 3, "A.QUANTIZER.DISABLE": True})
        allowed = "set 2, 4 or 8, or" if backend == "onnxruntime" else "set 4 or 8, or"
        assert told.startswith("W.QUANTIZER.BIT=3: ") and allowed in told

    def test_two_bits(self, message: Told) -> None:
        changes = {"W.QUANTIZER.BIT": 2, "A.QUANTIZER.BIT": ..., "A.QUANTIZER.DISABLE": True}
        assert QuantConfig.from_dict(config({"BACKEND": "onnxruntime", **changes})).W.QUANTIZER.BIT == 2
        assert "set 4 or 8, or" in message({"BACKEND": "openvino", **changes})

    def test_single_layer(self) -> None:
        changes = {
            "W.SPECIFIC": [{"head.*": ["QUANTIZER.BIT", 4]}],
            "A.SPECIFIC": [{"head.*": ["QUANTIZER.DISABLE", True]}],
        }
        made = QuantConfig.from_dict(config({"BACKEND": "onnxruntime", **changes}))
        assert made.resolve("W", "head.fc").QUANTIZER.BIT == 4 and made.resolve("A", "head.fc").QUANTIZER.DISABLE

    def test_layer_whose_activations_are_switched_on_again(self, message: Told) -> None:
        told = message(
            {
                "BACKEND": "onnxruntime",
                "W.QUANTIZER.BIT": 4,
                "A.QUANTIZER.DISABLE": True,
                "A.SPECIFIC": [{"fc": ["QUANTIZER.DISABLE", False]}],
            }
        )
        assert told.startswith("W.QUANTIZER.BIT=4 at fc: onnxruntime runs 8-bit weights with 8-bit activations")


class TestBits:
    """The first Sparsebit only warned of bit 0, and then gave NaN."""

    @pytest.mark.parametrize(("kind", "noun"), [("W", "weights"), ("A", "activations")])
    def test_zero(self, kind: str, noun: str, message: Told) -> None:
        remedy = f"set 1 to 16, or {kind}.QUANTIZER.DISABLE: true to leave the {noun} float"
        assert message({f"{kind}.QUANTIZER.BIT": 0}) == f"{kind}.QUANTIZER.BIT=0: no number has 0 bits; {remedy}"
        told = message({f"{kind}.SPECIFIC": [{"*norm": ["QUANTIZER.BIT", 0]}]})
        assert told == f"{kind}.QUANTIZER.BIT=0 at *norm: no number has 0 bits; {remedy}"

    @pytest.mark.parametrize("kind", ["W", "A"])
    @pytest.mark.parametrize("gone", ["", ".QUANTIZER", ".QUANTIZER.BIT"], ids=["section", "quantizer", "bit"])
    def test_missing(self, kind: str, gone: str, message: Told) -> None:
        assert message({f"{kind}{gone}": ...}).startswith(f"{kind}.QUANTIZER.BIT: missing; set 1 to 16, or ")

    def test_empty_config(self) -> None:
        with pytest.raises(
            ValueError, match=r"(?s)2 faults in the config:.*W.QUANTIZER.BIT: missing.*A.QUANTIZER.BIT: missing"
        ):
            QuantConfig.from_dict({})

    def test_given_for_every_layer(self) -> None:
        made = QuantConfig.from_dict(config({"W.QUANTIZER.BIT": ..., "W.SPECIFIC": [{"*": ["QUANTIZER.BIT", 5]}]}))
        assert made.resolve("W", "fc").QUANTIZER.BIT == 5

    def test_not_needed_for_float(self) -> None:
        assert QuantConfig.from_dict(config({"W.QUANTIZER.BIT": ..., "W.QUANTIZER.DISABLE": True})).W.QUANTIZER.DISABLE

    def test_float_with_a_layer_switched_on(self, message: Told) -> None:
        off = {"W.QUANTIZER.BIT": ..., "W.QUANTIZER.DISABLE": True}
        told = message({**off, "W.SPECIFIC": [{"fc": ["QUANTIZER.DISABLE", False]}]})
        assert told.startswith("W.QUANTIZER.BIT at fc: missing; ")


class TestQuantizers:
    @pytest.mark.parametrize(
        ("kind", "name", "noun", "allowed"),
        [
            ("A", "dorefa", "activations", "lsq, lsq+, pact, uniform"),
            ("W", "pact", "weights", "dorefa, lsq, lsq+, uniform"),
        ],
    )
    def test_not_made_for_it(self, kind: str, name: str, noun: str, allowed: str, message: Told) -> None:
        expected = f"{kind}.QUANTIZER.TYPE={name}: not made for {noun}; allowed: {allowed}; write {kind}.QUANTIZER.TYPE"
        assert message({f"{kind}.QUANTIZER.TYPE": name}) == f"{expected}: uniform"
        assert " at fc: not made for" in message({f"{kind}.SPECIFIC": [{"fc": ["QUANTIZER.TYPE", name]}]})

    def test_made_for_both(self) -> None:
        assert set(quantizers_for("W")) & set(quantizers_for("A")) == {"uniform", "lsq", "lsq+"}


class TestBatchNormTuning:
    @pytest.mark.parametrize("scheme", ["per-tensor-symmetric", "per-tensor-affine", "per-group-symmetric"])
    def test_wants_per_channel_weights(self, scheme: str, message: Told) -> None:
        told = message({"SCHEDULE.BN_TUNING": True, "W.QSCHEME": scheme})
        nearest = f"per-channel-{scheme.split('-')[-1]}"
        assert (
            told
            == f"W.QSCHEME={scheme}: BN tuning needs per-channel weights; set {nearest}, or SCHEDULE.BN_TUNING: false"
        )
        told = message({"SCHEDULE.BN_TUNING": True, "W.SPECIFIC": [{"conv1": ["QSCHEME", scheme]}]})
        assert told.startswith(f"W.QSCHEME={scheme} at conv1: BN tuning")
