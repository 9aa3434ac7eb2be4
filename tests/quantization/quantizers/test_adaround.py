from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.errors import ConfigError
from sparsebit.quantization import parse_qconfig


def config(**weights: Any) -> dict[str, Any]:
    return {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 3}, **weights}, "A": {"QUANTIZER": {"BIT": 8}}}


ADAROUND = {"TYPE": "AdaRound", "BIT": 3}


def test_a_config_of_the_first_sparsebit_learns_the_rounding() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [torch.randn(32, 8)]
    qmodel = sparsebit.quantize(model, data, config(QUANTIZER=ADAROUND))
    assert qmodel.applied_algorithms == ("reconstruct",)
    nearest = sparsebit.quantize(model, data, config())
    with torch.no_grad():
        errors = [(each(data[0]) - model(data[0])).square().mean() for each in (qmodel, nearest)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    "weights",
    [{"QUANTIZER": ADAROUND}, {"SPECIFIC": [{"fc": ["QUANTIZER.TYPE", "adaround"]}]}],
    ids=["all", "one layer"],
)
def test_the_step_is_in_the_config_once(weights: dict[str, Any]) -> None:
    parsed = parse_qconfig(config(**weights))
    assert [step.name for step in parsed.ALGORITHMS] == ["reconstruct"]
    assert parse_qconfig(parsed.to_dict()) == parsed
    named = parse_qconfig({**config(**weights), "ALGORITHMS": [{"reconstruct": {"METHOD": "qdrop"}}]})
    assert [step.options.METHOD for step in named.ALGORITHMS] == ["qdrop"]  # type: ignore[attr-defined]
    assert not parse_qconfig(config()).ALGORITHMS


def test_it_is_for_weights() -> None:
    broken = config()
    broken["A"] = {"QUANTIZER": ADAROUND}
    with pytest.raises(ConfigError, match="adaround"):
        parse_qconfig(broken)
