from __future__ import annotations

from sparsebit.report.notebook import fragment
from sparsebit.report.read_ladder import run_of_ladder
from tests.report.made_runs import HOSTILE, LADDER


def test_numbers_and_ladder_without_a_script() -> None:
    text = fragment(run_of_ladder(LADDER, HOSTILE))
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "91.70 %" in text and "92.00 % before" in text and "goal met" in text
    assert text.count("<tr>") == 1 + len(LADDER.steps) and "★" in text and "0.30 ± 0.30" in text
