"""Grain MapDatasets as random access, and what Grain() makes of which."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import meshfeed
from meshfeed._src.base import errors
from meshfeed._src.sources.grain.datasets import GrainRecords, GrainStream
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed.sources import Grain

grain = pytest.importorskip("grain")


class Batched:
    """A data source that counts how it is read."""

    def __init__(self, count=50):
        self.count, self.single, self.batched = count, 0, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.single += 1
        return index * 10

    def __getitems__(self, indices):
        self.batched.append(list(indices))
        return [index * 10 for index in indices]


def test_what_becomes_of_which():
    records = grain.MapDataset.range(8)
    assert isinstance(Grain(records), GrainRecords)
    assert isinstance(Grain(records.shuffle(seed=1).map(float)), GrainRecords)
    assert isinstance(Grain(records.filter(bool)), GrainStream)
    assert isinstance(Grain(grain.MapDataset.source(records.filter(bool)).map(float)), GrainStream)
    assert isinstance(Grain(records.to_iter_dataset()), GrainStream)
    sampler = grain.samplers.IndexSampler(8, shard_options=grain.sharding.NoSharding(), num_epochs=1)
    assert isinstance(Grain(grain.DataLoader(data_source=list(range(8)), sampler=sampler)), HostBatches)
    with pytest.raises(errors.SourceError, match=r"Grain got a list\. Expected a grain\.MapDataset"):
        Grain([1, 2])
    with pytest.raises(errors.SourceError, match="has no elements"):
        Grain(grain.MapDataset.range(0))


def pipelines():
    source = grain.MapDataset.source(Batched())
    yield source
    yield source.map(lambda x: x + 1)
    yield source.seed(4).shuffle().map(lambda x: x + 1).random_map(lambda x, rng: x + int(rng.integers(1000)))
    yield source[3:40:2].map_with_index(lambda i, x: (i, x))
    yield source.repeat(2).shuffle(seed=3)
    yield grain.MapDataset.mix([source.repeat(2), grain.MapDataset.range(1000, 1080)], [0.3, 0.7])
    yield grain.MapDataset.concatenate([source, grain.MapDataset.range(1000, 1080)])
    yield grain.experimental.ZipMapDataset([source, grain.MapDataset.range(1000, 1050)])
    yield grain.MapDataset.source(source.shuffle(seed=3)).map(lambda x: x + 1)
    yield grain.experimental.WindowShuffleMapDataset(source, window_size=25, seed=3)


@pytest.mark.parametrize("number", range(10))
def test_records_are_those_of_the_dataset(number):
    dataset = next(itertools.islice(pipelines(), number, None))
    source = Grain(dataset)
    expected = [dataset[i] for i in range(len(dataset))]
    assert len(source) == len(dataset)
    order = np.random.default_rng(0).permutation(len(dataset))
    assert list(source.__getitems__(order)) == [expected[i] for i in order]
    assert [source[i] for i in range(0, len(dataset), 7)] == expected[::7]


def test_sources_are_read_many_at_once_and_the_users_dataset_is_left_alone():
    data = Batched()
    dataset = grain.MapDataset.source(data).shuffle(seed=2).map(lambda x: x + 1)
    source = Grain(dataset)
    assert sorted(source.__getitems__([4, 2, 2, 9])) == sorted(dataset[i] for i in [4, 2, 2, 9])
    assert [len(ids) for ids in data.batched] == [4]
    assert data.single == 4  # the comparison's own
    assert not hasattr(data, "_getitems")


def test_array_record_files(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    paths, ids = [], itertools.count()
    for name, size in (("a", 5), ("b", 1), ("c", 11)):
        paths.append(str(tmp_path / f"{name}.array_record"))
        writer = module.ArrayRecordWriter(paths[-1], "group_size:1")
        for _ in range(size):
            writer.write(str(next(ids)).encode())
        writer.close()
    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).map(int)
    source = Grain(dataset)
    assert list(source.__getitems__(range(17))) == list(range(17))
    assert source.fingerprint()["pipeline"]["0 SourceMapDataset"]["source"]["files"]["count"] == 3
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in paths:
        shutil.copy(path, moved)
    elsewhere = [str(moved / path.rsplit("/")[-1]) for path in paths]
    again = Grain(grain.MapDataset.source(grain.sources.ArrayRecordDataSource(elsewhere)).map(int))
    assert again.fingerprint() == source.fingerprint()


def test_ids_and_missing_elements_are_errors():
    source = Grain(grain.MapDataset.range(5).map(lambda x: None if x == 3 else x))
    for bad in (-1, 5):
        with pytest.raises(IndexError, match=f"record id {bad} is out of range"):
            source[bad]
    with pytest.raises(errors.SourceError, match=r"element 3 of the Grain dataset .* is None") as error:
        source.__getitems__([1, 3])
    assert error.value.record_id == 3


def test_a_batched_dataset_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "meshfeed"):
        Grain(grain.MapDataset.range(8).batch(4))
        Grain(
            grain.MapDataset.range(8)
            .to_iter_dataset()
            .batch(2)
            .mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
        )
        Grain(grain.MapDataset.range(9).batch(3).map(lambda x: x))
    assert [record.args for record in caplog.records if record.levelno == logging.WARNING] == [(4,), (2,)]


def test_a_short_last_batch_of_known_length_is_refused_at_construction():
    numbers = grain.MapDataset.range(70)
    short = r"ends in batch\(16\), and its 70 elements do not fill the last batch"
    with pytest.raises(errors.SourceError, match=short + ":"):
        Grain(numbers.batch(16))
    shuffled = numbers.map(lambda x: x + 1).to_iter_dataset().map(lambda x: x)
    for pipeline in (shuffled.batch(16), numbers.to_iter_dataset().batch(16)):
        with pytest.raises(errors.SourceError, match=short + " in each of 4 lanes"):
            Grain(pipeline).check_lanes(4)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(errors.SourceError, match="drop_remainder=True"):
        meshfeed.Feed(shuffled.batch(16), mesh, global_batch_size=4)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: n.batch(16, drop_remainder=True),
        lambda n: n.batch(14),
        lambda n: n.batch(16, batch_fn=lambda values: values[:1] * 16),  # may pad
        lambda n: n.batch(16).map(lambda x: x[:1]),
        lambda n: n.to_iter_dataset().batch(16, drop_remainder=True),
        lambda n: n.to_iter_dataset().batch(7),  # 5 lanes of 14
        lambda n: n.filter(lambda x: x < 64).to_iter_dataset().batch(16),  # of unknown length
        lambda n: n.repeat().to_iter_dataset().batch(16),  # without an end
    ],
)
def test_other_batches_are_not_refused(make):
    source = Grain(make(grain.MapDataset.range(70)))
    getattr(source, "check_lanes", lambda num_lanes: None)(5)


def test_an_endless_dataset_has_as_many_records_as_can_be_numbered():
    source = Grain(grain.MapDataset.range(8).repeat())
    assert len(source) == 1 << 62
    assert source[(1 << 62) - 1] == 7


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("seed", lambda: grain.MapDataset.range(9).shuffle(seed=4).map(float)),
        ("length", lambda: grain.MapDataset.range(8).shuffle(seed=3).map(float)),
        ("transform", lambda: grain.MapDataset.range(9).shuffle(seed=3).map(int)),
        ("start", lambda: grain.MapDataset.range(1, 10).shuffle(seed=3).map(float)),
        ("1 MapMapDataset", lambda: grain.MapDataset.range(9).map(float)),
    ],
)
def test_fingerprint_names_what_differs(field, other):
    from meshfeed._src.state.state import compare_fingerprints

    def make():
        return {"source": Grain(grain.MapDataset.range(9).shuffle(seed=3).map(float)).fingerprint()}

    compare_fingerprints(json.loads(json.dumps(make())), make())
    with pytest.raises(errors.StateMismatchError) as error:
        compare_fingerprints(make(), {"source": Grain(other()).fingerprint()})
    assert field in error.value.field or "records" in error.value.field


def test_other_content_of_the_same_shape_is_another_source():
    def of(values):
        return Grain(grain.MapDataset.source(values)).fingerprint()

    assert of([1, 2, 3]) == of([1, 2, 3]) != of([1, 2, 4])
    assert of([{"x": np.arange(3)}]) == of([{"x": np.arange(3)}]) != of([{"x": np.arange(3.0)}])
    assert of([b"a", b"b"]) != of([b"a", b"c"])


IDENTIFY = """
import functools, json, grain
from meshfeed.sources import Grain
class Add(grain.transforms.Map):
    def __init__(self): self.table = object()
    def map(self, x): return x
