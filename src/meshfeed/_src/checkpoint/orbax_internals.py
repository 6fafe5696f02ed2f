"""The private parts of Orbax that meshfeed uses, and the fallbacks for versions of Orbax without them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import orbax.checkpoint as ocp

from meshfeed._src.base.jax_internals import coordination_client
from meshfeed._src.base.threads import SingleCall

_log = logging.getLogger("meshfeed.checkpoint")

JSON_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.json_handler.JsonHandler"
"""The name under which Orbax v1 finds its JSON handler, even in a process that never imports meshfeed.

In Orbax v0 only our class has this name, so v0 uses our class. It is written into checkpoints and must not change. An
Orbax v1 that does not find the name reads the item only if it is given a handler.
"""

SHARDINGS = "_sharding"
"""The file of an item in which Orbax keeps shardings; arrays are restored without them if there is none."""


def sharding_writer() -> Callable[..., Coroutine[Any, Any, None]] | None:
    """Returns the function that writes Orbax's file of shardings, from which a restore without shardings takes them.

    Its keywords are ``shardings``, ``infos`` of the parameters, and ``primary_host``, which writes, or None for all.

    Returns None if this version of Orbax has no such function. Orbax then writes the file itself, with the shardings of
    the slices that it gets; meshfeed still restores those that were saved.
    """
    try:
        from orbax.checkpoint._src.serialization.jax_array_handlers import _async_serialize_shardings
    except ImportError:
        _log.warning(
            "Orbax %s writes shardings elsewhere; without meshfeed, it will restore arrays saved now, if it is given no "
            "shardings, divided among the replicas that shared their writing",
            ocp.__version__,
        )
        return None
    return _async_serialize_shardings


def follow_job() -> None:
    """Has Orbax signal through the coordination service of this job: it keeps the first client that it has used.

    That of an earlier job, which ``jax.distributed.shutdown()`` ended, has no service any more. Without these private names,
    a save in the second job of a process fails, and its error says to restart the job.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from orbax.checkpoint._src.futures import signaling_client

        cached = signaling_client.get_signaling_client
        if getattr(cached(), "_client", None) is not coordination_client():
            cached.cache_clear()


def _operations() -> Any | None:
    try:
        from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator
    except ImportError:
        return None
    return OperationIdGenerator


def operation_number() -> int:
    """Returns the number of Orbax's last operation in this process, under which it signals; 0 if that cannot be found."""
    operations = _operations()
    return 0 if operations is None else int(operations.get_current_operation_id())


def count_operations(number: int) -> None:
    """Raises the number of Orbax's last operation in this process to the highest of all hosts.

    Each process counts its own. A host with another number, such as one that has joined the job later or has saved alone,
    does not wait for the folder of a step. What it writes before the folder is made is removed then, and the step committed.
    """
    operations = _operations()
    while operations is not None and operation_number() < number:
        operations.next_operation_id()


def discard_errors(manager: Any) -> None:
    """Waits for the parts of a failed save, and discards their errors; Orbax would raise them in the next save or ``close``.

    Without this private attribute, errors that come within the next moments are raised there.
    """
    with contextlib.suppress(Exception):  # on another thread for the reason in wait_until_finished
        SingleCall(getattr(manager, "_checkpointer", manager).wait_until_finished, "meshfeed-discard-errors").result()


def metadata_store() -> Any | None:
    """Returns Orbax's store for the implementation of PRNG keys, with which plain Orbax can restore keys saved here.

    Returns None if this version of Orbax has no such class. Plain Orbax then restores such keys as their uint32 data, and
    meshfeed still restores keys.
    """
    try:
        from orbax.checkpoint._src.metadata.array_metadata_store import Store
    except ImportError:
        _log.warning(
            "Orbax %s stores the metadata of arrays elsewhere; without meshfeed, it will restore PRNG keys saved now as "
            "their uint32 data",
            ocp.__version__,
        )
        return None
    return Store()
