"""Reads records by id into a stacked batch, with the most efficient read method that a source has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from meshfeed._src.base import hooks, trees
from meshfeed._src.base.errors import SourceError, without_signatures
from meshfeed._src.base.hooks import accepts_keyword, find
from meshfeed._src.base.ownership import declared_with, own_leaves, returns_fresh
from meshfeed._src.base.rng import philox
from meshfeed._src.base.settings import Retry, SkipBad
from meshfeed._src.base.threads import note_thread
from meshfeed._src.base.types import ColumnSlices, Decode, PyTree, RandomAccessSource, RecordIds, Rngs
from meshfeed._src.order import permutation
from meshfeed._src.reading.host_batch import check_alike, spec_of_batch
from meshfeed._src.reading.items import decode_each, ended, read_items
from meshfeed._src.reading.recovery import Recovery
from meshfeed._src.reading.stacking import RecordSpec


def _trace(name: str) -> contextlib.AbstractContextManager[object]:
    """An annotation in JAX's profiles; in a process without JAX, such as a worker, nothing is profiled."""
    annotation = getattr(sys.modules.get("jax.profiler"), "TraceAnnotation", contextlib.nullcontext)
    return annotation(name)


def wants_rng(source: object) -> bool:
    """Whether the source's decoder takes one random generator per record."""
    declared = find(source, hooks.DeclaresRng)
    if declared is not None and isinstance(declared.wants_rng, bool):
        return declared.wants_rng
    one, several = find(source, hooks.Decodes), find(source, hooks.DecodesBatches)
    decoders = (None if one is None else one.decode, None if several is None else several.decode_batch)
    return any(accepts_keyword(decoder, "rng") for decoder in decoders)


def reads_columns(source: object) -> bool:
    """Whether the source can read a part of each leaf; False if a subclass's ``read_batch`` lacks the keyword."""
    in_columns, reader = find(source, hooks.ColumnReader), find(source, hooks.BatchReader)
    return (
        in_columns is not None
        and bool(in_columns.reads_columns)
        and reader is not None
        and accepts_keyword(reader.read_batch, "columns")
    )


def _takes_rows(source: object, decode_batch: object) -> bool:
    """Whether the source can pass records to its decoder as one array, from ``read_rows`` to ``from_rows``."""
    return (
        declared_with(type(decode_batch), "__call__", "from_rows")
        and declared_with(type(source), "read_raw", "read_rows")
        and "read_raw" not in getattr(source, "__dict__", ())
    )


def file_of(source: object, record_id: int) -> str | None:
    """Returns the file that contains a record, or None if unknown."""
    located = find(source, hooks.LocatesRecords)
    return None if located is None else located.file_of(int(record_id))


def checked_lengths(source: RandomAccessSource, found: object) -> np.ndarray:
    """Returns what ``lengths()`` of a source returned, as an array.

    Raises:
      SourceError: it is not one integer of at least 0 per record.
    """
    lengths, number = np.asarray(found), len(source)
    if lengths.shape != (number,) or lengths.dtype.kind not in "iu":
        what = f"{lengths.dtype} of shape {lengths.shape}"
    elif lengths.dtype.kind == "i" and number and (shortest := int(lengths.min())) < 0:
        what = f"{shortest:,} at least"
    else:
        return lengths
    raise SourceError(
        f"the lengths of {type(source).__name__} are {what}. Expected one integer of at least 0 per record, [{number}]."
    )


def describe_record(source: object, record_id: int) -> str:
    """Returns what an error calls a record."""
    path = file_of(source, record_id)
    return f"record {record_id}" + (f" of {without_signatures(path)}" if path else "")


Undecoded = Sequence[bytes] | np.ndarray
"""The bytes of each record, or uint8 ``[n, bytes per record]``."""


def _unchanged(record: bytes) -> bytes:
    return record


