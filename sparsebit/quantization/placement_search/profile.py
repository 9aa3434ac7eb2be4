"""`PlacementProfile`: the result of a placement search as JSON: sites that stay float, the machine, times of choices.

A profile is valid for one model architecture and one backend (`check` raises otherwise); on another processor or
version of the runtime it is used with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Collection
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
from sparsebit.text_table import text_table

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

    @classmethod
    def measured(
        cls, qmodel: QuantModel, runtime: str, num_threads: int, out: Collection[str], *, is_float: bool, **rest: Any
    ) -> PlacementProfile:
        """The profile of a placement on this machine, without the sites in `out`; `rest`: its other fields."""
        return cls(
            backend=qmodel.config.BACKEND,
            runtime=runtime,
            runtime_version=runtime_version(runtime),
            cpu=cpu_name(),
            machine=platform.machine(),
            num_threads=num_threads,
            architecture=architecture_facts(qmodel.original).architecture,
            floats=tuple(name for name in qmodel.plan if name in out),
            is_float=is_float,
            **rest,
        )

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
        is_same_model = self.architecture == architecture_facts(qmodel.original).architecture
        if not is_same_model or self.backend != qmodel.config.BACKEND:
            raise ConfigError(
                f"the placement profile was measured with {'this' if is_same_model else 'another'} model and BACKEND: "
                f"{self.backend}, the config says {qmodel.config.BACKEND}; measure this one: placement='measured'"
            )
        here = {"cpu": cpu_name(), "machine": platform.machine()}
        with contextlib.suppress(ModuleNotFoundError):  # the base class of PackageNotFoundError
            here["runtime_version"] = runtime_version(self.runtime)
        return [
            f"{key.replace('runtime_version', self.runtime)} {getattr(self, key)}, here {value}"
            for key, value in here.items()
            if getattr(self, key) != value
        ]

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
        try:
            values: Any = json.loads(Path(file).read_text(encoding="utf-8"))
            kind, version = values.pop("format"), values.pop("version")
        except OSError:
            raise ConfigError(
                f"placement={str(file)!r}: no such file; allowed: 'default', 'measured', or the file of a profile"
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} is not a placement profile ({error}); --placement measured writes one") from None
        if (kind, version) != (FORMAT, VERSION):
            raise ConfigError(
                f"{file} has format {kind!r}, version {version!r}; allowed: {FORMAT!r}, {VERSION}; measure again"
            )
        return from_plain(cls, values, str(file))

    def __str__(self) -> str:
        rows = [("placement", "of float's time", "SQNR", "sites", "")]
        for one in self.choices:
            sqnr = "" if one.sqnr_db is None else f"{one.sqnr_db:.1f} dB"
            rows.append((one.name, f"{one.ratio:.3f}", sqnr, str(one.num_sites), one.verdict))
        return f"{text_table(rows)}\n{self.words}"

    def replace(self, **changes: Any) -> PlacementProfile:
        return dataclasses.replace(self, **changes)
