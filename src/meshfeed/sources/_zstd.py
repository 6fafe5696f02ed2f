"""The system's zstd library, whose functions machine code can call by their addresses.

Packages for Python bring zstd without its C functions; nearly every Linux has ``libzstd.so.1``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
import weakref
from typing import Any

_NAMES = ("libzstd.so.1", "libzstd.1.dylib")
_own = threading.local()


class Context:
    """zstd's memory for decompressing, at ``address``."""

    def __init__(self, library: Any) -> None:
        self.address = library.ZSTD_createDCtx()
        if not self.address:
            raise MemoryError("zstd has no memory for a context")
        weakref.finalize(self, library.ZSTD_freeDCtx, self.address).atexit = False  # a thread may still use it then


@dataclasses.dataclass(frozen=True)
class Zstd:
    """The library.

    Attributes:
      decompress: address of ``ZSTD_decompressDCtx``.
    """

    decompress: int
    _library: Any = dataclasses.field(repr=False)

    def context(self) -> Context:
        """This thread's own context, which is made once. To be held while it is used."""
        found = getattr(_own, "found", None)
        if found is None:
            found = _own.found = Context(self._library)
        return found

    def inflate(self, frame: bytes, num_bytes: int) -> bytes | None:
        """What ``frame`` holds, or None where that is not ``num_bytes`` bytes."""
        out = ctypes.create_string_buffer(max(num_bytes, 1))
        context = self.context()
        made = self._library.ZSTD_decompressDCtx(context.address, out, num_bytes, frame, len(frame))
        return out.raw[:num_bytes] if made == num_bytes else None


@functools.cache
def load() -> Zstd | None:
    """The library, or None where this system has none."""
    for name in _NAMES:
        try:
            library = ctypes.CDLL(name)
            address, size = ctypes.c_void_p, ctypes.c_size_t
            library.ZSTD_createDCtx.restype = address
            library.ZSTD_freeDCtx.argtypes = [address]
            library.ZSTD_decompressDCtx.restype = size
            library.ZSTD_decompressDCtx.argtypes = [address, address, size, ctypes.c_char_p, size]
            return Zstd(ctypes.cast(library.ZSTD_decompressDCtx, address).value or 0, library)
        except (OSError, AttributeError):  # not there, or another library of that name
            continue
    return None
