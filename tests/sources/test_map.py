"""A function over the records of any source, and a shuffle buffer for any stream."""

from __future__ import annotations

import functools
import io
import json
import pathlib
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from jax.sharding import AxisType

import meshfeed
from meshfeed import SourceError
from meshfeed._src.reading.records import SourceReader
from meshfeed.sources import (
    ArrayRecord,
    Concat,
    Folder,
    Map,
    Memory,
    Mixture,
    Packed,
    Padded,
    Parquet,
    ShuffleBuffer,
    Stream,
    Subset,
    WebDataset,
    Zip,
)
from meshfeed.testing import check_resumable

NUM = 96


def mesh() -> Any:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def feed_of(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    return meshfeed.MultiHostDataLoadIterator(source, mesh(), **{"global_batch_size": 8, "seed": 3, **settings})


def values(feed: Any, key: str = "x") -> list[int]:
    with feed:
        return [int(value) for batch in feed for value in np.asarray(batch[key]).ravel()]


def double(record: dict[str, Any]) -> dict[str, Any]:
    return {"x": record["x"] * 2}


def double_all(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": np.stack([record["x"] for record in records]) * 2}


def add_noise(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": record["x"], "noise": rng.integers(0, 2**31, dtype=np.int32)}


def add_noise_to_all(records: list[dict[str, Any]], rng: list[np.random.Generator]) -> dict[str, Any]:
    return {
        "x": np.stack([record["x"] for record in records]),
        "noise": np.array([one.integers(0, 2**31) for one in rng], np.int32),
    }


def some(record: dict[str, Any]) -> dict[str, Any] | None:
    return record if int(record["x"]) % 5 in (1, 3) else None


def memory() -> Memory:
    return Memory({"x": np.arange(NUM)})


class Records:
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        return {"x": np.int64(record_id)}


def open_plain(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
    for i in range(lane_index, NUM, num_lanes):
        yield {"x": np.int64(i)}


class Lane:
    """Refills one array, and has a state."""

    def __init__(self, lane_index: int, num_lanes: int) -> None:
        self._next, self._step, self._array = lane_index, num_lanes, np.zeros((), np.int64)

    def __iter__(self) -> Lane:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._next >= NUM:
            raise StopIteration
        self._array[...] = self._next
        self._next += self._step
        return {"x": self._array}

    def get_state(self) -> Any:
        return {"next": (self._next,)}

    def set_state(self, state: Any) -> None:
        (self._next,) = state["next"]


STREAMS: dict[str, Callable[[], Any]] = {"plain": lambda: Stream(open_plain), "stateful": lambda: Stream(Lane)}
FUNCTIONS = {"one": (double, False), "batched": (double_all, True)}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_random_access(kind: str) -> None:
    function, batched = FUNCTIONS[kind]
    for source in (memory(), Records(), [{"x": np.int64(i)} for i in range(NUM)]):
        feed = feed_of(Map(source, function, batched=batched), shuffle=True)
        assert sorted(values(feed)) == [2 * i for i in range(NUM)]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_streams(stream: str, kind: str) -> None:
    function, batched = FUNCTIONS[kind]
    plain = values(feed_of(STREAMS[stream](), num_lanes=4))
    assert values(feed_of(Map(STREAMS[stream](), function, batched=batched), num_lanes=4)) == [2 * x for x in plain]


@pytest.mark.parametrize("stream", STREAMS)
def test_none_drops_a_record_of_a_stream(stream: str) -> None:
    kept = [i for i in range(NUM) if i % 5 in (1, 3)]
    assert values(feed_of(Map(STREAMS[stream](), some), num_lanes=1)) == kept[: len(kept) // 8 * 8]


def test_dropped_records_of_a_mixture_change_no_replay_of_lanes_that_have_ended() -> None:
    mixture = Mixture({"a": Stream(Lane), "b": Stream(open_plain)}, {"a": 1, "b": 1}, block=8)
    lanes = [[x for x in range(lane, NUM, 4) if x % 5 in (1, 3)] for lane in range(4)]
    with feed_of(Map(mixture, some), num_lanes=4, end="pad", mask_key="mask") as feed:
        found = [{name: np.asarray(leaf).tolist() for name, leaf in batch.items()} for batch in feed]
        assert sum(sum(batch["mask"]) for batch in found) == feed.position >= 2 * sum(map(len, lanes))
        assert not all(found[-1]["mask"])
        for step, batch in enumerate(found):
            assert {name: np.asarray(leaf).tolist() for name, leaf in feed.replay(step).items()} == batch


def test_no_record_is_dropped_of_a_mixture_whose_weights_change_at_steps() -> None:
    message = r"returned None for record \d+ of lane 0, which is of a mixture whose weights change at steps"
    sources = {"a": Stream(Lane), "b": Stream(open_plain)}
    staged = Mixture(sources, [(0, {"a": 1, "b": 1}), (2, {"a": 1})], block=8)
    with pytest.raises(meshfeed.SourceError, match=message), feed_of(Map(staged, some), num_lanes=1) as feed:
        next(feed)
    mixture = Mixture(sources, {"a": 1, "b": 1}, block=8)
    with feed_of(Map(Map(mixture, some), double), num_lanes=1, prefetch=0) as feed:
        next(feed)
        feed.set_weights({"a": 1, "b": 0})
        with pytest.raises(meshfeed.SourceError, match=message):
            next(feed)
    below = {name: Map(source, some) for name, source in sources.items()}
    staged = Mixture(below, [(0, {"a": 1, "b": 1}), (2, {"a": 1})], block=8)
    assert len(values(feed_of(staged, num_lanes=1))) == 40  # 8 of each, and the 30 that are left of one


def test_a_list_of_records_is_no_batch() -> None:
    def doubled(records: list[dict[str, Any]]) -> Any:
        return [double(record) for record in records]

    for source, settings in ((memory(), {}), (Stream(Lane), {"num_lanes": 4})):
        with (
            pytest.raises(meshfeed.SourceError, match=r"returned a list of \d records.*np.stack"),
            feed_of(Map(source, doubled, batched=True), **settings) as feed,
        ):
            next(feed)


def test_none_is_an_error_for_random_access() -> None:
    with pytest.raises(meshfeed.SourceError, match="returned None for record 0"), feed_of(Map(memory(), some)) as feed:
        next(feed)


def noise_of(source: Any, function: Any, batched: bool, **settings: Any) -> dict[int, int]:
    with feed_of(Map(source, function, batched=batched), **settings) as feed:
        rows = [(int(x), int(n)) for batch in feed for x, n in zip(batch["x"], batch["noise"], strict=True)]
    return dict(rows)


@pytest.mark.slow
def test_random_numbers_of_random_access_depend_on_seed_epoch_and_record_alone() -> None:
    usual = noise_of(memory(), add_noise, False)
    assert len(set(usual.values())) == NUM
    assert noise_of(memory(), add_noise_to_all, True, shuffle=True, num_workers=2) == usual
    assert noise_of(memory(), add_noise, False, seed=4) != usual
    with feed_of(Map(memory(), add_noise), num_epochs=2) as feed:
        noise = [int(n) for batch in feed for n in batch["noise"]]
    assert noise[:NUM] == list(usual.values())
    assert not set(noise[NUM:]) & set(usual.values())


def test_random_numbers_of_streams_differ_by_lane_and_record() -> None:
    usual = noise_of(Stream(open_plain), add_noise, False, num_lanes=4)
    assert len(set(usual.values())) == NUM
    assert noise_of(Stream(Lane), add_noise_to_all, True, num_lanes=4) == usual
    assert noise_of(Stream(open_plain), add_noise, False, num_lanes=4, seed=1) != usual


def test_the_functions_numbers_are_not_the_decoders() -> None:
    class Noisy(Records):
        wants_rng = True

        def read_batch(self, record_ids: Any, rngs: Any = None) -> dict[str, Any]:
            return {"x": np.array([rng.integers(0, 2**31, dtype=np.int32) for rng in rngs])}

    found = noise_of(Noisy(), add_noise, False)
    assert all(x != noise for x, noise in found.items())


def again(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**record, "again": rng.integers(0, 2**31, dtype=np.int32)}


@pytest.mark.parametrize(
    "between",
    [
        lambda source: source,
        lambda source: Map(source, lambda record: record),
        lambda source: ShuffleBuffer(source, 12) if hasattr(source, "open") else Subset(source, slice(5, None)),
        lambda source: Mixture({"a": source}, {"a": 1}, block=8),
    ],
)
@pytest.mark.parametrize("records", [memory, lambda: Stream(open_plain)])
def test_functions_one_after_the_other_draw_their_own_numbers(records: Any, between: Any) -> None:
    source = Map(between(Map(records(), add_noise)), again)
    with feed_of(source, **({"num_lanes": 4} if hasattr(source, "open") else {})) as feed:
        batch = next(feed)
    assert not set(batch["noise"].tolist()) & set(batch["again"].tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Map(memory(), add_noise),
        lambda: Map(Stream(open_plain), add_noise),
        lambda: Map(Stream(open_plain), add_noise_to_all, batched=True),
        lambda: Map(Map(ShuffleBuffer(Map(Stream(open_plain), add_noise), 12), lambda record: record), again),
    ],
)
def test_components_that_number_their_records_alike_draw_their_own_numbers(make: Any) -> None:
    def numbers(*names: str) -> set[int]:
        components = {"stream": Stream(open_plain), **{name: make() for name in names}}
        with feed_of(Mixture(components, {"stream": 0, **dict.fromkeys(names, 1)}, block=8), num_lanes=4) as feed:
            return {int(number) for batch in feed for name in batch if name != "x" for number in batch[name]}

    assert len(numbers("a", "b")) == 2 * len(numbers("a"))


def refill(buffer: np.ndarray, records: list[dict[str, Any]]) -> dict[str, Any]:
    buffer[: len(records)] = [int(record["x"]) for record in records]
    return {"x": buffer[: len(records)]}


def test_a_function_may_refill_its_arrays() -> None:
    for source in (memory(), Stream(Lane)):
        mapped = Map(source, functools.partial(refill, np.zeros(NUM, np.int64)), batched=True)
        assert sorted(
            values(feed_of(mapped, prefetch=4, **({} if source.__class__ is Memory else {"num_lanes": 2})))
        ) == [*range(NUM)]


class Refills:
    """Records in an array that is refilled for the next one, of a function of records or a decoder of bytes."""

    def __init__(self) -> None:
        self.array = np.zeros(1, np.int64)

    def __call__(self, record: Any) -> dict[str, np.ndarray]:
        self.array[0] = np.frombuffer(record, np.int64)[0] if isinstance(record, bytes) else int(record["x"])
        return {"x": self.array}


class RefillsItems:
    """Records in an array that is refilled by the next call."""

    def __init__(self) -> None:
        self.array = np.zeros((NUM, 1), np.int64)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        return self.__getitems__([record_id])[0]

    def __getitems__(self, record_ids: list[int]) -> list[dict[str, np.ndarray]]:
        self.array[: len(record_ids), 0] = record_ids
        return [{"x": row} for row in self.array[: len(record_ids)]]


class Tensor:
    """The part of a tensor of PyTorch that numpy and meshfeed use."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array

    def clone(self) -> Tensor:
        return Tensor(self.array.copy())


class RefillsTensor(Refills):
    """The same, in a tensor that shares the array."""

    def __call__(self, record: Any) -> dict[str, Any]:
        return {name: Tensor(array) for name, array in super().__call__(record).items()}


def refilled_files(folder: pathlib.Path) -> Any:
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for number in range(NUM):
        writer.write(np.int64(number).tobytes())
    writer.close()
    return ArrayRecord(str(folder / "a.array_record"), decode=Refills())


def refilled_archive(folder: pathlib.Path) -> Any:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(NUM):
            member, content = tarfile.TarInfo(f"{number:03}.x"), str(number).encode()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return WebDataset(str(folder / "a.tar"), decode=Refills())


@pytest.mark.parametrize(
    "around",
    [
        lambda source: Map(source, lambda record: {"x": record["x"]}),
        lambda source: Map(source, lambda records: {"x": np.stack([r["x"] for r in records])}, batched=True),
        lambda source: Map(Zip({"a": source, "b": Subset(source, range(NUM - 1, -1, -1))}), lambda record: record["a"]),
        lambda source: Map(Concat([Subset(source, slice(8)), Subset(source, slice(8, None))]), lambda record: record),
        lambda source: Padded(source, 1, key="x"),
        lambda source: Packed(source, 1, key="x"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        *(lambda _: Map(memory(), Refills()), lambda _: Map(memory(), RefillsTensor()), lambda _: RefillsItems()),
        *(refilled_files, refilled_archive),
    ],
    ids=["map", "tensor", "items", "files", "archive"],
)
def test_records_below_may_be_in_arrays_that_are_refilled(tmp_path: pathlib.Path, make: Any, around: Any) -> None:
    assert values(feed_of(around(make(tmp_path)))) == [*range(NUM)]


def test_a_lane_may_refill_a_bytearray() -> None:
    def lane(lane_index: int, num_lanes: int) -> Iterator[bytearray]:
        content = bytearray(8)
        for number in range(NUM):
            content[:] = np.int64(number).tobytes()
            yield content

    source = Map(ShuffleBuffer(Stream(lane), NUM), lambda content: {"x": np.frombuffer(content, np.int64)})
    assert sorted(values(feed_of(source, num_lanes=1))) == [*range(NUM)]


def numbers() -> np.ndarray:
    return np.arange(NUM).reshape(NUM, 1)


def parquet(folder: pathlib.Path) -> Any:
    pq.write_table(pa.table({"x": numbers().tolist()}), str(folder / "a.parquet"), row_group_size=10)
    return Parquet(str(folder / "a.parquet"))


def open_rows(rows: np.ndarray) -> Any:
    return Stream(lambda lane_index, num_lanes: iter([{"x": row} for row in rows[lane_index::num_lanes]]))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda _: Memory({"x": numbers()}),
        lambda _: Subset(Memory({"x": numbers()}), slice(None)),
        lambda _: Concat([Memory({"x": numbers()[:40]}), Memory({"x": numbers()[40:]})]),
        lambda _: grain.MapDataset.source([{"x": row} for row in numbers()]),
        lambda _: [{"x": row} for row in numbers()],
        lambda _: open_rows(numbers()),
        parquet,
    ],
    ids=["memory", "subset", "concat", "grain", "list", "stream", "parquet"],
)
def test_a_function_may_change_its_records(tmp_path: pathlib.Path, make: Any, batched: bool) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        record["x"] += 1000
        return record

    def change_all(records: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": np.stack([change(record)["x"] for record in records])}

    mapped = Map(make(tmp_path), change_all if batched else change, batched=batched)
    lanes = {"num_lanes": 4} if hasattr(mapped, "open") else {}
    assert sorted(values(feed_of(mapped, num_epochs=2, **lanes))) == sorted(2 * [*range(1000, 1000 + NUM)])


def test_a_function_gets_the_leaves_in_their_order() -> None:
    records = [{"b": np.int32(number), "a": np.int32(-number)} for number in range(NUM)]
    for source in (records, grain.MapDataset.source(records)):
        assert Map(source, lambda record: np.stack([*record.values()]))[3].tolist() == [3, -3]


def test_a_function_gets_the_keys_of_dicts_in_lists_in_their_order() -> None:
    records = [{"tools": [{"type": "function", "name": name}], "at": ({"z": 1, "a": None},)} for name in "xy"]
    written: list[str] = []

    def write(record: dict[str, Any]) -> dict[str, Any]:
        written.append(json.dumps(record))  # as a chat template writes tools
        return {"length": np.int32(len(written[-1]))}

    for source in (records, Stream(lambda lane_index, num_lanes: iter(records))):
        mapped: Any = Map(source, write)
        written.clear()
        _ = mapped[0] if hasattr(mapped, "__getitem__") else next(mapped.open(0, 1))
        assert written == [json.dumps(records[0])]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Map(memory(), double),
        lambda: Map(memory(), add_noise_to_all, batched=True),
        lambda: Map(Stream(open_plain), some),
        lambda: Map(Stream(Lane), some),
        lambda: Map(Stream(Lane), double_all, batched=True),
        lambda: Map(Mixture({"a": memory(), "b": memory()}, {"a": 3, "b": 1}, block=8), double),
        lambda: Map(Mixture({"a": memory(), "b": Stream(Lane)}, {"a": 3, "b": 1}, block=8), add_noise),
        lambda: Mixture({"a": Map(memory(), double), "b": Map(Stream(Lane), double)}, {"a": 1, "b": 1}, block=8),
        lambda: Mixture({"a": ShuffleBuffer(Stream(Lane), 16), "b": Stream(Lane)}, {"a": 1, "b": 1}, block=8),
        lambda: ShuffleBuffer(Stream(Lane), 24),
        lambda: ShuffleBuffer(Map(Stream(open_plain), some), 24),
        lambda: Map(ShuffleBuffer(Stream(Lane), 24), add_noise),
        lambda: Map(Map(memory(), double), add_noise),
    ],
)
def test_resume(make: Callable[[], Any]) -> None:
    lanes = {"num_lanes": 4} if hasattr(make(), "open") and not hasattr(make(), "__getitem__") else {"shuffle": True}

    def feed() -> Any:
        return feed_of(make(), num_epochs=2, end="pad", mask_key="mask", **lanes)

    check_resumable(feed, max_steps=14, save_points=[1, 7])


def test_a_map_over_a_mixture_keeps_its_record_ids() -> None:
    mixture = Mixture({"a": memory(), "b": memory()}, {"a": 3, "b": 1}, block=8)
    with feed_of(mixture) as plain, feed_of(Map(mixture, double)) as mapped:
        for step in range(10):
            np.testing.assert_array_equal(plain.record_ids(step), mapped.record_ids(step))
            np.testing.assert_array_equal(2 * np.asarray(next(plain)["x"]), next(mapped)["x"])


def test_records_of_unequal_shape_come_one_by_one() -> None:
    mapped: Any = Map(memory(), lambda record: {"x": np.arange(int(record["x"]))})
    assert [len(record["x"]) for record in mapped.__getitems__([3, 0, 5])] == [3, 0, 5]
    assert len(mapped[7]["x"]) == 7


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda record: next(iter(())), meshfeed.SourceError, "for record 0, raised StopIteration"),
        (lambda record: None, meshfeed.SourceError, "returned None for record 0"),
        (lambda record: record["y"], KeyError, "y"),
    ],
)
def test_errors_of_records_that_come_one_by_one_name_the_record(function: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        meshfeed.sources.Packed(Map(memory(), function), 4)
    assert "record 0" in f"{raised.value} {getattr(raised.value, '__notes__', '')}"


def test_arguments_in_the_other_order_are_named() -> None:
    with pytest.raises(meshfeed.SettingsError, match=r"the other order\. Expected Map\(source, function\)\.$"):
        Map(lambda record: record, memory())  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        meshfeed.SettingsError, match=r"^Map got function=\{'x': .*\.\.\.\. Expected a function"
    ) as raised:
        Map(memory(), {"x": np.arange(1000)})  # pyright: ignore[reportArgumentType]
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("make", [Map, functools.partial(Map, batched=True)])
def test_a_function_of_two_records_is_refused_at_once(make: Any) -> None:
    with pytest.raises(meshfeed.SettingsError, match=r"Map got function=.*\(record, rngg\).*'rngg'.*rng= if it draws"):
        make(memory(), lambda record, rngg: record)
    for function in (
        lambda *records: records[0],
        functools.partial(lambda a, record: record, 1),
        lambda record, *, rng: record,
    ):
        make(memory(), function)


def test_a_changed_function_is_another_source() -> None:
    with feed_of(Map(memory(), double)) as feed:
        state = feed.get_state()
    with feed_of(Map(memory(), lambda record: {"x": record["x"] * 3})) as other:
        with pytest.raises(meshfeed.StateMismatchError, match="content"):
            other.set_state(state)


def failing(record: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("no such field")


def test_errors_of_the_function_are_raised_as_they_are() -> None:
    with pytest.raises(KeyError) as error, feed_of(Map(memory(), failing)) as feed:
        next(feed)
    assert any("record 0" in note for note in error.value.__notes__)
    with pytest.raises(KeyError), feed_of(Map(Stream(open_plain), failing), num_lanes=2) as feed:
        next(feed)
    with pytest.raises(meshfeed.SourceError, match="first dimension must be the"):
        with feed_of(Map(memory(), lambda records: {"x": np.zeros(3)}, batched=True)) as feed:
            next(feed)


def test_masked_values_of_a_batch_are_refused() -> None:
    def masked(records: list[Any]) -> dict[str, Any]:
        return {"x": np.ma.masked_array(np.zeros(len(records)), True)}

    for source in (Map(memory(), masked, batched=True), meshfeed.sources.HostBatches([masked([0] * 8)])):
        with pytest.raises(meshfeed.SourceError, match=r"\['x'\] of the batch is a masked array"):
            with feed_of(source) as feed:
                next(feed)


def test_a_stop_iteration_of_the_function_or_decoder_does_not_end_a_stream() -> None:
    def stop_at_five(record: Any) -> Any:
        if int(record["x"]) == 5:
            raise StopIteration
        return record

    class Decoding(Stream):
        decode = staticmethod(stop_at_five)

    def open_lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
        return iter([{"x": np.int64(i)} for i in range(lane_index, NUM, num_lanes)])

    def stop_in_all(records: list[Any]) -> Any:
        return {"x": np.stack([stop_at_five(record)["x"] for record in records])}

    for source in (
        Map(Stream(open_lane), stop_at_five),
        Map(Stream(open_lane), stop_in_all, batched=True),
        Map(Decoding(open_lane), double),
    ):
        with pytest.raises(SourceError, match=r"of lane 1, raised") as error:
            values(feed_of(source, num_lanes=2))
        assert error.value.lane_index == 1
        assert "StopIteration, which does not end the data" in str(error.value)


def test_the_reader_of_the_source_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Counted(SourceReader):
        def __init__(self, source: Any) -> None:
            made.append(source)
            super().__init__(source)

    monkeypatch.setattr("meshfeed._src.sources.map.SourceReader", Counted)
    drawn: Any = Map(Map(memory(), lambda record, rng: {"x": record["x"] + rng.integers(2)}), double)
    ids = np.arange(4)
    for _ in range(3):
        drawn.read_batch(ids, [np.random.Generator(np.random.Philox(key)) for key in range(4)])
    assert len(made) == 2  # one for each Map


def test_wrong_settings() -> None:
    for arguments in ({"function": 3}, {"function": double, "batched": 1}):
        with pytest.raises(meshfeed.SettingsError):
            Map(memory(), **arguments)  # type: ignore[arg-type]
    batches = meshfeed.sources.HostBatches([{"x": np.zeros(8)}])
    with pytest.raises(meshfeed.SourceError, match="batches of this host"):
        Map(batches, double)
    with pytest.raises(meshfeed.SourceError, match="batches of this host"):
        ShuffleBuffer(batches, 8)
    for size in (1, 0, True, 2.5):
        with pytest.raises(meshfeed.SettingsError, match="size"):
            ShuffleBuffer(Stream(Lane), size)  # type: ignore[arg-type]
    with pytest.raises(meshfeed.SettingsError, match="shuffle=True to the feed"):
        ShuffleBuffer(memory(), 8)
    with pytest.raises(meshfeed.SettingsError, match="shuffle its components"):
        ShuffleBuffer(Mixture({"a": Stream(Lane)}, {"a": 1}), 8)


def test_a_shuffle_buffer_shuffles_within_windows() -> None:
    def order(**settings: Any) -> list[int]:
        return values(feed_of(ShuffleBuffer(Stream(Lane), 32), **{"num_lanes": 2, **settings}))

    usual = order()
    assert sorted(usual) == [*range(NUM)]
    assert order() == usual != order(seed=4)
    lane = [x for start in range(0, NUM, 8) for x in usual[start : start + 4]]
    for number in range(0, len(lane), 16):  # a window of 16 records of lane 0, which has the even ones
        assert sorted(lane[number : number + 16]) == [*range(2 * number, 2 * number + 32, 2)]
    two = order(num_epochs=2)
    assert two[:NUM] == usual
    assert sorted(two[NUM:]) == sorted(usual)
    assert two[NUM:] != usual


def test_a_buffer_of_another_size_is_refused() -> None:
    with feed_of(ShuffleBuffer(Stream(Lane), 32), num_lanes=2) as feed:
        next(feed)
        state = feed.get_state()
    with feed_of(ShuffleBuffer(Stream(Lane), 16), num_lanes=2) as other:
        with pytest.raises(meshfeed.StateMismatchError, match="size"):
            other.set_state(state)


def _first_batch(source: Any, **options: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=4, **options) as feed:
        return jax.tree.map(np.asarray, next(feed))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_lists_of_numbers_become_arrays(stream: bool, batched: bool) -> None:
    records: Any = meshfeed.sources.Memory({"n": np.arange(8)})
    if stream:
        records = meshfeed.sources.Stream(lambda lane_index, num_lanes: ({"n": np.int64(n)} for n in range(8)))

    def one(record: Any) -> Any:
        n = int(record["n"])
        return {"ids": [n, n + 1, n + 2], "in": {"pair": [[n, 0.5]]}, "both": (np.int32(n), np.zeros(2))}

    def many(rows: Any) -> Any:
        found = [one(row) for row in rows]
        return {
            "ids": [row["ids"] for row in found],
            "in": {"pair": [row["in"]["pair"] for row in found]},
            "both": (np.array([row["both"][0] for row in found]), np.stack([row["both"][1] for row in found])),
        }

    source = meshfeed.sources.Map(records, many if batched else one, batched=batched)
    batch = _first_batch(source, num_lanes=1 if stream else None)
    assert batch["ids"].tolist() == [[n, n + 1, n + 2] for n in range(4)]
    assert batch["in"]["pair"].tolist() == [[[n, 0.5]] for n in range(4)]
    assert batch["both"][0].tolist() == [0, 1, 2, 3]
    assert batch["both"][1].shape == (4, 2)


def test_a_list_of_arrays_is_stacked_in_a_batch_and_a_node_in_a_record() -> None:
    records = meshfeed.sources.Memory({"n": np.arange(8)})
    stacked = meshfeed.sources.Map(records, lambda rows: {"x": [np.full(2, row["n"]) for row in rows]}, batched=True)
    assert _first_batch(stacked)["x"].shape == (4, 2)
    nodes = meshfeed.sources.Map(records, lambda row: [np.full(2, row["n"]), np.full(3, row["n"])])
    assert [leaf.shape for leaf in _first_batch(nodes)] == [(4, 2), (4, 3)]


@pytest.mark.parametrize(
    ("function", "batched"),
    [(lambda row: {"x": []}, False), (lambda row: {"x": [[1], [1, 2]]}, False),
     (lambda rows: {"x": [[1] * (i + 1) for i in range(len(rows))]}, True)],
)  # fmt: skip
def test_lists_that_are_no_arrays(function: Any, batched: bool) -> None:
    source = meshfeed.sources.Map(meshfeed.sources.Memory({"n": np.arange(8)}), function, batched=batched)
    with pytest.raises(
        meshfeed.SourceError, match=r"returned a list that is no array: \[.*Pad the list and return numpy"
    ):
        source.read_batch([0, 1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "over",
    [
        lambda source: source,
        lambda source: Map(source, lambda record: record),
        lambda source: ShuffleBuffer(source, 2) if hasattr(source, "open") else Subset(source, slice(None)),
        lambda source: Mixture({"a": source}, {"a": 1}, 8),
    ],
)
def test_empty_lists_of_numbers_below_packed_and_padded(over: Any, stream: bool) -> None:
    records: Any = Memory({"n": np.arange(8)})
    if stream:
        records = Stream(lambda lane_index, num_lanes: ({"n": np.int64(n)} for n in range(8)))
    source = over(Map(records, lambda record: {"tokens": [7] * (int(record["n"]) % 3)}))
    with feed_of(Padded(source, 2), num_lanes=1 if stream else None) as feed:
        tokens = np.asarray(next(feed)["tokens"])
    assert sorted(tokens.tolist()) == [[0, 0]] * 3 + [[7, 0]] * 3 + [[7, 7]] * 2
    assert tokens.dtype == np.int32
    if not stream:
        packed: Any = Packed(source, 8)
        assert packed.read_batch([0])["tokens"].tolist() == [[7] * 7 + [0]]


def test_ids_that_a_mixture_does_not_have_are_not_reported_as_unreadable(caplog: pytest.LogCaptureFixture) -> None:
    few, many = Memory({"x": np.arange(2)}), Memory({"x": np.arange(9)})
    fingerprint = Map(Mixture({"a": few, "b": many}, {"a": 1, "b": 1}, 8), lambda r: {"x": r["x"] + 1}).fingerprint()
    assert not caplog.records
    assert fingerprint["content"] == "bd50075e75846690"  # as in states saved until now


class Texts:
    """Records that only a function turns into arrays, without an identity of their own."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        text = self.texts[record_id]
        return {"text": text, "more": [text.encode(), None, 1.5, {"x": np.arange(3)}]}


def count(record: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.int32(len(record["text"]))}


def test_a_source_of_text_has_an_identity() -> None:
    texts = ["a", "bb", "ccc", "dddd"]
    first = Map(Texts(texts), count).fingerprint()
    assert first == Map(Texts(texts), count).fingerprint()
    assert first != Map(Texts(["x", *texts[1:]]), count).fingerprint(), "of the same length"
    twice = Map(Map(Subset(Texts(texts), slice(3)), lambda record: {"text": record["text"] * 2}), count)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    with meshfeed.Feed(twice, mesh, global_batch_size=3) as feed:
        assert np.asarray(next(feed)["x"]).tolist() == [2, 4, 6]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_a_function_gets_records_as_the_source_gives_them(shuffled: bool, batched: bool) -> None:
    given = {
        "x": 2**62,
        "list": [1, 2],
        "flag": True,
        "text": "a",
        "none": None,
        "array": np.frombuffer(b"ab", np.uint8),
    }
    seen = []

    def look(record: dict[str, Any]) -> dict[str, Any]:
        seen.append({name: type(value) for name, value in record.items()} | {"items": [*map(type, record["list"])]})
        record["array"] += 1  # also of memory that cannot be written
        return {"x": np.array(record["x"] * 8 % 7)}

    def look_at_all(records: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": np.stack([look(record)["x"] for record in records])}

    source: Any = Stream(lambda lane_index, num_lanes: iter([given, given, given]))
    mapped = Map(ShuffleBuffer(source, 2) if shuffled else source, look_at_all if batched else look, batched=batched)
    lane = mapped.open(0, 1)
    assert [int(next(lane)["x"]) for _ in range(3)] == [2**65 % 7] * 3
    expected = {name: type(value) for name, value in given.items()} | {"items": [int, int]}
    assert all(found == expected for found in seen)


def test_text_of_a_hugging_face_stream_reaches_a_function_through_a_shuffle_buffer() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"text": [str(number) for number in range(NUM)]}).to_iterable_dataset()

    def length(record: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.int32(record["text"])}

    for around in (lambda source: source, lambda source: Mixture({"a": source}, {"a": 1}, block=8)):
        mapped = Map(around(ShuffleBuffer(stream, 16)), length)
        assert sorted(values(feed_of(mapped, num_lanes=4))) == list(range(NUM))
        check_resumable(functools.partial(feed_of, mapped, num_lanes=4, prefetch=0), save_points=[1, 2, 7])


def test_text_of_mixed_hugging_face_datasets_reaches_a_function() -> None:
    datasets = pytest.importorskip("datasets")
    several = {name: datasets.Dataset.from_dict({"text": [name, name * 2, name * 3]}) for name in ("a", "bcdef", "g")}
    inner = Mixture({name: several[name] for name in ("a", "bcdef")}, {"a": 1, "bcdef": 1}, block=8, take={"bcdef": 2})
    mixture = Mixture({"inner": inner, "g": several["g"]}, {"inner": 2, "g": 1}, block=9)

    def bytes_of(record: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": np.frombuffer(record["text"].encode(), np.uint8)}

    padded = meshfeed.sources.Padded(Map(mixture, bytes_of), 15)
    counts = Map(padded, lambda record: {"x": record["mask"].sum()})
    assert set(values(feed_of(counts, num_epochs=1, end="pad"))) == {0, 1, 2, 3, 5, 10}
    packed = meshfeed.sources.Packed(Map(mixture, bytes_of), 8, method="fit")
    assert set(packed.read_batch(range(len(packed)))["tokens"].ravel().tolist()) == {0, *b"abcdefg"}


def test_lists_of_fixed_size_of_a_hugging_face_dataset_are_arrays() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Sequence(datasets.Value("uint8"), length=2)})
    dataset = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4], [5, 6]]}, features=features).select([2, 0, 1])
    doubled = meshfeed.sources.Map(dataset, lambda record: {"x": record["x"] * 2})
    batch = doubled.read_batch([0, 2])
    assert batch["x"].dtype == np.uint8
    assert batch["x"].tolist() == [[10, 12], [6, 8]]


