"""A heartbeat of each process, so that the others learn within seconds which one was killed.

A killed process reports nothing. The others wait for it inside a collective, where only the JAX runtime can end the wait,
after its own heartbeat timeout. Until then a log line names the host that is silent.

While a process has a feed that spans hosts, a thread of its own sets a counter in the key-value store every few seconds. It
needs neither the main thread nor the devices, so a long step or a compilation does not silence it. One host watches: the
lowest one that has not left reads all counters with one request, and publishes which have stopped. Every host reads that
with its own beat, so a beat costs two requests per host, and intervals grow with the number of hosts. The publication is
the watcher's own sign of life: if it stops, the others name the watcher, and the next host takes over.

A host that is interrupted in a collective, or whose program an error has ended, is alive as a process, but the others wait
for it. It leaves a note that the watcher publishes.

All feeds of a process share one thread, since a process lives or dies as a whole.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import jax

from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.base.coordination import NAMED_HOSTS, format_hosts
from meshfeed._src.base.ended import TOLD, told_key
from meshfeed._src.base.jax_internals import KeyValueStore
from meshfeed._src.base.threads import Background
from meshfeed._src.base.wake_up import Signal

_ALIVE, _WATCH = "meshfeed/alive", "meshfeed/watch"
_TOLD = TOLD.removeprefix(f"{_ALIVE}/") + "/"  # and the host, beside the counters, which the watcher lists anyway
_TOLD_BEATS = 10  # for which the watcher repeats what a host told the others
_INTERVAL_SECONDS = 2.0
# Of the 27,000 that one coordinator can handle; the windows of the feeds use up to 5,000 (windows.py).
_REQUESTS_PER_SECOND = 2_500
_SILENT_SECONDS = 5.0
_REMINDERS = (20.0, 40.0, 80.0)  # seconds of silence; JAX's own heartbeat times out after 100 by default
_END_SECONDS = 2.0
_log = logging.getLogger("meshfeed.agree")


def interval_seconds(num_hosts: int) -> float:
    """Returns the time between two beats of a host."""
    return max(_INTERVAL_SECONDS, 2 * num_hosts / _REQUESTS_PER_SECOND)


class Pulse:
    """One process's side of the heartbeat, without its thread; ``interval`` is in seconds."""

    def __init__(self, store: KeyValueStore, host: int, interval: float) -> None:
        self._store, self._host, self._interval = store, host, interval
        self._limit = max(_SILENT_SECONDS, 2 * interval)
        self._count = 0
        self._watches = False
        self._counters: dict[int, tuple[str, float]] = {}  # host → counter, and seconds since it changed
        self._passed: set[int] = set()  # watchers that left or are silent
        self._published: str | None = None  # the watcher's last publication
        self._quiet = 0.0  # seconds since that
        self.silent: dict[int, float] = {}
        """Hosts that have stopped, and for how many seconds."""
        self.told: dict[int, str] = {}
        """What hosts have told the others with :func:`tell` in the last beats."""
        self._beats_left: dict[int, int] = {}  # on the watcher: host → beats for which it repeats what that host told

    def beat(self, elapsed: float, participants: Sequence[int]) -> dict[int, float]:
        """Shows that this process is alive, and returns :attr:`silent`.

        Args:
          elapsed: seconds since the last beat. More than two intervals count as two: while this process was suspended, it
            could not see the others.
          participants: hosts of the feeds of this process.
        """
        elapsed = min(elapsed, 2 * self._interval)
        self._count += 1
        self._store.set(f"{_ALIVE}/{self._host}", str(self._count), overwrite=True)
        gone = self._passed | self.silent.keys()  # a host that was killed before its turn will never watch
        watcher = min((host for host in participants if host not in gone), default=self._host)
        if watcher == self._host:
            self._watch(elapsed)
        else:
            self._follow(watcher, elapsed)
        self.silent.pop(self._host, None)
        return dict(self.silent)

    def _watch(self, elapsed: float) -> None:
        listed = self._store.directory(_ALIVE)
        new = {int(key.removeprefix(_TOLD)): listed.pop(key) for key in list(listed) if key.startswith(_TOLD)}
        found = {int(host): count for host, count in listed.items()}
        self._counters = {host: self._silence(host, count, elapsed) for host, count in found.items()}
        self.silent = {host: seconds for host, (_, seconds) in self._counters.items() if seconds >= self._limit}
        self._watches = True
        self._beats_left = {host: left - 1 for host, left in self._beats_left.items() if left > 1}
        self._beats_left |= dict.fromkeys(new, _TOLD_BEATS)
        told = {host: text for host, text in (self.told | new).items() if host in self._beats_left}
        self.told = dict(list(told.items())[:NAMED_HOSTS])  # all hosts may have ended by errors
        value = json.dumps([self._count, sorted(self.silent.items()), sorted(self.told.items())])
        self._store.set(f"{_WATCH}/{self._host}", value, overwrite=True)
        if new:  # their hosts may have left since, and would not delete them
            self._store.delete(TOLD)

    def _silence(self, host: int, count: str, elapsed: float) -> tuple[str, float]:
        if host not in self._counters:
            return count, self.silent.get(host, 0.0)  # known from the watcher before
        before, seconds = self._counters[host]
        return count, seconds + elapsed if count == before else 0.0

    def _follow(self, watcher: int, elapsed: float) -> None:
        published = self._store.try_get(f"{_WATCH}/{watcher}")
        if published is not None and published != self._published:
            self._published, self._quiet = published, 0.0
            _, silent, told = json.loads(published)
            self.silent, self.told = dict(silent), dict(told)
            return
        self._quiet += elapsed
        if (published is None and self._published is not None) or self._quiet >= self._limit:
            if published is not None:  # one that has not begun may be alive and follow another: its counter shows that
                self.silent[watcher] = self._quiet
            self._passed.add(watcher)
            self._published, self._quiet = None, 0.0

    def leave(self) -> None:
        """Removes this process's keys."""
        self._store.delete(f"{_ALIVE}/{self._host}")
        if self._watches:
            for host, text in self.told.items():  # which the others may not have read yet, for the next watcher
                self._store.set(told_key(host), text, overwrite=True)
            self._store.delete(f"{_WATCH}/{self._host}")


