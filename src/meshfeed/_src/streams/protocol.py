"""Interface between streams and the feed: host batches, host readers, and cursors.

Adapts a feed to the local iterator that checkpoint code written for Grain or MaxText expects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshfeed._src.base.types import PyTree, RecordIds
from meshfeed._src.order.steps import StepSchedule
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import RecordSpec
from meshfeed._src.state.state import FeedState, Ledgers


class LocalIterator:
    """``next``, ``get_state`` and ``set_state`` of a feed; the state is that of the last delivered batch.

    Args:
      feed: the feed.
    """

    def __init__(self, feed: Any) -> None:
        self._feed = feed

    def __iter__(self) -> LocalIterator:
        iter(self._feed)
        return self

    def __next__(self) -> Any:
        return next(self._feed)

    def get_state(self) -> dict[str, Any]:
        """Returns the feed's state."""
        return self._feed.get_state()

    def set_state(self, state: Any) -> None:
        """Sets the feed's state; discards its read-ahead."""
        self._feed.set_state(state)


EMPTY_STREAM = "the stream is empty: none of its lanes has a record. Look at the files, and at filters before the feed."
EMPTY_BATCHES = "the host batches are empty: no host has a single one. Look at the data, and at what makes the batches."


@dataclasses.dataclass(slots=True)
class HostBatch:
    """One host's rows of one global batch.

    Attributes:
      step: step of the global batch.
      global_batch_size: rows over all hosts, including padding.
      tree: pytree of arrays ``[host_rows, ...]``, padded and with its mask. None if no lane on this host has a record,
        and after the transfer has started.
      num_bytes: size of ``tree`` in bytes.
      entries: what the state needs after this batch. Lanes: lane → entry. Host batches: host → entry with the
        iterator's state.
      ended: lane → length in records, for lanes known to have ended. Host batches: ``(step + 1) << 32 | first row`` →
        padded rows, one entry per run of padding.
      bad: ``[record id, epoch, reason]`` of each replaced record.
      times: ``read_seconds`` and ``decode_seconds``.
      retries: number of retried reads.
      record_ids: ids of the host's real rows, for the debug log (random access only).
      size_from_others: this host has only padding and does not know the batch size. Until the other hosts announce
        it, ``global_batch_size`` is the smallest possible size, and ``ended`` counts the padding at that size.
    """

    step: int
    global_batch_size: int
    tree: PyTree
    num_bytes: int
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ended: Mapping[int, int] = dataclasses.field(default_factory=dict)
    bad: Sequence[tuple[int, int, str]] = ()
    times: Mapping[str, float] = dataclasses.field(default_factory=dict)
    retries: int = 0
    record_ids: RecordIds | None = None
    size_from_others: bool = False


class HostReader(Protocol):
    """Reads one host's batches in order, starting at a cursor. Called from one thread at a time."""

    sequential: bool
    """Whether an interrupted read cannot be repeated. Such a reader must run on its own thread, which interrupts do not
    reach; the others have ``rewind(step)``, which makes ``step`` the next batch."""

    def next(self) -> HostBatch:
        """Returns the next batch.

        Raises:
          StopIteration: this host's data has ended.
        """
        ...

    def final(self) -> int | None:
        """Returns the first step that this host only pads, or None if it has not reached one."""
        ...

    def describe(self) -> str:
        """Returns what the reader is doing, for the logs of other hosts."""
        ...

    def close(self) -> None:
        """Releases threads and processes."""
        ...


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The state of a stream between two batches.

    Attributes:
      step_schedule: batch sizes of delivered and future steps.
      step: the next step.
      position: real records delivered over all hosts.
      entries: see :attr:`HostBatch.entries`.
      ended: see :attr:`HostBatch.ended`; over all hosts, as far as known.
      skipped: ledgers of the replaced records in delivered batches.
      num_skipped: number of bad records replaced in delivered batches, over all hosts.
      num_lanes: number of lanes; 0 for streams without lanes.
      order: order of a random-access source. A mixture's order depends on the step schedule, because its stages begin
        at steps.
      source: the source that lanes are opened from. A mixture's source depends on the step schedule too.
    """

    step_schedule: StepSchedule
    step: int
    position: int
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ended: Mapping[int, int] = dataclasses.field(default_factory=dict)
    skipped: Ledgers = dataclasses.field(default_factory=Ledgers)
    num_skipped: int = 0
    num_lanes: int = 0
    order: Any = None
    source: Any = None


class FeedStream(Protocol):
    """One kind of stream: its fingerprint, cursors, reader and state."""

    kind: str
    opens_at_restore: bool
    """Whether a restore must open the data to verify the state."""

    def fingerprint(self, cursor: Cursor) -> dict[str, Any]:
        """Returns what must match for a state to be usable."""
        ...

    def start(self, like: Cursor | None = None) -> Cursor:
        """Returns the cursor before the first batch; ``like`` is a cursor of the stream to restart."""
        ...

    def restore(self, state: FeedState) -> Cursor:
        """Returns the cursor of a state.

        Raises:
          StateMismatchError: the state belongs to a different stream.
        """
        ...

    def state(self, cursor: Cursor) -> FeedState:
        """Returns the state of a cursor."""
        ...

    def open_reader(self, cursor: Cursor, host_rows: HostRows, *, hosts_agree: bool) -> HostReader:
        """Opens the data at a cursor.

        Args:
          cursor: where to start.
          host_rows: rows and columns that this host reads.
          hosts_agree: whether other hosts take part and may still have data when this one has none.
        """
        ...

    def advance(self, cursor: Cursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int = 0) -> Cursor:
        """Returns the cursor after a delivered batch; ``ended`` and ``num_skipped`` cover all hosts."""
        ...

    def records_after(self, cursor: Cursor, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records of the stream up to and including ``step``, which is at or after ``cursor``."""
        ...

    def num_steps(self, cursor: Cursor) -> int | None:
        """Returns the total number of steps; None for an infinite stream.

        Raises:
          TypeError: the number is unknown.
        """
        ...

    def record_spec(self) -> RecordSpec:
        """Returns the structure of the records; may read one record."""
        ...

    def close(self) -> None:
        """Releases the source."""
        ...