class SourceReader:
    """Reads and decodes records of one source with the most efficient hooks that it has, looked up once.

    Attributes:
      source: the source.
      takes_rows: whether the decoder takes records as one array, and the source can read them so.
      decodes_batches: whether the decoder takes several records at once.
      decode_one: otherwise, decodes one record.
      joins: whether records of several batches may be read and decoded with one call. Only if the methods are of this
        package: others may expect batches of one size.
    """

    def __init__(self, source: RandomAccessSource) -> None:
        self.source = source
        self._raw = find(source, hooks.RawReader)
        self._stacked = find(source, hooks.BatchReader)
        self._in_columns = reads_columns(source)
        self._takes_rngs = self._stacked is not None and accepts_keyword(self._stacked.read_batch, "rngs")
        one, several = find(source, hooks.Decodes), find(source, hooks.DecodesBatches)
        # Without a decoder, stacking bytes raises an error that names the keyword to pass.
        self.decode_one: Decode = _unchanged if one is None else one.decode
        self._decode_batch = None if several is None else several.decode_batch
        self.decodes_batches = several is not None
        decoder = self.decode_one if self._decode_batch is None else self._decode_batch
        self._decoder_takes_rng = accepts_keyword(decoder, "rng")
        self.takes_rows = _takes_rows(source, self._decode_batch)
        self._fresh_batches = returns_fresh(source, "read_batch")
        self._fresh_rows = returns_fresh(source, "read_rows")
        self._fresh_decoded = returns_fresh(self._decode_batch, "__call__")
        self._fresh_from_rows = returns_fresh(self._decode_batch, "from_rows")
        fresh_batches = not self.decodes_batches or (self._fresh_from_rows if self.takes_rows else self._fresh_decoded)
        self.joins = self._fresh_batches if self._raw is None else returns_fresh(source, "read_raw") and fresh_batches
        self._decoded_spec: RecordSpec | None = None  # of the last batch from decode_batch

    def read(
        self,
        record_ids: RecordIds,
        rngs: Rngs | None = None,
        *,
        columns: ColumnSlices | None = None,
        times: dict[str, float] | None = None,
    ) -> PyTree:
        """Reads and stacks records.

        Args:
          record_ids: int64 ``[n]``, n at least 1.
          rngs: one generator per record, for decoders that accept ``rng=``.
          columns: the part of each leaf to read, for sources that read columns.
          times: dict to which read and decode times are added, in seconds, as ``read_seconds`` and ``decode_seconds``.

        Returns:
          A pytree of arrays ``[n, ...]``.

        Raises:
          SourceError: records cannot be stacked, or the source raises StopIteration.
          Any exception of the source or the decoder; if it concerns a known record, with a note that names the record.
        """
        times = {} if times is None else times
        raw = batch = None
        try:
            start = time.perf_counter()
            with _trace("meshfeed.read"):
                if self._raw is not None:
                    raw = self.read_undecoded(record_ids, as_rows=rngs is None and self.takes_rows)
                elif self._stacked is not None:
                    batch = self._read_stacked(self._stacked, record_ids, rngs, columns)
                else:
                    batch = read_items(self.source, record_ids.tolist(), self.describe)
            read = time.perf_counter()
            times["read_seconds"] = times.get("read_seconds", 0.0) + read - start
            if raw is None:
                return batch
            with _trace("meshfeed.decode"):
                batch = self.decode(raw, record_ids, rngs)
            times["decode_seconds"] = times.get("decode_seconds", 0.0) + time.perf_counter() - read
            return batch
        except StopIteration as error:
            raise ended(f"reading {len(record_ids)} records (first id {record_ids[0]})", None) from error
        except Exception as error:
            note_thread(error)
            raise

    def read_undecoded(self, record_ids: RecordIds, *, as_rows: bool) -> Undecoded:
        """Reads records without decoding them; as one array if ``as_rows``, the source can, and their sizes are equal."""
        assert self._raw is not None
        rows = cast("hooks.RowsReader", self._raw).read_rows(record_ids) if as_rows else None
        if rows is None:
            return self._raw.read_raw(record_ids)
        return rows if self._fresh_rows else own_leaves(rows)

    def decode(self, undecoded: Undecoded, record_ids: RecordIds, rngs: Rngs | None) -> PyTree:
        """Decodes and stacks records that ``read_undecoded`` returned; an array only if ``takes_rows``."""
        if not self.decodes_batches:
            rngs, decoders = rngs if self._decoder_takes_rng else None, itertools.repeat(self.decode_one)
            return decode_each(decoders, cast("Sequence[bytes]", undecoded), record_ids, rngs, self.describe)
        batch, number = self.decode_borrowed(undecoded, record_ids, rngs), len(undecoded)
        if not (self._fresh_from_rows if isinstance(undecoded, np.ndarray) else self._fresh_decoded):
            batch = own_leaves(batch)
        if self._decoded_spec is None or not self._decoded_spec.fits(batch, number):
            self._decoded_spec = spec_of_batch(batch, number, what="decode_batch")
        return batch

    def decode_borrowed(self, undecoded: Undecoded, record_ids: RecordIds, rngs: Rngs | None) -> PyTree:
        """As :meth:`decode` if ``decodes_batches``, unchecked, and in memory that the next call may write again."""
        assert self._decode_batch is not None
        try:
            if isinstance(undecoded, np.ndarray):
                return cast("hooks.DecodesRows", self._decode_batch).from_rows(undecoded)
            if rngs is not None and self._decoder_takes_rng:
                return self._decode_batch(list(undecoded), rng=list(rngs))
            return self._decode_batch(list(undecoded))
        except SourceError:
            raise
        except Exception as error:
            first, number = self.describe(int(record_ids[0])), len(undecoded)
            error.add_note(
                f"while decoding {first}" if number == 1 else f"while decoding {number} records (first: {first})"
            )
            if isinstance(error, TypeError | AttributeError):
                error.add_note(
                    "decode_batch= gets a list of records; pass a function that takes a single one as decode="
                )
            raise

    def describe(self, record_id: int) -> str:
        """Returns what an error calls a record."""
        return describe_record(self.source, record_id)

    def _read_stacked(
        self, reader: hooks.BatchReader, record_ids: RecordIds, rngs: Rngs | None, columns: ColumnSlices | None
    ) -> PyTree:
        extra: dict[str, object] = {}
        if columns is not None and self._in_columns:
            extra["columns"] = columns
        if rngs is not None and self._takes_rngs:
            extra["rngs"] = rngs
        batch = reader.read_batch(record_ids, **extra)
        return batch if self._fresh_batches else own_leaves(batch)


