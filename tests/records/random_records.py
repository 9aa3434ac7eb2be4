"""Random records: a hypothesis strategy for any type that a record is made of, read off its type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, Union

from hypothesis import strategies as st

from sparsebit.records.json_form import field_types
from sparsebit.records.run_record import RunRecord

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8), int: st.integers(), bool: st.booleans(), float: st.floats(allow_nan=False), Any: PLAIN,
}  # fmt: skip


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of the type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        fields = {field.name for field in dataclasses.fields(hint) if field.init}
        kinds = {name: values_of(kind) for name, kind in field_types(hint).items() if name in fields}
        return st.builds(hint, **kinds)
    if origin in (Union, types.UnionType):
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return st.none() | values_of(kind)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=4), values_of(arguments[1]), max_size=2)
    return st.sampled_from(arguments) if origin is Literal else SCALARS[hint]


RECORDS = values_of(RunRecord)
