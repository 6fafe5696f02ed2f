"""The name under which users know a class or function: that of the module from which they import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


def public(module: str) -> Callable[[T], T]:
    """A decorator that sets ``__module__``, so that reprs, tracebacks and pickles say ``meshfeed.PeerError``.

    Args:
      module: the public module that exports the class or function, such as ``"meshfeed"``.
    """

    def rename(value: T) -> T:
        value.__module__ = module
        return value

    return rename
