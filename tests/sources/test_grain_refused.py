"""What of Grain cannot be read in lanes, and what the error says; threads; damaged files."""

from __future__ import annotations

import gc
import itertools
import json
import struct
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from meshfeed._src.base import errors
from meshfeed.sources import Grain

grain = pytest.importorskip("grain")
experimental = grain.experimental


class Values(grain.IterDataset):
    """A user's source without a way to cut it."""

    def __init__(self, values):
        super().__init__()
        self.values = list(values)

    def __iter__(self):
        return ValuesIterator(self.values)


class ValuesIterator(grain.DatasetIterator):
    def __init__(self, values):
        super().__init__()
        self.values, self.next_index = values, 0

    def __next__(self):
        if self.next_index == len(self.values):
            raise StopIteration
        self.next_index += 1
        return self.values[self.next_index - 1]

    def get_state(self):
        return {"next": self.next_index}

    def set_state(self, state):
        self.next_index = state["next"]


class Sliced(Values):
    def set_slice(self, sl, sequential_slice=False):
        self.values = self.values[sl]


class SlicedInPlace(Values):
    def set_slice(self, sl, sequential_slice=False):
        self.values[:] = self.values[sl]


class NotSliced(Values):
    def set_slice(self, sl, sequential_slice=False):
        """Forgets to."""


class Twice(experimental.FlatMapTransform):
    max_fan_out = 2

    def __init__(self, function):
        self.function = function

    def flat_map(self, element):
        return [self.function(element), element]


def records(dataset, num_lanes):
    source = Grain(dataset)
    return sorted(record for lane in range(num_lanes) for record in source.open(lane, num_lanes))


@pytest.mark.parametrize("kind", [Sliced, SlicedInPlace])
def test_a_users_source_is_cut_by_its_own_set_slice(kind):
    dataset = kind(range(20))
    for num_lanes in (1, 3, 12):
        assert records(dataset.filter(lambda x: x % 3), num_lanes) == [x for x in range(20) if x % 3]
    assert dataset.values == list(range(20))


def test_a_users_dataset_over_a_map_dataset_is_cut_below():
    class Over(grain.IterDataset):
        def __iter__(self):
            return ValuesIterator([self._parent[i] for i in range(len(self._parent))])

    assert records(Over(grain.MapDataset.range(20)), 3) == list(range(20))


def zip_over_filter():
    numbers = grain.MapDataset.range(9).to_iter_dataset()
    return experimental.ZipIterDataset([numbers, numbers.filter(bool)], strict=False)


def zip_of_pairs(other_size):
    numbers = grain.MapDataset.range(18).to_iter_dataset()
    other = numbers.batch(2) if other_size == 2 else grain.MapDataset.range(9).to_iter_dataset()
    return experimental.ZipIterDataset([numbers.batch(2), other])


def few_datasets():
    return experimental.InterleaveIterDataset([Values([1]), Values([2])], cycle_length=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Values(range(5)).map(str), "cannot cut Values into 3 lanes: it is a source without set_slice"),
        (lambda: NotSliced(range(5)), "cannot cut NotSliced into 3 lanes: its set_slice changed no attribute"),
        (zip_over_filter, "cannot cut ZipIterDataset into 3 lanes: below it, FilterIterDataset drops"),
        (
            lambda: zip_of_pairs(1),
            "cannot cut ZipIterDataset into 3 lanes: its datasets are batched by different sizes",
        ),
        (few_datasets, "cannot cut Values into 3 lanes: .* 2 datasets are fewer than 3 lanes"),
    ],
)
def test_what_cannot_be_cut_says_why_and_how_to_write_it(make, words):
    source = Grain(make())
    assert list(source.open(0, 1))
    with pytest.raises(errors.SourceError, match=words) as error:
        source.open(0, 3)
    assert "def open(lane_index, num_lanes):" in str(error.value)
    assert "meshfeed.sources.Stream(open)" in str(error.value)


