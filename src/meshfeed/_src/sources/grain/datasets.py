"""A Grain MapDataset as a random-access source, an IterDataset as a stream of lanes, and their fingerprints.

A fingerprint holds the transforms of a pipeline, their settings and the data. It is the same in every process: it contains
no object address, ``hash()`` or folder name. A function is identified by its name, since its code cannot be compared.
Settings that change no record, such as read options, are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypeGuard

import grain
import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import MeshfeedError, SourceError, StateMismatchError
from meshfeed._src.base.types import JsonValue, RandomAccessSource, Record
from meshfeed._src.reading.identity import digest_raw, encode, probe_digest, probe_ids
from meshfeed._src.sources.checks import check_ids
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.stream import CUT_EVENLY
from meshfeed._src.sources.grain import internals, lanes
from meshfeed._src.sources.grain.internals import GrainIterator, Node, Pipeline, Records, is_named, private
from meshfeed._src.sources.grain.lanes import Datasets
from meshfeed._src.state.state import digest_of

_MAX_ITEMS = 64  # longer containers are left out
_MAX_CHOICES = 256  # elements of a mixture whose choice of component enters the digest
_MAX_DATASETS = 1024  # an interleave of more datasets is sampled
_MAX_CHARACTERS = 200  # a longer setting is replaced by its digest
_LEFT_OUT = internals.CHANGE_NO_RECORD | internals.REDUNDANT
_NOT_PLAIN = object()
_TRANSFORMS = (grain.transforms.Map, grain.transforms.RandomMap, grain.transforms.Filter)


class GrainRecords:
    """Elements of a ``grain.MapDataset`` without missing ones, by index; resumes exactly on any number of hosts.

    Reads several records at once if the underlying data source has ``__getitems__``, as
    ``grain.sources.ArrayRecordDataSource`` does. Never reads elements beyond the first epoch: the feed's ``shuffle``,
    ``seed`` and ``num_epochs`` order the records, and each epoch has the same ones.

    Raises:
      SourceError: the dataset is empty, or ends in a batch() whose last batch is short.
    """

    def __init__(self, dataset: Records) -> None:
        self._given = dataset
        self._length = min(len(dataset), lanes.ENDLESS)
        if not self._length:
            raise SourceError(f"the Grain dataset {dataset} has no elements. Expected at least one.")
        lanes.check_batched(dataset)
        lanes.warn_batched(dataset)
        self._dataset = lanes.copy_tree(dataset, lanes.batched_sources)
        internals.set_up(self._dataset)

    def __repr__(self) -> str:
        return f"Grain({len(self):,} records)"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_id: SupportsIndex) -> Record:
        """Element ``record_id``; see ``__getitems__``."""
        return self.__getitems__([record_id])[0]

    def __getitems__(self, record_ids: Sequence[SupportsIndex] | np.ndarray) -> Sequence[Record]:
        """Several elements, in the order of ``record_ids``.

        Raises:
          IndexError: an id is not in [0, len).
          SourceError: an element is missing.
        """
        indices = [operator.index(record_id) for record_id in record_ids]
        check_ids(indices, self._length)
        records = internals.read_many(self._dataset, indices)
        for index, record in zip(indices, records, strict=True):
            if record is None:
                raise SourceError(
                    f"element {index} of the Grain dataset {self._given} is None, which means missing. Expected a "
                    "record for every index. Pass dataset.to_iter_dataset(), which leaves missing elements out.",
                    record_id=index,
                )
        return records

    def close(self) -> None:
        """Closes files that were opened for the dataset."""
        lanes.close_sources(self._dataset)

    def file_names(self) -> list[str]:
        """Paths of the files that the pipeline reads."""
        return file_names(self._given)

    def fingerprint(self) -> JsonValue:
        """Identity: number of records, the transforms with their settings, and the underlying data."""
        return {"kind": "grain", "records": self._length, **describe(self._given)}


class GrainStream:
    """A ``grain.IterDataset``, split into lanes at its sources; it is not modified.

    Raises:
      SourceError: the pipeline batches and shards by itself.
    """

    def __init__(self, dataset: Pipeline) -> None:
        self._dataset = lanes.without_prefetch(dataset)
        lanes.warn_batched(self._dataset)
        lanes.check(self._dataset, 1)
        # Grain's rebatch yields an empty batch when it resumes from a state saved at the end.
        self._exact = not any(internals.is_named(node, internals.REBATCH) for node in lanes.walk(self._dataset))
        self._counts: dict[str, list[int] | None] = {}
        self._version = CUT_EVENLY

    def __repr__(self) -> str:
        return f"Grain({type(self._dataset).__name__})"

    def check_lanes(self, num_lanes: int) -> None:
        """Checks that the pipeline can be split into lanes whose records have one shape; reads no data.

        Raises:
          SourceError: a node cannot be split into ``num_lanes`` lanes (the message shows how to write
            ``Stream(open)``), or the pipeline ends in a ``batch()`` whose last batch is known to be short in some lane.
        """
        lanes.check(self._dataset, num_lanes)
        lanes.check_batched(self._dataset, num_lanes)

    def open(self, lane_index: int, num_lanes: int, epoch: int = 0) -> GrainLane | StatefulGrainLane:
        """Lane ``lane_index`` of ``num_lanes``, from the beginning.

        A later epoch shuffles a MapDataset as Grain's ``repeat`` does, and reseeds ``random_map``.
        """
        dataset = lanes.cut(self._dataset, self._place(lane_index, num_lanes, epoch))
        iterator = dataset.__iter__()
        stateful = self._exact and _has_state(iterator)
        return (StatefulGrainLane if stateful else GrainLane)(dataset, iterator, lane_index)

    def _place(self, lane_index: int, num_lanes: int, epoch: int = 0) -> lanes.Place:
        salt = (lane_index, epoch)
        return lanes.Place(lane_index, num_lanes, epoch, num_lanes, salt, self._counts, self._version)

    def cut_version(self, num_lanes: int) -> int:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`; opens each Parquet file to count its rows."""
        return lanes.cut_version(self._dataset, self.with_cut(CUT_EVENLY)._place(0, num_lanes))

    def with_cut(self, version: int) -> GrainStream:
        """See :class:`meshfeed._src.base.hooks.CutsLanes`."""
        other = copy.copy(self)
        other._version = version
        return other

    def lane_lengths(self, num_lanes: int) -> list[int] | None:
        """See :class:`meshfeed._src.base.hooks.CountsLanes`: records of the lane's sources, before any transform."""
        lengths = [lanes.lane_length(self._dataset, self._place(lane, num_lanes)) for lane in range(num_lanes)]
        known = [length for length in lengths if length is not None]
        return known if len(known) == num_lanes else None

    def close(self) -> None:
        """Closes files that were opened for the pipeline."""
        lanes.close_sources(self._dataset)

    def file_names(self) -> list[str]:
        """Paths of the files that the pipeline reads."""
        return file_names(self._dataset)

    def fingerprint(self) -> JsonValue:
        """Identity: the transforms with their settings, except prefetching, and the underlying data."""
        return {"kind": "grain_stream", **describe(self._dataset)}


