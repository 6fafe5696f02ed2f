"""Views of sources against their definitions in plain Python."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_record_files
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshfeed
from meshfeed import SettingsError, SourceError
from meshfeed._src.base import hooks
from meshfeed._src.reading.records import SourceReader
from meshfeed._src.sources.selection import Ranges
from meshfeed.sources import (
    ArrayRecord,
    Buckets,
    Concat,
    DecodeRaw,
    Map,
    Memory,
    Mixture,
    Packed,
    Padded,
    Sample,
    ShuffleBuffer,
    Stream,
    Subset,
    Zip,
    random_split,
)
from meshfeed.testing import check_resumable


def mesh() -> Any:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def numbers(count: int, first: int = 0) -> Memory:
    return Memory({"x": np.arange(first, first + count)})


def feed_of(source: Any, **keywords: Any) -> meshfeed.Feed:
    return meshfeed.Feed(source, mesh(), **{"global_batch_size": 8, "seed": 3, **keywords})


class Waiting(Memory):
    read_threads = 3


TOKENS = {"tokens": np.arange(32).reshape(8, 4)}
OTHERS = Memory(TOKENS)


@pytest.mark.parametrize(
    "make",
    [
        lambda source: Subset(source, range(3)),
        lambda source: Sample(source, 1),
        lambda source: random_split(source, {"a": 0.5, "b": 0.5})["a"],
        lambda source: Concat([OTHERS, source]),
        lambda source: Zip({"a": source, "b": OTHERS}),
        lambda source: Map(source, dict),
        lambda source: Padded(source, length=4),
        lambda source: Buckets(source, [4, 8]),
        lambda source: Packed(source, 8),
        lambda source: Packed(Mixture({"a": source, "b": OTHERS}, {"a": 1, "b": 1}), 8),
        lambda source: Mixture({"a": source, "b": OTHERS}, {"a": 1, "b": 1}),
        lambda source: Mixture({"a": source, "b": Stream(lambda lane, lanes: iter(()))}, {"a": 1, "b": 1}),
    ],
)
def test_the_threads_that_a_source_asks_for_read_what_is_made_of_it(make: Callable[[Any], Any]) -> None:
    assert hooks.read_threads(make(Waiting(TOKENS))) == 3
    assert hooks.read_threads(make(Memory(TOKENS))) == 1


def test_the_threads_that_a_stream_asks_for_read_it_through_a_shuffle_buffer() -> None:
    class WaitingStream(Stream):
        read_threads = 3

    assert hooks.read_threads(ShuffleBuffer(WaitingStream(lambda lane, lanes: iter(())), 4)) == 3
    assert hooks.read_threads(ShuffleBuffer(Stream(lambda lane, lanes: iter(())), 4)) == 1


class OfText:
    """Its files say that its records have no array form; none may be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, record_id: int) -> Any:
        raise AssertionError(f"record {record_id} was read")

    def check_records(self) -> None:
        raise SourceError("column 'text' holds string")


@pytest.mark.parametrize(
    "make",
    [
        lambda source: Subset(source, range(8)),
        lambda source: Sample(source, 8),
        lambda source: Concat([OTHERS, source]),
        lambda source: Zip({"a": OTHERS, "b": source}),
        lambda source: Subset(Concat([OTHERS, source]), range(8)),
    ],
)
def test_records_without_an_array_form_are_refused_when_a_feed_is_made_over_a_view(make: Callable[[Any], Any]) -> None:
    with pytest.raises(SourceError, match="column 'text' holds string"):
        feed_of(make(OfText()))


def values(source: Any) -> list[int]:
    """The records of a source, by a batch, several and one at a time, which must agree."""
    ids = np.arange(len(source))
    found = SourceReader(source).read(ids)["x"].tolist()
    assert [int(record["x"]) for record in source.__getitems__(ids.tolist())] == found
    assert [int(source[i]["x"]) for i in ids.tolist()] == found
    return found


bounds = st.none() | st.integers(-30, 30)