def scale(x, by): return x * by
ds = grain.MapDataset.source([object(), 2.0]).seed(7).shuffle().map(Add()).map(functools.partial(scale, by=2))
it = grain.experimental.WindowShuffleIterDataset(ds.to_iter_dataset(), window_size=3, seed=1).filter(bool)
print(json.dumps([Grain(ds).fingerprint(), Grain(it).fingerprint()]))
"""


@pytest.mark.slow
def test_fingerprint_is_the_same_in_every_process(capsys):
    exec(IDENTIFY, {})
    here = capsys.readouterr().out
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run(
        [sys.executable, "-c", IDENTIFY], capture_output=True, text=True, timeout=200, check=True, env=environment
    )
    assert here == there.stdout != ""
    assert "0x" not in here


def test_changed_files_are_another_source(tmp_path):
    def write(name, size):
        (tmp_path / name).write_bytes(b"x" * size)

    def fingerprint(names):
        paths = [str(tmp_path / name) for name in names]
        listed = grain.MapDataset.source(paths).map(grain.experimental.TFRecordIterDataset)
        made = [
            grain.experimental.ParquetIterDataset(paths),
            grain.experimental.TFRecordIterDataset(paths[-1]),
            grain.experimental.InterleaveIterDataset(listed, cycle_length=2),
            grain.experimental.InterleaveIterDataset(
                [grain.experimental.TFRecordIterDataset(p) for p in paths], cycle_length=2
            ),
        ]
        return [json.dumps(Grain(dataset).fingerprint()) for dataset in made]

    for name in ("a", "b", "c", "d"):
        write(name, 5)
    first = fingerprint(["a", "b", "c"])
    assert fingerprint(["a", "b", "c"]) == first
    for names in (["a", "b", "d"], ["b", "a"]):  # renamed, missing
        assert not set(fingerprint(names)) & set(first)
    write("c", 6)
    assert not set(fingerprint(["a", "b", "c"])) & set(first)


def test_a_changed_mixture_is_another_source():
    def of(weights):
        parts = [grain.MapDataset.range(100), grain.MapDataset.range(100, 200)]
        mixed = grain.IterDataset.mix([part.to_iter_dataset() for part in parts], weights)
        return [Grain(grain.MapDataset.mix(parts, weights)).fingerprint(), Grain(mixed).fingerprint()]

    assert of([0.5, 0.5]) == of([0.5, 0.5])
    for one, other in zip(of([0.5, 0.5]), of([0.51, 0.49]), strict=True):
        assert one["pipeline"] != other["pipeline"]


def test_use_does_not_change_the_fingerprint():
    for dataset in [*pipelines(), next(pipelines()).to_iter_dataset().map(float)]:
        source = Grain(dataset)
        before = source.fingerprint()
        list(itertools.islice(dataset, 3))
        list(source.open(0, 2)) if isinstance(source, GrainStream) else source[1]
        assert source.fingerprint() == Grain(dataset).fingerprint() == before


def test_prefetching_and_read_options_are_no_part_of_the_fingerprint():
    def of(change, **options):
        dataset = grain.MapDataset.range(9).shuffle(seed=1).to_iter_dataset(grain.ReadOptions(**options))
        return Grain(change(dataset.filter(bool))).fingerprint()

    plain = of(lambda dataset: dataset)
    assert of(lambda dataset: dataset, num_threads=1, prefetch_buffer_size=2) == plain
    assert of(lambda d: grain.experimental.ThreadPrefetchIterDataset(d, prefetch_buffer_size=2)) == plain
    for num_workers in (1, 2):
        assert of(lambda d, n=num_workers: d.mp_prefetch(grain.MultiprocessingOptions(num_workers=n))) == plain


@pytest.mark.slow
def test_a_data_loader_needs_no_absl_app():
    code = textwrap.dedent("""
        import grain
        from absl import flags
        from meshfeed._src.sources.recognize import as_source
        sampler = grain.samplers.IndexSampler(8, shard_options=grain.sharding.NoSharding(), num_epochs=1)
        source = as_source(grain.DataLoader(data_source=list(range(8)), sampler=sampler, worker_count=1))
        print(flags.FLAGS.is_parsed())
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "True"


