"""The verdict's sentences, and what is said of a processor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsebit.deploy.audit import audit_file as audit_module
from sparsebit.deploy.comparing.verdict import verdict
from sparsebit.deploy.sessions.cpu import cpu_name, saturates
from sparsebit.records.audit import Audit, Latency, LayerRun

ADD = "its output is read by a float add"


def conv(arithmetic: str = "integer", cause: str = "", remedy: str = "", kind: str = "convolution") -> LayerRun:
    return LayerRun("conv", "Conv", kind, True, arithmetic, "", cause, "", remedy)  # type: ignore[arg-type]


def light(op: str = "Add", arithmetic: str = "float") -> LayerRun:
    return LayerRun("light", op, op, False, arithmetic, "")  # type: ignore[arg-type]


def latency(ratio: float) -> Latency:
    return Latency(ratio, (ratio, ratio), ratio, (ratio, ratio), ratio, ratio, 3, 1)


def said(*layers: LayerRun, ratio: float | None = None, leftovers: int = 0) -> str:
    times = {} if ratio is None else {"float": latency(1), "quantized": latency(ratio)}
    left = {"QuantizeLinear": leftovers}
    return verdict(Audit("m.onnx", "onnxruntime", "1", "cpu", 1, layers, left, 100, latency=times))


def test_fast() -> None:
    words = "Faster than float (0.38 of its time): all 20 convolutions and 1 linear layer run in integers"
    assert said(*[conv()] * 20, conv(kind="linear layer"), ratio=0.38) == words


def test_slow_with_a_reason() -> None:
    layers = [conv()] * 11 + [conv("float", ADD, "quantize the residual adds")] * 9
    assert said(*layers, ratio=1.16) == (
        "Slower than float (1.16 of its time): 9 of 20 convolutions are not in integers, because their output is "
        "read by a float add; quantize the residual adds"
    )


def test_fast_but_not_as_fast_as_it_could_be() -> None:
    words = said(conv(), conv("float", ADD), ratio=0.8)
    assert words.startswith("Faster than float (0.80 of its time), but 1 of 2 convolutions is not in integers")


def test_most_frequent_reason_first() -> None:
    layers = [conv("float", ADD, "add")] * 3 + [conv("float", "it is not quantized")] + [conv()]
    assert (
        said(*layers)
        == "4 of 5 convolutions are not in integers, 3 of them because their output is read by a float add; add"
    )


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("it is not quantized", "they are not quantized"),
        ("a batch norm follows it", "a batch norm follows them"),
        ("its bias is in float", "their bias is in float"),
    ],
)
def test_reason_of_several(cause: str, told: str) -> None:
    assert told in said(conv(), conv("float", cause), conv("float", cause))


DESIGN = "products of two activations stay in float by design"
OFF = "it was switched off by the config"


def on_purpose(cause: str, kind: str = "matrix product") -> LayerRun:
    return replace(conv("float", cause, kind=kind), on_purpose=True)


def test_what_is_in_float_on_purpose_is_no_fault() -> None:
    layers = [conv(kind="linear layer")] * 12 + [on_purpose(DESIGN)] * 4 + [on_purpose(OFF, "linear layer")]
    assert said(*layers, ratio=0.7) == (
        "Faster than float (0.70 of its time): all 12 linear layers run in integers. 4 matrix products stay in float "
        "by design. 1 linear layer was switched off by the config"
    )


def test_faults_are_counted_without_what_is_on_purpose() -> None:
    words = said(conv(), conv("float", ADD), on_purpose(OFF, "convolution"), on_purpose(OFF, "convolution"))
    assert words.startswith("1 of 2 convolutions is not in integers, because its output is read by a float add")
    assert words.endswith(". 2 convolutions were switched off by the config")


def test_everything_in_float_on_purpose() -> None:
    assert said(on_purpose(DESIGN)) == "No layer runs in integers. 1 matrix product stays in float by design"


def test_two_kinds() -> None:
    layers = [conv("float", ADD), conv(), conv("float", ADD, kind="linear layer")]
    assert said(*layers).startswith("1 of 2 convolutions and 1 of 1 linear layer are not in integers")


def test_nothing_quantized() -> None:
    assert said(conv("float", "it is not quantized"), ratio=1.0) == (
        "As fast as float (1.00 of its time): nothing is quantized of 1 convolution"
    )


def test_no_heavy_layer() -> None:
    assert said(light()) == "The file has no convolution and no matrix product"


def test_weights_only() -> None:
    assert said(conv("weight-only", kind="matrix product")) == (
        "Its one matrix product runs on low-bit weights and float activations"
    )


def test_slow_though_all_in_integers() -> None:
    assert said(conv(), light(), light("Concat"), light(), ratio=1.2, leftovers=7).endswith(
        ". The cost is between them: 7 conversions around layers in float (2 Add, 1 Concat)"
    )


class TestProcessor:
    @pytest.mark.parametrize(
        ("machine", "flags", "expected"),
        [
            ("x86_64", "avx2 fma", True),
            ("AMD64", "avx2 avx512_vnni", False),
            ("x86_64", "avx_vnni", False),
            ("x86_64", "", False),  # unknown is no ground for a warning
            ("aarch64", "asimd", False),
        ],
    )
    def test_saturation(self, machine: str, flags: str, expected: bool) -> None:
        assert saturates(machine, flags) is expected

    def test_has_a_name(self) -> None:
        assert cpu_name()

    def test_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("onnx")
        from sparsebit.deploy.onnx_graph.qdq_graph import Graph
        from tests.deploy.tiny_files import Tiny

        t = Tiny()
        graph = Graph(t.model(t.conv("x")))
        monkeypatch.setattr(audit_module, "saturates", lambda: True)
        monkeypatch.setattr(audit_module, "is_arm", lambda: False)
        (told,) = audit_module._warnings(graph, (conv(),), "onnxruntime")
        assert "no VNNI" in told
        assert list(audit_module._warnings(graph, (conv("float"),), "onnxruntime")) == []
