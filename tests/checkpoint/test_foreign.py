"""Positions that Grain and MaxText saved are continued exactly, or refused."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from checkpoint_feeds import CountingFeed

import meshfeed
from meshfeed import CheckpointError
from meshfeed.checkpoint import convert_state

grain = pytest.importorskip("grain")
BATCH = 16


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def dataset():
    return grain.MapDataset.source(np.arange(400)).shuffle(seed=3).map(lambda x: {"x": np.int32(x)})


def write(directory, iterators, count="2"):
    for host, iterator in enumerate(iterators):
        state = iterator.get_state()
        text = state.decode() if isinstance(state, bytes) else json.dumps(state)
        (directory / f"process_{host}-of-{count}.json").write_text(text)


def ids(batch):
    return sorted(np.asarray(batch["x"]).tolist())


@pytest.mark.parametrize("count", ["2", "2.0"])
@pytest.mark.parametrize("batched_first", [False, True])
def test_random_access_goes_on_with_the_next_records(tmp_path, mesh, count, batched_first):
    def host(index):
        shard = dataset()[index::2]
        return iter(shard.batch(8).to_iter_dataset() if batched_first else shard.to_iter_dataset().batch(8))

    hosts = [host(0), host(1)]
    for _ in range(5):
        for iterator in hosts:
            next(iterator)
    write(tmp_path, hosts, count)
    with meshfeed.MultiHostDataLoadIterator(dataset(), mesh, global_batch_size=BATCH) as feed:
        feed.set_state(convert_state(tmp_path, feed, step=5))
        for _ in range(3):
            assert ids(next(feed)) == sorted(np.concatenate([next(iterator)["x"] for iterator in hosts]).tolist())


def test_an_elastic_state(tmp_path, mesh):
    elastic = iter(grain.experimental.ElasticIterator(dataset(), BATCH, grain.sharding.ShardOptions(0, 1)))
    for _ in range(3):
        next(elastic)
    (tmp_path / "process_0.json").write_text(json.dumps(elastic.get_state()))
    with meshfeed.MultiHostDataLoadIterator(dataset(), mesh, global_batch_size=BATCH) as feed:
        feed.set_state(convert_state(tmp_path, feed))
        assert feed.step == 3
        assert ids(next(feed)) == sorted(next(elastic)["x"].tolist())


def test_lanes_as_many_as_hosts(tmp_path, mesh):
    def lane(index, count):
        shard = grain.MapDataset.source(np.arange(400)).shuffle(seed=3)[index::count]
        return iter(shard.map(lambda x: {"x": np.int32(x)}).to_iter_dataset().filter(lambda r: r["x"] % 3 != 0))

    hosts = [lane(0, 2), lane(1, 2)]
    for iterator in hosts:
        for _ in range(5 * 8):
            next(iterator)
    write(tmp_path, hosts)
    want = [int(next(iterator)["x"]) for iterator in hosts for _ in range(8)]
    source = meshfeed.sources.Stream(lane)
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=BATCH, num_lanes=2) as feed:
        feed.set_state(convert_state(tmp_path, feed, step=5))
        assert np.asarray(next(feed)["x"]).tolist() == want
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=BATCH, num_lanes=4) as feed:
        with pytest.raises(CheckpointError, match="num_lanes=2"):
            convert_state(tmp_path, feed, step=5)


def loader(shuffle):
    return iter(
        grain.DataLoader(
            data_source=np.arange(64),
            sampler=grain.samplers.IndexSampler(64, shuffle=shuffle, num_epochs=1, seed=0),
            operations=[grain.transforms.Batch(4)],
        )
    )


def test_a_loader_is_continued_in_order_only(tmp_path):
    feed = CountingFeed()
    for shuffle in (False, True):
        iterator = loader(shuffle)
        next(iterator)
        write(tmp_path, [iterator], "1")
        if shuffle:
            with pytest.raises(CheckpointError, match="sampler"):
                convert_state(tmp_path, feed)
        else:
            assert convert_state(tmp_path, feed)["position"] == 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no process_"),
        ({"process_0-of-2.json": '{"next_index": 4}'}, r"hosts \[1\] of 2 are missing"),
        ({"process_0-of-1.json": '{"next_in'}, "not JSON"),
        ({"process_0-of-2.json": '{"next_index": 4}', "process_1-of-2.json": '{"next_index": 8}'}, "different places"),
        ({"process_0-of-1.json": '{"parent": {"next_index": 4}, "buffer": []}'}, "more than a position"),
        ({"process_0-of-1.json": '{"next_index": 3}'}, "whole batches"),
        ({"process_0-of-1.json": "{}", "process_0-of-2.json": "{}", "process_1-of-2.json": "{}"}, "different numbers"),
    ],
)
def test_what_cannot_be_exact_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        convert_state(tmp_path, CountingFeed())