class GrainLane:
    """One lane of a :class:`GrainStream`."""

    def __init__(self, dataset: Pipeline, iterator: GrainIterator, lane_index: int) -> None:
        self._dataset, self._iterator, self._lane_index = dataset, iterator, lane_index
        self._ended = False

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        try:
            for record in () if self._ended else self._iterator:
                if record is not None:  # to_iter_dataset(allow_nones=True) yields None for missing elements
                    return record
        except SourceError as error:
            if error.lane_index is None:  # a function or a file of the pipeline, which several lanes may share
                error.lane_index = self._lane_index
                error.add_note(f"in lane {self._lane_index}")
            raise
        self._ended = True  # some Grain iterators would start over
        raise StopIteration

    def close(self) -> None:
        """Discards data read ahead; the threads end when the last lane is closed."""
        self._iterator.close()


class StatefulGrainLane(GrainLane):
    """One lane of a :class:`GrainStream`; its state is Grain's own."""

    def get_state(self) -> JsonValue:
        """State after the last record returned; it may contain tuples."""
        return self._iterator.get_state()

    def set_state(self, state: JsonValue) -> None:
        """Resumes after the record at which ``state`` was taken.

        Raises:
          StateMismatchError: the pipeline rejects the state.
        """
        iterator = self._dataset.__iter__()  # a used iterator may keep elements, as Grain's flat_map does
        try:
            iterator.set_state(copy.deepcopy(state))  # Grain keeps a reference to the state and modifies it
        except (MeshfeedError, OSError):
            raise
        except Exception as error:
            raise StateMismatchError(
                f"lanes.{self._lane_index}",
                state,
                f"a pipeline that refuses it: {type(error).__name__}: {error}",
                "Pass the pipeline, the data and the version of Grain that the state was saved with.",
            ) from error
        self._iterator.close()
        self._iterator, self._ended = iterator, False


