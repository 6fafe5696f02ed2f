"""Counts the records of a remote ArrayRecord file from its footer, without downloading the records."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from typing import TYPE_CHECKING

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.sources.array_record.readers import ShardFile, inspect_file, remedy_for
from meshfeed._src.sources.files import paths as file_paths

if TYPE_CHECKING:
    from meshfeed._src.sources.files.shard_cache import ShardCache

_BLOCK_BYTES = 1 << 16  # a Riegeli block; the last one of a file holds its postscript
_TAIL_BYTES = 4 * _BLOCK_BYTES  # the footer of about 20,000 chunks: one request is enough for most files
# The postscript is the protocol buffer {1: footer offset, 2: magic number}, which is never compressed.
_POSTSCRIPT = re.compile(rb"\x08([\x80-\xff]{0,9}[\x00-\x7f])\x10\xde\xc0\xeb\xfe\x84\xce\xc3\xc9\x71", re.DOTALL)


def inspect_url(url: str, cache: ShardCache) -> ShardFile:
    """Counts and checks like :func:`inspect_file`, without fetching the records.

    Writes the footer and the postscript at their offsets into a sparse local file and opens it with the array_record
    library, which checks their hashes as usual.

    Raises:
      SourceError: if the file does not exist.
      CorruptDataError: if the file is empty, truncated, or not an ArrayRecord file.
      OSError: if it cannot be read.
    """
    num_bytes, version = cache.identify(url)
    # Start at a block boundary: the reader needs the header of the block in which a chunk begins.
    tail_start = max(0, num_bytes - _TAIL_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
    tail = _read(url, tail_start, num_bytes, num_bytes)
    postscript = _POSTSCRIPT.search(tail[-_BLOCK_BYTES:])
    if postscript is None or num_bytes < _BLOCK_BYTES:
        raise CorruptDataError(
            f"{url}: {num_bytes:,} bytes without the postscript of an ArrayRecord file. Expected a file closed by "
            f"ArrayRecordWriter.{remedy_for(url)}",
            path=url,
        )
    footer_start = min(_read_varint(postscript[1]), tail_start) // _BLOCK_BYTES * _BLOCK_BYTES
    footer = _read(url, footer_start, tail_start, num_bytes)
    handle, sparse = tempfile.mkstemp(suffix=".array_record")
    try:
        os.truncate(handle, num_bytes)
        os.pwrite(handle, footer, footer_start)
        os.pwrite(handle, tail, tail_start)
        found = inspect_file(sparse)
    except CorruptDataError as error:
        raise CorruptDataError(str(error).replace(sparse, url), path=url) from None
    except SourceError as error:
        raise SourceError(str(error).replace(sparse, url)) from None
    finally:
        os.close(handle)
        os.unlink(sparse)
    return dataclasses.replace(found, path=url, version=version)


def _read(url: str, start: int, stop: int, num_bytes: int) -> bytes:
    return file_paths.read_range(url, start, stop, num_bytes, source="ArrayRecord")


def _read_varint(encoded: bytes) -> int:
    return sum((byte & 0x7F) << (7 * digit) for digit, byte in enumerate(encoded))
