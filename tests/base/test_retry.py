"""How often reads are tried again: counted for each record, not for the batch that it is in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.retry import call_with_retry

RECORDS, ROWS, TWICE = 32, 8, 2
RETRY = meshfeed.Retry(attempts=TWICE + 1, initial_seconds=0)
FLAKY = (0, 1, 2, 5, 7, 12, 13, 14, 15, 30)


def feed(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    if not isinstance(source, meshfeed.sources.HostBatches):
        settings = {"global_batch_size": ROWS, **settings}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **{"retry": RETRY, **settings})


def numbers(batches: Any) -> list[int]:
    return np.concatenate([np.asarray(batch) for batch in batches]).tolist()


class Storage:
    """Records of which some fail ``TWICE`` before they can be read; with ``down`` all fail from that record on."""

    def __init__(self, flaky: tuple[int, ...] = FLAKY, down: int = 1 << 62) -> None:
        self.left = dict.fromkeys(flaky, TWICE)
        self.down, self.calls = down, 0

    def read(self, record_id: int) -> np.int64:
        if record_id >= self.down:
            raise OSError("the network is down")
        if self.left.get(record_id):
            self.left[record_id] -= 1
            raise OSError(f"record {record_id} timed out")
        return np.int64(record_id)

    def read_many(self, record_ids: Any) -> list[np.int64]:
        self.calls += 1
        return [self.read(int(record_id)) for record_id in record_ids]


class Source:
    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or Storage()

    def __len__(self) -> int:
        return RECORDS

    def fingerprint(self) -> Any:
        return {"kind": "flaky"}

    def __getitem__(self, record_id: int) -> Any:
        return self.storage.read(record_id)


class Batches(Source):
    def read_batch(self, record_ids: Any) -> Any:
        return np.asarray(self.storage.read_many(record_ids))


class Several(Source):
    def __getitems__(self, record_ids: Any) -> Any:
        return self.storage.read_many(record_ids)


class Raw(Source):
    decode = None

    def read_raw(self, record_ids: Any) -> list[bytes]:
        return [record.tobytes() for record in self.storage.read_many(record_ids)]

    def decode_batch(self, records: list[bytes]) -> Any:
        return np.frombuffer(b"".join(records), np.int64)


class Decoder(Source):
    decode_batch = None

    def read_raw(self, record_ids: Any) -> list[bytes]:
        return [int(record_id).to_bytes(4, "little") for record_id in record_ids]

    def decode(self, record: bytes) -> Any:
        return self.storage.read(int.from_bytes(record, "little"))


KINDS = [Source, Batches, Several, Raw, Decoder]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, settings) for kind in KINDS for settings in ({}, {"num_threads": 2}, {"shuffle": 4, "prefetch": 0})),
        (Batches, {"num_workers": 1}),
    ],
)
def test_each_record_has_all_its_tries(kind: Any, settings: dict[str, Any]) -> None:
    with feed(Batches(Storage(())), **settings) as steady:
        expected = numbers(steady)
    with feed(kind(), **settings) as flaky:
        assert numbers(flaky) == expected
        assert flaky.stats().retries >= TWICE * len(FLAKY) / 2


@pytest.mark.parametrize("down", [0, 3, 11])
def test_reads_without_progress_are_given_up_after_as_many_tries(down: int, caplog: pytest.LogCaptureFixture) -> None:
    source = Batches(Storage((), down=down))
    with feed(source, prefetch=0) as stuck, caplog.at_level(logging.WARNING, "meshfeed.retry"):
        delivered = [next(stuck) for _ in range(down // ROWS)]
        with pytest.raises(OSError, match="the network is down"):
            next(stuck)
        assert numbers(delivered or [[]]) == list(range(len(delivered) * ROWS))
        last = [record.getMessage() for record in caplog.records][-2:]
        rest = ROWS - down % ROWS
        where = f" from record {down} on" if down % ROWS else ""
        for number, message in zip((2, 3), last, strict=True):
            assert message.startswith(f"reading {rest} records{where} failed (OSError: the network is down)")
            assert f"; attempt {number} of 3 in " in message


def test_a_record_that_fails_more_often_is_given_up() -> None:
    storage = Storage()
    storage.left[13] = TWICE + 1
    with feed(Source(storage), retry=meshfeed.Retry(attempts=2, initial_seconds=0)) as stuck, pytest.raises(OSError):
        list(stuck)
    with feed(Source(Storage((3,))), retry=meshfeed.Retry(attempts=1)) as never, pytest.raises(OSError) as info:
        next(never)
    assert info.value.__notes__ == ["while reading record 3"]
    assert never.stats().retries == 0


# --- streams --------------------------------------------------------------------------------------------------------


class Lane:
    """Every L-th record from record i on, with a state."""

    def __init__(self, storage: Storage, lane_index: int, num_lanes: int) -> None:
        self._storage, self._ids, self._at = storage, range(lane_index, RECORDS, num_lanes), 0

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._ids):
            raise StopIteration
        self._at += 1
        return self._storage.read(self._ids[self._at - 1])

    def get_state(self) -> int:
        return self._at

    def set_state(self, state: int) -> None:
        self._at = state


class LaneOfBatches(Lane):
    def next_batch(self, num_records: int) -> Any:
        ids = self._ids[self._at : self._at + num_records]
        if not ids:
            raise StopIteration
        self._at += len(ids)
        return np.asarray(self._storage.read_many(ids))


class Lanes:
    def __init__(self, kind: Any, storage: Storage | None = None) -> None:
        self._kind, self._storage = kind, storage or Storage()

    def open(self, lane_index: int, num_lanes: int) -> Any:
        return self._kind(self._storage, lane_index, num_lanes)


def without_state(storage: Storage, lane_index: int, num_lanes: int) -> Iterator[Any]:
    return (storage.read(record_id) for record_id in range(lane_index, RECORDS, num_lanes))


@pytest.mark.parametrize("kind", [Lane, LaneOfBatches, without_state], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("settings", [{"num_lanes": 1}, {"num_lanes": 2, "num_threads": 2}], ids=str)
def test_each_record_of_a_lane_has_all_its_tries(kind: Any, settings: dict[str, Any]) -> None:
    with feed(Lanes(kind, Storage(())), **settings) as steady:
        expected = numbers(steady)
    with feed(Lanes(kind), **settings) as flaky:
        assert numbers(flaky) == expected
        assert flaky.stats().retries >= TWICE * len(FLAKY) / 2
    with feed(Lanes(kind, Storage((), down=5)), **settings) as stuck, pytest.raises(OSError, match="network is down"):
        next(stuck)


@pytest.mark.parametrize("kind", [Lane, LaneOfBatches], ids=lambda kind: kind.__name__)
def test_each_record_of_a_mixture_has_all_its_tries(kind: Any) -> None:
    def mixed(flaky: tuple[int, ...]) -> Any:
        parts = {"a": Lanes(kind, Storage(flaky)), "b": Batches(Storage(flaky))}
        return meshfeed.sources.Mixture(parts, weights={"a": 1, "b": 1}, block=8)

    with feed(mixed(()), num_lanes=1) as steady:
        expected = numbers(steady)
    # One try more: components are read one after the other, so a record may fail after another one in the same call did.
    with feed(mixed(FLAKY), num_lanes=1, retry=meshfeed.Retry(attempts=TWICE + 2, initial_seconds=0)) as flaky:
        assert numbers(flaky) == expected


# --- host batches ---------------------------------------------------------------------------------------------------


class Restartable:
    """Batches that fail ``TWICE`` each, and so does starting a pass."""

    def __init__(self) -> None:
        self.storage, self.starts, self.passes = Storage(tuple(range(4))), {0: 0, 1: TWICE, 2: TWICE}, 0

    def __iter__(self) -> Iterator[Any]:
        if self.starts[self.passes]:
            self.starts[self.passes] -= 1
            raise OSError("cannot start")
        self.passes += 1
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for number in range(4):
            yield np.full(ROWS, self.storage.read(number))


def test_a_pass_that_cannot_be_started_at_once_is_not_left_out() -> None:
    class Passes(Restartable):
        def __init__(self) -> None:
            super().__init__()
            self.storage = Storage(())

    with feed(meshfeed.sources.HostBatches(Passes()), num_epochs=3) as batches:
        assert [int(batch[0]) for batch in batches] == [0, 1, 2, 3] * 3


def test_each_host_batch_has_all_its_tries() -> None:
    class Flaky(Restartable):
        def __init__(self) -> None:
            super().__init__()
            self.starts = dict.fromkeys(range(100), 0)

    with feed(meshfeed.sources.HostBatches(Flaky())) as batches:
        assert [int(batch[0]) for batch in batches] == [0, 1, 2, 3]


# --- the one place --------------------------------------------------------------------------------------------------


def test_tries_begin_again_where_progress_was_made() -> None:
    done, calls = 0, 0

    def operation() -> int:
        nonlocal done, calls
        calls += 1
        if calls % 3:
            raise OSError
        done += 1
        if done < 4:
            raise OSError
        return done

    counted: list[None] = []
    retry = meshfeed.Retry(attempts=4, initial_seconds=0)
    found = call_with_retry(
        operation, retry, doing="testing", on_retry=lambda: counted.append(None), progress=lambda: done
    )
    assert (found, calls, len(counted)) == (4, 12, 11)
    done = calls = 0
    with pytest.raises(OSError):
        call_with_retry(operation, retry, doing="testing")
    assert calls == 4


@pytest.mark.parametrize(("attempts", "calls"), [(1, 3), (3, 3), (4, 6), (7, 9)])
def test_attempts_of_an_operation_that_retries_are_counted_and_not_multiplied(attempts: int, calls: int) -> None:
    class Retrying(Batches):
        def read_batch(self, record_ids: Any) -> Any:
            return call_with_retry(lambda: super(Retrying, self).read_batch(record_ids), RETRY, doing="testing")

    source, retry = Retrying(Storage((), down=0)), meshfeed.Retry(attempts, initial_seconds=0)
    with feed(source, prefetch=0, retry=retry) as stuck, pytest.raises(OSError, match="the network is down"):
        next(stuck)
    assert source.storage.calls == calls


def test_an_exception_object_that_is_raised_again_has_all_its_attempts_each_time() -> None:
    down = OSError("the network is down")

    class Down(Batches):
        def read_batch(self, record_ids: Any) -> Any:
            self.storage.calls += 1
            raise down

    source = Down(Storage(()))
    with feed(source, prefetch=0) as stuck:
        for number in (1, 2, 3):
            with pytest.raises(OSError, match="the network is down"):
                next(stuck)
            assert source.storage.calls == number * RETRY.attempts
            stuck.reset()


def test_pauses_double_and_are_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr("random.uniform", lambda low, high: ends.append(high) or 0.0)

    def operation() -> None:
        raise OSError

    with pytest.raises(OSError):
        call_with_retry(operation, meshfeed.Retry(6, 0.5, 3.0), doing="testing")
    assert ends == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_only_errors_that_pass_are_tried_again() -> None:
    for error in (ValueError, StopIteration):
        calls = 0

        def operation(error: type[Exception] = error) -> None:
            nonlocal calls
            calls += 1
            raise error

        with pytest.raises(error):
            call_with_retry(operation, meshfeed.Retry(on=(OSError, StopIteration)), doing="testing")
        assert calls == 1
