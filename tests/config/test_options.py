"""Sections of options: whose they are, when they are known, and what a class of options must be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import pytest
import yaml
from pydantic import Field, field_validator, model_validator

from sparsebit.config.options import check_options, selected_options
from sparsebit.config.schema import QuantConfig
from sparsebit.config.section import Section
from sparsebit.config.tensor_config import ActivationObserver, WeightObserver
from sparsebit.errors import ConfigError
from sparsebit.registry import OBSERVERS, QUANTIZERS
from tests.config.conftest import ForActivations, ForWeights, config

Message = Callable[[dict[str, object]], str]


class Inner(Section):
    DEPTH: int = Field(1, ge=1)


class MineOptions(Section):
    PART: float = Field(0.5, gt=0, le=1, description="How much of the range is kept.")
    MODE: Literal["fast", "exact"] = "fast"
    ENDS: tuple[float, ...] = ()
    PAIR: tuple[float, float] | None = None
    STEP: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    LIMIT: int | None = Field(None, ge=0, multiple_of=2)
    INNER: Inner = Field(default_factory=Inner)


class OrderedOptions(Section):
    LOW: float = 0.0
    HIGH: float = 1.0
    ODD: int = 1

    @field_validator("ODD")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> OrderedOptions:
        if self.LOW >= self.HIGH:
            raise ValueError("LOW must be below HIGH")
        return self


class Mine: ...


@pytest.fixture
def mine() -> None:
    OBSERVERS.register("mine", options=MineOptions)(Mine)


def made(changes: dict[str, object]) -> QuantConfig:
    return QuantConfig.from_dict(config(changes))


@pytest.mark.usefixtures("mine")
class TestSection:
    @pytest.mark.parametrize("kind", ["W", "A"])
    def test_values_and_defaults(self, kind: str) -> None:
        read = made({f"{kind}.OBSERVER": {"TYPE": "MINE", "MINE": {"PART": 1, "ENDS": [1, 2.5], "PAIR": [0, 1]}}})
        options = selected_options(getattr(read, kind).OBSERVER)
        assert options == MineOptions(PART=1.0, ENDS=(1.0, 2.5), PAIR=(0.0, 1.0))
        assert read.is_set(f"{kind}.OBSERVER.MINE.PART") and not read.is_set(f"{kind}.OBSERVER.MINE.MODE")
        other = {"W": "A", "A": "W"}[kind]
        assert MineOptions() == getattr(read, other).OBSERVER.MINE
        assert not read.is_set(f"{other}.OBSERVER.MINE") and not read.is_set(f"{other}.OBSERVER.MINE.PART")

    def test_of_a_type_that_is_not_selected(self) -> None:
        read = made({"A.OBSERVER.MINE.PART": 0.25})
        assert read.A.OBSERVER.TYPE == "minmax" and read.A.OBSERVER.MINE.PART == 0.25
        assert selected_options(read.A.OBSERVER) == Section()

    def test_written_and_read_again(self) -> None:
        read = made({"A.OBSERVER": {"TYPE": "mine", "MINE": {"MODE": "exact", "INNER": {"DEPTH": 3}, "ENDS": [1]}}})
        assert read.to_dict()["A"]["OBSERVER"]["MINE"] == {"MODE": "exact", "INNER": {"DEPTH": 3}, "ENDS": [1.0]}
        for defaults in (False, True):
            again = QuantConfig.from_dict(yaml.safe_load(read.to_yaml(defaults=defaults)))
            assert again == read and again.to_dict(defaults=True) == read.to_dict(defaults=True)
        assert yaml.safe_load(read.to_yaml(defaults=True))["W"]["OBSERVER"]["MINE"]["PART"] == 0.5

    def test_a_value_like_every_section(self) -> None:
        read = made({"A.OBSERVER.MINE.ENDS": [1, 2]})
        assert hash(read.A) == hash(made({"A.OBSERVER.MINE.ENDS": [1, 2]}).A)
        assert read != made({"A.OBSERVER.MINE.ENDS": [1, 3]})
        for copied in (copy.deepcopy(read), pickle.loads(pickle.dumps(read)), read.model_copy()):
            assert copied == read and copied.is_set("A.OBSERVER.MINE.ENDS") and not copied.is_set("A.OBSERVER.TYPE")
        with pytest.raises(ConfigError, match="a config is frozen"):
            read.A.OBSERVER.MINE.PART = 1.0

    def test_replace(self) -> None:
        read = made({}).replace("A.OBSERVER.MINE.PART", 0.25, "A.OBSERVER.MINE.INNER.DEPTH", 2)
        assert MineOptions(PART=0.25, INNER=Inner(DEPTH=2)) == read.A.OBSERVER.MINE
        with pytest.raises(ConfigError, match=r"A.OBSERVER.MINE.PART=2: allowed: a number, above 0, at most 1"):
            read.replace("A.OBSERVER.MINE.PART", 2)

    def test_specific(self) -> None:
        read = made(
            {
                "A.OBSERVER": {"TYPE": "mine", "MINE": {"PART": 0.25, "MODE": "exact"}},
                "A.SPECIFIC": [{"fc": ["OBSERVER.MINE.PART", 0.75]}],
                "W.SPECIFIC": [{"fc": ["OBSERVER.TYPE", "mine", "OBSERVER.MINE.INNER.DEPTH", 4]}],
            }
        )
        fc, other = (selected_options(read.resolve("A", layer).OBSERVER) for layer in ("fc", "conv"))
        assert (fc, other) == (MineOptions(PART=0.75, MODE="exact"), MineOptions(PART=0.25, MODE="exact"))
        assert selected_options(read.resolve("W", "fc").OBSERVER) == MineOptions(INNER=Inner(DEPTH=4))
        assert selected_options(read.resolve("W", "conv").OBSERVER) == Section()

    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("PART", 0, "A.OBSERVER.MINE.PART=0: allowed: a number, above 0, at most 1"),
            ("PART", "0.5", "allowed: a number, above 0, at most 1; it was given as text: take the quotes off"),
            ("MODE", "exakt", "A.OBSERVER.MINE.MODE='exakt': allowed: fast, exact; did you mean exact?"),
            ("ENDS", [1, "x"], "A.OBSERVER.MINE.ENDS='x': allowed: a list, each a number"),
            ("ENDS", 1, "A.OBSERVER.MINE.ENDS=1: allowed: a list, each a number"),
            ("PAIR", [1, 2, 3], "A.OBSERVER.MINE.PAIR=[1, 2, 3]: allowed: a list of 2 or null"),
            ("STEP", "x", "A.OBSERVER.MINE.STEP='x': allowed: auto or a number, above 0"),
            ("STEP", -1.0, "A.OBSERVER.MINE.STEP=-1.0: allowed: auto or a number, above 0"),
            ("LIMIT", 3, "A.OBSERVER.MINE.LIMIT=3: allowed: a whole number or null, at least 0, a multiple of 2"),
            ("INNER.DEPTH", 0, "A.OBSERVER.MINE.INNER.DEPTH=0: allowed: a whole number, at least 1"),
            ("INNER", 1, "A.OBSERVER.MINE.INNER=1: allowed: a mapping of DEPTH"),
            ("PRAT", 1, "allowed here: PART, MODE, ENDS, PAIR, STEP, LIMIT, INNER; did you mean A.OBSERVER.MINE.PART?"),
        ],
    )
    def test_refusals(self, key: str, value: object, expected: str, message: Message) -> None:
        assert expected in message({f"A.OBSERVER.MINE.{key}": value})
        if not isinstance(value, list):
            found = message({"A.SPECIFIC": [{"fc": [f"OBSERVER.MINE.{key}", value]}]})
            assert " at fc: " in found and (expected.split(": ", 1)[-1] in found or "holds further keys" in found)

    def test_the_section_must_be_a_mapping(self, message: Message) -> None:
        assert "A.OBSERVER.MINE=0.5: allowed: a mapping of PART, MODE" in message({"A.OBSERVER.MINE": 0.5})

    def test_near_names(self, message: Message) -> None:
        told = message({"A.OBSERVER.MIEN": {"PART": 0.5}})
        assert "unknown key; allowed here: TYPE, LAYOUT, ACIQ, MINE, MOVING_AVERAGE, PERCENTILE" in told
        assert told.endswith("did you mean A.OBSERVER.MINE?")
        assert "did you mean A.OBSERVER.MINE?" in message({"A.MINE": {"PART": 0.5}})
        assert "did you mean A.OBSERVER.MINE.PART?" in message({"A.OBSERVER.PART": 0.5})

    def test_all_faults_at_once(self, message: Message) -> None:
        told = message({"A.OBSERVER.MINE": {"PART": 2, "MODE": "x"}, "W.QUANTIZER.BIT": 17, "W.OBSERVER.MINE.X": 1})
        assert told.startswith("4 faults")


def test_rules_of_the_options(message: Message) -> None:
    OBSERVERS.register("ordered", options=OrderedOptions)(Mine)
    assert "A.OBSERVER.ORDERED.ODD=2: allowed: a whole number; must be odd" in message({"A.OBSERVER.ORDERED.ODD": 2})
    told = message({"A.OBSERVER.ORDERED": {"LOW": 2.0}})
    assert told.startswith("A.OBSERVER.ORDERED={'LOW': 2.0}: ") and told.endswith("; LOW must be below HIGH")
    sound = {"A.OBSERVER.ORDERED.HIGH": 3.0, "A.SPECIFIC": [{"fc": ["OBSERVER.ORDERED.LOW", 2.0]}]}
    found = made(sound).resolve("A", "fc").OBSERVER.ORDERED
    assert found == OrderedOptions(LOW=2.0, HIGH=3.0)
    broken = message({"A.SPECIFIC": [{"fc": ["OBSERVER.ORDERED.LOW", 2.0]}]})
    assert broken.startswith("A.OBSERVER.ORDERED={'LOW': 2.0} at fc: ") and broken.endswith("; LOW must be below HIGH")
    with pytest.raises(ConfigError, match=r"^LOW must be below HIGH$"):
        OrderedOptions.from_dict({"LOW": 2.0})


def test_a_section_that_nobody_registered(message: Message) -> None:
    told = message({"A.OBSERVER.MINE.PART": 0.5})
    assert "unknown key; allowed here: TYPE, LAYOUT, ACIQ, MOVING_AVERAGE, PERCENTILE" in told
    OBSERVERS.register("mine")(Mine)  # without options
    assert "unknown key" in message({"A.OBSERVER.MINE.PART": 0.5})


def test_registered_after_a_config_was_read() -> None:
    before = made({"A.OBSERVER.TYPE": "minmax"})
    OBSERVERS.register("mine", options=MineOptions)(Mine)
    assert made({"A.OBSERVER.MINE.PART": 0.25}).A.OBSERVER.MINE.PART == 0.25
    assert not before.is_set("A.OBSERVER.MINE.PART")
    changed = before.replace("A.OBSERVER.TYPE", "mine", "A.OBSERVER.MINE.PART", 0.25)
    assert selected_options(changed.A.OBSERVER) == MineOptions(PART=0.25)
    assert before.resolve("A", "fc").OBSERVER.TYPE == "minmax"


def test_registered_again_after_a_config_was_read() -> None:
    OBSERVERS.register("mine", options=MineOptions)(Mine)
    read = made({"A.OBSERVER": {"TYPE": "mine", "MINE": {"PART": 0.25}}})

    class Again(Section):
        PART: float = 0.1
        MORE: int = 3

    OBSERVERS.register("mine", options=Again, replace=True)(Mine)
    assert selected_options(read.A.OBSERVER) == Again(PART=0.25)


def test_targets_of_classes_and_of_options() -> None:
    class AlsoForActivations(Section):
        TARGETS: ClassVar[tuple[str, ...]] = ("activation",)
        STEP: int = 1

    QUANTIZERS.register("weights", options=Inner)(ForWeights)
    QUANTIZERS.register("activations", options=Inner)(ForActivations)
    QUANTIZERS.register("both", options=AlsoForActivations)(Mine)
    keys = made({}).to_dict(defaults=True)
    assert {"WEIGHTS"} == set(keys["W"]["QUANTIZER"]) & {"WEIGHTS", "ACTIVATIONS", "BOTH"}
    assert {"ACTIVATIONS", "BOTH"} == set(keys["A"]["QUANTIZER"]) & {"WEIGHTS", "ACTIVATIONS", "BOTH"}
    assert selected_options(made({"W.QUANTIZER.TYPE": "both"}).W.QUANTIZER) == AlsoForActivations()


class NoDefault(Section):
    PART: float


class LowerCase(Section):
    part: float = 0.5


class Changeable(Section):
    ENDS: list[float] | None = None


class WrongDefault(Section):
    PART: float = Field(2.0, le=1)


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        (dict, "mine", "observer 'mine': options=dict: allowed: a subclass of Section"),
        (MineOptions(), "mine", "allowed: a subclass of Section"),
        (NoDefault, "mine", "PART needs a default"),
        (LowerCase, "mine", "part: keys are upper case, write PART"),
        (Changeable, "mine", "ENDS: options are constant, but a list can be changed; write tuple"),
        (WrongDefault, "mine", "the default PART=2.0: allowed: a number, at most 1"),
        (MineOptions, "layout", "LAYOUT is a key already; register it with another name"),
        (MineOptions, "my.observer", "no dots"),
        (MineOptions, "_mine", "starts with a letter"),
    ],
)
def test_unsuitable_options(options: type, name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(options, "observer", name, WeightObserver, ActivationObserver)
    assert expected in str(caught.value)
