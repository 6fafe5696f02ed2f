"""The only module that knows process indices, the coordination service's key-value store, and barriers.

JAX has no public key-value interface, so the client is reached through ``jax._src.distributed.global_state``. A job of
one process needs no client. A job of several processes without one is refused (:func:`require_store`): its hosts could
not report failures to each other, and would hang in the next collective.
"""

from __future__ import annotations

import collections
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

_MIN_SLICE_SECONDS = 0.5  # a blocking get is cut into slices so that Ctrl-C, close and deadlines are noticed …
_MAX_SLICE_SECONDS = 2.0  # … which grow, so that thousands of hosts in a long wait do not flood the coordinator
_SLICE_SECONDS_A_HOST = 5e-4
_PAUSE_SECONDS_A_HOST = 2.5e-5
_MAX_PAUSE_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 0.2
_NOTE_SECONDS = 1.0
_NAMED_HOSTS = 8
_BRIEFLY_SECONDS = 2.0
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

    def increment(self, key: str) -> int:
        """Adds one to the number under ``key``, which starts at 0, and returns it; atomic over all hosts."""
        return self._client.key_value_increment(key, 1)

    def delete(self, key: str) -> None:
        """Removes ``key`` and everything below it; absent keys are no error."""
        self._client.key_value_delete(key)


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
    except ImportError:  # a later JAX that moved it
        return None
    return getattr(distributed, "global_state", None)


def _client() -> Any | None:
    client = getattr(_global_state(), "client", None)
    return client if client is not None and all(hasattr(client, name) for name in _CLIENT_METHODS) else None


def key_value_store() -> KeyValueStore | None:
    """The job's key-value store, or None without ``jax.distributed``."""
    client = _client()
    if client is None:
        return None
    _disown_in_children()
    return KeyValueStore(client)


def require_store() -> KeyValueStore:
    """The job's key-value store, which several processes cannot do without.

    Raises:
      MeshfeedError: there is none.
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


_inherited: list[Any] = []  # in a forked child: the parent's connections, kept so that no destructor closes them


@functools.cache
def _disown_in_children() -> None:
    os.register_at_fork(after_in_child=_disown_client)


def _disown_client() -> None:
    """Puts the parent's connection to the coordination service out of reach of a forked child.

    The child shares its socket: a single request from the child, which JAX's own exit function makes, breaks the
    connection of the parent, and the child then waits for an answer that never comes.
    """
    state = _global_state()
    for name in ("client", "service", "preemption_sync_manager"):
        if getattr(state, name, None) is not None:
            _inherited.append(getattr(state, name))
            setattr(state, name, None)


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


def call_briefly(function: Callable[[], None], *, name: str, at_exit: bool) -> None:
    """Calls a function that talks to the coordination service, and waits at most two seconds for it.

    A coordinator that is gone may never answer, and closing must not wait for that.

    Args:
      function: what it raises is logged at DEBUG.
      name: of the thread.
      at_exit: call it also if the interpreter is shutting down and starts no thread.
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
    """Each of ``num_hosts`` hosts calls this once it is done with the keys below ``prefix``; the last one deletes them.

    An error is only logged, and at exit nothing is done: keys that stay do no harm, and end with the job.
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
    """Every participant gives a JSON value, one of them reduces, all receive the JSON result.

    The lowest participant reduces, so that the coordination service sees few requests per host. No key is left behind
    once all participants have the result.

    Args:
      scope: names the exchange; unique among exchanges under way at the same time.
      round_number: counts the calls with this scope: 0, 1, 2, … on every participant.
      value: this host's part, JSON.
      reduce: host → value of all participants, to the result; runs on the lowest participant only. What it raises is
        raised there, and the others time out, so return errors as values.
      participants: process indices, the same on each host, this host's included.
      timeout_seconds: how long to wait for the slowest host.
      doing: what is being agreed, for the error.

    Raises:
      StalledError: some participants did not arrive; it names them.
      MeshfeedError: there is no key-value store.
    """
    here = process_index()
    participants = sorted(participants)
    if participants == [here]:
        return json.loads(json.dumps(reduce({here: json.loads(json.dumps(value))})))
    store = require_store()
    prefix = f"meshfeed/{scope}/{round_number}"
    start = time.monotonic()
    deadline = start + timeout_seconds
    store.set(f"{prefix}/in/{here}", json.dumps(value), overwrite=True)
    if here == participants[0]:
        values = wait_for_hosts(store, f"{prefix}/in", participants, deadline, note=f"{prefix}/late")
        if len(values) == len(participants):
            result = reduce({host: json.loads(text) for host, text in sorted(values.items())})
            text = json.dumps(result)
            store.set(f"{prefix}/out", text, overwrite=True)
            leave(store, prefix, len(participants))
            return json.loads(text)
        missing = [host for host in participants if host not in values]
        count = len(missing)
    else:
        text = wait_for_key(store, f"{prefix}/out", deadline, num_waiting=len(participants))
        if text is not None:
            leave(store, prefix, len(participants))
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