def _has_state(iterator: GrainIterator) -> bool:
    try:
        iterator.get_state()
    except (NotImplementedError, AttributeError):  # a user's iterator without state
        return False
    return True


def describe(dataset: Node) -> dict[str, JsonValue]:
    """``{"pipeline": {"0 SourceMapDataset": {…}, "1 MapMapDataset": {…}, …}}``, sources first."""
    nodes = [node for node in lanes.walk(dataset) if not is_named(node, internals.OPTIONS)]
    return {"pipeline": {f"{index} {type(node).__name__}": _settings(node) for index, node in enumerate(nodes)}}


def _settings(node: Node) -> dict[str, JsonValue]:
    settings: dict[str, JsonValue] = {}
    for name, value in sorted(vars(node).items()):
        cached = isinstance(getattr(type(node), name, None), functools.cached_property)  # present only after first use
        plain = _NOT_PLAIN if cached or name in _LEFT_OUT else _plain(value)
        if plain is not _NOT_PLAIN and plain not in (None, [], {}):
            settings[name.lstrip("_")] = plain if len(json.dumps(plain)) <= _MAX_CHARACTERS else digest_of(plain)
    return settings | _describe_data(node)


def _describe_data(node: Node) -> dict[str, JsonValue]:
    """What a node reads, if its attributes do not tell."""
    source = internals.source_of(node)
    if source is not None:
        return {"source": "the node before" if isinstance(source, grain.MapDataset) else identify(source)}
    if paths := _paths_of(node):
        return {"path" if is_named(node, internals.TFRECORD) else "paths": identify_paths(paths)}
    if is_named(node, internals.MIX):
        choice = private(node, "selection_map")
        # The map may be the user's own, so it is described by what it selects.
        return {"selection": digest_of([list(choice[index]) for index in range(min(_MAX_CHOICES, len(choice)))])}
    if is_named(node, internals.INTERLEAVE):
        return _describe_datasets(private(node, "datasets"))
    if isinstance(node, grain.MapDataset) and internals.is_unknown(node):
        return {"content": _digest_content(node)}
    return {}


def _describe_datasets(datasets: Datasets) -> dict[str, JsonValue]:
    """Datasets of an interleave: their number, the pipeline that makes them, and a digest of their descriptions."""
    count = len(datasets)
    described: dict[str, JsonValue] = {"datasets": count}
    if isinstance(datasets, grain.MapDataset):
        described["made_by"] = describe(datasets)["pipeline"]
        some = range(min(count, 1))  # each access makes a dataset anew, with the user's function
    else:
        some = range(count) if count <= _MAX_DATASETS else probe_ids(count).tolist()
    chosen = [datasets[index] for index in some]
    each = [None if dataset is None else describe(lanes.without_prefetch(dataset)) for dataset in chosen]
    return {**described, "content": digest_of(each)}


