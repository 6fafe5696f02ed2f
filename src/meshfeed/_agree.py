"""Agreement between hosts on how far all of them can go.

Batch k is delivered only when every participant has read its part of k, so that nobody enters the collective of a
step that some host cannot make. Steps are grouped into windows. A host publishes a window once it has read it (or has
found that it cannot); one of them, the reducer, announces what all can do; each host waits for an announcement only
when it comes to a step beyond the last one. Three requests a host and window reach the coordination service at most.

Nobody delivers a step of window w before announcement w, so the reducer is free to stop all hosts at any step of w.
The first windows are short, so that the first batches are not held back, and double up to the full size.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from meshfeed import _process
from meshfeed._errors import StalledError

_log = logging.getLogger("meshfeed.agree")
_MIN_WINDOW = 8
_HOSTS_PER_STEP = 48  # 2 requests a host and window: under 5,000 a second on 4,096 hosts at 20 ms a step
_ERROR_GRACE_SECONDS = 4.0
_MAX_MESSAGE = 2000
ALL_HOSTS = -1  # stands for the host in an error that is everybody's


def full_window(num_participants: int, batch_bytes: int, byte_limit: int) -> int:
    """Steps of a full window: few requests a second on many hosts, and two windows within ``byte_limit`` bytes."""
    wanted = max(_MIN_WINDOW, -(-num_participants // _HOSTS_PER_STEP))
    return max(1, min(wanted, byte_limit // (2 * max(1, batch_bytes))))


def window_ends(first_step: int, size: Callable[[], int]) -> Iterator[int]:
    """Ends (exclusive) of the windows 0, 1, 2, …: 1, 1, 2, 4, … steps up to ``size()``."""
    end, length = first_step + 1, 1
    yield end
    while True:
        end += min(length, size())
        length *= 2
        yield end


@dataclasses.dataclass(frozen=True)
class Part:
    """What a host publishes of a window.

    Attributes:
      count: steps that it has read, counted from step 0 of the feed.
      final: the first step that it cannot make of itself, or None.
      error: message of the exception that made ``final``, or None for the end of its data.
      info: further JSON for the reducer: bytes a batch, lengths of lanes that ended, counts of bad records, digests.
    """

    count: int
    final: int | None = None
    error: str | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Stop:
    """Why and before which step all hosts stop.

    Attributes:
      step: the first step that is not delivered.
      errors: host (or ALL_HOSTS) → message; empty at the end of the data.
    """

    step: int
    errors: Mapping[int, str]


def decide(
    parts: Mapping[int, Part], participants: Sequence[int], first: int, end: int, *, pad: bool
) -> tuple[int, Stop | None]:
    """The reducer's rule: how far all hosts can go in the window ``[first, end)``.

    Args:
      parts: host → what it published; hosts may be missing only where some host has failed.
      participants: all hosts.
      first: first step of the window; nobody has delivered it.
      end: one past the window's last step.
      pad: hosts whose data ended go on with padding until all have ended.

    Returns:
      The step up to which all may deliver (exclusive), and why they stop there, or None.
    """
    errors = {host: part for host, part in parts.items() if part.error is not None}
    if len(parts) < len(participants):  # a failure, and some host too slow to wait for
        return first, Stop(first, {host: str(part.error) for host, part in errors.items()})
    failed = min((part.final for part in errors.values() if part.final is not None), default=None)
    ends = [part.final for part in parts.values() if part.final is not None and part.error is None]
    if pad:
        ended = max(ends) if len(ends) == len(participants) else None
    else:
        ended = min(ends, default=None)
    if failed is not None and (ended is None or failed <= ended) and failed <= end:
        step = max(first, failed)
        return step, Stop(step, {host: str(part.error) for host, part in errors.items() if part.final == failed})
    if ended is not None and ended <= end:
        step = max(first, ended)
        return step, Stop(step, {})
    return end, None


Judge = Callable[[Mapping[int, Part]], "tuple[dict[str, Any], str | None]"]
"""Reducer's hook: parts of a window → (JSON for the announcement, an error of all hosts or None)."""