def test_an_error_names_the_file(tmp_path: pathlib.Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())

    def fail(record: Any) -> Any:
        assert record["path"] != "b"
        return None if record["path"] == "c" else np.int32(0)

    source: Any = Map(Folder(tmp_path), fail)
    with pytest.raises(AssertionError) as raised:
        source.read_batch([0, 1])
    assert raised.value.__notes__ == [f"while mapping record 1 of {tmp_path / 'b'}"]
    with pytest.raises(SourceError, match=rf"returned None for record 2 of {tmp_path / 'c'}\. Records"):
        source.read_batch([2])

    def fail_at_once(records: Any) -> Any:
        raise ValueError("no image")

    of_all: Any = Map(Folder(tmp_path), fail_at_once, batched=True)
    with pytest.raises(ValueError, match="no image") as at_once:
        of_all.read_batch([1, 2])
    assert at_once.value.__notes__ == [f"while mapping 2 records (first: record 1 of {tmp_path / 'b'})"]


@pytest.mark.parametrize("function", [lambda record: record["x"], lambda record: record.copied])
def test_a_function_of_one_record_that_gets_a_list_of_them(function: Callable[[Any], Any]) -> None:
    source: Any = Map(memory(), function, batched=True)
    with pytest.raises((TypeError, AttributeError)) as raised:
        source.read_batch([0, 1])
    assert raised.value.__notes__[-1] == (
        "batched=True passes a list of records; leave it out for a function that takes a single one"
    )
    one: Any = Map(memory(), lambda record: record + 1)
    with pytest.raises(TypeError) as alone:
        one.read_batch([0, 1])
    assert len(alone.value.__notes__) == 1
