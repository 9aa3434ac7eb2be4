from __future__ import annotations

import threading

import pytest

from sparsebit.records import Calibration, measured
from sparsebit.records.phases import note_calibration, phase
from tests.records.examples import ENVIRONMENT


@phase("decorated")
def work() -> int:
    return 7


def test_nobody_measures() -> None:
    with phase("alone"):
        assert work() == 7


def test_phases_add_up_to_no_more_than_the_run() -> None:
    with measured("verb") as run:
        with phase("outer"), phase("inner"):
            work()
        work()
    assert list(run.phases) == ["decorated", "inner", "outer"]
    assert 0 <= sum(run.phases.values()) <= run.seconds == run.seconds
    kept = run.run(ENVIRONMENT, ("model",), ("a warning",))
    assert kept.phases == run.phases and kept.started.endswith("+00:00") and kept.warnings == ("a warning",)


def test_a_phase_that_fails_counts_and_the_next_run_starts_anew() -> None:
    with measured("verb") as run, pytest.raises(ZeroDivisionError), phase("broken"):
        _ = 1 / 0
    with measured("next") as other:
        pass
    assert list(run.phases) == ["broken"] and not other.phases


def test_threads_do_not_see_each_other() -> None:
    with measured("verb") as run:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not run.phases


def test_what_the_block_made() -> None:
    note_calibration(4, asym=False)  # nobody measures
    with measured("look") as run, phase("check"):
        pass
    assert run.calibration is None and run.made == ()
    with measured("make") as run, phase("export"):
        note_calibration(32, asym=True)
    assert run.calibration == Calibration(32, True) and run.made == ("model", "file")
