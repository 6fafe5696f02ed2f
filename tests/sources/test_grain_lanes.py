"""Grain IterDatasets in lanes: every record once at every number of lanes, and resumed exactly."""

from __future__ import annotations

import collections
import itertools
import struct

import numpy as np
import pytest

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.stream import StreamLane
from meshfeed.sources import Grain
from meshfeed.testing import check_resumable

grain = pytest.importorskip("grain")
experimental = grain.experimental

SIZES = (13, 20, 0, 1, 9)  # records a file
COUNT = sum(SIZES)
LANES = (1, 2, 3, 4, 12)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths of files by kind; record i over all files holds the number i."""
    folder = tmp_path_factory.mktemp("grain")
    paths = collections.defaultdict(list)
    ids = itertools.count()
    for number, size in enumerate(SIZES):
        values = list(itertools.islice(ids, size))
        paths["tfrecord"].append(write_tfrecord(folder / f"{number}.tfrecord", values))
        paths["parquet"].append(write_parquet(folder / f"{number}.parquet", values, 4))
        if size:  # Grain's own reader of ArrayRecord wants records in every file
            paths["array_record"].append(write_array_record(folder / f"{number}.array_record", values))
    paths["one_group"].append(write_parquet(folder / "one_group.parquet", list(range(COUNT)), 1000))
    paths["one_tfrecord"].append(write_tfrecord(folder / "one.tfrecord", list(range(COUNT))))
    return paths


def write_tfrecord(path, values):
    with open(path, "wb") as file:
        for value in values:
            data = str(value).encode()
            file.write(struct.pack("<QI", len(data), 0) + data + struct.pack("<I", 0))
    return str(path)


def write_parquet(path, values, row_group_size):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    floats = [float(value) if value % 5 else None for value in values]
    table = pyarrow.table({"id": pyarrow.array(values, "int64"), "x": pyarrow.array(floats, "float32")})
    parquet.write_table(table, path, row_group_size=row_group_size)
    return str(path)


def write_array_record(path, values):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for value in values:
        writer.write(str(value).encode())
    writer.close()
    return str(path)


class Spread(experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, element):
        return [element * 10 + part for part in range(element % 4) if part < 3]


def numbers(count=COUNT):
    return grain.MapDataset.range(count)[::-1].to_iter_dataset()


def odd(count=COUNT):
    return numbers(count).filter(lambda x: x % 3 != 1)


def documents():
    def make(i):
        return {"tokens": np.full(i * 7 % 5 + 1, i + 1, np.int32)}

    return grain.MapDataset.range(COUNT)[::-1].map(make).to_iter_dataset()


def prefetched(dataset, num_workers=2):
    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))


def packed(packer, **more):
    return packer(documents(), length_struct={"tokens": 8}, **more)


def interleaved(datasets, cycle_length=3):
    return experimental.InterleaveIterDataset(datasets, cycle_length=cycle_length)


def ranges():
    return [grain.MapDataset.range(100 * number, 100 * number + size) for number, size in enumerate(SIZES)]


def parquet_rows(paths):
    return experimental.ParquetIterDataset(paths).map(lambda row: (row["id"], row["x"]))


PIPELINES = {
    "map": lambda files: numbers(),
    "array_record": lambda files: (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files["array_record"])).map(int).to_iter_dataset()
    ),
    "shuffle": lambda files: grain.MapDataset.range(COUNT).shuffle(seed=3).to_iter_dataset(),
    "filter": lambda files: odd(),
    "sparse map": lambda files: grain.MapDataset.range(COUNT).filter(lambda x: x % 3 != 1),
    "nones": lambda files: grain.MapDataset.range(COUNT).filter(lambda x: x % 3).to_iter_dataset(allow_nones=True),
    "flat map": lambda files: experimental.FlatMapMapDataset(grain.MapDataset.range(COUNT), Spread()),
    "flat iter": lambda files: experimental.FlatMapIterDataset(numbers(), Spread()),
    "map with index": lambda files: grain.MapDataset.range(COUNT).to_iter_dataset().map_with_index(lambda i, x: (i, x)),
    "random map": lambda files: numbers().random_map(lambda x, rng: (x, int(rng.integers(1 << 30))), seed=7),
    "window shuffle": lambda files: experimental.WindowShuffleIterDataset(odd(14), window_size=6, seed=2),
    "repeat": lambda files: experimental.RepeatIterDataset(odd(), 2),
    "batch": lambda files: odd().batch(4),
    "rebatch": lambda files: experimental.RebatchIterDataset(odd().batch(4), 3),
    "map mix": lambda files: grain.MapDataset.mix([grain.MapDataset.range(20), grain.MapDataset.range(100, 120)]),
    "concat then split": lambda files: packed(experimental.ConcatThenSplitIterDataset),
    "first fit": lambda files: packed(experimental.FirstFitPackIterDataset, num_packing_bins=3),
    "best fit": lambda files: packed(experimental.BestFitPackIterDataset, num_packing_bins=3, shuffle_bins=False),
    "interleave": lambda files: interleaved([part.to_iter_dataset().filter(lambda x: x % 7) for part in ranges()]),
    "interleave map": lambda files: interleaved(ranges()),
    "interleave files": lambda files: interleaved(
        grain.MapDataset.source(files["tfrecord"]).map(experimental.TFRecordIterDataset)
    ).map(int),
    "parquet": lambda files: parquet_rows(files["parquet"]),
    "parquet, one row group": lambda files: parquet_rows(files["one_group"][0]),
    "tfrecord": lambda files: experimental.TFRecordIterDataset(files["one_tfrecord"][0]).map(int),
    "limit": lambda files: experimental.LimitIterDataset(numbers(), 17),
    "zip": lambda files: experimental.ZipIterDataset([numbers(), numbers().map(lambda x: x + 1000)]),
    "cache": lambda files: experimental.CacheIterDataset(numbers()),
    "options": lambda files: experimental.WithOptionsIterDataset(odd(), experimental.DatasetOptions(min_shm_size=1)),
    "mp_prefetch": lambda files: prefetched(odd().batch(4)),
    "mp_prefetch inside": lambda files: prefetched(odd(), 3).batch(4),
    "threads": lambda files: experimental.ThreadPrefetchIterDataset(odd(), prefetch_buffer_size=3).batch(2),
    "multithread": lambda files: experimental.multithread_prefetch(odd(), 2, 3),
}
NO_PREFETCH = {"mp_prefetch": "batch", "mp_prefetch inside": "batch"}
NO_GRAIN = {"parquet"}  # Grain fails on a file without row groups


def make(name, files):
    dataset = PIPELINES[name](files)
    if name == "map mix":
        dataset = dataset.to_iter_dataset()
    return dataset


def count_ids(records):
    """How often each number stands in the records; padding of packed ones left out."""
    counts = collections.Counter()
    for record in records:
        if isinstance(record, dict):
            counts.update(token for token in record["tokens"].tolist() if token)
        elif isinstance(record, tuple):
            counts[int(record[0])] += 1
        else:
            counts.update(np.ravel(record).tolist())
    return counts


def lanes_of(dataset, num_lanes, epoch=0):
    source = Grain(dataset)
    return [list(source.open(lane, num_lanes, epoch)) for lane in range(num_lanes)]


def plain(record):
    """A record that can be compared."""
    if isinstance(record, dict):
        return {key: np.asarray(value).tolist() for key, value in record.items()}
    return repr(np.asarray(record).tolist())


@pytest.mark.parametrize("name", PIPELINES)
def test_no_record_is_lost_or_repeated(name, files):
    whole = count_ids(lanes_of(make(name, files), 1)[0])
    assert sum(whole.values()) >= 7
    for num_lanes in LANES[1:]:
        lanes = lanes_of(make(name, files), num_lanes)
        assert count_ids(itertools.chain(*lanes)) == whole, num_lanes


@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in NO_GRAIN])
def test_one_lane_is_what_grain_gives(name, files):
    dataset = make(NO_PREFETCH.get(name, name), files)
    expected = [plain(record) for record in dataset if record is not None]
    assert [plain(record) for record in Grain(make(name, files)).open(0, 1)] == expected


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "rebatch"])
def test_every_lane_resumes_at_every_point(name, files):
    source = Grain(make(name, files))
    slow = name in ("shuffle", "window shuffle")  # Grain's shuffle of few elements takes a millisecond an element
    check_resumable(lambda: source.open(1, 3), max_steps=200, save_points=[2] if slow else None)
    check_resumable(lambda: source.open(11, 12), max_steps=200)


def test_a_rebatch_has_no_exact_state_and_so_none_at_all(files):
    lane = Grain(make("rebatch", files)).open(0, 2)
    assert not hasattr(lane, "get_state")
    assert not hasattr(lane, "set_state")


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_a_mix_ends_a_lane_where_a_component_of_the_lane_ends(weights):
    def mix():
        return grain.IterDataset.mix([numbers(60), numbers(60).map(lambda x: x + 1000)], weights)

    whole = count_ids(lanes_of(mix(), 1)[0])
    for num_lanes in LANES[1:]:
        lanes = lanes_of(mix(), num_lanes)
        counts = count_ids(itertools.chain(*lanes))
        assert max(counts.values()) == 1
        assert sum(whole.values()) - 2 * num_lanes <= sum(counts.values()) <= sum(whole.values()) + 2 * num_lanes
        source = Grain(mix())
        check_resumable(lambda source=source, num_lanes=num_lanes: source.open(num_lanes - 1, num_lanes), max_steps=99)


def test_a_mix_by_name():
    parts = {"a": numbers(30), "b": numbers(30).map(lambda x: x + 1000)}
    lanes = lanes_of(grain.IterDataset.mix(parts, {"a": 0.5, "b": 0.5}), 3)
    assert [len(lane) for lane in lanes] == [20, 20, 20]
    assert max(count_ids(itertools.chain(*lanes)).values()) == 1


def test_a_dataset_used_twice_is_cut_once():
    shared = grain.MapDataset.range(24).to_iter_dataset()
    mixed = grain.IterDataset.mix([shared.map(lambda x: x), shared.map(lambda x: x + 100)])
    counts = count_ids(itertools.chain(*lanes_of(mixed, 4)))
    assert counts == collections.Counter([*range(24), *range(100, 124)])


def test_lanes_draw_different_random_numbers_and_keep_them(files):
    lanes = lanes_of(make("random map", files), 4)
    drawn = [number for lane in lanes for _, number in lane]
    assert len(set(drawn)) == COUNT
    assert lanes == lanes_of(make("random map", files), 4)
    again = lanes_of(make("random map", files), 4, epoch=1)
    assert not {number for lane in again for _, number in lane} & set(drawn)


def test_files_of_an_interleave_draw_different_random_numbers():
    parts = [
        part.to_iter_dataset().random_map(lambda x, rng: (x, int(rng.integers(1 << 30))), seed=1) for part in ranges()
    ]
    for num_lanes in (1, 3, 12):
        drawn = [number for lane in lanes_of(interleaved(parts), num_lanes) for _, number in lane]
        assert len(set(drawn)) == COUNT


def test_indices_go_through_all_lanes(files):
    pairs = list(itertools.chain(*lanes_of(make("map with index", files), 4)))
    assert sorted(pairs) == [(i, i) for i in range(COUNT)]


def test_epochs_shuffle_as_grain_repeats():
    dataset = grain.MapDataset.range(COUNT).shuffle(seed=3)
    repeated = list(dataset.repeat(3))
    for epoch in range(3):
        assert lanes_of(dataset.to_iter_dataset(), 1, epoch)[0] == repeated[epoch * COUNT : (epoch + 1) * COUNT]
        assert sorted(itertools.chain(*lanes_of(dataset.to_iter_dataset(), 4, epoch))) == list(range(COUNT))
    source = Grain(dataset.to_iter_dataset())
    check_resumable(lambda: source.open(1, 4, epoch=2), max_steps=99, save_points=[4])


def test_epochs_shuffle_the_order_of_files(files):
    paths = grain.MapDataset.source(files["tfrecord"]).shuffle(seed=1)
    dataset = interleaved(paths.map(experimental.TFRecordIterDataset), 1).map(int)
    orders = [lanes_of(dataset, 1, epoch)[0] for epoch in range(3)]
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_the_number_of_workers_is_no_part_of_the_stream(files):
    def stream(dataset):
        source = Grain(dataset)
        return [[plain(record) for record in source.open(lane, 3)] for lane in range(3)], source.fingerprint()

    alone = stream(odd().batch(4))
    assert stream(prefetched(odd().batch(4), 1)) == alone
    assert stream(prefetched(odd(), 3).batch(4)) == alone
    assert stream(experimental.ThreadPrefetchIterDataset(odd(), prefetch_buffer_size=3).batch(4)) == alone


def test_the_state_says_how_files_were_cut(files):
    units = {"parquet": {1: "files", 2: "rows"}, "interleave map": {1: "datasets", 3: "records"}}
    for name, by_lanes in units.items():
        for num_lanes, unit in by_lanes.items():
            source = Grain(make(name, files))
            assert source.with_cut(1).open(0, num_lanes).get_state()["cut"] == unit
    assert Grain(make("parquet", files)).open(0, 2).get_state()["cut"] == "even"  # its files differ in length


def test_lanes_of_uneven_files_are_even_where_rows_can_be_counted(files):
    for num_lanes in (12, 4):
        sizes = [len(lane) for lane in lanes_of(make("parquet, one row group", files), num_lanes)]
        assert max(sizes) - min(sizes) <= 1


def test_the_users_dataset_is_left_alone(files):
    for name in ("map", "parquet", "interleave map", "random map", "zip"):
        dataset = make(name, files)
        lanes_of(dataset, 3)
        if name != "parquet":
            assert [plain(r) for r in dataset] == [plain(r) for r in make(name, files)]
        assert [len(lane) for lane in lanes_of(dataset, 3)] == [len(lane) for lane in lanes_of(make(name, files), 3)]


def test_data_in_memory_is_shared_by_the_lanes():
    data = [np.zeros(4) for _ in range(10)]
    source = Grain(grain.MapDataset.source(data).to_iter_dataset())
    lanes = [source.open(lane, 5) for lane in range(5)]
    assert {id(next(lane)) for lane in lanes} <= {id(array) for array in data}


def test_a_pipeline_without_exact_state_is_read_and_dropped():
    class Forgetful(grain.DatasetIterator):
        def __init__(self):
            super().__init__()
            self.values = iter(range(5))

        def __next__(self):
            return next(self.values)

        def get_state(self):
            raise NotImplementedError

        def set_state(self, state):
            raise NotImplementedError

    class Source(grain.IterDataset):
        def __iter__(self):
            return Forgetful()

    lane = Grain(Source().map(lambda x: x + 1)).open(0, 1)
    assert not hasattr(lane, "get_state")
    assert not isinstance(lane, StreamLane)
    assert list(lane) == [1, 2, 3, 4, 5]


def test_a_stop_iteration_of_a_function_by_index_does_not_end_a_lane():
    def stop_at_five(value):
        if value == 5:
            raise StopIteration
        return value

    lane = Grain(grain.MapDataset.range(20).map(stop_at_five).to_iter_dataset()).open(0, 1)
    assert [next(lane) for _ in range(5)] == list(range(5))
    with pytest.raises(SourceError, match=r"element 5 of the lane raised StopIteration, which does not end the data"):
        next(lane)


def test_parquet_rows_look_as_grain_gives_them(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = 23
    fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(range(3 * rows), "int32"), 3)
    table = pyarrow.table(
        {
            "id": pyarrow.array(range(rows), "int64"),
            "with nulls": pyarrow.array([i if i % 6 else None for i in range(rows)], "int32"),
            "flag": pyarrow.array([i % 2 == 0 for i in range(rows)]),
            "text": pyarrow.array([f"{i}" for i in range(rows)]),
            "fixed": fixed,
            "ragged": pyarrow.array([list(range(i % 4)) for i in range(rows)], pyarrow.list_(pyarrow.float32())),
            "large": pyarrow.array([list(range(i % 4)) for i in range(rows)], pyarrow.large_list(pyarrow.int8())),
            "nested": pyarrow.array([[[i]] * 2 for i in range(rows)]),
            "ragged with nulls": pyarrow.array([[1, None]] * rows, pyarrow.list_(pyarrow.int32())),
        }
    )
    for columns in (["id", "flag", "text", "fixed", "ragged", "large"], table.column_names):
        path = str(tmp_path / f"{len(columns)}.parquet")
        parquet.write_table(table.select(columns), path, row_group_size=10)
        expected = list(experimental.ParquetIterDataset(path))
        for num_lanes in (1, 2, 5):
            lanes = lanes_of(experimental.ParquetIterDataset(path), num_lanes)
            found = sorted(itertools.chain(*lanes), key=lambda row: row["id"])
            assert len(found) == rows
            for row, other in zip(found, expected, strict=True):
                assert row.keys() == other.keys()
                for name in row:
                    assert type(row[name]) is type(other[name]), name
                    np.testing.assert_array_equal(np.asarray(row[name]).dtype, np.asarray(other[name]).dtype)
                    np.testing.assert_equal(row[name], other[name])
    source = Grain(
        experimental.ParquetIterDataset(path).map(lambda row: {k: row[k] for k in ("id", "fixed", "ragged")})
    )
    check_resumable(lambda: source.open(1, 2), max_steps=99)


def test_a_function_below_a_repeat_may_write_to_its_element():
    def scale(element):
        element["x"] *= 10
        return {"x": int(element.pop("x")[0])}

    dataset = grain.MapDataset.range(1, 7).map(lambda i: {"x": np.array([i])}).to_iter_dataset().map(scale)
    dataset = experimental.RepeatIterDataset(dataset, 2)
    assert [element["x"] for element in Grain(dataset).open(0, 1)] == [element["x"] for element in dataset]


@pytest.mark.parametrize("make", [lambda: numbers(3), lambda: odd(13)])
def test_an_endless_repeat_of_nothing_is_an_error(make):
    source = Grain(experimental.RepeatIterDataset(make()))
    with pytest.raises(SourceError, match=r"no element below repeat\(\)") as error:
        next(source.open(5, 8))
    assert error.value.lane_index == 5
    assert len(list(itertools.islice(source.open(0, 1), 50))) == 50
    assert [*Grain(experimental.RepeatIterDataset(make(), 2)).open(5, 8)] == []
