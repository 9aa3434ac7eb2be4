from __future__ import annotations

import pytest

from sparsebit.quantization import QuantConfig, parse_qconfig
from sparsebit.quantization.mixed_precision.bit_config import with_bits

LAYERS = ("stem", "body.0.conv", "body.0.add", "body.1.conv", "body.1.add", "head")
WEIGHTS = {"stem": 8, "body.0.conv": 4, "body.1.conv": 4, "head": 8}


def config(text: str = "{DEVICE: cpu, W: {QUANTIZER: {BIT: 8}}, A: {QUANTIZER: {BIT: 8}}}") -> QuantConfig:
    return parse_qconfig(text)


def entries(found: QuantConfig) -> dict[str, list[object]]:
    return {glob: values for override in found.W.SPECIFIC for glob, values in override.to_entry().items()}


def test_the_most_common_bits_are_the_rule_and_the_others_are_globs() -> None:
    found = with_bits(config(), LAYERS, WEIGHTS, {})
    assert found.W.QUANTIZER.BIT == 8 and entries(found) == {"body.*": ["QUANTIZER.BIT", 4]}
    assert found.A == config().A


def test_equal_bits_need_no_entries() -> None:
    found = with_bits(config(), LAYERS, dict.fromkeys(WEIGHTS, 3), {"body.0.add": 6, "stem": 6})
    assert found.W.QUANTIZER.BIT == 3 and not found.W.SPECIFIC
    assert found.A.QUANTIZER.BIT == 6 and not found.A.SPECIFIC


def test_other_settings_of_a_layer_are_repeated() -> None:
    special = "{body.1.*: [OBSERVER.TYPE, mse, QUANTIZER.BIT, 6]}, {head: [QUANTIZER.DISABLE, true]}"
    given = config(
        f"{{DEVICE: cpu, W: {{QUANTIZER: {{BIT: 8}}, SPECIFIC: [{special}]}}, A: {{QUANTIZER: {{BIT: 8}}}}}}"
    )
    found = with_bits(given, LAYERS, {"stem": 8, "body.0.conv": 4, "body.1.conv": 4}, {})
    assert [found.resolve("W", layer).QUANTIZER.BIT for layer in ("stem", "body.0.conv", "body.1.conv")] == [8, 4, 4]
    assert found.resolve("W", "body.1.conv").OBSERVER.TYPE == "mse"
    assert found.resolve("W", "body.0.conv").OBSERVER.TYPE == "minmax"
    assert found.resolve("W", "head").QUANTIZER.DISABLE


@pytest.mark.parametrize("names", [("conv.1", "conv_1"), ("a", "a.b", "a.b.c")], ids=["node names", "nested"])
def test_names_that_look_alike(names: tuple[str, ...]) -> None:
    bits = {name: (2, 4, 6)[place] for place, name in enumerate(names)}
    found = with_bits(config(), names, bits, {})
    assert {name: found.resolve("W", name).QUANTIZER.BIT for name in names} == bits
