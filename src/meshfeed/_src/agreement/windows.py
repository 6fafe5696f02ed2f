"""Agreement between hosts on how far all of them can deliver.

Batch k is delivered only after every participant has read its part of k, because a host that enters the collective of
a step which some other host cannot make would hang. Steps are grouped into windows. A host publishes its report on a
window once it has read it or failed to. One host, the reducer, announces up to which step all hosts can deliver. Each
host waits for an announcement only when it reaches a step beyond the last one. At most three requests per host and
window reach the coordination service.

No host delivers a step of window w before announcement w, so the reducer can stop all hosts at any step of w. The
first windows are short, to deliver the first batches early, and double up to the full size.

A host that leaves before the end publishes a leave notice as its next window report, and the reducer announces it; a
reducer that leaves announces its own. If all hosts leave at the same step, none waits for the notice, and it has no
effect.

Finds the late hosts and what they are doing, at a cost that is not quadratic in the number of hosts.

The reducer, which lists the published keys anyway, writes a note naming the missing hosts. The others only check
whether those are still missing: a few requests per host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshfeed._src.agreement.window_report import (
    Judge,
    Part,
    Stop,
    closed_error,
    decide,
    full_window,
    no_judge,
    overrule,
    window_ends,
)
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import StalledError
from meshfeed._src.base.threads import Background


class Lateness:
    """One host's view of the late hosts.

    Args:
      store: the key-value store.
      prefix: key prefix of the agreement.
      participants: process indices, ascending; the first is the reducer.
      host: this process.
      describe: returns what this host's reader is doing.
    """

    def __init__(
        self,
        store: coordination.KeyValueStore,
        prefix: str,
        participants: Sequence[int],
        host: int,
        describe: Callable[[], str],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._reducer = participants[0]
        self._host = host
        self._describe = describe

    def say(self) -> None:
        """Publishes what this host is doing. Called if this host is late itself."""
        self._store.set(f"{self._prefix}/doing/{self._host}", self._describe(), overwrite=True)

    def who(self, window: int) -> tuple[tuple[int, ...], str]:
        """Returns the hosts that have not published a window, at most 8, and a message naming them.

        Empty if all have published: then the reducer is about to announce the window, or is itself late.
        """
        prefix, note = f"{self._prefix}/w/{window}", f"{self._prefix}/late/{window}"
        late, count = coordination.missing_hosts(self._store, prefix, note, self._reducer)
        if not late:
            return (), f"host {self._reducer}, which announces, is silent"
        doing = {}
        for host in late:
            what = self._describe() if host == self._host else self._store.try_get(f"{self._prefix}/doing/{host}")
            if what:
                doing[host] = what
        notes = "; ".join(f"host {host} is {what}" for host, what in doing.items())
        who = coordination.format_missing(late, count)
        return late, f"{who} {'has' if count == 1 else 'have'} not read it yet" + (f" ({notes})" if notes else "")


_log = logging.getLogger("meshfeed.agree")
_ANNOUNCING_SECONDS = 2.0  # a reducer that has all reports announces within one poll interval
_ERROR_GRACE_SECONDS = 4.0
_MAX_MESSAGE = 2000


class _AlreadySeen(Exception):
    """Another thread has read the announcement that this thread waits for."""


class WindowAgreement:
    """One host's side of the agreement for one generation of a feed; on the lowest participant, also the reducer.

    Args:
      store: the key-value store.
      scope: key prefix, unique to this feed and generation.
      participants: process indices that read or hold rows.
      host: this process.
      first_step: the next step to be delivered.
      pad: see :attr:`Part.pads`.
      byte_limit: bytes available to the host-side read-ahead.
      timeout_seconds: longest wait for an announcement.
      describe: returns what this host's reader is doing, for the other hosts' logs.
      judge: reducer's hook, the same on all hosts.
    """

    def __init__(
        self,
        store: coordination.KeyValueStore,
        *,
        scope: str,
        participants: Sequence[int],
        host: int,
        first_step: int,
        pad: bool,
        byte_limit: int,
        timeout_seconds: float,
        describe: Callable[[], str],
        judge: Judge = no_judge,
    ) -> None:
        self._store = store
        self._prefix = f"meshfeed/{scope}"
        self._participants = tuple(sorted(participants))
        self._host = host
        self._first_step = first_step
        self._pad = pad
        self._byte_limit = byte_limit
        self._timeout_seconds = timeout_seconds
        self._late = Lateness(store, self._prefix, self._participants, host, describe)
        self._judge = judge
        self._size: int | None = None
        self._upto = first_step
        self._stop: Stop | None = None
        self._infos: list[dict[str, Any]] = []
        self._announced = 0  # announcements that this host has seen
        self._published = 0  # windows that this host has published
        self._count = first_step  # steps of those windows
        self._last_published = False  # after an error or the end of the data, no report follows
        self._ends = window_ends(first_step, self._window_size)
        self._window_end: int | None = None
        self.patient_until = 0.0  # on the clock of time.monotonic(); never earlier again
        """By which the wait under way may exceed ``timeout_seconds``, since a late host drops records and comes further."""
        self._closed = False
        self._leave_notice: str | None = None
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._reducer: Background | None = None  # starts with the first publish or wait_for
        if host == self._participants[0]:
            self._reducer = Background(self._reduce, f"meshfeed-agree-{scope}")

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

    def publish(self, part: Part) -> None:
        """Publishes the report on the window that ends at ``window_end``; moves to the next unless it is the last."""
        self._start_reducer()
        with self._publishing:
            if self._closed:  # discard reads that finish after close
                return
            self._put(part)
            self._count = part.count
            if part.error is None and (part.final is None or self._pad):
                self._window_end = None
            else:
                self._last_published = True

    def _put(self, part: Part) -> None:
        message = {
            "n": part.count,
            "final": part.final,
            "error": None if part.error is None else part.error[:_MAX_MESSAGE],
            "info": dict(part.info),
            "pads": self._pad,
            "seen": self._announced,
        }
        self._store.set(f"{self._prefix}/w/{self._published}/{self._host}", json.dumps(message), overwrite=True)
        self._published += 1

    # ------------------------------------------------------------------ the consumer's side

    def wait_for(self, step: int) -> Stop | None:
        """Waits until all hosts can make ``step``; a Stop if they never will.

        Raises:
          StalledError: no announcement within ``timeout_seconds``; names the hosts that have not published.
        """
        while True:
            number = self._announced
            if step < self._upto or self._stop is not None:
                break
            self._wait_for_announcement(step, number)
        return self._stop if self._stop is not None and step >= self._stop.step else None

    def infos(self) -> list[dict[str, Any]]:
        """Returns the judge's JSON of each announcement that :meth:`forget_infos` has not dropped."""
        with self._lock:
            return list(self._infos)

    def forget_infos(self, count: int) -> None:
        """Drops the first ``count`` of :meth:`infos`."""
        with self._lock:
            del self._infos[:count]

    def _wait_for_announcement(self, step: int, number: int) -> None:
        """Sees to announcement ``number``: the next one when the caller looked, *before* it found that it must wait.

        Asked for afterwards, the next one may be that behind what this host's other thread has seen meanwhile. The
        reader would wait for an announcement that itself has to be published for.
        """
        self._start_reducer()
        start = time.monotonic()
        warn_at = min(30.0, self._timeout_seconds / 4)
        patience = coordination.Patience(self._store, self._timeout_seconds)
        report = coordination.ProgressReport(self._store, self._timeout_seconds)

        def tick(_: float) -> None:
            nonlocal warn_at
            waited = time.monotonic() - start
            if self._closed:
                raise StalledError("the feed was closed while it waited for other hosts")
            if self._announced != number:  # seen by this host's other thread, and perhaps deleted since
                raise _AlreadySeen
            own = self._published <= number
            if own:
                report.update()
            if waited < warn_at:
                return
            warn_at *= 2
            if own:
                self._late.say()
            _log.warning("waited %.0f s for step %d: %s", waited, step, self._late.who(number)[1])

        try:
            text, hosts, who = self._announcement(number, patience, tick)
        except _AlreadySeen:
            return
        finally:
            report.end()
        with self._lock:
            if self._announced != number:  # the other thread of this host was faster
                return
            if text is None:
                waited = time.monotonic() - start
                raise StalledError(
                    f"step {step}: {who} (waited {waited:.0f} s, timeout_seconds={self._timeout_seconds:g}). Look at "
                    "the log of that host; raise timeout_seconds if its reads may take longer.",
                    hosts=hosts or self._participants[:1],
                    waited_seconds=waited,
                )
            message = json.loads(text)
            self._size = message["window"]
            self._infos.append(message["info"])
            if message["stop"] is not None:
                self._stop = Stop(message["upto"], {int(host): error for host, error in message["stop"].items()})
            self._upto = message["upto"]
            self._announced = number + 1

    def _announcement(
        self, number: int, patience: coordination.Patience, tick: Callable[[float], None]
    ) -> tuple[str | None, tuple[int, ...], str]:
        """The announcement; None with the hosts that are late, and the words for it, if it did not come."""
        key = f"{self._prefix}/a/{number}"
        while True:
            text = coordination.wait_for_key(
                self._store, key, patience.deadline, tick, num_waiting=len(self._participants)
            )
            if text is not None:
                return text, (), ""
            hosts, who = self._late.who(number)
            if not hosts:  # the last one has come, or left, at this very moment: what it said is under way
                return self._store.get(key, _ANNOUNCING_SECONDS), hosts, who
            if not patience.renew(hosts):
                return None, hosts, who
            self.patient_until = max(self.patient_until, patience.deadline)

    # ------------------------------------------------------------------ the reducer

    def _start_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.start()

    def _reduce(self) -> None:
        sizes: list[int] = []
        ends = window_ends(self._first_step, lambda: sizes[0])
        first, deleted = self._first_step, 0
        for window in range(1 << 62):
            end = next(ends)
            try:
                parts, seen = self._collect(window)
                if parts is None:
                    if self._leave_notice is not None:
                        self._announce(window, first, Stop(first, {self._host: self._leave_notice}), sizes or [1], {})
                    return
                if not sizes:
                    largest = max((int(part.info.get("bytes", 0)) for part in parts.values()), default=0)
                    sizes.append(full_window(len(self._participants), largest, self._byte_limit))
                upto, stop = decide(parts, self._participants, first, end)
                if len(parts) == len(self._participants):
                    info, verdict = self._judge(parts, first, end)
                    upto, stop = overrule(upto, stop, verdict, first)
                else:
                    info = {}
                self._announce(window, upto, stop, sizes, info)
                while deleted < min(seen, default=0):  # every host has read these announcements, so drop their keys
                    self._store.delete(f"{self._prefix}/a/{deleted}")
                    self._store.delete(f"{self._prefix}/w/{deleted}")
                    deleted += 1
            except Exception:
                if not self._closed:  # after close, errors only mean that the job or the coordinator is shutting down
                    _log.exception("the agreement between hosts broke off at window %d", window)
                return
            if stop is not None:
                return
            first = end

    def _announce(self, window: int, upto: int, stop: Stop | None, sizes: list[int], info: Mapping[str, Any]) -> None:
        message = {
            "upto": upto,
            "stop": None if stop is None else stop.errors,
            "window": sizes[0],
            "info": info,
        }
        self._store.set(f"{self._prefix}/a/{window}", json.dumps(message), overwrite=True)

    def _collect(self, window: int) -> tuple[dict[int, Part] | None, list[int]]:
        failed_since: float | None = None

        def stop(values: Mapping[int, str]) -> bool:
            nonlocal failed_since
            if self._closed:
                return True
            if failed_since is None and any('"error": null' not in text for text in values.values()):
                failed_since = time.monotonic()
            return failed_since is not None and time.monotonic() - failed_since > _ERROR_GRACE_SECONDS

        values = coordination.wait_for_hosts(
            self._store,
            f"{self._prefix}/w/{window}",
            self._participants,
            float("inf"),
            stop,
            note=f"{self._prefix}/late/{window}",
        )
        if self._closed and len(values) < len(self._participants):
            return None, []
        messages = {host: json.loads(text) for host, text in values.items()}
        parts = {host: Part(m["n"], m["final"], m["error"], m["info"], m["pads"]) for host, m in messages.items()}
        return parts, [m["seen"] for m in messages.values()]

    # ------------------------------------------------------------------ the end

    def close(self, leave_notice: str | None = None) -> None:
        """Stops the reducer's thread. The keys stay for hosts that continue; the feed deletes them once all have left.

        Args:
          leave_notice: why this host leaves and at which step, for hosts that continue; None to leave silently.
        """
        announces = self._reducer is not None  # the others wait for a reducer even after its last report
        leaves_early = leave_notice is not None and self._stop is None and (announces or not self._last_published)
        if leaves_early:
            self._leave_notice = closed_error(leave_notice or "")[:_MAX_MESSAGE]
        self._closed = True
        if leaves_early and not announces:
            self._say_leave_notice()
        if self._reducer is not None:
            if leaves_early:  # start the thread, if it is not running, to announce the notice
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and starts no thread
                    self._reducer.start()
            self._reducer.join(5.0)

    def _say_leave_notice(self) -> None:
        def say() -> None:
            with self._publishing:
                self._put(Part(self._count, self._count, self._leave_notice))

        coordination.call_briefly(say, name="meshfeed-leave_notice", at_exit=True)
