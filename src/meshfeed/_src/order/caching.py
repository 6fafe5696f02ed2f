"""Caches for the methods of an order, which do not keep the order alive."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])


def cached(method: F, maxsize: int) -> F:
    """Returns a bound method with an LRU cache of ``maxsize`` results, to be stored on the method's object.

    ``lru_cache(method)`` would hold the object, which holds the cache: a reference cycle, which would keep the source's
    lengths and memory maps until a garbage collection.
    """
    bound = cast("types.MethodType", method)
    return cast("F", functools.lru_cache(maxsize)(types.MethodType(bound.__func__, weakref.proxy(bound.__self__))))
