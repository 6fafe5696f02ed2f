"""Keeps forked children from releasing what belongs to their parent.

A fork copies every object but no threads, and shares sockets, locks and child processes with the parent. A child that ran
its parent's finalizers would close, on all hosts, a feed that the parent still uses. An object that owns resources therefore
records the process that created it (:class:`Owner`), and its copies in forked children release nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from meshfeed._src.base.errors import MeshfeedError


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


Finalizer: TypeAlias = "weakref.finalize[..., Any]"


def finalize(target: object, function: Callable[..., Any], *args: object) -> Finalizer:
    """``weakref.finalize`` that does nothing in a forked child."""
    return weakref.finalize(target, Owner().call, function, *args)
