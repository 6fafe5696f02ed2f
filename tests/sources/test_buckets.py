"""Records of unequal length, padded and in buckets, through the feed."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed
from meshfeed.sources import Buckets, Map, Mixture, Packed, Padded, Stream
from meshfeed.testing import check_resumable

RNG = np.random.default_rng(0)
LENGTHS = np.minimum(RNG.lognormal(2, 1, 203).astype(int), 60)
BOUNDARIES = (8, 20, 60)


def record(number: int, length: int) -> dict[str, Any]:
    """Tokens from number * 100 + 1 on, one float per token, and what is of one shape in all records."""
    tokens = number * 100 + 1 + np.arange(length)
    return {"tokens": tokens, "weights": (tokens / 2).astype(np.float32), "id": np.int64(number)}


RECORDS = [record(number, length) for number, length in enumerate(LENGTHS.tolist())]
KEYS = {"key": ("tokens", "weights")}


def feed_of(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    settings = {"global_batch_size": 8, "seed": 3, "end": "pad", "shuffle": True, "mask_key": "real", **settings}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **settings)


def batches_of(feed: Any) -> list[dict[str, np.ndarray]]:
    with feed:
        return [jax.tree.map(np.asarray, batch) for batch in feed]


def check_batch(batch: dict[str, np.ndarray], boundary: int) -> list[int]:
    """Compares a batch with its records padded by hand; returns their numbers."""
    numbers = batch["id"][batch["real"]].tolist()
    for row, number in enumerate(numbers):
        length = min(int(LENGTHS[number]), boundary)
        for name in ("tokens", "weights"):
            wanted = np.zeros(boundary, RECORDS[0][name].dtype)
            wanted[:length] = RECORDS[number][name][:length]
            np.testing.assert_array_equal(batch[name][row], wanted)
        np.testing.assert_array_equal(batch["mask"][row], np.arange(boundary) < length)
    return numbers


def test_padded() -> None:
    numbers = [n for batch in batches_of(feed_of(Padded(RECORDS, 60, **KEYS))) for n in check_batch(batch, 60)]
    assert sorted(numbers) == list(range(203))
    cut = batches_of(feed_of(Padded(RECORDS, 10, **KEYS, long="truncate")))
    assert sorted(n for batch in cut for n in check_batch(batch, 10)) == list(range(203))
    check_resumable(lambda: feed_of(Padded(RECORDS, 60, **KEYS)), save_points=[3])


def test_padded_streams_arrays_and_values() -> None:
    stream = Stream(lambda lane_index, num_lanes: iter(RECORDS[lane_index::num_lanes]))
    found = batches_of(feed_of(Padded(stream, 60, **KEYS), shuffle=False, num_lanes=4))
    numbers = [n for batch in found for n in batch["id"][batch["real"]].tolist()]
    assert sorted(numbers) == list(range(203))
    bare = Padded([np.ones((n, 2), np.float32) for n in (1, 3)], 4, mask_key=None, pad_value=-1)
    first, last = bare[0]["tokens"], bare[1]["tokens"]
    assert (first[:, 0].tolist(), last[:, 1].tolist(), first.dtype) == ([1, -1, -1, -1], [1, 1, 1, -1], np.float32)
    assert list(bare[0]) == ["tokens"]


@pytest.mark.parametrize("shuffle", [False, True, 16])
def test_batches_of_one_bucket(shuffle: Any) -> None:
    source = Buckets(RECORDS, BOUNDARIES, **KEYS)
    found = batches_of(feed_of(source, shuffle=shuffle, num_epochs=2))
    numbers = []
    for batch in found:
        boundary = batch["tokens"].shape[1]
        mine = check_batch(batch, boundary)
        if len(numbers) < 2 * 203 - 3 * 8:  # before the records that fill no batch
            assert set(np.searchsorted(BOUNDARIES, LENGTHS[mine])) == {BOUNDARIES.index(boundary)}
        numbers += mine
    assert sorted(numbers) == sorted([*range(203)] * 2)
    assert {batch["tokens"].shape[1] for batch in found} == set(BOUNDARIES)
    dropped = batches_of(feed_of(source, shuffle=shuffle, num_epochs=2, end="drop", mask_key=None))
    assert len(dropped) == 2 * 203 // 8
    for batch, wanted in zip(dropped, found, strict=False):
        np.testing.assert_array_equal(batch["tokens"], wanted["tokens"])


def test_a_step_compiles_once_per_bucket() -> None:
    traced = []

    @jax.jit
    def step(tokens: jax.Array) -> jax.Array:
        traced.append(tokens.shape)
        return tokens.sum()

    with feed_of(Buckets(RECORDS, BOUNDARIES, **KEYS), num_epochs=3) as feed:
        assert len(feed) == -(-3 * 203 // 8)
        for _ in range(len(feed)):
            spec = feed.element_spec
            batch = next(feed)
            assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batch) == jax.tree.map(
                lambda leaf: (leaf.shape, leaf.dtype), spec
            )
            step(batch["tokens"])
        assert feed.element_spec["tokens"].shape == (8, 60), "at the end, of the longest bucket"
    assert sorted(traced) == [(8, boundary) for boundary in BOUNDARIES]


@pytest.mark.slow
def test_resume_at_many_places() -> None:
    def feed(**settings: Any) -> Any:
        return feed_of(Buckets(RECORDS, BOUNDARIES, **KEYS), num_epochs=2, **settings)

    points = np.unique(np.linspace(1, 2 * 203 // 8, 20).astype(int)).tolist()
    check_resumable(feed, max_steps=60, save_points=points)
    usual = batches_of(feed())
    for settings in ({"num_workers": 2}, {"num_threads": 3}, {"load": "once"}):
        for batch, wanted in zip(batches_of(feed(**settings)), usual, strict=True):
            jax.tree.map(np.testing.assert_array_equal, batch, wanted)


def test_ids_and_what_each_of_many_hosts_would_read() -> None:
    source = Buckets(RECORDS, BOUNDARIES, **KEYS)
    with feed_of(source, global_batch_size=64, end="drop", mask_key=None) as feed:
        for step, batch in enumerate(feed):
            ids = feed.record_ids(step)
            np.testing.assert_array_equal(ids % 203, np.asarray(batch["id"]))
            for host in range(64):  # each alone reads rows of the same shape, also where buckets share a batch
                row = feed.read(ids[host : host + 1])
                np.testing.assert_array_equal(row["tokens"][0], np.asarray(batch["tokens"])[host])
        assert (ids >= 203).any(), "the last batch is shared by buckets"
        with pytest.raises(meshfeed.SourceError, match="record id 900 is not in the source"):
            feed.read([900])


def test_sequence_sharding_and_balance() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    sharding = {name: NamedSharding(mesh, P("data", "seq")) for name in ("tokens", "weights", "mask")}
    sharding["id"] = NamedSharding(mesh, P("data"))
    source = Buckets(RECORDS, BOUNDARIES, **KEYS)
    settings = {"global_batch_size": 8, "shuffle": True, "seed": 3}
    with meshfeed.Feed(source, sharding, **settings) as feed:
        found = [jax.tree.map(np.asarray, batch) for batch in feed]
    for batch, wanted in zip(found, batches_of(feed_of(source, end="drop", mask_key=None)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, wanted)
    with meshfeed.Feed(source, sharding, **settings, balance="tokens") as feed:
        for batch, wanted in zip(feed, found, strict=True):
            np.testing.assert_array_equal(np.sort(np.asarray(batch["id"])), np.sort(wanted["id"]))


def test_mapped_buckets() -> None:
    def shifted(padded: dict[str, Any]) -> dict[str, Any]:
        return {**padded, "tokens": padded["tokens"] + 1}

    source = Buckets(RECORDS, BOUNDARIES, **KEYS)
    for batch, wanted in zip(batches_of(feed_of(Map(source, shifted))), batches_of(feed_of(source)), strict=True):
        real = batch["real"]
        np.testing.assert_array_equal(batch["tokens"][real], wanted["tokens"][real] + 1)


def test_long_records_and_bad_records() -> None:
    with pytest.raises(meshfeed.SourceError, match=r"3 of 5 records are longer than the last boundary, 2; .* has 9"):
        Buckets([np.arange(n) for n in (1, 3, 9, 2, 4)], (1, 2))
    dropped = Buckets([np.arange(n) for n in (1, 3, 9, 2, 4)], (1, 2), long="drop")
    cut = Buckets([np.arange(n) for n in (1, 3, 9, 2, 4)], (1, 2), long="truncate")
    assert (len(dropped), len(cut)) == (2, 5)
    assert repr(cut).endswith("1 of 1, 4 of 2)")
    for source, wanted in ((dropped, [0, 3]), (cut, [0, 1, 2, 3, 4])):
        with feed_of(source, global_batch_size=8) as feed:
            assert sorted((feed.record_ids(0) % 5).tolist()) == wanted
            next(feed)

    class Bad(list[Any]):
        def lengths(self) -> Any:
            return LENGTHS

        def __getitem__(self, number: Any) -> Any:
            if number in (7, 11):
                raise ValueError("damaged")
            return RECORDS[number]

    source = Buckets(Bad(RECORDS), BOUNDARIES, **KEYS)
    found = batches_of(feed_of(source, bad_records=meshfeed.SkipBad(max_fraction=0.5)))
    numbers = [n for batch in found for n in check_batch(batch, batch["tokens"].shape[1])]
    assert len(numbers) == 203
    assert {7, 11}.isdisjoint(numbers)


def test_a_state_of_other_lengths_or_settings_is_refused() -> None:
    source = Buckets(RECORDS, BOUNDARIES, **KEYS)
    with feed_of(source) as feed:
        next(feed)
        state = feed.get_state()
    longer = [*RECORDS[:-1], record(202, int(LENGTHS[-1]) + 1)]
    for other, settings, field in (
        (source, {"global_batch_size": 16}, "buckets.global_batch_size"),
        (source, {"num_epochs": 2}, "num_epochs"),
        (source, {"seed": 4}, "seed"),
        (Buckets(longer, BOUNDARIES, **KEYS), {}, "source"),
        (Buckets(RECORDS, (8, 60), **KEYS), {}, "source.padding.boundaries"),
        (Buckets(RECORDS, BOUNDARIES, **KEYS, pad_value=1), {}, "source.padding"),
    ):
        with feed_of(other, **settings) as feed, pytest.raises(meshfeed.StateMismatchError) as error:
            feed.set_state(state)
        assert field in error.value.field
    with pytest.raises(meshfeed.SettingsError, match="global_batch_size changes between 8 and 16"):
        feed_of(source, global_batch_size=meshfeed.BatchSchedule([(0, 8), (4, 16)]))


def test_pickled_sources_read_the_same() -> None:
    source = Buckets(RECORDS, BOUNDARIES, **KEYS)
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.read_batch([0, 1])["tokens"], source.read_batch([0, 1])["tokens"])
    np.testing.assert_array_equal(source[3]["tokens"], again.read_batch([3])["tokens"][0])


def test_wrong_settings() -> None:
    for make in (lambda **settings: Padded(RECORDS, **{"length": 60, **settings}),
                 lambda **settings: Buckets(RECORDS, **{"boundaries": (60,), **settings})):  # fmt: skip
        for setting, value in {
            "key": (), "mask_key": "tokens", "pad_value": "x", "long": "keep",
        }.items():  # fmt: skip
            with pytest.raises(meshfeed.SettingsError, match=setting) as error:
                make(**{setting: value})
            assert error.value.setting == setting
    for boundaries in ((), (8, 8), (20, 8), (0, 8), 8, (True,)):
        with pytest.raises(meshfeed.SettingsError, match="boundaries"):
            Buckets(RECORDS, boundaries)  # type: ignore[arg-type]
    with pytest.raises(meshfeed.SettingsError, match="length=0"):
        Padded(RECORDS, 0)
    assert np.isnan(Padded([np.zeros(1)], 2, pad_value=np.nan)[0]["tokens"][1])
    with pytest.raises(
        meshfeed.SettingsError, match="pad_value=-1 is not a value of the leaf 'tokens', which is uint16"
    ):
        Padded([np.zeros(3, np.uint16)], 4, pad_value=-1)[0]
    with pytest.raises(meshfeed.SourceError, match="record 0: its leaf 'tokens' is a masked array"):
        Padded([np.ma.masked_equal([1, 2], 1)], 4).read_batch([0])


def test_wrong_records() -> None:
    def padded(*records: Any, **settings: Any) -> Any:
        return Padded(list(records), 4, **settings)[0]

    with pytest.raises(meshfeed.SourceError, match=r"5 entries in the leaf 'tokens', and length is 4"):
        padded(np.arange(5))
    with pytest.raises(meshfeed.SourceError, match=r"has the leaves \['x'\], and not 'tokens'"):
        padded({"x": np.arange(3)})
    with pytest.raises(meshfeed.SourceError, match="the same n for every leaf"):
        padded({"tokens": np.arange(3), "weights": np.arange(2)}, key=("tokens", "weights"))
    with pytest.raises(meshfeed.SourceError, match="Turn text into numbers"):
        padded({"tokens": "text"})
    with pytest.raises(meshfeed.SourceError, match="have the leaf 'mask' already"):
        padded({"tokens": np.arange(3), "mask": 1})
    with pytest.raises(meshfeed.SourceError, match="differ in length only"):
        Padded([np.zeros(3), np.zeros(2, int)], 4).read_batch([0, 1])
    with pytest.raises(meshfeed.SourceError, match=r"record 1: ragged rows: leaf \['x'\]"):
        Padded([{"tokens": np.arange(2), "x": x} for x in (np.zeros(2), np.zeros(3))], 4).read_batch([0, 1])
    with pytest.raises(meshfeed.SourceError, match="Pad the records of streams with Padded"):
        Buckets(Stream(lambda lane_index, num_lanes: iter([])), (8,))
    with pytest.raises(meshfeed.SourceError, match=r"Mixture got 'b' and others .* not grouped alike"):
        Mixture({"a": Buckets(RECORDS, (60,), **KEYS), "b": Buckets(RECORDS, (30, 60), **KEYS)}, {"a": 1, "b": 1})
    with pytest.raises(meshfeed.SourceError, match="kind 'buckets', whose records differ in shape"):
        Packed(Buckets(RECORDS, (60,), **KEYS), 8)


class InFiles:
    """Records of which each has a file, the third too long."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, record_id: int) -> np.ndarray:
        return np.arange(5 if record_id == 2 else 3)

    def file_of(self, record_id: int) -> str:
        return f"part-{record_id}"


def test_errors_name_the_record_and_its_file() -> None:
    message = "record 2 of part-2: it has 5 entries in the leaf 'tokens', and length is 4"
    with pytest.raises(meshfeed.SourceError, match=message) as error:
        Padded(InFiles(), 4).read_batch([3, 2])
    assert error.value.record_id == 2
    with feed_of(Padded(InFiles(), 4)) as feed, pytest.raises(meshfeed.SourceError, match=message):
        next(feed)
    with pytest.raises(meshfeed.SourceError, match=r"record 2 of part-2: it has the leaves .*, and not 'text'"):
        Buckets(Map(InFiles(), lambda record: {"text" if len(record) == 3 else "tokens": record}), (8,), key="text")
    stream = Padded(Stream(lambda lane_index, num_lanes: map(InFiles().__getitem__, range(4))), 4)
    with pytest.raises(meshfeed.SourceError, match="record 2 of lane 0 in epoch 0: it has 5 entries") as error:
        stream.open(0, 1).next_batch(4)
    assert error.value.lane_index == 0


def test_a_record_that_is_no_longer_as_long() -> None:
    records = [np.arange(3), np.arange(5)]
    source = Buckets(records, (4, 8))
    records[1] = np.arange(6)
    with pytest.raises(meshfeed.SourceError, match="record 1: it has 6 entries, and had 5"):
        source.read_batch([1])
