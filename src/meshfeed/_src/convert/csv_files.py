"""CSV and TSV files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.convert.text_files import LineInput, line_starts, without_blank

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_RECORD_BYTES = 64 << 20


class Csv(LineInput):
    """Comma- or tab-separated values with a header. Blank lines are skipped."""

    name = "csv"
    expected = "a value for each column of the header"

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """See :class:`LineInput`."""
        self._path, self._delimiter = path, "\t" if path.endswith(".tsv") else ","
        line = file.readline()
        while line.count(b'"') % 2 and (more := file.readline()):
            line += more
        try:
            text = line.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise CorruptDataError(
                f"{path}:1: the header is not text in UTF-8: {error}. Convert the file with iconv -t utf-8.", path=path
            ) from error
        names = next(csv.reader([text], delimiter=self._delimiter), [])
        if len(set(names)) < len(names) or not all(names):
            raise SourceError(
                f"{path} has the header {names}. Expected a first line with a different name for each column. Add one."
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
        import pyarrow.csv as pc

        names, types = (
            (header, {}) if schema is None else (schema.names, dict(zip(schema.names, schema.types, strict=True)))
        )
        return pc.read_csv(
            io.BytesIO(content),
            pc.ReadOptions(use_threads=False, block_size=len(content) + 1, column_names=list(header)),
            pc.ParseOptions(delimiter=self._delimiter, newlines_in_values=b'"' in content),
            pc.ConvertOptions(column_types=types, include_columns=list(names)),
        )

    def join(self, schema: pa.Schema, other: pa.Schema) -> pa.Schema:
        """See :class:`Input`: a column that is not a number everywhere is text."""
        import pyarrow as pa

        if schema.names != other.names:
            raise pa.ArrowInvalid(f"the header is {other.names} instead of {schema.names}")
        return pa.schema([(name, _join(schema.field(name).type, other.field(name).type)) for name in schema.names])


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
    record = re.compile(rb"%b(?:%b%b)*+(?:\n|\Z)" % (value, mark, value))
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
