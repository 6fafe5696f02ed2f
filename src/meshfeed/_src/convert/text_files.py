"""Files of lines (JSON, CSV, text): where records begin, and blocks of them as Arrow."""

from __future__ import annotations

import abc
import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.convert.buffers import binary
from meshfeed._src.convert.inputs import Input, Scan, TypesChanged

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.json as pj

_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 8 << 20  # between places where a task can begin to read


class LineInput(Input, abc.ABC):
    """What the formats of lines share. A subclass knows where its records end and how to parse them."""

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`. Types are those of the first block, or of all blocks with ``all_types``."""
        marks, num_records, next_mark = [], 0, 0
        schema = None
        with open(path, "rb") as file:
            header = self.read_header(file, path)
            for offset, block, count in self._blocks(file, file.tell()):
                if offset >= next_mark:
                    marks.append((num_records, offset))
                    next_mark = offset + _MARK_BYTES
                if count and (schema is None or all_types):
                    schema = self._unify(path, schema, self.infer(block, header, path))
                num_records += count
        return Scan(num_records, schema, marks)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        first, offset = max(mark for mark in scan.marks if mark[0] <= start)
        with open(path, "rb") as file:
            header = self.read_header(file, path)
            file.seek(offset)
            for _, block, count in self._blocks(file, offset):
                low, high = max(start - first, 0), min(stop - first, count)
                if low < high:
                    for batch in self._parse(block, count, header, schema, path, first):
                        kept = slice(max(low, 0), max(min(high, batch.num_rows), 0))
                        if kept.start < kept.stop:
                            yield batch.slice(kept.start, kept.stop - kept.start)
                        low, high = low - batch.num_rows, high - batch.num_rows
                first += count
                if first >= stop:
                    return

    def _parse(
        self, block: bytes, count: int, header: Sequence[str], schema: pa.Schema, path: str, first: int
    ) -> list[pa.RecordBatch]:
        import pyarrow as pa

        try:
            table = self.parse(block, header, schema)
        except pa.ArrowInvalid as error:
            self.infer(block, header, path)  # raises if the block is damaged
            raise TypesChanged(f"{path}: records {first} to {first + count - 1} have other types: {error}") from error
        if table.num_rows != count:
            raise CorruptDataError(
                f"{path}: {count:,} records were counted in a block, and {table.num_rows:,} parsed, near record {first}. "
                "Check its quotes and line breaks.",
                path=path,
            )
        return table.to_batches()

    def _unify(self, path: str, schema: pa.Schema | None, other: pa.Schema) -> pa.Schema:
        return other if schema is None else self.unify(schema, other, path)

    def _blocks(self, file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes, int]]:
        """Yields offset, content and number of records of blocks that end where a record ends."""
        while block := file.read(_BLOCK_BYTES):
            block += file.readline() if not block.endswith(b"\n") else b""
            block = self.complete(block, file)
            yield offset, block, self.count(block)
            offset += len(block)

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """Reads what is before the first record."""
        return ()

    def complete(self, block: bytes, file: BinaryIO) -> bytes:
        """Returns the block, which ends where a line ends, with what is missing of its last record."""
        return block

    @abc.abstractmethod
    def count(self, block: bytes) -> int:
        """Returns the number of records in a block."""

    @abc.abstractmethod
    def infer(self, block: bytes, header: Sequence[str], path: str) -> pa.Schema:
        """Returns the types of a block's records."""

    @abc.abstractmethod
    def parse(self, block: bytes, header: Sequence[str], schema: pa.Schema) -> pa.Table:
        """Parses a block; raises ``pyarrow.ArrowInvalid`` if it does not fit the schema."""


class TextLines(LineInput):
    """Lines of text: one record per line, without its line break, in the column ``text``."""

    name = "text"

    def count(self, block: bytes) -> int:
        """See :class:`LineInput`."""
        return block.count(b"\n") + (not block.endswith(b"\n"))

    def infer(self, block: bytes, header: Sequence[str], path: str) -> pa.Schema:
        """See :class:`LineInput`."""
        import pyarrow as pa

        return pa.schema([("text", pa.large_binary())])

    def parse(self, block: bytes, header: Sequence[str], schema: pa.Schema) -> pa.Table:
        """See :class:`LineInput`."""
        import pyarrow as pa

        lines = block.split(b"\n")
        if block.endswith(b"\n"):
            lines.pop()
        return pa.table([binary([line.removesuffix(b"\r") for line in lines])], schema)


class JsonLines(LineInput):
    """Lines of JSON objects. Blank lines are skipped."""

    name = "jsonl"

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """See :class:`LineInput`. Nothing is before the first record, but a whole document is refused here."""
        start = file.read(64).lstrip()
        file.seek(0)
        if start[:1] not in (b"{", b""):
            what = "one JSON array" if start[:1] == b"[" else f"{start[:20]!r}"
            raise SourceError(
                f"{path} begins with {what}. Expected one JSON object per line. Convert it: jq -c '.[]' FILE > FILE.jsonl."
            )
        return ()

    def count(self, block: bytes) -> int:
        """See :class:`LineInput`."""
        if b"\n\n" not in block and b"\n\r" not in block and b"\n " not in block and block[:1] == b"{":
            return block.count(b"\n") + (not block.endswith(b"\n"))
        return sum(1 for line in block.splitlines() if line.strip())

    def infer(self, block: bytes, header: Sequence[str], path: str) -> pa.Schema:
        """See :class:`LineInput`."""
        import pyarrow as pa
        import pyarrow.json as pj

        try:
            table = pj.read_json(io.BytesIO(block), _json_read(block), pj.ParseOptions())
        except pa.ArrowInvalid as error:
            raise CorruptDataError(
                f"{path} has a line that cannot be read as a record: {error}. Expected one JSON object per line, with values "
                "of one type per key.",
                path=path,
            ) from error
        return pa.schema([field.with_type(_without_dates(field.type)) for field in table.schema])

    def parse(self, block: bytes, header: Sequence[str], schema: pa.Schema) -> pa.Table:
        """See :class:`LineInput`."""
        import pyarrow.json as pj

        options = pj.ParseOptions(explicit_schema=self.types, unexpected_field_behavior="error")
        return pj.read_json(io.BytesIO(block), _json_read(block), options).select(schema.names)


def _json_read(block: bytes) -> pj.ReadOptions:
    import pyarrow.json as pj

    return pj.ReadOptions(use_threads=False, block_size=len(block) + 1)


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """Arrow takes text such as 2026-11-22 for a date; here it stays text."""
    import pyarrow as pa

    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_dates(field.type)) for field in kind])
    return kind


class Csv(LineInput):
    """Comma- or tab-separated values with a header. Blank lines are skipped."""

    name = "csv"

    def read_header(self, file: BinaryIO, path: str) -> Sequence[str]:
        """See :class:`LineInput`."""
        self._delimiter = "\t" if path.endswith(".tsv") else ","
        line = file.readline()
        while line.count(b'"') % 2 and (more := file.readline()):
            line += more
        text = line.decode("utf-8-sig").rstrip("\r\n")
        names = next(csv.reader([text], delimiter=self._delimiter), [])
        if len(set(names)) < len(names) or not all(names):
            raise SourceError(
                f"{path} has the header {names}. Expected a first line with a different name for each column. Add one."
            )
        return names

    def complete(self, block: bytes, file: BinaryIO) -> bytes:
        """See :class:`LineInput`: a quoted value may hold line breaks."""
        if b'"' not in block:
            return block
        lines = io.BytesIO(block)
        text = (line.decode("utf-8", "replace") for line in itertools.chain(lines, self._more(file)))
        self._extra: list[bytes] = []
        rows = csv.reader(text, delimiter=self._delimiter)
        for _ in rows:
            if lines.tell() == len(block):
                break
        return block + b"".join(self._extra)

    def _more(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline():
            self._extra.append(line)
            yield line

    def count(self, block: bytes) -> int:
        """See :class:`LineInput`."""
        if b'"' not in block and b"\n\n" not in block and b"\n\r" not in block and block[:1] not in (b"\n", b"\r"):
            return block.count(b"\n") + (not block.endswith(b"\n"))
        lines = (line.decode("utf-8", "replace") for line in io.BytesIO(block))
        return sum(1 for row in csv.reader(lines, delimiter=self._delimiter) if row)

    def infer(self, block: bytes, header: Sequence[str], path: str) -> pa.Schema:
        """See :class:`LineInput`."""
        import pyarrow as pa

        try:
            table = self._read(block, header, {}, header)
        except pa.ArrowInvalid as error:
            raise CorruptDataError(
                f"{path} has a line that cannot be read as a record: {error}. Expected the {len(header)} columns of its "
                "header in every line.",
                path=path,
            ) from error
        return pa.schema([field.with_type(_without_dates(field.type)) for field in table.schema])

    def parse(self, block: bytes, header: Sequence[str], schema: pa.Schema) -> pa.Table:
        """See :class:`LineInput`."""
        return self._read(block, header, dict(zip(schema.names, schema.types, strict=True)), schema.names)

    def _read(
        self, block: bytes, header: Sequence[str], types: dict[str, pa.DataType], names: Sequence[str]
    ) -> pa.Table:
        import pyarrow.csv as pc

        return pc.read_csv(
            io.BytesIO(block),
            pc.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=list(header)),
            pc.ParseOptions(delimiter=self._delimiter, newlines_in_values=b'"' in block),
            pc.ConvertOptions(column_types=types, include_columns=list(names)),
        )

    def unify(self, schema: pa.Schema, other: pa.Schema, path: str) -> pa.Schema:
        """See :class:`Input`: a column that is not a number everywhere is text."""
        import pyarrow as pa

        if schema.names != other.names:
            raise SourceError(
                f"{path} has the columns {other.names}, and other files have {schema.names}. Expected the same header in all "
                "files. Convert them separately."
            )
        return pa.schema([(name, _csv_type(schema.field(name).type, other.field(name).type)) for name in schema.names])


def _csv_type(one: pa.DataType, two: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if one == two or pa.types.is_null(two):
        return one
    if pa.types.is_null(one):
        return two
    return pa.float64() if {one, two} == {pa.int64(), pa.float64()} else pa.string()
