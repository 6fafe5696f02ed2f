"""Process indices, and the coordination service's key-value store, through which hosts exchange short texts.

Only this module queries JAX's process index and count. A single-process job needs no store. A multi-process job without
one is an error (:func:`require_store`): its hosts could not report failures to each other and would hang in the next
collective.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshfeed._src.base import jax_internals
from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.jax_internals import KeyValueStore, key_value_store

_BRIEFLY_SECONDS = 2.0
_log = logging.getLogger("meshfeed.process")

place_in_job = jax_internals.place_in_job


def process_index() -> int:
    """Index of this process in the job."""
    return jax.process_index()


def process_count() -> int:
    """Number of processes in the job."""
    return jax.process_count()


def is_distributed() -> bool:
    """Whether ``jax.distributed.initialize()`` was called."""
    return jax.distributed.is_initialized()


def require_store() -> KeyValueStore:
    """Returns the job's key-value store, which a multi-process job requires.

    Raises:
      MeshfeedError: the job has no store, or this process is a forked child.
    """
    store = key_value_store()
    if store is not None:
        return store
    if jax_internals.has_inherited_client():
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


class _Counters:
    """Use counts per name, cleared when the job's coordination client is replaced (an in-process resize)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._counts: collections.Counter[str] = collections.Counter()

    def next(self, name: str) -> int:
        client = jax_internals.coordination_client()
        with self._lock:
            previous = self._client() if self._client is not None else None
            if client is not previous:
                self._counts.clear()
                # Weak, so that a replaced client can be freed. Its id() would not do: the successor may reuse it.
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
      at_exit: whether to call it even if the interpreter is shutting down and cannot start a thread.
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
