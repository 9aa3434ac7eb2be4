from __future__ import annotations

import os
import signal
import threading

import pytest

from sparsebit.interrupts import ignored_interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_interrupts_do_nothing_inside(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    with ignored_interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is handler


def test_another_thread_has_no_signals_to_ignore() -> None:
    entered = []

    def work() -> None:
        with ignored_interrupts():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered
