"""``shuffle="shards"`` through the feed: resume, other batch sizes and hosts, refusals."""

from __future__ import annotations

import itertools
import json

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from jax.sharding import AxisType

import meshfeed
from meshfeed import SettingsError, StateMismatchError
from meshfeed.sources import ArrayRecord, DecodeRaw, Map, Memory, Mixture, Subset, Tokens
from meshfeed.testing import check_resumable

SIZES = [7, 12, 1, 0, 9, 15, 4, 10, 11, 3, 8, 8, 5, 2, 13, 6, 12, 9]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    folder, names, record = tmp_path_factory.mktemp("shards"), [], 0
    for number, size in enumerate(SIZES):
        names.append(str(folder / f"{number:02}.array_record"))
        writer = ArrayRecordWriter(names[-1], "group_size:1")
        for record in range(record, record + size):  # noqa: B020 (counts on over the files)
            writer.write(np.array([record, -record], np.int32).tobytes())
        record += bool(size)
        writer.close()
    return names


def make_feed(paths, devices: int = 4, mapped: bool = False, **options) -> meshfeed.Feed:
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    source = ArrayRecord(paths, decode_batch=DecodeRaw(np.int32, (2,), key="x"))
    source = Map(source, lambda record: record) if mapped else source
    return meshfeed.Feed(source, mesh, **{"global_batch_size": 8, "shuffle": "shards", "seed": 3, **options})


def ids_of(feed) -> list[list[int]]:
    return [np.asarray(batch["x"])[:, 0].tolist() for batch in feed]


@pytest.mark.parametrize("options", [{"num_lanes": 2}, {"num_lanes": 4, "num_epochs": 3}])
def test_resumable(paths, options) -> None:
    assert check_resumable(lambda: make_feed(paths, **options), max_steps=30, save_points=[1, 9, 16])


@pytest.mark.slow
def test_workers_read_the_same_and_resume(paths) -> None:
    wanted = ids_of(make_feed(paths))
    with make_feed(paths) as feed:
        for _ in range(9):
            next(feed)
        state = feed.get_state()
    with make_feed(paths, num_workers=1) as feed:
        feed.set_state(state)
        assert ids_of(feed) == wanted[9:]


def test_batches_hold_the_records_that_record_ids_names(paths) -> None:
    with make_feed(paths, num_lanes=4, num_epochs=2, end="pad") as feed:
        planned = [feed.record_ids(step).tolist() for step in range(len(feed))]
        delivered = ids_of(feed)
    total = sum(SIZES)
    assert [batch[: len(ids)] for batch, ids in zip(delivered, planned, strict=True)] == planned
    assert sorted(itertools.chain(*planned)) == sorted([*range(total)] * 2)


def test_a_later_batch_size_neither_loses_nor_repeats(paths) -> None:
    with make_feed(paths, num_lanes=4, end="pad") as feed:
        head = [np.asarray(next(feed)["x"])[:, 0].tolist() for _ in range(5)]
        state = json.loads(json.dumps(feed.get_state()))
    with make_feed(paths, devices=2, global_batch_size=12, end="pad") as feed:  # takes 4 lanes from the state
        feed.set_state(state)
        assert feed.config()["fingerprint"]["num_lanes"] == 4
        tail = [feed.record_ids(step).tolist() for step in range(5, len(feed))]
        assert [batch[: len(ids)] for batch, ids in zip(ids_of(feed), tail, strict=True)] == tail
        assert feed.record_ids(2).tolist() == head[2]
        feed.reset()
        assert feed.config()["fingerprint"]["num_lanes"] == 4
    assert sorted(itertools.chain(*head, *tail)) == [*range(sum(SIZES))]


def test_states_of_other_shards_or_lanes_are_refused_by_field(paths) -> None:
    with make_feed(paths, num_lanes=4) as feed:
        next(feed)
        state = feed.get_state()
    for options, field in (
        ({"num_lanes": 2}, "num_lanes"),
        ({"global_batch_size": 6, "devices": 2}, "num_lanes"),
        ({"shuffle": True}, "shuffle|order"),
        ({"seed": 4}, "seed"),
    ):
        with make_feed(paths, **options) as feed, pytest.raises(StateMismatchError, match=field):
            feed.set_state(state)
    for damaged in (0, -1, "4", 2.0, None):
        changed = json.loads(json.dumps(state))
        changed["fingerprint"]["num_lanes"] = damaged
        with make_feed(paths, num_lanes=4) as feed, pytest.raises(StateMismatchError, match="num_lanes"):
            feed.set_state(changed)


def test_mapped_records_keep_their_shards(paths) -> None:
    with make_feed(paths) as feed, make_feed(paths, mapped=True) as mapped:
        assert ids_of(feed) == ids_of(mapped)


def test_token_files_are_shards(tmp_path) -> None:
    wanted, first = [], 0
    for number, size in enumerate([9, 40, 3, 25, 62, 17]):
        np.arange(first, first + size, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
        wanted.append([*range(first, first + size // 5 * 5, 5)])
        first += size
    source = Tokens(f"{tmp_path}/*.bin", 5, dtype=np.uint16, next_token=False)
    assert source.shard_lengths().tolist() == [len(part) for part in wanted]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def feed() -> meshfeed.Feed:
        return meshfeed.Feed(
            source, mesh, global_batch_size=4, shuffle="shards", num_lanes=2, end="pad", mask_key="real"
        )

    with feed() as opened:
        found = [int(x) for batch in opened for x in np.asarray(batch["tokens"])[np.asarray(batch["real"]), 0]]
    assert sorted(found) == [*itertools.chain(*wanted)]
    assert check_resumable(feed, save_points=[3])
    documents = Tokens.documents([f"{tmp_path}/{n}.bin" for n in (3, 4)], dtype=np.uint16, eod=90)
    assert documents.shard_lengths().tolist() == [1, 2]


def test_what_has_no_shards_is_refused(paths) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    memory, files = Memory({"x": np.zeros((40, 2), np.int32)}), ArrayRecord(paths)
    mixture, mapped = Mixture({"a": files, "b": memory}, {"a": 1, "b": 1}), Map(memory, lambda record: record)
    for source, kind in ((memory, "Memory"), (mixture, "mixture"), (mapped, "map")):
        with pytest.raises(SettingsError, match=rf"shuffle='shards' needs a source whose files.* of kind '{kind}'"):
            meshfeed.Feed(source, mesh, global_batch_size=8, shuffle="shards")
    with pytest.raises(SettingsError, match="num_lanes=3; it must divide every global batch size, here 8"):
        make_feed(paths, num_lanes=3)
    with pytest.raises(
        SettingsError, match="num_lanes=4, but a random-access source has lanes only with shuffle='shards'"
    ):
        make_feed(paths, shuffle=True, num_lanes=4)
    with pytest.raises(SettingsError, match="'shards'"):
        make_feed(paths, shuffle="files")


# ---------------------------------------------------------------------- mixtures


def mixed(paths, nested: bool = False, **options) -> Mixture:
    def files(part):
        return ArrayRecord(part, decode_batch=DecodeRaw(np.int32, (2,), key="x"))

    first = Mixture({"a": files(paths[:9]), "b": Map(files(paths[9:]), negative)}, {"a": 1, "b": 2}, block=9)
    if not nested:
        return first
    stages = [(0, {"in": 2, "c": 1}), (5, {"in": 1, "c": 1})]
    return Mixture({"in": first, "c": Subset(files(paths), slice(3, 90))}, stages, block=12, **options)


def negative(record):
    return {"x": -record["x"]}


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shuffle", ["shards", meshfeed.ShardShuffle(3, affinity=True)])
def test_mixtures_are_resumable(paths, nested, shuffle) -> None:
    def feed() -> meshfeed.Feed:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        return meshfeed.Feed(
            mixed(paths, nested), mesh, global_batch_size=8, shuffle=shuffle, seed=3, num_lanes=4, num_epochs=2
        )

    assert check_resumable(feed, max_steps=60, save_points=[1, 9, 16]) == 5


def test_a_mixture_continues_with_another_batch_size_and_keeps_its_lanes(paths) -> None:
    def feed(size: int, **options) -> meshfeed.Feed:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        return meshfeed.Feed(mixed(paths, True), mesh, global_batch_size=size, shuffle="shards", **options)

    with feed(8, num_lanes=2) as first:
        next(first)
        state = json.loads(json.dumps(first.get_state()))
        wanted = [*np.asarray(next(first)["x"]).reshape(2, 4, 2)[:, :2].reshape(4, 2).tolist()]
    with feed(4) as second:
        second.set_state(state)
        assert np.asarray(next(second)["x"]).tolist() == wanted
    with feed(8, num_lanes=4) as other, pytest.raises(StateMismatchError, match="num_lanes"):
        other.set_state(state)
    with feed(4, seed=1) as other, pytest.raises(StateMismatchError, match="seed"):
        other.set_state(state)


def test_shards_and_its_settings_are_one_order(paths) -> None:
    with make_feed(paths) as feed:
        next(feed)
        state = feed.get_state()
        wanted = ids_of(feed)
    with make_feed(paths, shuffle=meshfeed.ShardShuffle()) as feed:
        feed.set_state(state)
        assert ids_of(feed) == wanted
    with make_feed(paths, shuffle=meshfeed.ShardShuffle(affinity=True)) as feed:
        assert feed.config()["shuffle"] == {"window_shards": 2, "affinity": True}
        with pytest.raises(StateMismatchError, match="'affinity': saved False, current True") as raised:
            feed.set_state(state)
        assert "ShardShuffle(…)" in str(raised.value)
        assert "damaged" not in str(raised.value)
        next(feed)
        state = feed.get_state()
    with make_feed(paths) as feed, pytest.raises(StateMismatchError, match="'affinity': saved True, current False"):
        feed.set_state(state)
    with (
        make_feed(paths, shuffle=True) as feed,
        pytest.raises(StateMismatchError, match="saved 'shards', current True"),
    ):
        feed.set_state(state)
    with pytest.raises(SettingsError, match=r"window_shards=0 \(int\); it takes a number of shards"):
        meshfeed.ShardShuffle(0)
    with pytest.raises(SettingsError, match="affinity=2"):
        meshfeed.ShardShuffle(affinity=2)
