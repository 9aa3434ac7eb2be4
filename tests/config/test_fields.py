"""Fields: what a key takes in words, which keys exist, which one was meant."""

from __future__ import annotations

import pytest

from sparsebit.config.fields import choices, describe, field_at, meant, nearest, section_of, walk
from sparsebit.config.schema import QuantConfig


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("BACKEND", "virtual, onnxruntime, openvino, tensorrt, qnn, aot_inductor, executorch, litert, coreml"),
        ("DEVICE", "cpu, cuda, cuda:N"),
        (
            "SCHEDULE",
            "a mapping of FUSE_BN, MERGE_BRANCHES, FOLD_SCALES, PAD_CHANNELS, BN_TUNING, DISABLE_UNNECESSARY_QUANT",
        ),
        ("SCHEDULE.FUSE_BN", "true or false"),
        ("W.QUANTIZER.BIT", "a whole number, 1 to 16"),
        ("W.QUANTIZER.GROUP_SIZE", "a whole number, at least 1"),
        ("W.QUANTIZER.TYPE", "dorefa, lsq, lsq+, uniform"),
        ("A.OBSERVER.PERCENTILE.ALPHA", "a number, at least 0, below 0.5"),
        ("A.QUANTIZER.PACT.ALPHA_VALUE", "a number, above 0"),
        ("A.OBSERVER.LAYOUT", "NCHW, NLC"),
    ],
)
def test_describe(key: str, words: str) -> None:
    field = field_at(QuantConfig, tuple(key.split(".")))
    assert field is not None and describe(field) == words


def test_every_key_has_a_meaning() -> None:
    assert [path for path, field in walk(QuantConfig) if not field.description] == []


def test_every_path_leads_to_its_field() -> None:
    assert all(field_at(QuantConfig, path) is field for path, field in walk(QuantConfig))


@pytest.mark.parametrize("key", ["X", "W.X", "W.QSCHEME.X", "W.X.Y", "w"])
def test_no_field(key: str) -> None:
    assert field_at(QuantConfig, tuple(key.split("."))) is None


def test_sections_have_no_choices() -> None:
    assert all(not choices(field) for _, field in walk(QuantConfig) if section_of(field))


@pytest.mark.parametrize(("wrong", "right"), [
    ("backend", "BACKEND"), ("W.QUANTZER", "W.QUANTIZER"), ("A.QUANTIZER.BITS", "A.QUANTIZER.BIT"),
    ("A.BIT", "A.QUANTIZER.BIT"), ("W.bit", "W.QUANTIZER.BIT"), ("FUSE_BN", "SCHEDULE.FUSE_BN"),
    ("A.PERCENTILE", "A.OBSERVER.PERCENTILE"), ("W.ALPHA", "W.OBSERVER.PERCENTILE.ALPHA"),
])  # fmt: skip
def test_meant(wrong: str, right: str) -> None:
    assert meant(QuantConfig, tuple(wrong.split("."))) == tuple(right.split("."))


def test_nothing_meant() -> None:
    assert meant(QuantConfig, ("XYZZY",)) is None


def test_nearest_keeps_the_right_spelling() -> None:
    assert nearest("gaus", ["GAUS", "LAPLACE"]) == "GAUS"
    assert nearest("zzz", ["GAUS"]) is None
