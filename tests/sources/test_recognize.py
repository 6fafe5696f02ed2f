from __future__ import annotations

import collections
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

import meshfeed
from meshfeed._src.base import errors
from meshfeed._src.sources.host_batches import HostBatches
from meshfeed._src.sources.memory import Memory
from meshfeed._src.sources.recognize import as_source, describe_source
from meshfeed._src.sources.stream import Stream

Pair = collections.namedtuple("Pair", "x y")


def in_package(package, name, **members):
    """An instance of a class that calls itself ``package.name``, without that package."""
    return type(name, (), {"__module__": f"{package}.somewhere", **members})()


@pytest.mark.parametrize(
    "arrays",
    [
        np.zeros((4, 2)),
        {"x": np.zeros((4, 2)), "y": {"z": np.zeros(4)}},
        (np.zeros(4), np.zeros((4, 3))),
        Pair(np.zeros(4), np.zeros(4)),
    ],
)
def test_arrays_are_memory(arrays):
    source = as_source(arrays)
    assert isinstance(source, Memory)
    assert len(source) == 4


def test_unequal_arrays_get_the_error_of_memory():
    with pytest.raises(errors.SourceError, match="differ in length"):
        as_source({"x": np.zeros(3), "y": np.zeros(4)})


@pytest.mark.parametrize(
    "records", [[{"x": np.zeros(2)}] * 3, [np.zeros(2)] * 3, range(5), ("a", "b"), collections.deque([1, 2])]
)
def test_sequences_are_read_at_random_as_they_are(records):
    assert as_source(records) is records


def test_anything_with_length_and_items_is_read_at_random():
    class Custom:
        def __len__(self):
            return 3

        def __getitem__(self, record_id):
            return {"x": record_id}

    source = Custom()
    assert as_source(source) is source


def test_our_own_sources_and_custom_streams_pass():
    class Custom:
        def open(self, lane_index, num_lanes):
            return iter(())

    for source in (Stream(lambda *_: []), HostBatches([]), Memory(np.zeros(3)), Custom()):
        assert as_source(source) is source


def test_other_iterables_are_host_batches():
    class Restartable:
        def __iter__(self):
            return iter([{"x": np.ones(2)}])

    for iterable in (Restartable(), (batch for batch in [{"x": np.ones(2)}]), iter([{"x": np.ones(2)}])):
        source = as_source(iterable)
        assert isinstance(source, HostBatches)
        assert next(source.iterator())["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("torch.utils.data", "DataLoader"),
        ("torch.utils.data", "IterableDataset"),
        ("tensorflow.python.data", "DatasetV2"),
        ("grain._src.python", "DataLoader"),
        ("grain._src.python", "DatasetIterator"),
    ],
)
def test_loaders_are_host_batches_though_they_have_a_length(package, name):
    loader = in_package(
        package, name, __iter__=lambda self: iter([1]), __len__=lambda self: 1, __getitem__=lambda self, i: None
    )
    assert isinstance(as_source(loader), HostBatches)


def test_tf_data_is_read_as_numpy():
    dataset = in_package(
        "tensorflow.python.data.ops.dataset_ops",
        "DatasetV2",
        __iter__=lambda self: iter(()),
        as_numpy_iterator=lambda self: iter([{"x": np.ones(2)}]),
    )
    assert [batch["x"].tolist() for batch in as_source(dataset).iterator()] == [[1, 1]]


def test_torch_map_style_is_read_at_random():
    dataset = in_package("torch.utils.data", "Dataset", __len__=lambda self: 1, __getitem__=lambda self, i: 1)
    assert as_source(dataset) is dataset


