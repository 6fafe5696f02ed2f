"""Output files and their settings: ArrayRecord with Examples or bytes, and token files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError, missing_package
from meshfeed._src.convert.example import encode_examples, flatten, is_text_or_bytes
from meshfeed._src.convert.inputs import flags, to_bytes
from meshfeed._src.convert.values import Measure, measure, merge
from meshfeed._src.sources.chat import tokenizer as tokenizer_files
from meshfeed._src.sources.decode import parse_example
from meshfeed._src.sources.files.formats import LLM_C_BYTES, LLM_C_DTYPES

if TYPE_CHECKING:
    import pyarrow as pa
    import tokenizers

_MAX_TOKENS = np.iinfo(np.int32).max  # what the header of a token file can state


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that, with the input, determine the content of the output files.

    Attributes:
      encoding: "example", "bytes" or "tokens".
      columns: the columns to write; None for all.
      column: the column to write with "bytes" and "tokens"; None for the only one that fits.
      tokenizer: path of the tokenizer for "tokens".
      eod: the token that ends a document.
      compression: of ArrayRecord, "zstd" or "none".
      shards: number of output files; None for one per 256 MiB of input.
    """

    encoding: str = "example"
    columns: Sequence[str] | None = None
    column: str | None = None
    tokenizer: str | None = None
    eod: str | None = None
    compression: str = "zstd"
    shards: int | None = None


class ArrayRecordFile:
    """An ArrayRecord file while it is written.

    Args:
      path: the file.
      encoding: "example", or "bytes" for the values of the only column.
      examples: whether the only column already holds Examples.
      compression: "zstd" or "none".

    Attributes:
      num_records: records written so far; of a token file, tokens.
      values: what the features hold so far, unless they are copied unread.
    """

    num_records = 0

    def __init__(self, path: str, encoding: str, *, examples: bool, compression: str) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        self.values: dict[str, Measure] = {}
        # One record per chunk: a reader decodes whole chunks, also for a single record.
        options = {"zstd": "group_size:1", "none": "group_size:1,uncompressed"}[compression]
        self._path = path
        self._writer = ArrayRecordWriter(path, options)
        self._is_encoded = examples or encoding == "bytes"
        self._are_examples = examples and encoding == "example"
        self._is_checked = not self._are_examples

    def write(self, batch: pa.RecordBatch, first_record: int) -> None:
        """Appends records; ``first_record`` is the number of the first one in the input."""
        if self._is_encoded:
            column = batch.column(0)
            if column.null_count:
                row = int(np.flatnonzero(flags(column.is_null()))[0])
                raise SourceError(
                    f"record {first_record + row} has no value in the column {batch.schema.names[0]!r}, the one to write. "
                    "Filter such records out before, or use --encoding example."
                )
            records = to_bytes(column)
            columns = [] if self._are_examples else [(batch.schema.names[0], column)]
        else:
            columns = flatten(batch, first_record)
            records = encode_examples(columns, batch.num_rows, first_record)
        if not self._is_checked and records:
            self._is_checked = True
            read_example(records[0], first_record)
        found = measure(columns)
        self.values = merge([self.values, found]) if self.num_records else found
        with _disk_errors():
            collections.deque(map(self._writer.write, records), maxlen=0)  # a loop without steps of Python
        self.num_records += len(records)

    def close(self) -> None:
        """Completes the file.

        Raises:
          OSError: not all records are stored.
        """
        from array_record.python.array_record_module import ArrayRecordReader

        with _disk_errors():
            self._writer.close()
            stored = ArrayRecordReader(self._path).num_records()  # the writer reports no error of the disk
        if stored != self.num_records:
            found = f"{max(stored, 0):,}"  # negative if the file has no footer
            raise OSError(f"{self._path}: {found} of {self.num_records:,} records are stored. Is the disk full?")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Maps the library's RuntimeError, such as that of a full disk, to OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"cannot write the output: {error}") from error


def read_example(record: bytes, number: int) -> dict[str, Any]:
    """Returns the features of an Example; raises SourceError with the record's number if it is not one."""
    try:
        return parse_example(record)
    except ValueError as error:
        raise SourceError(
            f"record {number} is not a tf.train.Example: {error} To write the records as they are, use --encoding bytes."
        ) from error


