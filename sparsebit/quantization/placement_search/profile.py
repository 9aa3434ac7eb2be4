"""`PlacementProfile`: which sites a measurement left out, where it was made, and the gain of each choice; JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsebit.deploy.sessions.cpu import cpu_name
from sparsebit.deploy.sessions.runtime_sessions import runtime_version
from sparsebit.errors import ConfigError
from sparsebit.folders import replace_text
from sparsebit.quantization.model.quant_model import QuantModel
from sparsebit.quantization.planning.sites import Plan
from sparsebit.quantization.recording import architecture_facts
from sparsebit.records.json_form import from_plain, to_plain

FORMAT, VERSION = "sparsebit-placement", 1


@dataclass(frozen=True)
class Choice:
    """One placement that was tried.

    `ratio`: its time over that of the float file. `sqnr_db`: of the outputs against float, if it was measured.
    `verdict`: `chosen`, `slower`, `less exact`, …
    """

    name: str
    ratio: float
    sqnr_db: float | None = None
    num_sites: int = 0
    verdict: str = ""


@dataclass(frozen=True)
class PlacementProfile:
    """The sites that stay float on machines of one kind, for one model and one runtime.

    `architecture`, `shapes`: of the model and of its inputs. `noise`: of the timing, relative. `ratio`,
    `default_ratio`: the time of the chosen and of the default placement over that of the float file.
    """

    backend: str
    runtime: str
    runtime_version: str
    cpu: str
    machine: str
    num_threads: int
    architecture: str
    shapes: tuple[tuple[int, ...], ...]
    floats: tuple[str, ...]
    is_float: bool
    ratio: float
    default_ratio: float
    noise: float
    seconds: float
    choices: tuple[Choice, ...] = ()

    @property
    def words(self) -> str:
        """The result in a sentence."""
        if self.is_float:
            return (
                f"float altogether: no placement is faster here (the default one takes {self.default_ratio:.2f} of "
                "float's time)"
            )
        return f"{self.ratio:.2f} of float's time; the default placement: {self.default_ratio:.2f}"

    def plan_of(self, plan: Plan) -> Plan:
        """The plan without the sites that stay float; a site that the plan lacks is an error."""
        unknown = [name for name in self.floats if name not in plan]
        if unknown:
            raise ConfigError(
                f"the placement profile keeps {unknown[0]!r} in float, and the model has no such site: its config or "
                "its capture differ from those that were measured; measure again (placement='measured')"
            )
        return plan.replace(dict.fromkeys(plan if self.is_float else self.floats))

    def check(self, qmodel: QuantModel) -> list[str]:
        """Raise for a profile of another model or backend; returns other differences, for warnings."""
        if self.backend != qmodel.config.BACKEND:
            raise ConfigError(
                f"the placement profile is for BACKEND: {self.backend}, the config says {qmodel.config.BACKEND}"
            )
        if self.architecture != architecture_facts(qmodel.original).architecture:
            raise ConfigError(
                "the placement profile was measured with another model (other layers or other sizes); measure this "
                "one: placement='measured'"
            )
        here = {"cpu": cpu_name(), "machine": platform.machine()}
        differs = [f"{key} {getattr(self, key)}, here {value}" for key, value in here.items()]
        told = [words for words, (key, value) in zip(differs, here.items(), strict=True) if getattr(self, key) != value]
        if (version := _version_or_none(self.runtime)) not in (None, self.runtime_version):
            told.append(f"{self.runtime} {self.runtime_version}, here {version}")
        return told

    def to_json(self) -> str:
        values = {"format": FORMAT, "version": VERSION, **to_plain(self, PlacementProfile)}
        return json.dumps(values, indent=1) + "\n"

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write it as JSON, for `placement="file.json"`."""
        path = Path(file)
        replace_text(path, self.to_json())
        return path

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> PlacementProfile:
        """The profile from a file of `save`."""
        path = Path(file)
        if not path.is_file():
            raise ConfigError(
                f"placement={str(file)!r}: no such file; allowed: 'default', 'measured', or the file of a profile"
            )
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} is not a placement profile: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ConfigError(f"{file} is not a placement profile; --placement measured writes one")
        if values.get("version") != VERSION:
            raise ConfigError(
                f"{file} has version {values.get('version')!r}, this Sparsebit reads {VERSION}; measure again"
            )
        given = {key: value for key, value in values.items() if key not in ("format", "version")}
        return from_plain(cls, given, str(file))

    def __str__(self) -> str:
        rows = [("placement", "of float's time", "SQNR", "sites", "")]
        for one in self.choices:
            sqnr = "" if one.sqnr_db is None else f"{one.sqnr_db:.1f} dB"
            rows.append((one.name, f"{one.ratio:.3f}", sqnr, str(one.num_sites), one.verdict))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.words])

    def replace(self, **changes: Any) -> PlacementProfile:
        return dataclasses.replace(self, **changes)


def _version_or_none(runtime: str) -> str | None:
    try:
        return runtime_version(runtime)
    except ModuleNotFoundError:  # the base class of PackageNotFoundError
        return None
