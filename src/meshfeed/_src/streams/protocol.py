"""One interface of every kind of stream: what the feed needs from random access, lanes and host batches.

A stream opens a host reader at a cursor; the reader returns host batches and moves the cursor past each of them. The state
of a feed is the state of its cursor. Everything that the feed needs from a stream is declared here; no code above this
package distinguishes kinds of stream.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from meshfeed._src.base import hooks
from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import BatchSchedule, FeedSettings
from meshfeed._src.base.types import JsonValue, PyTree, RecordIds
from meshfeed._src.order.saved_mixture import same_components
from meshfeed._src.order.steps import StepSchedule
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.reading.reads import AutoReads
from meshfeed._src.reading.stacking import RecordSpec
from meshfeed._src.state.state import FeedState, Ledgers, compare_fingerprints

EMPTY_STREAM = "the stream is empty: none of its lanes has a record. Check the files, and any filter before the feed."
EMPTY_BATCHES = (
    "the host batches are empty: no host has a batch. Check the data, and the code that makes the batches; a generator can "
    "be read only once."
)


_nothing = cast("Callable[[], dict[Any, Any]]", dict)  # a call of ``dict[str, Any]`` takes three times as long


@dataclasses.dataclass(slots=True)
class HostBatch:
    """One host's rows of one global batch.

    Attributes:
      step: step of the global batch.
      global_batch_size: rows over all hosts, including padding.
      tree: pytree of arrays ``[host_rows, ...]``, padded and with its mask. None if no lane on this host has a record,
        and after the transfer has started.
      num_bytes: size of ``tree`` in bytes.
      entries: entries of the state after this batch. Lanes: lane → entry. Host batches: host → entry with the iterator's
        state.
      ended: lane → length in records, for lanes known to have ended. Host batches: ``(step + 1) << 32 | first row`` →
        padded rows, one entry per run of padding.
      bad: ``[record id, epoch, reason]`` of each replaced record.
      times: ``read_seconds`` and ``decode_seconds``.
      retries: number of retried reads.
      record_ids: ids of the host's real rows, for the debug log (random access only).
      size_from_others: this host has only padding and cannot derive the batch size. Until the other hosts announce it,
        ``global_batch_size`` is the smallest possible size, and ``ended`` counts the padding at that size.
    """

    step: int
    global_batch_size: int
    tree: PyTree
    num_bytes: int
    entries: Mapping[str, Any] = dataclasses.field(default_factory=_nothing)
    ended: Mapping[int, int] = dataclasses.field(default_factory=_nothing)
    bad: Sequence[tuple[int, int, str]] = ()
    times: Mapping[str, float] = dataclasses.field(default_factory=_nothing)
    retries: int = 0
    record_ids: RecordIds | None = None
    size_from_others: bool = False


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The position of a stream between two batches; each kind of stream adds what it needs to continue from there.

    Attributes:
      step_schedule: batch sizes of delivered and future steps.
      step: the next step.
      position: real records delivered over all hosts.
      skipped: ledgers of the replaced records in delivered batches.
      num_skipped: number of bad records replaced in delivered batches, over all hosts.
      num_lanes: number of lanes; 0 for streams without lanes.
    """

    step_schedule: StepSchedule
    step: int
    position: int
    skipped: Ledgers = dataclasses.field(default_factory=Ledgers, kw_only=True)
    num_skipped: int = dataclasses.field(default=0, kw_only=True)
    num_lanes: int = dataclasses.field(default=0, kw_only=True)

    def to_state(self, kind: str, fingerprint: dict[str, JsonValue], **fields: JsonValue) -> FeedState:
        """Returns the state; ``fields`` are the fields that only this kind of stream has."""
        return FeedState(
            kind=kind,
            position=self.position,
            segments=self.step_schedule.delivered_json(self.step),
            fingerprint=fingerprint,
            **self.skipped.state_fields(),
            num_skipped=self.num_skipped or None,
            **fields,
        )


C = TypeVar("C", bound=Cursor)


