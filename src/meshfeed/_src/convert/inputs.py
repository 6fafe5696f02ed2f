"""The interface that a format of input files implements, and Arrow arrays made of bytes.

``pyarrow.array``, ``pyarrow.scalar`` and ``numpy.asarray(array)`` import pandas, which takes a second in every worker.
Arrays are therefore made and read by their buffers.
"""

from __future__ import annotations

import abc
import base64
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.sources.files.formats import compression_in
from meshfeed._src.sources.files.paths import is_folder

if TYPE_CHECKING:
    import pyarrow as pa


_HEAD_BYTES = 16


class TypesChanged(Exception):
    """A block of a text file does not fit the types of the first blocks; the types of all blocks are needed."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """What the first pass over a file found.

    Attributes:
      num_records: number of records.
      schema: columns and types; None if there is no record.
      marks: (record, offset) of places where reading can begin, in order.
      more: whatever else the format needs to read the file, JSON.
    """

    num_records: int
    schema: pa.Schema | None
    marks: Sequence[tuple[int, int]] = ()
    more: Any = None

    def to_json(self) -> dict[str, Any]:
        """Returns the scan as JSON."""
        schema = None if self.schema is None else schema_text(self.schema)
        return {"num_records": self.num_records, "schema": schema, "marks": list(self.marks), "more": self.more}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Scan:
        """Reverses :meth:`to_json`."""
        schema = None if value["schema"] is None else read_schema(value["schema"])
        return cls(value["num_records"], schema, [tuple(mark) for mark in value["marks"]], value["more"])


def schema_text(schema: pa.Schema) -> str:
    """Returns the base64 form of a schema, for JSON."""
    return base64.b64encode(schema.serialize()).decode()


def read_schema(text: str) -> pa.Schema:
    """Reverses :func:`schema_text`."""
    import pyarrow as pa

    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text)))


class Input(abc.ABC):
    """Reads one format.

    Args:
      columns: names of the columns to convert; None for all.

    Attributes:
      name: name of the format.
      examples: whether records are Examples already, in the one column ``record``.
      late_columns: whether a column may first appear after the records whose types :meth:`scan` finds.
      types: all columns of all inputs; set before :meth:`read` is called.
      scratch: folder for temporary files. Names there end in ``.part``, so that they are removed after a kill.
      kept: folder for what :meth:`scan` leaves for :meth:`read`, until the job is complete.
    """

    name: str
    examples = False
    late_columns = False
    types: pa.Schema
    scratch: pathlib.Path
    kept: pathlib.Path

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self.columns = columns

    def num_bytes(self, path: str) -> int:
        """Returns the size of an input, which decides the default number of output files."""
        return os.path.getsize(path)

    def files(self, path: str) -> Iterable[str]:
        """Yields the paths of the files that hold an input; if one of them changes, the input does."""
        yield path

    @abc.abstractmethod
    def scan(self, path: str, *, all_types: bool) -> Scan:
        """Counts the records of a file and finds their types.

        Raises:
          SourceError: the file cannot be read; names it.
        """

    @abc.abstractmethod
    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yields the records ``[start, stop)`` of a file, in order.

        Args:
          path: the file.
          scan: what :meth:`scan` returned.
          start: first record.
          stop: record after the last one.
          schema: columns to read. A format with types of its own may return them as they are.

        Raises:
          TypesChanged: a block does not fit ``schema``.
          CorruptDataError: stored bytes are damaged; names the file.
        """

    def place(self, path: str, scan: Scan, record: int) -> str:
        """Returns where a record is, for messages."""
        return f"{path}, record {record:,}"

    def check_scans(  # noqa: B027  # most formats have nothing to check
        self, paths: Sequence[str], scans: Sequence[Scan], columns: Sequence[str]
    ) -> None:
        """Raises SourceError if ``columns`` of inputs do not belong together for another reason than their types."""

    def join(self, schema: pa.Schema, other: pa.Schema) -> pa.Schema:
        """Returns the types that hold the values of both.

        Raises:
          pyarrow.ArrowInvalid, pyarrow.ArrowTypeError: a column has types that cannot be joined.
        """
        import pyarrow as pa

        return pa.unify_schemas([schema, other], promote_options="permissive")

    def unify(self, schema: pa.Schema, other: pa.Schema, path: str) -> pa.Schema:
        """Joins types of files; ``path`` is the file with ``other``.

        Raises:
          SourceError: a column has types that cannot be joined.
        """
        import pyarrow as pa

        try:
            return self.join(schema, other)
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise SourceError(
                f"{path}: its columns do not fit those of the files before: {error}. Expected values of one type per "
                "column. Convert the files separately, or leave the column out with --columns."
            ) from error


def stamp(path: str) -> str:
    """Returns the size of a file, and the time when it was last written."""
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def refuse_compressed(path: str) -> None:
    """Raises SourceError if a file begins as compressed ones do. One whose name states it is decompressed before."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    found = None if head.isascii() else compression_in(head)  # text may begin with BZh
    if found is not None:
        raise SourceError(
            f"{path} is compressed with {found}, which its name does not state. Expected plain content, or a name with the "
            "extension of the compression. Rename the file, or decompress it."
        )


def walk(path: str) -> Iterator[str]:
    """Yields the files in a folder and its subfolders, relative to it, in any order; follows links.

    Raises:
      SourceError: a link leads back to a folder that contains it.
    """
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while pending:
        folder, above = pending.pop()
        status = os.stat(os.path.join(path, folder))
        place = (status.st_dev, status.st_ino)
        if place in above:
            raise SourceError(
                f"{os.path.join(path, folder)} is a link to a folder that contains it. Remove the link, or name the files "
                "with a glob."
            )
        with os.scandir(os.path.join(path, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if is_folder(entry):
                    pending.append((name, above | {place}))
                else:
                    yield name


def choose(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Returns the chosen columns of a schema, in their order there.

    Raises:
      SettingsError: there is no such column.
    """
    import pyarrow as pa

    unknown = [name for name in columns or () if name not in schema.names]
    if unknown:
        raise SettingsError(
            f"unknown columns {unknown}; the data has {schema.names}. Choose some of these.", setting="columns"
        )
    return schema if columns is None else pa.schema([field for field in schema if field.name in columns])


