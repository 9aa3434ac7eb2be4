from __future__ import annotations

import numpy
import pytest

from sparsebit.deploy.onnx_graph.qdq_graph import Graph
from tests.differential.judges import available
from tests.differential.rules import UNFIT, unfit_for
from tests.differential.their_faults import FAULTS, feeds_of


@pytest.mark.filterwarnings("ignore")  # numpy's, in the reference evaluator
@pytest.mark.parametrize("name", FAULTS)
def test_the_runtime_still_computes_something_else(name: str) -> None:
    judge, build = FAULTS[name]
    judges = available()
    if judge not in judges:
        pytest.skip(f"{judge} is not installed")
    model = build()
    feeds = feeds_of(model)
    (right,), (found,) = (list(judges[one](model, feeds).values()) for one in ("onnxruntime plain", judge))
    is_same = right.shape == found.shape and numpy.allclose(right, found, atol=0.04)
    assert not is_same, "it is right now: remove its row in rules.py, and the rewrite in deploy/layouts"


def test_each_pattern_is_that_of_its_file() -> None:
    rows = [unfit_for(judge, Graph(build())) for judge, build in FAULTS.values() if judge == "openvino"]
    assert [row in UNFIT for row in rows] == [True] * len(UNFIT) and len(set(map(id, rows))) == len(UNFIT)
