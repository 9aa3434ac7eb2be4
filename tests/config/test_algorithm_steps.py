"""ALGORITHMS: what is read, what is refused, and how it is written again."""

from __future__ import annotations

import pytest

from sparsebit.config.schema import QuantConfig
from sparsebit.errors import ConfigError
from sparsebit.quantization import parse_qconfig

BITS = "W: {QUANTIZER: {BIT: 4}}\nA: {QUANTIZER: {BIT: 8}}\n"


def read(text: str) -> QuantConfig:
    return parse_qconfig(f"{BITS}ALGORITHMS: {text}\n")


def test_names_and_options_in_the_order_written() -> None:
    steps = read("[bias_correction, {GPTQ: {SWEEPS: 3}}, gptq: ]").ALGORITHMS
    assert [step.name for step in steps] == ["bias_correction", "gptq", "gptq"]
    assert [dict(step.options).get("SWEEPS") for step in steps] == [None, 3, 2]


def test_none_by_default() -> None:
    assert parse_qconfig(BITS).ALGORITHMS == ()


def test_written_and_read_again() -> None:
    config = read("[gptq, {bias_correction: {METHOD: empirical}}]")
    assert config.to_dict()["ALGORITHMS"] == ["gptq", {"bias_correction": {"METHOD": "empirical"}}]
    assert parse_qconfig(config.to_dict()) == parse_qconfig(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gptq", r"ALGORITHMS='gptq': allowed: a list"),
        ("[gptqq]", r"line 3: ALGORITHMS: unknown algorithm 'gptqq'; allowed: .* did you mean 'gptq'\?"),
        ("[4]", "ALGORITHMS=4: each entry is a name"),
        ("[{gptq: {}, bias_correction: {}}]", "each entry is a name, or one name with its options"),
        ("[gptq: 4]", "ALGORITHMS.gptq=4: allowed: a mapping of options: ACT_ORDER"),
        ("[gptq: {SWEEP: 1}]", r"ALGORITHMS.gptq.SWEEP=1: unknown key; .* did you mean SWEEPS\?"),
        ("[gptq: {SWEEPS: -1}]", "ALGORITHMS.gptq.SWEEPS=-1: allowed: a whole number, at least 0"),
        ("[gptq: {SWEEPS: many}]", "ALGORITHMS.gptq.SWEEPS='many': allowed: a whole number"),
        ("[gptq: {SCALE_SEARCH: best}]", "allowed: none, nearest, gptq"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="3 faults") as caught:
        read("[gptq: {SWEEPS: -1, DAMPING: -1}, unknown]")
    assert all(word in str(caught.value) for word in ("SWEEPS", "DAMPING", "unknown"))
