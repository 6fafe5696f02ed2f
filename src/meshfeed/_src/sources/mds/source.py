"""Data sets of Mosaic Streaming (MDS) as one random-access source, read in batches."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SourceError
from meshfeed._src.base.tracebacks import hides_own_frames
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.reading.host_batch import RecordStack
from meshfeed._src.reading.identity import digest_raw, probe_digest
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.shards import (
    OpenFile,
    Shard,
    ShardReader,
    Shards,
    ShardSource,
    Spans,
    check_cache,
    need_cache,
)
from meshfeed._src.sources.mds.encodings import Column, Layout, check_columns, check_stackable, decoder, stack

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_INDEX = "index.json"
_WORD = np.dtype("<u4")
_IMAGES = frozenset(["jpeg", "png"])


@dataclasses.dataclass(frozen=True)
class MDSShard(Shard):
    """One MDS shard as its index describes it.

    Attributes:
      name: name of the uncompressed file, which identifies the shard.
    """

    source: ClassVar[str] = "MDS"
    name: str


@dataclasses.dataclass(frozen=True)
class _CheckedShard:
    """A checked shard.

    Attributes:
      shard: the shard.
      offsets: uint32[records + 1], the first byte of each sample and the end of the last one.
      open: opens the file.
    """

    shard: MDSShard
    offsets: np.ndarray
    open: OpenFile


@public("meshfeed.sources")
class MDS(ShardSource[MDSShard, _CheckedShard]):
    """Random-access source over data sets that Mosaic Streaming's ``MDSWriter`` wrote, concatenated in order.

    ``index.json`` lists the shards, so opening a data set reads no shard. A record is a dict of columns. In
    ``source[i]`` it has the values that Mosaic Streaming returns, except that images are uint8 arrays. A feed stacks
    numbers, arrays, and images of one size; for text and bytes, use :class:`meshfeed.sources.Map` or leave the columns
    out.

    Safe to read from several threads. A source can be pickled, without its open files.

    Args:
      paths: the folder or URL that contains ``index.json``, a glob of such folders, or a list of these.
      columns: names of the columns to read; None for all.
      image_bytes: if True, columns of JPEG and PNG images are the bytes of the stored files.
      cache: cache on a local disk; required for compressed shards. Without it, remote records are read as byte ranges.

    Raises:
      SettingsError: if there is a compressed shard and no cache.
      SourceError: if there is no index, a shard is missing, data sets have different columns, a column is pickled or has
        an unknown encoding, or there is no record.
      CorruptDataError: if an index is not valid, or a local shard has a different size than its index; names the file.
    """

    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        columns: Sequence[str] | None = None,
        *,
        image_bytes: bool = False,
        cache: ShardCache | None = None,
    ) -> None:
        check_cache(cache, source="MDS")
        folders = _expand_folders(paths)
        need_cache(folders, cache, source="MDS")
        found = file_paths.in_threads(lambda folder: _read_index(folder, cache), folders)
        self._columns = _same_columns(found, folders)
        self._layout = Layout(self._columns)
        chosen = _choose(self._columns, columns, folders[0])
        check_columns([column for _, column in chosen], what=folders[0])
        self._chosen = [
            (number, dataclasses.replace(column, encoding="bytes"))
            if image_bytes and column.encoding in _IMAGES
            else (number, column)
            for number, column in chosen
        ]
        shards = Shards([shard for _, part in found for shard in part], "MDS")
        super().__init__(ShardReader(shards, cache, _check_shard))

    def __getitem__(self, record_id: Any) -> dict[str, Any]:
        """Returns record ``record_id``: column name → value."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several records, in the order of ``record_ids``.

        Raises:
          IndexError: if an id is not in [0, len).
          CorruptDataError: if a stored value cannot be decoded; names the file and the record.
        """
        samples, bounds = self._samples(np.asarray(record_ids, np.int64))
        return [
            self._decode(sample, ends, record_id)
            for sample, ends, record_id in zip(samples, bounds.tolist(), record_ids, strict=True)
        ]

    def read_batch(self, record_ids: np.ndarray | Sequence[int]) -> dict[str, PyTree]:
        """Reads records as stacked arrays.

        Args:
          record_ids: int64[n], n at least 1, in any order, with repeats allowed.

        Returns:
          Column name → new array ``[n, ...]``; a pytree of them for a column of JSON.

        Raises:
          IndexError: if an id is not in [0, len).
          SourceError: if a column is text or bytes, or its values differ in shape or dtype.
          CorruptDataError: if a stored value cannot be decoded; names the file and the record.
        """
        check_stackable([column for _, column in self._chosen], what="MDS")
        ids = np.asarray(record_ids, np.int64)
        samples, bounds = self._samples(ids)
        rows = None
        if (bounds == bounds[0]).all():  # every value stands at the same place of its sample
            rows = np.frombuffer(b"".join(samples), np.uint8).reshape(len(samples), -1)
        batch = {}
        for number, column in self._chosen:
            edges = bounds[:, number : number + 2]
            stacked = None if rows is None else stack(column, rows[:, edges[0, 0] : edges[0, 1]])
            batch[column.name] = self._stack(column, samples, edges.tolist(), ids) if stacked is None else stacked
        return batch

    def _stack(self, column: Column, samples: Sequence[bytes], edges: list[list[int]], ids: np.ndarray) -> PyTree:
        values = [sample[low:high] for sample, (low, high) in zip(samples, edges, strict=True)]
        if len({len(value) for value in values}) == 1:
            stacked = stack(column, np.frombuffer(b"".join(values), np.uint8).reshape(len(values), -1))
            if stacked is not None:
                return stacked
        records = RecordStack(len(values))
        for value, record_id in zip(values, ids.tolist(), strict=True):
            records.add({column.name: self._decode_value(column, value, record_id)}, record_id)
        return records.take()[0][column.name]

    def _samples(self, ids: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        samples = self._shard_reader.read_by_spans(ids, _spans_of, _build)
        bounds, wrong = self._layout.bounds(samples)
        if wrong is not None:
            raise self._corrupt(int(ids[wrong]), "the sizes of its columns do not add up to its size")
        return samples, bounds

    def _decode(self, sample: bytes, bounds: Sequence[int], record_id: int) -> dict[str, Any]:
        return {
            column.name: self._decode_value(column, sample[bounds[number] : bounds[number + 1]], record_id)
            for number, column in self._chosen
        }

    def _decode_value(self, column: Column, value: bytes, record_id: int) -> Any:
        try:
            return decoder(column.encoding)(value)
        except ImportError as error:
            error.add_note(f"column {column.name!r} holds images. Install Pillow: pip install pillow")
            raise
        except Exception as error:  # whatever json, numpy, decimal and Pillow raise for bytes that they do not accept
            reason = f"column {column.name!r} is no {column.encoding} ({type(error).__name__}: {error})"
            raise self._corrupt(int(record_id), reason) from error

    def _corrupt(self, record_id: int, reason: str) -> CorruptDataError:
        return _damaged(self.file_of(record_id), record_id, reason)

    def fingerprint(self) -> JsonValue:
        """Returns the identity: shards, columns, number of records, and a digest of 4 records spread over the source."""
        shards = self._shard_reader.shards
        return {
            "kind": "mds",
            "files": file_paths.identify_files(
                [shard.name for shard in shards.files], [shard.num_bytes for shard in shards.files]
            ),
            "columns": [[column.name, column.encoding] for _, column in self._chosen],
            "records": len(self),
            "content": probe_digest(
                len(self), lambda ids: digest_raw(self._shard_reader.read_by_spans(ids, _spans_of, _build))
            ),
        }


def _damaged(path: str, record_id: int | None, reason: str) -> CorruptDataError:
    which = "the shard" if record_id is None else f"record {record_id}"
    return CorruptDataError(
        f"{path}: {which} is damaged: {reason}. Its bytes are not those that were written. Copy the file again from "
        "where it came.",
        path=path,
        record_id=record_id,
    )


def _expand_folders(paths: file_paths.Paths) -> list[str]:
    """Returns local folders and URLs that contain an index."""
    given = [paths] if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable) else list(paths)
    folders = []
    for name in given:
        if not isinstance(name, str | os.PathLike):
            raise SourceError(f"MDS got {name!r}. Expected a folder with {_INDEX}, a glob, a URL, or a list of them.")
        path = os.fspath(name).removesuffix("/").removesuffix(_INDEX)
        found = file_paths.expand_paths(f"{path.rstrip('/')}/{_INDEX}", source="MDS")
        folders += [index.removesuffix(_INDEX).rstrip("/") for index in found]
    if not folders:
        raise SourceError(f"MDS got an empty list of folders. Expected at least one folder with {_INDEX}.")
    return folders


def _read_index(folder: str, cache: ShardCache | None) -> tuple[list[Column], list[MDSShard]]:
    """Returns the columns and the shards of one folder."""
    path = f"{folder}/{_INDEX}"
    try:
        shards = json.loads(file_paths.read_file(path, source="MDS"))["shards"]
        columns = [_columns_of(shard) for shard in shards]
        found = [_shard_of(folder, shard, cache) for shard in shards]
    except MeshfeedError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{path} is no index of MDS shards ({type(error).__name__}: {error}). Expected version 2, as Mosaic "
            "Streaming's MDSWriter writes it. Copy it again, or write the data set again.",
            path=path,
        ) from error
    if not shards:
        raise SourceError(f"MDS: {path} lists no shards. Expected at least one record.")
    for number, other in enumerate(columns):
        if other != columns[0]:
            raise _differ(f"{path}, shard 0", columns[0], f"shard {number}", other)
    return columns[0], found


def _columns_of(shard: Mapping[str, Any]) -> list[Column]:
    if (shard["version"], shard["format"]) != (2, "mds"):
        raise ValueError(f"a shard has format {shard['format']!r}, version {shard['version']!r}")
    triples = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
    return [Column(name, encoding, size or None) for name, encoding, size in triples]


def _shard_of(folder: str, shard: Mapping[str, Any], cache: ShardCache | None) -> MDSShard:
    raw, packed, count = shard["raw_data"], shard.get("zip_data"), int(shard["samples"])
    name, num_bytes, path = raw["basename"], int(raw["bytes"]), f"{folder}/{raw['basename']}"
    status = None
    if not file_paths.is_url(path):
        status = _status(path)
        if status is not None and status.st_size != num_bytes:
            raise _damaged(path, None, f"it has {status.st_size:,} bytes, and {folder}/{_INDEX} lists {num_bytes:,}")
    if packed is None or status is not None:
        version = "" if status is None else str(status.st_mtime_ns)
        return MDSShard(_present(path, status, folder), num_bytes, version, count, name)
    path = f"{folder}/{packed['basename']}"
    need_cache([path], cache, source="MDS")
    compression = str(shard["compression"]).partition(":")[0]
    return MDSShard(_present(path, _status(path), folder), num_bytes, "", count, name, compression=compression)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _present(path: str, status: os.stat_result | None, folder: str) -> str:
    if status is None and not file_paths.is_url(path):
        raise SourceError(f"MDS: there is no shard {path}, which {folder}/{_INDEX} lists. Copy it there.")
    return path


def _same_columns(found: Sequence[tuple[list[Column], list[MDSShard]]], folders: Sequence[str]) -> list[Column]:
    columns = found[0][0]
    for (other, _), folder in zip(found, folders, strict=True):
        if other != columns:
            raise _differ(folders[0], columns, folder, other)
    return columns


def _differ(first: str, columns: Sequence[Column], second: str, other: Sequence[Column]) -> SourceError:
    def show(columns: Sequence[Column]) -> str:
        return ", ".join(f"{column.name}: {column.encoding}" for column in columns)

    return SourceError(
        f"MDS got shards with different columns: {first} has {show(columns)}; {second} has {show(other)}. Expected the "
        "same columns and encodings in all. Read them as two sources, and join these with meshfeed.sources.Mixture."
    )


def _choose(columns: Sequence[Column], names: Sequence[str] | None, folder: str) -> list[tuple[int, Column]]:
    """Returns the indices and columns to read."""
    numbers = {column.name: number for number, column in enumerate(columns)}
    chosen = list(numbers) if names is None else [names] if isinstance(names, str) else list(names)
    unknown = [name for name in chosen if name not in numbers]
    if unknown or not chosen:
        raise SourceError(
            f"MDS got columns={names!r}; {folder} has {list(numbers)}. Expected names of its columns, at least one."
        )
    return [(numbers[name], columns[numbers[name]]) for name in chosen]


def _check_shard(shard: MDSShard, open_file: OpenFile) -> tuple[_CheckedShard, int]:
    """Reads the offsets of a shard.

    Raises:
      CorruptDataError: the header or the offsets are damaged.
    """
    num_bytes = _WORD.itemsize * (shard.num_records + 2)
    header = np.frombuffer(open_file().read(0, num_bytes), _WORD)
    if len(header) != shard.num_records + 2 or header[0] != shard.num_records:
        raise _damaged(shard.path, None, f"its header does not have the {shard.num_records:,} samples of its index")
    offsets = header[1:]
    if offsets[0] < num_bytes or offsets[-1] != shard.num_bytes or (offsets[1:] < offsets[:-1]).any():
        raise _damaged(shard.path, None, "the offsets of its samples do not ascend to the end of the file")
    return _CheckedShard(shard, offsets, open_file), num_bytes // 8


def _spans_of(checked: _CheckedShard, rows: np.ndarray) -> Spans:
    return Spans(checked.open, checked.offsets[rows].astype(np.int64), checked.offsets[rows + 1].astype(np.int64))


def _build(checked: _CheckedShard, rows: np.ndarray, first_record_id: int, samples: list[bytes]) -> list[bytes]:
    sizes = (checked.offsets[rows + 1] - checked.offsets[rows]).tolist()
    for row, sample, size in zip(rows.tolist(), samples, sizes, strict=True):
        if len(sample) != size:
            reason = f"{len(sample):,} of its {size:,} bytes are there"
            raise _damaged(checked.shard.path, first_record_id + row, reason)
    return samples
