"""Process indices, and the coordination service's key-value store, through which hosts exchange short texts.

No other module asks JAX for either. JAX has no public key-value API, so the client is taken from
``jax._src.distributed.global_state``. A single-process job needs no client. A multi-process job without one is an error
(:func:`require_store`), because its hosts could not report failures to each other and would hang in the next
collective.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshfeed._src.base.errors import MeshfeedError

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
