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


class Killed:
    """Workers that are ready at once; one is killed while it reads."""

    killed = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.closed = False

    def is_ready(self) -> bool:
        return True

    def submit(self, worker: int, request: Any) -> None:
        pass

    def result(self, worker: int, timeout_seconds: float) -> Any:
        raise meshfeed.SourceError("worker 0 of 1 was killed by SIGKILL")

    def close(self) -> None:
        self.closed = True


class Failing(Killed):
    """All live; one reports an error."""

    killed = False


def following(num_workers: int) -> tuple[Reads, AutoReads]:
    """A reader that has followed a feed which wants workers."""
    records = SimpleNamespace(read=lambda record_ids, epochs, columns: ("rows of", record_ids, epochs, columns))
    reader, auto = Reads(records, Workers(0), 1, timeout_seconds=1), AutoReads()  # type: ignore[arg-type]
    auto.begin(reader.numbers)
    auto.wanted = ReadNumbers(num_workers, 1)
    for _ in range(2):  # they start, and are ready
        reader.follow(auto)
    return reader, auto


def test_a_killed_worker_that_the_feed_chose_costs_no_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reads, "open_pool", Killed)
    reader, auto = following(3)
    assert auto.in_use == ReadNumbers(3, 1)
    assert (reader.num_workers, reader.ahead) == (3, 6)
    (group,) = reader._groups
    collect = reader.submit(7, "ids", "epochs", None)  # type: ignore[arg-type]
    assert collect() == ("rows of", "ids", "epochs", None)
    why = "a worker was killed: worker 0 of 1 was killed by SIGKILL"
    assert auto.unchangeable == {"num_workers": why}
    assert auto.in_use == auto.wanted == ReadNumbers(0, 1)
    assert (reader.num_workers, reader.ahead) == (0, 1)
    (record,) = caplog.records
    assert record.getMessage() == f"reading without worker processes from now on (num_workers='auto'): {why}"
    reader.follow(auto)  # between two steps, the workers that are left are ended
    reader.close()
    assert group.pool.closed  # type: ignore[attr-defined]


def test_an_error_of_a_worker_that_lives_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "open_pool", Failing)
    reader, auto = following(3)
    with pytest.raises(meshfeed.SourceError, match="worker 0 of 1"):
        reader.submit(7, "ids", "epochs", None)()  # type: ignore[arg-type]
    assert auto.unchangeable == {}
    assert reader.num_workers == 3
    reader.close()


def test_workers_that_cannot_start_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise meshfeed.SettingsError("the source cannot be pickled " + 999 * "x")

    monkeypatch.setattr(reads, "open_pool", refuse)
    reader, auto = following(3)
    assert auto.unchangeable["num_workers"].startswith("the source cannot be pickled xxx")
    assert len(auto.unchangeable["num_workers"]) < 400
    assert auto.in_use == auto.wanted == ReadNumbers(0, 1)
    assert not caplog.records  # there were none, so nothing has changed
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
