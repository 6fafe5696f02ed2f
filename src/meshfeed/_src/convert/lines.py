"""Files of lines, text, JSON and CSV: where records begin, and blocks of them as Arrow."""

from __future__ import annotations

import abc
import bisect
import codecs
import collections
import csv
import dataclasses
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.convert.inputs import Input, Scan, TypesChanged, refuse_compressed, spans, to_bytes, with_types

if TYPE_CHECKING:
    import pyarrow as pa


_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 8 << 20  # between places where a task can begin to read
_SHOWN_BYTES = 80  # of a bad line
_NULL_LINE = re.compile(rb"\n[ \t\r]*null")
_ROW_IN_BLOCK = re.compile(r" in row \d+|Row #\d+: |(?<=got \d): .*", re.DOTALL)  # in pyarrow's messages

_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class LineBlock:
    """Whole records of a file.

    Attributes:
      offset: bytes of the file before the block.
      content: its bytes.
      starts: int64[records], bytes of the block before each record.
    """

    offset: int
    content: bytes
    starts: np.ndarray


class LineInput(Input, abc.ABC):
    """Base of the formats of lines; a subclass defines where records end and how to parse them.

    Attributes:
      expected: what a line holds, for messages.
    """

    expected: str

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`. Types are those of the first block, or of all blocks with ``all_types``."""
        refuse_compressed(path)
        marks, num_records, next_mark = [], 0, 0
        schema = None
        with open(path, "rb") as file:
            header = self.read_header(file, path)
            for block in self._blocks(file, file.tell()):
                if block.offset >= next_mark:
                    marks.append((num_records, block.offset))
                    next_mark = block.offset + _MARK_BYTES
                if len(block.starts) and (schema is None or all_types):
                    schema = self._types(path, block, header, schema)
                num_records += len(block.starts)
        return Scan(num_records, schema, marks)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        with open(path, "rb") as file:
            header = self.read_header(file, path)
            for first, block in self._blocks_from(file, scan, start):
                low, high = max(start - first, 0), min(stop - first, len(block.starts))
                if low < high:
                    yield from self._parse(path, block, header, schema).slice(low, high - low).to_batches()
                if first + len(block.starts) >= stop:
                    return

    def place(self, path: str, scan: Scan, record: int) -> str:
        """See :class:`Input`."""
        with open(path, "rb") as file:
            self.read_header(file, path)
            for first, block in self._blocks_from(file, scan, record):
                if record - first < len(block.starts):
                    return f"{path}:{_line_of(path, block, int(block.starts[record - first]))}"
        return path

    def _parse(self, path: str, block: LineBlock, header: Sequence[str], schema: pa.Schema) -> pa.Table:
        def parse(content: bytes, count: int) -> pa.Table:
            return _with_rows(self.parse(content, header, schema), count)

        try:
            return _checked(path, block, parse)
        except _BadLine as error:
            self._types(path, block, header, None)  # raises if the block is damaged
            raise TypesChanged(str(error)) from error

    def _types(self, path: str, block: LineBlock, header: Sequence[str], before: pa.Schema | None) -> pa.Schema:
        """Returns the types of a block, joined with those ``before``."""

        def infer(content: bytes, count: int) -> pa.Schema:
            found = with_types(_with_rows(self.parse(content, header, None), count).schema, _text_for_dates)
            return found if before is None else self.join(before, found)

        try:
            return _checked(path, block, infer)
        except _BadLine as error:
            raise CorruptDataError(
                f"{error} Expected {self.expected}. Correct the line, or remove it.", path=path
            ) from error

    def _blocks(self, file: BinaryIO, offset: int) -> Iterator[LineBlock]:
        """Yields blocks of about 1 MiB that end where a record ends."""
        while content := file.read(_BLOCK_BYTES):
            content += file.readline() if not content.endswith(b"\n") else b""
            block = LineBlock(offset, *self.split(content, file))
            yield block
            offset += len(block.content)

    def _blocks_from(self, file: BinaryIO, scan: Scan, record: int) -> Iterator[tuple[int, LineBlock]]:
        """Yields blocks with the number of their first record, from the last mark before ``record``."""
        first, offset = max(mark for mark in scan.marks if mark[0] <= record)
        file.seek(offset)
        for block in self._blocks(file, offset):
            yield first, block
            first += len(block.starts)

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """Reads what comes before the first record: here, the byte order mark, which belongs to no record."""
        _skip_mark(file, path)
        return ()

    @abc.abstractmethod
    def split(self, content: bytes, file: BinaryIO) -> tuple[bytes, np.ndarray]:
        """Returns where records begin, int64[records].

        Args:
          content: whole lines.
          file: the file, for the rest of the last record.

        Returns:
          ``content`` with the rest of its last record, and the bytes before each record.
        """

    @abc.abstractmethod
    def parse(self, content: bytes, header: Sequence[str], schema: pa.Schema | None) -> pa.Table:
        """Parses records into the columns of ``schema``; None for all columns with their own types.

        Raises:
          pyarrow.ArrowInvalid: they are damaged, or do not fit the schema.
        """


class _BadLine(Exception):
    """A line that cannot be parsed; the message has its place and content."""


def _checked(path: str, block: LineBlock, parse: Callable[[bytes, int], _R]) -> _R:
    """Returns ``parse(content, number of records)``.

    Raises:
      _BadLine: ``parse`` raised an error of Arrow. The line is the last one of the shortest part that it refuses.
    """
    import pyarrow as pa

    errors = (pa.ArrowInvalid, pa.ArrowTypeError)
    stops = [*block.starts[1:].tolist(), len(block.content)]

    def is_refused(record: int) -> bool:
        try:
            parse(block.content[: stops[record]], record + 1)
        except errors:
            return True
        return False

    try:
        return parse(block.content, len(stops))
    except errors as error:
        record = bisect.bisect_left(range(len(stops) - 1), True, key=is_refused)
        start = int(block.starts[record])
        line = _line_of(path, block, start)
        shown = block.content[start : stops[record]].split(b"\n", 1)[0]
        text = shown[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
        more = "…" if len(shown) > _SHOWN_BYTES else ""
        reason = _ROW_IN_BLOCK.sub("", str(error)).rstrip(".")
        raise _BadLine(f"{path}:{line}: {reason}, in the line '{text}{more}'.") from error


def _line_of(path: str, block: LineBlock, start: int) -> int:
    """Returns the number of the line, from 1, that begins ``start`` bytes after the start of a block."""
    stop = block.offset
    with open(path, "rb") as file:
        before = sum(file.read(min(_BLOCK_BYTES, stop - low)).count(b"\n") for low in range(0, stop, _BLOCK_BYTES))
    return 1 + before + block.content.count(b"\n", 0, start)


def _with_rows(table: pa.Table, count: int) -> pa.Table:
    import pyarrow as pa

    if table.num_rows != count:
        if table.num_rows < count:
            raise pa.ArrowInvalid("a record that continues on the next line")
        raise pa.ArrowInvalid(f"{table.num_rows - count + 1} records instead of one")
    return table


def _skip_mark(file: BinaryIO, path: str) -> None:
    """Skips the byte order mark at the start of a file, which some editors write."""
    start = file.read(len(codecs.BOM_UTF8))
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SourceError(
            f"{path} begins with the byte order mark of UTF-16. Expected text in UTF-8. Convert the file with "
            "iconv -f utf-16 -t utf-8."
        )
    if start != codecs.BOM_UTF8:
        file.seek(0)


def line_starts(content: bytes) -> np.ndarray:
    """Returns where lines begin, int64[lines]."""
    stops = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) + 1
    starts = np.concatenate([np.zeros(1, np.int64), stops])
    return starts[: np.searchsorted(starts, len(content))]


def without_blank(content: bytes, starts: np.ndarray, blank: bytes) -> np.ndarray:
    """Returns ``starts`` without those of lines that consist of the characters ``blank`` and a line break."""
    blank += b"\n"
    kept = np.ones(len(starts), bool)
    for row in np.flatnonzero(np.frombuffer(content, np.uint8)[starts] <= ord(" ")).tolist():
        stop = starts[row + 1] if row + 1 < len(starts) else len(content)
        kept[row] = bool(content[starts[row] : stop].strip(blank))
    return starts[kept]


class TextLines(LineInput):
    """Lines of text: one record per line, without its line break, in the column ``text``."""

    name = "text"
    expected = "text"

    def split(self, content: bytes, file: BinaryIO) -> tuple[bytes, np.ndarray]:
        """See :class:`LineInput`."""
        return content, line_starts(content)

    def parse(self, content: bytes, header: Sequence[str], schema: pa.Schema | None) -> pa.Table:
        """See :class:`LineInput`."""
        import pyarrow as pa

        if b"\r" in content:
            content = content.replace(b"\r\n", b"\n")
        starts = line_starts(content)
        text = content.removesuffix(b"\r").replace(b"\n", b"")
        offsets = np.append(starts - np.arange(len(starts)), len(text))
        return pa.Table.from_arrays([spans(offsets, text)], ["text"])


class JsonLines(LineInput):
    """Lines of JSON objects. Blank lines are skipped."""

    name = "jsonl"
    late_columns = True
    expected = "one JSON object per line, as jq -c writes them, with values of one type per key"

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """See :class:`LineInput`. A whole document is refused here."""
        _skip_mark(file, path)
        first = file.tell()
        start = file.read(64).lstrip()
        file.seek(first)
        if start[:1] not in (b"{", b""):
            what, remedy = f"{start[:20]!r}", "Correct the file, or name its format with --format."
            if start[:1] == b"[":
                what, remedy = "one JSON array", "Convert it: jq -c '.[]' FILE > FILE.jsonl."
            raise SourceError(f"{path} begins with {what}. Expected one JSON object per line. {remedy}")
        return ()

    def split(self, content: bytes, file: BinaryIO) -> tuple[bytes, np.ndarray]:
        """See :class:`LineInput`."""
        return content, without_blank(content, line_starts(content), b" \t\r")

    def parse(self, content: bytes, header: Sequence[str], schema: pa.Schema | None) -> pa.Table:
        """See :class:`LineInput`."""
        import pyarrow as pa
        import pyarrow.json as pj

        if _NULL_LINE.search(b"\n" + content):  # a record for Arrow, which crashes if it is the first one
            raise pa.ArrowInvalid("null in place of an object")
        options = pj.ParseOptions()
        if schema is not None:
            options = pj.ParseOptions(explicit_schema=self.types, unexpected_field_behavior="error")
        read = pj.ReadOptions(use_threads=False, block_size=len(content) + 1)
        table = pj.read_json(io.BytesIO(content), read, options)
        return table if schema is None else table.select(schema.names)


def _text_for_dates(kind: pa.DataType) -> pa.DataType:
    """Arrow parses text such as 2026-11-22 as a date; here it stays text."""
    import pyarrow as pa

    return pa.string() if pa.types.is_temporal(kind) else kind


_MAX_INTEGER = 1 << 53  # that a float holds, as all below
_MAX_RECORD_BYTES = 64 << 20  # a quote that is never closed would otherwise take in the rest of the file


class Csv(LineInput):
    """Comma- or tab-separated values with a header. Blank lines are skipped."""

    name = "csv"
    expected = "a value for each column of the first line, the header"

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """See :class:`LineInput`."""
        self._path, self._delimiter = path, "\t" if path.lower().endswith(".tsv") else ","
        line = file.readline()
        while line and not line.strip(b"\r\n"):
            line = file.readline()
        while line.count(b'"') % 2 and len(line) < csv.field_size_limit() and (more := file.readline()):
            line += more
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise CorruptDataError(
                f"{path}:1: the header is not text in UTF-8: {error}. Convert the file with iconv -t utf-8.", path=path
            ) from error
        try:
            if line.count(b'"') % 2:
                raise csv.Error("a quote is not closed")
            names = next(csv.reader([text], delimiter=self._delimiter), [])
        except csv.Error as error:
            raise CorruptDataError(
                f"{path}: the first line, which is the header, cannot be read: {error}. Expected lines that end in \\n, and "
                "two quotes for a quote within a value. Correct the line; tr '\\r' '\\n' converts lines that end in \\r.",
                path=path,
            ) from error
        repeated = [name for name, count in collections.Counter(filter(None, names)).items() if count > 1]
        if repeated or not all(names):
            what = f"names the columns {repeated} more than once"
            if not repeated:
                what = f"has no name for column {names.index('') + 1} of {len(names)}"
            raise SourceError(
                f"{path}: the first line, which is the header, {what}. Expected a different name for each column. If it is a "
                "record, add a line with names before it."
            )
        return names

    def split(self, content: bytes, file: BinaryIO) -> tuple[bytes, np.ndarray]:
        """See :class:`LineInput`: a quoted value may hold line breaks."""
        starts, is_open = record_starts(content, self._delimiter.encode())
        while is_open and (more := _to_next_quote(file)):
            content += more
            if len(content) - starts[-1] > _MAX_RECORD_BYTES:
                line = content[starts[-1] :].split(b"\n", 1)[0][:80].decode("utf-8", "backslashreplace")
                raise CorruptDataError(
                    f"{self._path}: a quote is not closed within {_MAX_RECORD_BYTES >> 20} MiB after the line: {line}. "
                    "Expected two quotes for a quote within a value. Correct the line.",
                    path=self._path,
                )
            starts, is_open = record_starts(content, self._delimiter.encode())
        return content, without_blank(content, starts, b"\r")

    def parse(self, content: bytes, header: Sequence[str], schema: pa.Schema | None) -> pa.Table:
        """See :class:`LineInput`."""
        import pyarrow as pa
        import pyarrow.csv as pc

        names = header if schema is None else schema.names
        table = pc.read_csv(
            io.BytesIO(content),
            pc.ReadOptions(use_threads=False, block_size=len(content) + 1, column_names=list(header)),
            pc.ParseOptions(delimiter=self._delimiter, newlines_in_values=b'"' in content),
            pc.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=list(names)),
        )
        columns = [column.combine_chunks() for column in table.columns]
        if schema is None:
            return pa.Table.from_arrays([as_numbers(column) for column in columns], names=list(names))
        typed = [as_type(name, column, schema.field(name).type) for name, column in zip(names, columns, strict=True)]
        return pa.Table.from_arrays(typed, schema=schema)

    def join(self, schema: pa.Schema, other: pa.Schema) -> pa.Schema:
        """See :class:`Input`: a column that is not a number everywhere is text."""
        import pyarrow as pa

        if schema.names != other.names:
            raise pa.ArrowInvalid(f"the header is {other.names} instead of {schema.names}")
        return pa.schema([(name, _join(schema.field(name).type, other.field(name).type)) for name in schema.names])


def as_numbers(column: pa.StringArray) -> pa.Array:
    """Returns a column of CSV as numbers if each value, written back by Python, is the same text; else as it is.

    An empty value is null. Integers beyond int64, or beyond 53 bits beside floats, are text: a number would lose digits.
    """
    import pyarrow as pa

    values = _null_if_empty(column)
    if values.null_count == len(values):
        return pa.nulls(len(values))
    try:
        integers = values.cast(pa.int64())  # also takes 007, -0 and 0x1F
    except pa.ArrowInvalid:
        pass
    else:
        return integers if integers.cast(pa.string()).equals(values) else column
    return values.cast(pa.float64()) if all(map(_is_number, filter(None, to_bytes(column)))) else column


def as_type(name: str, column: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Returns a column of CSV as ``kind``.

    Raises:
      pyarrow.ArrowInvalid: a value is of another type.
    """
    import pyarrow as pa

    if pa.types.is_string(kind):
        return column
    found = as_numbers(column)
    if found.type == kind or pa.types.is_null(found.type):
        return found.cast(kind)
    is_wider = pa.types.is_float64(kind) and pa.types.is_int64(found.type)
    if is_wider and all(map(_is_number, filter(None, to_bytes(column)))):
        return found.cast(kind)
    if is_wider:
        raise pa.ArrowInvalid(
            f"column {name!r} has an integer beyond {_MAX_INTEGER:,} here, and floats elsewhere, in which it would lose its "
            "digits. Leave the column out with --columns, or write one value as text, such as 1.50, which makes it text"
        )
    raise pa.ArrowInvalid(f"column {name!r} holds {found.type} here, and {kind} before")


def _is_number(text: bytes) -> bool:
    """Whether a value of a column of floats is the same text if Python writes it back."""
    try:
        if text.isdigit() or text[1:].isdigit():
            return str(int(text)).encode() == text and abs(int(text)) <= _MAX_INTEGER
        return repr(float(text)).encode() == text
    except ValueError:
        return False


def _null_if_empty(column: pa.StringArray) -> pa.StringArray:
    import pyarrow as pa

    _, offsets, data = column.buffers()
    if not len(column) or offsets is None:
        return column
    filled = np.diff(np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)) > 0
    if filled.all():
        return column
    edges = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    validity = pa.py_buffer(np.packbits(filled, bitorder="little"))
    return pa.Array.from_buffers(pa.string(), len(column), [validity, pa.py_buffer(edges.copy()), data])


def _to_next_quote(file: BinaryIO) -> bytes:
    """Reads up to a line that may end a quoted value: one with an odd number of quotes."""
    lines = []
    while line := file.readline():
        lines.append(line)
        if line.count(b'"') % 2:
            break
    return b"".join(lines)


def record_starts(content: bytes, delimiter: bytes) -> tuple[np.ndarray, bool]:
    """Returns where records begin, int64[records], and whether the last one ends within a quoted value.

    A quote at the start of a value opens it, and a quote that is not doubled closes it; any other quote is text. If all
    quotes that come after an even number of quotes are at the start of a value or double the one before, a line break
    ends a record if the number of quotes before it is even.
    """
    starts = line_starts(content)
    values = np.frombuffer(content, np.uint8)
    quotes = np.flatnonzero(values == ord('"'))
    opening = quotes[::2]
    before = values[opening[opening > 0] - 1]
    if not np.isin(before, list(delimiter + b'\n"')).all():
        return _scan_records(content, delimiter)
    return starts[np.searchsorted(quotes, starts) % 2 == 0], len(quotes) % 2 == 1


def _scan_records(content: bytes, delimiter: bytes) -> tuple[np.ndarray, bool]:
    """See :func:`record_starts`; for any quotes, one record at a time."""
    mark = re.escape(delimiter)
    value = rb'(?:"(?:[^"]++|"")*+"[^%b\n]*+|(?!")[^%b\n]*+)' % (mark, mark)
    # Greedy: Python 3.11.2, that of Debian 12, goes on in the middle of a possessive group that has failed there.
    record = re.compile(rb"%b(?:%b%b)*(?:\n|\Z)" % (value, mark, value))
    starts, end = [], 0
    while end < len(content):
        starts.append(end)
        found = record.match(content, end)
        if found is None:
            break
        end = found.end()
    return np.array(starts, np.int64), end < len(content)


def _join(one: pa.DataType, two: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if one == two or pa.types.is_null(two):
        return one
    if pa.types.is_null(one):
        return two
    return pa.float64() if {one, two} == {pa.int64(), pa.float64()} else pa.string()
