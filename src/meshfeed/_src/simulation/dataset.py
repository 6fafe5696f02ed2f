"""The files of a data set and which of them each batch of a host needs, in the real order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.types import JsonValue, RecordIds, RecordOrder
from meshfeed._src.order.mixture import join_ids, split_ids
from meshfeed._src.sources.files.manifest import DataManifest, read_manifest
from meshfeed._src.sources.mixture.mixture import Mixture
from meshfeed._src.sources.mixture.random_access import RandomMixture
from meshfeed._src.sources.recognize import as_source

_IDS_AT_ONCE = 1 << 20
Rows = Sequence[tuple[int, int]]
"""The rows of the global batch that a host reads, as ranges ``(first, stop)``."""


class FileRecords:
    """A source that has the files of a data set, and no records to read.

    Args:
      names: paths or URLs.
      num_bytes: sizes in bytes, int64[files].
      num_records: records of each file, int64[files].

    Raises:
      SourceError: if there are no records.
    """

    kind = "files"

    def __init__(self, names: Sequence[str], num_bytes: RecordIds, num_records: RecordIds) -> None:
        self._names, self.num_bytes, self._lengths = names, num_bytes, num_records
        self.ends = np.cumsum(num_records)
        if not len(names) or not self.ends[-1]:
            where = f" of {names[0]} and others" if names else ""
            raise SourceError(
                f"there are {len(names):,} files{where} without records to simulate. Pass other manifests."
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, record_id: int) -> object:
        raise SourceError(f"record {record_id} of a simulated data set cannot be read.")

    def shard_lengths(self) -> RecordIds:
        """Returns the number of records of each file, int64[files]."""
        return self._lengths

    def file_of(self, record_id: int) -> str:
        """Returns the file that holds a record."""
        return self._names[int(np.searchsorted(self.ends, record_id, side="right"))]

    def fingerprint(self) -> JsonValue:
        """Returns the number of files and their bytes."""
        return [len(self._names), int(self.num_bytes.sum())]


class SimulatedData:
    """A source, and the files of its records.

    Args:
      source: a random-access source.
      numbers: returns the numbers of the files that a batch of these record ids, int64[rows, batches], needs, one array of
        distinct numbers per batch.
      file_bytes: the size of each file in bytes; may grow until the last call of ``numbers``.
      name: what the data set is called.
    """

    def __init__(
        self,
        source: Any,
        numbers: Callable[[RecordIds], list[RecordIds]],
        file_bytes: Callable[[], Sequence[int]],
        name: str,
    ) -> None:
        self.source, self.numbers, self.file_bytes, self.name = source, numbers, file_bytes, name

    @classmethod
    def of_files(cls, parts: Sequence[FileRecords], weights: Sequence[float] | None, name: str) -> SimulatedData:
        """Returns a mixture of data sets, by weight; of one data set, or without weights, all files as one data set.

        Raises:
          SettingsError: the weights do not fit the data sets.
        """
        sizes = np.concatenate([part.num_bytes for part in parts])
        if weights is None:
            lengths = np.concatenate([part.shard_lengths() for part in parts])
            names = [part.file_of(int(first)) for part in parts for first in part.ends - 1]
            whole = parts[0] if len(parts) == 1 else FileRecords(names, sizes, lengths)
            return cls(whole, lambda ids: _distinct(np.searchsorted(whole.ends, ids, side="right")), sizes.tolist, name)
        if len(weights) != len(parts):
            raise SettingsError(
                f"weights={list(weights)!r} has {len(weights)} entries for {len(parts)} manifests. Pass one per manifest.",
                setting="weights",
            )
        named = {f"{number}": part for number, part in enumerate(parts)}
        mixed = Mixture(named, dict(zip(named, weights, strict=True)))
        firsts = np.cumsum([0, *(len(part.num_bytes) for part in parts)])

        def numbers(ids: RecordIds) -> list[RecordIds]:
            components, rows = split_ids(ids)
            found = np.empty_like(ids)
            for number, part in enumerate(parts):
                here = components == number
                found[here] = firsts[number] + np.searchsorted(part.ends, rows[here], side="right")
            return _distinct(found)

        return cls(mixed, numbers, sizes.tolist, name)

    @classmethod
    def of_source(cls, source: Any) -> SimulatedData:
        """Returns the data set of a source that reads its files through a cache.

        Raises:
          SettingsError: if it reads no file through a cache.
        """
        source = as_source(source)
        files = hooks.find(source, hooks.CachesFiles)
        if files is None or files.cached_files(np.empty(0, np.int64)) is None:
            raise SettingsError(
                f"{type(source).__name__} reads no file through a ShardCache that fetches ahead. Pass manifests, or a source "
                "with cache=meshfeed.ShardCache(…).",
                setting="source",
            )
        # Of all files: those that only other hosts need, or later batches, belong to the data set too.
        known = {file: number for number, file in enumerate(dict.fromkeys(files.cached_files(_firsts(source)) or ()))}

        def numbers(ids: RecordIds) -> list[RecordIds]:
            found = [files.cached_files(batch) or () for batch in np.ascontiguousarray(ids.T)]
            return [np.array([known.setdefault(file, len(known)) for file in batch], np.int64) for batch in found]

        return cls(source, numbers, lambda: [file.num_bytes for file in known], type(source).__name__)


def _firsts(source: Any) -> RecordIds:
    """Returns the first record of each file, int64[n]; none of sources that do not list their files."""
    if isinstance(source, RandomMixture):
        parts = enumerate(map(_firsts, source.components.sources.values()))
        return np.concatenate([join_ids(number, firsts) for number, firsts in parts])
    sharded = hooks.find(source, hooks.Sharded)
    if sharded is None or hooks.find(source, hooks.NumbersRecords) is not None:
        return np.empty(0, np.int64)
    lengths = sharded.shard_lengths()
    return (np.cumsum(lengths) - lengths)[lengths > 0]


def _distinct(numbers: RecordIds) -> list[RecordIds]:
    """Returns the distinct numbers of each column."""
    ordered = np.sort(numbers, axis=0)
    first = np.ones(ordered.shape, bool)
    first[1:] = ordered[1:] != ordered[:-1]
    counts = np.cumsum(first.sum(axis=0))[:-1]
    return np.split(ordered.T[first.T], counts)


def read_manifests(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[DataManifest, FileRecords]]:
    """Reads manifests, and the files that they list.

    Raises:
      SourceError: a manifest does not exist, or lists no records.
      CorruptDataError: a file is not a manifest.
      OSError: a manifest cannot be read.
    """
    found = []
    for path in paths:
        manifest = read_manifest(os.fspath(path))
        sizes = np.array([file.num_bytes for file in manifest.files], np.int64)
        lengths = np.array([file.num_records for file in manifest.files], np.int64)
        if not lengths.sum():
            raise SourceError(
                f"{manifest.path} lists {len(lengths):,} files with 0 records. Expected at least one record."
            )
        found.append((manifest, FileRecords([file.path for file in manifest.files], sizes, lengths)))
    return found


def uses_of_batches(dataset: SimulatedData, order: RecordOrder, rows: Rows, starts: RecordIds) -> list[RecordIds]:
    """Returns the numbers of the files that a host needs for batches at positions ``starts``, int64[batches]."""
    held = np.concatenate([np.arange(first, stop, dtype=np.int64) for first, stop in rows])
    found: list[RecordIds] = []
    for part in _chunks(starts, max(1, _IDS_AT_ONCE // held.size)):
        # Rows first: orders along shards compute consecutive records of a lane together.
        positions = (part[None, :] + held[:, None]).ravel()
        found += dataset.numbers(order.ids_at(positions)[0].reshape(held.size, part.size))
    return found


def _chunks(values: RecordIds, size: int) -> Iterator[RecordIds]:
    for first, stop in itertools.pairwise([*range(0, values.size, size), values.size]):
        yield values[first:stop]