class TokenWriter:
    """A token file in llm.c's format while it is written: 1,024 bytes of header, then the tokens of all records.

    Args:
      path: the file.
      tokenizer: path of the ``tokenizer.json``.
      eod: a token, or its number, written after each record; None for none.
    """

    num_records = 0

    def __init__(self, path: str, tokenizer: str, eod: str | None) -> None:
        self.values: dict[str, Measure] = {}
        self._tokenizer = load_tokenizer(tokenizer)
        self._eod = [] if eod is None else [eod_id(self._tokenizer, eod)]
        self._magic, self._version, self._dtype = token_format(self._tokenizer)
        self._file = open(path, "wb")  # noqa: SIM115  # close() completes it
        self._file.write(bytes(LLM_C_BYTES))

    def write(self, batch: pa.RecordBatch, first_record: int) -> None:
        """See :class:`ArrayRecordFile`."""
        texts = [_decode(value, first_record + row) for row, value in enumerate(to_bytes(batch.column(0)))]
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids + self._eod
            self._file.write(np.array(ids, self._dtype).tobytes())
            self.num_records += len(ids)
        if self.num_records > _MAX_TOKENS:
            raise SettingsError(
                f"an output file would hold more than {_MAX_TOKENS:,} tokens. Set a larger --shards.", setting="shards"
            )

    def close(self) -> None:
        """See :class:`ArrayRecordFile`."""
        header = struct.pack("<3i", self._magic, self._version, self.num_records)
        self._file.seek(0)
        self._file.write(header)
        self._file.close()


def _decode(value: bytes, record: int) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"record {record} is not text in UTF-8: {error}. Convert the file with iconv -t utf-8."
        ) from error


def load_tokenizer(path: str) -> tokenizers.Tokenizer:
    """Loads a ``tokenizer.json``, without its padding and truncation. The result is kept, by the file's content.

    Raises:
      SourceError: tokenizers is not installed.
      SettingsError: there is no such file, or it is not a tokenizer.
    """
    try:
        return tokenizer_files.parse(tokenizer_files.read(path), path)
    except ImportError as error:
        raise missing_package("--encoding tokens", error, "convert") from error


def token_format(tokenizer: tokenizers.Tokenizer) -> tuple[int, int, np.dtype[Any]]:
    """Returns magic number, version and dtype of the smallest format that holds all tokens."""
    size = 1 + max(tokenizer.get_vocab().values(), default=0)  # numbers may have gaps
    formats = ((*kind, np.dtype(dtype)) for kind, dtype in LLM_C_DTYPES.items() if size <= np.iinfo(dtype).max + 1)
    return next(formats)  # a tokenizer numbers its tokens with 32 bits, and so does the last format


def eod_id(tokenizer: tokenizers.Tokenizer, eod: str) -> int:
    """Returns the number of the token that ends a document. Digits are its number, even if they are a token too.

    Raises:
      SettingsError: the tokenizer has no such token.
    """
    if eod.isdecimal() and tokenizer.id_to_token(int(eod)) is not None:
        return int(eod)
    found = tokenizer.token_to_id(eod)
    if found is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
        known = f"Its special tokens are {special}; give one of them" if special else "Give a token of its vocabulary"
        raise SettingsError(f"the tokenizer has no token {eod!r}. {known} or a number to --eod.", setting="eod")
    return found


def manifest_details(settings: Settings) -> tuple[str, dict[str, Any]]:
    """Returns the source that reads the output files, and the details with which it opens them without reading them."""
    if settings.tokenizer is None:
        return "ArrayRecord", {"group_size": 1}
    _, _, dtype = token_format(load_tokenizer(settings.tokenizer))
    return "Tokens", {"dtype": dtype.str, "offset": LLM_C_BYTES}


def check_column(schema: pa.Schema, encoding: str, column: str | None) -> pa.Schema:
    """Returns the one column to write for the encodings "bytes" and "tokens".

    Raises:
      SettingsError: ``column`` is missing or has a wrong type; lists those that fit.
    """
    import pyarrow as pa

    fitting = [field.name for field in schema if is_text_or_bytes(_leaf(field.type))]
    if column in fitting or (column is None and len(fitting) == 1):
        return pa.schema([schema.field(column or fitting[0])])
    if column is not None:
        problem = f"--column {column} is not a column of text or bytes"
    else:
        problem = "Several columns hold text or bytes" if fitting else "No column holds text or bytes"
    remedy = f"give --column with one of {json.dumps(fitting)}" if fitting else "use --encoding example"
    raise SettingsError(f"{problem}. --encoding {encoding} writes one: {remedy}.", setting="column")


def _leaf(kind: pa.DataType) -> pa.DataType:
    return getattr(kind, "storage_type", kind)
