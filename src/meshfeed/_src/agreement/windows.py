"""Agreement between hosts on how far all of them can deliver.

Batch k is delivered only after every participant has read its part of k, because a host that enters the collective of
a step that some other host cannot run would hang. Steps are grouped into windows, and each window is a reduction
(:mod:`meshfeed._src.base.reduction`): a host publishes its report on a window once it has read it or failed to, and the
reducer announces the step up to which all hosts can deliver. Each host waits for an announcement only when it reaches a
step beyond the last one. At most three requests per host and window reach the coordination service.

No host delivers a step of window w before announcement w, so the reducer can stop all hosts at any step of w. The
first windows are short, to deliver the first batches early, and double up to the full size. The rules are pure
functions: every host computes the same windows (:func:`window_ends`), and the reducer alone computes the stop, from the
reports on one window in any order (:func:`conclude`).

A host that leaves before the end publishes a leave notice as its next window report, and the reducer announces it; a
reducer that leaves announces its own. If all hosts leave at the same step, none waits for the notice, and it has no
effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshfeed._src.agreement.followers import Summary
from meshfeed._src.agreement.messages import (
    ASIDE_SECONDS,
    AnnouncedContents,
    Announcement,
    Stop,
    WindowReport,
    find_aside,
)
from meshfeed._src.base.coordination import KeyValueStore, call_briefly
from meshfeed._src.base.errors import Failure, StalledError, text_of
from meshfeed._src.base.reduction import Patience, ProgressReport, Reduction, Stragglers
from meshfeed._src.base.threads import Background
from meshfeed._src.base.types import JsonValue
from meshfeed._src.base.waits import Grace, Reminder, late_seconds

_MIN_WINDOW = 8  # steps; spreads the three requests of a window, of up to 0.8 ms each, over short steps
# With 320 hosts or more and 20 ms per step, 2 requests per host and window are 4,000 requests per second. One coordinator
# should get at most 5,000; the rest is left for repeated polls and for the rest of the job.
_HOSTS_PER_STEP = 40
_FIRST_WINDOWS = 4
Reduce = Callable[[Mapping[int, WindowReport], int, int], tuple[AnnouncedContents, Failure | None]]
"""Merges the contents of all hosts' reports on a window: (host → report, first step, end of the window) → (contents of
the announcement, failure of all hosts or None). A failure without a step prevents the whole window."""
OnStall = Callable[[int, float, str, str], object]
"""Called with the step, the seconds waited, who is late and what it reads, and the stacks."""
_log = logging.getLogger("meshfeed.agree")
_ERROR_GRACE_SECONDS = 4.0  # after the first failure; all hosts are to raise within 10 s of it
_CLOSE_SECONDS = 5.0  # a coordinator that has exited may never reply


def full_window(num_participants: int, batch_bytes: int, byte_limit: int) -> int:
    """Returns the steps of a full window, at least 1.

    Long enough to limit the request rate on many hosts, and short enough for two windows to fit in ``byte_limit``.

    ``batch_bytes`` are those of one host's part of a batch, the largest over all hosts.
    """
    wanted = max(_MIN_WINDOW, -(-num_participants // _HOSTS_PER_STEP))
    return max(1, min(wanted, byte_limit // (2 * max(1, batch_bytes))))


def window_ends(first_step: int, size: Callable[[], int]) -> Iterator[int]:
    """Yields the exclusive ends of windows 0, 1, 2, …: one step, then 1/4, 1/2 and finally all of ``size()`` steps."""
    end = first_step + 1
    yield end  # before size(), which is known only after the first window: batch bytes come with its reports
    length = max(1, size() // _FIRST_WINDOWS)
    while True:
        end += min(length, size())
        length *= 2
        yield end


def conclude(
    reports: Mapping[int, WindowReport], participants: Sequence[int], first: int, end: int, reduce: Reduce
) -> tuple[int, Stop | None, AnnouncedContents]:
    """Returns how far all hosts can deliver in the window ``[first, end)``.

    No host has delivered the first step. Reports may be missing only if some host has failed; then ``reduce`` is not called.

    Returns:
      The step up to which all hosts may deliver (exclusive), the stop at that step or None, and the contents of the
      announcement.
    """
    failed = {host: report.failure for host, report in sorted(reports.items()) if report.failure is not None}
    if len(reports) < len(participants):  # a host failed, and another did not report within the grace period
        return first, Stop(first, tuple(failed.values())), {}
    upto, stop = _stop_of_reports(reports, first, end)
    contents, failure = reduce(reports, first, end)
    if failure is not None and _prevails(failure, upto, stop):
        upto = first if failure.step is None else max(first, failure.step)
        stop = Stop(upto, (failure,))
    return upto, stop, contents


def _stop_of_reports(reports: Mapping[int, WindowReport], first: int, end: int) -> tuple[int, Stop | None]:
    finals = {host: report.final for host, report in sorted(reports.items()) if report.final is not None}
    failing = {host: final for host, final in finals.items() if reports[host].failure is not None}
    ended = _end_of_data({host: final for host, final in finals.items() if host not in failing}, reports)
    failed = min(failing.values(), default=None)
    if failed is not None and failed <= end and (ended is None or failed <= ended):
        failures = (reports[host].failure for host, final in failing.items() if final == failed)
        # Steps before ``first`` may already be delivered.
        return max(first, failed), Stop(
            max(first, failed), tuple(failure for failure in failures if failure is not None)
        )
    if ended is not None and ended <= end:
        return max(first, ended), Stop(max(first, ended))
    return end, None


def _end_of_data(finals: Mapping[int, int], reports: Mapping[int, WindowReport]) -> int | None:
    """Returns the step at which the data of all hosts has ended, or of the first host that does not pad."""
    ended = min((final for host, final in finals.items() if not reports[host].pads), default=None)
    # Padding hosts continue until the host with the most data has ended, so their end is known only from all hosts.
    return max(finals.values()) if ended is None and len(finals) == len(reports) else ended


def _prevails(failure: Failure, upto: int, stop: Stop | None) -> bool:
    """Whether a failure of all hosts replaces the result of the reports.

    With a step, it does if it stops the hosts earlier. Without one, it does unless a host has failed. In particular, it
    replaces a stop at the end of the data.
    """
    if failure.step is None:
        return stop is None or not stop.failures
    return failure.step < upto


def leave_notice(doing: str, step: int, because: BaseException | None) -> str:
    """Describes why a host leaves, such as ``closed its feed at step 3 after ValueError: the loss is nan``."""
    after = "" if because is None else f" after {Failure(type(because).__name__, text_of(because))}"
    return f"{doing} at step {step}{after}"


class _AlreadySeen(Exception):
    """Another thread has read the announcement that this thread waits for."""


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The keys of one generation's windows, as one host sees them; ``prefix`` is unique to the generation."""

    store: KeyValueStore
    prefix: str
    participants: Sequence[int]
    host: int

    def reduction(self, window: int) -> Reduction:
        """Returns the reduction of a window."""
        return Reduction(self.store, f"{self.prefix}/{window}", self.participants, self.host)

    def publish_doing(self, what: str) -> None:
        """Publishes what this host's reader is doing, for the logs of other hosts."""
        self.store.set(f"{self.prefix}/doing/{self.host}", what, overwrite=True)

    def doing(self, host: int) -> str | None:
        """Returns what another host's reader was doing, if it has published that."""
        return self.store.try_get(f"{self.prefix}/doing/{host}")

    @property
    def reducer(self) -> int:
        """The host that reduces."""
        return min(self.participants)

    def delete(self, name: str) -> None:
        """Deletes the keys below ``name``: a window's number, or ``doing``."""
        self.store.delete(f"{self.prefix}/{name}")


