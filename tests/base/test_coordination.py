"""The key-value store: refused jobs without one, and rounds that leave nothing in it."""

from __future__ import annotations

import concurrent.futures
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "chaos"))

from memory_store import MemoryStore

from meshfeed import MeshfeedError
from meshfeed._src.base import coordination


@pytest.mark.parametrize(
    ("initialized", "message"),
    [
        (
            False,
            r"JAX reports 4 processes, but jax\.distributed is not initialized.*Call jax\.distributed\.initialize\(\)",
        ),
        (True, r"cannot find the key-value store of JAX \d+\.\d+\.\d.*install an older version of JAX"),
    ],
)
def test_several_processes_without_a_store_are_refused(
    initialized: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "is_distributed", lambda: initialized)
    monkeypatch.setattr(coordination, "process_count", lambda: 4)
    options: dict[str, Any] = {"participants": range(4), "timeout_seconds": 5, "doing": "testing"}
    with pytest.raises(MeshfeedError, match=message):
        coordination.reduce_json("test", 0, None, lambda values: None, **options)


def test_a_round_leaves_no_key_and_deletes_none_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store, hosts = MemoryStore(), range(3)
    here = threading.local()
    monkeypatch.setattr(coordination, "key_value_store", lambda: store)
    monkeypatch.setattr(coordination, "process_index", lambda: here.host)
    options: dict[str, Any] = {"participants": hosts, "timeout_seconds": 30, "doing": "testing"}

    def run(host: int) -> list[int]:
        here.host = host
        results = []
        for number in range(20):
            time.sleep(0.002 * ((host + number) % 3))
            results.append(
                coordination.reduce_json("test", number, host, lambda values: sum(values.values()), **options)
            )
        return results

    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as threads:
        assert list(threads.map(run, hosts)) == [[3] * 20] * 3
    assert not store._values


def test_a_coordinator_that_is_gone_holds_nobody_up() -> None:
    gone = threading.Event()
    start = time.monotonic()
    coordination.call_briefly(lambda: gone.wait(60) and None, name="test", at_exit=False)
    assert time.monotonic() - start < 30
    gone.set()


def test_an_error_while_leaving_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(MemoryStore):
        def increment(self, key: str) -> int:
            raise RuntimeError("UNAVAILABLE")

    with caplog.at_level(logging.DEBUG, "meshfeed.process"):
        coordination.leave(Gone(), "test", 2)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == ["meshfeed-leave: UNAVAILABLE"]


def test_a_resume_that_ended_between_two_looks_is_progress() -> None:
    store = MemoryStore()
    patience = coordination.Patience(store, 1.0)  # type: ignore[arg-type]
    key = coordination._resuming_key(1)
    store.set(key, "resuming lane 3: dropped 5 of 10 records")
    assert patience.renew([1])
    store.delete(key)  # it has come to its end, and the host is not here yet
    assert patience.renew([1])
    assert not patience.renew([1])
