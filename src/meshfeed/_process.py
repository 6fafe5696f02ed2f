"""The only module that knows process indices, the coordination service's key-value store, and barriers.

JAX has no public key-value interface. The client is reached through ``jax._src.distributed.global_state``, which is
probed once; where it is missing (or the job has one process) :func:`key_value_store` returns None and the callers
fall back: one process needs no talk, several processes talk through ``jax.experimental.multihost_utils`` on the
caller's thread (:func:`reduce_json`).
"""

from __future__ import annotations

import collections
import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshfeed._errors import StalledError

_MIN_SLICE_SECONDS = 0.5  # a blocking get is cut into slices so that Ctrl-C, close and deadlines are noticed …
_MAX_SLICE_SECONDS = 2.0  # … which grow, so that thousands of hosts in a long wait do not flood the coordinator
_SLICE_SECONDS_A_HOST = 5e-4
_PAUSE_SECONDS_A_HOST = 2.5e-5
_MAX_PAUSE_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 0.2
_NOTE_SECONDS = 1.0
_NAMED_HOSTS = 8


def process_index() -> int:
    """Index of this process in the job."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes in the job."""
    return jax.process_count()


class KeyValueStore:
    """The coordination service's key-value store, with time-outs as None instead of exceptions.

    Thread-safe. Every call takes 0.2–0.8 ms and releases the GIL.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        """Stores ``value`` under ``key``."""
        self._client.key_value_set(key, value, allow_overwrite=overwrite)

    def get(self, key: str, seconds: float) -> str | None:
        """Waits up to ``seconds`` for ``key``; None if it did not appear."""
        try:
            return self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error) or "timed out" in str(error).lower():
                return None
            raise

    def try_get(self, key: str) -> str | None:
        """The value of ``key`` now, or None."""
        try:
            return self._client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def directory(self, prefix: str) -> dict[str, str]:
        """All keys below ``prefix``, with ``prefix`` taken off, and their values."""
        prefix = prefix.rstrip("/") + "/"
        return {key.removeprefix(prefix): value for key, value in self._client.key_value_dir_get(prefix)}

    def delete(self, key: str) -> None:
        """Removes ``key`` and everything below it; absent keys are no error."""
        self._client.key_value_delete(key)


def _client() -> Any | None:
    try:
        from jax._src import distributed
    except ImportError:  # a later JAX that moved it: callers use the public fall-back
        return None
    client = getattr(getattr(distributed, "global_state", None), "client", None)
    wanted = ("key_value_set", "blocking_key_value_get", "key_value_try_get", "key_value_dir_get", "key_value_delete")
    return client if client is not None and all(hasattr(client, name) for name in wanted) else None


def key_value_store() -> KeyValueStore | None:
    """The job's key-value store, or None without ``jax.distributed``."""
    client = _client()
    return None if client is None else KeyValueStore(client)


class _Counters:
    """Numbers of uses per name, forgotten when the job's coordination client is replaced (an in-process resize)."""

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
                try:
                    self._client = None if client is None else weakref.ref(client)
                except TypeError:  # a client type without weak references
                    self._client = None if client is None else (lambda: client)
            number = self._counts[name]
            self._counts[name] += 1
            return number


_counters = _Counters()


def next_use(name: str) -> int:
    """0, 1, 2, … for each use of ``name`` in this process; equal on all hosts that use names in the same order."""
    return _counters.next(name)


