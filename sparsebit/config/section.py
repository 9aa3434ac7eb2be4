"""`Section`: the base of every config model: strict, frozen, and aware of the keys that the user wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from sparsebit.config.config_errors import all_faults, error, given, unknown_key
from sparsebit.config.fields import Names, field_at
from sparsebit.config.reading import read
from sparsebit.errors import ConfigError

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """A group of upper-case keys of a config, frozen: `replace` returns a changed, checked copy."""

    # defer_build: the validators are built when a config is read, not when the package is imported.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def from_dict(cls: type[S], values: Mapping[str, Any]) -> S:
        """The checked section; one ConfigError names everything that is wrong in `values`."""
        document = read(values)
        try:
            return cls.model_validate(dict(document))
        except ValidationError:
            raise error(all_faults(document, cls), document) from None

    @field_validator("*", mode="before")
    @classmethod
    def _constant(cls, value: object, info: ValidationInfo) -> object:
        """Convert lists, which YAML has, to tuples, which a frozen section needs."""
        if not isinstance(value, list):
            return value
        return _as_tuple(value) if _holds_tuple(cls.model_fields[info.field_name or ""].annotation) else value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ConfigError(f"{name}{given(value)}: a config is frozen; `replace` returns a changed and checked copy")

    def is_set(self, key: str) -> bool:
        """Whether the user wrote this key (`"A.QADD.ENABLE_QUANT"`), as opposed to a default."""
        section: Any = self
        for name in self._existing(key):
            if name not in section.model_fields_set:
                return False
            section = getattr(section, name)
        return True

    def replace(self: S, key: str, value: object, *more: object) -> S:
        """A copy in which `key` (`"W.QUANTIZER.BIT"`) has `value`, checked as a whole; further pairs may follow."""
        pairs = (key, value, *more)
        if len(pairs) % 2:
            raise TypeError("replace takes pairs: key, value, key, value, ...")
        values = self.to_dict()
        for name, new in zip(pairs[::2], pairs[1::2], strict=True):
            put(values, self._existing(str(name)), new)
        return type(self).from_dict(values)

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Plain values that `from_dict` turns back into this section: the keys that the user wrote, or all of them."""
        return self.model_dump(mode="json", exclude_unset=not defaults)

    def to_yaml(self, *, defaults: bool = False) -> str:
        """`to_dict` as the text of a config file."""
        return yaml.safe_dump(self.to_dict(defaults=defaults), sort_keys=False, allow_unicode=True)

    def _existing(self, key: str) -> Names:
        path = tuple(key.split("."))
        if field_at(type(self), path) is None:
            raise error([unknown_key(type(self), path)])
        return path


def _holds_tuple(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(map(_holds_tuple, get_args(annotation)))


def _as_tuple(value: object) -> object:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def put(values: dict[str, Any], path: Names, value: object) -> None:
    """Set one key of nested plain values, creating missing sections."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value