class WindowAgreement:
    """One host's side of the agreement for one generation of a feed; on the lowest participant, also the reducer."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        scope: str,  # unique to this feed and generation
        participants: Sequence[int],  # hosts that read or hold rows
        host: int,
        first_step: int,  # the next one to be delivered
        pad: bool,  # see WindowReport.pads
        byte_limit: int,  # for the host-side read-ahead
        timeout_seconds: float,  # longest wait for an announcement
        describe: Callable[[], str],  # returns what this host's reader is doing, for the other hosts' logs
        reduce: Reduce,  # the same on all hosts
        stacks: Callable[[], str] = lambda: "",  # returns those of what reads on this host
        on_stall: OnStall | None = None,
        summary: Summary | None = None,  # gets every announcement, on the reducer; None if no host follows
    ) -> None:
        self._stacks, self._on_stall = stacks, on_stall
        self._keys = _Keys(store, f"meshfeed/{scope}", tuple(participants), host)
        self._first_step = first_step
        self._pad = pad
        self._timeout_seconds = timeout_seconds
        self._describe = describe
        self._size: int | None = None
        self._upto = first_step
        self._stop: Stop | None = None
        self._contents: list[AnnouncedContents] = []
        self._announced = 0  # announcements that this host has seen
        self._published = 0  # windows that this host has published
        self._count = first_step  # steps of those windows
        self._last_published = False  # after a failure or the end of the data, no report follows
        self._ends = window_ends(first_step, self._window_size)
        self._window_end: int | None = None
        self._published_at: dict[int, float] = {}  # window → when this host published its report
        self.peer_wait_seconds = 0.0
        """How long :meth:`wait_for` waited after this host had published its report."""
        self.patient_until = 0.0
        """Time in seconds of ``time.monotonic()`` until which the current wait may last, past ``timeout_seconds``, because
        a straggler drops records and makes progress. Never decreases."""
        self.read_step = first_step
        """The step that this host's reader reads. A window of slow reads may last longer than the timeout of one."""
        self.asked_at = -math.inf
        """Since when the caller waits for a batch, in seconds of ``time.monotonic()``; inf while there is only read-ahead."""
        self._closed = False
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._reducer: _WindowReducer | None = None  # starts with the first publish or wait_for
        if host == self._keys.reducer:
            self._reducer = _WindowReducer(self._keys, first_step, byte_limit, reduce, summary)

    # ------------------------------------------------------------------ the reader's side

    def _window_size(self) -> int:
        """Steps of a full window, set by the first announcement; the reader waits for it before its second window."""
        number = self._announced
        if self._size is None:
            self._wait_for_announcement(self._first_step, number)
        return self._size or 1

    @property
    def window_end(self) -> int:
        """One past the last step of the reader's current window."""
        if self._window_end is None:
            self._window_end = next(self._ends)
        return self._window_end

    @property
    def read_ahead(self) -> int:
        """Host batches that the reader may hold: two windows, to read one while the other is delivered."""
        return 2 * (self._size or 1) + 1

    def publish(self, report: WindowReport) -> None:
        """Publishes the report on the window that ends at ``window_end``; moves to the next unless it is the last.

        ``pads`` and ``seen`` of the report are filled in.
        """
        self._start_reducer()
        with self._publishing:
            if self._closed:  # discard reads that finish after close
                return
            self._put(report)
            self._count = report.count
            if report.failure is None and (report.final is None or self._pad):
                self._window_end = None
            else:
                self._last_published = True

    def _put(self, report: WindowReport) -> None:
        report = dataclasses.replace(report, pads=self._pad, seen=self._announced)
        self._keys.reduction(self._published).publish(report.to_json())
        self._published_at[self._published] = time.monotonic()
        self._published += 1

    # ------------------------------------------------------------------ the consumer's side

    def wait_for(self, step: int) -> Stop | None:
        """Waits until all hosts can deliver ``step``; returns a Stop if they never will.

        Raises:
          StalledError: no announcement within ``timeout_seconds``; names the hosts that have not published.
        """
        while True:
            number = self._announced
            if step < self._upto or self._stop is not None:
                break
            start = time.monotonic()
            self._wait_for_announcement(step, number)
            own_part_read = self._published_at.pop(number, math.inf)
            self.peer_wait_seconds += max(0.0, time.monotonic() - max(start, own_part_read))
        return self._stop if self._stop is not None and step >= self._stop.step else None

    def contents(self) -> list[AnnouncedContents]:
        """Returns the contents of each announcement that :meth:`forget_contents` has not dropped."""
        with self._lock:
            return list(self._contents)

    def forget_contents(self, count: int) -> None:
        """Drops the first ``count`` of :meth:`contents`."""
        with self._lock:
            del self._contents[:count]

    def _wait_for_announcement(self, step: int, number: int) -> None:
        """Waits for announcement ``number``, which the caller looks up *before* it decides to wait.

        If it were looked up here, this host's other thread could have processed that announcement in between. ``number``
        would then be the following announcement, which needs this host's own report, and the reader would wait forever.
        """
        self._start_reducer()
        start = time.monotonic()
        report = ProgressReport(self._keys.store, self._timeout_seconds)
        first_read, late = self.read_step, late_seconds(self._timeout_seconds)
        reminder = Reminder(late)

        def tick(waited: float) -> None:
            if self._closed:
                raise StalledError("the feed was closed while it waited for other hosts")
            if self._announced != number:  # processed by this host's other thread, and perhaps deleted since
                raise _AlreadySeen
            if waited >= ASIDE_SECONDS and (aside := find_aside(self._keys.store, self._keys.prefix)) is not None:
                raise Stop(step, (aside,)).exception()
            waited = time.monotonic() - start  # a renewed wait begins at 0
            own = self._published <= number
            if own:
                slow = waited >= late and self.read_step > first_read
                report.update(f"reading step {self.read_step}" if slow else "")
            if reminder.due(waited):
                if own:
                    self.publish_doing()
                who, stacks = self._describe_stragglers(self._keys.reduction(number).stragglers())
                _log.warning("waited %.0f s for step %d: %s%s", waited, step, who, f"\n{stacks}" if stacks else "")
                self._record(step, waited, who, stacks)

        try:
            announcement, stragglers = self._announcement(number, tick)
        except _AlreadySeen:
            return
        finally:
            report.end()
        with self._lock:
            if self._announced != number:  # the other thread of this host was faster
                return
            if announcement is None:
                raise self._stalled(step, time.monotonic() - start, stragglers)
            self._size = announcement.window
            self._contents.append(announcement.contents)
            if announcement.stop is not None:
                self._stop = announcement.stop
            self._upto = announcement.upto
            self._announced = number + 1

    def _stalled(self, step: int, waited: float, stragglers: Stragglers) -> StalledError:
        who, stacks = self._describe_stragglers(stragglers)
        self._record(step, waited, who, stacks)
        error = StalledError(
            f"step {step}: {who} (waited {waited:.0f} s, "
            f"timeout_seconds={self._timeout_seconds:g}). Check the log of that host; raise timeout_seconds if its "
            "reads may take longer.",
            hosts=stragglers.hosts or (self._keys.reducer,),
            waited_seconds=waited,
        )
        if stacks:
            error.add_note(stacks)
        return error

    def _announcement(self, number: int, tick: Callable[[float], None]) -> tuple[Announcement | None, Stragglers]:
        reduction = self._keys.reduction(number)
        patience = Patience(self._keys.store, self._timeout_seconds)
        while True:
            found, stragglers = reduction.wait_or_find_stragglers(patience.deadline, tick)
            if found is not None:
                return Announcement.from_json(found["result"]), stragglers
            if stragglers.total and patience.renew(stragglers.hosts):
                self.patient_until = max(self.patient_until, patience.deadline)
            elif not patience.last_until(self.asked_at + self._timeout_seconds):
                return None, stragglers

    def _record(self, step: int, waited: float, who: str, stacks: str) -> None:
        if self._on_stall is not None:
            self._on_stall(step, waited, who, stacks)

    def publish_doing(self) -> None:
        """Publishes what this host reads and its stacks, for the logs of hosts that wait for it."""
        self._keys.publish_doing(f"{self._describe()}\n{self._stacks()}".rstrip())

    def _describe_stragglers(self, stragglers: Stragglers) -> tuple[str, str]:
        """Returns which hosts are late and what they read, and the stacks of those hosts and of this one."""
        if not stragglers.total:
            return f"host {self._keys.reducer}, which announces, has not responded", ""
        here = self._keys.host
        doing = {host: self._keys.doing(host) or "" for host in stragglers.hosts if host != here}
        stacks = {host: text.partition("\n")[2] for host, text in doing.items()} | {here: self._stacks()}
        notes = {
            host: self._describe() if host == here else doing[host].partition("\n")[0] for host in stragglers.hosts
        }
        note = "; ".join(f"host {host} is {what}" for host, what in notes.items() if what)
        have = "has" if stragglers.total == 1 else "have"
        return (
            f"{stragglers} {have} not read it yet" + (f" ({note})" if note else ""),
            "\n".join(f"host {host}:\n{text}" for host, text in stacks.items() if text),
        )

    # ------------------------------------------------------------------ the end

    def _start_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.start()

    def close(self, notice: str | None = None) -> None:
        """Stops the reducer's thread. The keys stay for hosts that continue; the feed deletes them once all have left.

        Args:
          notice: why this host leaves and at which step, for hosts that continue; None to leave silently.
        """
        self._closed = True
        failure = None if notice is None or self._stop is not None else Failure.left(notice, self._keys.host)
        if self._reducer is not None:  # the others wait for a reducer even after its last report
            self._reducer.close(failure)
        elif failure is not None and not self._last_published:
            self._publish_notice(failure)

    def _publish_notice(self, notice: Failure) -> None:
        def publish() -> None:
            found = self._keys.reduction(self._announced).announced()
            if found is not None and Announcement.from_json(found["result"]).stop is not None:
                return  # the reducer has left too
            with self._publishing:
                self._put(WindowReport(self._count, self._count, notice))

        call_briefly(publish, name="meshfeed-leave-notice", at_exit=True)


