"""Data sets of Mosaic Streaming (MDS) as one random-access source, read in batches.

A shard begins with the number of samples and their offsets (uint32). A sample is stored as the sizes in bytes (uint32) of its
columns of variable size, followed by the values of all columns. All numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import io
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import numpy as np

from meshfeed._src.base import memory
from meshfeed._src.base.errors import CorruptDataError, MeshfeedError, SourceError, hides_own_frames
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds, public
from meshfeed._src.reading.identity import digest_raw
from meshfeed._src.reading.stacking import RecordStack
from meshfeed._src.sources.checks import chosen_columns
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.shard import Shard, check_cache, need_cache
from meshfeed._src.sources.files.shard_cache import hash_of, is_algorithm
from meshfeed._src.sources.files.shard_reader import Checked, OpenFile, ShardReader
from meshfeed._src.sources.files.shards import Shards

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_log = logging.getLogger("meshfeed.sources.mds")
_INDEX = "index.json"
_WORD = np.dtype("<u4")
_DIGEST_BYTES = 8 << 20
_IMAGES = frozenset(["jpeg", "png"])


@dataclasses.dataclass(frozen=True)
class MDSShard(Shard):
    """One MDS shard as its index describes it; the name of the uncompressed file identifies it.

    Attributes:
      name: name of the uncompressed file.
      raw_digest: digest of the uncompressed file; None if the index lists none.
    """

    source: ClassVar[str] = "MDS"
    name: str
    raw_digest: str | None = dataclasses.field(default=None, compare=False, repr=False)


@public("meshfeed.sources")
class MDS(ShardReader[MDSShard, np.ndarray]):
    """Random-access source over data sets that Mosaic Streaming's ``MDSWriter`` wrote, concatenated in order.

    ``index.json`` lists the shards, so opening a data set reads no shard. A record is a dict of columns. In
    ``source[i]`` it has the values that Mosaic Streaming returns, except that images are uint8 arrays. A feed stacks
    numbers, arrays, and images of one size; for text and bytes, use :class:`meshfeed.sources.Map` or leave the columns
    out.

    If the index lists hashes (``MDSWriter(hashes=…)``), a shard is compared with its hash when this process first reads it
    from a local disk, or when ``cache`` fetches it. That reads the whole shard once. Remote records without a cache are
    not compared: only parts of a shard are read.

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
      CorruptDataError: if an index is not valid, or a local shard has a different size than its index; names the file. Reads
        raise it for a shard that does not have its hash.
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
        chosen = _choose(self._columns, columns, folders[0])
        check_columns([column for _, column in chosen], what=folders[0])
        self._chosen = [
            (number, dataclasses.replace(column, encoding="bytes"))
            if image_bytes and column.encoding in _IMAGES
            else (number, column)
            for number, column in chosen
        ]
        shards = Shards([shard for _, part in found for shard in part], "MDS")
        if cache is not None:
            listed = {shard.path: shard.digest for shard in shards.files if shard.digest and shard.is_cached}
            cache.renew([shard.path for shard in shards.files], listed)
        super().__init__(shards, cache, _check_shard)

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, Any]:
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
        if (bounds == bounds[0]).all():  # every value is at the same offset in its sample
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

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        return self._ask_disk(record_ids, _spans_of)

    def _samples(self, ids: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        samples = self._read_by_spans(ids, _spans_of, _build)
        bounds, wrong = value_bounds(self._columns, samples)
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
        files = self._shards.files
        identity = {
            "kind": "mds",
            "files": file_paths.identify_files([file.name for file in files], [file.num_bytes for file in files]),
            "columns": [[column.name, column.encoding] for _, column in self._chosen],
            "records": len(self),
        }
        return self._with_content(identity, self._digest)

    def _digest(self, record_ids: np.ndarray) -> str:
        return digest_raw(self._by_range(record_ids)._read_by_spans(record_ids, _spans_of, _build))


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
    folders = []
    for name in file_paths.as_list(paths):
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
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
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
    columns = [Column(name, encoding, size or None) for name, encoding, size in triples]
    for column in columns:
        if not isinstance(column.name, str) or not isinstance(column.encoding, str):
            raise TypeError(f"a column is named {column.name!r} and has the encoding {column.encoding!r}")
        if column.size is not None:
            _count(column.size, f"the size of the column {column.name!r}")
    if len({column.name for column in columns}) < len(columns):
        raise ValueError("two columns have the same name")
    return columns


def _count(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(f"{what} is {value!r}")
    return value


def _file_name(stored: Mapping[str, Any]) -> str:
    """Returns the name of a shard, which may be in a folder of its own, but not outside the folder of its index."""
    name = stored["basename"]
    if not file_paths.is_inside(name):
        raise ValueError(f"the shard {name!r} is not in the folder of the index")
    return name


def _digest_of(stored: Mapping[str, Any], path: str) -> str | None:
    """Returns the hash of a file as ``"<algorithm>:<hex digest>"``; None if no known one is listed."""
    hashes = stored.get("hashes") or {}
    known = [algorithm for algorithm in hashes if is_algorithm(algorithm)]
    if hashes and not known:
        _log.warning("%s is not verified: its hashes are %s, which are not known here", path, ", ".join(hashes))
    # Those of xxhash take less time than reading the file.
    best = min(known, key=lambda algorithm: not algorithm.startswith("xxh"), default=None)
    return None if best is None else f"{best}:{str(hashes[best]).lower()}"


def _shard_of(folder: str, shard: Mapping[str, Any], cache: ShardCache | None) -> MDSShard:
    raw, packed, count = shard["raw_data"], shard.get("zip_data"), _count(shard["samples"], "the number of samples")
    name, num_bytes = _file_name(raw), _count(raw["bytes"], "the size of a shard")
    path = f"{folder}/{name}"
    if _WORD.itemsize * (count + 2) > num_bytes:
        raise ValueError(f"{name} has {num_bytes:,} bytes, too few for {count:,} samples")
    status = None
    if not file_paths.is_url(path):
        status = _status(path)
        if status is not None and status.st_size != num_bytes:
            raise _damaged(path, None, f"it has {status.st_size:,} bytes, and {folder}/{_INDEX} lists {num_bytes:,}")
    if packed is None or status is not None:
        version = "" if status is None else str(status.st_mtime_ns)
        digest = _digest_of(raw, path)
        return MDSShard(_present(path, status, folder), num_bytes, version, count, name, digest, digest=digest)
    path = f"{folder}/{_file_name(packed)}"
    need_cache([path], cache, source="MDS")
    compression = str(shard["compression"]).partition(":")[0]
    present, known = (
        _present(path, _status(path), folder),
        {"compression": compression, "digest": _digest_of(packed, path)},
    )
    return MDSShard(present, num_bytes, "", count, name, **known)


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
    return [(numbers[name], columns[numbers[name]]) for name in chosen_columns(names, list(numbers), "MDS", folder)]


def _check_shard(shard: MDSShard, open_file: OpenFile, _cache: object) -> tuple[np.ndarray, int]:
    """Returns uint32[records + 1], the first byte of each sample and the end of the last one, and their 8-byte entries.

    Raises:
      CorruptDataError: if the header or the offsets are damaged, or a local file does not have its hash.
    """
    num_bytes = _WORD.itemsize * (shard.num_records + 2)
    header = np.frombuffer(open_file().read(0, num_bytes), _WORD)
    if len(header) != shard.num_records + 2 or header[0] != shard.num_records:
        raise _damaged(shard.path, None, f"its header does not have the {shard.num_records:,} samples of its index")
    offsets = header[1:]
    if offsets[0] < num_bytes or offsets[-1] != shard.num_bytes or (offsets[1:] < offsets[:-1]).any():
        raise _damaged(shard.path, None, "the offsets of its samples do not ascend to the end of the file")
    opened = open_file()
    if shard.raw_digest is not None and isinstance(opened, Descriptor) and not file_paths.is_url(shard.path):
        algorithm, _, wanted = shard.raw_digest.partition(":")
        digest = hash_of(algorithm)()
        for start in range(
            0, shard.num_bytes, _DIGEST_BYTES
        ):  # not with a file position, which other threads would move
            digest.update(opened.read(start, start + _DIGEST_BYTES))
        if digest.hexdigest() != wanted:
            raise _damaged(shard.path, None, f"its {algorithm} is {digest.hexdigest()}, and the index lists {wanted}")
    return offsets, num_bytes // 8


def _spans_of(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)


def _build(
    file: Checked[MDSShard, np.ndarray], rows: np.ndarray, first_record_id: int, samples: list[bytes]
) -> list[bytes]:
    sizes = (file.index[rows + 1] - file.index[rows]).tolist()
    for row, sample, size in zip(rows.tolist(), samples, sizes, strict=True):
        if len(sample) != size:
            reason = f"{len(sample):,} of its {size:,} bytes are there"
            raise _damaged(file.shard.path, first_record_id + row, reason)
    return samples


_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in [*(f"{sign}int{8 << n}" for sign in ("u", "") for n in range(4)), "float16", "float32", "float64"]
}
# The first byte of an array with a dtype of its own: the size of a value in bits, plus 1 if signed, 2 if a float.
_ARRAY_DTYPES = {dtype.itemsize * 8 + {"u": 0, "i": 1, "f": 2}[dtype.kind]: dtype for dtype in _SCALARS.values()}
_SHAPE_DTYPES = [np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8")]
_HEADER_BYTES = 2 + 63 * 8  # dtype, rank, and the sizes of as many dimensions as there may be
_HOST_ONLY = {"bytes", "str", "str_decimal"}
"""Encodings whose values no device holds."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the samples: name, encoding as in ``index.json``, and size of a value in bytes, None if it varies."""

    name: str
    encoding: str
    size: int | None


def value_bounds(columns: Sequence[Column], samples: Sequence[bytes]) -> tuple[np.ndarray, int | None]:
    """Returns the bounds of the values in each sample, given all columns in stored order.

    Returns:
      int64[n, columns + 1], the first byte of each value and the end of the last one; and the index of a sample whose size is
      not the sum of its parts, or None.
    """
    varying = [number for number, column in enumerate(columns, 1) if column.size is None]
    num_bytes = np.fromiter(map(len, samples), np.int64, len(samples))
    head = _WORD.itemsize * len(varying)
    # The heads of all samples are read as one array, for which none may be shorter.
    if len(samples) and int(num_bytes.min()) < head:
        return np.empty((0, 0), np.int64), int(num_bytes.argmin())
    sizes = np.empty((len(samples), len(columns) + 1), np.int64)
    sizes[:] = [head, *(column.size or 0 for column in columns)]
    if varying:
        heads = b"".join([sample[:head] for sample in samples])
        sizes[:, varying] = np.frombuffer(heads, _WORD).reshape(len(samples), -1)
    bounds = np.cumsum(sizes, axis=1)
    wrong = np.flatnonzero(bounds[:, -1] != num_bytes)
    return bounds, int(wrong[0]) if len(wrong) else None


def check_columns(columns: Sequence[Column], *, what: str) -> None:
    """Raises SourceError for a column that is pickled, or has an unknown encoding."""
    for column in columns:
        leave_out = _leave_out([other.name for other in columns if other is not column])
        if column.encoding == "pkl":
            raise SourceError(
                f"{what}: column {column.name!r} is stored as a pickle, which can run any code when it is read, and "
                f"meshfeed never unpickles. Write the column with another encoding, such as json or ndarray{leave_out}."
            )
        try:
            decoder(column.encoding)
        except (KeyError, ValueError, TypeError) as error:
            raise SourceError(
                f"{what}: column {column.name!r} has the unknown encoding {column.encoding!r}. Expected one of Mosaic "
                f"Streaming's{leave_out}."
            ) from error


def _leave_out(others: Sequence[str]) -> str:
    return f", or leave it out: columns={others!r}" if others else ""


def check_stackable(columns: Sequence[Column], *, what: str) -> None:
    """Raises SourceError for a column of text or bytes."""
    for column in columns:
        if column.encoding in _HOST_ONLY:
            leave_out = _leave_out([other.name for other in columns if other.encoding not in _HOST_ONLY])
            raise SourceError(
                f"{what}: column {column.name!r} is stored as {column.encoding}, which JAX has no dtype for. Expected "
                f"numbers or arrays. Convert it with meshfeed.sources.Map(source, function){leave_out}."
            )


@functools.lru_cache(maxsize=1024)
def decoder(encoding: str) -> Callable[[bytes], object]:
    """Returns the function that decodes one value.

    Images become uint8 arrays, and lists of images lists of arrays. All other values are what Mosaic Streaming returns.

    Raises:
      KeyError, TypeError, ValueError: the encoding is unknown.
    """
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        dtype, shape = _array_options(options)
        return lambda content: _decode_array(content, dtype, shape)
    if options:
        raise ValueError(encoding)
    if kind in _SCALARS:
        return lambda content: np.frombuffer(content, _SCALARS[kind])[0]
    return _DECODERS[kind]


def stack(column: Column, rows: np.ndarray) -> np.ndarray | None:
    """Decodes the values of a column of numbers or arrays, uint8[n, bytes per value].

    Returns:
      A new array ``[n, ...]``; None if the column has no such form, or the values differ in shape or dtype.
    """
    kind, _, options = column.encoding.partition(":")
    if not rows.size or (kind != "ndarray" and kind != "int" and kind not in _SCALARS):
        return None
    dtype, shape = _array_options(options) if kind == "ndarray" else (_SCALARS.get(kind, _SCALARS["int64"]), ())
    first = 0
    if dtype is None or shape is None:
        dtype, shape, first = _array_header(rows[0, :_HEADER_BYTES].tobytes(), dtype, shape)
        if (rows[:, :first] != rows[0, :first]).any():
            return None
    if math.prod(shape) * dtype.itemsize != rows.shape[1] - first:
        return None
    out = memory.empty((len(rows), *shape), dtype.newbyteorder("="))
    np.copyto(out.reshape(len(rows), -1).view(np.uint8), rows[:, first:])
    return out


def _array_options(options: str) -> tuple[np.dtype | None, tuple[int, ...] | None]:
    dtype, _, shape = options.partition(":")
    sizes = tuple(int(size) for size in shape.split(",")) if shape else None
    return (_SCALARS[dtype] if dtype else None), sizes


def _array_header(
    content: bytes, dtype: np.dtype | None, shape: tuple[int, ...] | None
) -> tuple[np.dtype, tuple[int, ...], int]:
    """Returns the dtype, the shape, and the offset of the values of a stored array."""
    at = 0
    if dtype is None:
        dtype, at = _ARRAY_DTYPES[content[0]], 1
    if shape is None:
        rank, sizes = content[at] >> 2, _SHAPE_DTYPES[content[at] & 3]
        at += 1
        shape = tuple(np.frombuffer(content, sizes, rank, at).tolist())
        at += rank * sizes.itemsize
    return dtype, shape, at


def _decode_array(content: bytes, dtype: np.dtype | None, shape: tuple[int, ...] | None) -> np.ndarray:
    dtype, shape, at = _array_header(content, dtype, shape)
    return np.frombuffer(content, dtype, offset=at).reshape(shape)


def _decode_image_file(content: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)))


