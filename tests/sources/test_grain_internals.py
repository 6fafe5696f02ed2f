"""What happens when a version of Grain has renamed what is private."""

from __future__ import annotations

import inspect
import threading

import grain
import pytest
from grain import experimental
from hidden_names import hide, renamed

from meshfeed._src.base.errors import SourceError
from meshfeed._src.sources.grain import internals
from meshfeed.sources import Grain


def numbers(count=20):
    return grain.MapDataset.range(count).to_iter_dataset()


def interleaved():
    return experimental.InterleaveIterDataset([numbers(4), numbers(5)], cycle_length=2)


class Twice(experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


PIPELINES = {
    "PrefetchIterDataset": numbers,
    "InterleaveIterDataset": interleaved,
    "LimitIterDataset": lambda: experimental.LimitIterDataset(numbers(), 3),
    "MapWithIndexIterDataset": lambda: numbers().map_with_index(lambda i, x: x),
    "RandomMapIterDataset": lambda: numbers().random_map(lambda x, rng: x, seed=1),
    "WindowShuffleIterDataset": lambda: experimental.WindowShuffleIterDataset(numbers(), window_size=2, seed=1),
    "BatchIterDataset": lambda: numbers().batch(2),
    "FlatMapIterDataset": lambda: experimental.FlatMapIterDataset(numbers(), Twice()),
}


def grains_classes():
    """Grain's datasets, without those that tests define and those that only Grain itself puts into a pipeline."""
    found, waiting = set(), [grain.MapDataset, grain.IterDataset]
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith("grain.") and not inspect.isabstract(kind):
                found.add(kind.__name__)
    return found


def test_every_class_of_this_version_is_known():
    mixins = {"_ElementSpecFromTransformMapDatasetMixin", "_ElementSpecFromTransformIterDatasetMixin"}
    unknown = grains_classes() - internals._PIPELINES - internals._RECORDS - mixins
    # Subclasses of known ones, and what Grain adds to each pipeline when it is iterated.
    assert unknown <= {
        *("BestFitPackIterDataset", "FirstFitPackIterDataset", "ConcatenateMapDataset", "_OutputIterDataset")
    }


@pytest.mark.parametrize("name", list(PIPELINES))
def test_the_names_are_there_and_a_missing_one_is_refused(name, monkeypatch):
    dataset = PIPELINES[name]()
    assert type(dataset).__name__ == name
    Grain(dataset).check_lanes(2)
    for attribute in internals._ATTRIBUTES[name]:
        with monkeypatch.context() as context:
            hide(context, type(dataset), f"_{attribute}")
            with pytest.raises(
                SourceError,
                match=rf"(?s)Grain .* has no {name}\._{attribute}, .*'grain==0.2.18'.*Stream\(open\)",
            ):
                Grain(dataset).check_lanes(2)


@pytest.mark.parametrize("name", list(PIPELINES))
def test_a_renamed_class_is_refused(name):
    dataset = PIPELINES[name]()
    with (
        renamed(type(dataset), "RenamedIterDataset"),
        pytest.raises(SourceError, match=r"(?s)Grain .* has a RenamedIterDataset.*Stream\(open\)"),
    ):
        Grain(dataset)


def test_a_renamed_map_dataset_is_described_by_its_elements():
    def fingerprint_of(values):
        return Grain(grain.MapDataset.source(values)).fingerprint()

    with renamed(type(grain.MapDataset.source([1])), "RenamedMapDataset"):
        assert fingerprint_of([1, 2, 3]) != fingerprint_of([1, 2, 4])
        assert fingerprint_of([1, 2, 3]) == fingerprint_of([1, 2, 3])


def test_a_renamed_filter_is_an_error_at_the_missing_element():
    dataset = grain.MapDataset.range(9).filter(lambda x: x % 2 == 0)
    with renamed(type(dataset), "RenamedMapDataset"):
        with pytest.raises(SourceError, match=r"element 1 of the Grain dataset .* is None"):
            Grain(dataset)[1]


def test_without_batched_reads_elements_are_read_one_by_one(monkeypatch):
    class Batched:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return index

        def __getitems__(self, indices):
            raise AssertionError("reached although hidden")

    hide(monkeypatch, grain.MapDataset, "_getitems")
    assert list(Grain(grain.MapDataset.source(Batched())).__getitems__([3, 1])) == [3, 1]


def test_without_the_list_of_files_grain_reads_array_record_itself(tmp_path, monkeypatch):
    from array_record.python.array_record_module import ArrayRecordWriter

    path = str(tmp_path / "a.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for i in range(4):
        writer.write(bytes([i]))
    writer.close()
    source = grain.sources.ArrayRecordDataSource(path)
    assert internals.array_record_files(source) == [(path, 4)]
    for name in ("_read_instructions", "_reader_options_string"):
        with monkeypatch.context() as context:
            hide(context, type(source), name)
            assert internals.array_record_files(source) is None
            assert list(Grain(grain.MapDataset.source(source)).__getitems__([2, 0])) == [b"\x02", b"\x00"]


def test_without_the_options_of_an_iterator_an_interleave_is_refused(monkeypatch):
    lane = Grain(interleaved()).open(0, 1)
    hide(monkeypatch, grain.DatasetIterator, "_ctx")
    with pytest.raises(SourceError, match=r"keeps the options of an iterator elsewhere"):
        next(lane)


def test_reader_threads_that_cannot_be_found_are_left_with_a_warning(monkeypatch, caplog):
    iterator = iter(numbers())
    with monkeypatch.context() as context:
        hide(context, grain.DatasetIterator, "_executor")
        internals._keeps_executors.cache_clear()
        internals.use_daemon_threads(iterator)
        internals.use_daemon_threads(iterator)
    internals._keeps_executors.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "keeps its reader threads elsewhere" in caplog.text
    assert next(iterator) == 0


def test_reader_threads_become_daemons():
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    iterator = iter(grain.MapDataset.range(20).to_iter_dataset(options).map(lambda x: x))
    others = set(threading.enumerate())
    internals.use_daemon_threads(iterator)
    assert next(iterator) == 0
    threads = [thread for thread in set(threading.enumerate()) - others if "grain-prefetch" in thread.name]
    assert threads
    assert all(thread.daemon for thread in threads)
    assert list(iterator) == list(range(1, 20))


def test_a_batch_function_of_the_user_is_not_taken_for_grains():
    def pad(values):
        return values

    assert internals.pads_batches(numbers().batch(3, batch_fn=pad))
    assert not internals.pads_batches(numbers().batch(3))