class SilenceLog:
    """Logs which hosts have become silent, again after some time, and which answer again."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def forget_all_but(self, hosts: Collection[int]) -> None:
        """Logs nothing further of other hosts that are silent."""
        self._known = {host: seconds for host, seconds in self._known.items() if host in hosts}

    def update(self, silent: Mapping[int, float]) -> None:
        """Logs what has changed; ``silent`` is host → seconds."""
        new = [host for host in silent if host not in self._known]
        due = [
            host
            for host, seconds in silent.items()
            if host in self._known and any(self._known[host] < limit <= seconds for limit in _REMINDERS)
        ]
        back = [host for host in self._known if host not in silent]
        self._known = dict(silent)
        if new:
            _log.warning(
                "%s: no sign of life for %.0f s. The process was killed or suspended, or its machine or network failed; "
                "collectives with it cannot end. %s",
                format_hosts(new),
                max(silent[host] for host in new),
                _what_follows(),
            )
        if due:
            _log.error(
                "%s: still no sign of life after %.0f s. %s",
                format_hosts(due),
                max(silent[host] for host in due),
                _what_follows(),
            )
        if back:
            _log.warning("%s: alive again, or has left", format_hosts(back))


def _what_follows() -> str:
    if jax_internals.substitute_client() is not None:  # JAX does not know of these hosts
        return (
            "The feed raises an error. Then continue on the other hosts with reshard of the remote feed, or restart the "
            "job; it resumes at the newest checkpoint."
        )
    if getattr(jax.config, "jax_enable_recoverability", False):
        return (
            "jax_enable_recoverability is set, so JAX does not abort this process: the step or the feed raises an error. "
            "Then continue on the other hosts with feed.reshard, or restart the job; it resumes at the newest checkpoint."
        )
    return (
        "JAX will abort this process when its heartbeat times out (heartbeat_timeout_seconds of jax.distributed.initialize, "
        "100 s by default). Then restart the job; it resumes at the newest checkpoint."
    )


class _Heart:
    """The thread of a process, and the feeds that share it."""

    def __init__(self, store: KeyValueStore, host: int) -> None:
        self._store = store
        self.job = _job(store)
        self.members: list[Member] = []
        self._interval = interval_seconds(coordination.process_count())
        self._host = host
        self._pulse = Pulse(store, host, self._interval)
        self._wake = Signal()
        self._closed = False
        self.thread = Background(self._run, "meshfeed-heartbeat")

    def _run(self) -> None:
        shown, last, failing = SilenceLog(), time.monotonic(), False
        logged: dict[int, str] = {}
        while not self._closed:
            now = time.monotonic()
            try:
                participants = [host for member in list(self.members) for host in member.participants]
                silent = self._pulse.beat(now - last, participants)
                shown.forget_all_but(participants)  # no feed of this process waits for the others any more
                shown.update({host: seconds for host, seconds in silent.items() if host in participants})
                told = {host: text for host, text in self._pulse.told.items() if host in participants}
                for host, text in told.items():
                    if logged.get(host) != text and host != self._host:
                        _log.warning("host %d: %s", host, text)
                logged = told
                failing = False
            except Exception as error:
                self._sleep()
                if self._closed or _job(self._store) is not self.job:  # jax.distributed.shutdown() was called
                    return
                if not failing:
                    served = jax_internals.substitute_client() is not None
                    who = (
                        "a process, which serves the key-value store"
                        if served
                        else "process 0, which runs the coordination service"
                    )
                    _log.error("%s of this job, does not answer (%s). %s", who, error, _what_follows())
                failing = True
            last = now
            for member in list(self.members):
                member.look()
            self._sleep()
        try:
            self._pulse.leave()
        except Exception as error:
            _log.debug("cannot remove the heartbeat of this host: %s", error)

    def _sleep(self) -> None:
        if not self._closed:
            self._wake.wait(self._interval)

    def close(self) -> None:
        """Ends the thread, which removes the keys of this process."""
        self._closed = True
        self._wake.set()
        self.thread.join(_END_SECONDS)


def tell(text: str) -> None:
    """Has the other hosts log a line within a few beats, also while they wait in a collective, and if this host leaves."""
    store, key = coordination.key_value_store(), told_key(coordination.process_index())
    if store is not None:
        coordination.call_briefly(lambda: store.set(key, text, overwrite=True), name="meshfeed-tell", at_exit=False)


def _job(store: KeyValueStore) -> object:
    """Returns what identifies the job: JAX's client, which an in-process resize replaces."""
    return jax_internals.coordination_client() or store