def _decode_raw_image(content: bytes) -> np.ndarray:
    """Decodes width, height and length of the mode's name (uint32), the name, and the pixels."""
    from PIL import Image

    width, height, length = np.frombuffer(content, _WORD, 3).tolist()
    mode = content[12 : 12 + length].decode()
    return np.asarray(Image.frombytes(mode, (width, height), content[12 + length :]))


def _decode_list(content: bytes, first: int, decode: Callable[[bytes], object]) -> list[object]:
    """Decodes a list: at byte ``first``, the number of elements and their sizes (uint32), then the elements."""
    count = int(np.frombuffer(content, _WORD, 1, first)[0])
    sizes = np.frombuffer(content, _WORD, count, first + 4).tolist()
    at, found = first + 4 * (1 + count), []
    for size in sizes:
        found.append(decode(content[at : at + size]))
        at += size
    return found


_DECODERS: dict[str, Callable[[bytes], object]] = {
    "bytes": bytes,
    "int": lambda content: int(np.frombuffer(content, _SCALARS["int64"])[0]),
    "jpeg": _decode_image_file,
    "jpeg_array": lambda content: _decode_list(content, 0, _decode_image_file),
    "jpegarray": lambda content: _decode_list(content, 0, _decode_image_file),
    "json": json.loads,
    "list[jpeg]": lambda content: _decode_list(content, 4, _decode_image_file),
    "list[pil]": lambda content: _decode_list(content, 4, _decode_raw_image),
    "list[png]": lambda content: _decode_list(content, 4, _decode_image_file),
    "pil": _decode_raw_image,
    "png": _decode_image_file,
    "str": lambda content: content.decode(),
    "str_decimal": lambda content: decimal.Decimal(content.decode()),
    "str_float": lambda content: float(content),
    "str_int": lambda content: int(content),
}
