"""Probes of remote records, which the hosts of a feed divide among them.

A few records identify a source. If every host read those of each component of a mixture, a job would make
hosts × components × records requests before the first batch. So two hosts read each component, every host reads at least
one, and the others take what the two have found, if it is the same. The handshake then compares all of it, as if each host
had read everything.

Only records of files with the same listing are shared (URLs, sizes, versions, settings): a host that lists other files reads
them itself. Records on local disks, and what functions make of records, are never shared.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from meshfeed._src.base import coordination, hooks
from meshfeed._src.base.reduction import Reduction
from meshfeed._src.base.stores import is_url
from meshfeed._src.base.types import JsonValue, RandomAccessSource, StreamSource

_log = logging.getLogger("meshfeed.feed")
# Longer than a host needs to read all probes itself. The hosts of a feed wait for each other before the first batch anyway.
_WAIT_SECONDS = 30.0
_known: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("known", default=None)
_division: contextvars.ContextVar[Division | None] = contextvars.ContextVar("division", default=None)
S = TypeVar("S", bound="RandomAccessSource | StreamSource")


def probe_once(key: str, probe: Callable[[], str]) -> str:
    """Returns ``probe()``, the digest of some remote records, or what another host has found for the same ``key``."""
    known = _known.get()
    if known is None:
        return probe()
    if key not in known:
        known[key] = probe()
    return known[key]


def identify_each(sources: Mapping[str, S], identify: Callable[[S], JsonValue]) -> dict[str, JsonValue]:
    """Returns ``identify`` of each source; the probes of remote ones are divided if :func:`divided` applies."""
    division = _division.get() if _known.get() is None else None
    if division is None or not any(map(_is_remote, sources.values())):
        return {name: identify(source) for name, source in sources.items()}
    return division.identify(sources, identify)


def _is_remote(source: object) -> bool:
    named = hooks.find(source, hooks.FileNames)
    return named is not None and any(map(is_url, named.file_names()))


@contextlib.contextmanager
def divided(prefix: str, participants: Sequence[int]) -> Iterator[None]:
    """Divides the probes of sources that are identified within the ``with`` block.

    Args:
      prefix: of keys in the key-value store that the caller deletes, the same on all participants.
      participants: process indices of the hosts that identify the same sources, in the same order.
    """
    host, store = coordination.process_index(), coordination.key_value_store()
    # Two hosts both read everything.
    shares = len(participants) > 2 and host in participants and os.environ.get(coordination.SHARED_LOOKUP) != "0"
    division = Division(store, prefix, sorted(participants), host) if shares and store is not None else None
    token = _division.set(division)
    try:
        yield
    except BaseException:
        if division is not None:
            division.leave()
        raise
    finally:
        _division.reset(token)


class Division:
    """One host's side of the division; see :func:`divided`."""

    def __init__(self, store: coordination.KeyValueStore, prefix: str, participants: Sequence[int], host: int) -> None:
        self._store, self._prefix, self._participants, self._host = store, prefix, participants, host
        self._number = 0

    def identify(self, sources: Mapping[str, S], identify: Callable[[S], JsonValue]) -> dict[str, JsonValue]:
        """See :func:`identify_each`."""
        names, here, num_hosts = list(sources), self._participants.index(self._host), len(self._participants)
        mine = [n for n in range(len(names)) if (here - n) % num_hosts < 2] or [here % len(names)]
        publishers = self._participants[: len(names) + 1]  # the two readers of each component
        reduction = Reduction(self._store, f"{self._prefix}/{self._number}", publishers, self._host)
        self._number += 1
        known: dict[str, str] = {}
        token = _known.set(known)
        try:
            found = {names[n]: identify(sources[names[n]]) for n in mine}
            # What this host has read itself stays: the handshake compares it.
            known |= {**_exchange(reduction, known if self._host in publishers else None), **known}
            return {name: found[name] if name in found else identify(sources[name]) for name in names}
        except BaseException:
            with contextlib.suppress(Exception):  # must not mask the error
                _give_up(reduction, publishes=self._host in publishers)
            raise
        finally:
            _known.reset(token)

    def leave(self) -> None:
        """Lets the other hosts go on without this one, if it fails before it has identified anything."""
        if self._number == 0:
            reduction = Reduction(self._store, f"{self._prefix}/0", self._participants, self._host)
            with contextlib.suppress(Exception):  # must not mask the error
                _give_up(reduction, publishes=True)


def _exchange(reduction: Reduction, known: Mapping[str, str] | None) -> Mapping[str, str]:
    """Publishes what this host has read, unless it is None, and returns what all hosts have published."""
    deadline = time.monotonic() + _WAIT_SECONDS
    try:
        if known is not None:
            reduction.publish(dict(known))
        if not reduction.is_reducer:
            announcement = reduction.wait(deadline)
            return {} if announcement is None else announcement["result"]
        return reduction.announce(_agreed(reduction.collect(deadline).values()))["result"]
    except Exception as error:  # of the key-value store
        _log.warning("hosts cannot share what identifies remote data (%s); reading all of it here", error)
        return {}


def _agreed(values: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Returns the digests on which all that read the same records agree.

    Every host reads the other records itself. Otherwise the handshake would name the wrong hosts: those that took the digest
    of a host with different data would seem to have the same data.
    """
    found: dict[str, set[str]] = {}
    for known in values:
        for key, digest in known.items():
            found.setdefault(key, set()).add(digest)
    return {key: next(iter(digests)) for key, digests in found.items() if len(digests) == 1}


def _give_up(reduction: Reduction, *, publishes: bool) -> None:
    """Lets the other hosts read what this one cannot, without waiting for it."""
    if reduction.is_reducer and reduction.announced() is None:
        reduction.announce({})
    elif publishes:
        reduction.publish({})
