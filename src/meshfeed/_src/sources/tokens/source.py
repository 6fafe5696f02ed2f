"""Windows and documents of flat token files, read at random."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from meshfeed._src.base import trees
from meshfeed._src.base.errors import SettingsError, SourceError, hides_own_frames
from meshfeed._src.base.identities import FOUR_RECORDS
from meshfeed._src.base.types import ColumnSlices, JsonValue, RecordIds, public
from meshfeed._src.reading.identity import digest_tree
from meshfeed._src.sources.checks import check_ids, checked_count, is_count
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.lookup import FileFormat, find_files
from meshfeed._src.sources.files.shard_reader import ShardSource
from meshfeed._src.sources.files.shards import Shards
from meshfeed._src.sources.tokens.files import TokenFiles
from meshfeed._src.sources.tokens.formats import TokenFile, checked_dtype, inspect, token_files

if TYPE_CHECKING:
    import jax

    from meshfeed._src.sources.files.shard_cache import ShardCache


def _find(paths: file_paths.Paths, dtype: DTypeLike | None, cache: ShardCache | None) -> TokenFiles:
    wanted = None if dtype is None else _token_dtype(dtype)
    form = FileFormat(
        "Tokens",
        lambda name: inspect(name, wanted, cache),
        lambda *listed: checked_dtype(TokenFile.from_entry(*listed), wanted),
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


class _TokenSource(ShardSource[TokenFile]):
    """Random-access source over token files."""

    _files: TokenFiles

    def _by_range(self, record_ids: np.ndarray) -> Self:
        found = super()._by_range(record_ids)
        if found is not self:
            found._files = TokenFiles(found._shards.files, found._shards.manifests, None)
        return found

    @property
    def _dtypes(self) -> list[JsonValue]:
        return [file.dtype.str for file in self._shards.files]


@public("meshfeed.sources")
class Tokens(_TokenSource):
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
        return self._with_content(identity, self._digest, [self._key, self._eod, self._dtypes])

    def _digest(self, record_ids: np.ndarray) -> str:
        return digest_tree(self._by_range(record_ids).read_batch(record_ids))


class TokenDocuments(_TokenSource):
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
        """Returns the identity: files, documents, and digests of all lengths and of 4 documents' beginnings."""
        identity: dict[str, JsonValue] = {
            "kind": "token_documents",
            "files": self._identity_of_files(),
            "records": len(self),
            "lengths": xxhash.xxh3_64(np.ascontiguousarray(self._lengths).data).hexdigest(),
        }
        return self._with_content(identity, self._digest, [self._key, self._dtypes], FOUR_RECORDS)

    def _digest(self, record_ids: np.ndarray) -> str:
        lengths = np.minimum(self._lengths[record_ids], _PROBED_TOKENS).astype(np.int64)
        return digest_tree(self._by_range(record_ids).read_slices(record_ids, np.zeros_like(record_ids), lengths))


_PROBED_TOKENS = 1 << 16  # of a document: one may be a whole file
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
