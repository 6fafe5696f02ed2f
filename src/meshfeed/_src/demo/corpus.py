"""A text corpus available on every machine: the source code of Python's standard library, as ArrayRecord files."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sysconfig
from collections.abc import Iterator

from meshfeed import SourceError

_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text cut into records of one length.

    Attributes:
      pattern: glob of the files.
      paths: the files, in record id order.
      num_records: number of records in all files.
      record_bytes: bytes per record.
      num_sources: number of Python files from which the text was taken.
    """

    pattern: str
    paths: tuple[pathlib.Path, ...]
    num_records: int
    record_bytes: int
    num_sources: int


def _sources() -> Iterator[pathlib.Path]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(root).parts):
            yield path


def build_corpus(directory: pathlib.Path, *, num_records: int, record_bytes: int, num_files: int = 4) -> Corpus:
    """Writes the text of the standard library, in order of file name, as records.

    Args:
      directory: output folder; created if needed.
      num_records: number of records in all files.
      record_bytes: bytes per record.
      num_files: number of files; consecutive records are divided among them as evenly as possible.

    Raises:
      SourceError: the standard library has too little text.
    """
    from array_record.python.array_record_module import ArrayRecordWriter

    text, num_sources = bytearray(), 0
    for path in _sources():
        if len(text) >= num_records * record_bytes:
            break
        text += path.read_bytes()
        num_sources += 1
    if len(text) < num_records * record_bytes:
        raise SourceError(
            f"the standard library in {sysconfig.get_path('stdlib')} has {len(text):,} bytes of Python text; the demo needs "
            f"{num_records * record_bytes:,}. Some systems omit modules: use a complete Python (PYTHON=...)."
        )
    directory.mkdir(parents=True, exist_ok=True)
    bounds = [num_records * number // num_files for number in range(num_files + 1)]
    paths = []
    for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
        paths.append(directory / f"text-{number:05d}-of-{num_files:05d}.array_record")
        writer = ArrayRecordWriter(str(paths[-1]), "group_size:1,uncompressed")
        for record in range(first, stop):
            writer.write(bytes(text[record * record_bytes : (record + 1) * record_bytes]))
        writer.close()
    return Corpus(str(directory / "*.array_record"), tuple(paths), num_records, record_bytes, num_sources)


def read_records(corpus: Corpus) -> list[bytes]:
    """Reads all records by id with the array_record library, not meshfeed, as an independent reference."""
    from array_record.python.array_record_module import ArrayRecordReader

    records: list[bytes] = []
    for path in corpus.paths:
        reader = ArrayRecordReader(str(path))
        records += reader.read_all()
        reader.close()
    return records
