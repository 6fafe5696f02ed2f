"""Reads ranges of rows of a Parquet file in bounded memory: for streams, conversions, and the source in ``../parquet.py``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from meshfeed._src.base.errors import CorruptDataError, SourceError, missing_package
from meshfeed._src.sources.files.formats import reader_hint
from meshfeed._src.sources.files.paths import check_name

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# Decoded at a time: enough to amortize the call, small enough that 64 lanes fit in memory as 8 do.
_BATCH_BYTES = 1 << 19
# Without a read buffer, Arrow keeps all compressed pages of a row group in memory.
_READ_BYTES = 1 << 16


_NULL_LIST = "Expected all lists to be of size"


class ParquetFile:
    """An open Parquet file. Not thread-safe. Its methods, too, raise CorruptDataError for damaged bytes.

    Args:
      path: path of a local file; for a ``stream``, its name in errors.
      stream: an open binary file to read in place of ``path``; :meth:`close` closes it.
      row_groups: indices of the row groups whose rows count; None for all.
      options: keyword arguments of ``pyarrow.parquet.ParquetFile``.

    Attributes:
      path: ``path``.
      metadata: the footer, as pyarrow returns it.
      schema: the Arrow schema of the columns.
      row_groups: indices of the row groups.
      group_rows: number of rows of each of them.

    Raises:
      CorruptDataError: the file is truncated, or is not a Parquet file.
      OSError: the file cannot be read.
      SourceError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: str,
        *,
        stream: BinaryIO | None = None,
        row_groups: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        self.path = path
        self._stream = stream
        self._file = self._open(options)
        with self._named_errors():
            self.metadata: pq.FileMetaData = self._file.metadata
            self.schema: pa.Schema = self._file.schema_arrow
            self.row_groups = range(self.metadata.num_row_groups) if row_groups is None else row_groups
            self.group_rows = [self.metadata.row_group(group).num_rows for group in self.row_groups]
        if min(self.group_rows, default=0) < 0:
            raise damaged(path, f"a row group of {min(self.group_rows):,} rows")

    def _open(self, options: dict[str, Any]) -> pq.ParquetFile:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise missing_package(f"reading {self.path}", error, "hf") from error
        if not {"buffer_size", "pre_buffer", "filesystem"} & set(options):
            # pre_buffer coalesces remote reads; otherwise each column of a row group is a separate round trip.
            more = {"pre_buffer": True} if self._stream else {"pre_buffer": False, "buffer_size": _READ_BYTES}
            options = {**options, **more}
        options = {"page_checksum_verification": True, **options}  # of pages that were written with one
        if self._stream is None:
            check_name(self.path, "pyarrow")
        try:
            with self._named_errors():
                return pq.ParquetFile(self._stream or self.path, **options)
        except CorruptDataError:
            if self._stream is not None:
                self._stream.close()
            raise

    def _refused(self, error: Exception) -> SourceError | CorruptDataError:
        if "crypt" in str(error):  # intact: its records must not be replaced as bad ones
            return SourceError(
                f"{self.path} is encrypted, and meshfeed passes no keys ({error}). Write it again without encryption, or "
                "leave encrypted columns out with columns=."
            )
        return damaged(self.path, error)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Maps what Arrow raises for damaged bytes to an error that names the file."""
        import pyarrow as pa

        try:
            yield
        except OSError as error:
            # Arrow raises a bare OSError for damaged pages; an error of the file system has a number.
            if error.errno is None and (self._stream is None or isinstance(self._stream, io.BytesIO)):
                raise self._refused(error) from error
            raise
        except (MemoryError, NotImplementedError, pa.ArrowCancelled):
            raise  # says nothing about the file: its records must not be replaced as bad ones
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if _NULL_LIST in str(error):  # from pyarrow 26 on, only of lists of size 0
                old = int(pa.__version__.partition(".")[0]) < 26
                remedy = "Run pip install 'pyarrow>=26', or write" if old else "Write"
                raise SourceError(
                    f"{self.path}: pyarrow {pa.__version__} cannot read a list of fixed size that is null ({error}). "
                    f"{remedy} the column as lists of any size."
                ) from error
            raise self._refused(error) from error

    def batches(
        self,
        start: int = 0,
        stop: int | None = None,
        columns: Sequence[str] | None = None,
        batch_rows: int | None = None,
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Reads rows ``[start, stop)``, counted over the row groups of this reader.

        Row groups outside the range are not read. Batches end where a row group ends, and at every multiple of the
        number of rows per batch, counted from the first row of the row group.

        ``batch_rows`` are decoded at a time; None for about 512 KiB of a row group.

        Yields:
          Row number of the first row of a batch, and the batch, which is not empty.
        """
        first = 0
        for group, rows in zip(self.row_groups, self.group_rows, strict=True):
            low, high = max(start - first, 0), rows if stop is None else min(stop - first, rows)
            if low < high:
                size = batch_rows or max(
                    1, _BATCH_BYTES * rows // max(self.metadata.row_group(group).total_byte_size, 1)
                )
                for row, batch in self._group(group, low, high, columns, size):
                    yield first + row, batch
            first += rows

    def read_group(self, group: int) -> pa.Table:
        """Reads a whole row group at once, however large; ``group`` is an index into ``group_rows``."""
        import pyarrow as pa

        first = sum(self.group_rows[:group])
        rows = self.group_rows[group]
        parts = [batch for _, batch in self.batches(first, first + rows, batch_rows=rows)]
        return pa.Table.from_batches(parts, self.schema)

    def _group(
        self, group: int, low: int, high: int, columns: Sequence[str] | None, batch_rows: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows ``[low, high)`` of one row group."""
        row = 0
        batches = self._file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False)
        while row < high:
            with self._named_errors():
                batch = next(batches, None)
            if batch is None:
                raise damaged(self.path, f"row group {group} ended after {row:,} rows")
            first, row = row, row + batch.num_rows
            kept = range(max(first, low), min(row, high))
            if kept:
                yield kept.start, batch.slice(kept.start - first, len(kept))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def damaged(path: str, reason: object) -> CorruptDataError:
    """Returns the error for a file that is not what its writer wrote."""
    what = " ".join(str(reason).split()).rstrip(".")  # Arrow's messages may have several lines
    return CorruptDataError(
        f"{path} is no intact Parquet file ({what}). Expected what the writer wrote."
        f"{reader_hint(path, unless='Parquet') or ' Write or copy it again.'}",
        path=path,
    )
