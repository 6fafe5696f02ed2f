"""Windows and documents of flat token files, read at random: their formats, and reads of many ranges into one int32 array.

============================  =====================================================================
numpy                         ``.npy`` with its header, one dimension of integers
llm.c and modded-nanogpt      256 int32 (magic number, version, number of tokens), then the tokens
Megatron                      bare tokens in ``.bin``; ``.idx`` beside it has the dtype and documents
bare                          tokens from the first byte to the last; the user gives the dtype
============================  =====================================================================

Files are read with ``pread`` instead of a memory map: touching a mapped page that the file no longer has ends the process
with SIGBUS, while a read returns fewer bytes, which becomes an error that names the file.

The C extension reads and converts a batch in one call without the GIL. Python code reads what it leaves: everything if
the extension is not installed, and otherwise ranges with an error, which it reports.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import operator
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from meshfeed._src.base import memory, trees
from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.types import ColumnSlices, JsonValue, RecordIds, public
from meshfeed._src.reading.identity import digest_tree
from meshfeed._src.sources.checks import check_ids, checked_count, is_count
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import RemoteBytes, SparseFile, sparse_files
from meshfeed._src.sources.files.formats import (
    LLM_C_BYTES,
    LLM_C_DTYPES,
    compression_of,
    names_other_format,
    reader_hint,
)
from meshfeed._src.sources.files.lookup import FileFormat, find_files, look_at
from meshfeed._src.sources.files.manifest import FileEntry, lengths_by_file
from meshfeed._src.sources.files.open_files import (
    Descriptor,
    fetch_missing,
    files_per_call,
    open_descriptor,
    shared_pool,
)
from meshfeed._src.sources.files.paths import is_url
from meshfeed._src.sources.files.shard import Shard, inspect_copy
from meshfeed._src.sources.files.shard_reader import ShardSource
from meshfeed._src.sources.files.shards import Shards

if TYPE_CHECKING:
    import jax

    from meshfeed._src.sources.files.shard_cache import ShardCache

try:
    from meshfeed._src.sources.tokens import _reads as extension  # pyright: ignore[reportAttributeAccessIssue] # built from C
except ImportError as error:  # installed without a C compiler, or built for another system
    logging.getLogger("meshfeed").debug("token files are read by Python code, which is slower: %s", error)
    extension: Any = None

_NPY_MAGIC = b"\x93NUMPY"
# NumPy parses headers with Python's own parser, which fails now and then in CPython 3.11 if threads use it at the same time
# ("AST constructor recursion depth mismatch").
_PARSING = threading.Lock()
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_BYTES = 34  # magic number, version, dtype code, number of sequences, number of document boundaries
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_HEAD_BYTES = 1 << 16  # a numpy header of version 1 is no longer
_SCANNED_BYTES = 1 << 22
LENGTHS_KEY = "tokens"
"""The leaf for which a manifest lists the lengths of documents; its name in a batch is a setting of the source."""

_FEW = 16  # so many files are all opened for a batch, since finding those that it needs takes longer
_RANGES_PER_CALL = 1024  # Ctrl-C takes effect only between calls
_NATIVE = ("=", "|", "<" if sys.byteorder == "little" else ">")
_INT32 = np.iinfo(np.int32)


class _TokenShard(Shard):
    """A file that is read through the pool of open files."""

    source = "token"

    def describe_change(self, path: str) -> str:
        """Returns what the file was and what it is now, for an error."""
        return f"{self.num_bytes:,} bytes then, {os.path.getsize(path):,} now"

    def open(self, cache: ShardCache | None) -> Descriptor:
        """Opens the file, or returns it if it is open.

        Raises:
          SourceError: if it has been removed or changed since the source was created.
          CorruptDataError: if it is shorter than it was.
        """
        try:
            return shared_pool.opened(self, "direct", cache, open_descriptor)
        except SourceError as error:
            now = os.path.getsize(self.path) if os.path.exists(self.path) else self.num_bytes
            if now >= self.num_bytes:
                raise
            what = f"it had {self.num_bytes:,} bytes when the source was made and has {now:,} now"
            raise cut_short(self.path, what) from error

    def read(self, start: int, stop: int, cache: ShardCache | None) -> bytes:
        """Reads bytes ``[start, stop)``; fetches a remote file whole if there is a cache."""
        if self.is_direct(cache):
            return self.remote.read(start, stop)
        found = self.open(cache).read(start, stop)
        if len(found) < stop - start:
            raise cut_short(self.path, f"it ends at byte {start + len(found):,} instead of {self.num_bytes:,}")
        return found


@dataclasses.dataclass(frozen=True)
class DocumentIndex(_TokenShard):
    """A Megatron index; its records are the parts of documents, and it has one more bound than documents."""

    num_bounds: int


@dataclasses.dataclass(frozen=True)
class TokenFile(_TokenShard):
    """Where the tokens of a file are; they are its records.

    Attributes:
      dtype: of the stored tokens.
      offset: of the first token, in bytes.
      index: Megatron's index; None for other formats.
    """

    dtype: np.dtype[Any]
    offset: int = 0
    index: DocumentIndex | None = None

    def details(self) -> dict[str, JsonValue]:
        details: dict[str, JsonValue] = {"dtype": self.dtype.str}
        if self.offset:
            details["offset"] = self.offset
        if self.index is not None:
            details["index"] = [self.index.num_bytes, self.index.num_records, self.index.num_bounds]
        return details

    @classmethod
    def from_details(cls, entry: FileEntry, manifest: str) -> dict[str, Any]:
        found: dict[str, Any] = {**entry.details, "dtype": _stored_dtype(entry.details["dtype"])}
        _check_counts(found.get("offset", 0))
        end = found.get("offset", 0) + entry.num_records * found["dtype"].itemsize
        if end > entry.num_bytes and compression_of(entry.path) is None:
            raise ValueError(f"{entry.num_records:,} tokens in {entry.num_bytes:,} bytes")
        if "index" in found:
            num_bytes, num_sequences, num_bounds = _check_counts(*found["index"])
            index_path = f"{entry.path[:-4]}.idx"
            found["index"] = DocumentIndex(index_path, num_bytes, "", num_sequences, num_bounds, manifest=manifest)
        return found


def _stored_dtype(name: object) -> np.dtype[Any]:
    if name not in _STORED_DTYPES:
        raise ValueError(f"the dtype {name!r}")
    return np.dtype(name)  # type: ignore[call-overload]


_STORED_DTYPES = frozenset(f"{order}{kind}{size}" for order in "<>|" for kind in "iu" for size in (1, 2, 4, 8))


def _check_counts(*counts: object) -> tuple[Any, ...]:
    if not all(is_count(count, 0) for count in counts):
        raise ValueError(f"{list(counts)} in place of counts")
    return counts


def _find(paths: file_paths.Paths, dtype: DTypeLike | None, cache: ShardCache | None) -> TokenFiles:
    wanted = None if dtype is None else _token_dtype(dtype)
    form = FileFormat(
        "Tokens",
        lambda name: inspect(name, wanted, cache),
        lambda *listed: _checked_dtype(TokenFile.from_entry(*listed), wanted),
        token_files,
    )
    return TokenFiles(*find_files(paths, cache, form), cache)


class _Pieces(NamedTuple):
    """Runs of tokens that windows do not leave, files or documents, with at least one window each.

    Attributes:
      file_index: int64[pieces], the file of each.
      starts: int64[pieces], the start of window 0 in the file if the windows of the piece were continued to its left.
      ends: int64[pieces], windows up to and including the piece.
    """

    file_index: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


@public("meshfeed.sources")
class Tokens(ShardSource[TokenFile]):
    """Random-access source over windows of flat token files.

    Record i of a file is ``{key: int32[sequence_length + next_token]}``, the tokens from ``i * stride`` on. Windows never
    cross files: a file of n tokens has ``max(0, (n - sequence_length - next_token) // stride + 1)`` of them. Files are
    numbered in the order of ``paths``.

    Formats are recognized by their headers: numpy's ``.npy``; the ``.bin`` of llm.c and modded-nanogpt; Megatron's
    ``.bin`` with an ``.idx`` beside it (either may be named). Files without a header (nanoGPT, OLMo) need ``dtype``.

    Reads are batched, and neighbouring windows are read together. A source can be pickled, and is safe to read from
    several threads.

    Args:
      paths: a path, a glob (expanded in order of name), a URL supported by fsspec, or a list of these.
      sequence_length: tokens per window, at least 1.
      stride: tokens from the start of one window to that of the next; by default ``sequence_length``.
      dtype: integer dtype of files without a header; must match the header of those that have one.
      eod: the token that ends a document. If given, windows stay within documents, and the formula holds for each
        document; the files are read once to find them, unless Megatron's index lists them. By default, windows cross
        documents.
      next_token: whether windows are one token longer, for inputs ``[:-1]`` and targets ``[1:]``.
      key: name of the leaf.
      cache: cache on a local disk; required for compressed files (``.bin.gz``). Without it, remote files are read as byte
        ranges.

    Raises:
      SettingsError: if a setting is out of range; names the keyword.
      SourceError: if there are no files, a file is missing or does not hold integers, a file without a header is given
        without ``dtype``, or no file is long enough for a window. Reads raise it for a token that does not fit into
        int32; names the file.
      CorruptDataError: if a file is shorter than in its header or index, or becomes shorter while it is read; names
        the file.

    Examples:
      >>> import numpy as np
      >>> from meshfeed.sources import Tokens
      >>> np.save("tokens.npy", np.arange(100, dtype=np.uint16))
      >>> source = Tokens("tokens.npy", sequence_length=8)
      >>> len(source), source[1]["tokens"].tolist()  # one token more, for the targets
      (12, [8, 9, 10, 11, 12, 13, 14, 15, 16])
    """

    fresh_arrays = True
    reads_columns = True

    @hides_own_frames
    def __init__(
        self,
        paths: file_paths.Paths,
        sequence_length: int,
        *,
        stride: int | None = None,
        dtype: DTypeLike | None = None,
        eod: int | None = None,
        next_token: bool = True,
        key: str = "tokens",
        cache: ShardCache | None = None,
    ) -> None:
        self._length = checked_count(sequence_length, "sequence_length")
        self._stride = self._length if stride is None else checked_count(stride, "stride")
        if not isinstance(next_token, bool | np.bool_):
            raise SettingsError(f"next_token={next_token!r}; it takes True or False.", setting="next_token")
        self._eod, self._key = _checked_eod(eod), _checked_key(key)
        self._width = self._length + int(next_token)
        self._files = _find(paths, dtype, cache)
        self._pieces = self._find_pieces()
        if not self._pieces.ends.size:
            longest = max(file.num_records for file in self._files.files)
            raise SourceError(
                f"Tokens: no window of {self._width:,} tokens fits into the {len(self._files.files):,} file(s); "
                f"the longest has {longest:,} tokens{'' if eod is None else ' in all its documents'}. Use a smaller "
                "sequence_length."
            )
        files = self._files.files
        windows = np.bincount(self._pieces.file_index, np.diff(self._pieces.ends, prepend=0), len(files))
        super().__init__(Shards(files, "Tokens", lengths=windows.astype(np.int64)), cache)

    @staticmethod
    def documents(
        paths: file_paths.Paths,
        *,
        dtype: DTypeLike | None = None,
        eod: int | None = None,
        key: str = "tokens",
        cache: ShardCache | None = None,
    ) -> TokenDocuments:
        """Random-access source over the documents of flat token files, for :class:`meshfeed.sources.Packed`.

        Record i is ``{key: int32[n]}`` with the n of document i. The documents are those of Megatron's index, or the
        pieces of a file that end with ``eod``, which belongs to them; tokens after the last one are a document too.

        Args:
          paths: as for :class:`Tokens`.
          dtype: as for :class:`Tokens`.
          eod: the token that ends a document. Files without an index are read once to find it.
          key: name of the leaf.
          cache: cache on a local disk. Without it, remote files are read as byte ranges.

        Raises:
          SettingsError, SourceError, CorruptDataError: as for :class:`Tokens`; also a SourceError for a file without an
            index if there is no ``eod``.
        """
        return TokenDocuments(paths, dtype=dtype, eod=eod, key=key, cache=cache)

    def _find_pieces(self) -> _Pieces:
        if self._eod is None:
            lengths = [np.array([file.num_records], np.int64) for file in self._files.files]
        else:
            lengths = self._files.document_lengths(self._eod)
        counts = [np.maximum(0, (length - self._width) // self._stride + 1) for length in lengths]
        starts = [np.cumsum(length) - length for length in lengths]
        used = [np.flatnonzero(count) for count in counts]
        windows = np.concatenate([count[rows] for count, rows in zip(counts, used, strict=True)])
        ends = np.cumsum(windows)
        first = np.concatenate([start[rows] for start, rows in zip(starts, used, strict=True)])
        file_index = np.repeat(np.arange(len(lengths)), [len(rows) for rows in used])
        return _Pieces(file_index, first - (ends - windows) * self._stride, ends)

    def __repr__(self) -> str:
        return f"Tokens({self._shards.describe('windows')} of {self._width:,} tokens)"

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, np.ndarray]:
        """Window ``record_id``: ``{key: int32[sequence_length + next_token]}``."""
        return {self._key: self.read_batch([operator.index(record_id)])[self._key][0]}

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several windows, in the order of ``record_ids``."""
        return [{self._key: row} for row in self.read_batch(record_ids)[self._key]]

    def element_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Pytree of ``jax.ShapeDtypeStruct`` of one record."""
        return {self._key: trees.spec((self._width,), np.int32)}

    def read_batch(
        self, record_ids: np.ndarray | Sequence[int], columns: ColumnSlices | None = None
    ) -> dict[str, np.ndarray]:
        """Reads windows.

        Args:
          record_ids: int64[n], in any order, repeats allowed.
          columns: path of the leaf → slice of the window; only these tokens are read.

        Returns:
          ``{key: int32[n, sequence_length + next_token]}`` in new memory.

        Raises:
          IndexError: if an id is not in [0, len).
          SourceError, CorruptDataError, OSError: see the class.
        """
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self))
        slices = columns.get(f"['{self._key}']") if columns else None
        first, stop, step = (slices[0] if slices else slice(None)).indices(self._width)
        if step != 1:
            return {self._key: self.read_batch(ids)[self._key][:, slices[0] if slices else slice(None)]}
        width = max(0, stop - first)
        file_index, starts = self._located(ids)
        tokens = self._files.read(file_index, starts + first, np.full(len(ids), width), ids)
        return {self._key: tokens.reshape(len(ids), width)}

    def _located(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the file and the first token of windows, int64[n]."""
        piece = np.searchsorted(self._pieces.ends, ids, side="right")
        return self._pieces.file_index[piece], self._pieces.starts[piece] + ids * self._stride

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        ids = np.asarray(record_ids, np.int64)
        return self._files.ask_disk(*self._located(ids), np.full(len(ids), self._width))

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, windows, and a digest of 4 windows spread over the source."""
        identity = {"kind": "tokens", "files": self._identity_of_files(), "window": [self._width, self._stride]}
        dtypes = [file.dtype.str for file in self._shards.files]
        return self._with_content(identity, self._digest, [self._key, self._eod, dtypes])

    def _digest(self, record_ids: np.ndarray) -> str:
        return digest_tree(self._by_range(record_ids).read_batch(record_ids))

    def _by_range(self, record_ids: np.ndarray) -> Self:
        found = super()._by_range(record_ids)
        if found is not self:
            found._files = TokenFiles(found._shards.files, found._shards.manifests, None)
        return found


class TokenDocuments(ShardSource[TokenFile]):
    """Documents of flat token files; made by :meth:`Tokens.documents`."""

    fresh_arrays = True

    @hides_own_frames
    def __init__(
        self, paths: file_paths.Paths, *, dtype: DTypeLike | None, eod: int | None, key: str, cache: ShardCache | None
    ) -> None:
        self._key, self._files = _checked_key(key), _find(paths, dtype, cache)
        lengths = self._files.document_lengths(_checked_eod(eod))
        joined = np.concatenate(lengths)
        if not joined.size:
            raise SourceError(f"Tokens: the {len(lengths):,} file(s) hold no document. Check what wrote them.")
        # A document of 2**32 tokens or more is rare, and 4 bytes instead of 8 matter at 10**9 documents.
        self._lengths = joined.astype(np.uint32) if int(joined.max()) < 1 << 32 else joined
        self._checkpoints = [_checkpoints(part) for part in lengths]
        numbers = np.array([len(part) for part in lengths], np.int64)
        super().__init__(Shards(self._files.files, "Tokens", lengths=numbers), cache)

    def __repr__(self) -> str:
        return f"Tokens.documents({self._shards.describe('documents')})"

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document, uint32[documents]; int64 if one has 2**32 or more."""
        return self._lengths

    def documents_per_file(self) -> list[int]:
        """Returns the number of documents of each file."""
        return self._shards.lengths.tolist()

    def __getitem__(self, record_id: SupportsIndex) -> dict[str, np.ndarray]:
        """Document ``record_id``: ``{key: int32[tokens]}``."""
        return self.__getitems__([operator.index(record_id)])[0]

    def __getitems__(self, record_ids: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several documents, in the order of ``record_ids``."""
        ids = np.asarray(record_ids, np.int64)
        check_ids(ids, len(self))
        lengths = self._lengths[ids].astype(np.int64)
        tokens = self._files.read(*self._located(ids), lengths, ids)
        ends = np.cumsum(lengths)
        return [{self._key: tokens[a:b]} for a, b in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]

    def read_slices(self, record_ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        """Reads parts of documents, one after the other.

        Args:
          record_ids: int64[n], the documents, repeats allowed.
          starts: int64[n], the first token of each part in its document.
          lengths: int64[n], tokens of each part.

        Returns:
          ``{key: int32[sum of the lengths]}``.

        Raises:
          SourceError, CorruptDataError, OSError: as for :class:`Tokens`.
        """
        file_index, begins = self._located(record_ids)
        return {self._key: self._files.read(file_index, begins + starts, lengths, record_ids)}

    def _located(self, record_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the file and the first token of documents, int64[n]."""
        firsts, ends = self._shards.starts, self._shards.ends
        file_index = np.searchsorted(ends, record_ids, side="right")
        within = record_ids - firsts[file_index]
        begins = np.empty(len(record_ids), np.int64)
        for number in np.unique(file_index).tolist():
            rows = np.flatnonzero(file_index == number)
            of_file = self._lengths[int(firsts[number]) : int(ends[number])]
            begins[rows] = _starts(of_file, self._checkpoints[number], within[rows])
        return file_index, begins

    def ask_disk(self, record_ids: RecordIds) -> bool | None:
        """See :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        ids = np.asarray(record_ids, np.int64)
        return self._files.ask_disk(*self._located(ids), self._lengths[ids].astype(np.int64))

    def fingerprint(self) -> JsonValue:
        """Returns the identity: files, documents, and a digest of all lengths."""
        return {
            "kind": "token_documents",
            "files": self._identity_of_files(),
            "records": len(self),
            "lengths": xxhash.xxh3_64(np.ascontiguousarray(self._lengths).data).hexdigest(),
        }


_STEP = 256  # documents from one checkpoint to the next


def _checkpoints(lengths: np.ndarray) -> np.ndarray:
    """Returns the first token of every 256th document, int64: a table of all would take twice the bytes of lengths."""
    return (np.cumsum(lengths) - lengths)[::_STEP].copy()


def _starts(lengths: np.ndarray, checkpoints: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the first token of documents in their file, int64[n]."""
    groups, which = np.unique(ids // _STEP, return_inverse=True)
    rows = np.minimum(groups[:, None] * _STEP + np.arange(_STEP), len(lengths) - 1)
    before = np.cumsum(lengths[rows], axis=1, dtype=np.int64)
    within = ids % _STEP
    return checkpoints[groups[which]] + np.where(within > 0, before[which, within - 1], 0)


def _checked_eod(eod: object) -> int | None:
    if eod is not None and not is_count(eod, -(1 << 64)):
        raise SettingsError(f"eod={eod!r}; it takes the token that ends a document, an int.", setting="eod")
    return None if eod is None else int(eod)


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise SettingsError(f"key={key!r}; it takes the name of the leaf, a string that is not empty.", setting="key")
    return key


def _token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iu":
        raise SettingsError(
            f"dtype={dtype!r}; it takes the integer dtype of the stored tokens, such as numpy.uint16.", setting="dtype"
        )
    return found


def token_files(names: Sequence[str]) -> list[str]:
    """Returns the files that hold tokens, in order: the ``.bin`` in place of the Megatron index beside it."""
    return list(dict.fromkeys(f"{name[:-4]}.bin" if name.endswith(".idx") else name for name in names))


def inspect(path: str, dtype: np.dtype[Any] | None, cache: ShardCache | None) -> TokenFile:
    """Reads a file's header and checks it against the file's size; ``dtype`` is the user's, needed without a header.

    Raises:
      SourceError: if the file is missing or does not hold integers, or its dtype is unknown or not ``dtype``.
      CorruptDataError: if the file is empty or shorter than in its header.
      OSError: if it cannot be read.
    """
    if cache is not None and compression_of(path):
        return inspect_copy(path, cache, lambda copy: inspect(copy, dtype, None))
    index_path = f"{path[:-4]}.idx"
    if path.endswith(".bin") and _exists(index_path):
        opened, version = look_at(path, cache, source="Tokens")
        index = look_at(index_path, cache, source="Tokens", part=slice(0, _MEGATRON_BYTES))
        return _checked_dtype(_inspect_megatron(path, opened.num_bytes, version, *index), dtype)
    opened, version = look_at(path, cache, source="Tokens", part=slice(0, _HEAD_BYTES))
    head = opened.read(0, min(opened.num_bytes, _HEAD_BYTES))
    bare = TokenFile(path, opened.num_bytes, version, 0, dtype or np.dtype(np.uint8))
    if head.startswith(_NPY_MAGIC):
        with _PARSING:
            found = _inspect_npy(bare, head)
    else:
        found = _inspect_llm_c(bare, head)
    if found is not None:
        return _checked_dtype(found, dtype)
    if dtype is None:
        raise SourceError(
            f"Tokens: {path} has no header with the dtype of its tokens (numpy, llm.c, or a Megatron .idx beside "
            f"it).{reader_hint(path, unless='Tokens') or ' Pass dtype=, such as numpy.uint16.'}"
        )
    if names_other_format(path, "Tokens"):
        raise SourceError(
            f"Tokens: {path} has no header of a token file, and would be read as bare {dtype}.{reader_hint(path)} If it "
            "does hold bare tokens, rename it to end with .bin."
        )
    if not bare.num_bytes or bare.num_bytes % dtype.itemsize:
        raise CorruptDataError(
            f"the token file {path} has {bare.num_bytes:,} bytes, which is not a positive multiple of the "
            f"{dtype.itemsize} bytes of {dtype}. It was cut short, or dtype= is wrong.",
            path=path,
        )
    return dataclasses.replace(bare, num_records=bare.num_bytes // dtype.itemsize)


def _exists(path: str) -> bool:
    if not is_url(path):
        return os.path.exists(path)
    return file_paths.exists(path, source="Tokens")


def _checked_dtype(file: TokenFile, dtype: np.dtype[Any] | None) -> TokenFile:
    path = file.path
    if file.dtype.kind not in "iu":
        raise SourceError(f"Tokens: {path} holds {file.dtype}. Expected integers.")
    if dtype is not None and dtype != file.dtype:
        raise SourceError(f"Tokens: {path} holds {file.dtype}, not {dtype}, as its header says. Leave dtype= out.")
    return file


def _inspect_npy(bare: TokenFile, head: bytes) -> TokenFile:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        if any(size < 0 for size in shape):
            raise ValueError(f"its shape is {shape}")
    except Exception as error:  # NumPy's own, and those of Python's parser, which reads the header
        what = f"not a numpy file ({type(error).__name__}: {error})"
        raise CorruptDataError(f"{bare.path}: {what}. Write or copy it again.", path=bare.path) from error
    if len(shape) != 1:
        raise SourceError(
            f"Tokens: {bare.path} holds an array of shape {shape}. Expected one dimension. For rows of equal length "
            f"pass meshfeed.sources.Memory(numpy.load({bare.path!r}, mmap_mode='r'))."
        )
    return _checked_size(dataclasses.replace(bare, num_records=int(shape[0]), dtype=dtype, offset=stream.tell()))


def _inspect_llm_c(bare: TokenFile, head: bytes) -> TokenFile | None:
    if len(head) < LLM_C_BYTES:
        return None
    magic, version, num_tokens = np.frombuffer(head, "<i4", 3).tolist()
    dtype = LLM_C_DTYPES.get((magic, version))
    if dtype is not None:
        found = dataclasses.replace(bare, num_records=num_tokens, dtype=np.dtype(dtype), offset=LLM_C_BYTES)
        return _checked_size(found)
    for known_magic, known_version in LLM_C_DTYPES:
        if magic == known_magic:
            raise SourceError(
                f"Tokens: {bare.path} has llm.c's header with version {version}. Expected version {known_version}. "
                "Write the file again with that version, or without a header."
            )
    return None


def _checked_size(file: TokenFile) -> TokenFile:
    if file.num_records < 0:
        raise CorruptDataError(
            f"the token file {file.path} has {file.num_records:,} tokens according to its header. Copy or write it again.",
            path=file.path,
        )
    wanted = file.offset + file.num_records * file.dtype.itemsize
    if file.num_bytes < wanted:
        raise cut_short(file.path, f"it has {file.num_bytes:,} bytes, and {wanted:,} according to its header")
    return file


def _inspect_megatron(
    path: str, num_bytes: int, version: str, index: Descriptor | RemoteBytes, index_version: str
) -> TokenFile:
    index_path = f"{path[:-4]}.idx"
    head = index.read(0, min(index.num_bytes, _MEGATRON_BYTES))
    if not head.startswith(_MEGATRON_MAGIC) or len(head) < _MEGATRON_BYTES or head[9:17] != (1).to_bytes(8, "little"):
        raise CorruptDataError(
            f"{index_path} is not a Megatron index of version 1, and beside a .bin it is taken for one. Write it again, "
            "or move it away.",
            path=index_path,
        )
    dtype = _MEGATRON_DTYPES.get(head[17])
    if dtype is None:
        raise SourceError(f"Tokens: {path} holds the dtype with Megatron's code {head[17]}. Expected integers.")
    num_sequences, num_bounds = np.frombuffer(head, "<u8", 2, offset=18).tolist()
    wanted = _MEGATRON_BYTES + 12 * num_sequences + 8 * num_bounds
    if index.num_bytes < wanted:
        raise cut_short(index_path, f"it has {index.num_bytes:,} bytes, and {wanted:,} according to its header")
    num_tokens = 0
    if num_sequences:
        at = _MEGATRON_BYTES + 4 * num_sequences
        last_length = int.from_bytes(index.read(at - 4, at), "little")
        last_start = int.from_bytes(index.read(at + 8 * num_sequences - 8, at + 8 * num_sequences), "little")
        num_tokens = last_start // np.dtype(dtype).itemsize + last_length
    documents = DocumentIndex(index_path, index.num_bytes, index_version, num_sequences, num_bounds)
    return _checked_size(TokenFile(path, num_bytes, version, num_tokens, np.dtype(dtype), 0, documents))


def document_lengths(file: TokenFile, eod: int | None, cache: ShardCache | None) -> np.ndarray:
    """Returns the number of tokens of each document of a file, int64[documents]; together they are all of its tokens.

    Without an index, all of the file is read once to find ``eod``, the token that ends a document and belongs to it.

    Raises:
      SourceError: if there is neither an index nor ``eod``.
      SettingsError: if tokens of the file's dtype cannot be ``eod``.
      CorruptDataError: if the file was cut short, or the index does not list its documents one after the other.
    """
    if file.index is not None:
        return _indexed_lengths(file, file.index, cache)
    if eod is None:
        raise SourceError(
            f"Tokens: {file.path} has no index of its documents. Pass eod=, the token that ends a document."
        )
    bounds = np.iinfo(file.dtype)
    if not bounds.min <= eod <= bounds.max:
        raise SettingsError(
            f"eod={eod}; {file.path} holds {file.dtype.name}, {bounds.min} to {bounds.max}, so it never occurs there. "
            "Pass the token that ends a document.",
            setting="eod",
        )
    ends = []
    step = _SCANNED_BYTES // file.dtype.itemsize
    for first in range(0, file.num_records, step):
        size = min(step, file.num_records - first) * file.dtype.itemsize
        start = file.offset + first * file.dtype.itemsize
        part = np.frombuffer(file.read(start, start + size, cache), file.dtype)
        ends.append(np.flatnonzero(part == eod) + (first + 1))
    bounds = np.concatenate([[0], *ends])
    if bounds[-1] < file.num_records:
        bounds = np.append(bounds, file.num_records)
    return np.diff(bounds)


def _ends_with(file: TokenFile, token: int | None, cache: ShardCache | None) -> bool:
    """Whether the last token of a file is ``token``."""
    if not file.num_records:
        return False
    stop = file.offset + file.num_records * file.dtype.itemsize
    last = file.read(stop - file.dtype.itemsize, stop, cache)
    return np.frombuffer(last, file.dtype)[0] == token


def _indexed_lengths(file: TokenFile, index: DocumentIndex, cache: ShardCache | None) -> np.ndarray:
    content = index.read(0, index.num_bytes, cache)
    # It is not read again, and would take the place of a file of tokens.
    shared_pool.drop([index])
    lengths = np.frombuffer(content, "<i4", index.num_records, _MEGATRON_BYTES)
    starts = np.frombuffer(content, "<i8", index.num_records, _MEGATRON_BYTES + lengths.nbytes)
    bounds = np.frombuffer(content, "<i8", index.num_bounds, _MEGATRON_BYTES + lengths.nbytes + starts.nbytes)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    one_after_another = (
        (lengths >= 0).all()
        and np.array_equal(starts, ends[:-1] * file.dtype.itemsize)
        and bounds.size > 0
        and (bounds[0], bounds[-1]) == (0, index.num_records)
        and (np.diff(bounds) >= 0).all()
    )
    if not one_after_another:
        raise CorruptDataError(
            f"{index.path}: its documents are not stored one after the other, as Megatron's builder writes them. "
            "Write the index again.",
            path=index.path,
        )
    return np.diff(ends[bounds])


def cut_short(path: str, what: str, record_id: int | None = None) -> CorruptDataError:
    """Returns the error for a file that lacks bytes."""
    return CorruptDataError(
        f"the token file {path} was cut short: {what}. Copy or write it again.", path=path, record_id=record_id
    )


class _Ranges(NamedTuple):
    """Ranges of tokens: file, first token in it, length, place in the result, and record id for errors, int64[n] each."""

    file_index: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    record_ids: np.ndarray


class TokenFiles:
    """The token files of a source, with what is needed to read them at hand.

    Args:
      files: the files.
      manifests: paths of the manifests that list some of them.
      cache: for URLs.
    """

    def __init__(self, files: Sequence[TokenFile], manifests: Sequence[str], cache: ShardCache | None) -> None:
        self.files, self._manifests, self._cache = files, manifests, cache
        self._headers = np.array([file.offset for file in files], np.int64)
        self._item_bytes = np.array([file.dtype.itemsize for file in files], np.int64)
        self._kinds = [(file.dtype.str, file.is_cached) for file in files]
        alike = len(set(self._kinds)) == 1 and not self._kinds[0][1]  # opening a remote or compressed file fetches it
        self._all = list(range(len(files))) if len(files) <= _FEW and alike else None

    def read(
        self, file_index: np.ndarray, starts: np.ndarray, lengths: np.ndarray, record_ids: np.ndarray
    ) -> np.ndarray:
        """Reads ranges of tokens, in any order, with repeats and overlaps allowed.

        Args:
          file_index: int64[n], the file of each range.
          starts: int64[n], the first token of each range in its file.
          lengths: int64[n], the number of tokens of each range.
          record_ids: int64[n], for errors.

        Returns:
          The ranges one after the other, int32[sum of the lengths].

        Raises:
          CorruptDataError: if a file ends before the end of a range; names the file and the record.
          SourceError: if a token does not fit into int32, or a file has changed; names the file.
          OSError: if a file cannot be read.
        """
        out = memory.empty((int(lengths.sum()),), np.int32)
        ranges = _Ranges(file_index, starts, lengths, np.cumsum(lengths) - lengths, record_ids)
        groups = self._groups(file_index) if out.size else []
        for numbers in groups:
            rows = None if len(groups) == 1 else np.flatnonzero(np.isin(file_index, numbers))
            for first in range(0, len(starts) if rows is None else len(rows), _RANGES_PER_CALL):
                part = slice(first, first + _RANGES_PER_CALL)
                chosen = part if rows is None else rows[part]
                self._read_part(numbers, _Ranges._make([column[chosen] for column in ranges]), out)
        return out

    def ask_disk(self, file_index: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bool | None:
        """Has the disk fetch ranges, as for :meth:`read`, of open files; see :class:`meshfeed._src.base.hooks.ReadsDisk`."""
        if any(is_cached for _, is_cached in self._kinds):
            return None
        sizes = self._item_bytes[file_index]
        begins = self._headers[file_index] + starts * sizes
        ends = begins + lengths * sizes

        def of_file(number: int) -> tuple[Descriptor, np.ndarray, np.ndarray]:
            rows = file_index == number
            return self.files[number].open(None), begins[rows], ends[rows]

        opened = [number for number in np.unique(file_index).tolist() if shared_pool.is_open(self.files[number])]
        return fetch_missing([functools.partial(of_file, number) for number in opened])

    def _groups(self, file_index: np.ndarray) -> list[list[int]]:
        """Returns the files of ranges, in groups of one dtype, local or remote, few enough to be open at once."""
        if self._all is not None:
            return [self._all]
        by_kind: dict[tuple[str, bool], list[int]] = {}
        for number in np.unique(file_index).tolist():
            by_kind.setdefault(self._kinds[number], []).append(number)
        limit = files_per_call()
        return [part[i : i + limit] for part in by_kind.values() for i in range(0, len(part), limit)]

    def _read_part(self, numbers: Sequence[int], ranges: _Ranges, out: np.ndarray) -> None:
        """Reads ranges of the files ``numbers``, which have one dtype."""
        dtype = self.files[numbers[0]].dtype
        of_file = ranges.file_index if numbers is self._all else np.searchsorted(numbers, ranges.file_index)
        offsets = self._headers[ranges.file_index] + ranges.starts * dtype.itemsize
        opened = self._open(numbers, of_file, offsets, offsets + ranges.lengths * dtype.itemsize)
        fds = np.array([descriptor.number for descriptor in opened], np.int64)[of_file]
        done = 0
        if extension is not None and dtype.byteorder in _NATIVE:
            done = extension.read(fds, offsets, ranges.lengths, ranges.places, out, dtype.kind, dtype.itemsize)
        for i in range(done, len(fds)):
            file, start = self.files[int(ranges.file_index[i])], int(ranges.places[i])
            tokens = out[start : start + int(ranges.lengths[i])]
            _read_range(file, int(ranges.record_ids[i]), int(fds[i]), int(offsets[i]), tokens)
        del opened  # not earlier: the number of a closed descriptor may be reused

    def _open(
        self, numbers: Sequence[int], of_file: np.ndarray, offsets: np.ndarray, stops: np.ndarray
    ) -> Sequence[Descriptor | SparseFile]:
        """Opens files; of remote ones without a cache, only the ranges are there."""
        files = [self.files[number] for number in numbers]
        if self._cache is None and self._kinds[numbers[0]][1]:
            return sparse_files([file.remote for file in files], of_file, offsets, stops)
        return [file.open(self._cache) for file in files]

    def document_lengths(self, eod: int | None) -> list[np.ndarray]:
        """Returns the lengths of the documents of each file.

        Raises:
          SettingsError: none of the files that are searched contains ``eod``; also see :func:`document_lengths`.
        """
        listed = lengths_by_file(self._manifests, LENGTHS_KEY, eod)

        def find(file: TokenFile) -> np.ndarray:
            found = listed.get(file.path)
            if found is None or int(found.sum(dtype=np.int64)) != file.num_records:
                return document_lengths(file, eod, self._cache)
            return found.astype(np.int64)

        lengths = file_paths.in_threads(find, self.files)
        searched = [
            (file, len(found))
            for file, found in zip(self.files, lengths, strict=True)
            if file.index is None and file.path not in listed
        ]
        # A file of one document may or may not end with the token.
        if searched and not any(number > 1 or _ends_with(file, eod, self._cache) for file, number in searched):
            others = f" or the {len(searched) - 1:,} other file(s)" if len(searched) > 1 else ""
            raise SettingsError(
                f"eod={eod} does not occur in {searched[0][0].path}{others}. Pass the token that ends a document.",
                setting="eod",
            )
        return lengths


def _read_range(file: TokenFile, record_id: int, fd: int, offset: int, out: np.ndarray) -> None:
    tokens = np.empty(len(out), file.dtype)
    view, done = memoryview(tokens.data).cast("B"), 0
    while done < len(view):
        number = os.preadv(fd, [view[done:]], offset + done)
        if not number:
            where = f"it ends at byte {offset + done:,} or before, within record {record_id}"
            raise cut_short(file.path, where, record_id)
        done += number
    # A token above int32 would wrap to a negative number, which an embedding lookup clamps without an error.
    wrong = np.flatnonzero((tokens > _INT32.max) | (tokens < _INT32.min))
    if wrong.size:
        raise SourceError(
            f"{file.path} holds the token {tokens[wrong[0]]} in record {record_id}. Expected tokens that fit into "
            f"int32. Check that the file holds {file.dtype}.",
            record_id=record_id,
        )
    out[:] = tokens
