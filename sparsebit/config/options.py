"""Sections of options: each class that was registered with options adds a section next to `TYPE`.

Observers and quantizers can be registered at any time, but a pydantic model has fixed fields. So `WithOptions` makes a
subclass with the current options as fields (`complete`), once for each set of registered classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Self, get_args, get_origin

from pydantic import Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from sparsebit.config.config_errors import all_faults
from sparsebit.config.section import Section
from sparsebit.config.targets import is_for
from sparsebit.errors import ConfigError
from sparsebit.registry import Registry


class WithOptions(Section):
    """A section with a `TYPE` from a registry, and with a section of options for each class registered with some.

    They are looked up when a config is read, so that classes can be registered at any time. The sections are fields of
    a subclass (`complete`), which is created once for each set of them.
    """

    # These names are lower case, so that they cannot collide with sections of options.
    registry: ClassVar[Registry[object]]
    target: ClassVar[str] = ""
    is_complete: ClassVar[bool] = False
    TYPE: str

    def __new__(cls, **values: Any) -> Self:
        return super().__new__(cls.complete())

    @classmethod
    def complete(cls) -> type[Self]:
        """This section with the options of all currently registered classes."""
        return cls if cls.is_complete else _completed(cls, tuple(_registered(cls)))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source) if cls.is_complete else core_schema.no_info_plain_validator_function(cls._checked)

    @classmethod
    def _checked(cls, value: object) -> Self:
        model = cls.complete()
        if isinstance(value, cls) and type(value) is not model:  # of an earlier set of registered classes
            value = value.to_dict()
        return model.model_validate(value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its values: the class with the options cannot be imported by name."""
        declared = next(kind for kind in type(self).__mro__ if not getattr(kind, "is_complete", False))
        return declared.model_validate, (self.model_dump(exclude_unset=True),)  # type: ignore[attr-defined]


def selected_options(section: WithOptions) -> Section:
    """The config's options for the class that `TYPE` names; an empty section if it takes none."""
    name, options = section.registry.options_of(section.TYPE)
    if options is None:
        return Section()
    found: Section = getattr(section, name.upper(), options())  # the config has no options of another target
    if not isinstance(found, options):  # the name was registered again after the config was read
        found = options.from_dict(found.to_dict())
    return found


def check_options(options: type[Any], kind: str, name: str, *sections: type[WithOptions]) -> None:
    """Raise for a class of options that cannot be a section of configs; `sections`: where it will be a key."""
    if faults := list(_unsuitable(options, name, {key for section in sections for key in section.model_fields})):
        shown = getattr(options, "__name__", repr(options))
        raise ConfigError(f"{kind} {name!r}: options={shown}: {'; '.join(faults)}")


def _unsuitable(options: type[Any], name: str, taken: set[str]) -> Iterator[str]:
    if not (isinstance(options, type) and issubclass(options, Section)):
        yield "allowed: a subclass of Section (from sparsebit.quantization import Section)"
        return
    if name.upper() in taken:
        yield f"{name.upper()} is a key already; register it with another name"
    if "." in name or name.startswith("_"):
        yield "a name with options is a key of configs, which has no dots and starts with a letter"
    for key, field in options.model_fields.items():
        if key != key.upper():
            yield f"{key}: keys are upper case, write {key.upper()}"
        if field.is_required():
            yield f"{key} needs a default: configs that select another TYPE do not write it"
        if changeable := _changeable(field.annotation):
            yield f"{key}: options are constant, but a {changeable} can be changed; write tuple[...]"
    if not any(field.is_required() for field in options.model_fields.values()):
        values = options().model_dump()
        yield from (f"the default {fault}" for fault in all_faults(values, options))


def _changeable(annotation: Any) -> str:
    """`list`, `dict` or `set`, if a type has one of them in it."""
    found = get_origin(annotation) or annotation
    if found in (list, dict, set):
        return str(found.__name__)
    return next(filter(None, map(_changeable, get_args(annotation))), "")


Named = tuple[str, type[Section]]


def _registered(section: type[WithOptions]) -> Iterator[Named]:
    """The options that are keys of a section: those of classes for its target, if they are for it themselves."""
    for name, options in section.registry.own_options().items():
        if is_for(section.registry.get(name), section.target) and is_for(options, section.target):
            yield name, options


@cache
def _completed(section: type[WithOptions], registered: tuple[Named, ...]) -> Any:
    kind = section.registry.kind
    fields: dict[str, Any] = {
        name.upper(): (options, Field(default_factory=options, description=f"Options of the {kind} `{name}`."))
        for name, options in registered
    }
    model: Any = create_model(section.__name__, __base__=section, __module__=section.__module__, **fields)
    model.is_complete = True
    return model