def test_datasets_that_are_batched_alike_are_zipped_in_lanes():
    for lane in range(3):
        pairs = list(Grain(zip_of_pairs(2)).open(lane, 3))
        assert [pair[0].tolist() for pair in pairs] == [pair[1].tolist() for pair in pairs]
        assert len(pairs) == 3


def test_more_datasets_than_lanes_need_no_cut():
    dataset = experimental.InterleaveIterDataset([Values([10 * n, 10 * n + 1]) for n in range(7)], cycle_length=2)
    assert records(dataset, 3) == sorted(x for n in range(7) for x in (10 * n, 10 * n + 1))
    with pytest.raises(errors.SourceError, match="7 datasets are fewer than 12 lanes"):
        Grain(dataset).check_lanes(12)


def test_a_feed_refuses_at_construction():
    import jax

    import meshfeed

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(errors.SourceError, match="cannot cut Values into 4 lanes"):
        meshfeed.MultiHostDataLoadIterator(Values(range(64)), mesh, global_batch_size=8, num_lanes=4)
    with meshfeed.MultiHostDataLoadIterator(Values(range(64)), mesh, global_batch_size=8, num_lanes=1) as feed:
        assert [batch.tolist() for batch in feed] == [list(range(8 * k, 8 * k + 8)) for k in range(8)]


def test_what_shards_by_itself_is_refused_at_once():
    elastic = experimental.ElasticIterator(grain.MapDataset.range(9), 4, grain.sharding.NoSharding())
    with pytest.raises(
        errors.SourceError, match="cannot cut ElasticIterator into lanes: it batches and shards by itself"
    ):
        Grain(elastic)


def test_a_state_of_another_pipeline_is_refused_and_changes_nothing():
    numbers = grain.MapDataset.range(20).to_iter_dataset()
    lane = Grain(numbers.random_map(lambda x, rng: x, seed=1)).open(0, 2)
    head = [next(lane) for _ in range(3)]
    for state in ({"next_index": 3}, {"parent": {"next_index": 99}, "index_for_rng": 0}, None):
        with pytest.raises(errors.StateMismatchError, match="a pipeline that refuses it") as error:
            lane.set_state(state)
        assert error.value.field == "lanes.0"
    assert head + list(lane) == list(range(0, 20, 2))


def test_records_before_a_failing_one_are_given_and_it_fails_by_itself():
    class Data:
        failing = True

        def __len__(self):
            return 20

        def __getitem__(self, index):
            if index == 8 and self.failing:
                raise OSError("element 8")
            return index

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    data = Data()
    lane = Grain(grain.MapDataset.source(data).to_iter_dataset()).open(0, 2)
    assert [next(lane) for _ in range(4)] == [0, 2, 4, 6]
    for _ in range(2):
        state = lane.get_state()
        with pytest.raises(OSError, match="element 8"):
            next(lane)
        assert lane.get_state() == state
    data.failing = False
    assert list(lane) == list(range(8, 20, 2))


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset, stop: dataset.map(stop),
        lambda dataset, stop: dataset.filter(stop),
        lambda dataset, stop: dataset.seed(1).random_map(lambda x, rng: stop(x)),
        lambda dataset, stop: dataset.map_with_index(lambda i, x: stop(x)),
        lambda dataset, stop: grain.experimental.InterleaveIterDataset([dataset.map(stop)] * 3, cycle_length=2),
        lambda dataset, stop: dataset.map(stop).batch(2, drop_remainder=True),
        lambda dataset, stop: dataset.batch(2, drop_remainder=True, batch_fn=lambda xs: [stop(x) for x in xs]),
        lambda dataset, stop: experimental.FlatMapIterDataset(dataset, Twice(stop)),
        lambda dataset, stop: experimental.InterleaveIterDataset(
            grain.MapDataset.source(list(dataset)).map(
                lambda x: grain.MapDataset.range(2 if stop(x) else 0).to_iter_dataset()
            ),
            cycle_length=2,
        ),
    ],
    ids=[
        *("map", "filter", "random_map", "map_with_index", "interleave", "batch", "batch_fn", "flat_map"),
        "interleave of made datasets",
    ],
)
def test_a_function_that_raises_stop_iteration_does_not_end_the_data(change):
    def stop(number):
        return next(iter(())) if number == 10 else True

    dataset = change(grain.MapDataset.range(20).to_iter_dataset(), stop)
    for num_lanes in (1, 2):
        with pytest.raises(errors.SourceError, match="raised StopIteration, which does not end the data") as error:
            list(Grain(dataset).open(0, num_lanes))
        assert (error.value.lane_index, error.value.__notes__[-1]) == (0, "in lane 0")
    dataset = change(grain.MapDataset.range(8).to_iter_dataset(), stop)
    assert len(list(Grain(dataset).open(0, 1))) == len(list(dataset))


