from __future__ import annotations

from sparsebit.records.run_record import RunRecord
from sparsebit.report.read_record import run_of_record
from tests.report.made_runs import AUDIT, GRAPH, RECORD


def test_cards_before_and_after() -> None:
    cards = {card.label: card for card in run_of_record(RECORD, "net").cards}
    assert (cards["Time of a call"].value, cards["Time of a call"].before) == ("1 ms", "2 ms")
    assert cards["Size of the file"].share == 0.25 and cards["In integers"].value == "3 of 3"
    assert cards["Output SQNR"].value == "30.0 dB"


def test_without_a_file_the_weights_count() -> None:
    run = run_of_record(RECORD.replace(file=None, audits=(), parity=()), "net")
    cards = {card.label: card for card in run.cards}
    assert cards["Size of the weights"].value == "252 B" and cards["Quantized layers"].value == "3 of 4"
    assert "Time of a call" not in cards and run.kind == "quantized Net"


def test_a_file_of_unknown_origin() -> None:
    run = run_of_record(RunRecord(audits=(AUDIT,)), "net.onnx")
    assert run.kind == "ONNX file" and run.reason == "faster than float" and len(run.layers) == 4
    assert run.drawing is None  # the audit's layers have no edges here


def test_an_empty_record_is_an_empty_run() -> None:
    run = run_of_record(RunRecord(), "nothing")
    assert not run.cards and not run.layers and run.drawing is None


def test_the_graph_is_drawn_and_facts_are_tables() -> None:
    run = run_of_record(RECORD, "net")
    assert run.drawing is not None and len(run.drawing.x) == len(GRAPH)
    titles = {table.title: table for table in run.tables}
    assert titles["Parameters in float"].rows[0][0] == "stem.conv.bias"
    assert titles["Comparison of the file with its reference"].rows[0][3] == "exact"
    assert any("a CPU" in note for note in run.notes)
