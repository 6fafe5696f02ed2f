"""What flows from reading to the mesh: one host's part of a global batch, and the cursors between batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from meshfeed._src.base.types import PyTree, RecordIds
from meshfeed._src.order.steps import StepSchedule
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.host_batch import RecordSpec
from meshfeed._src.state.ledger import Ledgers
from meshfeed._src.state.state import FeedState

EMPTY_STREAM = "the stream is empty: none of its lanes has a record. Look at the files, and at filters before the feed."
EMPTY_BATCHES = "the host batches are empty: no host has a single one. Look at the data, and at what makes the batches."


@dataclasses.dataclass(slots=True)
class HostBatch:
    """One host's rows of one global batch.

    Attributes:
      step: of the global batch.
      global_batch_size: its rows over all hosts, padded ones included.
      tree: pytree of arrays ``[host rows, ...]``, padded and with its mask; None where no lane here has a record, and
        once the transfer has begun.
      num_bytes: of ``tree``.
      entries: what the state needs after this batch: lane → entry for streams, the iterator's state for host batches.
      ended: lane → its length in records, for the lanes known to have ended.
      bad: ``[record id, epoch, reason]`` of records that were replaced.
      times: ``read_seconds``, ``decode_seconds``.
      retries: reads that were tried again.
      record_ids: ids of the host's real rows, for the debug log (random access).
      size_from_others: this host has only padding and does not know the size of the batch. Until the other hosts have
        given it, ``global_batch_size`` is the smallest possible size, and ``ended`` counts the padding of that.
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
    """Gives a host's batches one after the other, from a cursor on. Called from one thread at a time."""

    sequential: bool
    """Whether a read that was interrupted cannot be made again, so that reading belongs on a thread of its own.
    Others have ``rewind(step)``: the next batch is that of ``step``."""

    def next(self) -> HostBatch:
        """The next batch.

        Raises:
          StopIteration: the data of this host has ended.
        """
        ...

    def final(self) -> int | None:
        """The first step without a real row of this host, once that is known and padding goes on."""
        ...

    def describe(self) -> str:
        """What it is doing, for the logs of other hosts."""
        ...

    def close(self) -> None:
        """Releases threads and processes."""
        ...


@dataclasses.dataclass(frozen=True)
class Cursor:
    """Where a stream stands between two batches.

    Attributes:
      step_schedule: steps delivered and to come.
      step: the next step.
      position: real records delivered over all hosts.
      entries: see :attr:`HostBatch.entries`.
      ended: see :attr:`HostBatch.ended`, over all hosts as far as known.
      skipped: replaced records in delivered batches.
      num_skipped: bad records replaced in delivered batches, over all hosts.
      num_lanes: of a stream.
      order: of a random-access source; a mixture's depends on the step_schedule, because its stages begin at steps.
      source: that a stream's lanes are opened from; a mixture's depends on the step_schedule too.
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
    """One kind of stream: how it is fingerprinted, entered at a cursor, read, and remembered."""

    kind: str
    opens_at_restore: bool
    """Whether restoring must open the data to know that it works."""

    def fingerprint(self, cursor: Cursor) -> dict[str, Any]:
        """What must be equal for a state to be continued."""
        ...

    def start(self, like: Cursor | None = None) -> Cursor:
        """The cursor before the first batch, of the stream that ``like`` is a cursor of."""
        ...

    def restore(self, state: FeedState) -> Cursor:
        """The cursor of a state.

        Raises:
          StateMismatchError: the state is not of this stream.
        """
        ...

    def state(self, cursor: Cursor) -> FeedState:
        """The state of a cursor."""
        ...

    def open_reader(self, cursor: Cursor, host_rows: HostRows, *, hosts_agree: bool) -> HostReader:
        """Opens the data at a cursor."""
        ...

    def advance(self, cursor: Cursor, batch: HostBatch, ended: Mapping[int, int], num_skipped: int = 0) -> Cursor:
        """The cursor after a delivered batch; ``ended`` holds lanes of all hosts, ``num_skipped`` counts theirs."""
        ...

    def records_after(self, cursor: Cursor, step: int, ended: Mapping[int, int]) -> int:
        """Records of the stream up to and including ``step``, at or after ``cursor``."""
        ...

    def num_steps(self, cursor: Cursor) -> int | None:
        """Steps in all, where known; None for a stream without an end.

        Raises:
          TypeError: it is not known.
        """
        ...

    def record_spec(self) -> RecordSpec:
        """Structure of the records; may read one."""
        ...

    def close(self) -> None:
        """Releases the source."""
        ...