class HostReader(abc.ABC, Generic[C]):
    """Reads one host's batches in order, starting at a cursor. Called from one thread at a time.

    Attributes:
      sequential: whether an interrupted read cannot be repeated. Such a reader runs on a thread that no interrupt reaches.
      empty: whether this host has had no record since the start of the stream.
    """

    sequential = True
    empty = False

    @abc.abstractmethod
    def adapt(self, auto: AutoReads) -> None:
        """Follows ``auto`` from now on, between two batches. Call it before the first one.

        Numbers that this kind of reader cannot change go to ``auto.unchangeable``.
        """

    @abc.abstractmethod
    def next(self) -> HostBatch:
        """Returns the next batch.

        Raises:
          StopIteration: this host's data has ended.
        """

    @abc.abstractmethod
    def advance(self, cursor: C, batch: HostBatch, ended: Mapping[int, int], num_skipped: int) -> C:
        """Returns the cursor after a batch of this reader; ``ended`` and ``num_skipped`` cover all hosts. Any thread."""

    def rewind(self, step: int) -> None:
        """Makes ``step`` the next batch after an interrupted read. Does nothing if the reader is sequential."""

    def final(self) -> int | None:
        """Returns the first step that this host only pads, or None if it has not reached one."""
        return None

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns what the reader is doing, for the logs of other hosts."""

    def stop(self) -> None:
        """Ends a read in worker processes, if there are any, with an error. Call it from any thread, before ``close``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases threads and processes."""


AnyReader = HostReader[Any]
"""A reader of any kind of stream. Its cursors are passed back only to itself."""


class FeedStream(abc.ABC, Generic[C]):
    """One kind of stream: its fingerprint, cursors, reader and state.

    Attributes:
      kind: ``kind`` of its states.
      source: the source.
      schedule: batch sizes of the stream; None until the first host batch, which sets the size, has been read.
      opens_at_restore: whether a restore must open the data to verify the state.
      moved_by_opening: whether opening the data at a different cursor moves the iterator of the current reader.
      length_is_known: whether every host can compute the end of the stream on its own.
      cannot_resume: why no saved position can be restored, and what to pass instead; None if positions can be restored.
      hosts_make_batches: whether each host makes its own rows, so that hosts must compare the sizes of their batches.
      in_columns: whether hosts read only the columns that their devices hold.
    """

    kind: str
    source: Any
    schedule: BatchSchedule | None
    opens_at_restore = True
    moved_by_opening = length_is_known = hosts_make_batches = in_columns = False
    cannot_resume: str | None = None
    _settings: FeedSettings

    @property
    def _pad(self) -> bool:
        return self._settings.end == "pad"

    @abc.abstractmethod
    def fingerprint(self, cursor: C) -> dict[str, JsonValue]:
        """Returns what must match for a state to be usable."""

    @abc.abstractmethod
    def start(self, like: C | None = None) -> C:
        """Returns the cursor before the first batch; ``like`` is a cursor of the stream to restart."""

    @abc.abstractmethod
    def restore(self, state: FeedState) -> C:
        """Returns the cursor of a state.

        Raises:
          StateMismatchError: the state belongs to a different stream.
        """

    @abc.abstractmethod
    def with_stage(self, cursor: C, from_step: object, weights: object) -> C:
        """Returns the cursor with a stage of weights added to a mixture.

        Args:
          cursor: the feed's cursor.
          from_step: first step of the stage, at or after the cursor; None for the next step. The stage takes the place of
            added stages that have not begun.
          weights: component → weight.

        Raises:
          SettingsError: the stream is no mixture, the weights are invalid, or ``from_step`` has been delivered.
        """

    @abc.abstractmethod
    def replay_from(self, current: C, step: int, state: FeedState | None) -> C:
        """Returns a cursor at or before ``step`` from which to read that step again.

        Args:
          current: the feed's cursor.
          step: the step to read.
          state: a state taken at or before the step. None reads from the beginning. Random access needs no state.

        Raises:
          IndexError: the stream has no such step.
          SettingsError: the state was taken after the step.
          SourceError: the data cannot be read again.
          StateMismatchError: the state belongs to a different stream.
        """

    @abc.abstractmethod
    def state(self, cursor: C) -> FeedState:
        """Returns the state of a cursor."""

    def handover(self, entries: Mapping[str, Any]) -> dict[str, JsonValue]:
        """Returns, as a state has them, the lanes whose states other hosts need to read this host's rows in its place.

        Args:
          entries: :attr:`HostBatch.entries` of a batch of this host.
        """
        del entries
        return {}

    @abc.abstractmethod
    def take_over(self, current: C, state: FeedState, host_rows: HostRows) -> C:
        """Returns the cursor at a state whose lanes may be behind its step, or missing. May read many records.

        Args:
          current: the feed's cursor.
          state: of all hosts of the feed.
          host_rows: the rows that this host reads from there on; the cursor has the lanes that they need.

        Raises:
          StateMismatchError: the state belongs to a different stream.
          SourceError: a lane cannot be read.
        """

    @abc.abstractmethod
    def open_reader(self, cursor: C, host_rows: HostRows, *, hosts_agree: bool) -> HostReader[C]:
        """Opens the data at a cursor.

        Args:
          cursor: where to start.
          host_rows: rows and columns that this host reads.
          hosts_agree: whether other hosts take part and may still have data when this one has none.
        """

    @abc.abstractmethod
    def records_after(self, cursor: C, step: int, ended: Mapping[int, int]) -> int:
        """Returns the records of the stream up to and including ``step``, which is at or after ``cursor``."""

    @abc.abstractmethod
    def num_steps(self, cursor: C) -> int | None:
        """Returns the total number of steps; None for an infinite stream.

        Raises:
          TypeError: the number is unknown.
        """

    def batch_size_at(self, cursor: C) -> int:
        """Returns the global batch size of the next step; may read one host batch."""
        return cursor.step_schedule.at(cursor.step)[1]

    @abc.abstractmethod
    def record_spec(self, cursor: C | None = None) -> RecordSpec:
        """Returns the structure of the records, of the next step if they differ between steps; may read one record."""

    @abc.abstractmethod
    def record_ids(self, cursor: C, step: int) -> RecordIds:
        """Returns the record ids of ``step`` in row order, int64 ``[rows]``, without padding.

        Raises:
          IndexError: the stream has no such step.
          SourceError: the stream has no record ids.
        """

    @abc.abstractmethod
    def read(self, record_ids: object) -> PyTree:
        """Returns records as host-local numpy arrays ``[len(record_ids), ...]``, decoded as in epoch 0.

        Raises:
          SourceError: an id is not in the source, or the stream has no record ids.
          SettingsError: ``record_ids`` is not a sequence of integers.
        """

    def describe_batch(self, batch: HostBatch) -> dict[str, JsonValue]:
        """Returns the contents of a batch for the step log."""
        del batch
        return {}

    def close(self) -> None:
        """Releases the source."""
        hooks.close(self.source)


AnyStream = FeedStream[Any]
"""A stream of any kind. Its cursors are passed back only to itself."""


def required_schedule(settings: FeedSettings, what: str) -> BatchSchedule:
    """Returns the batch schedule of a stream that needs one; ``what`` names the stream for the error.

    Raises:
      SettingsError: ``global_batch_size`` was not passed.
    """
    if settings.schedule is None:
        raise SettingsError(
            f"global_batch_size is missing; {what} needs it (an int or a meshfeed.BatchSchedule).",
            setting="global_batch_size",
        )
    return settings.schedule


def check_fingerprint(state: FeedState, current: dict[str, JsonValue], source: object) -> JsonValue:
    """Compares the fingerprint of a state with ``current``, except for a mixture.

    Returns:
      The saved mixture, for ``check_saved``, which compares stage by stage: stages that have not begun may differ.

    Raises:
      StateMismatchError: the fingerprints differ.
    """
    saved, here = dict(state.fingerprint), current.pop("mixture", None)
    mixture = saved.pop("mixture", None) if here else None
    if mixture and not same_components(mixture, here):
        # What functions make of all components. ``check_saved`` compares those that have been read, and names them.
        saved["source"], current["source"] = map(_without_content, (saved.get("source"), current["source"]))
    named = hooks.find(source, hooks.FileNames)
    compare_fingerprints(saved, current, None if named is None else named.file_names)
    return mixture


def _without_content(identity: JsonValue) -> JsonValue:
    """The identity of functions over a mixture without what depends on its components."""
    fields = cast("dict[str, JsonValue]", identity if isinstance(identity, dict) else {})
    if fields.get("kind") != "map":
        return cast("JsonValue", identity)
    kept = {name: value for name, value in fields.items() if name not in ("content", "records")}
    return {**kept, "source": _without_content(fields.get("source"))}
