"""Decompresses whole files, for formats that are read at random."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import zlib
from typing import Any, BinaryIO

from meshfeed._src.base.errors import CorruptDataError, SourceError

_CHUNK_BYTES = 1 << 20
_ENDINGS = {"gz": "gz", "bz2": "bz2", "xz": "xz", "zst": "zstd", "zstd": "zstd", "br": "br", "snappy": "snappy"}


def compression_of(name: str) -> str | None:
    """Returns the compression that the last extension of a file name stands for, or None."""
    return _ENDINGS.get(name.rsplit(".", 1)[-1].lower())


def decompress(compression: str, source: str, target: str, num_bytes: int | None, *, what: str) -> None:
    """Decompresses a file into another, which exists.

    Args:
      compression: a value of :func:`compression_of`.
      source: path of the compressed file.
      target: path of the file to write; its former content is dropped.
      num_bytes: size of the content; required for "snappy", and checked for all if given.
      what: the file in errors.

    Raises:
      CorruptDataError: if the compressed bytes are damaged, or the content has a different size.
      SourceError: if the library for this compression is not installed.
      OSError: if the disk is full, or a file cannot be read.
    """
    try:
        with open(source, "rb") as stored, open(target, "r+b") as out:
            out.truncate(0)
            if compression == "snappy":
                out.write(_arrow(what).Codec("snappy").decompress(stored.read(), num_bytes).to_pybytes())
            else:
                with _open(compression, stored, what) as content:
                    shutil.copyfileobj(content, out, _CHUNK_BYTES)
    except (EOFError, ValueError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(what, compression, error) from error
    except OSError as error:
        if error.errno is not None:  # bz2 and Arrow report damaged content as an OSError without a number
            raise
        raise _damaged(what, compression, error) from error
    found = os.path.getsize(target)
    if num_bytes is not None and found != num_bytes:
        raise _damaged(what, compression, f"{found:,} bytes instead of {num_bytes:,}")


def _damaged(what: str, compression: str, error: object) -> CorruptDataError:
    return CorruptDataError(
        f"{what} cannot be decompressed ({compression}: {error}). Its bytes are not those that were written. Write or copy "
        "it again.",
        path=what,
    )


def _arrow(what: str) -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise SourceError(f"{what} is compressed, which needs pyarrow. Run: pip install pyarrow.") from error
    return pa


def _open(compression: str, stored: BinaryIO, what: str) -> Any:
    """Returns a readable file of the decompressed content."""
    if compression in _MODULES:
        return _MODULES[compression].open(stored)
    return _arrow(what).CompressedInputStream(stored, {"br": "brotli"}.get(compression, compression))


_MODULES: dict[str, Any] = {"gz": gzip, "bz2": bz2, "xz": lzma}