def _no_judge(parts: Mapping[int, Part]) -> tuple[dict[str, Any], str | None]:
    del parts
    return {}, None


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
      pad: see :func:`decide`.
      byte_limit: bytes that the host-side read-ahead may take.
      timeout_seconds: longest wait for an announcement.
      describe: what this host's reader is doing, for the others' logs.
      judge: reducer's hook, the same on all hosts.
    """

    def __init__(
        self,
        store: _process.KeyValueStore,
        *,
        scope: str,
        participants: Sequence[int],
        host: int,
        first_step: int,
        pad: bool,
        byte_limit: int,
        timeout_seconds: float,
        describe: Callable[[], str],
        judge: Judge = _no_judge,
    ) -> None:
        self._store = store
        self._prefix = f"meshfeed/{scope}"
        self._participants = tuple(sorted(participants))
        self._host = host
        self._first_step = first_step
        self._pad = pad
        self._byte_limit = byte_limit
        self._timeout_seconds = timeout_seconds
        self._describe = describe
        self._judge = judge
        self._size: int | None = None
        self._upto = first_step
        self._stop: Stop | None = None
        self._infos: list[dict[str, Any]] = []
        self._announced = 0  # announcements that this host has seen
        self._published = 0  # windows that this host has published
        self._ends = window_ends(first_step, self._window_size)
        self.window_end = next(self._ends)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._reducer: threading.Thread | None = None
        if host == self._participants[0]:
            self._reducer = threading.Thread(target=self._reduce, name=f"meshfeed-agree-{scope}", daemon=True)
            self._reducer.start()

    # ------------------------------------------------------------------ the reader's side

    def _window_size(self) -> int:
        """Steps of a full window, from the first announcement; the reader waits for it after its first batch."""
        if self._size is None:
            self._wait_for_announcement(self._first_step)
        return self._size or 1

    @property
    def read_ahead(self) -> int:
        """Host batches that the reader may keep: two windows, so that one is read while the other is delivered."""
        return 2 * (self._size or 1) + 1

    def publish(self, part: Part) -> None:
        """Publishes the window that ends at ``window_end`` and goes on to the next, but not after a final part."""
        if self._closed.is_set():  # what a read that outlived the feed came to is nobody's concern
            return
        message = {
            "n": part.count,
            "final": part.final,
            "error": None if part.error is None else part.error[:_MAX_MESSAGE],
            "info": dict(part.info),
            "seen": self._announced,
        }
        self._store.set(f"{self._prefix}/w/{self._published}/{self._host}", json.dumps(message), overwrite=True)
        self._published += 1
        if part.error is None and (part.final is None or self._pad):
            self.window_end = next(self._ends)

    # ------------------------------------------------------------------ the consumer's side

    def wait_for(self, step: int) -> Stop | None:
        """Waits until all hosts can make ``step``; a Stop if they never will.

        Raises:
          StalledError: no announcement within ``timeout_seconds``; names the hosts that have not published.
        """
        while step >= self._upto and self._stop is None:
            self._wait_for_announcement(step)
        return self._stop if self._stop is not None and step >= self._stop.step else None

    def infos(self) -> list[dict[str, Any]]:
        """The judge's JSON of the announcements, without those forgotten."""
        with self._lock:
            return list(self._infos)

    def forget_infos(self, count: int) -> None:
        """Drops the first of :meth:`infos`."""
        with self._lock:
            del self._infos[:count]

    def _wait_for_announcement(self, step: int) -> None:
        number = self._announced
        start = time.monotonic()
        warn_at = min(30.0, self._timeout_seconds / 4)

        def tick(waited: float) -> None:
            nonlocal warn_at
            if self._closed.is_set():
                raise StalledError("the feed was closed while it waited for other hosts")
            if self._announced != number:  # seen by this host's other thread, and perhaps deleted since
                raise _AlreadySeen
            if waited < warn_at:
                return
            warn_at *= 2
            if self._published <= number:
                self._store.set(f"{self._prefix}/doing/{self._host}", self._describe(), overwrite=True)
            _log.warning("waited %.0f s for step %d: %s", waited, step, self._who_is_late(number)[1])

        deadline = start + self._timeout_seconds
        try:
            text = _process.wait_for_key(self._store, f"{self._prefix}/a/{number}", deadline, tick)
        except _AlreadySeen:
            return
        with self._lock:
            if self._announced != number:  # the other thread of this host was faster
                return
            if text is None:
                hosts, who = self._who_is_late(number)
                waited = time.monotonic() - start
                raise StalledError(
                    f"step {step}: {who} (waited {waited:.0f} s, timeout_seconds={self._timeout_seconds:g}). Look at "
                    "the log of that host; raise timeout_seconds if its reads may take longer.",
                    hosts=hosts,
                    waited_seconds=waited,
                )
            message = json.loads(text)
            self._size = message["window"]
            self._infos.append(message["info"])
            if message["stop"] is not None:
                self._stop = Stop(message["upto"], {int(host): error for host, error in message["stop"].items()})
            self._upto = message["upto"]
            self._announced = number + 1

    def _who_is_late(self, window: int) -> tuple[tuple[int, ...], str]:
        arrived = {int(host) for host in self._store.directory(f"{self._prefix}/w/{window}")}
        late = [host for host in self._participants if host not in arrived]
        if not late:
            return (self._participants[0],), f"host {self._participants[0]}, which announces, is silent"
        doing = self._store.directory(f"{self._prefix}/doing")
        if self._host in late:
            doing[str(self._host)] = self._describe()
        notes = "; ".join(f"host {host} is {doing[str(host)]}" for host in late[:8] if str(host) in doing)
        behind = "has" if len(late) == 1 else "have"
        return tuple(late), f"{_process.format_hosts(late)} {behind} not read it yet" + (f" ({notes})" if notes else "")

    # ------------------------------------------------------------------ the reducer

    def _reduce(self) -> None:
        sizes: list[int] = []
        ends = window_ends(self._first_step, lambda: sizes[0])
        first, deleted = self._first_step, 0
        for window in range(1 << 62):
            end = next(ends)
            try:
                parts, seen = self._collect(window)
                if parts is None:
                    return
                if not sizes:
                    largest = max((int(part.info.get("bytes", 0)) for part in parts.values()), default=0)
                    sizes.append(full_window(len(self._participants), largest, self._byte_limit))
                upto, stop = decide(parts, self._participants, first, end, pad=self._pad)
                info, verdict = self._judge(parts) if len(parts) == len(self._participants) else ({}, None)
                if verdict is not None and (stop is None or not stop.errors):
                    upto, stop = first, Stop(first, {ALL_HOSTS: verdict})
                message = {
                    "upto": upto,
                    "stop": None if stop is None else stop.errors,
                    "window": sizes[0],
                    "info": info,
                }
                self._store.set(f"{self._prefix}/a/{window}", json.dumps(message), overwrite=True)
                while deleted < min(seen, default=0):  # every host has read these announcements
                    self._store.delete(f"{self._prefix}/a/{deleted}")
                    self._store.delete(f"{self._prefix}/w/{deleted}")
                    deleted += 1
            except Exception:
                if not self._closed.is_set():  # the job is being torn down, or the coordinator is gone
                    _log.exception("the agreement between hosts broke off at window %d", window)
                return
            if stop is not None:
                return
            first = end

    def _collect(self, window: int) -> tuple[dict[int, Part] | None, list[int]]:
        failed_since: float | None = None

        def stop(values: Mapping[int, str]) -> bool:
            nonlocal failed_since
            if self._closed.is_set():
                return True
            if failed_since is None and any('"error": null' not in text for text in values.values()):
                failed_since = time.monotonic()
            return failed_since is not None and time.monotonic() - failed_since > _ERROR_GRACE_SECONDS

        values = _process.wait_for_hosts(
            self._store, f"{self._prefix}/w/{window}", self._participants, float("inf"), stop
        )
        if self._closed.is_set() and len(values) < len(self._participants):
            return None, []
        messages = {host: json.loads(text) for host, text in values.items()}
        parts = {host: Part(m["n"], m["final"], m["error"], m["info"]) for host, m in messages.items()}
        return parts, [m["seen"] for m in messages.values()]

    def close(self) -> None:
        """Ends the reducer's thread; keys of this host are left to the coordination service."""
        self._closed.set()
        if self._reducer is not None and self._reducer is not threading.current_thread():
            self._reducer.join(5.0)
