"""`RunRecord`: all facts of one quantized model, in one versioned JSON file.

Each verb fills its own sections; unfilled ones are absent. `runs` lists which verb filled which sections, when, how
long it took and on which machine. The sections are the dataclasses of this folder, written and read by their type hints
(`json_form.py`), so every change of a field changes the file: see `VERSION`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from sparsebit.errors import RecordError
from sparsebit.records.audit import Audit
from sparsebit.records.coverage import Coverage
from sparsebit.records.error_profile import ErrorProfile
from sparsebit.records.json_form import field_types, filled, to_plain
from sparsebit.records.layer_graph import GraphLayer
from sparsebit.records.parity import ParityCheck
from sparsebit.records.scores import ScoreFacts

FORMAT = "sparsebit-record"
# Increased with every change after which an older reader would reject a new file or misread it: a field that is added,
# removed, renamed or gets another meaning. Files of every older version stay readable.
VERSION = 2
# A list of numbers, each on a separate line. Texts contain no line breaks in JSON, so nothing else has this form.
_NUMBERS = re.compile(r"\[\n\s*(-?[\d.eE+-]+(?:,\n\s*-?[\d.eE+-]+)*)\n\s*\]")


@dataclass(frozen=True)
class ModelFacts:
    """The model that a record is about.

    `architecture`: a checksum of the float model's class name and of the names, shapes and types of its tensors.
    `numbers`: a checksum of the config and of all weights, scales and zero points: two models with the same one compute
    the same. `name`: the user's name for it.
    """

    name: str
    module_type: str
    num_parameters: int
    architecture: str
    numbers: str


@dataclass(frozen=True)
class CalibrationFacts:
    """The calibration data. `data`: a description; None if only weights were quantized, without data."""

    num_samples: int
    asym: bool = False
    data: str | None = None


@dataclass(frozen=True)
class OutputError:
    """The quantized model's outputs against those of the float model, in torch: SQNR over all of them."""

    sqnr_db: float
    num_samples: int


@dataclass(frozen=True)
class FileFacts:
    """An ONNX file. `sha256`, `num_bytes`: of the file and its data files together.

    `float_bytes`: the model's weights in float, if the model is known. `advice`: TensorRT's rules that the file
    breaks and that only cost speed; None if they were not checked.
    """

    path: str
    sha256: str
    num_bytes: int
    float_bytes: int | None = None
    advice: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Environment:
    """Versions and machine. `packages`: the installed runtimes. `gpu`: None if none was used."""

    sparsebit: str
    python: str
    torch: str
    packages: dict[str, str]
    system: str
    cpu: str
    num_cpus: int
    gpu: str | None = None


@dataclass(frozen=True)
class Run:
    """One verb that filled a part of the record.

    `started`: UTC, ISO 8601. `seconds`: wall clock, in total. `phases`: its measured parts; if one
    runs inside another, its time counts for the inner one only. `made`: what the run created, as opposed to read.
    """

    verb: str
    started: str
    seconds: float
    phases: dict[str, float]
    sections: tuple[str, ...]
    environment: Environment
    made: tuple[Literal["model", "file"], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """One quantized model: its identity, origin, losses and speed. A section is None or empty until a verb fills it.

    `plan`: every site with its number format, and what is float and why: `Plan.to_dict` without the config, which has a
    separate section. `graph`: all layers and what each reads. `coverage`: the result after calibration, and every
    parameter. `accuracy`: of the float model, the simulation and the file. `errors`: one profile for `sync` and one
    without. `parity`: one comparison for each runtime and reference. `audits`: one for each runtime and number of
    threads. The last two are of `file`.
    """

    model: ModelFacts | None = None
    config: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    graph: tuple[GraphLayer, ...] = ()
    coverage: Coverage | None = None
    calibration: CalibrationFacts | None = None
    output: OutputError | None = None
    accuracy: ScoreFacts | None = None
    errors: tuple[ErrorProfile, ...] = ()
    file: FileFacts | None = None
    parity: tuple[ParityCheck, ...] = ()
    audits: tuple[Audit, ...] = ()
    runs: tuple[Run, ...] = ()
    version: int = field(default=VERSION, init=False)

    @property
    def sections(self) -> tuple[str, ...]:
        """The names of the parts that are filled, without `runs`."""
        names = [name for name in field_types(RunRecord) if name not in ("runs", "version")]
        return tuple(name for name in names if getattr(self, name) not in (None, ()))

    def replace(self, **changes: Any) -> RunRecord:
        """A copy with other sections."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: `format` and `version`, then the sections that are filled."""
        values = to_plain(self, RunRecord)
        filled = {name: values[name] for name in (*self.sections, *(["runs"] if self.runs else []))}
        return {"format": FORMAT, "version": self.version, **filled}

    def to_json(self) -> str:
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        return _NUMBERS.sub(lambda found: f"[{', '.join(part.strip() for part in found[1].split(','))}]", text) + "\n"

    @classmethod
    def from_dict(cls, values: Any, source: str = "record") -> RunRecord:
        """The inverse of `to_dict`; a RecordError for anything else. `source`: its name in messages."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise RecordError(f"{source} is not a Sparsebit record; use a file that --record or write_record() wrote")
        version = values.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise RecordError(f"{source} is damaged: version {version!r}; it is a whole number from 1 to {VERSION}")
        if version > VERSION:
            known = f"this one reads versions up to {VERSION}: update Sparsebit, or use another file"
            raise RecordError(f"{source} has version {version}, of a newer Sparsebit; {known}")
        return filled(cls, values, "record", source)

    @classmethod
    def from_json(cls, text: str, source: str = "record") -> RunRecord:
        """The inverse of `to_json`; a RecordError for anything else."""
        try:
            values = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{source} is damaged: {str(error) or 'nested too deeply'}") from None
        return cls.from_dict(values, source)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"duplicate key in one object ({', '.join(sorted(key for key, _ in pairs))[:80]})")
    return values
