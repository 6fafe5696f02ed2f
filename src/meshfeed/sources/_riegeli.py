"""Machine code for Riegeli files, which ArrayRecord files are: hash, chunks, lists of numbers.

Made by llvmlite of ``_riegeli.ll`` in a tenth of a second, once a process. The formats are public: the specification is
``doc/riegeli_records_file_format.md`` of google/riegeli.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.resources
import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from meshfeed import _aligned

BLOCK_BYTES = 1 << 16
"""Every so many bytes of a file a block header stands."""
BLOCK_HEADER_BYTES = 24
CHUNK_HEADER_BYTES = 40

# The hash's first mul0 and mul1: digits of pi, from its paper.
_MUL0 = np.array([0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3], np.uint64)
_MUL1 = np.array([0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377], np.uint64)
_RIEGELI_KEY = np.frombuffer(b"Riegeli/records\n" * 2, "<u8")
# What every Riegeli file begins with: a block header and a chunk of no data, and so three hashes.
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f 0000000000000000 4000000000000000 91bac23c9287e1a9"
    "0000000000000000 e19f13c0e9b1c372 7300000000000000 0000000000000000"
)
_logger = logging.getLogger("meshfeed")


@dataclasses.dataclass(frozen=True)
class Riegeli:
    """Compiled functions; ``_riegeli.ll`` says what they take. They let other threads of Python run.

    Attributes:
      hash: ``(address, size, key) -> HighwayHash-64``.
      read_chunk: ``(file, offset, data_size, chunk, key) -> bool``.
      read_records: ``(file, count, rows, chunks, offsets, sizes, width, places, out, scratch, together, inflate, context,
        key) -> records read``.
      read_varints: ``(bytes, stop, count, values) -> where they end``.
      key: address of the hash's state for Riegeli's key.
    """

    hash: Callable[..., int]
    read_chunk: Callable[..., bool]
    read_records: Callable[..., int]
    read_varints: Callable[..., int]
    key: int
    _kept: tuple[Any, ...] = dataclasses.field(repr=False)  # the memory of the code and of the key

    def hash_bytes(self, data: bytes) -> int:
        """HighwayHash-64 of ``data`` with Riegeli's key."""
        return self.hash(data, len(data), self.key)


@functools.cache
def load() -> Riegeli | None:
    """The compiled functions, or None where they cannot be had: without llvmlite, or where its code does not run right."""
    if sys.byteorder != "little" or sys.maxsize < 2**62 or sys.platform == "win32":
        return None
    try:
        from llvmlite import binding as llvm
    except ImportError:
        _logger.info("ArrayRecord files with one record per chunk are read faster with llvmlite: pip install llvmlite")
        return None
    try:
        made = _compile(llvm)
        stored = np.frombuffer(SIGNATURE, "<u8").tolist()
        found = [made.hash_bytes(part) for part in (SIGNATURE[8:24], SIGNATURE[32:], b"")]
        if found != [stored[0], stored[3], stored[5]]:
            raise RuntimeError(f"the hash of a file's first bytes is {found[0]:016x}, not {stored[0]:016x}")
    except Exception as error:  # a processor, a kernel or a version of llvmlite that it does not run on
        _logger.warning(
            "llvmlite is installed, but its code for ArrayRecord files does not work here (%s: %s). They are read by the "
            "array_record library, which is slower. It takes llvmlite>=0.45, on a system that lets "
            "programs make code; without llvmlite this message goes, too.",
            type(error).__name__,
            error,
        )
        return None
    return made


def _compile(llvm: Any) -> Riegeli:
    llvm.check_jit_execution()  # where the system forbids new code: without it the first call would end the process
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(importlib.resources.files("meshfeed.sources").joinpath("_riegeli.ll").read_text())
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    key = _aligned.empty((4, 4), np.uint64)
    key[:] = _MUL0 ^ _RIEGELI_KEY, _MUL1 ^ (_RIEGELI_KEY >> 32 | _RIEGELI_KEY << 32), _MUL0, _MUL1
    integer, address = ctypes.c_int64, ctypes.c_void_p

    def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(result, *arguments)(engine.get_function_address(name))

    return Riegeli(
        hash=function("highwayhash64", ctypes.c_uint64, ctypes.c_char_p, integer, address),
        read_chunk=function("read_chunk", ctypes.c_bool, ctypes.c_int, integer, integer, address, address),
        read_records=function(
            "read_records",
            integer,
            *[ctypes.c_int, integer, address, integer, address, address, integer],
            *[address, address, address, integer, address, address, address],
        ),
        read_varints=function("read_varints", integer, address, integer, integer, address),
        key=key.ctypes.data,
        _kept=(engine, key),
    )


def span_of(offset: int, size: int) -> int:
    """Bytes that a chunk of ``size`` bytes takes in the file, block headers included.

    Args:
      offset: where the chunk begins; one that begins a block begins at its header.
      size: of its header and data.
    """
    usable = BLOCK_BYTES - BLOCK_HEADER_BYTES
    return size + (size + (offset + usable - 1) % BLOCK_BYTES) // usable * BLOCK_HEADER_BYTES


def without_block_headers(content: bytes, offset: int) -> bytes:
    """``content``, which stands at ``offset`` in the file, without the block headers in it."""
    first = -offset % BLOCK_BYTES
    pieces = [content[:first]]
    for start in range(first, len(content), BLOCK_BYTES):
        pieces.append(content[start + BLOCK_HEADER_BYTES : start + BLOCK_BYTES])
    return b"".join(pieces)
