"""What happens when a version of datasets has renamed what is private."""

from __future__ import annotations

import importlib.util
import inspect

import numpy as np
import pytest
from hidden_names import hide, renamed

datasets = pytest.importorskip("datasets")

from datasets import iterable_dataset  # noqa: E402  # after the check that datasets is installed

from meshfeed._src.base.errors import SourceError  # noqa: E402
from meshfeed._src.sources.huggingface import cut, internals  # noqa: E402
from meshfeed.sources import HuggingFace  # noqa: E402

MISSING = r"datasets \d.* (lacks a function|has no) .*'datasets~=5\.0\.0'.*Stream\("


def numbers():
    return datasets.Dataset.from_dict({"id": list(range(12))}).to_iterable_dataset(num_shards=3)


def generated():
    def rows(parts):
        for part in parts:
            yield {"id": part}

    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": [1, 2, 3]})


def shuffled():
    return datasets.Dataset.from_dict({"id": list(range(12))}).shuffle(seed=1)


STREAMS = {
    "ExamplesIterable": generated,
    "ArrowExamplesIterable": numbers,
    "SelectColumnsIterable": lambda: numbers().select_columns(["id"]),
    "MappedExamplesIterable": lambda: numbers().map(lambda row: row),
    "FilteredExamplesIterable": lambda: numbers().filter(lambda row: True),
    "SkipExamplesIterable": lambda: numbers().skip(1),
    "TakeExamplesIterable": lambda: numbers().take(5),
    "RepeatExamplesIterable": lambda: numbers().repeat(2),
    "CyclingMultiSourcesExamplesIterable": lambda: datasets.interleave_datasets([numbers(), numbers()]),
    "RandomlyCyclingMultiSourcesExamplesIterable": lambda: datasets.interleave_datasets(
        [numbers(), numbers()], probabilities=[0.5, 0.5], seed=1
    ),
    "VerticallyConcatenatedMultiSourcesExamplesIterable": lambda: datasets.concatenate_datasets([numbers(), numbers()]),
}


def node_of(dataset, name):
    from meshfeed._src.sources.huggingface.cut import walk

    return next(node for node in walk(dataset._ex_iterable) if type(node).__name__ == name)


def test_every_node_of_this_version_is_known():
    base = iterable_dataset._BaseExamplesIterable
    found = {
        name
        for name, kind in vars(iterable_dataset).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base
    }
    assert found <= set(internals._NODES)  # older versions lack some


@pytest.mark.parametrize("name", list(STREAMS))
def test_the_names_are_there_and_a_missing_one_is_refused(name, monkeypatch):
    dataset = STREAMS[name]()
    kind = type(node_of(dataset, name))
    assert len(list(HuggingFace(dataset).open(0, 1))) > 0
    for attribute in (*internals._NODES[name], *internals._METHODS):
        with monkeypatch.context() as context:
            hide(context, kind, attribute)
            with pytest.raises(SourceError, match=rf"{MISSING}"):
                HuggingFace(dataset)
    with (
        renamed(kind, "RenamedIterable"),
        pytest.raises(SourceError, match="has a RenamedIterable, which is not known"),
    ):
        HuggingFace(dataset)


def test_a_renamed_shuffle_buffer_is_refused():
    dataset = numbers().shuffle(seed=1, buffer_size=4)
    kind = type(node_of(dataset, internals.SHUFFLED))
    with (
        renamed(kind, "RenamedIterable"),
        pytest.raises(SourceError, match="has a RenamedIterable, which is not known"),
    ):
        HuggingFace(dataset)


@pytest.mark.parametrize("name", ["_ex_iterable", "_distributed", "_token_per_repo_id"])
def test_a_stream_without_its_private_attributes_is_refused(name, monkeypatch):
    hide(monkeypatch, datasets.IterableDataset, name)
    with pytest.raises(SourceError, match=rf"IterableDataset\.{name}"):
        HuggingFace(STREAMS["MappedExamplesIterable"]()).open(0, 1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("datasets.iterable_dataset", "_BaseExamplesIterable"),
        ("datasets.features.features", "require_decoding"),
        ("datasets.table", "table_cast"),
        ("datasets.utils.file_utils", "xopen"),
        ("datasets", "Dataset._generate_tables_from_shards"),
        ("datasets.packaged_modules.arrow.arrow", "Arrow._cast_table"),
    ],
)
def test_a_missing_function_is_refused_at_the_first_dataset(module, name, monkeypatch):
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, last)
    spec = importlib.util.spec_from_file_location("unimportable", internals.__file__)
    with pytest.raises(SourceError, match=MISSING):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_without_row_numbers_datasets_finds_the_rows(monkeypatch):
    ids = [3, 0, 11, 3]
    expected = HuggingFace(shuffled()).read_batch(ids)["id"]
    hide(monkeypatch, datasets.Dataset, "_indices")
    source = HuggingFace(shuffled())
    batch = source.read_batch(ids)["id"]
    assert batch.dtype == expected.dtype == np.int64
    assert batch.tolist() == expected.tolist() == [shuffled()[i]["id"] for i in ids]
    assert source[5] == HuggingFace(shuffled())[5]


@pytest.mark.parametrize("error", [ConnectionError("Server Disconnected"), TimeoutError()])
def test_a_lost_connection_is_no_damage_of_the_file(error: OSError) -> None:
    with pytest.raises(type(error)), cut._damage_named("https://host/a.json", "file for datasets' json reader"):
        raise error
