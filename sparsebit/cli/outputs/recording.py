"""`--record FILE`: a verb adds its findings to the record of the model, which several verbs may extend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebit.cli.option_groups import OutputOptions, SpeakingOptions
from sparsebit.cli.outputs.output import Output, speaking
from sparsebit.records import Measured, RunRecord, extend_record, measured, read_record
from sparsebit.records.files import checked_record_path
from sparsebit.records.merging import check_same_architecture, merged

if TYPE_CHECKING:
    from torch import nn

    from sparsebit.quantization import QuantModel


class Recording:
    """One verb's part in a record; without a file, nothing is written."""

    def __init__(self, path: Path | None, run: Measured, out: Output) -> None:
        self.path, self.run, self._out = path, run, out
        self._old = read_record(path) if path is not None and checked_record_path(path).exists() else RunRecord()

    def __bool__(self) -> bool:
        return self.path is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The messages so far."""
        return tuple(self._out.warnings)

    def remark(self, text: str) -> None:
        self._out.remark(text)

    def expect(self, model: nn.Module, name: str) -> None:
        """Raise, before any long work, if the record is of another model."""
        if self.path is not None:
            from sparsebit.quantization.recording import architecture_facts

            check_same_architecture(self._old, RunRecord(model=architecture_facts(model, name)), str(self.path))

    def expect_numbers(self, qmodel: QuantModel, name: str) -> None:
        """Raise, before any long work, if the record is of the same model with other numbers."""
        if self.path is not None:
            from sparsebit.quantization.recording import model_facts

            merged(self._old, RunRecord(model=model_facts(qmodel, name)), str(self.path))

    def expect_file(self, file: Path) -> None:
        """Raise, before any long work, if the record is of another file."""
        if self.path is not None:
            from sparsebit.deploy.onnx_graph.model_file import file_facts

            merged(self._old, RunRecord(file=file_facts(file)), str(self.path))

    def write(self, record: RunRecord) -> None:
        """Add to the file; a warning names earlier parts that no longer fit."""
        if self.path is not None:
            _, dropped = extend_record(self.path, record)
            if dropped:
                self._out.warn(
                    f"{self.path}: {', '.join(dropped)} described an earlier model or file, and were removed"
                )

    def values(self) -> dict[str, Any]:
        """The record's values for `--json`."""
        return {} if self.path is None else {"record": str(self.path)}


@contextlib.contextmanager
def working(said: SpeakingOptions, verb: str) -> Iterator[tuple[Output, Recording]]:
    """Run and time a verb's work. A record that cannot be extended raises before the work."""
    with speaking(as_json=said.json, quiet=said.quiet) as out, measured(verb) as run:
        yield out, Recording(said.record if isinstance(said, OutputOptions) else None, run, out)
