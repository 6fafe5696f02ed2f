"""Keeps copies of an object that owns resources from releasing what belongs to the original.

A fork copies every object but no threads, and shares sockets, locks and child processes with the parent. A child that ran
its parent's finalizers would close, on all hosts, a feed that the parent still uses. An object that owns resources therefore
records the process that created it (:class:`Owner`), and its copies in forked children release nothing. Other copies are
refused (:class:`NotCopied`).
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

from meshfeed._src.base.errors import MeshfeedError, hides_own_frames

_ATTRIBUTE = "meshfeed_finalizers"  # of targets


class Owner:
    """The process that created an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that created the object; False in a forked child."""
        return os.getpid() == self.pid

    def check(self, what: str) -> None:
        """Raises a MeshfeedError about ``what`` in a forked child."""
        if not self.is_here:
            raise MeshfeedError(
                f"{what} belongs to process {self.pid} and cannot be used in its forked child {os.getpid()}, which has "
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


class Finalizer:
    """A call that is due once: when its target ends, or when it is called before. It does nothing in a forked child."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self._owner = Owner()
        self._due: Callable[[], Any] | None = functools.partial(function, *args)

    @property
    def alive(self) -> bool:
        """Whether the call is still due."""
        return self._due is not None

    def __call__(self) -> None:
        """Makes the call, if it is still due."""
        due, self._due = self._due, None
        if due is not None:
            self._owner.call(due)

    def detach(self) -> None:
        """Cancels the call."""
        self._due = None


class _Finalizers:
    """The finalizers of one target, which alone holds them."""

    _due: Sequence[Finalizer] = ()  # on the class: __del__ runs even if an interrupt prevented __init__

    def __init__(self) -> None:
        weakref.finalize(self, _end_at_exit, weakref.ref(self))

    def add(self, finalizer: Finalizer) -> None:
        self._due = [*(one for one in self._due if one.alive), finalizer]

    def end(self) -> None:
        while self._due:
            *self._due, last = self._due
            try:
                last()
            except Exception as error:
                sys.excepthook(type(error), error, error.__traceback__)

    __del__ = end


def _end_at_exit(finalizers: weakref.ref[_Finalizers]) -> None:
    if (found := finalizers()) is not None:
        found.end()


def finalize(target: object, function: Callable[..., Any], *args: object) -> Finalizer:
    """Has ``function`` called when ``target`` is garbage-collected, or at exit; the last one first if there are several.

    ``weakref.finalize`` itself keeps the arguments alive. If they hold an exception, they hold the frames that it was raised
    through, and with the variables of the caller's the target, which would then never be collected. Here only the target
    holds them.
    """
    finalizers = vars(target).get(_ATTRIBUTE)
    if finalizers is None:
        finalizers = vars(target)[_ATTRIBUTE] = _Finalizers()
    finalizer = Finalizer(function, *args)
    finalizers.add(finalizer)
    return finalizer