@dataclasses.dataclass(slots=True)
class ReadRows:
    """Rows of a read, with timings and counts.

    Attributes:
      tree: pytree of arrays ``[n, ...]``.
      times: ``read_seconds`` and ``decode_seconds``.
      retries: number of retried reads.
      bad: ``(record id, epoch, reason)`` of each replaced record.
    """

    tree: PyTree
    times: dict[str, float]
    retries: int = 0
    bad: tuple[tuple[int, int, str], ...] = ()


class RecordReader:
    """Reads rows of a source with retries and, optionally, replacement of bad records.

    Picklable if the source is, for use in worker processes. The feed's seed is for ``rng=`` and for replacements.
    """

    def __init__(self, source: RandomAccessSource, *, seed: int, retry: Retry, bad_records: SkipBad | None) -> None:
        self.source = source
        self._seed = seed
        self._retry = retry
        self._bad_records = bad_records
        self._wants_rng = wants_rng(source)
        self._numbering = find(source, hooks.NumbersRecords)
        self._reader = SourceReader(source)
        self._shapes = find(source, hooks.SeveralShapes)
        self._specs: dict[int, RecordSpec] = {}  # by the number of the shape, 0 if there is one

    def spec(self) -> RecordSpec:
        """Returns the structure of the records, read from the first record if not known yet."""
        return self.spec_of(0 if self._numbering is None else self._numbering.first_record_id)

    def spec_of(self, record_id: int) -> RecordSpec:
        """Returns the structure of the records of a batch with this record; reads the record if it is not known yet."""
        ids = np.array([record_id], np.int64)
        shape = self.shape_index(ids)
        if shape not in self._specs:
            self._specs[shape] = spec_of_batch(self.read(ids, np.zeros(1, np.int64)).tree, 1, what="the source")
        return self._specs[shape]

    @property
    def several_shapes(self) -> bool:
        """Whether records of different batches differ in shape."""
        return self._shapes is not None

    @property
    def joins(self) -> bool:
        """Whether several batches may be read with one call, which is repeated for each of them if it fails."""
        return self._reader.joins and not self.several_shapes and self._retry.attempts > 1

    def shape_index(self, record_ids: RecordIds) -> int:
        """Returns the number that identifies the shape of a batch of these records, or 0 if there is only one."""
        return 0 if self._shapes is None else self._shapes.shape_index(record_ids)

    def read(self, record_ids: RecordIds, epochs: RecordIds, columns: ColumnSlices | None = None) -> ReadRows:
        """Reads records.

        Args:
          record_ids: int64 ``[n]``, n at least 1.
          epochs: int64 ``[n]``, the epoch of each record.
          columns: the part of each leaf to read, for sources that read columns.

        Raises:
          SourceError: records differ from the first one, or cannot be stacked.
          Any exception of the source or its decoder, after the retries.
        """
        times: dict[str, float] = {}
        rows: ReadRows | None = None
        failed: list[BaseException] = []
        start = time.monotonic()
        try:
            rows = ReadRows(self._read_once(record_ids, epochs, columns, times), times)
        except BaseException as error:
            failed.append(error)
        if rows is None:  # outside the handler, in which errors of further attempts would get this one as context
            recovery = Recovery(
                lambda ids, epoch_ids: self._read_once(ids, epoch_ids, columns, times),
                self._retry,
                since=start,
                replacement=None if self._bad_records is None else self._replacement,
            )
            tree, bad = recovery.read(failed, record_ids, epochs)
            rows = ReadRows(tree, times, recovery.retries, bad)
        self._check(rows.tree, record_ids, columns)
        return rows

    def read_once(self, record_ids: RecordIds, epochs: RecordIds, columns: ColumnSlices | None) -> ReadRows:
        """As :meth:`read`, but raises the error of the first attempt."""
        times: dict[str, float] = {}
        rows = ReadRows(self._read_once(record_ids, epochs, columns, times), times)
        self._check(rows.tree, record_ids, columns)
        return rows

    def _check(self, tree: PyTree, record_ids: RecordIds, columns: ColumnSlices | None) -> None:
        if columns is not None:  # leaves are partial and do not have the shapes of the spec
            return
        shape = self.shape_index(record_ids)
        check_alike(self._specs, shape, tree, len(record_ids), where=lambda: f"records {record_ids[0]} and following")

    def _read_once(
        self, record_ids: RecordIds, epochs: RecordIds, columns: ColumnSlices | None, times: dict[str, float]
    ) -> PyTree:
        rngs = None
        if self._wants_rng:
            pairs = zip(epochs.tolist(), record_ids.tolist(), strict=True)
            rngs = [philox(self._seed, epoch, record_id) for epoch, record_id in pairs]
        return self._reader.read(record_ids, rngs, columns=columns, times=times)

    def _replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        if self._numbering is not None:  # a mixture replaces a record within its component
            return self._numbering.replacement_id(self._seed, epoch, record_id, attempt)
        return permutation.replacement_id(self._seed, epoch, record_id, attempt, len(self.source))