def test_array_record_is_read_by_our_reader_where_that_is_the_same(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    from meshfeed._src.sources.array_record.source import ArrayRecord
    from meshfeed._src.sources.grain.internals import BatchedSource

    paths = []
    for name in ("a", "b"):
        paths.append(str(tmp_path / f"{name}.array_record"))
        writer = module.ArrayRecordWriter(paths[-1], "group_size:1")
        for number in range(9):
            writer.write(f"{name}{number}".encode())
        writer.close()

    class Doubled(grain.sources.ArrayRecordDataSource):
        def __getitem__(self, key):
            return 2 * super().__getitem__(key)

        def __getitems__(self, keys):
            return [2 * record for record in super().__getitems__(keys)]

    def reader_of(data):
        dataset = grain.MapDataset.source(data)
        source = Grain(dataset)
        assert list(source.__getitems__([*range(len(dataset))])) == [dataset[i] for i in range(len(dataset))]
        assert isinstance(source._dataset._source, BatchedSource)
        return source._dataset._source._records

    whole = grain.sources.ArrayRecordDataSource(paths)
    assert isinstance(reader_of(whole), ArrayRecord)
    for other in (grain.sources.ArrayRecordDataSource([f"{paths[0]}[2:7]", paths[1]]), Doubled(paths)):
        assert reader_of(other) is other
    with open(paths[1], "r+b") as file:
        file.truncate(100)
    with pytest.raises(errors.CorruptDataError, match=r"b\.array_record"):
        Grain(grain.MapDataset.source(whole))


def test_close_closes_the_files_that_our_reader_opened(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = str(tmp_path / "a.array_record")
    writer = module.ArrayRecordWriter(path, "group_size:1")
    for number in range(8):
        writer.write(b"%d" % number)
    writer.close()

    def is_open():
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return any(os.path.exists(link) and os.readlink(link) == path for link in links)

    records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource([path])).map(int)
    parts = grain.experimental.InterleaveIterDataset([records[:4].to_iter_dataset(), records[4:]], cycle_length=1)
    for dataset in (records, records.to_iter_dataset(), parts):
        source = Grain(dataset)
        for _ in range(2):  # a closed source opens them again
            found = list(source) if dataset is records else list(source.open(0, 1))
            assert found == [*range(8)]
            assert is_open()
            source.close()
            assert not is_open()


def test_sources_travel_to_worker_processes():
    import cloudpickle

    dataset = grain.MapDataset.source(Batched()).seed(3).shuffle().map(lambda x: x + 1)
    records = cloudpickle.loads(cloudpickle.dumps(Grain(dataset)))
    assert list(records.__getitems__([3, 1])) == [dataset[3], dataset[1]]
    mixed = grain.IterDataset.mix([dataset.to_iter_dataset(), dataset.to_iter_dataset().filter(lambda x: x % 3)])
    stream = cloudpickle.loads(cloudpickle.dumps(Grain(mixed)))
    assert [list(stream.open(lane, 2)) for lane in range(2)] == [list(Grain(mixed).open(lane, 2)) for lane in range(2)]
    assert stream.fingerprint() == Grain(mixed).fingerprint()