_hearts: dict[int, _Heart] = {}  # by process index, of which real processes have one
_lock = threading.Lock()


class Member:
    """A feed's part in the heartbeat of its process.

    Args:
      participants: process indices of the feed's hosts; no heartbeat is needed with fewer than two.

    Attributes:
      on_beat: called with each beat, on a thread that no read and no step holds up; must not refer to the feed.
    """

    def __init__(self, participants: Sequence[int]) -> None:
        self.participants = tuple(participants)
        self.on_beat: Callable[[], object] | None = None
        self._host = coordination.process_index()
        self._heart: _Heart | None = None
        store = coordination.key_value_store()
        if store is None or len(self.participants) < 2:
            return
        with _lock:
            heart = _hearts.get(self._host)
            if heart is None or heart.job is not _job(store):
                heart = _hearts[self._host] = _Heart(store, self._host)
            heart.members.append(self)
        self._heart = heart
        heart.thread.start()

    def look(self) -> None:
        """Calls :attr:`on_beat`; its errors must not end the heartbeat."""
        try:
            if self.on_beat is not None:
                self.on_beat()
        except Exception as error:
            _log.debug("cannot publish what this host does: %s", error)

    def leave(self) -> None:
        """Ends the heartbeat of the process if this was its last feed. Idempotent."""
        heart, self._heart = self._heart, None
        self.on_beat = None
        if heart is None:
            return
        with _lock:
            heart.members.remove(self)
            is_last = not heart.members
            if is_last and _hearts.get(self._host) is heart:
                del _hearts[self._host]
        if is_last:
            heart.close()
