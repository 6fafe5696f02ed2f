"""What flows from reading to the mesh: one host's part of a global batch, and the places between batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from meshfeed._src.base.types import ColumnSlices, PyTree, RecordIds
from meshfeed._src.order.steps import Timeline
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


class Feeder(Protocol):
    """Gives a host's batches one after the other, from a place on. Called from one thread at a time."""

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
class Place:
    """Where a stream stands between two batches.

    Attributes:
      timeline: steps delivered and to come.
      step: the next step.
      position: real records delivered over all hosts.
      entries: see :attr:`HostBatch.entries`.
      ended: see :attr:`HostBatch.ended`, over all hosts as far as known.
      skipped: replaced records in delivered batches.
      num_skipped: bad records replaced in delivered batches, over all hosts.
      num_lanes: of a stream.
      order: of a random-access source; a mixture's depends on the timeline, because its stages begin at steps.
      source: that a stream's lanes are opened from; a mixture's depends on the timeline too.
    """

    timeline: Timeline
    step: int
    position: int
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ended: Mapping[int, int] = dataclasses.field(default_factory=dict)
    skipped: Ledgers = dataclasses.field(default_factory=Ledgers)
    num_skipped: int = 0
    num_lanes: int = 0
    order: Any = None
    source: Any = None


@dataclasses.dataclass(frozen=True)
class HostRows:
    """Which rows and columns this host reads, for any batch size.

    Attributes:
      rows: global batch size → rows, int64, rising.
      columns: global batch size → part of each leaf, or None for all of it.
    """

    rows: Callable[[int], RecordIds]
    columns: Callable[[int], ColumnSlices | None]


class Course(Protocol):
    """One kind of stream: how it is fingerprinted, entered at a place, read, and remembered."""

    kind: str
    opens_at_restore: bool
    """Whether restoring must open the data to know that it works."""

    def fingerprint(self, place: Place) -> dict[str, Any]:
        """What must be equal for a state to be continued."""
        ...

    def start(self, like: Place | None = None) -> Place:
        """The place before the first batch, of the stream that ``like`` is a place of."""
        ...

    def restore(self, state: FeedState) -> Place:
        """The place of a state.

        Raises:
          StateMismatchError: the state is not of this stream.
        """
        ...

    def state(self, place: Place) -> FeedState:
        """The state of a place."""
        ...

    def feeder(self, place: Place, host_rows: HostRows, *, hosts_agree: bool) -> Feeder:
        """Opens the data at a place."""
        ...

    def advance(self, place: Place, batch: HostBatch, ended: Mapping[int, int], num_skipped: int = 0) -> Place:
        """The place after a delivered batch; ``ended`` holds lanes of all hosts, ``num_skipped`` counts theirs."""
        ...

    def records_after(self, place: Place, step: int, ended: Mapping[int, int]) -> int:
        """Records of the stream up to and including ``step``, at or after ``place``."""
        ...

    def num_steps(self, place: Place) -> int | None:
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
