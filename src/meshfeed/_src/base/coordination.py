"""Process indices, and exchanges between hosts over the coordination service's key-value store.

No other module uses either directly. JAX has no public key-value API, so the client is taken from
``jax._src.distributed.global_state``. A single-process job needs no client. A multi-process job without one is an error
(:func:`require_store`), because its hosts could not report failures to each other and would hang in the next
collective.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshfeed._src.base.errors import MeshfeedError, StalledError
from meshfeed._src.base.stats import PROGRESS

# A blocking get is split into slices to notice Ctrl-C, close and deadlines. The slices grow with the wait and the
# number of hosts: thousands of hosts in a long wait must not flood the coordinator.
_MIN_SLICE_SECONDS = 0.5
_MAX_SLICE_SECONDS = 2.0
_SLICE_SECONDS_A_HOST = 5e-4
_PAUSE_SECONDS_A_HOST = 2.5e-5
_MAX_PAUSE_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 0.2
_NOTE_SECONDS = 1.0
_NAMED_HOSTS = 8  # messages and notes stay short in jobs with thousands of hosts
_BRIEFLY_SECONDS = 2.0
_REPORT_SECONDS = 5.0
_log = logging.getLogger("meshfeed.process")


def process_index() -> int:
    """Index of this process in the job."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes in the job."""
    return jax.process_count()


def is_distributed() -> bool:
    """Whether ``jax.distributed.initialize()`` was called."""
    return jax.distributed.is_initialized()


class KeyValueStore:
    """The coordination service's key-value store; timeouts and missing keys return None instead of raising.

    Thread-safe. Every call takes 0.2–0.8 ms, plus the wait in :meth:`get`, and releases the GIL.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        """Stores ``value`` under ``key``."""
        self._client.key_value_set(key, value, allow_overwrite=overwrite)

    def get(self, key: str, seconds: float) -> str | None:
        """Waits up to ``seconds`` for ``key``; returns None if it does not appear."""
        try:
            return self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except Exception as error:  # the client has no exception type for a timeout, only the message
            if "DEADLINE_EXCEEDED" in str(error) or "timed out" in str(error).lower():
                return None
            raise

    def try_get(self, key: str) -> str | None:
        """Returns the current value of ``key``, or None if there is none."""
        try:
            return self._client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def directory(self, prefix: str) -> dict[str, str]:
        """Returns all keys below ``prefix``, with ``prefix`` removed, and their values."""
        prefix = prefix.rstrip("/") + "/"
        return {key.removeprefix(prefix): value for key, value in self._client.key_value_dir_get(prefix)}

    def increment(self, key: str) -> int:
        """Adds one to the counter under ``key``, initially 0, and returns the new value. Atomic across hosts."""
        return self._client.key_value_increment(key, 1)

    def delete(self, key: str) -> None:
        """Deletes ``key`` and all keys below it; missing keys are not an error."""
        self._client.key_value_delete(key)


# A private API: if a later JAX renames a method, the store counts as missing instead of failing in mid-run.
_CLIENT_METHODS = (
    "key_value_set",
    "blocking_key_value_get",
    "key_value_try_get",
    "key_value_dir_get",
    "key_value_increment",
    "key_value_delete",
)


def _global_state() -> Any | None:
    try:
        from jax._src import distributed
    except ImportError:  # a private module, which a later JAX may move
        return None
    return getattr(distributed, "global_state", None)


def _client() -> Any | None:
    client = getattr(_global_state(), "client", None)
    return client if client is not None and all(hasattr(client, name) for name in _CLIENT_METHODS) else None


def key_value_store() -> KeyValueStore | None:
    """Returns the job's key-value store, or None without ``jax.distributed``."""
    client = _client()
    if client is None:
        return None
    _disown_in_children()
    return KeyValueStore(client)


def require_store() -> KeyValueStore:
    """Returns the job's key-value store, which a multi-process job requires.

    Raises:
      MeshfeedError: the job has no store, or this process is a forked child.
    """
    store = key_value_store()
    if store is not None:
        return store
    if _inherited:
        raise MeshfeedError(
            f"process {os.getpid()} is a forked child and has no connection of its own to the other hosts. Use feeds and "
            "checkpoints that span hosts in the parent only."
        )
    if not is_distributed():
        raise MeshfeedError(
            f"JAX reports {process_count()} processes, but jax.distributed is not initialized, so hosts cannot report "
            "failures to each other. Call jax.distributed.initialize() before anything else."
        )
    raise MeshfeedError(
        f"meshfeed cannot find the key-value store of JAX {jax.__version__}, through which hosts report failures to each "
        "other. Upgrade meshfeed, or install an older version of JAX."
    )