class _WindowReducer:
    """Reduces the reports on one window after the other, on a separate thread, until all hosts stop."""

    def __init__(self, keys: _Keys, first_step: int, byte_limit: int, reduce: Reduce, summary: Summary | None) -> None:
        self._keys = keys
        self._summary = summary
        self._byte_limit = byte_limit
        self._reduce = reduce
        self._first = first_step  # first step of the current window
        self._size: int | None = None
        self._ends = window_ends(first_step, lambda: self._size or 1)
        self._deleted = 0  # windows whose keys are deleted
        self._closed = False
        self._notice: Failure | None = None
        self._thread = Background(self._run, f"meshfeed-agree-{keys.prefix.removeprefix('meshfeed/')}")

    def start(self) -> None:
        """Starts the thread, once."""
        self._thread.start()

    def close(self, notice: Failure | None) -> None:
        """Ends the thread; announces the leave notice in place of a window whose reports are incomplete."""
        self._notice = notice
        self._closed = True
        if notice is not None:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and cannot start a thread
                self._thread.start()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        for window in itertools.count():
            try:
                if not self._reduce_window(window, next(self._ends)):
                    return
            except Exception:
                if not self._closed:  # after close, errors only mean that the job or the coordinator is shutting down
                    _log.exception("the agreement between hosts failed at window %d", window)
                return

    def _reduce_window(self, window: int, end: int) -> bool:
        """Announces the result of a window; returns whether hosts continue after it."""
        first, self._first = self._first, end
        participants = self._keys.participants
        reports = self._collect(self._keys.reduction(window))
        complete = len(reports) == len(participants)
        if not complete and self._closed:
            if self._notice is not None:
                self._announce(window, Announcement(first, self._size or 1, Stop(first, (self._notice,))))
            return False
        if self._size is None:
            largest = max(report.contents.get("bytes", 0) for report in reports.values())
            self._size = full_window(len(participants), largest, self._byte_limit)
        upto, stop, contents = conclude(reports, participants, first, end, self._reduce)
        self._announce(window, Announcement(upto, self._size, stop, contents))
        if complete:  # the announcements that a late host has seen are unknown
            self._delete_up_to(min(report.seen for report in reports.values()))
        return stop is None

    def _collect(self, reduction: Reduction) -> dict[int, WindowReport]:
        """Collects the reports of all hosts, or, some time after the first failure, of those that are not late."""
        grace = Grace(_ERROR_GRACE_SECONDS)

        def done(values: Mapping[int, JsonValue]) -> bool:
            failed = any(WindowReport.from_json(value).failure for value in values.values())
            return grace.is_over(failed) or self._closed or len(values) == len(self._keys.participants)

        return {host: WindowReport.from_json(value) for host, value in reduction.collect(float("inf"), done).items()}

    def _announce(self, window: int, announcement: Announcement) -> None:
        self._keys.reduction(window).announce(announcement.to_json())
        if self._summary is not None:
            self._summary.add(announcement)
        if announcement.stop is not None and announcement.stop.failures:
            # A killed host never leaves; then only the announcements stay.
            for number in range(self._deleted, window + 1):
                self._keys.reduction(number).discard_values()
            self._keys.delete("doing")

    def _delete_up_to(self, window: int) -> None:
        while self._deleted < window:
            self._keys.delete(str(self._deleted))
            self._deleted += 1
