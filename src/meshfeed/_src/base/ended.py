"""A host whose program ends tells those that may wait for it, now or later.

A host that fails before it has made its feed, say since a file is missing there, publishes nothing about that feed. Its
process does not go away either: at exit, JAX waits for the other processes, and these wait for its feed until their
timeout. So the last thing that a program does is to leave a note in the key-value store. Hosts that have waited for it
for a while look it up. Hosts that wait for it in a collective look up nothing; if an error has ended the program, the
heartbeat has them log that (:mod:`meshfeed._src.agreement.heartbeat`).

``import meshfeed`` loads this module, so it loads nothing itself.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshfeed._src.base.jax_internals import KeyValueStore

TOLD = "meshfeed/alive/told"
"""The directory of :func:`told_key`, below that of the counters of the heartbeat, so that one request lists both."""
_SHOWN_CHARACTERS = 300


def _key(host: int) -> str:
    return f"meshfeed/ended/{host}"


def told_key(host: int) -> str:
    """Returns the key of a line that the hosts of the same feeds are to log."""
    return f"{TOLD}/{host}"


def find_ended(store: KeyValueStore, hosts: Iterable[int]) -> dict[int, str]:
    """Returns which of some hosts have ended their program, and how, in words that follow "host 3 is". A request per host."""
    found = {host: store.try_get(_key(host)) for host in hosts}
    return {host: text for host, text in found.items() if text is not None}


def _tell() -> None:
    if "jax" not in sys.modules:
        return
    from meshfeed._src.base import jax_internals
    from meshfeed._src.base.coordination import call_briefly
    from meshfeed._src.base.errors import AgreementError, Failure, PeerError, StalledError, shorten, text_of

    store, place = jax_internals.key_value_store(), jax_internals.place_in_job()
    if store is None or place is None or place[1] == 1:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # what Python has printed
    how = "" if error is None else f" by {Failure(type(error).__name__, ' '.join(text_of(error).split()))}"
    ended = shorten(f"its program has ended{how}", _SHOWN_CHARACTERS)

    def tell() -> None:
        store.set(_key(place[0]), f"gone: {ended}", overwrite=True)
        if how and not isinstance(error, AgreementError | PeerError | StalledError):  # which the others have, too
            told = f"{ended.rstrip('.')}. Collectives with it cannot end."
            store.set(told_key(place[0]), told, overwrite=True)

    call_briefly(tell, name="meshfeed-ended", at_exit=True)


def tell_at_exit() -> None:
    """Has the note written at exit: once other threads have ended, and before JAX waits for the other processes."""
    early = getattr(threading, "_register_atexit", None)
    if early is None:
        atexit.register(_tell)  # before JAX waits if jax.distributed.initialize() was called before the import
        return
    with contextlib.suppress(RuntimeError):  # the interpreter already exits
        # Python calls this before it waits for threads, which may train. What is registered last runs first after that.
        early(lambda: atexit.register(_tell))
