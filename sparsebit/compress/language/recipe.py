"""`LanguageRecipe`: how a candidate of a language model is made, as plain values; `LanguageStudy`: facts for rungs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparsebit.errors import RecordError
from sparsebit.llm.converting.targets import TARGETS, recipe_for
from sparsebit.llm.recipe import Recipe


@dataclass(frozen=True)
class LanguageRecipe:
    """`options`: fields of `sparsebit.llm.Recipe` that differ from the target's usual values."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe for `sparsebit.llm.quantize`; a ConfigError if the target does not store such numbers."""
        return recipe_for(self.target, **self.options)

    def replace(self, **options: Any) -> LanguageRecipe:
        """A copy with other options; None takes one away."""
        changed = {**self.options, **options}
        return LanguageRecipe(self.target, {key: value for key, value in changed.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.target, "options": _listed(self.options)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LanguageRecipe:
        """The inverse of `to_dict`."""
        try:
            options = {key: tuple(one) if isinstance(one, list) else one for key, one in values["options"].items()}
            return cls(values["target"], options)
        except (KeyError, AttributeError):
            raise RecordError("the recipe of a step is damaged; remove the folder of the run") from None

    @property
    def key(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)


def _listed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


_GROUPS = (128, 64, 32, 16)


@dataclass(frozen=True)
class LanguageStudy:
    """Facts that rungs may ask for. `float_bytes`: of the float folder; `columns`: the input widths of its layers."""

    float_bytes: int
    columns: frozenset[int]

    def recipe(self, values: dict[str, Any]) -> LanguageRecipe:
        return LanguageRecipe.from_dict(values)

    def groups(self, target: str) -> list[int]:
        """The sizes of groups, from 16 to 128, that the target stores and that divide the rows, the largest first."""
        stored = TARGETS[target].groups or _GROUPS
        return [size for size in _GROUPS if size in stored and not any(count % size for count in self.columns)]