_inherited: list[Any] = []  # in a forked child: the parent's connections, kept alive because a destructor closes them


@functools.cache  # fork handlers cannot be unregistered, so register only one
def _disown_in_children() -> None:
    os.register_at_fork(after_in_child=_disown_client)


def _disown_client() -> None:
    """Removes the parent's connection to the coordination service from JAX's global state in a forked child.

    The child shares the parent's socket. A single request from the child, such as the one that JAX's exit handler
    makes, breaks the parent's connection, and the child waits for a reply that never comes.
    """
    state = _global_state()
    for name in ("client", "service", "preemption_sync_manager"):
        if getattr(state, name, None) is not None:
            _inherited.append(getattr(state, name))
            setattr(state, name, None)


class _Counters:
    """Use counts per name, cleared when the job's coordination client is replaced (an in-process resize)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._counts: collections.Counter[str] = collections.Counter()

    def next(self, name: str) -> int:
        client = _client()
        with self._lock:
            previous = self._client() if self._client is not None else None
            if client is not previous:
                self._counts.clear()
                # Weak, to keep no replaced client alive; an id could be reused by its successor.
                try:
                    self._client = None if client is None else weakref.ref(client)
                except TypeError:  # a client type without weak references
                    self._client = None if client is None else (lambda: client)
            number = self._counts[name]
            self._counts[name] += 1
            return number


_counters = _Counters()


def next_use(name: str) -> int:
    """Returns 0, 1, 2, … for successive uses of ``name``; equal on all hosts that use names in the same order."""
    return _counters.next(name)


def wait_for_key(
    store: KeyValueStore,
    key: str,
    deadline: float,
    tick: Callable[[float], None] | None = None,
    *,
    num_waiting: int = 1,
) -> str | None:
    """Waits for ``key`` in slices until ``deadline``.

    Args:
      store: the store to query.
      key: the key to wait for.
      deadline: in seconds of ``time.monotonic()``.
      tick: called between slices with the seconds waited so far, for logging; may raise.
      num_waiting: number of hosts that wait at the same time. With thousands, each host polls less often.

    Returns:
      The value, or None if the key did not appear in time.
    """
    start = time.monotonic()
    shortest = min(_MAX_SLICE_SECONDS, max(_MIN_SLICE_SECONDS, num_waiting * _SLICE_SECONDS_A_HOST))
    while True:
        now = time.monotonic()
        slice_seconds = min(_MAX_SLICE_SECONDS, shortest + (now - start) / 4)
        # At least one request, even after the deadline.
        value = store.get(key, min(slice_seconds, max(deadline - now, 0.001)))
        if value is not None:
            return value
        if time.monotonic() >= deadline:
            return None
        if tick is not None:
            tick(time.monotonic() - start)


def wait_for_hosts(
    store: KeyValueStore,
    prefix: str,
    participants: Sequence[int],
    deadline: float,
    stop: Callable[[Mapping[int, str]], bool] | None = None,
    *,
    note: str | None = None,
) -> dict[int, str]:
    """Collects ``<prefix>/<host>`` until all participants have arrived, ``stop`` returns True, or the deadline passes.

    Lists the directory, blocks on one missing key (a blocked get costs the coordinator nothing), pauses while others
    arrive, and lists again. This takes few requests with thousands of hosts and adds no delay with few.

    Args:
      store: the store to query.
      prefix: prefix of the keys.
      participants: process indices of the hosts to wait for.
      deadline: in seconds of ``time.monotonic()``.
      stop: called with the values collected so far; returns True to stop waiting.
      note: key under which to store the missing hosts, for :func:`missing_hosts` on the hosts that wait for the result.
        If thousands of hosts listed the directory themselves, the coordinator would send all of it to each of them.

    Returns:
      Host → value of the hosts that arrived.
    """
    wanted = set(participants)
    noted: set[int] = set()
    next_note = time.monotonic() + _FIRST_NOTE_SECONDS
    pause = min(_MAX_PAUSE_SECONDS, len(wanted) * _PAUSE_SECONDS_A_HOST)
    while True:
        values = {int(host): value for host, value in store.directory(prefix).items() if int(host) in wanted}
        now = time.monotonic()
        left = deadline - now
        if len(values) == len(wanted):
            if note is not None and noted:
                store.delete(note)
            return values
        late = wanted - set(values)
        # Rate-limited: the note only serves log and error messages.
        if note is not None and late != noted and (now >= next_note or left <= 0):
            store.set(note, json.dumps({"hosts": sorted(late)[:_NAMED_HOSTS], "count": len(late)}), overwrite=True)
            noted, next_note = late, now + _NOTE_SECONDS
        if (stop is not None and stop(values)) or left <= 0:
            return values
        missing = max(late)
        if store.get(f"{prefix.rstrip('/')}/{missing}", min(_MIN_SLICE_SECONDS, left)) is not None:
            time.sleep(pause)


class Patience:
    """How long to wait for other hosts: as long as one that is late resumes by reading and dropping and comes further.

    Costs no request before the time-out.

    Args:
      store: where to look.
      seconds: longest wait without progress.

    Attributes:
      deadline: on the clock of ``time.monotonic()``.
      resuming: hosts found to be resuming when last looked, and how far they had come.
    """

    def __init__(self, store: KeyValueStore, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self.deadline = time.monotonic() + seconds
        self.resuming: dict[int, str] = {}

    def renew(self, late: Sequence[int]) -> bool:
        """Whether there was progress since the last look, here or by arriving; then the deadline is a new one.

        Args:
          late: hosts that are waited for, of which the first 8 are looked at.
        """
        before = self.resuming
        found = {host: self._store.try_get(_resuming_key(host)) for host in late[:_NAMED_HOSTS]}
        self.resuming = {host: text for host, text in found.items() if text is not None}
        moved = any(before.get(host) != text for host, text in self.resuming.items()) or not (
            before.keys() <= self.resuming.keys()  # one that no longer resumes has come to its end, or arrived
        )
        if moved:
            self.deadline = time.monotonic() + self._seconds
        return moved

    def notes(self) -> str:
        """What the late hosts were doing, in brackets, for messages; empty if that is not known."""
        return (
            f" ({'; '.join(f'host {host} is {text}' for host, text in self.resuming.items())})" if self.resuming else ""
        )


class ProgressReport:
    """Publishes how far this host has come with resuming by reading and dropping, for the :class:`Patience` of others.

    Nothing is published where nothing is dropped.

    Args:
      store: where to; None if nobody waits.
      timeout_seconds: of those that wait.
    """

    def __init__(self, store: KeyValueStore | None, timeout_seconds: float) -> None:
        self._store = store
        self._pause = min(_REPORT_SECONDS, timeout_seconds / 4)
        self._said, self._next = "", 0.0

    def update(self) -> None:
        """Publishes what has changed, at most every few seconds."""
        text, now = str(PROGRESS), time.monotonic()
        if self._store is not None and text not in ("", self._said) and now >= self._next:
            self._said, self._next = text, now + self._pause
            self._store.set(_resuming_key(process_index()), text, overwrite=True)

    def end(self) -> None:
        """Takes it away."""
        if self._store is not None and self._said:
            self._said = ""
            with contextlib.suppress(Exception):  # the coordinator is gone; what ends the wait is the error to report
                self._store.delete(_resuming_key(process_index()))


def _resuming_key(host: int) -> str:
    """One key a host for all its feeds: what waits for the host does not know which of them keeps it busy."""
    return f"meshfeed/resuming/{host}"


def missing_hosts(store: KeyValueStore, prefix: str, note: str, reducer: int) -> tuple[tuple[int, ...], int]:
    """Finds the hosts that :func:`wait_for_hosts` on the host ``reducer`` still waits for, in a few requests.

    Returns:
      Up to 8 hosts without a key ``<prefix>/<host>``, and the total number of missing hosts. Both are empty or 0 if the
      reducer has arrived and has reported no missing host.
    """
    text = store.try_get(note)
    found = {"hosts": [reducer], "count": 1} if text is None else json.loads(text)
    late = tuple(host for host in found["hosts"] if store.try_get(f"{prefix.rstrip('/')}/{host}") is None)
    return late, found["count"] - len(found["hosts"]) + len(late)


def format_missing(hosts: Sequence[int], count: int) -> str:
    """Formats hosts for messages: ``hosts 1, 3 and 40 more``."""
    shown = hosts[:_NAMED_HOSTS]
    return format_hosts(shown) + (f" and {count - len(shown):,} more" if count > len(shown) else "")


def format_hosts(hosts: Sequence[int], limit: int = 8) -> str:
    """Formats hosts for messages: ``host 3`` or ``hosts 0, 1, 2, … (4,096 in all)``."""
    hosts = sorted(hosts)
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    shown = ", ".join(str(host) for host in hosts[:limit])
    return f"hosts {shown}" if len(hosts) <= limit else f"hosts {shown}, … ({len(hosts):,} in all)"


def call_briefly(function: Callable[[], None], *, name: str, at_exit: bool) -> None:
    """Calls a function that uses the coordination service, and waits at most two seconds for it.

    A coordinator that has exited may never reply, and closing must not block on it.

    Args:
      function: the function to call; its exceptions are logged at DEBUG.
      name: name of the thread.
      at_exit: whether to call it even if the interpreter is shutting down and can start no thread.
    """

    def call() -> None:
        try:
            function()
        except Exception as error:  # the job is being torn down
            _log.debug("%s: %s", name, error)

    thread = threading.Thread(target=call, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if at_exit:
            call()
    else:
        thread.join(_BRIEFLY_SECONDS)


def leave(store: KeyValueStore, prefix: str, num_hosts: int) -> None:
    """Marks this host as done with the keys below ``prefix``; the last of ``num_hosts`` hosts deletes them.

    Errors are only logged, and at interpreter exit nothing is done: leftover keys are harmless and end with the job.
    """

    def count() -> None:
        if store.increment(f"{prefix}/left") == num_hosts:
            store.delete(prefix)

    call_briefly(count, name="meshfeed-leave", at_exit=False)


def reduce_json(
    scope: str,
    round_number: int,
    value: Any,
    reduce: Callable[[dict[int, Any]], Any],
    *,
    participants: Sequence[int],
    timeout_seconds: float,
    doing: str,
) -> Any:
    """Reduces one JSON value per participant to a JSON result that all participants receive.

    The lowest participant reduces, which takes few requests per host. The keys are deleted once all participants have
    the result.

    Args:
      scope: name of the exchange; unique among concurrent exchanges.
      round_number: number of the call with this scope: 0, 1, 2, … on every participant.
      value: this host's value, JSON.
      reduce: maps host → value of all participants to the result; runs on the lowest participant only. If it raises,
        the other participants time out, so return errors as values.
      participants: process indices, equal on all hosts and including this host.
      timeout_seconds: how long to wait for the slowest host.
      doing: the operation, for the error message.

    Returns:
      The result, as decoded JSON on every participant, including the one that reduced.

    Raises:
      StalledError: some participants did not arrive; the message names them.
      MeshfeedError: there is no key-value store.
    """
    here = process_index()
    participants = sorted(participants)
    if participants == [here]:  # the JSON round trip gives the same types as with several hosts
        return json.loads(json.dumps(reduce({here: json.loads(json.dumps(value))})))
    store = require_store()
    prefix = f"meshfeed/{scope}/{round_number}"
    start = time.monotonic()
    patience = Patience(store, timeout_seconds)
    store.set(f"{prefix}/in/{here}", json.dumps(value), overwrite=True)
    missing: Sequence[int] = ()
    count, waiting = 0, True
    while waiting:
        if here == participants[0]:
            values = wait_for_hosts(store, f"{prefix}/in", participants, patience.deadline, note=f"{prefix}/late")
            if len(values) == len(participants):
                result = reduce({host: json.loads(text) for host, text in sorted(values.items())})
                text = json.dumps(result)
                store.set(f"{prefix}/out", text, overwrite=True)
                leave(store, prefix, len(participants))
                return json.loads(text)
            missing = [host for host in participants if host not in values]
            count = len(missing)
        else:
            text = wait_for_key(store, f"{prefix}/out", patience.deadline, num_waiting=len(participants))
            if text is not None:
                leave(store, prefix, len(participants))
                return json.loads(text)
            missing, count = missing_hosts(store, f"{prefix}/in", f"{prefix}/late", participants[0])
            # If every host has arrived, the result is missing, so the reducer is late.
            missing, count = (missing, count) if missing else ([participants[0]], 1)
        waiting = patience.renew(missing)
    waited = time.monotonic() - start
    raise StalledError(
        f"{doing}: {format_missing(missing, count)} did not arrive within {waited:.0f} s (host {here} of "
        f"{len(participants)} is waiting){patience.notes()}. Look at that host's log: it has stopped, is still starting, "
        "or runs other code than the rest.",
        hosts=tuple(missing),
        waited_seconds=waited,
    )
