"""Facts in a program's file: back without loss, damage is an error; inputs are checked before a program runs."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebit.deploy.sessions.program_facts import Port, ProgramFacts, ProgramSession
from sparsebit.errors import DeploymentError
from sparsebit.records.audit import LayerRun

np = pytest.importorskip("numpy")
FACTS = ProgramFacts(
    "executorch",
    (Port("x", "float32", (None, 3)), Port("ids", "int64", (2,))),
    (Port("y", "float32", ()),),
    (LayerRun("fc", "linear", "linear layer", True, "float", "XNNPACK", "it is not quantized", shape=(0, 3)),),
    {"quantize": 2},
    7,
    1,
)


class Session(ProgramSession):
    def run(self, feeds: Any) -> list[Any]:
        return self.checked(feeds)


def feeds(**changes: Any) -> dict[str, Any]:
    return {"x": np.zeros((5, 3), np.float32), "ids": np.zeros(2, np.int64), **changes}


def test_round_trip() -> None:
    assert ProgramFacts.from_json(FACTS.to_json(), "m.pte") == FACTS


@pytest.mark.parametrize("text", ["", "{", "[]", '{"backend": 3}', FACTS.to_json().replace('"inputs"', '"in"')])
def test_damage(text: str) -> None:
    with pytest.raises(DeploymentError, match=r"m\.pte: .*damaged"):
        ProgramFacts.from_json(text, "m.pte")


def test_names_and_shapes() -> None:
    session = Session(FACTS)
    assert session.inputs == ("x", "ids") and session.outputs == ("y",)
    assert session.input_types == {"x": "float32", "ids": "int64"}
    assert session.input_shapes == {"x": (None, 3), "ids": (2,)} and session.output_shapes == {"y": ()}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"x": np.zeros((5, 4), np.float32)}, r"x is float32 \(5, 4\), and the program takes float32 \(None, 3\)"),
        ({"x": np.zeros((5, 3), np.float64)}, "x is float64"),
        ({"x": np.zeros((5, 3, 1), np.float32)}, r"x is float32 \(5, 3, 1\)"),
        ({"ids": np.zeros((), np.int64)}, r"ids is int64 \(\)"),
    ],
)
def test_wrong_inputs(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(DeploymentError, match=fault):
        Session(FACTS).run(feeds(**changes))


def test_a_missing_input() -> None:
    with pytest.raises(DeploymentError, match="takes x, ids; missing: ids"):
        Session(FACTS).run({"x": feeds()["x"]})


def test_rows_in_any_memory_order() -> None:
    x = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = Session(FACTS).run(feeds(x=x))[0]
    assert found.flags["C_CONTIGUOUS"] and np.array_equal(found, x)