def align(batch: pa.RecordBatch, schema: pa.Schema, first_record: int) -> pa.RecordBatch:
    """Returns a batch with the columns and types of ``schema``; a missing column is null.

    Raises:
      SourceError: a value does not fit its type, which is that of several files; names the column and the record.
    """
    import pyarrow as pa

    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_arrays(
        [
            _cast(batch.column(field.name), field, first_record)
            if field.name in batch.schema.names
            else pa.nulls(batch.num_rows, field.type)
            for field in schema
        ],
        schema=schema,
    )


def _cast(array: pa.Array, field: pa.Field, first_record: int) -> pa.Array:
    import pyarrow as pa

    def cast(rows: range) -> pa.Array:
        return array.take(integers(np.array(rows))).cast(field.type)

    def is_refused(row: int) -> bool:
        try:
            cast(range(row, row + 1))
        except pa.ArrowInvalid:
            return True
        return False

    if array.type == field.type:
        return array
    try:
        return array.cast(field.type)
    except pa.ArrowInvalid as error:
        row = next(filter(is_refused, range(len(array))), None)
        if row is None:  # Arrow cast the lists of rows before or after this part of the column too
            return cast(range(len(array)))
        raise SourceError(
            f"record {first_record + row}: column {field.name!r} has a value that {field.type}, its type in all files "
            f"together, cannot hold: {str(error).rstrip('.')}. Store the column with one type in all files, or leave it out "
            "with --columns."
        ) from error


def null_mask(array: pa.Array) -> np.ndarray | None:
    """Returns bool[n], which values are null; None if there are none."""
    return flags(array.is_null()) if array.null_count else None


def flags(array: pa.BooleanArray) -> np.ndarray:
    """Returns booleans without nulls, bool[n]."""
    import pyarrow as pa

    return numbers(array.cast(pa.uint8()), np.dtype(np.uint8)).astype(bool)


def numbers(array: pa.Array, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns a read-only view of the values of ``dtype``; those of nulls are undefined."""
    values = array.buffers()[1]
    if values is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(values, dtype, len(array), array.offset * dtype.itemsize)


def integers(values: np.ndarray) -> pa.Array:
    """Returns int64[n] as an array."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values, np.int64))])


def binary(values: Sequence[bytes | None]) -> pa.Array:
    """Returns values of bytes as an array; None is null."""
    import pyarrow as pa

    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value or b"") for value in values], out=offsets[1:])
    present = np.packbits([value is not None for value in values], bitorder="little")
    validity = pa.py_buffer(present) if None in values else None
    return spans(offsets, b"".join(value or b"" for value in values), validity)


def spans(offsets: np.ndarray, content: bytes, validity: pa.Buffer | None = None) -> pa.Array:
    """Returns n values of bytes as an array; ``offsets`` int64[n + 1] are their edges in ``content``."""
    import pyarrow as pa

    buffers = [validity, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def byte_lengths(array: pa.Array) -> np.ndarray:
    """Returns the size of each value of a column of text or binary, int64[n]; of a null, 0."""
    import pyarrow as pa

    wide = array.cast(pa.large_binary()) if array.type != pa.large_string() else array.view(pa.large_binary())
    offsets = wide.buffers()[1]
    if not len(wide) or offsets is None:
        return np.zeros(len(wide), np.int64)
    return np.diff(np.frombuffer(offsets, np.int64, len(wide) + 1, wide.offset * 8))


def with_types(schema: pa.Schema, change: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    """Returns a schema with ``change`` of each type in it, also of those within lists and structs."""
    import pyarrow as pa

    def changed(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(kind.value_field.with_type(changed(kind.value_type)), kind.list_size)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            make = pa.large_list if pa.types.is_large_list(kind) else pa.list_
            return make(kind.value_field.with_type(changed(kind.value_type)))
        return pa.struct(list(with_types(pa.schema(list(kind)), change))) if pa.types.is_struct(kind) else change(kind)

    return pa.schema([field.with_type(changed(field.type)) for field in schema])


def to_bytes(array: pa.Array) -> list[bytes]:
    """Returns the values of a column of text or binary; of a null, no bytes."""
    import pyarrow as pa

    wide = array.cast(pa.large_binary()) if array.type != pa.large_string() else array.view(pa.large_binary())
    _, offsets, data = wide.buffers()
    if not len(wide) or offsets is None or data is None:
        return [b""] * len(wide)
    edges = np.frombuffer(offsets, np.int64, len(wide) + 1, wide.offset * 8).tolist()
    first = edges[0]
    content = data.slice(first, edges[-1] - first).to_pybytes()
    values = [content[start - first : stop - first] for start, stop in itertools.pairwise(edges)]
    nulls = null_mask(wide)
    if nulls is not None:
        for row in np.flatnonzero(nulls).tolist():
            values[row] = b""
    return values
