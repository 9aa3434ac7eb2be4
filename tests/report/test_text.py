from __future__ import annotations

import io

from rich.console import Console

from sparsebit.report.page_data import Layer, Run
from sparsebit.report.read_ladder import run_of_ladder
from sparsebit.report.read_record import run_of_record
from sparsebit.report.text import text_of
from tests.report.made_runs import LADDER, LANGUAGE_LADDER, RECORD, large_run


def printed(*runs: Run) -> str:
    file = io.StringIO()
    Console(file=file, width=160).print(text_of(runs))
    return file.getvalue()


def test_a_search() -> None:
    text = printed(run_of_ladder(LADDER, "run"))
    assert "run: search for onnxruntime, goal met" in text and LADDER.reason in text and LADDER.reproduce in text
    assert "0.30 ± 0.30" in text and "no kernel" in text


def test_the_worst_layers_come_first_and_empty_columns_are_left_out() -> None:
    text = printed(run_of_record(RECORD, "net"))
    assert text.index("block.conv2") < text.index("stem.conv") and "9.0 dB" in text and "MACs" not in text
    assert "... of 40 layers" in printed(large_run(40))


def test_markup_in_names_is_text() -> None:
    assert "[red]x[/red]" in printed(Run("[red]x[/red]", "model"))


def test_a_language_model() -> None:
    text = printed(run_of_ladder(LANGUAGE_LADDER, "llama"))
    assert "Perplexity" in text and "8.20" in text and "MACs" not in text and " time " not in text


def test_the_most_pruned_layers_come_first() -> None:
    layers = (Layer("a", kept=0.9), Layer("b", kept=0.25), Layer("c"))
    text = printed(Run("small", "pruned Net", layers=layers))
    assert text.index("b ") < text.index("a ") and "25 %" in text and "... of 3 layers" in text
