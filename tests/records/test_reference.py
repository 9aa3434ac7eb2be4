"""The page that describes every field."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any, Union

from sparsebit.records import RunRecord
from sparsebit.records.json_form import field_types


def fields_in(hint: Any) -> set[str]:
    """The names of all fields of a type, and of the types in it."""
    if dataclasses.is_dataclass(hint):
        kinds = field_types(hint)
        return set(kinds).union(*map(fields_in, kinds.values()))
    if typing.get_origin(hint) in (tuple, dict, Union, types.UnionType):
        return set().union(*map(fields_in, typing.get_args(hint)))
    return set()


def test_page_names_every_field(project_root: Path) -> None:
    page = (project_root / "docs" / "reference" / "record.md").read_text(encoding="utf-8")
    named = {part for text in re.findall(r"`([^`\n]+)`", page) for part in re.split(r"\W+", text)}
    assert fields_in(RunRecord) - named == set()