def test_grain():
    grain = pytest.importorskip("grain")
    assert len(as_source(grain.MapDataset.range(5))) == 5
    assert hasattr(as_source(grain.MapDataset.range(5).to_iter_dataset()), "open")
    assert hasattr(as_source(grain.MapDataset.range(5).filter(bool)), "open")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("data/*.array_record", "got the path 'data/.*ArrayRecord"),
        (pathlib.Path("data"), "got the path 'data'"),
        (3, "cannot feed from a int"),
        (None, "cannot feed from a NoneType"),
        (list, "cannot feed from a builtins.list. Call it first"),
        (open, "Call it first"),
        (type("Records", (), {"__getitem__": lambda self, index: index})(), "and no __len__. Add"),
        ({1, 2}, "A set has no order"),
        ({"a": Memory(np.zeros(2))}, r"It holds sources. Pass .*Mixture\(.*or meshfeed.sources.Zip\(sources\)"),
        ([Memory(np.zeros(2))], r"It holds sources. Pass .*Mixture\(.*or meshfeed.sources.Concat\(sources\)"),
        (
            {"a": in_package("datasets.arrow_dataset", "Dataset"), "b": in_package("grain._src", "MapDataset")},
            "It holds sources",
        ),
        ({"x": [1, 2]}, r"but leaf \['x'\]\[0\] is 1. Convert its values"),
        (
            types.MappingProxyType({"x": np.zeros(2)}),
            r"Pass {name: numpy.asarray\(arrays\[name\]\) for name in arrays}",
        ),
        (in_package("pandas.core", "DataFrame", __len__=lambda self: 1), "A table's __getitem__ returns columns"),
        (in_package("tensorflow_datasets.core", "DatasetBuilder"), r"Pass meshfeed.sources.TFDS\(builder"),
    ],
)
def test_what_is_not_taken_gets_the_list_of_what_is(bad, words):
    with pytest.raises(errors.SourceError, match=words) as error:
        as_source(bad)
    if "got the path" not in words:
        for taken in ("Grain MapDataset", "IterableDataset", "numpy arrays", "tf.data.Dataset", "ArrayRecord(paths)"):
            assert taken in str(error.value)


def test_a_dict_of_splits_names_them():
    splits = type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})(train=[], test=[])
    with pytest.raises(errors.SourceError, match="It holds the splits 'train', 'test'"):
        as_source(splits)


@pytest.mark.slow
def test_nothing_heavy_is_imported_to_find_out():
    code = (
        "import sys\n"
        "from meshfeed._src.sources.recognize import as_source\n"
        "as_source([1, 2]); as_source(x for x in [1]); as_source(range(3))\n"
        "heavy = {'grain', 'datasets', 'tensorflow', 'tensorflow_datasets', 'torch', 'orbax', 'pyarrow'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Memory({"x": np.zeros(1234)}), "Memory(1,234 records)"),
        (lambda: Stream(open_lane), "Stream(open_lane)"),
        (lambda: HostBatches([np.zeros(3)]), "HostBatches(list)"),
        (
            lambda: meshfeed.sources.Mixture({"a": [1, 2], "b": [3]}, {"a": 1, "b": 1}),
            "Mixture(a: 2 records, b: 1 records)",
        ),
        (lambda: [np.zeros(3)] * 5, "list(5 records)"),
        (lambda: in_package("torch", "Dataset", __len__=lambda self: 1 // 0), "Dataset"),
    ],
)
def test_a_source_in_a_few_words(make, expected):
    assert describe_source(make()) == expected


def test_an_array_record_source_in_a_few_words(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    for shard in range(2):
        writer = module.ArrayRecordWriter(str(tmp_path / f"{shard}.array_record"), "group_size:1")
        writer.write(b"1")
        writer.close()
    source = meshfeed.sources.ArrayRecord(tmp_path / "*.array_record")
    assert describe_source(source) == "ArrayRecord(2 files, 2 records)"
    assert (
        describe_source(meshfeed.sources.ArrayRecord(tmp_path / "0.array_record")) == "ArrayRecord(1 file, 1 records)"
    )


def open_lane(lane_index, num_lanes):
    return iter([])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"x": np.zeros((4, 2)), "y": 3}, r"leaf \['y'\] is 3"),
        ({"x": np.zeros(4), "more": {"name": "a"}}, r"leaf \['more'\]\['name'\] is 'a'"),
        ({}, "it has no leaves"),
    ],
)
def test_a_dict_with_a_leaf_that_is_no_array_names_the_leaf(given: dict[str, object], named: str) -> None:
    with pytest.raises(errors.SourceError, match=f"dict of equally long numpy arrays, but {named}. Convert"):
        as_source(given)
