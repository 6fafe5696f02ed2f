"""Caches for the methods of an order, which neither keep the order alive nor travel to worker processes with it."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


def cached(method: F, maxsize: int) -> F:
    """Returns a bound method with an LRU cache of ``maxsize`` results, to be stored on the method's object.

    ``lru_cache(method)`` would hold the object, which holds the cache: a reference cycle, which would keep the source's
    lengths and memory maps until a garbage collection.
    """
    bound = cast("types.MethodType", method)
    return cast("F", functools.lru_cache(maxsize)(types.MethodType(bound.__func__, weakref.proxy(bound.__self__))))


class Caching:
    """Base of orders with :func:`cached` methods. Sources that go to workers may hold one, so pickles leave caches out."""

    def _make_caches(self) -> None:
        """Sets the attributes that hold the result of :func:`cached`; called by the constructor and after unpickling."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not hasattr(value, "cache_clear")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_caches()
