"""Processes: their place in the job, the key-value store through which they exchange short texts.

Only this module queries JAX's process index and count. A single-process job needs no store. A multi-process job without
one is an error (:func:`require_store`): its hosts could not report failures to each other and would hang in the next
collective.

In a job of several processes without ``jax.distributed.initialize()``, each process acts as the whole job: it reads all
of the data and writes to the same checkpoint folder. :func:`forgotten_processes` detects this from the launcher's
environment variables, but only from those set per task: in a Slurm batch script or an interactive ``salloc`` shell,
``SLURM_NTASKS`` is the size of the allocation, and a single process is correct there.
"""

from __future__ import annotations

import atexit
import collections
import functools
import itertools
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshfeed._src.base import jax_internals
from meshfeed._src.base.errors import MeshfeedError, shorten
from meshfeed._src.base.jax_internals import KeyValueStore, key_value_store

_BRIEFLY_SECONDS = 2.0
NAMED_HOSTS = 8
"""Messages stay short in jobs with thousands of hosts."""
INDEPENDENT = "MESHFEED_INDEPENDENT_PROCESSES"
SHARED_LOOKUP = "MESHFEED_SHARED_LOOKUP"
"""``0`` in the environment: every host looks at every file, and reads what identifies each source."""
_COUNTS = (
    "SLURM_STEP_NUM_TASKS",  # set by srun; absent outside a step, and 1 in an interactive step
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "PMI_SIZE",
)
_TPU_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # set in the pods of an indexed Kubernetes Job, hence also of a JobSet
_log = logging.getLogger("meshfeed.process")


def process_index() -> int:
    """Index of this process in the job."""
    import jax  # here and below, since workers load this module and need no JAX

    return jax.process_index()


def process_count() -> int:
    """Number of processes in the job."""
    import jax

    return jax.process_count()


def place_in_job() -> tuple[int, int] | None:
    """Returns the index of this process and the number of processes; None if it cannot reach the others.

    Unlike :func:`process_index`, does not initialize the backend, which waits for all other processes.
    """
    if jax_internals.substitute_client() is not None:  # used only once there is a backend
        return process_index(), process_count()
    return jax_internals.place_in_job()


def is_distributed() -> bool:
    """Whether ``jax.distributed.initialize()`` was called."""
    import jax

    return jax.distributed.is_initialized()


def require_store() -> KeyValueStore:
    """Returns the job's key-value store, which a multi-process job requires.

    Raises:
      MeshfeedError: the job has no store, or this process is a forked child.
    """
    store = key_value_store()
    if store is not None:
        _finish_at_exit()
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
    import jax

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
    """Returns 0, 1, 2, … for successive uses of ``name``; equal on all hosts that use it equally often."""
    return _counters.next(name)


def label_of(participants: Sequence[int]) -> str:
    """Returns a short text for a set of hosts, the same on all of them: ``""`` for all hosts of the job.

    Others are ``host-3``, ``hosts-0-511`` for a range, and ``hosts-`` with a digest of any other set.
    """
    hosts = sorted(set(participants))
    if hosts == list(range(process_count())):
        return ""
    if len(hosts) == 1:
        return f"host-{hosts[0]}"
    if hosts == list(range(hosts[0], hosts[-1] + 1)):
        return f"hosts-{hosts[0]}-{hosts[-1]}"
    return f"hosts-{zlib.crc32(repr(hosts).encode()):08x}"


def next_name(kind: str, participants: Sequence[int]) -> str:
    """Returns the next default name, such as ``feed-0``, or ``feed-0-of-host-3`` if other hosts do not take part.

    Counted per set of participants: what only some hosts create must not shift the names of what others wait for.
    """
    label = label_of(participants)
    number = next_use(f"{kind} {label}")
    return f"{kind}-{number}" + (f"-of-{label}" if label else "")


def next_scope(name: str, participants: Sequence[int]) -> str:
    """Returns a key prefix for the next use of ``name`` by these hosts, the same on all of them."""
    label = label_of(participants)
    key = f"{name}/{label}" if label else name
    return f"{key}/{next_use(key)}"