def _paths_of(node: Node) -> Sequence[str | os.PathLike[str]]:
    """Paths of the files of a Parquet or TFRecord node; empty for other nodes."""
    if is_named(node, internals.PARQUET):
        return private(node, "paths")
    return [private(node, "path")] if is_named(node, internals.TFRECORD) else []


def file_names(dataset: Node) -> list[str]:
    """Paths of the files that a pipeline reads, as far as its nodes and data sources expose them."""
    names: list[object] = []
    for node in lanes.walk(dataset):
        source = internals.source_of(node)
        source = source.source if isinstance(source, internals.BatchedSource) else source
        paths = getattr(source, "paths", ())
        names += [*_paths_of(node), *([paths] if isinstance(paths, str | os.PathLike) else paths)]
    return [os.fspath(name) for name in names if isinstance(name, str | os.PathLike)]


def identify(source: Any) -> JsonValue:
    """Identity of a data source: its own fingerprint if it has one, otherwise its files and a digest of 4 records.

    A list of file names is identified by the files alone.
    """
    source = source.source if isinstance(source, internals.BatchedSource) else source
    own = hooks.find(source, hooks.Fingerprinted)
    if own is not None:
        return own.fingerprint()
    identity: dict[str, JsonValue] = {"type": type(source).__name__}
    count = len(source) if hasattr(source, "__len__") else None
    if count is not None:
        identity["records"] = count
    paths = getattr(source, "paths", None)
    if paths is None and _is_list_of_files(source):
        return {**identity, "files": identify_paths(source)}
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    if _are_paths(paths):
        identity["files"] = identify_paths(paths)
    if count:
        identity["content"] = _digest_content(source)
    return identity


def identify_paths(paths: Sequence[str | bytes | os.PathLike[str]]) -> JsonValue:
    """Identity of files by base name and size, which does not change if the folder is moved."""
    names = list(map(os.fsdecode, paths))
    try:
        return file_paths.identify_files(names, file_paths.file_sizes(names, source="Grain"))
    except SourceError:  # a URL whose size needs fsspec, which is missing; Grain reads it by other means
        return file_paths.identify_files(names, [0] * len(names))


def _are_paths(items: object) -> TypeGuard[Sequence[str | os.PathLike[str]]]:
    return isinstance(items, Sequence) and bool(items) and all(isinstance(item, str | os.PathLike) for item in items)


def _is_list_of_files(source: object) -> bool:
    if not isinstance(source, list | tuple) or not _are_paths(source):
        return False
    return all(file_paths.is_url(os.fspath(path)) or os.path.isfile(path) for path in source)


def _digest_content(source: RandomAccessSource) -> str:
    def digest(ids: np.ndarray) -> str:
        flat = (trees.flatten(source[index]) for index in ids.tolist())
        return digest_raw(encode([[str(structure), leaves] for leaves, structure in flat]))

    return probe_digest(len(source), digest)


def _plain(value: object) -> Any:
    """``value`` as JSON that is the same in every process; ``_NOT_PLAIN`` if it has no such form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if isinstance(value, type) or hasattr(value, "__code__") or hasattr(value, "__func__"):
        return getattr(value, "__name__", _NOT_PLAIN)
    return _plain_content(value)


def _plain_content(value: object) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **_plain_items(fields)}
    if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS and all(isinstance(key, str) for key in value):
        return _plain_items(value)
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return [item for item in map(_plain, value) if item is not _NOT_PLAIN]
    return type(value).__name__ if callable(value) or isinstance(value, _TRANSFORMS) else _NOT_PLAIN


def _plain_items(values: Mapping[str, object]) -> dict[str, Any]:
    plain = {key: _plain(value) for key, value in values.items()}
    return {key: item for key, item in plain.items() if item is not _NOT_PLAIN}
