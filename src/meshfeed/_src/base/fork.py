"""Keeps copies of an object that owns resources from releasing what belongs to the original.

A fork copies every object but no threads, and shares sockets, locks and child processes with the parent. A child that ran
its parent's finalizers would close, on all hosts, a feed that the parent still uses. An object that owns resources therefore
records the process that created it (:class:`Owner`), and its copies in forked children release nothing. Other copies are
refused (:class:`NotCopied`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex, TypeAlias

from meshfeed._src.base.errors import MeshfeedError, hides_own_frames


class Owner:
    """The process that created an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that created the object; False in a forked child."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Raises a MeshfeedError about ``what`` in a forked child."""
        if not self.is_here:
            raise MeshfeedError(
                f"{what} belongs to process {self._pid} and cannot be used in its forked child {os.getpid()}, which has "
                "none of its threads and connections. Create a new one in the child, or start the child with "
                'multiprocessing\'s "spawn" method.'
            )

    def call(self, function: Callable[..., Any], *args: object) -> None:
        """Calls ``function`` unless this is a forked child."""
        if self.is_here:
            function(*args)


class NotCopied:
    """Base of objects with threads, processes or device arrays: ``copy`` and ``pickle`` raise a TypeError.

    A shallow copy would share them with the original, and closing either would end both.
    """

    @hides_own_frames
    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = vars(self).get("name") or f"a {type(self).__name__}"
        state = ", and pass it this one's get_state() with set_state" if hasattr(type(self), "set_state") else ""
        raise TypeError(
            f"{name} has threads, processes or device arrays, so it cannot be pickled or copied. Create one where it is "
            f"needed{state}."
        )


Finalizer: TypeAlias = "weakref.finalize[..., Any]"


def finalize(target: object, function: Callable[..., Any], *args: object) -> Finalizer:
    """``weakref.finalize`` that does nothing in a forked child."""
    return weakref.finalize(target, Owner().call, function, *args)
