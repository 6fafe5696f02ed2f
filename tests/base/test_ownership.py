"""What user code writes to after it was read never shows in a batch that was delivered."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed._src.base import memory as base_memory
from meshfeed._src.base import ownership

ROWS, COLUMNS, RECORDS = 8, 16, 64  # a record's leaf is 64 bytes, so that blocks of any rows can be aliased on CPU


# --- memory that is filled again ------------------------------------------------------------------------------------


def _file(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(num_bytes)
        return np.memmap(file.name, np.uint8, "r+"), np.memmap(file.name, np.uint8, "r")


def _array(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    array = np.empty(num_bytes, np.uint8)
    return array, array


def _read_only_view(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    array = np.empty(num_bytes, np.uint8)
    view = array[:]
    view.flags.writeable = False
    return array, view


def _of(buffer: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(buffer, np.uint8), np.frombuffer(memoryview(buffer).toreadonly(), np.uint8)


def _shared(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    class Kept(shared_memory.SharedMemory):
        def __del__(self) -> None:  # arrays are still there
            with contextlib.suppress(BufferError):
                super().__del__()

    memory = Kept(create=True, size=num_bytes)
    memory.unlink()
    write, read = _of(memory.buf)
    return write[:num_bytes], read[:num_bytes]


MEMORIES: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
    "array": _array,
    "read-only view": _read_only_view,
    "mmap": lambda num_bytes: _of(mmap.mmap(-1, num_bytes)),
    "mmap of a file": _file,
    "bytearray": lambda num_bytes: _of(bytearray(num_bytes)),
    "shared memory": _shared,
    "ctypes": lambda num_bytes: _of((ctypes.c_uint8 * num_bytes)()),
}


class Refilled:
    """Memory for two leaves that share one base, filled anew for each batch or record; one set for each thread."""

    def __init__(self, memory: str = "array", rows: int = ROWS) -> None:
        self.memory, self.rows = memory, rows
        self._own = threading.local()

    def __reduce__(self) -> Any:
        return Refilled, (self.memory, self.rows)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        if not hasattr(self._own, "arrays"):
            num_bytes = 2 * self.rows * COLUMNS * 4
            arrays = MEMORIES[self.memory](num_bytes + 64)
            self._own.arrays = [
                array[-array.ctypes.data % 64 :][:num_bytes].view(np.int32).reshape(2, self.rows, COLUMNS)
                for array in arrays
            ]
        return self._own.arrays

    def batch(self, numbers: Any) -> dict[str, np.ndarray]:
        """The records ``numbers``, in the memory that the last call used."""
        write, read = self._arrays()
        count = len(numbers)
        write[0, :count] = np.asarray(numbers)[:, None]
        write[1, :count] = -np.asarray(numbers)[:, None]
        return {"x": read[0, :count], "y": read[1, :count]}

    def record(self, number: int) -> dict[str, np.ndarray]:
        """One record, in the memory that the last call used."""
        return {path: leaf[0] for path, leaf in self.batch([number]).items()}


class Fresh(Refilled):
    """New memory at each call."""

    def batch(self, numbers: Any) -> dict[str, np.ndarray]:
        return Refilled(self.memory, self.rows).batch(numbers)


# --- what reads into it ---------------------------------------------------------------------------------------------


class Source:
    """The records 0, 1, …, by id."""

    def __init__(self, refilled: Refilled) -> None:
        self.refilled = refilled

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, record_id: int) -> Any:
        return self.refilled.record(record_id)

    def fingerprint(self) -> Any:
        return {"kind": type(self).__name__}


class ReadBatch(Source):
    def read_batch(self, record_ids: np.ndarray) -> Any:
        return self.refilled.batch(record_ids)


class OverMemory(meshfeed.sources.Memory):
    """A subclass whose own ``read_batch`` is not the one that gives fresh arrays."""

    def __init__(self, refilled: Refilled) -> None:
        super().__init__({"x": np.zeros((RECORDS, COLUMNS), np.int32), "y": np.zeros((RECORDS, COLUMNS), np.int32)})
        self.refilled = refilled

    def read_batch(self, record_ids: np.ndarray, columns: Any = None) -> Any:
        return self.refilled.batch(record_ids)


class Raw(Source):
    decode: Any = None
    decode_batch: Any = None

    def read_raw(self, record_ids: np.ndarray) -> list[bytes]:
        return [int(record_id).to_bytes(4, "little") for record_id in record_ids]


class Decode(Raw):
    def decode(self, record: bytes) -> Any:
        return self.refilled.record(int.from_bytes(record, "little"))


class DecodeBatch(Raw):
    def decode_batch(self, records: list[bytes]) -> Any:
        return self.refilled.batch([int.from_bytes(record, "little") for record in records])


class WrappedRaw(meshfeed.sources.DecodeRaw):
    """A decoder that returns the same arrays at each call, by way of a class that does not."""

    def __init__(self, refilled: Refilled) -> None:
        super().__init__(np.int32)
        self.refilled = refilled

    def __call__(self, records: Any) -> Any:
        return self.refilled.batch(super().__call__(records))


class DecodeOverRaw(Raw):
    def __init__(self, refilled: Refilled) -> None:
        super().__init__(refilled)
        self.decode_batch = WrappedRaw(refilled)


class LaneOfBatches:
    def __init__(self, numbers: range, refilled: Refilled) -> None:
        self._numbers, self._refilled, self._at = numbers, refilled, 0

    def next_batch(self, num_records: int) -> Any:
        numbers = self._numbers[self._at : self._at + min(num_records, 3)]  # fewer than asked for: parts are joined
        if not numbers:
            raise StopIteration
        self._at += len(numbers)
        return self._refilled.batch(numbers)

    def __next__(self) -> Any:
        raise AssertionError("next_batch is the way")


class BatchStream:
    """Lane i has every L-th record, from record i on."""

    def __init__(self, refilled: Refilled) -> None:
        self.refilled = refilled

    def _numbers(self, lane_index: int, num_lanes: int) -> range:
        return range(lane_index, RECORDS, num_lanes)

    def open(self, lane_index: int, num_lanes: int) -> Any:
        return LaneOfBatches(self._numbers(lane_index, num_lanes), self.refilled)


class RecordStream(BatchStream):
    def open(self, lane_index: int, num_lanes: int) -> Any:
        return map(self.refilled.record, self._numbers(lane_index, num_lanes))


class DecodedStream(BatchStream):
    def decode(self, record: int) -> Any:
        return self.refilled.record(record)

    def open(self, lane_index: int, num_lanes: int) -> Any:
        return iter(self._numbers(lane_index, num_lanes))


def host_batches(refilled: Refilled) -> Any:
    return meshfeed.sources.HostBatches(refilled.batch(range(first, first + ROWS)) for first in range(0, RECORDS, ROWS))


def mixture(kind: Any) -> Callable[[Refilled], Any]:
    return lambda refilled: meshfeed.sources.Mixture(
        {"a": kind(refilled), "b": kind(refilled)}, weights={"a": 1, "b": 1}, block=ROWS
    )


RANDOM: dict[str, Any] = {
    kind.__name__: kind for kind in (Source, ReadBatch, OverMemory, Decode, DecodeBatch, DecodeOverRaw)
}
STREAMS: dict[str, Any] = {kind.__name__: kind for kind in (BatchStream, RecordStream, DecodedStream)}
MIXED = {f"mixture of {kind.__name__}": mixture(kind) for kind in (DecodeBatch, Source, BatchStream, RecordStream)}


def mesh(devices: int = 8) -> Mesh:
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def rows_of(source: Any, devices: int = 8, **settings: Any) -> list[np.ndarray]:
    """The first column of each batch of a feed; looked at only once all of them were read."""
    if not isinstance(source, meshfeed.sources.HostBatches):
        settings = {"global_batch_size": ROWS, **settings}
    with meshfeed.MultiHostDataLoadIterator(source, mesh(devices), **settings) as feed:
        batches = list(feed)
    for batch in batches:
        for leaf in jax.tree.leaves(batch):
            host = np.asarray(leaf)
            assert (host == host[:, :1]).all()
        np.testing.assert_array_equal(batch["y"], -np.asarray(batch["x"]))
    return [np.asarray(batch["x"])[:, 0] for batch in batches]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("make", [ReadBatch, DecodeBatch, BatchStream, host_batches], ids=lambda kind: kind.__name__)
def test_memory_that_is_filled_again_is_copied_whatever_it_is(make: Any, memory: str) -> None:
    more = {"num_lanes": 1} if make is BatchStream else {}
    found = rows_of(make(Refilled(memory)), **more)
    np.testing.assert_array_equal(np.concatenate(found), np.arange(RECORDS))


@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch": 0},
        {"num_threads": 3},
        {"load": "once"},
        {"end": "pad", "global_batch_size": 24},
        {"devices": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
def test_records_read_at_random_are_copied_before_the_next_are_read(make: Any, settings: dict[str, Any]) -> None:
    found = np.concatenate(rows_of(make(Refilled(rows=24)), **settings))
    np.testing.assert_array_equal(found[:RECORDS], np.arange(RECORDS))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Source, ReadBatch, DecodeBatch], ids=lambda kind: kind.__name__)
def test_and_in_worker_processes(make: Any) -> None:
    found = rows_of(make(Refilled()), num_workers=1)
    np.testing.assert_array_equal(np.concatenate(found), np.arange(RECORDS))


@pytest.mark.parametrize("settings", [{"num_lanes": 1}, {"num_lanes": 2}, {"num_lanes": 1, "prefetch": 0}], ids=str)
@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_records_of_lanes_are_copied_before_the_next_are_read(make: Any, settings: dict[str, Any]) -> None:
    found = rows_of(make(Refilled()), **settings)
    expected = np.arange(RECORDS).reshape(-1, ROWS // settings["num_lanes"], settings["num_lanes"])
    np.testing.assert_array_equal(found, expected.transpose(0, 2, 1).reshape(-1, ROWS))


@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_components_of_a_mixture_may_share_memory(make: Any) -> None:
    np.testing.assert_array_equal(rows_of(make(Refilled())), rows_of(make(Fresh())))


@pytest.mark.parametrize("factor", [-1, 2])
def test_maxtext_loaders_may_fill_their_arrays_again(factor: int) -> None:
    from meshfeed.maxtext import MultiHostDataLoadIterator

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            refilled = Refilled()
            for first in range(0, RECORDS, ROWS):
                yield refilled.batch(range(first, first + ROWS))

    with MultiHostDataLoadIterator(Loader(), mesh(), expansion_loading_factor_for_grain=factor) as loader:
        found, local = [], []
        for batch in loader:
            found.append(batch)
            local.append(loader.last_local_data)
    for batches in (found, local):
        numbers = np.concatenate([np.asarray(batch["x"])[:, 0] for batch in batches])
        np.testing.assert_array_equal(numbers, np.arange(RECORDS))


def test_a_maxtext_loader_that_is_read_once_goes_on_with_what_was_read_ahead() -> None:
    from meshfeed.maxtext import MultiHostDataLoadIterator

    refilled = Refilled()
    generator = (refilled.batch(range(first, first + ROWS)) for first in range(0, RECORDS, ROWS))
    with MultiHostDataLoadIterator(generator, mesh()) as loader:
        found = [next(loader), next(loader)]
        loader.reset()  # what was read ahead by now is kept, and read again
        with contextlib.suppress(StopIteration):  # list() would reset it
            while True:
                found.append(next(loader))
    numbers = np.concatenate([np.asarray(batch["x"])[:, 0] for batch in found])
    np.testing.assert_array_equal(numbers, np.arange(RECORDS))


# --- what is passed on as it is -------------------------------------------------------------------------------------


def test_only_memory_that_nobody_can_write_is_immutable() -> None:
    whole = base_memory.empty((4, 16), np.int32)
    assert not ownership.is_immutable(whole)
    read_only = whole[:]
    read_only.flags.writeable = False
    assert not ownership.is_immutable(read_only), "whoever holds `whole` can write"
    assert ownership.is_immutable(ownership.seal(whole))
    assert ownership.is_immutable(whole[1:3])
    assert ownership.is_immutable(np.frombuffer(bytes(64), np.int32).reshape(4, 4)[1:])
    assert ownership.is_immutable(np.frombuffer(memoryview(bytes(64))[8:], np.int32))
    frozen = np.arange(6)
    frozen.flags.writeable = False
    assert not ownership.is_immutable(frozen), "its owner may set the flag again"
    assert not ownership.is_immutable(np.asarray(jax.numpy.arange(6)))


def test_arrays_are_copied_once_into_memory_that_the_devices_take_as_it_is() -> None:
    array = np.arange(64).reshape(4, 16)
    owned = ownership.own(array)
    assert not np.shares_memory(owned, array)
    assert base_memory.is_aligned(owned)
    np.testing.assert_array_equal(owned, array)
    np.testing.assert_array_equal(ownership.own(array.T), array.T)
    assert ownership.own("text") == "text"
    assert ownership.own(b"bytes") == b"bytes"
    key = jax.random.key(0)
    assert ownership.own(key) is key, "it is refused by name where batches are checked"


def test_a_batch_of_new_memory_is_not_copied() -> None:
    class Fresh:
        fresh_arrays = True

        def read_batch(self) -> None: ...

    class Changed(Fresh):
        def read_batch(self) -> None: ...

    batch = {"x": base_memory.empty((4, 16), np.int32)}
    assert ownership.own_batch(batch, Fresh(), "read_batch")["x"] is batch["x"]
    for maker in (Changed(), object()):
        assert not np.shares_memory(ownership.own_batch(batch, maker, "read_batch")["x"], batch["x"])


@pytest.mark.parametrize(
    "make",
    [
        lambda path: meshfeed.sources.Memory(np.arange(RECORDS * COLUMNS, dtype=np.int32).reshape(RECORDS, COLUMNS)),
        lambda path: meshfeed.sources.ArrayRecord(path, decode_batch=meshfeed.sources.DecodeRaw(np.int32, COLUMNS)),
        lambda path: meshfeed.sources.Mixture({"a": np.zeros((RECORDS, COLUMNS), np.int32)}, weights={"a": 1}),
    ],
    ids=["Memory", "ArrayRecord and DecodeRaw", "Mixture"],
)
def test_what_meshfeed_reads_itself_is_not_copied_again(
    make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(tmp_path / "records"), "group_size:1,uncompressed")
    for number in range(RECORDS):
        writer.write(np.full(COLUMNS, number, np.int32).tobytes())
    writer.close()
    copies: list[Any] = []
    copy = base_memory.copy
    monkeypatch.setattr(base_memory, "copy", lambda *args: copies.append(args) or copy(*args))
    with meshfeed.MultiHostDataLoadIterator(make(str(tmp_path / "records")), mesh(), global_batch_size=ROWS) as feed:
        assert len(list(feed)) == RECORDS // ROWS
    assert not copies
