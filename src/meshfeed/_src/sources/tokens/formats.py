"""Flat files of tokens, by format: where the tokens are, of which dtype, and where documents end.

============================  =====================================================================
numpy                         ``.npy`` with its header, one dimension of integers
llm.c and modded-nanogpt      256 int32 (magic number, version, number of tokens), then the tokens
Megatron                      bare tokens in ``.bin``; ``.idx`` beside it has the dtype and documents
bare                          tokens from the first byte to the last; the user gives the dtype
============================  =====================================================================
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.sources.checks import is_count
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.direct import RemoteBytes
from meshfeed._src.sources.files.formats import (
    LLM_C_BYTES,
    LLM_C_DTYPES,
    compression_of,
    names_other_format,
    reader_hint,
)
from meshfeed._src.sources.files.lookup import look_at
from meshfeed._src.sources.files.manifest import FileEntry
from meshfeed._src.sources.files.open_files import Descriptor, open_descriptor, shared_pool
from meshfeed._src.sources.files.paths import is_url
from meshfeed._src.sources.files.shard import Shard, inspect_copy

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_NPY_MAGIC = b"\x93NUMPY"
# NumPy parses headers with Python's own parser, which fails now and then in CPython 3.11 if threads use it at the same time
# ("AST constructor recursion depth mismatch").
_PARSING = threading.Lock()
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_BYTES = 34  # magic number, version, dtype code, number of sequences, number of document boundaries
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_HEAD_BYTES = 1 << 16  # a numpy header of version 1 is no longer
_SCANNED_BYTES = 1 << 22


class _TokenShard(Shard):
    """A file that is read through the pool of open files."""

    source = "token"

    def describe_change(self, path: str) -> str:
        """Returns what the file was and what it is now, for an error."""
        return f"{self.num_bytes:,} bytes then, {os.path.getsize(path):,} now"

    def open(self, cache: ShardCache | None) -> Descriptor:
        """Opens the file, or returns it if it is open; one that has become shorter is a CorruptDataError."""
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


def token_files(names: Sequence[str]) -> list[str]:
    """Returns the files that hold tokens, in order: the ``.bin`` in place of the Megatron index beside it.

    A file that is named twice is there twice; an index whose ``.bin`` is named too is left out.
    """
    named = {name for name in names if not name.endswith(".idx")}
    files = [(f"{name[:-4]}.bin", False) if name.endswith(".idx") else (name, True) for name in names]
    return [name for name, itself in files if itself or name not in named]


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
        return checked_dtype(_inspect_megatron(path, opened.num_bytes, version, *index), dtype)
    opened, version = look_at(path, cache, source="Tokens", part=slice(0, _HEAD_BYTES))
    head = opened.read(0, min(opened.num_bytes, _HEAD_BYTES))
    bare = TokenFile(path, opened.num_bytes, version, 0, dtype or np.dtype(np.uint8))
    if head.startswith(_NPY_MAGIC):
        with _PARSING:
            found = _inspect_npy(bare, head)
    else:
        found = _inspect_llm_c(bare, head)
    if found is not None:
        return checked_dtype(found, dtype)
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


def checked_dtype(file: TokenFile, dtype: np.dtype[Any] | None) -> TokenFile:
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


def ends_with(file: TokenFile, token: int | None, cache: ShardCache | None) -> bool:
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
