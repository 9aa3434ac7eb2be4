"""Tensor configs: defaults, spellings, and what each key refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparsebit.config.schema import QuantConfig
from sparsebit.registry import OBSERVERS, QUANTIZERS
from tests.config.conftest import config


def value_of(key: str, given: object) -> object:
    found: object = QuantConfig.from_dict(config({key: given}))
    for name in key.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("key", "default"), [
    ("W.QSCHEME", "per-channel-symmetric"), ("A.QSCHEME", "per-tensor-affine"), ("W.QUANTIZER.TYPE", "uniform"),
    ("W.QUANTIZER.DISABLE", False), ("W.QUANTIZER.GROUP_SIZE", 128), ("W.OBSERVER.TYPE", "minmax"),
    ("W.OBSERVER.PERCENTILE.ALPHA", 0.001), ("W.OBSERVER.ACIQ.DISTRIBUTION", "GAUS"),
    ("A.QUANTIZER.PACT.ALPHA_VALUE", 10.0), ("A.OBSERVER.MOVING_AVERAGE.EMA_RATIO", 0.9), ("A.OBSERVER.LAYOUT", "NCHW"),
    ("A.QADD.ENABLE_QUANT", False),
])  # fmt: skip
def test_defaults(key: str, default: object) -> None:
    found: object = QuantConfig.from_dict(config())
    for name in key.split("."):
        found = getattr(found, name)
    assert found == default


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        # The first Sparsebit refused LSQ, and its docs said LSQ_plus where its code wanted lsq+.
        ("W.QUANTIZER.TYPE", "LSQ", "lsq"),
        ("W.QUANTIZER.TYPE", "LSQ_plus", "lsq+"),
        ("A.QUANTIZER.TYPE", "LSQ+", "lsq+"),
        ("A.QUANTIZER.TYPE", "PACT", "pact"),
        ("W.QUANTIZER.TYPE", "DoReFa", "dorefa"),
        ("W.OBSERVER.TYPE", "MINMAX", "minmax"),
        ("A.OBSERVER.TYPE", "Kl_Histogram", "kl_histogram"),
        ("A.OBSERVER.ACIQ.DISTRIBUTION", "laplace", "LAPLACE"),
        ("A.OBSERVER.LAYOUT", "nlc", "NLC"),
        ("W.QSCHEME", "Per-Tensor-Affine", "per-tensor-affine"),
        ("W.QSCHEME", "per-group-affine", "per-group-affine"),
        ("A.QUANTIZER.PACT.ALPHA_VALUE", 6, 6.0),
        ("W.QUANTIZER.BIT", 1, 1),
        ("A.QUANTIZER.BIT", 16, 16),
    ],
)
def test_spellings(key: str, given: object, kept: object) -> None:
    assert value_of(key, given) == kept


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("W.QUANTIZER.BIT", 17, "W.QUANTIZER.BIT=17: allowed: a whole number, 1 to 16"),
        ("W.QUANTIZER.BIT", -1, "W.QUANTIZER.BIT=-1: allowed: a whole number, 1 to 16"),
        ("W.QUANTIZER.BIT", "8", "BIT='8': allowed: a whole number, 1 to 16; it was given as text"),
        ("W.QUANTIZER.BIT", "[" * 999, "...[[["),
        ("W.QUANTIZER.BIT", "9" * 5000, "it was given as text: take the quotes off"),
        ("W.QUANTIZER.BIT", True, "W.QUANTIZER.BIT=True: allowed: a whole number"),
        ("W.QUANTIZER.BIT", 8.0, "W.QUANTIZER.BIT=8.0: allowed: a whole number"),
        ("W.QUANTIZER.DISABLE", "true", "take the quotes off"),
        ("W.QUANTIZER.DISABLE", 1, "W.QUANTIZER.DISABLE=1: allowed: true or false"),
        ("W.QUANTIZER.GROUP_SIZE", 0, "W.QUANTIZER.GROUP_SIZE=0: allowed: a whole number, at least 1"),
        ("W.QUANTIZER.TYPE", "unifrom", "allowed: dorefa, lsq, lsq+, uniform; did you mean uniform?"),
        ("W.QUANTIZER.TYPE", 8, "W.QUANTIZER.TYPE=8: allowed: dorefa, lsq"),
        ("W.QUANTIZER", 8, "W.QUANTIZER=8: allowed: a mapping of TYPE, BIT, DISABLE, GROUP_SIZE"),
        ("A.OBSERVER", None, "no value after the colon: write a value, or take the key out"),
        ("A.OBSERVER.TYPE", "min_max", "A.OBSERVER.TYPE='min_max': allowed: aciq, kl_histogram, minmax"),
        ("A.OBSERVER.TYPE", "min_max", "did you mean minmax?"),
        ("A.OBSERVER.LAYOUT", "NHWC", "A.OBSERVER.LAYOUT='NHWC': allowed: NCHW, NLC; did you mean NCHW?"),
        ("A.OBSERVER.ACIQ.DISTRIBUTION", "gauss", "allowed: GAUS, LAPLACE; did you mean GAUS?"),
        ("A.OBSERVER.PERCENTILE.ALPHA", 0.5, ".ALPHA=0.5: allowed: a number, at least 0, below 0.5"),
        ("A.OBSERVER.PERCENTILE.ALPHA", float("nan"), "A.OBSERVER.PERCENTILE.ALPHA=nan: allowed: a number"),
        ("A.OBSERVER.MOVING_AVERAGE.EMA_RATIO", 1, "A.OBSERVER.MOVING_AVERAGE.EMA_RATIO=1: allowed: a number"),
        ("A.QUANTIZER.PACT.ALPHA_VALUE", float("inf"), "A.QUANTIZER.PACT.ALPHA_VALUE=inf: allowed: a number, above 0"),
        ("A.QSCHEME", "per-group-affine", "A.QSCHEME='per-group-affine': allowed: per-tensor-symmetric, "),
        ("A.QSCHEME", "per-tensor-symetric", "did you mean per-tensor-symmetric?"),
        ("W.OBSERVER.LAYOUT", "NCHW", "W.OBSERVER.LAYOUT='NCHW': unknown key; allowed here: TYPE, ACIQ, PERCENTILE"),
        ("W.BIT", 8, "allowed here: QSCHEME, QUANTIZER, OBSERVER, SPECIFIC; did you mean W.QUANTIZER.BIT?"),
    ],
)
def test_refusals(key: str, value: object, expected: str, message: Callable[[dict[str, object]], str]) -> None:
    assert expected in message({key: value})


def test_users_names_are_known_once_registered(message: Callable[[dict[str, object]], str]) -> None:
    changes: dict[str, object] = {"W.QUANTIZER.TYPE": "stochastic", "A.OBSERVER.TYPE": "half_range"}
    assert message(changes).startswith("2 faults")
    QUANTIZERS.register("stochastic")(object)
    OBSERVERS.register("half_range")(object)
    made = QuantConfig.from_dict(config(changes))
    assert (made.W.QUANTIZER.TYPE, made.A.OBSERVER.TYPE) == ("stochastic", "half_range")


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetry", ["symmetric", "affine"])
def test_scheme_in_parts(granularity: str, symmetry: str) -> None:
    weights = QuantConfig.from_dict(config({"W.QSCHEME": f"per-{granularity}-{symmetry}"})).W
    assert (weights.granularity, weights.symmetric) == (granularity, symmetry == "symmetric")