@given(count=st.integers(1, 20), start=bounds, stop=bounds, step=bounds.filter(lambda step: step != 0))
@settings(max_examples=200, deadline=None)
def test_a_slice_selects_what_it_selects_of_a_list(count: int, start: Any, stop: Any, step: Any) -> None:
    expected = list(range(count))[start:stop:step]
    if not expected:
        with pytest.raises(SourceError, match="selects none of the"):
            Subset(numbers(count), slice(start, stop, step))
        return
    assert values(Subset(numbers(count), slice(start, stop, step))) == expected


# ---------------------------------------------------------------------- random nesting

Made = tuple[Any, list[int], list[int]]
"""A source, the values of its records, and the file of each, if it is made of files."""


@st.composite
def nested(draw: st.DrawFn, depth: int = 4) -> tuple[Callable[[], Any], list[int]]:
    """A function that makes a nested view, and the values of its records by the definitions."""
    kind = draw(st.sampled_from(["slice", "ids", "concat", "zip", "sample", "split", "map"])) if depth else "source"
    if kind == "source":
        count, first = draw(st.integers(1, 12)), draw(st.integers(0, 50))
        return lambda: numbers(count, first), list(range(first, first + count))
    make, found = draw(nested(depth - 1))
    if kind == "slice":
        step = draw(st.sampled_from([1, 2, 3, -1, -2]))
        selected = slice(None, None, step)
        return lambda: Subset(make(), selected), found[selected]
    if kind == "ids":
        ids = draw(st.lists(st.integers(-len(found), len(found) - 1), min_size=1, max_size=12))
        return lambda: Subset(make(), ids), [found[i] for i in ids]
    if kind == "concat":
        other, more = draw(nested(depth - 1))
        return lambda: Concat([make(), other()]), found + more
    if kind == "zip":
        return lambda: Map(Zip({"a": make(), "b": make()}), _both), found
    if kind == "sample":
        count = draw(st.integers(1, 30))
        times, more = divmod(count, len(found))
        rest = Sample(numbers(len(found)), count)
        chosen = [int(rest[i]["x"]) for i in range(times * len(found), count)]
        assert chosen == sorted(set(chosen))
        assert len(chosen) == more
        return lambda: Sample(make(), count), found * times + [found[i] for i in chosen]
    if kind == "split":
        parts = random_split(numbers(len(found)), {"a": 1.0})
        assert values(parts["a"]) == list(range(len(found)))
        return lambda: random_split(make(), {"a": 1.0})["a"], found
    return lambda: Map(make(), _plus_one), [value + 1 for value in found]


def _both(record: dict[str, Any]) -> dict[str, Any]:
    assert record["a"]["x"] == record["b"]["x"]
    return {"x": record["a"]["x"]}


def _plus_one(record: dict[str, Any]) -> dict[str, Any]:
    return {"x": record["x"] + 1}


@given(made=nested(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_nested_views_follow_their_definitions(made: tuple[Callable[[], Any], list[int]], data: st.DataObject) -> None:
    make, expected = made
    source = make()
    assert len(source) == len(expected)
    assert values(source) == expected
    ids = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=9))
    assert SourceReader(source).read(np.array(ids))["x"].tolist() == [expected[i] for i in ids]
    assert make().fingerprint() == source.fingerprint()


