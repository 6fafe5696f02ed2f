"""Host reader → agreement → transfer → caller, with the threads in between.

::

    reader ──(reader thread, host batches)──► agreement ──(read-ahead thread, global arrays)──► caller

Each thread is a bounded :class:`ReadAhead`. A single process needs no reader thread: its read-ahead thread reads. With
``prefetch=0`` there is no read-ahead thread and the caller's thread reads, except from a sequential reader, whose reads
cannot be repeated after an interrupt and therefore keep a reader thread. :func:`make_pipeline` builds the pipeline of one
generation of a feed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Generic, TypeVar

import jax

from meshfeed._src.agreement.window_report import ReportContents, Stop, WindowReport, WindowReports
from meshfeed._src.agreement.windows import WindowAgreement
from meshfeed._src.arrays.placer import Placer
from meshfeed._src.base import coordination
from meshfeed._src.base.coordination import Owner
from meshfeed._src.base.errors import Failure, MeshfeedError, StalledError
from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.base.stats import PROGRESS, StatsRecorder
from meshfeed._src.base.threads import Background, WakeUp
from meshfeed._src.base.types import JsonValue, PyTree
from meshfeed._src.plan.plan import HostRows
from meshfeed._src.streams.protocol import AnyStream, Cursor, HostBatch, HostReader

_prefetch_log = logging.getLogger("meshfeed.prefetch")
_JOIN_SECONDS = 10.0
T = TypeVar("T")


class Closed(MeshfeedError):
    """The read-ahead was closed while a thread waited for an item."""


class ReadAhead(Generic[T]):
    """Runs ``produce`` ahead of the caller in one daemon thread.

    :meth:`peek` returns an item and :meth:`pop` takes it off, so an interrupt between the two loses nothing. If
    ``produce`` raises (StopIteration included), ``peek`` raises the exception after the items before it, and again on
    each further call.

    Args:
      produce: returns the next item; called only on the thread, and never again after it raised.
      depth: returns the number of items to keep ready, at least 1.
      name: name of the thread.
    """

    def __init__(self, produce: Callable[[], T], *, depth: Callable[[], int], name: str) -> None:
        self._produce = produce
        self._depth = depth
        self._name = name
        self._items: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._closed = False
        self._arrived, self._room = WakeUp(), WakeUp()
        self._thread = Background(self._run, name)

    def start(self) -> None:
        """Starts the thread. An interrupted call can be repeated."""
        self._thread.start()

    def _has_room(self) -> bool:
        return len(self._items) < self._depth()

    def _run(self) -> None:
        while True:
            while not self._closed and not self._has_room():
                self._room.wait(lambda: self._closed or self._has_room())
            if self._closed:
                return
            try:
                item = self._produce()
            except BaseException as error:
                self._traceback = error.__traceback__
                self._error = error
                self._arrived.ring()
                return
            self._items.append(item)
            del item  # this frame must not keep a batch alive after it is taken off
            self._arrived.ring()

    @property
    def ready(self) -> bool:
        """Whether :meth:`peek` returns an item without waiting."""
        return bool(self._items)

    def peek(self, tick: Callable[[float], None] | None = None) -> T:
        """Waits for the next item and returns it without taking it off.

        Args:
          tick: called about twice per second with the seconds waited so far; may raise.

        Raises:
          Closed: :meth:`stop` was called.
          BaseException: the exception of ``produce``, once the items before it are taken off.
        """
        start = 0.0
        while True:
            if self._closed:
                raise Closed("the feed was closed")
            error = self._error  # read before the items: once it is set, no further item is appended
            if self._items:
                try:
                    return self._items[0]
                except IndexError:  # another thread called stop since the check
                    continue
            if error is not None:
                raise error.with_traceback(self._traceback)  # without it, the traceback would grow with each call
            self._room.ring()  # an interrupt may have come between popleft and ring in pop
            if not start:
                start = time.monotonic()
            elif tick is not None:
                tick(time.monotonic() - start)
            self._arrived.wait(lambda: self._items or self._error or self._closed)

    def pop(self, item: T) -> None:
        """Takes ``item`` off if it is still the next. An interrupted call can be repeated."""
        try:
            if self._items[0] is item:
                self._items.popleft()
        except IndexError:  # already taken off, or another thread called stop
            pass
        self._room.ring()

    def stop(self) -> None:
        """Signals the thread to end, without waiting for it."""
        self._closed = True
        self._items.clear()
        self._arrived.ring()
        self._room.ring()

    def join(self) -> None:
        """Waits for the thread after :meth:`stop`."""
        if not self._thread.join(_JOIN_SECONDS):
            _prefetch_log.warning(
                "thread %s is still reading the source %.0f s after close; it ends when that read returns",
                self._name,
                _JOIN_SECONDS,
            )


_SLACK_SECONDS = 15.0
_NOTHING_KNOWN: tuple[Mapping[int, int], int] = ({}, 0)  # no lane has ended, and no record was bad
HOST_READ_AHEAD_BYTES = 1 << 30  # host memory for the two windows that are read ahead


@dataclasses.dataclass(slots=True)
class Ready:
    """A batch that all hosts can deliver, with its transfer started.

    Attributes:
      batch: the host batch; its tree is dropped once the transfer has started.
      arrays: global arrays, or the input of :meth:`Placer.finish`.
      cursor: cursor after this batch.
      seconds: time to assemble and start the transfer (``transfer_seconds``).
      finishing: whether :meth:`Placer.finish` was called.
      finished: whether it has returned.
      counted: whether stats and log include this batch.
    """

    batch: HostBatch
    arrays: PyTree
    cursor: Cursor
    seconds: float
    finishing: bool = False
    finished: bool = False
    counted: bool = False


class Pipeline:
    """Batches in order, starting at a cursor. No thread starts before the first :meth:`peek`.

    Args:
      reader: reads this host's part; closed with the pipeline.
      put: (host tree, global batch size) → arrays; called on any thread.
      prefetch: number of global batches kept ready.
      agreement: agreement with other hosts, or None in a single process.
      window_reports: makes and checks window reports.
      cursor: where the reader starts.
      advance: (cursor before a batch, batch, lanes ended so far on all hosts as lane → length in records, bad records
        replaced so far on all hosts) → cursor after the batch; called on any thread.
      timeout_seconds: longest wait for this host's own reader.
      stats: records read times and retries.
      name: name of the feed, for thread names.
      host: this process.
    """

    def __init__(
        self,
        reader: HostReader,
        put: Callable[[PyTree, int], PyTree],
        *,
        prefetch: int,
        agreement: WindowAgreement | None,
        window_reports: WindowReports,
        cursor: Cursor,
        advance: Callable[[Cursor, HostBatch, Mapping[int, int], int], Cursor],
        timeout_seconds: float,
        stats: StatsRecorder,
        name: str,
        host: int,
    ) -> None:
        self._owner = Owner()
        self._reader = reader
        self._put = put
        self._agreement = agreement
        self._window_reports = window_reports
        self._cursor, self._advance = cursor, advance
        self._step: int = cursor.step
        self._delivered = self._step
        self._read_step = self._step
        self._window: list[HostBatch] = []
        # False while a single process has neither bad records nor ended lanes: its reports would be empty.
        self._eventful = agreement is not None or cursor.num_skipped > 0
        self._timeout_seconds = timeout_seconds
        self._stats = stats
        self._host = host
        self._running = self._closed = False
        self._held: HostBatch | None = None  # without a reader thread: a batch read but not yet transferred
        self._host_stage: ReadAhead[HostBatch] | None = None
        self._device_stage: ReadAhead[Ready] | None = None
        if agreement is not None or (reader.sequential and not prefetch):
            depth = (lambda: 1) if agreement is None else (lambda: agreement.read_ahead)
            self._host_stage = ReadAhead(self._read, depth=depth, name=f"meshfeed-reader-{name}")
        if prefetch:
            self._device_stage = ReadAhead(
                self._produce_ahead, depth=lambda: prefetch, name=f"meshfeed-prefetch-{name}"
            )

    # ------------------------------------------------------------------ stages

    def _read(self) -> HostBatch:
        agreement = self._agreement
        try:
            with jax.profiler.TraceAnnotation("meshfeed.host_batch"):
                batch = self._reader.next()
        except StopIteration:
            self._publish(final=self._read_step)
            raise
        except BaseException as error:
            self._publish(final=self._read_step, error=error)
            raise
        self._stats.read(batch.times, batch.retries)
        self._read_step = batch.step + 1
        if agreement is None:
            if self._eventful or batch.bad or batch.ended:
                self._eventful = True
                self._window_reports.check_alone(batch)
        else:
            self._window.append(batch)
            if self._read_step == agreement.window_end:
                self._publish(final=self._reader.final())
        return batch

    def _publish(self, *, final: int | None, error: BaseException | None = None) -> None:
        if self._agreement is None:
            return
        unprepared: Exception | None = None
        try:
            contents = self._window_reports.contents(self._window)
        except Exception as caught:  # published first: the other hosts wait for this window
            unprepared, contents = caught, ReportContents(failed=Failure.of(caught, self._host).to_json())
        if self._reader.empty:
            contents["empty"] = True
        self._window = []
        failure = None if error is None else Failure.of(error, self._host)
        self._agreement.publish(WindowReport(self._read_step, final, failure, contents=contents))
        if unprepared is not None and error is None:
            raise unprepared

    def _next_host_batch(self) -> HostBatch:
        if self._host_stage is not None:
            return self._host_stage.peek(self._tick)
        if self._held is None or self._held.step != self._step:
            self._reader.rewind(self._step)  # an interrupt may have broken off the last read
            self._held = self._read()
        return self._held

    def _tick(self, waited: float) -> None:
        if waited >= self._timeout_seconds <= PROGRESS.idle_seconds():
            raise StalledError(
                f"step {self._step}: host {self._host} itself is late: it is {self._reader.describe()} "
                f"(waited {waited:.0f} s, timeout_seconds={self._timeout_seconds:g}). Raise timeout_seconds if its "
                "reads may take longer.",
                hosts=(self._host,),
                waited_seconds=waited,
            )

    def _produce_ahead(self) -> Ready:
        ready = self._produce()
        self._take_off(ready)
        return ready

    def _take_off(self, ready: Ready) -> None:
        """Advances past a batch. An interrupted call can be repeated."""
        if self._host_stage is not None:
            self._host_stage.pop(ready.batch)
        self._held = None
        ready.batch.tree = None  # the arrays hold the data now; on CPU they may share its memory
        self._step, self._cursor = ready.batch.step + 1, ready.cursor

    def _produce(self) -> Ready:
        """Returns the next batch without taking it off, so an interrupted call can be repeated."""
        if self._agreement is not None:
            waited = self._agreement.peer_wait_seconds
            stop = self._agreement.wait_for(self._step)
            self._stats.waited_for_peers(self._agreement.peer_wait_seconds - waited)
            announced = self._agreement.contents()
            for contents in announced:
                self._window_reports.learn(contents)
            self._agreement.forget_contents(len(announced))
            if stop is not None:
                self._raise_stop(stop)
        batch = self._next_host_batch()
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation("meshfeed.assemble"):
            tree = self._window_reports.materialize(batch) if batch.tree is None else batch.tree
            arrays = self._put(tree, batch.global_batch_size)
        seconds = time.perf_counter() - start
        known = self._window_reports.known_at(batch.step) if self._eventful else _NOTHING_KNOWN
        return Ready(batch, arrays, self._advance(self._cursor, batch, *known), seconds)

    def _raise_stop(self, stop: Stop) -> None:
        if not stop.failures:
            raise StopIteration
        if self._host_stage is not None and any(failure.host == self._host for failure in stop.failures):
            # This host failed: drop the batches before the failure until peek raises the reader's own error.
            while True:
                self._host_stage.pop(self._host_stage.peek(self._tick))
        raise stop.exception()

    # ------------------------------------------------------------------ the caller's side

    def start(self) -> None:
        """Starts the threads. An interrupted call can be repeated."""
        for stage in (self._host_stage, self._device_stage):
            if stage is not None:
                stage.start()
        self._running = True

    def peek(self) -> Ready:
        """Returns the next batch without taking it off. An interrupted call can be repeated.

        Raises:
          StopIteration: the end of the data.
          MeshfeedError: a host failed, is late, or disagrees.
          Exception: any error of the source.
        """
        self._owner.check("this feed")
        if not self._running:
            self.start()
        stage = self._device_stage
        if stage is not None:
            if stage.ready:
                return stage.peek()
            with jax.profiler.TraceAnnotation("meshfeed.wait"):
                return stage.peek(self._late_tick)
        return self._produce()

    def _late_tick(self, waited: float) -> None:
        # With other hosts, let the read-ahead thread time out first: its error names the late host.
        if self._agreement is None:
            self._tick(waited)
        elif time.monotonic() >= self._agreement.patient_until + _SLACK_SECONDS:
            self._tick(waited - _SLACK_SECONDS)

    def pop(self, ready: Ready) -> None:
        """Takes off the batch that :meth:`peek` returned. An interrupted call can be repeated."""
        if self._device_stage is not None:
            self._device_stage.pop(ready)
        else:
            self._take_off(ready)
        self._delivered = ready.batch.step + 1

    def close(self, leaving: str | None = None, because: BaseException | None = None) -> None:
        """Stops threads and processes and drops batches read ahead. An interrupted call can be repeated.

        Does nothing in a forked child.

        Args:
          leaving: what this host did, such as "closed its feed", for hosts that continue; None to leave silently.
          because: the exception that caused it, if any.
        """
        if self._closed or not self._owner.is_here:
            return
        leave_notice = None
        if leaving is not None:
            leave_notice = f"{leaving} at step {self._delivered}"
            leave_notice += "" if because is None else f" after {type(because).__name__}: {because}"
        # Stop every thread before joining any: a stage may wait on the agreement or on the stage before it.
        stages = [stage for stage in (self._host_stage, self._device_stage) if stage is not None]
        for stage in stages:
            stage.stop()
        if self._agreement is not None:
            self._agreement.close(leave_notice)
        for stage in reversed(stages):
            stage.join()
        self._reader.close()
        self._closed = True


_step_log = logging.getLogger("meshfeed.steps")


def logs_steps() -> bool:
    """Whether step logging is enabled."""
    return _step_log.isEnabledFor(logging.DEBUG)


def log_step(
    name: str, host: int, ready: Ready, position: int, wait_seconds: float, contents: Mapping[str, JsonValue]
) -> None:
    """Logs one line for a delivered batch: ids and files of this host's rows, and times in seconds.

    Args:
      name: name of the feed.
      host: process index.
      ready: the batch; its index, counted from 0, is logged as ``step``.
      position: records delivered before it, over all hosts.
      wait_seconds: time that the caller waited for it.
      contents: the stream's description of the batch, such as record ids and files.
    """
    batch = ready.batch
    line: dict[str, JsonValue] = {
        "time": round(time.time(), 3),
        "feed": name,
        "host": host,
        "step": batch.step,
        "position": position,
        "global_batch_size": batch.global_batch_size,
        "wait_seconds": round(wait_seconds, 6),
        "transfer_seconds": round(ready.seconds, 6),
        **{key: round(value, 6) for key, value in batch.times.items()},
        **contents,
    }
    if batch.bad:
        line["bad_records"] = [list(entry) for entry in batch.bad]
    _step_log.debug("%s", json.dumps(line))


def make_pipeline(
    reader: HostReader,
    *,
    stream: AnyStream,
    placer: Placer,
    cursor: Cursor,
    host_rows: HostRows,
    settings: FeedSettings,
    stats: StatsRecorder,
    name: str,
    scope: str | None,
) -> Pipeline:
    """Builds the pipeline that reads from ``cursor``. No thread starts before its first ``peek``.

    No argument may reference the feed: garbage collection of the feed closes the pipeline, and a reference from the
    pipeline would keep the feed alive.

    Args:
      reader: opened at ``cursor``; the pipeline closes it.
      stream: the feed's stream.
      placer: the feed's placer.
      cursor: where to start.
      host_rows: this host's rows.
      settings: the feed's settings.
      stats: records read times and retries.
      name: name of the feed.
      scope: key prefix, unique to this generation; None if there are no other hosts.
    """
    window_reports = WindowReports(
        first_step=cursor.step,
        bad_records=settings.bad_records,
        blocks_of=placer.blocks if settings.check_replicas else None,
        num_rows=lambda size: len(host_rows.rows(size)),
        num_skipped=cursor.num_skipped,
        records_after=lambda step, ended: stream.records_after(cursor, step, ended),
        compare_records=not stream.in_columns,
        compare_sizes=stream.hosts_make_batches,
        largest_batch=0 if settings.schedule is None else max(settings.schedule.sizes),
    )
    agreement = None
    if scope is not None:
        agreement = WindowAgreement(
            coordination.require_store(),
            scope=scope,
            participants=placer.participants,
            host=coordination.process_index(),
            first_step=cursor.step,
            pad=settings.end == "pad" and not stream.length_is_known,
            byte_limit=HOST_READ_AHEAD_BYTES,
            timeout_seconds=settings.timeout_seconds,
            describe=reader.describe,
            reduce=window_reports.reduce,
        )
    return Pipeline(
        reader,
        placer.put,
        prefetch=settings.prefetch,
        agreement=agreement,
        window_reports=window_reports,
        cursor=cursor,
        advance=stream.advance,
        timeout_seconds=settings.timeout_seconds,
        stats=stats,
        name=name,
        host=coordination.process_index(),
    )
