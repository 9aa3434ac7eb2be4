"""The audit of a program: what its file says, and its time against a float program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparsebit.deploy.audit import program_file
from sparsebit.deploy.audit.audit_file import audit
from sparsebit.deploy.sessions.program_facts import ProgramFacts, ProgramSession
from sparsebit.errors import DeploymentError
from sparsebit.records.audit import LayerRun
from tests.deploy.sessions.test_program_facts import FACTS

np = pytest.importorskip("numpy")


class Session(ProgramSession):
    def run(self, feeds: Any) -> list[Any]:
        return self.checked(feeds)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(facts: ProgramFacts, name: str = "m.pte") -> Path:
        found[name] = facts
        (tmp_path / name).write_bytes(b"12345")
        return tmp_path / name

    found: dict[str, ProgramFacts] = {}
    monkeypatch.setattr(program_file, "open_session", lambda path, *_, **__: Session(found[path.name]))
    monkeypatch.setattr(program_file, "runtime_version", lambda _: "1.0")
    return make


def test_the_ending_chooses_the_runtime_and_the_layers_are_those_of_the_file(opened: Any) -> None:
    found = audit(opened(FACTS))
    assert found.runtime == "executorch" and found.layers == FACTS.layers and found.num_bytes == 5
    assert found.verdict.startswith("Nothing is quantized of 1 linear layer") and found.ratio is None
    assert any("88% of the operators are delegated, 1 run in portable kernels" in text for text in found.warnings)


def test_times_against_a_float_program(opened: Any) -> None:
    given = {"ids": np.ones(2)}
    found = audit(opened(FACTS), against=opened(FACTS, "float.pte"), feeds=given, repeats=3)
    assert set(found.latency) == {"float", "quantized"} and found.float_bytes == 5
    assert found.feeds == {"x": "random normal", "ids": "given"}


def test_a_float_program_of_other_inputs(opened: Any) -> None:
    other = opened(ProgramFacts("executorch", FACTS.inputs[:1], FACTS.outputs), "float.pte")
    with pytest.raises(DeploymentError, match=r"float.pte takes .*, .*m.pte takes"):
        audit(opened(FACTS), against=other)


def test_a_program_of_another_tool_has_no_layers(opened: Any) -> None:
    found = audit(opened(ProgramFacts("", FACTS.inputs, FACTS.outputs)))
    assert any("does not say how its layers run" in text for text in found.warnings)


def test_causes_are_named(opened: Any) -> None:
    layer = LayerRun("n", "native_layer_norm", "native_layer_norm", False, "float", "", "XNNPACK does not take it: x")
    found = audit(opened(ProgramFacts("executorch", FACTS.inputs, FACTS.outputs, (layer,), {}, 3, 1)))
    assert any("native_layer_norm: XNNPACK does not take it: x" in text for text in found.warnings)