def test_damaged_files_are_named(tmp_path):
    data = b"".join(struct.pack("<QI", 3, 0) + b"abc" + struct.pack("<I", 0) for _ in range(3))
    for name, content in (("cut", data[:-5]), ("garbage", b"no record at all here")):
        path = str(tmp_path / name)
        with open(path, "wb") as file:
            file.write(content)
        lane = Grain(experimental.TFRecordIterDataset(path)).open(0, 1)
        with pytest.raises(errors.CorruptDataError, match="cut short or is something else") as error:
            list(lane)
        assert error.value.path == path
        pytest.importorskip("pyarrow")
        with pytest.raises(errors.CorruptDataError, match="is no intact Parquet file"):
            list(Grain(experimental.ParquetIterDataset(path)).open(0, 1))


@pytest.mark.slow
def test_lanes_share_one_pool_of_threads_which_ends_with_them():
    class Slow:
        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            time.sleep(0.002)  # so that reading ahead is worth it
            return index

    gc.collect()  # lanes that other tests dropped in the middle of an error hold the pool until they are collected
    others = set(threading.enumerate())

    def ours():
        return [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("meshfeed-grain")]

    source = Grain(grain.MapDataset.source(Slow()).to_iter_dataset())
    peaks = {}
    for num_lanes in (8, 64):
        before = set(threading.enumerate())
        lanes = [source.open(lane, num_lanes) for lane in range(num_lanes)]
        assert sorted(next(lane) for lane in lanes for _ in range(2)) == list(range(2 * num_lanes))
        peaks[num_lanes] = len(set(threading.enumerate()) - before)
        for lane in lanes:
            lane.close()
        deadline = time.monotonic() + 30
        while ours() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not ours()
    assert 0 < peaks[64] <= 16


def test_interleaves_and_parquet_start_no_thread(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = [str(tmp_path / f"{number}.parquet") for number in range(20)]
    for path in paths:
        parquet.write_table(pyarrow.table({"id": list(range(30))}), path)
    list(Grain(experimental.ParquetIterDataset(paths)).open(0, 1))  # Arrow's own pool of threads
    before = set(threading.enumerate())
    for dataset in (
        experimental.ParquetIterDataset(paths),
        experimental.InterleaveIterDataset([Values(range(9)) for _ in range(20)], cycle_length=8),
        experimental.ThreadPrefetchIterDataset(Sliced(range(99)), prefetch_buffer_size=4),
    ):
        lanes = [Grain(dataset).open(lane, 4) for lane in range(4)]
        assert all(next(lane) is not None for lane in lanes)
        assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


@pytest.mark.slow
def test_mp_prefetch_in_a_plain_script():
    code = textwrap.dedent("""
        import json, threading, multiprocessing, grain
        from meshfeed.sources import Grain
        ds = grain.MapDataset.range(20).to_iter_dataset().map(lambda x: x + 1)
        ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
        source = Grain(ds)
        lanes = [list(source.open(i, 4)) for i in range(4)]
        print(json.dumps([lanes, len(multiprocessing.active_children())]))
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lanes, children = json.loads(done.stdout)
    assert sorted(itertools.chain(*lanes)) == list(range(1, 21))
    assert children == 0