@given(made=nested(3), shuffle=st.booleans(), size=st.sampled_from([8, 16]), num_epochs=st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_a_feed_gives_every_record_of_a_view_once_per_epoch(
    made: Any, shuffle: bool, size: int, num_epochs: int
) -> None:
    make, expected = made
    with feed_of(
        make(), shuffle=shuffle, end="pad", mask_key="mask", global_batch_size=size, num_epochs=num_epochs
    ) as feed:
        found = [value for batch in feed for value in np.asarray(batch["x"])[np.asarray(batch["mask"])].tolist()]
    if not shuffle:
        assert found == expected * num_epochs
    for epoch in range(num_epochs):
        assert sorted(found[epoch * len(expected) :][: len(expected)]) == sorted(expected)


# ---------------------------------------------------------------------- splits and samples


@given(
    count=st.integers(1, 200),
    fractions=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    left_out=st.integers(0, 5),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=150, deadline=None)
def test_parts_are_disjoint_in_order_and_of_their_sizes(count: int, fractions: Any, left_out: int, seed: int) -> None:
    whole = sum(fractions) + left_out
    named = {f"part{i}": fraction / whole for i, fraction in enumerate(fractions)}
    sizes = [round(fraction * count) for fraction in named.values()]
    if not left_out:
        sizes[-1] = count - sum(sizes[:-1])
    if sum(sizes) > count or min(sizes) < 1:
        return
    parts = {name: values(part) for name, part in random_split(numbers(count), named, seed=seed).items()}
    assert [len(part) for part in parts.values()] == sizes
    assert all(part == sorted(part) for part in parts.values())
    together = list(itertools.chain(*parts.values()))
    assert len(set(together)) == len(together) == sum(sizes)
    renamed = random_split(numbers(count), dict(zip("abcd", named.values(), strict=False)), seed=seed)
    assert [values(part) for part in renamed.values()] == list(parts.values())
    one, other = (
        next(iter(split.values())).fingerprint() for split in (renamed, random_split(numbers(count), named, seed=seed))
    )
    assert one == other


def test_a_split_is_random_and_depends_on_the_seed() -> None:
    parts = [values(random_split(numbers(1000), {"a": 0.3}, seed=seed)["a"]) for seed in range(40)]
    assert len(set(map(tuple, parts))) == 40
    counts = np.bincount(np.concatenate(parts), minlength=1000)
    # Binomial(40, 0.3): 6 standard deviations are 17.4.
    assert counts.sum() == 12_000
    assert counts.max() <= 30
    assert abs(np.mean([np.mean(part) for part in parts]) - 499.5) < 15


def test_shards_go_whole_to_one_part(tmp_path: Path) -> None:
    lengths = [7, 1, 5, 9, 4, 6, 3, 8]
    source = record_files(tmp_path, lengths)
    ends = np.cumsum(lengths)
    parts = random_split(source, {"train": 0.6, "test": 0.4}, by="shard", seed=5)
    shards = {name: set(np.searchsorted(ends, values(part), side="right").tolist()) for name, part in parts.items()}
    assert not shards["train"] & shards["test"]
    assert shards["train"] | shards["test"] == set(range(8))
    assert all(sum(lengths[shard] for shard in shards[name]) == len(part) for name, part in parts.items())
    assert abs(len(parts["train"]) - 0.6 * sum(lengths)) <= max(lengths)
    # As an order by shards sees them: the shards of the other part are empty.
    for name, part in parts.items():
        assert part.shard_lengths().tolist() == [lengths[i] if i in shards[name] else 0 for i in range(8)]
        assert values(part) == sorted(values(part))


def test_a_sample_repeats_evenly() -> None:
    found = values(Sample(numbers(7), 25, seed=4))
    assert found[:21] == [*range(7)] * 3
    assert found[21:] == sorted(set(found[21:]))
    assert set(values(Sample(numbers(7), 3))) <= set(range(7))
    rests = {tuple(values(Sample(numbers(50), 10, seed=seed))) for seed in range(20)}
    assert len(rests) == 20


def test_a_component_repeats_by_a_fraction() -> None:
    mixed = Mixture({"a": numbers(10), "b": numbers(10, 100)}, {"a": 3, "b": 1}, 4, take={"a": 8}, repeat={"a": 1.5})
    assert len(mixed) == 12 + 10
    with feed_of(mixed, global_batch_size=8, num_epochs=1) as feed:
        found = [value for batch in feed for value in np.asarray(batch["x"]).tolist()]
    of_a = [value for value in found[:16] if value < 100]
    assert of_a[:8] == list(range(8))
    assert of_a[8:] == sorted(set(of_a[8:]))
    for wrong, message in (
        (0.0, "or a float that gives"),
        (float("nan"), "or a float"),
        (-1, "or a float"),
        ("2", "or a"),
    ):
        with pytest.raises(SettingsError, match=message):
            Mixture({"a": numbers(10)}, {"a": 1}, repeat={"a": wrong})
    stream = Stream(lambda lane_index, num_lanes: iter([]))
    with pytest.raises(SettingsError, match=r"repeat\['a'\]=1.5; it takes an int of at least 1\."):
        Mixture({"a": stream}, {"a": 1}, repeat={"a": 1.5})


# ---------------------------------------------------------------------- what a view keeps of its source


def record_files(folder: Path, lengths: list[int], decode: bool = True) -> ArrayRecord:
    first = np.cumsum([0, *lengths[:-1]]).tolist()
    for number, (start, length) in enumerate(zip(first, lengths, strict=True)):
        records = [np.int64(value).tobytes() for value in range(start, start + length)]
        array_record_files.write(folder / f"{number:02}.array_record", records)
    raw = DecodeRaw(np.int64, (), key="x") if decode else None
    return ArrayRecord(sorted(map(str, folder.glob("*.array_record"))), decode_batch=raw)


def test_views_read_by_the_calls_of_their_source(tmp_path: Path) -> None:
    source = record_files(tmp_path, [5, 6, 7])
    view = Subset(source, slice(2, None, 3))
    assert values(view) == list(range(18))[2::3]
    rows = view.read_rows(np.array([1, 0]))
    assert rows.view(np.int64).ravel().tolist() == [5, 2]
    assert view.file_of(0).endswith("00.array_record")
    assert view.file_of(5).endswith("02.array_record")
    assert view.file_names() == source.file_names()
    assert view.shard_lengths().tolist() == [1, 2, 3]
    assert hooks.find(view, hooks.KnowsLengths) is None
    assert hooks.find(Subset(numbers(5), slice(2)), hooks.RawReader) is None
    with pytest.raises(IndexError, match="record id 6 is out of range: the view has 6 records"):
        view.read_raw(np.array([6]))
    assert values(pickle.loads(pickle.dumps(view))) == values(view)


def test_a_view_of_a_mixture_can_be_pickled_for_workers() -> None:
    view = Subset(Mixture({"a": numbers(10), "b": numbers(10, 100)}, {"a": 3, "b": 1}, 4), slice(1, 9))
    found = values(view)  # also fills the caches of its order, which a copy does without
    assert values(pickle.loads(pickle.dumps(view))) == found


def test_alike_sources_and_views_are_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = record_files(tmp_path / "a", [4, 3]), record_files(tmp_path / "b", [5])
    b.decode_batch = a.decode_batch
    both = Concat([a, b])
    assert type(both) is ArrayRecord
    assert values(both) == [*range(7), *range(5)]
    part = Subset(a, slice(None, None, -2)).concatenate([Sample(b, 7), Subset(a, [3])])
    assert part is not None
    assert values(part) == [6, 4, 2, 0, *values(Sample(b, 7)), 3]
    mixed = Mixture({"a": Subset(a, slice(2, 6)), "b": Subset(b, slice(1, None))}, {"a": 1, "b": 1})
    with feed_of(mixed, global_batch_size=8) as feed:
        assert sorted(np.asarray(next(feed)["x"]).tolist()) == sorted([2, 3, 4, 5, 1, 2, 3, 4])
        assert len(mixed._group_readers) == 1


def test_concat_of_unlike_sources_is_read_by_source(tmp_path: Path) -> None:
    source = record_files(tmp_path, [3, 2])
    both = Concat([source, Memory({"x": np.arange(100, 104)}), [{"x": np.int64(7)}]])
    assert values(both) == [*range(5), *range(100, 104), 7]
    assert both.file_of(3) == f"source '0', {tmp_path}/01.array_record"
    assert both.file_of(9) == "source '2'"
    assert hooks.find(both, hooks.Sharded) is None
    with pytest.raises(SourceError, match=r"sources '1' and '0' have unlike records: .*float32"):
        SourceReader(Concat([source, Memory({"x": np.zeros(3, np.float32)})])).read(np.array([0, 6]))


def test_columns_are_read_through_views() -> None:
    array = np.arange(24 * 8).reshape(24, 8)
    source = Memory({"a": array, "b": array[:, 0]})
    sharding = NamedSharding(
        jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("x", "y")
    )
    for view, expected in (
        (Subset(source, slice(None, None, -1)), array[::-1]),
        (Concat([source, Subset(source, [1, 1])]), np.concatenate([array, array[[1, 1]]])),
        (Zip({"s": source, "t": source}), array),
    ):
        with meshfeed.Feed(view, sharding, global_batch_size=8) as feed:
            found = np.concatenate([np.asarray(jax.tree.leaves(batch)[0]) for batch in feed])
        assert (found == expected[: len(found)]).all()
        assert len(found) == len(expected) // 8 * 8
        part = view.read_batch(np.array([1, 0]), columns={_path(view): (slice(2, 4),)})
        assert (jax.tree.leaves(part)[0] == expected[[1, 0], 2:4]).all()


def _path(view: Any) -> str:
    return "['s']['a']" if isinstance(view, Zip) else "['a']"


def documents(count: int = 30, first: int = 0) -> Any:
    class Documents:
        def __init__(self) -> None:
            self.made = [np.arange(100 * i, 100 * i + 1 + i % 5, dtype=np.int32) for i in range(first, first + count)]

        def __len__(self) -> int:
            return count

        def __getitem__(self, record_id: int) -> dict[str, Any]:
            return {"tokens": self.made[record_id]}

        def lengths(self) -> np.ndarray:
            return np.array([len(document) for document in self.made])

        def read_slices(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
            parts = [self.made[i][a : a + n] for i, a, n in zip(ids, starts, lengths, strict=True)]
            return {"tokens": np.concatenate(parts)}

        def fingerprint(self) -> Any:
            return {"documents": [first, count]}

    return Documents()


def test_documents_are_packed_and_padded_through_views() -> None:
    source = documents()
    view = Concat([Subset(source, slice(3, 20)), Subset(documents(10, 50), [7, 2, 2])])
    expected = [*source.made[3:20], *(documents(10, 50).made[i] for i in (7, 2, 2))]
    assert view.lengths().tolist() == [len(document) for document in expected]
    packed = Packed(view, 8)
    tokens = packed.read_batch(np.arange(len(packed)))
    assert tokens["tokens"][tokens["segment_ids"] > 0].tolist() == np.concatenate(expected).tolist()
    slices = view.read_slices(np.array([18, 0, 19]), np.array([1, 0, 0]), np.array([1, 2, 3]))["tokens"]
    assert slices.tolist() == [*expected[18][1:2], *expected[0][:2], *expected[19][:3]]
    padded = Padded(view, 6)
    assert padded[18]["mask"].sum() == len(expected[18])
    assert len(Buckets(view, (3, 6))) == len(expected)
    assert Sample(source, 65).lengths().tolist()[:60] == source.lengths().tolist() * 2
    assert Zip({"a": source, "b": Subset(source, slice(None))}).lengths().tolist() == source.lengths().tolist()


def test_lengths_of_other_integer_types_are_joined() -> None:
    """NumPy makes float64 of uint64 beside int64."""
    source, other = documents(), documents(10, 50)
    other.lengths = lambda: np.array([len(document) for document in other.made], np.uint64)
    view = Concat([source, other])
    assert view.lengths().tolist() == [len(document) for document in [*source.made, *other.made]]
    assert len(Packed(view, 8)) > 0


@given(parts=st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=6))
@settings(deadline=None)
def test_ranges_select_what_their_definition_says(parts: list[tuple[int, int, int]]) -> None:
    """Of files with some records before, in, and after a range."""
    lengths = np.array([sum(part) for part in parts])
    firsts = np.cumsum(lengths) - lengths
    starts = firsts + [before for before, _, _ in parts]
    stops = starts + [within for _, within, _ in parts]
    ranges = Ranges(starts, stops)
    expected = [number for start, stop in zip(starts, stops, strict=True) for number in range(start, stop)]
    assert len(ranges) == len(expected)
    assert ranges.ids(np.arange(len(expected))).tolist() == expected
    assert ranges.counts(firsts + lengths).tolist() == [within for _, within, _ in parts]


def test_random_functions_below_a_view_get_the_numbers_of_their_record() -> None:
    def noise(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": record["x"], "noise": rng.integers(0, 2**31)}

    source = Map(numbers(16), noise)
    assert Subset(source, slice(2)).wants_rng
    with feed_of(Zip({"a": source, "b": source}), global_batch_size=16) as feed:
        batch = next(feed)
    assert not (np.asarray(batch["a"]["noise"]) == np.asarray(batch["b"]["noise"])).any()
    with feed_of(Concat([Subset(source, [i]) for i in range(16)]), global_batch_size=16) as feed:
        one = np.asarray(next(feed)["noise"])
    with feed_of(Subset(source, slice(None)), global_batch_size=16) as feed:
        assert (np.asarray(next(feed)["noise"]) == one).all()


@pytest.mark.parametrize("shuffle", [True, 3, "shards"])
def test_views_resume_exactly(shuffle: Any, tmp_path: Path) -> None:
    source = record_files(tmp_path, [5, 6, 7, 8, 3, 9])
    train = random_split(source, {"train": 0.8, "test": 0.2}, seed=1)["train"]
    extra = Concat([train, Subset(source, slice(0, 10, 2))]) if shuffle == "shards" else Sample(train, 50)

    def feed() -> Any:
        return feed_of(extra, shuffle=shuffle, num_epochs=2)

    assert check_resumable(feed, save_points=[2, 5]) == 4


def test_an_order_by_shards_of_a_view_covers_its_records(tmp_path: Path) -> None:
    source = record_files(tmp_path, [40, 50, 60, 30])
    view = Subset(source, slice(5, 170, 3))
    with feed_of(view, shuffle="shards", num_lanes=2, end="pad", mask_key="m") as feed:
        found = [v for b in feed for v in np.asarray(b["x"])[np.asarray(b["m"])].tolist()]
    assert sorted(found) == list(range(5, 170, 3))
    assert found != sorted(found)


def test_another_selection_is_another_source() -> None:
    seen = [
        Subset(numbers(9), slice(0, 5)),
        Subset(numbers(9), slice(0, 6)),
        Subset(numbers(9), [0, 1, 2, 3, 4]),
        Subset(numbers(9), [0, 1, 2, 4, 3]),
        Sample(numbers(9), 5),
        Sample(numbers(9), 5, seed=1),
        Concat([numbers(4), [{"x": 1}]]),
        Zip({"x": numbers(4)}),
        Zip({"y": numbers(4)}),
    ]
    prints = [repr(source.fingerprint()) for source in seen]
    assert len(set(prints)) == len(prints)
    feed = feed_of(seen[0], global_batch_size=8, num_epochs=None)
    next(feed)
    with pytest.raises(meshfeed.StateMismatchError, match="source"):
        feed_of(seen[3], global_batch_size=8, num_epochs=None).set_state(feed.get_state())


class Reused:
    """Refills one buffer for every record."""

    def __init__(self) -> None:
        self.buffer = np.zeros(2, np.int64)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        self.buffer[:] = record_id
        return {"x": self.buffer}

    def fingerprint(self) -> str:
        return "reused"


def test_a_source_may_reuse_the_memory_of_its_records() -> None:
    for source in (
        Subset(Reused(), slice(3, 40)),
        Map(Subset(Reused(), slice(3, 40)), lambda record: record),
        Map(Zip({"a": Subset(Reused(), slice(3, 40))}), lambda record: record["a"]),
        Concat([Subset(Reused(), slice(3, 20)), Subset(Reused(), slice(20, 40))]),
    ):
        with feed_of(source) as feed:
            assert np.asarray(next(feed)["x"])[:, 0].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert [int(record["x"][0]) for record in Concat([Reused(), Reused()]).__getitems__([1, 41, 2])] == [1, 1, 2]


def test_the_numbers_of_a_zip_do_not_depend_on_the_order_of_its_dict() -> None:
    def noise(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"noise": rng.integers(0, 2**31)}

    source = Map(numbers(16), noise)
    found = []
    for names in ("ab", "ba"):
        with feed_of(Zip(dict.fromkeys(names, source)), global_batch_size=16) as feed:
            found.append(np.asarray(next(feed)["a"]["noise"]).tolist())
    assert found[0] == found[1]


def test_samples_are_read_by_shards_file_after_file(tmp_path: Path) -> None:
    source = record_files(tmp_path, [40, 50, 60, 30])
    view = Sample(source, 400)
    assert view.shard_lengths()[:8].tolist() == [40, 50, 60, 30] * 2
    assert view.shard_lengths().sum() == 400
    with feed_of(view, shuffle="shards", num_lanes=2) as feed:
        found = [value for batch in feed for value in np.asarray(batch["x"]).tolist()]
    assert sorted(found) == sorted(values(view))
    with pytest.raises(SourceError, match="got a Sample, which has records of a file several times"):
        random_split(view, {"a": 0.5}, by="shard")


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Subset(numbers(5), [1, 5]), SettingsError, "indices has 5, which is not in the source; its 5 records"),
        (lambda: Subset(numbers(5), [True, False]), SettingsError, r"indices is bool of shape \(2,\); .*flatnonzero"),
        (lambda: Subset(numbers(5), [0.5]), SettingsError, "indices is float64"),
        (
            lambda: Subset(numbers(5), np.array([2**64 - 1], np.uint64)),
            SettingsError,
            "18446744073709551615, which is not",
        ),
        (lambda: Sample(numbers(5), 2**63), SettingsError, "at most 2"),
        (lambda: Subset(numbers(5), slice("a")), SettingsError, r"indices=slice\(None, 'a', None\)"),
        (lambda: Subset(numbers(5), slice(0, 5, 0)), SettingsError, "slice step cannot be zero"),
        (lambda: Subset(numbers(5), []), SourceError, "Subset selects none of the 5 records"),
        (lambda: Subset(Stream(lambda lane_index, num_lanes: iter([])), slice(2)), SourceError, "read in order"),
        (
            lambda: Subset(Mixture({"a": numbers(4)}, [(0, {"a": 1}), (5, {"a": 2})]), slice(2)),
            SettingsError,
            r"weights of the mixture change at step 5, .* Mix last, as in Mixture\({name: Packed\(…\)}, weights=…\)",
        ),
        (lambda: Concat([]), SourceError, r"Concat got \[\]\. Expected a list of at least one source"),
        (lambda: Zip({}), SourceError, "Expected a dict of at least one source"),
        (
            lambda: Zip({"a": numbers(4), "b": numbers(5)}),
            SourceError,
            "the sources of Zip differ in length: 'a' has 4, 'b' has 5",
        ),
        (lambda: Sample(numbers(4), 0), SettingsError, "num_records=0; it takes an int of at least 1"),
        (lambda: Sample(numbers(4), 4, seed=-1), SettingsError, "seed=-1; it takes"),
        (lambda: random_split(numbers(4), {"a": 0.7, "b": 0.4}), SettingsError, "sum to 1.1"),
        (lambda: random_split(numbers(4), {"a": 0.1}), SettingsError, "leaves no record for 'a': .* 4 records"),
        (lambda: random_split(numbers(4), {"a": 0}), SettingsError, "fractions has 'a': 0; it takes"),
        (lambda: random_split(numbers(4), [0.5]), SettingsError, r"fractions=\[0.5\]; it takes"),
        (lambda: random_split(numbers(4), {"a": 0.5}, by="file"), SettingsError, "by='file'; it takes"),
        (lambda: random_split(numbers(4), {"a": 0.5}, by="shard"), SourceError, "records are not in files"),
        (
            lambda: feed_of(Subset(numbers(20), slice(None, None, -1)), shuffle="shards"),
            SettingsError,
            "shuffle='shards' needs a source whose files",
        ),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


class CountsLookUps(Memory):
    """Records in files, which counts how often it is asked for their lengths."""

    def __init__(self) -> None:
        super().__init__({"x": np.arange(12)})
        self.asked = 0

    def shard_lengths(self) -> np.ndarray:
        self.asked += 1
        return np.array([4, 8])

    def lengths(self) -> np.ndarray:
        self.asked += 1
        return np.arange(12)


@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (lambda source: Subset(source, slice(0, None, 2)), "shard_lengths"),
        (lambda source: Subset(source, slice(None, None, -1)), "shard_lengths"),
        (lambda source: Mixture({"a": source, "b": Memory({"x": np.arange(3)})}, {"a": 1, "b": 1}), "shard_lengths"),
        (lambda source: Mixture({"a": source}, {"a": 1}), "shard_lengths"),
        (lambda source: Zip({"a": source, "b": source}), "lengths"),
    ],
)
def test_a_look_up_of_a_hook_computes_once(make: Callable[[Any], Any], hook: str) -> None:
    source = CountsLookUps()
    view = make(source)
    found = [getattr(view, hook, None) for _ in range(3)]
    asked = source.asked
    for lengths in found:
        assert lengths is None or len(lengths()) in (2, 12)
        assert hasattr(view, hook) == (lengths is not None)
    assert source.asked <= max(asked, 2)
