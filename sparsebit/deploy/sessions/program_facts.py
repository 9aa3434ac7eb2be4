"""`ProgramFacts`: what a compiled program does not keep by itself, stored in its file as JSON by the writer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sparsebit.deploy.onnx_graph.packages import numpy
from sparsebit.deploy.sessions.session import Session
from sparsebit.errors import DeploymentError, RecordError
from sparsebit.records.audit import LayerRun
from sparsebit.records.json_form import from_plain, to_plain

# The name under which a file keeps them: a constant method, a metadata key.
KEY = "sparsebit"


@dataclass(frozen=True)
class Port:
    """An input or output. `dtype`: numpy's name; `shape`: None for a free size."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class ProgramFacts:
    """`layers`, `leftovers`: how the compiler assigned them, as in `Audit`. `num_inside`, `num_outside`: operators in
    the runtime's accelerated part, and outside of it; both 0 if there is no such part.
    """

    backend: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    layers: tuple[LayerRun, ...] = ()
    leftovers: dict[str, int] = field(default_factory=dict)
    num_inside: int = 0
    num_outside: int = 0

    def to_json(self) -> str:
        return json.dumps(to_plain(self, ProgramFacts))

    @classmethod
    def from_json(cls, text: str, file: str) -> ProgramFacts:
        """The facts of a file; a DeploymentError if they are not what `to_json` writes."""
        try:
            return from_plain(cls, json.loads(text), file)
        except (RecordError, ValueError, TypeError) as error:
            raise DeploymentError(
                f"{file}: the facts that sparsebit stores in a program are damaged: {error}"
            ) from None


class ProgramSession(Session):
    """A session of a program; `facts` are those of its file."""

    def __init__(self, facts: ProgramFacts) -> None:
        self.facts = facts
        self.inputs, self.outputs = (tuple(port.name for port in ports) for ports in (facts.inputs, facts.outputs))
        self.input_types = {port.name: port.dtype for port in facts.inputs}
        self.input_shapes, self.output_shapes = (
            {port.name: port.shape for port in ports} for ports in (facts.inputs, facts.outputs)
        )

    def checked(self, feeds: Any) -> list[Any]:
        """The arrays in the file's order, contiguous; a DeploymentError for a wrong name, shape or type.

        Compiled programs do not check these themselves: some compute something else.
        """
        if missing := [name for name in self.inputs if name not in feeds]:
            raise DeploymentError(f"the program takes {', '.join(self.inputs)}; missing: {', '.join(missing)}")
        for port in self.facts.inputs:
            found, kind = tuple(feeds[port.name].shape), str(feeds[port.name].dtype)
            is_fit = len(found) == len(port.shape) and all(
                a in (None, b) for a, b in zip(port.shape, found, strict=True)
            )
            if not is_fit or kind != port.dtype:
                raise DeploymentError(
                    f"{port.name} is {kind} {found}, and the program takes {port.dtype} {port.shape} (None: any size)"
                )
        return [numpy.ascontiguousarray(feeds[name]) for name in self.inputs]
