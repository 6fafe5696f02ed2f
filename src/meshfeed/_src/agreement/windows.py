"""Agreement between hosts on how far all of them can go.

Batch k is delivered only when every participant has read its part of k, so that nobody enters the collective of a
step that some host cannot make. Steps are grouped into windows. A host publishes a window once it has read it (or has
found that it cannot); one of them, the reducer, announces what all can do; each host waits for an announcement only
when it comes to a step beyond the last one. Three requests a host and window reach the coordination service at most.

Nobody delivers a step of window w before announcement w, so the reducer is free to stop all hosts at any step of w.
The first windows are short, so that the first batches are not held back, and double up to the full size.

A host that leaves before the end says so in the place of its next window, and the reducer passes it on; a reducer that
leaves announces it itself. Where all hosts leave at the same step nobody asks any more, so nothing is heard of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshfeed._src.agreement.rules import (
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
from meshfeed._src.agreement.stragglers import Lateness
from meshfeed._src.base import coordination
from meshfeed._src.base.errors import StalledError
from meshfeed._src.base.threads import Background

_log = logging.getLogger("meshfeed.agree")
_ANNOUNCING_SECONDS = 2.0  # a reducer that has all parts announces within one slice of its waiting
_ERROR_GRACE_SECONDS = 4.0
_MAX_MESSAGE = 2000


class _AlreadySeen(Exception):
    """The announcement that a thread waits for was read by another thread."""


class WindowAgreement:
    """One host's side of the agreement on a run of steps; on the lowest participant also the reducer's thread.

    Args:
      store: the key-value store.
      scope: key prefix, unique to this feed and generation.
      participants: process indices that read or hold rows.
      host: this process.
      first_step: the next step to be delivered.
      pad: see :attr:`Part.pads`.
      byte_limit: bytes that the host-side read-ahead may take.
      timeout_seconds: longest wait for an announcement.
      describe: what this host's reader is doing, for the others' logs.
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
        self._last_published = False  # nothing can follow: an error, or the end
        self._ends = window_ends(first_step, self._window_size)
        self._window_end: int | None = None
        self._closed = False
        self._leave_notice: str | None = None  # what a reducer that leaves announces
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._reducer: Background | None = None  # runs from the first publish or wait_for on
        if host == self._participants[0]:
            self._reducer = Background(self._reduce, f"meshfeed-agree-{scope}")

    # ------------------------------------------------------------------ the reader's side

    def _window_size(self) -> int:
        """Steps of a full window, from the first announcement; the reader waits for it before its second window."""
        number = self._announced
        if self._size is None:
            self._wait_for_announcement(self._first_step, number)
        return self._size or 1

    @property
    def window_end(self) -> int:
        """One past the last step of the window that the reader is in."""
        if self._window_end is None:
            self._window_end = next(self._ends)
        return self._window_end

    @property
    def read_ahead(self) -> int:
        """Host batches that the reader may keep: two windows, so that one is read while the other is delivered."""
        return 2 * (self._size or 1) + 1

    def publish(self, part: Part) -> None:
        """Publishes the window that ends at ``window_end`` and goes on to the next, but not after a final part."""
        self._start_reducer()
        with self._publishing:
            if self._closed:  # what a read that outlived the feed came to is nobody's concern
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
        """The judge's JSON of the announcements, without those forgotten."""
        with self._lock:
            return list(self._infos)

    def forget_infos(self, count: int) -> None:
        """Drops the first of :meth:`infos`."""
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
        hosts: tuple[int, ...] = ()
        who = ""

        def tick(waited: float) -> None:
            nonlocal warn_at
            if self._closed:
                raise StalledError("the feed was closed while it waited for other hosts")
            if self._announced != number:  # seen by this host's other thread, and perhaps deleted since
                raise _AlreadySeen
            if waited < warn_at:
                return
            warn_at *= 2
            if self._published <= number:
                self._late.say()
            _log.warning("waited %.0f s for step %d: %s", waited, step, self._late.who(number)[1])

        deadline = start + self._timeout_seconds
        try:
            text = coordination.wait_for_key(
                self._store, f"{self._prefix}/a/{number}", deadline, tick, num_waiting=len(self._participants)
            )
        except _AlreadySeen:
            return
        if text is None:
            hosts, who = self._late.who(number)
            if not hosts:  # the last one has come, or left, at this very moment: what it said is under way
                text = self._store.get(f"{self._prefix}/a/{number}", _ANNOUNCING_SECONDS)
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
                while deleted < min(seen, default=0):  # every host has read these announcements
                    self._store.delete(f"{self._prefix}/a/{deleted}")
                    self._store.delete(f"{self._prefix}/w/{deleted}")
                    deleted += 1
            except Exception:
                if not self._closed:  # the job is being torn down, or the coordinator is gone
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
        """Ends the reducer's thread. The keys stay for hosts that go on; the feed deletes them once all have left.

        Args:
          leave_notice: what this host does and at which step, for hosts that go on; None to leave without a word.
        """
        announces = self._reducer is not None  # and the others wait for it, whatever it has published
        leaves_early = leave_notice is not None and self._stop is None and (announces or not self._last_published)
        if leaves_early:
            self._leave_notice = closed_error(leave_notice or "")[:_MAX_MESSAGE]
        self._closed = True
        if leaves_early and not announces:
            self._say_leave_notice()
        if self._reducer is not None:
            if leaves_early:  # also where it was not needed yet
                with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and starts no thread
                    self._reducer.start()
            self._reducer.join(5.0)

    def _say_leave_notice(self) -> None:
        def say() -> None:
            with self._publishing:
                self._put(Part(self._count, self._count, self._leave_notice))

        coordination.call_briefly(say, name="meshfeed-leave_notice", at_exit=True)
