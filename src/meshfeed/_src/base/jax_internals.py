"""The private parts of JAX that meshfeed uses, and the fallbacks for versions of JAX without them.

JAX has no public access to the key-value store of its coordination service. Without the client, a multi-process job
raises an error (``coordination.py``). Without ``batched_device_put``, arrays are assembled through the public API.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax

FastCall: TypeAlias = "Callable[..., jax.Array]"
_log = logging.getLogger("meshfeed.put")


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


# If a later JAX renames a method, the store counts as missing at startup instead of failing mid-run.
_CLIENT_METHODS = (
    "key_value_set",
    "blocking_key_value_get",
    "key_value_try_get",
    "key_value_dir_get",
    "key_value_increment",
    "key_value_delete",
)


def _global_state() -> Any | None:
    if "jax" not in sys.modules:  # a worker, which has joined no job
        return None
    try:
        from jax._src import distributed
    except ImportError:
        return None
    return getattr(distributed, "global_state", None)


_substitutes: list[Any] = []  # at most one


def substitute(client: Any) -> None:
    """Has ``client``, an object with the same methods, stand in for the coordination service that JAX lacks here."""
    _substitutes[:] = [client]


def substitute_client() -> Any | None:
    """The object that was passed to :func:`substitute`, if any."""
    return _substitutes[0] if _substitutes else None


def _own_client() -> Any | None:
    client = getattr(_global_state(), "client", None)
    return client if client is not None and all(hasattr(client, name) for name in _CLIENT_METHODS) else None


def coordination_client() -> Any | None:
    """The job's client of the coordination service; None without ``jax.distributed``, or if JAX keeps it elsewhere."""
    return _own_client() or substitute_client()


def place_in_job() -> tuple[int, int] | None:
    """Returns the index of this process and the number of processes; None without ``jax.distributed``.

    Unlike ``jax.process_index``, does not initialize the backend, which waits for all other processes.
    """
    state = _global_state()
    index, number = getattr(state, "process_id", None), getattr(state, "num_processes", None)
    return None if index is None or number is None or _own_client() is None else (index, number)


def key_value_store() -> KeyValueStore | None:
    """Returns the job's key-value store, or None without ``jax.distributed``."""
    if (client := coordination_client()) is None:
        return None
    _disown_in_children()
    return KeyValueStore(client)


_inherited: list[Any] = []  # in a forked child: the parent's connections, kept alive because a destructor closes them


def has_inherited_client() -> bool:
    """Whether this process is a forked child of one with a coordination client."""
    return bool(_inherited)


@functools.cache  # fork handlers cannot be unregistered, so register only one
def _disown_in_children() -> None:
    os.register_at_fork(after_in_child=_disown_client)


def _disown_client() -> None:
    """Removes the parent's connection to the coordination service in a forked child, also from JAX's global state.

    The child shares the parent's socket. A single request from the child, such as the one that JAX's exit handler
    makes, breaks the parent's connection, and the child waits for a reply that never comes.
    """
    _inherited.extend(_substitutes)
    _substitutes.clear()
    state = _global_state()
    for name in ("client", "service", "preemption_sync_manager"):
        if getattr(state, name, None) is not None:
            _inherited.append(getattr(state, name))
            setattr(state, name, None)


_LOOKS, _LOOK_PAUSE_SECONDS = 50, 0.002


def probe_fast_call() -> FastCall | None:
    """Returns ``batched_device_put``, which underlies JAX's own transfers; None if missing or its parameters differ."""
    try:
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        call = xla_client.batched_device_put
    except (ImportError, AttributeError):
        return _report_slow()
    return call if _has_known_parameters(call) else _report_slow()


@functools.cache
def _has_known_parameters(call: Any) -> bool:
    """Whether the parameters of ``batched_device_put`` are those that meshfeed passes.

    It is a C++ function: they appear only in its docstring, "batched_device_put(aval: object, ...) -> object". JAX puts that
    text together at each look, in memory that it also uses for the texts of other functions and of errors, so what another
    thread does meanwhile may stand in it. One look that finds the names is enough.
    """
    for look in range(_LOOKS):
        names = re.findall(r"(\w+):", (call.__doc__ or "").partition("->")[0])
        if names[:5] == ["aval", "sharding", "xs", "devices", "committed"] and "enable_x64" in names:
            return True
        time.sleep(look and _LOOK_PAUSE_SECONDS)
    return False


@functools.cache  # once per process
def _report_slow() -> None:
    import jax

    _log.warning(
        "JAX %s has no batched_device_put with known parameters; arrays are assembled by the public "
        "make_array_from_callback, which is slower",
        jax.__version__,
    )


def find_trace_state_clean() -> Callable[[], bool]:
    """Returns JAX's check that its caller does not run below a transformation; always true if JAX does not tell."""
    try:
        from jax._src.core import trace_state_clean
    except ImportError:
        return lambda: True
    return trace_state_clean
