"""Messages between a process and its children, over a Unix socket.

A message is a frame: a header, the sizes of its arrays, the pickle of everything else, and the arrays. The sender writes
the arrays to a new memory file (``memfd_create``), each at a multiple of 64 bytes, seals the file against writes, and
sends its descriptor over the socket. The receiver maps it read-only. Its arrays use that memory without a copy, and a CPU
device can alias them. The memory is freed with the last array, and has no name, so a killed process leaves nothing
behind. If memory files are not supported (macOS), the socket carries the same bytes.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import functools
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshfeed._src.base import memory as base_memory

Packed: TypeAlias = tuple[bytes, list[memoryview]]
"""The pickle of a value, and the bytes of its arrays."""

_HEADER = struct.Struct("<BBIQ")  # kind, whether a descriptor is attached, number of arrays, bytes of the pickle
_SIZE = struct.Struct("<Q")
_MAX_WRITE = 1 << 30  # Linux writes at most 2 GiB per call
_RECEIVE_BYTES = 1 << 18  # more than Linux buffers in a socket by default, so one call empties it


class _Pickler(pickle.Pickler):
    """Pickles every array as an out-of-band buffer, even if its dtype has no buffer protocol, such as bfloat16."""

    def reducer_override(self, value: object) -> Any:
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(value, getattr(jax, "Array", ())):
            value = np.asarray(value)  # unpickling a jax.Array would put it on a device
        elif not isinstance(value, np.ndarray) or type(value) not in (np.ndarray, np.memmap):
            return NotImplemented
        if value.dtype.hasobject:
            return NotImplemented
        if not value.size:  # has no bytes to share
            return np.empty, (value.shape, value.dtype)
        flat = np.asarray(value, order="C").reshape(-1).view(np.uint8)
        return _rebuild, (pickle.PickleBuffer(flat), value.dtype, value.shape)  # pyright: ignore[reportArgumentType] # arrays are buffers


def _rebuild(buffer: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape)


def pack(value: object) -> Packed:
    """Pickles ``value`` without the bytes of its arrays."""
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def unpack(pickled: bytes, buffers: Sequence[np.ndarray]) -> Any:
    """Returns a packed value, given the bytes of its arrays. They are copied to one new block, aligned and read-only."""
    sizes = [buffer.nbytes for buffer in buffers]
    offsets, num_bytes = _offsets(sizes)
    memory = base_memory.empty((num_bytes,), np.uint8)
    for offset, size, buffer in zip(offsets, sizes, buffers, strict=True):
        memory[offset : offset + size] = buffer
    memory.flags.writeable = False
    return _load(pickled, memory, offsets, sizes)


def _load(pickled: bytes, memory: np.ndarray, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    buffers = [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    return pickle.loads(pickled, buffers=buffers)


def _align(number: int) -> int:
    return -(-number // base_memory.ALIGNMENT) * base_memory.ALIGNMENT


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the aligned offset of each array, and the total bytes including padding."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = _align(end + size)
    return offsets, end


def send_packed(connection: socket.socket, kind: int, packed: Packed) -> None:
    """Sends one frame over a blocking socket, with its arrays in a memory file if supported."""
    pickled, buffers = packed
    flags = memory_file_flags() if buffers else None
    if flags is None:
        connection.sendall(_frame(kind, pickled, buffers, with_file=False))
        return
    start = _frame(kind, pickled, buffers, with_file=True)
    file = _write_memory_file(buffers, flags)
    try:
        sent = socket.send_fds(connection, [start], [file])
        connection.sendall(memoryview(start)[sent:])
    finally:
        os.close(file)


def small_frame(kind: int, value: object) -> bytes:
    """Returns one frame without a descriptor, for small values."""
    return _frame(kind, *pack(value), with_file=False)


def _frame(kind: int, pickled: bytes, buffers: Sequence[memoryview], *, with_file: bool) -> bytes:
    parts = [_HEADER.pack(kind, with_file, len(buffers), len(pickled))]
    parts += [_SIZE.pack(buffer.nbytes) for buffer in buffers]
    parts.append(pickled)
    for buffer in () if with_file else buffers:
        parts += [buffer, bytes(_align(buffer.nbytes) - buffer.nbytes)]
    return b"".join(parts)


@functools.cache
def memory_file_flags() -> int | None:
    """Returns the supported flags of ``memfd_create``; None if it is not available (macOS, some sandboxes)."""
    if not hasattr(os, "memfd_create"):
        return None
    no_exec = 0x8  # MFD_NOEXEC_SEAL: newer kernels may require it, older ones do not support it
    for flags in (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | no_exec, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
        try:
            os.close(os.memfd_create("meshfeed", flags))
        except OSError:
            continue
        return flags
    return None


def _write_memory_file(buffers: Sequence[memoryview], flags: int) -> int:
    """Writes the buffers to a sealed memory file, which no process can modify, or truncate under a reader."""
    import fcntl

    offsets, num_bytes = _offsets([buffer.nbytes for buffer in buffers])
    file = os.memfd_create("meshfeed", flags)
    try:
        os.ftruncate(file, num_bytes)
        for offset, buffer in zip(offsets, buffers, strict=True):
            done = 0
            while done < buffer.nbytes:  # write() instead of mmap: no page faults, and pages are not zeroed first
                done += os.pwrite(file, buffer[done : done + _MAX_WRITE], offset + done)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(file)
        raise
    return file


class _Mapping:
    """A read-only mapping of a file descriptor, unmapped when the last array that uses it is freed.

    Unlike ``mmap.mmap``, it does not keep a descriptor open until then; a caller that keeps thousands of batches would
    run out of descriptors.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        libc = _libc()
        # Private, because older kernels reject shared mappings of sealed files. Without writes, no page is copied.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)
        address = libc.mmap(None, num_bytes, mmap.PROT_READ, flags, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {num_bytes:,} bytes from a child process: {os.strerror(code)}")
        self.__array_interface__ = {"data": (address, True), "shape": (num_bytes,), "typestr": "|u1", "version": 3}
        # Not at exit, when arrays that alias the memory may still be in use.
        weakref.finalize(self, libc.munmap, address, num_bytes).atexit = False


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class Frame(NamedTuple):
    """One message: the first byte of the frame, and the value sent, with read-only arrays."""

    kind: int
    value: Any


class Inbox:
    """Assembles frames from the chunks that a socket delivers. An interrupted call loses no data."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray()
        self._files: collections.deque[int] = collections.deque()

    def receive(self) -> bool:
        """Receives available bytes and descriptors; returns False once the other side has closed the socket."""
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        content, files, result_flags, _ = socket.recv_fds(self._connection, _RECEIVE_BYTES, 8, flags)
        self._files.extend(files)
        if result_flags & getattr(socket, "MSG_CTRUNC", 0):
            raise OSError(
                errno.EMFILE, "no file descriptor left to receive a batch from a child process. Raise `ulimit -n`."
            )
        self._bytes += content
        return bool(content)

    def take(self) -> Frame | None:
        """Returns the next frame, or None if it is incomplete."""
        if len(self._bytes) < _HEADER.size:
            return None
        kind, with_file, num_arrays, pickle_bytes = _HEADER.unpack_from(self._bytes)
        pickle_start = _HEADER.size + num_arrays * _SIZE.size
        pickle_end = pickle_start + pickle_bytes
        if len(self._bytes) < pickle_end:
            return None
        sizes = [_SIZE.unpack_from(self._bytes, _HEADER.size + i * _SIZE.size)[0] for i in range(num_arrays)]
        offsets, num_bytes = _offsets(sizes)
        if with_file:
            memory = np.asarray(_Mapping(self._files[0], num_bytes))
            os.close(self._files.popleft())
            end = pickle_end
        else:
            end = pickle_end + num_bytes
            if len(self._bytes) < end:
                return None
            memory = base_memory.copy(np.frombuffer(self._bytes, np.uint8, num_bytes, pickle_end))
            memory.flags.writeable = False  # as with a mapping
        pickled = bytes(memoryview(self._bytes)[pickle_start:pickle_end])
        del self._bytes[:end]
        return Frame(kind, _load(pickled, memory, offsets, sizes))

    def close(self) -> None:
        """Closes the descriptors of frames not taken."""
        while self._files:
            os.close(self._files.popleft())
