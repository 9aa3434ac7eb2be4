"""Registries: names in any case, replacement, and the options that classes are registered with."""

from __future__ import annotations

import pytest

from sparsebit.errors import ConfigError
from sparsebit.registry import Registry


class First: ...


class Extended(First): ...


class Other: ...


class Options: ...


class MoreOptions: ...


@pytest.fixture
def registry() -> Registry[type]:
    return Registry("thing")


def test_names_in_any_case(registry: Registry[type]) -> None:
    registry.register("First", aliases=("1st",))(First)
    assert registry.get("FIRST") is registry.get("1ST") is First
    with pytest.raises(ConfigError, match="unknown thing 'frist'; allowed: first; did you mean 'first'"):
        registry.get("frist")


def test_a_name_is_taken_once(registry: Registry[type]) -> None:
    registry.register("first")(First)
    registry.register("first")(First)  # the same again changes nothing
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("FIRST")(Other)
    registry.register("first", replace=True)(Other)
    assert registry.get("first") is Other


def test_what_replaces_an_alias_is_found(registry: Registry[type]) -> None:
    registry.register("first", aliases=("one",))(First)
    registry.register("one", replace=True)(Other)
    assert (registry.get("one"), registry.get("first")) == (Other, First)


def test_options(registry: Registry[type]) -> None:
    registry.register("first", options=Options)(First)
    registry.register("other")(Other)
    assert registry.options_of("FIRST") == ("first", Options)
    assert registry.options_of("other") == ("other", None)
    assert registry.own_options() == {"first": Options}


def test_an_extended_class_has_the_options_of_its_base(registry: Registry[type]) -> None:
    registry.register("first", options=Options)(First)
    registry.register("extended")(Extended)
    assert registry.options_of("extended") == ("first", Options)
    registry.register("extended", options=MoreOptions)(Extended)
    assert registry.options_of("extended") == ("extended", MoreOptions)


@pytest.mark.parametrize(
    ("replacement", "options", "expected"),
    [(Other, None, None), (Extended, None, Options), (Extended, MoreOptions, MoreOptions), (Other, Options, Options)],
    ids=["another_class", "extended", "extended_with_options", "another_class_with_options"],
)
def test_options_of_a_replacement(
    registry: Registry[type], replacement: type, options: type | None, expected: type | None
) -> None:
    registry.register("first", options=Options)(First)
    registry.register("first", replace=True, options=options)(replacement)
    assert registry.options_of("first") == ("first", expected)
