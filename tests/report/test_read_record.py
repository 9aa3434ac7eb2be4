from __future__ import annotations

from dataclasses import replace

from sparsebit.records.run_record import RunRecord
from sparsebit.records.scores import ModelScore, ScoreFacts
from sparsebit.report.read_record import run_of_record
from tests.report.made_runs import AUDIT, ERRORS, GRAPH, RECORD


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


def test_accuracy_is_the_first_number() -> None:
    scores = (ModelScore("float", 92.0), ModelScore("simulation", 91.5), ModelScore("file", 91.4, -0.6, 0.5))
    record = RECORD.replace(accuracy=ScoreFacts("top-1 accuracy", "%", scores, 1000, note="a note"))
    card = run_of_record(record, "net").cards[0]
    assert (card.label, card.value, card.before) == ("Top-1 accuracy", "91.40 %", "92.00 %")
    assert card.note == "of the file, -0.60 ± 0.50 points, on 1,000 samples, a note"
    own = ScoreFacts("mine:score", "", (ModelScore("float", 0.123456789),))
    assert run_of_record(RECORD.replace(accuracy=own), "net").cards[0].value == "0.12346"


def test_the_noise_of_weights_that_an_algorithm_changed_is_not_shown_as_that_of_the_model() -> None:
    changed = RECORD.replace(errors=(replace(ERRORS, changed_by=("gptq",)),))
    run = run_of_record(changed, "net")
    assert "Output SQNR" not in [card.label for card in run.cards]
    assert "errors are counted from the weights that algorithms have changed (gptq), not from float" in run.notes