class JointRead:
    """Reads the rows of several small steps with one call of the source; if that fails, each step is read alone.

    Most of the time of a small read does not depend on the number of its records: it goes to the files and row groups that
    it touches, and to calls of Python and numpy. The first step that is collected reads all of them.
    """

    def __init__(
        self, records: RecordReader, steps: Sequence[tuple[RecordIds, RecordIds]], columns: ColumnSlices | None
    ) -> None:
        self._records, self._steps, self._columns = records, steps, columns
        self._rows: list[ReadRows] | None = None
        self._failed = False

    def rows_of(self, number: int) -> Callable[[], ReadRows]:
        """Returns a function that returns the rows of a step, and may be called again after an interrupt."""
        return functools.partial(self._collect, number)

    def _collect(self, number: int) -> ReadRows:
        failed_now = self._rows is None and not self._failed and not self._read()
        if self._rows is not None:
            return self._rows[number]
        # Only a read of its own finds which step has a bad record, and retries and reports it.
        rows = self._records.read(*self._steps[number], self._columns)
        rows.retries += failed_now
        return rows

    def _read(self) -> bool:
        record_ids, epochs = (np.concatenate(parts) for parts in zip(*self._steps, strict=True))
        try:
            rows = self._records.read_once(record_ids, epochs, self._columns)
        except Exception:
            self._failed = True
            return False
        times = {name: seconds / len(self._steps) for name, seconds in rows.times.items()}
        leaves, treedef = trees.flatten(rows.tree)
        found: list[ReadRows] = []
        start = 0
        for ids, _ in self._steps:
            stop = start + len(ids)
            found.append(ReadRows(treedef.unflatten([leaf[start:stop] for leaf in leaves]), times))
            start = stop
        self._rows = found
        return True
