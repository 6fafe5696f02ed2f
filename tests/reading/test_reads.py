"""Numbers of workers that change between two steps, with stand-ins for the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import meshfeed
from meshfeed._src.base.settings import Workers
from meshfeed._src.reading import reads
from meshfeed._src.reading.reads import AutoReads, ReadNumbers, Reads


class Starting:
    """Workers that are not ready yet."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stopped = False

    def is_ready(self) -> bool:
        if self._stopped:
            raise meshfeed.SourceError("worker 0 of 1 exited with code 0")
        return False

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        pass


def test_a_step_is_read_by_the_group_that_has_its_worker() -> None:
    reader = Reads(None, Workers(0), 1, timeout_seconds=1)  # type: ignore[arg-type]
    groups = [SimpleNamespace(size=size) for size in (2, 3, 1)]
    reader._groups = groups  # type: ignore[assignment]
    found = [reader._worker(number) for number in range(6)]
    assert [(groups.index(group), worker) for group, worker in found] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
    ]  # type: ignore[arg-type]


def test_workers_that_the_feed_has_stopped_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``set_state``, while the reading thread is between two steps."""
    monkeypatch.setattr(reads, "open_pool", Starting)
    reader, auto = Reads(None, Workers(0), 1, timeout_seconds=1), AutoReads()  # type: ignore[arg-type]
    auto.begin(reader.numbers)
    auto.wanted = ReadNumbers(1, 1)
    reader.follow(auto)
    reader.stop()
    with pytest.raises(meshfeed.SourceError):
        reader.follow(auto)
    assert auto.unchangeable == {}
    assert auto.wanted.num_workers == 1
    reader.close()


def test_a_reason_of_one_reader_does_not_hold_for_the_next() -> None:
    auto = AutoReads()
    auto.begin(ReadNumbers(0, 1))
    auto.keep("num_workers", "it cannot be pickled")
    auto.keep("num_threads", "this host has one lane", for_good=False)
    auto.begin(ReadNumbers(0, 2))
    assert auto.unchangeable == {"num_workers": "it cannot be pickled"}
    auto.keep("num_threads", "this host has one lane", for_good=False)
    assert auto.wanted == ReadNumbers(0, 2)
