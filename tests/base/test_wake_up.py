"""Waits end in time, however many threads wait."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from meshfeed._src.base.threads import Call
from meshfeed._src.base.wake_up import Signal


@pytest.fixture
def threads_alternate_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_a_signal_is_kept_for_the_next_wait_and_only_for_that() -> None:
    signal = Signal()
    signal.set()
    signal.set()
    for least, most in ((0.0, 30.0), (0.2, 60.0)):
        start = time.monotonic()
        signal.wait(least or most)
        assert least <= time.monotonic() - start < most


@pytest.mark.usefixtures("threads_alternate_often")
def test_a_thread_whose_signal_another_thread_took_still_waits_no_longer_than_it_wanted_to() -> None:
    seconds, waiting = 20e-6, 4
    for _ in range(12):
        signal, ended = Signal(), threading.Event()

        def wait(signal: Signal = signal, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                signal.wait(seconds)

        threads = [threading.Thread(target=wait, daemon=True) for _ in range(waiting)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 0.25
        while time.monotonic() < until:
            signal.set()
            time.sleep(seconds)
        ended.set()
        for thread in threads:
            thread.join(20)
        assert not [thread for thread in threads if thread.is_alive()]


def test_all_that_wait_for_a_call_learn_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Signal.wait, "__defaults__", (600.0,))  # nobody looks again on its own
    begun, go_on = threading.Event(), threading.Event()
    call = Call(lambda: begun.set() or go_on.wait(30))
    waiting = [threading.Thread(target=call.wait, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    running = threading.Thread(target=call.run, daemon=True)
    running.start()
    assert begun.wait(30)
    call.wake()
    go_on.set()
    for thread in (running, *waiting):
        thread.join(20)
    assert not [thread for thread in waiting if thread.is_alive()]
    assert call.result() is True
