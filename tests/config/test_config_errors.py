"""Faults: the words a user reads, and the line they are told for."""

from __future__ import annotations

from typing import Literal

import pytest

from sparsebit.config.config_errors import Fault, all_faults, error, given, unknown_key
from sparsebit.config.reading import Document
from sparsebit.config.schema import QuantConfig
from sparsebit.config.section import Section

BIT = Fault(("W", "QUANTIZER", "BIT"), "too many", "=99")
DEVICE = Fault(("DEVICE",), "no such thing", "='tpu'")
FILE = Document({}, "q.yaml", {("DEVICE",): 2, ("W",): 3, ("W", "SPECIFIC", "fc"): 7})


class TestError:
    def test_one_fault_is_one_line(self) -> None:
        assert str(error([BIT])) == "W.QUANTIZER.BIT=99: too many"
        assert str(error([BIT], FILE)) == "q.yaml, line 3: W.QUANTIZER.BIT=99: too many"
        assert str(error([BIT], Document({}, "", FILE.lines))) == "line 3: W.QUANTIZER.BIT=99: too many"

    def test_several_stand_in_the_order_of_the_file(self) -> None:
        assert str(error([BIT, DEVICE, BIT.at("fc")], FILE)).split("\n") == [
            "3 faults in q.yaml:",
            "  line 2: DEVICE='tpu': no such thing",
            "  line 3: W.QUANTIZER.BIT=99: too many",
            "  line 7: W.QUANTIZER.BIT=99 at fc: too many",
        ]

    def test_same_fault_is_told_once(self) -> None:
        assert str(error([BIT, BIT])) == str(error([BIT]))


class TestUnknownKey:
    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            (
                "backend",
                "allowed here: BACKEND, DEVICE, SKIP_TRACE_MODULES, SCHEDULE, ALGORITHMS, W, A; did you mean BACKEND?",
            ),
            ("A.QADD.ENABLE", "allowed here: ENABLE_QUANT; did you mean A.QADD.ENABLE_QUANT?"),
            (
                "A.QAD.ENABLE_QUANT",
                "allowed here: QSCHEME, QUANTIZER, OBSERVER, QADD, SPECIFIC; did you mean A.QADD.ENABLE_QUANT?",
            ),
            ("W.XYZZY", "allowed here: QSCHEME, QUANTIZER, OBSERVER, SPECIFIC"),
            ("A.QSCHEME.X", "A.QSCHEME holds no keys, it takes per-tensor-symmetric"),
        ],
        ids=["neighbour", "shortened", "section", "nothing near", "below a value"],
    )
    def test_says_what_is_there(self, key: str, expected: str) -> None:
        assert str(unknown_key(QuantConfig, tuple(key.split(".")), 1)).startswith(f"{key}=1: unknown key; {expected}")

    def test_dotted_key_in_a_file(self) -> None:
        assert "keys nest, write W: {QUANTIZER: {BIT: ...}}" in str(unknown_key(QuantConfig, ("W.QUANTIZER.BIT",), 1))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(4, "=4"), ("x", "='x'"), (None, "=None"), ({"a": {"b": {"c": 1}}}, "={'a': {'b': {...}}}"), (10**5000, "=<int>")],
    ids=["number", "text", "nothing", "deep", "huge"],
)
def test_given(value: object, shown: str) -> None:
    assert given(value) == shown


def test_given_is_short() -> None:
    assert len(given("x" * 10_000)) < 80 and len(given(list(range(10_000)))) < 80


@pytest.mark.parametrize("value", ["a", [3], 3])
def test_a_key_that_takes_several_types_has_one_fault(value: object) -> None:
    class Options(Section):
        BLOCKS: Literal["layers", "network"] | tuple[str, ...] | None = None
        NAMES: tuple[str, ...] = ()

    (fault,) = all_faults({"BLOCKS": value}, Options)
    assert str(fault) == f"BLOCKS={value!r}: allowed: layers, network or a list, each text or null"
    assert len(all_faults({"BLOCKS": value, "NAMES": [1, 2]}, Options)) == 3