def wait_for_key(
    store: KeyValueStore,
    key: str,
    deadline: float,
    tick: Callable[[float], None] | None = None,
    *,
    num_waiting: int = 1,
) -> str | None:
    """Waits for ``key`` until ``deadline`` (``time.monotonic()``), in slices; None if it did not come.

    Args:
      store: where to look.
      key: what to wait for.
      deadline: on the clock of ``time.monotonic()``.
      tick: called between slices with the seconds waited so far, for logs; may raise.
      num_waiting: hosts that wait for such a key at the same time. Of thousands each asks again less often.
    """
    start = time.monotonic()
    shortest = min(_MAX_SLICE_SECONDS, max(_MIN_SLICE_SECONDS, num_waiting * _SLICE_SECONDS_A_HOST))
    while True:
        now = time.monotonic()
        slice_seconds = min(_MAX_SLICE_SECONDS, shortest + (now - start) / 4)
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
    """Collects ``<prefix>/<host>`` until all participants are there, ``stop`` says so, or the deadline passes.

    Lists what is there, waits for one that is not (a blocked get costs the coordinator nothing), and lists again after a
    pause in which others arrive: a few requests for thousands of hosts, and no delay for few.

    Args:
      store: where to look.
      prefix: of the keys.
      participants: hosts to wait for.
      deadline: on the clock of ``time.monotonic()``.
      stop: called with what is there.
      note: key under which :func:`missing_hosts` finds who is missing, on hosts that wait for the outcome. If each of
        thousands listed what is there, the coordinator would have to send all of it to all of them.
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
        if note is not None and late != noted and (now >= next_note or left <= 0):
            store.set(note, json.dumps({"hosts": sorted(late)[:_NAMED_HOSTS], "count": len(late)}), overwrite=True)
            noted, next_note = late, now + _NOTE_SECONDS
        if (stop is not None and stop(values)) or left <= 0:
            return values
        missing = max(late)
        if store.get(f"{prefix.rstrip('/')}/{missing}", min(_MIN_SLICE_SECONDS, left)) is not None:
            time.sleep(pause)


def missing_hosts(store: KeyValueStore, prefix: str, note: str, reducer: int) -> tuple[tuple[int, ...], int]:
    """Who keeps :func:`wait_for_hosts` on the host ``reducer`` waiting, in a few requests.

    Returns:
      Hosts of which there is no ``<prefix>/<host>``, at most 8, and how many there are in all. None where the reducer
      itself has come and names nobody.
    """
    text = store.try_get(note)
    found = {"hosts": [reducer], "count": 1} if text is None else json.loads(text)
    late = tuple(host for host in found["hosts"] if store.try_get(f"{prefix.rstrip('/')}/{host}") is None)
    return late, found["count"] - len(found["hosts"]) + len(late)


def format_missing(hosts: Sequence[int], count: int) -> str:
    """``hosts 1, 3 and 40 more``, for messages."""
    shown = hosts[:_NAMED_HOSTS]
    return format_hosts(shown) + (f" and {count - len(shown):,} more" if count > len(shown) else "")


def format_hosts(hosts: Sequence[int], limit: int = 8) -> str:
    """``host 3`` or ``hosts 0, 1, 2 … (4,096 in all)``, for messages."""
    hosts = sorted(hosts)
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    shown = ", ".join(str(host) for host in hosts[:limit])
    return f"hosts {shown}" if len(hosts) <= limit else f"hosts {shown}, … ({len(hosts):,} in all)"


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
    """Every participant gives a JSON value, one of them reduces, all receive the JSON result.

    The lowest participant reduces, so that the coordination service sees one put and one get a host. Call it with the
    same ``scope`` and the round numbers 0, 1, 2, … on every participant.

    Args:
      scope: names the exchange; unique among exchanges under way at the same time.
      round_number: counts the calls with this scope.
      value: this host's part, JSON.
      reduce: host → value of all participants, to the result; runs on the lowest participant only. What it raises is
        raised there, and the others time out, so return errors as values.
      participants: process indices, the same on each host, this host's included.
      timeout_seconds: how long to wait for the slowest host.
      doing: what is being agreed, for the error.

    Raises:
      StalledError: some participants did not arrive; it names them.
    """
    here = process_index()
    participants = sorted(participants)
    if participants == [here]:
        return json.loads(json.dumps(reduce({here: json.loads(json.dumps(value))})))
    store = key_value_store()
    if store is None:
        return _reduce_by_allgather(value, reduce, participants)
    base = f"meshfeed/{scope}"
    prefix = f"{base}/{round_number}"
    start = time.monotonic()
    deadline = start + timeout_seconds
    store.set(f"{prefix}/in/{here}", json.dumps(value), overwrite=True)
    if here == participants[0]:
        values = wait_for_hosts(store, f"{prefix}/in", participants, deadline, note=f"{prefix}/late")
        if len(values) == len(participants):
            result = reduce({host: json.loads(text) for host, text in sorted(values.items())})
            store.set(f"{prefix}/out", json.dumps(result), overwrite=True)
            if round_number:  # everybody has come to this round, so everybody has read the last one's result
                store.delete(f"{base}/{round_number - 1}")
            return json.loads(json.dumps(result))
        missing = [host for host in participants if host not in values]
        count = len(missing)
    else:
        text = wait_for_key(store, f"{prefix}/out", deadline, num_waiting=len(participants))
        if text is not None:
            return json.loads(text)
        missing, count = missing_hosts(store, f"{prefix}/in", f"{prefix}/late", participants[0])
        missing, count = (missing, count) if missing else ([participants[0]], 1)
    waited = time.monotonic() - start
    raise StalledError(
        f"{doing}: {format_missing(missing, count)} did not arrive within {waited:.0f} s (host {here} of "
        f"{len(participants)} is waiting). Look at that host's log: it has stopped, is still starting, or runs other code "
        "than the rest.",
        hosts=tuple(missing),
        waited_seconds=waited,
    )


def _reduce_by_allgather(value: Any, reduce: Callable[[dict[int, Any]], Any], participants: Sequence[int]) -> Any:
    """Public fall-back over ``process_allgather``: all processes of the job must call it, with no deadline."""
    import numpy as np
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size], np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    values = {host: json.loads(bytes(rows[host, : sizes[host]]).decode()) for host in participants}
    return json.loads(json.dumps(reduce(values)))
