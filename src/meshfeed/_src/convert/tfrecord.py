"""TFRecord files."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.convert.buffers import binary
from meshfeed._src.convert.inputs import Input, Scan

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 1 << 20
_MARK_BYTES = 8 << 20
_HEAD = struct.Struct("<QI")  # size of a record, and the checksum of the size
_CHECK = struct.Struct("<I")


class TFRecords(Input):
    """Records of TFRecord files: sizes and bytes, each with a masked CRC-32C."""

    name = "tfrecord"
    examples = True

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        marks, count, next_mark = [], 0, 0
        for offset, _, _ in _tf_records(path, 0):
            if offset >= next_mark:
                marks.append((count, offset))
                next_mark = offset + _MARK_BYTES
            count += 1
        return Scan(count, pa.schema([("record", pa.large_binary())]), marks)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        checksum = _crc32c(path)
        number, offset = max(mark for mark in scan.marks if mark[0] <= start)
        records: list[bytes] = []
        num_bytes = 0
        for _, record, check in _tf_records(path, offset):
            if number >= stop:
                break
            if number >= start:
                content = bytes(record)
                if _mask(checksum(content)) != check:
                    raise _damaged_tf_record(path, f"record {number} has a wrong checksum")
                records.append(content)
                num_bytes += len(content)
                if num_bytes > _BATCH_BYTES:
                    yield pa.record_batch([binary(records)], schema=schema)
                    records, num_bytes = [], 0
            number += 1
        yield pa.record_batch([binary(records)], schema=schema)


def _tf_records(path: str, offset: int) -> Iterator[tuple[int, memoryview, int]]:
    """Yields offset, bytes and stored checksum of each record."""
    size = os.path.getsize(path)
    if not size:
        return
    checksum = _crc32c(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = memoryview(mapped)
        try:
            while offset < size:
                if offset + _HEAD.size > size:
                    raise _damaged_tf_record(path, f"it ends within the record at byte {offset:,}")
                length, check = _HEAD.unpack_from(content, offset)
                if _mask(checksum(bytes(content[offset : offset + 8]))) != check:
                    raise _damaged_tf_record(path, f"no record begins at byte {offset:,}")
                end = offset + _HEAD.size + length
                if end + _CHECK.size > size:
                    raise _damaged_tf_record(path, f"it ends within the record at byte {offset:,}")
                with content[offset + _HEAD.size : end] as record:
                    yield offset, record, _CHECK.unpack_from(content, end)[0]
                offset = end + _CHECK.size
        finally:
            content.release()


def _crc32c(path: str) -> Callable[[bytes | memoryview], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise SourceError(f"checking {path} needs google-crc32c. Run: pip install google-crc32c.") from error
    return google_crc32c.value


def _mask(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _damaged_tf_record(path: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"{path} is no intact TFRecord file: {reason}. Write or copy it again.", path=path)
