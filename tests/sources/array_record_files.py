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


class TimedLibrary:
    """The library's reader with a clock in place of files: single reads and lists take the seconds in ``cost``."""

    def __init__(self, clock: list[float], cost: dict[str, float], taken: list[str]) -> None:
        self._clock = clock
        self._cost = cost
        self._taken = taken

    def read(self, *rows):
        """``read(row, row + 1)`` or ``read(rows)``; notes ``"single"`` or ``"list"``."""
        way = "single" if len(rows) == 2 else "list"
        self._taken.append(way)
        self._clock[0] += self._cost[way]
        return [b"x"] * (1 if way == "single" else len(rows[0]))
