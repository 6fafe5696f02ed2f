"""Public module names for classes and functions that are defined in private modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


def public(module: str) -> Callable[[T], T]:
    """Returns a decorator that sets ``__module__``: reprs, tracebacks and pickles then show ``meshfeed.PeerError``.

    Args:
      module: the public module that exports the class or function, such as ``"meshfeed"``.
    """

    def rename(value: T) -> T:
        value.__module__ = module
        return value

    return rename
