"""Small ArrayRecord files for tests."""

from __future__ import annotations

import pathlib


def write(path: pathlib.Path, records: list[bytes], options: str = "group_size:1,uncompressed") -> str:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def some_records(number: int, first: int = 0) -> list[bytes]:
    return [f"record {i} ".encode() * (1 + i % 7) for i in range(first, first + number)]
