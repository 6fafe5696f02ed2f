"""Host reader → agreement → transfer → caller, with the threads in between.

::

    reader ──(reader thread, host batches)──► agreement ──(read-ahead thread, global arrays)──► caller

Each thread is a bounded :class:`ReadAhead`. A single process needs no reader thread: its read-ahead thread reads. With
``prefetch=0`` there is no read-ahead thread and the caller's thread reads, except from a sequential reader, whose reads
cannot be repeated after an interrupt and therefore keep a reader thread.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Literal

import jax

from meshfeed._src.agreement.followers import Follower
from meshfeed._src.agreement.handover import Handover
from meshfeed._src.agreement.messages import ReportContents, Stop, WindowReport
from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.agreement.windows import WindowAgreement, leave_notice
from meshfeed._src.base.errors import Failure, StalledError
from meshfeed._src.base.fork import Owner
from meshfeed._src.base.machine import host_memory_bytes
from meshfeed._src.base.progress import PROGRESS
from meshfeed._src.base.read_ahead import ReadAhead
from meshfeed._src.base.stacks import feed_stacks, note_stacks
from meshfeed._src.base.types import PyTree
from meshfeed._src.base.waits import Reminder, late_seconds
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.streams.protocol import AnyReader, Cursor, HostBatch

_log = logging.getLogger("meshfeed.prefetch")
_SLACK_SECONDS = 15.0
_PREFETCH_SHARE = 0.25  # of the host's memory
_LEAST_PREFETCH = 2  # below it, nothing would overlap the step
_NOTHING_KNOWN: tuple[Mapping[int, int], int] = ({}, 0)  # no lane has ended, and no record was bad


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


class PrefetchDepth:
    """The number of global batches to keep ready: ``prefetch=``, or fewer if they would take a quarter of the host's memory.

    Attributes:
      depth: the current number.
      batch_bytes: bytes of this host's part of the largest batch so far.
    """

    def __init__(self, prefetch: int | Literal["auto"], name: str) -> None:
        self._auto = prefetch == "auto"
        self.depth = self._prefetch = _LEAST_PREFETCH if prefetch == "auto" else prefetch
        self._name = name
        self.batch_bytes = 0

    def __call__(self) -> int:
        """Returns the current depth."""
        return self.depth

    def want(self, depth: int) -> None:
        """Changes the number, for ``"auto"``."""
        self.depth = self._prefetch = depth

    def measure(self, num_bytes: int) -> None:
        """Lowers the depth if this host's part of a batch, ``num_bytes``, is larger than all before and too large."""
        if num_bytes <= self.batch_bytes:
            return
        self.batch_bytes = num_bytes
        memory = host_memory_bytes()
        depth = min(self._prefetch, max(_LEAST_PREFETCH, int(memory * _PREFETCH_SHARE) // num_bytes))
        if depth < self._prefetch == self.depth and not self._auto:
            _log.warning(
                "%s: prefetch=%d batches of %s bytes on this host would take more than a quarter of its memory of %s "
                "bytes, so at most %d are kept ready. Pass a smaller prefetch.",
                self._name,
                self._prefetch,
                f"{num_bytes:,}",
                f"{memory:,}",
                depth,
            )
        self.depth = min(self.depth, depth)


class Pipeline:
    """Batches in order, starting at a cursor. No thread starts before the first :meth:`peek`."""

    def __init__(
        self,
        reader: AnyReader,  # closed with the pipeline
        put: Callable[[PyTree, int], PyTree],  # (host tree, global batch size) → arrays; called on any thread
        *,
        prefetch: PrefetchDepth,
        agreement: WindowAgreement | Follower | None,  # None in a single process
        window_reports: WindowReports,
        handover: Handover | None = None,  # None if no other host takes part
        check: Callable[[PyTree], None] = lambda tree: None,  # raises for a host tree that ``put`` cannot place
        cursor: Cursor,  # where the reader starts
        timeout_seconds: float,  # longest wait for this host's own reader
        stats: StatsRecorder,
        name: str,  # of the feed
        host: int,
    ) -> None:
        self._owner = Owner()
        self._reader = reader
        self._put = put
        self._agreement = agreement
        self._window_reports = window_reports
        self._handover = handover
        self._check = check
        self._cursor = cursor
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
        self._reading_since: float | None = None
        self._late = Reminder(late_seconds(timeout_seconds))
        self._to_tell: Reminder | None = None  # of the read that is under way
        self._held: HostBatch | None = None  # without a reader thread: a batch read but not yet transferred
        self._host_stage: ReadAhead[HostBatch] | None = None
        self._device_stage: ReadAhead[Ready] | None = None
        self._prefetch = prefetch
        if agreement is not None or (reader.sequential and not prefetch.depth):
            depth = (lambda: 1) if agreement is None else (lambda: agreement.read_ahead)
            self._host_stage = ReadAhead(self._read, depth=depth, name=f"meshfeed-reader-{name}")
        if prefetch.depth:
            self._device_stage = ReadAhead(self._produce_ahead, depth=prefetch, name=f"meshfeed-prefetch-{name}")
            if agreement is not None:
                agreement.asked_at = math.inf

    def _read(self) -> HostBatch:
        agreement = self._agreement
        self._reading_since = time.monotonic()
        try:
            with jax.profiler.TraceAnnotation("meshfeed.host_batch"):
                batch = self._reader.next()
            if agreement is not None and batch.tree is not None:  # or this host alone would fail, once all had agreed
                self._check(batch.tree)
        except StopIteration:
            self._publish(final=self._read_step)
            raise
        except BaseException as error:
            self._publish(final=self._read_step, error=error)
            raise
        finally:
            self._reading_since = None
        self._read_step = batch.step + 1
        if agreement is None:
            if self._eventful or batch.bad or batch.ended:
                self._eventful = True
                self._window_reports.check_alone(batch)
        else:
            self._window.append(batch)
            agreement.read_step = self._read_step
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
        if self._handover is not None:  # before the report: others may deliver the window without this host
            self._handover.publish(self._window)
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

    def tell_if_late(self) -> None:
        """Publishes what this host reads, and its stacks, before other hosts log that it is late. On any thread."""
        since = self._reading_since
        if since is None or self._closed or not isinstance(self._agreement, WindowAgreement):
            self._to_tell = None
            return
        if self._to_tell is None:
            self._to_tell = Reminder(late_seconds(self._timeout_seconds) / 2)  # hosts that wait began after this read
        if self._to_tell.due(time.monotonic() - since):
            self._agreement.publish_doing()

    def _tick(self, waited: float) -> None:
        if self._agreement is None and self._late.due(waited):
            what, stacks = f"this host is {self._reader.describe()}", feed_stacks()
            _log.warning("waited %.0f s for step %d: %s\n%s", waited, self._step, what, stacks)
            self._stats.stalled(self._step, waited, what, stacks)
        if waited >= self._timeout_seconds <= PROGRESS.idle_seconds():
            error = StalledError(
                f"step {self._step}: host {self._host} itself is late: it is {self._reader.describe()} "
                f"(waited {waited:.0f} s, timeout_seconds={self._timeout_seconds:g}). Raise timeout_seconds if its "
                "reads may take longer.",
                hosts=(self._host,),
                waited_seconds=waited,
            )
            note_stacks(error)
            raise error

    def _produce_ahead(self) -> Ready:
        ready = self._produce()
        self._prefetch.measure(ready.batch.num_bytes)
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
            self._stats.peer_wait_seconds += self._agreement.peer_wait_seconds - waited
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
        return Ready(batch, arrays, self._reader.advance(self._cursor, batch, *known), seconds)

    def _raise_stop(self, stop: Stop) -> None:
        if not stop.failures:
            raise StopIteration
        if self._host_stage is not None and any(failure.host == self._host for failure in stop.failures):
            # This host failed: drop the batches before the failure until peek raises the reader's own error.
            while True:
                self._host_stage.pop(self._host_stage.peek(self._tick))
        raise stop.exception()

    @property
    def production(self) -> tuple[int, float] | None:
        """Host batches read, and the seconds that their thread waited for room; None if the caller's thread reads."""
        stage = self._host_stage or self._device_stage
        return None if stage is None else (stage.num_produced, stage.idle_seconds)

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
        if os.getpid() != self._owner.pid:  # once per batch
            self._owner.check("this feed")
        if not self._running:
            self.start()
        stage = self._device_stage
        if stage is not None:
            if stage.ready:
                return stage.peek()
            agreement = self._agreement
            if agreement is not None:
                agreement.asked_at = time.monotonic()
            try:
                with jax.profiler.TraceAnnotation("meshfeed.wait"):
                    return stage.peek(self._late_tick)
            finally:
                if agreement is not None:
                    agreement.asked_at = math.inf
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

    def forget_error(self) -> None:
        """Lets go of the exception of the last :meth:`peek`, which must not be called again."""
        for stage in (self._host_stage, self._device_stage):
            if stage is not None:
                stage.forget_error()

    def close(self, leaving: str | None = None, because: BaseException | None = None) -> None:
        """Stops threads and processes and drops batches read ahead. An interrupted call can be repeated.

        Does nothing in a forked child.

        Args:
          leaving: what this host did, such as "closed its feed", for hosts that continue; None to leave silently.
          because: the exception that caused it, if any.
        """
        if self._closed or not self._owner.is_here:
            return
        notice = None if leaving is None else leave_notice(leaving, self._delivered, because)
        # Stop every thread before joining any: a stage may wait on the agreement or on the stage before it.
        stages = [stage for stage in (self._host_stage, self._device_stage) if stage is not None]
        for stage in stages:
            stage.stop()
        if self._agreement is not None:
            self._agreement.close(notice)
        self._reader.stop()  # a stage may wait for worker processes
        for stage in reversed(stages):
            stage.join()
        self._reader.close()
        self._closed = True
