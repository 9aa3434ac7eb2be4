from __future__ import annotations

import math
from dataclasses import replace

from sparsebit.records.run_record import RunRecord
from sparsebit.report.page_data import EXACT_DB, Layer
from sparsebit.report.record_layers import layers_of
from tests.report.made_runs import AUDIT, COVERAGE, ERRORS, GRAPH, HOSTILE, RECORD, layer_run


def found(record: RunRecord) -> dict[str, Layer]:
    audit = record.audits[0] if record.audits else None
    return {layer.name: layer for layer in layers_of(record, audit)}


def test_sections_are_joined_by_layer() -> None:
    layers = found(RECORD)
    assert list(layers) == [layer.name for layer in GRAPH]
    stem = layers["stem.conv"]
    assert (stem.op, stem.arithmetic, stem.kernel, stem.ms, stem.macs) == ("conv", "integer", "QLinearConv", 0.5, 1000)
    assert stem.sqnr_db == 38.0 and stem.bits == 8 and (stem.bytes, stem.float_bytes) == (252, 896)
    assert [tensor.role for tensor in stem.tensors] == ["input", "weight"] and stem.shape == "1 x 8 x 4 x 4"
    assert "sets the only scale" in stem.causes[0].text
    assert layers["block.conv2"].bits == 4 and layers["block.add"].inputs == (1, 3)


def test_a_node_of_the_file_with_another_name_is_joined_if_it_is_the_only_one_of_its_op() -> None:
    add = found(RECORD)["block.add"]
    assert add.arithmetic == "float" and add.remedy == "share their scales"


def test_nodes_that_cannot_be_told_apart_stay_separate() -> None:
    twice = replace(AUDIT, layers=(*AUDIT.layers, layer_run("add_9", "Add")))
    names = set(found(RECORD.replace(audits=(twice,))))
    assert {"add_7", "add_9", "block.add"} <= names


def test_float_layers_have_their_reason() -> None:
    last = found(RECORD)[HOSTILE]
    assert last.arithmetic == "float" and last.why_float == f"the config says {HOSTILE}"


def test_absorbed_layers_are_not_float() -> None:
    coverage = replace(COVERAGE, float_layers=())
    graph_only = found(RunRecord(graph=GRAPH, coverage=coverage))
    assert graph_only["stem.relu"].arithmetic == "integer" and not graph_only["stem.relu"].why_float


def test_an_audit_alone_has_its_own_edges() -> None:
    nodes = (layer_run("a", weight_bits=8), layer_run("b", inputs=("a", "unknown")))
    layers = found(RunRecord(audits=(replace(AUDIT, layers=nodes),)))
    assert layers["b"].inputs == (0,) and layers["a"].bits == 8


def test_errors_of_layers_alone_count_before_those_together() -> None:
    together = replace(ERRORS, sync=True, layers=(replace(ERRORS.layers[0], sqnr_db=1.0),), sites=())
    for order in ((ERRORS, together), (together, ERRORS)):
        assert found(RECORD.replace(errors=order))["block.conv2"].sqnr_db == 9.0


def test_weights_that_an_algorithm_put_on_the_grid_are_not_called_exact() -> None:
    exact = replace(ERRORS.layers[0], sqnr_db=math.inf)
    changed = replace(ERRORS, layers=(exact, *ERRORS.layers[1:]), changed_by=("gptq",))
    layers = found(RECORD.replace(errors=(changed,)))
    assert layers["block.conv2"].sqnr_db is None and layers["block.conv1"].sqnr_db == 24.0
    sqnrs = {tensor.role: tensor.sqnr_db for tensor in layers["stem.conv"].tensors}
    assert sqnrs == {"input": 45.0, "weight": None}
    kept = found(RECORD.replace(errors=(replace(changed, changed_by=()),)))
    assert kept["block.conv2"].sqnr_db == EXACT_DB
