"""Algorithms of users: options from keywords, checked in configs and in calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field
from torch import nn

import sparsebit
from sparsebit.errors import ConfigError
from sparsebit.quantization import QuantModel, Section, register_algorithm
from sparsebit.quantization.algorithms.registration import options_of_keywords
from sparsebit.registry import ALGORITHMS

DATA = [torch.ones(8, 4)]
BITS = {"DEVICE": "cpu", "W": {"QUANTIZER": {"BIT": 4}}, "A": {"QUANTIZER": {"BIT": 8}}}


def scale_biases(
    qmodel: QuantModel,
    data: Any,
    *,
    factor: Annotated[float, Field(gt=0)] = 2.0,
    kind: Literal["all", "last"] = "all",
    memory_budget: int = 0,
    resume: Any = None,
) -> list[Any]:
    """Multiply biases.

    `factor`: by which. `kind`: which of them,
    in the order of the model.

    More text.
    """
    return [factor, kind, memory_budget, resume, len(list(data))]


def test_keywords_are_the_options_and_the_docstring_explains_them() -> None:
    options = options_of_keywords("mine", scale_biases)
    assert options().model_dump() == {"FACTOR": 2.0, "KIND": "all"}
    told = {key: field.description for key, field in options.model_fields.items()}
    assert told == {"FACTOR": "by which.", "KIND": "which of them, in the order of the model."}


def test_a_config_calls_it_with_its_options() -> None:
    called = []

    @register_algorithm("mine")
    def mine(qmodel: QuantModel, data: Any, *, factor: float = 2.0) -> None:
        called.append((factor, qmodel.is_quantized("weight"), len(list(data))))

    config = {**BITS, "ALGORITHMS": ["mine", {"Mine": {"FACTOR": 3}}]}
    qmodel = sparsebit.quantize(nn.Linear(4, 4), DATA, config)
    assert called == [(2.0, True, 1), (3.0, True, 1)]
    assert qmodel.applied_algorithms == ("mine", "mine")


def test_a_call_is_checked_like_a_config() -> None:
    function = register_algorithm("scale_biases")(scale_biases)
    qmodel = sparsebit.quantize(nn.Linear(4, 4), DATA, BITS)
    with pytest.raises(ConfigError, match=r"scale_biases\(\): factor=-1: allowed: a number, above 0; kind='some'"):
        function(qmodel, DATA, factor=-1, kind="some")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        function(qmodel, DATA, facter=1)  # type: ignore[call-arg]
    assert qmodel.applied_algorithms == ()
    assert function(qmodel, DATA, factor=1) == [1, "all", 0, None, 1]


def test_keywords_without_type_or_default_are_refused() -> None:
    def untyped(qmodel: Any, data: Any, *, factor=1.0) -> None: ...  # type: ignore[no-untyped-def]
    def required(qmodel: Any, data: Any, *, factor: float) -> None: ...

    for function in (untyped, required):
        with pytest.raises(ConfigError, match="keyword 'factor' needs a type and a default"):
            register_algorithm("odd")(function)
    assert "odd" not in ALGORITHMS


def test_options_of_its_own() -> None:
    class Own(Section):
        FACTOR: float = Field(1.0, ge=0, description="By which.")

    register_algorithm("own", options=Own)(scale_biases)
    assert ALGORITHMS.options_of("own")[1] is Own
