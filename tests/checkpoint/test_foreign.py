"""Positions that Grain and MaxText saved are continued exactly, or refused."""

from __future__ import annotations

import json

import absl.flags
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


def loader(shuffle, *, hosts=1, host=0, workers=0):
    return iter(
        grain.DataLoader(
            data_source=np.arange(64),
            sampler=grain.samplers.IndexSampler(
                64, grain.sharding.ShardOptions(host, hosts), shuffle=shuffle, num_epochs=1, seed=0
            ),
            operations=[grain.transforms.Batch(4)],
            worker_count=workers,
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
                convert_state(tmp_path, feed, step=1)
        else:
            assert convert_state(tmp_path, feed, step=1)["position"] == 4


def test_loaders_of_several_hosts_have_read_parts_of_their_own(tmp_path):
    hosts = [loader(False, hosts=2, host=host) for host in range(2)]
    assert [next(iterator).tolist() for iterator in hosts] == [[0, 1, 2, 3], [32, 33, 34, 35]]
    write(tmp_path, hosts)
    with pytest.raises(CheckpointError, match="a part of its own"):
        convert_state(tmp_path, CountingFeed(batch=8), step=1)


@pytest.mark.parametrize(("last_seen", "step"), [({"0": 4, "1": -1}, 1), ({"0": 12, "1": 5}, 3)])
def test_a_loader_whose_workers_are_in_the_middle_of_a_turn(tmp_path, last_seen, step):
    state = {"last_seen_indices": last_seen, "worker_count": 2, "sampler": "SequentialSampler(num_records=64)"}
    (tmp_path / "process_0-of-1.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="middle of a round"):
        convert_state(tmp_path, CountingFeed(batch=3), step=step)


def test_a_loader_with_workers_after_whole_turns(tmp_path):
    state = {"last_seen_indices": {"0": 6, "1": 7}, "worker_count": 2, "sampler": "SequentialSampler(num_records=64)"}
    (tmp_path / "process_0-of-1.json").write_text(json.dumps(state))
    assert convert_state(tmp_path, CountingFeed(batch=4), step=2)["position"] == 8


def feed_over(source, mesh, size=BATCH, **settings):
    return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=size, **settings)


def after(num_batches, batches):
    iterator = iter(batches)
    for _ in range(num_batches):
        next(iterator)
    return iterator


@pytest.mark.parametrize("batched_first", [False, True])
def test_an_index_alone_is_no_position(tmp_path, mesh, batched_first):
    records = grain.MapDataset.source(np.arange(400)).map(lambda x: {"x": np.int32(x)})
    batches = records.batch(8).to_iter_dataset() if batched_first else records.to_iter_dataset().batch(8)
    iterator = after(8, batches)
    write(tmp_path, [iterator], "1")
    with feed_over(records, mesh, 8) as feed:
        with pytest.raises(CheckpointError, match="whether it counts records or batches"):
            convert_state(tmp_path, feed)
        with pytest.raises(CheckpointError, match="Pass the global_batch_size and step of that run"):
            convert_state(tmp_path, feed, step=7)
        feed.set_state(convert_state(tmp_path, feed, step=8))
        assert (feed.step, feed.position) == (8, 64)
        assert np.asarray(next(feed)["x"]).tolist() == next(iterator)["x"].tolist()


def test_a_filter_moves_the_index_further_than_the_batches(tmp_path, mesh):
    records = grain.MapDataset.source(np.arange(400)).map(lambda x: {"x": np.int32(x)})
    write(tmp_path, [after(4, records.to_iter_dataset().filter(lambda r: r["x"] % 2 == 0).batch(8))], "1")
    with feed_over(records, mesh, 8) as feed, pytest.raises(CheckpointError, match="a pipeline that filters"):
        convert_state(tmp_path, feed, step=4)


def test_epochs_that_grain_shuffles_anew(tmp_path, mesh):
    def pipeline(dataset):
        return dataset.map(lambda x: {"x": np.int32(x)})

    shuffled = grain.MapDataset.source(np.arange(40)).shuffle(seed=3)
    old = after(4, pipeline(shuffled.repeat(3)).to_iter_dataset().batch(8))
    write(tmp_path, [old], "1")
    for num_epochs in (3, None):
        with feed_over(pipeline(shuffled), mesh, 8, num_epochs=num_epochs) as feed:
            for unshuffled in (False, True):
                with pytest.raises(CheckpointError, match=r"shuffles each epoch differently. Put .repeat\(n\)"):
                    convert_state(tmp_path, feed, step=4, unshuffled=unshuffled)
    with feed_over(pipeline(shuffled.repeat(3)), mesh, 8) as feed:
        feed.set_state(convert_state(tmp_path, feed, step=4))
        assert [np.asarray(batch["x"]).tolist() for batch in feed] == [batch["x"].tolist() for batch in old]
        assert feed.step == 15


def test_epochs_of_records_whose_order_the_files_do_not_give(tmp_path, mesh):
    old = after(7, grain.MapDataset.source(np.arange(40)).repeat(3).to_iter_dataset().batch(8))
    write(tmp_path, [old], "1")
    with feed_over({"x": np.arange(40, dtype=np.int32)}, mesh, 8, num_epochs=3) as feed:
        with pytest.raises(CheckpointError, match=r"whether the old run shuffled.*--unshuffled"):
            convert_state(tmp_path, feed, step=7)
        feed.set_state(convert_state(tmp_path, feed, step=7, unshuffled=True))
        assert [np.asarray(batch["x"]).tolist() for batch in feed] == [batch.tolist() for batch in old]


def test_batches_made_before_the_epochs_were_repeated(tmp_path, mesh):
    records = grain.MapDataset.source(np.arange(42))
    batches = records.batch(8, drop_remainder=True).repeat(3).to_iter_dataset()  # drops 2 records in each epoch
    write(tmp_path, [after(7, batches)], "1")
    with feed_over(records.repeat(3), mesh, 8) as feed, pytest.raises(CheckpointError, match="dropped a partial batch"):
        convert_state(tmp_path, feed, step=7)


def test_what_contradicts_the_template(tmp_path, mesh):
    arrays = {"x": np.arange(40, dtype=np.int32)}
    (tmp_path / "process_0-of-1.json").write_text('{"next_index": 48}')
    with feed_over(arrays, mesh, 8) as feed, pytest.raises(CheckpointError, match="beyond the 40 records"):
        convert_state(tmp_path, feed, step=6)
    with feed_over(arrays, mesh, 8, shuffle=True) as feed, pytest.raises(CheckpointError, match="the feed shuffles"):
        convert_state(tmp_path, feed, step=6)
    mixture = meshfeed.sources.Mixture({"a": meshfeed.sources.Memory(arrays)}, weights={"a": 1})
    with feed_over(mixture, mesh, 8) as feed, pytest.raises(CheckpointError, match=r"MapDataset.mix"):
        convert_state(tmp_path, feed, step=6)
    for host in range(3):
        (tmp_path / f"process_{host}-of-3.json").write_text('{"next_index": 16}')
    (tmp_path / "process_0-of-1.json").unlink()
    with feed_over(arrays, mesh, 8) as feed, pytest.raises(CheckpointError, match="equal parts of a batch of 8"):
        convert_state(tmp_path, feed, step=6)


def worker_state(*workers, indices=None, started=None):
    """What mp_prefetch of Grain 0.2.18 gives; test_the_state_of_real_workers holds that it is so."""
    return {
        "next_index_in_cycle": 0,
        "next_index_in_datasets": len(workers) if started is None else started,
        "iterators_in_use_indices": list(range(len(workers))) if indices is None else indices,
        "iterators_in_use_states": list(workers),
        "exhausted": [0] * len(workers),
        "future_states": {},
    }


def test_the_state_of_a_single_worker_is_a_position(tmp_path):
    def position(*states):
        for host, state in enumerate(states):
            (tmp_path / f"process_{host}-of-{len(states)}.json").write_text(json.dumps(state))
        return convert_state(tmp_path, CountingFeed(batch=8), step=8)["position"]

    assert position(worker_state({"next_index": 64})) == 64
    (tmp_path / "process_0-of-1.json").unlink()
    assert position(worker_state({"next_index": 32}), worker_state({"next_index": 32})) == 64


@pytest.mark.slow
def test_the_state_of_real_workers(tmp_path, mesh):
    """MaxText's pipeline without packing, at its default of one worker."""

    def records():
        return grain.MapDataset.source(np.arange(100)).shuffle(seed=3).repeat(2).map(lambda x: {"x": np.int32(x)})

    absl.flags.FLAGS.mark_as_parsed()
    workers = grain.MultiprocessingOptions(num_workers=1)
    old = after(8, records()[0::1].to_iter_dataset().batch(16).mp_prefetch(workers))
    try:
        assert old.get_state() == worker_state({"next_index": 128})
        write(tmp_path, [old], "1")
        with feed_over(records(), mesh) as feed:
            feed.set_state(convert_state(tmp_path, feed, step=8))
            for _ in range(3):  # beyond the first epoch
                assert np.asarray(next(feed)["x"]).tolist() == next(old)["x"].tolist()
    finally:
        old.close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (worker_state({"next_index": 32}, {"next_index": 32}), "mp_prefetch of 2 workers"),
        (worker_state({"next_index": 64}, indices=[3], started=4), "interleaved"),
        (worker_state({"parent": {"next_index": 64}, "next_row": 0, "counter": 64}), "more than a position"),
    ],
)
def test_other_states_of_workers_are_refused_in_words(tmp_path, state, message):
    (tmp_path / "process_0-of-1.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=message):
        convert_state(tmp_path, CountingFeed(batch=8), step=8)


def test_packing_behind_a_worker_continues_as_lanes(tmp_path):
    """MaxText's defaults: packing, a batch, and mp_prefetch with one worker; the lane has the packing alone."""
    rows = [{"x": np.arange(number % 7 + 1, dtype=np.int32) + 100 * number} for number in range(200)]

    def packed():
        dataset = grain.MapDataset.source(rows).to_iter_dataset()
        return grain.experimental.FirstFitPackIterDataset(dataset, length_struct={"x": 8}, num_packing_bins=4)

    old = after(5, packed().batch(4))
    (tmp_path / "process_0-of-1.json").write_text(json.dumps(worker_state(old.get_state())))
    source = meshfeed.sources.Stream(lambda lane, lanes: iter(packed()))
    with feed_over(source, four_devices(), 4, num_lanes=1) as feed:
        feed.set_state(convert_state(tmp_path, feed, step=5))
        for _ in range(3):
            new, want = next(feed), next(old)
            assert all(map(np.array_equal, jax.tree.leaves(new), jax.tree.leaves(want)))


def test_tuples_that_json_made_lists_are_tuples_again(tmp_path, mesh):
    """ConcatThenSplit's state has (-1, -1) at this step, and continues wrongly from [-1, -1]."""
    rows = [{"x": np.arange(number % 13 + 1, dtype=np.int32) + 100 * number} for number in range(100)]

    def packed():
        dataset = grain.MapDataset.source(rows).to_iter_dataset()
        return grain.experimental.ConcatThenSplitIterDataset(dataset, length_struct={"x": 8})

    old = after(9, packed().batch(2))
    assert old.get_state()["remainder_slices"] == {"x": (-1, -1)}
    write(tmp_path, [old], "1")
    two_devices = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    source = meshfeed.sources.Stream(lambda lane, lanes: iter(packed()))
    with feed_over(source, two_devices, 2, num_lanes=1) as feed:
        feed.set_state(convert_state(tmp_path, feed, step=9))
        for _ in range(3):
            assert np.array_equal(next(feed)["x"], next(old)["x"])


def four_devices():
    return jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


@pytest.mark.parametrize("make", [lambda: loader(True), lambda: iter(dataset().to_iter_dataset().batch(4))])
def test_host_batches_of_a_loader_and_of_a_dataset(tmp_path, make):
    old = after(3, make())
    write(tmp_path, [old], "1")
    with feed_over(meshfeed.sources.HostBatches(make()), four_devices(), 4) as feed:
        feed.set_state(convert_state(tmp_path, feed, step=3))
        assert feed.step == 3
        assert all(map(np.array_equal, jax.tree.leaves(next(feed)), jax.tree.leaves(next(old))))


def test_host_batches_of_another_number_of_hosts(tmp_path):
    write(tmp_path, [after(3, loader(True)), after(3, loader(True))])
    with feed_over(meshfeed.sources.HostBatches(loader(True)), four_devices(), 4) as feed:
        with pytest.raises(CheckpointError, match="2 hosts wrote it, but the feed has 1"):
            convert_state(tmp_path, feed, step=3)


def test_lanes_that_are_read_in_epochs(tmp_path, mesh):
    (tmp_path / "process_0-of-1.json").write_text('{"next_index": 500}')
    source = meshfeed.sources.Stream(lambda lane, lanes: iter(dataset().to_iter_dataset()))
    with feed_over(source, mesh, 8, num_lanes=1, num_epochs=3) as feed:
        with pytest.raises(CheckpointError, match="Repeat inside the stream"):
            convert_state(tmp_path, feed, step=10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no process_"),
        ({"process_0-of-2.json": '{"next_index": 4}'}, r"hosts \[1\] of 2 are missing"),
        ({"process_0-of-1.json": '{"next_in'}, "not JSON"),
        (
            {"process_0-of-2.json": '{"next_index": 4}', "process_1-of-2.json": '{"next_index": 8}'},
            "different positions",
        ),
        ({"process_0-of-1.json": '{"parent": {"next_index": 4}, "buffer": []}'}, "more than a position"),
        ({"process_0-of-1.json": '{"next_index": 3}'}, "are at record 3, but 2 batches of 4 are 8"),
        ({"process_0.json": '{"global_next_index": 3}'}, "position 3 is not a multiple of the batch size 4"),
        ({"process_0-of-1.json": "{}", "process_0-of-2.json": "{}", "process_1-of-2.json": "{}"}, "different numbers"),
    ],
)
def test_what_cannot_be_exact_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    step = None if "process_0.json" in files else 2
    with pytest.raises(CheckpointError, match=message):
        convert_state(tmp_path, CountingFeed(), step=step)