def format_hosts(hosts: Sequence[int]) -> str:
    """Formats hosts for messages: ``host 3`` or ``hosts 0, 1, 2, … (4,096 in all)``."""
    hosts = sorted(hosts)
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    shown = ", ".join(str(host) for host in hosts[:NAMED_HOSTS])
    return f"hosts {shown}" if len(hosts) <= NAMED_HOSTS else f"hosts {shown}, … ({len(hosts):,} in all)"


def format_differences(values: Mapping[int, str], limit: int | None = None) -> str | None:
    """Formats values by host, such as ``host 0: a; hosts 1, 2: b``, up to a number of characters each; None if equal."""
    groups: dict[str, list[int]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    if len(groups) < 2:
        return None
    shared = len([*itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*groups, strict=False))])
    if limit is not None and shared > limit // 2 and max(map(len, groups)) > limit:  # what differs may be beyond it
        groups = {f"...{value[shared - limit // 4 :]}": hosts for value, hosts in groups.items()}
    return "; ".join(f"{format_hosts(hosts)}: {shorten(value, limit or len(value))}" for value, hosts in groups.items())


def call_briefly(function: Callable[[], None], *, name: str, at_exit: bool) -> None:
    """Calls a function that uses the coordination service, and waits at most two seconds for it.

    A coordinator that has exited may never reply, and closing must not block on it. Exceptions are logged at DEBUG. With
    ``at_exit``, calls it even if the interpreter is shutting down and cannot start a thread.
    """
    thread = _start_call(function, name)
    if thread is not None:
        thread.join(_BRIEFLY_SECONDS)
    elif at_exit:
        _call(function, name)


def call_in_background(function: Callable[[], None], *, name: str) -> None:
    """Like :func:`call_briefly`, but waits only when the interpreter exits, for all such calls together."""
    _finish_at_exit()
    thread = _start_call(function, name)
    if thread is not None:
        _background_calls.add(thread)


_background_calls: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@functools.cache
def _finish_at_exit() -> None:
    """Has the calls of :func:`call_in_background` waited for before JAX, which is there by now, ends the service at exit."""
    atexit.register(finish_calls)


def finish_calls() -> None:
    """Waits at most two seconds for the calls of :func:`call_in_background`."""
    deadline = time.monotonic() + _BRIEFLY_SECONDS
    for thread in list(_background_calls):
        thread.join(max(0.0, deadline - time.monotonic()))


def _start_call(function: Callable[[], None], name: str) -> threading.Thread | None:
    thread = threading.Thread(target=_call, args=(function, name), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        return None
    return thread


def _call(function: Callable[[], None], name: str) -> None:
    try:
        function()
    except Exception as error:  # the job is being torn down
        _log.debug("%s: %s", name, error)


def other_processes(environment: Mapping[str, str], *, on_tpu: bool) -> str | None:
    """Returns a variable and value that imply more than one process, such as ``"OMPI_COMM_WORLD_SIZE=4"``, or None."""
    if environment.get(INDEPENDENT, "0") not in ("", "0"):
        return None
    found = [name for name in _COUNTS if _number(environment.get(name)) > 1]
    if _number(environment.get(_COMPLETION_INDEX)) > 0:  # the first pod, 0, cannot infer whether there are others
        found.append(_COMPLETION_INDEX)
    if on_tpu:
        found += [name for name in _TPU_LISTS if "," in environment.get(name, "")]
        found += ["MEGASCALE_NUM_SLICES"] if _number(environment.get("MEGASCALE_NUM_SLICES")) > 1 else []
    return f"{found[0]}={environment[found[0]]}" if found else None


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else 0


def forgotten_processes() -> str | None:
    """Returns a message about processes missing from the JAX job, with the fix; None if there are none."""
    import jax

    if process_count() > 1 or is_distributed():
        return None
    if (shown := other_processes(os.environ, on_tpu=jax.default_backend() == "tpu")) is None:
        return None
    return (
        f"{shown} shows that this job has several processes, but JAX sees only this one. Call jax.distributed.initialize() "
        f"before anything else. If the processes are meant to be independent jobs, set the environment variable "
        f"{INDEPENDENT}=1."
    )


@functools.cache
def warn_if_forgotten() -> None:
    """Logs a warning, once per process, if this process reads all of the data although the job has others."""
    if (text := forgotten_processes()) is not None:
        logging.getLogger("meshfeed.feed").warning("each process reads all of the data: %s", text)
