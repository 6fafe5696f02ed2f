"""The plan of a conversion, and its tasks. Everything is kept in ``DIR/.convert`` until the job is complete::

    job.json          inputs and settings
    scans/00007.json  records, types and marks of input 7; also the indexes of tar archives
    inputs/00007-…    its content, if it is compressed or a URL
    tokenizer.json    a copy of the tokenizer, for the encoding "tokens"
    plan.json         types, and the range of records of every output file
    entries/00003.json  the row of output file 3 in the manifest
    all-types         exists if the types of the first blocks did not fit a later one
    progress          int64[output files], records written

Output file i of n holds records ``[N * i // n, N * (i + 1) // n)`` of the N input records: the same bytes, however many
workers write them. A result appears when it is complete, so a job that was killed continues with the tasks without one.
``destination.py`` has the folder or URL where results and state are. Copies of inputs, indexes of tar archives, the
tokenizer and the progress are in its local folder, :attr:`Disk.work`.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from meshfeed._src.base.errors import MeshfeedError, SettingsError, SourceError, without_signatures
from meshfeed._src.convert.destination import JOB, destination_of, replacing, sync, temporary
from meshfeed._src.convert.example import feature_kinds
from meshfeed._src.convert.formats import FORMATS, download, remote_files
from meshfeed._src.convert.inputs import Input, Scan, TypesChanged, align, choose, read_schema, schema_text, stamp
from meshfeed._src.convert.values import Measure, merge
from meshfeed._src.convert.writers import ArrayRecordFile, Settings, TokenWriter, check_column
from meshfeed._src.sources.files.formats import compression_of, decompress, uncompressed_name
from meshfeed._src.sources.files.locks import locked
from meshfeed._src.sources.files.manifest import FileEntry, describe_file, digest_of
from meshfeed._src.sources.files.paths import format_name, in_threads, is_url, name_bytes

if TYPE_CHECKING:
    import pyarrow as pa


TOKENIZER = "tokenizer.json"
_SHARD_BYTES = 256 << 20  # of input per output file, by default
_BATCH_BYTES = 1 << 20
_NAME_CHARACTERS = 40  # of an input's name in that of its copy, which file systems limit
_PLAN = "plan.json"
_RECORD = re.compile(r"record (\d+)(: | )")

Phase: TypeAlias = Literal["scan", "write"]


@dataclasses.dataclass(frozen=True)
class OutputPlan:
    """What is written where.

    Attributes:
      types: all columns of the input.
      schema: the columns to read.
      ends: int64[inputs], records up to the end of each input.
      bounds: int64[output files + 1], the first record of each output file, and the number of records.
      all_types: whether ``schema`` is that of all records, and not of the first blocks of text files.
    """

    types: pa.Schema
    schema: pa.Schema
    ends: np.ndarray
    bounds: np.ndarray
    all_types: bool

    @property
    def num_shards(self) -> int:
        """Number of output files."""
        return len(self.bounds) - 1


class Conversion:
    """A conversion that has been started in ``directory``. Any process that reaches it can run its tasks.

    Args:
      directory: the folder for the output files, or its URL.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.destination = destination_of(directory)

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """The local folder for what the tasks of other machines do not need."""
        return self.destination.work

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Inputs and settings, as JSON."""
        return self._load(JOB)

    def _load(self, name: str) -> Any:
        content = self.destination.read(name)
        if content is None:
            raise MeshfeedError(
                f"{self.destination.name}: {name} of the unfinished conversion is missing, maybe because another process has "
                "converted to the same destination. Run the command again."
            )
        return json.loads(content)

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings."""
        found = Settings(**self.description["settings"])
        return found if found.tokenizer is None else dataclasses.replace(found, tokenizer=str(self._tokenizer()))

    def _tokenizer(self) -> pathlib.Path:
        path = self.folder / TOKENIZER
        if not path.exists():  # at a URL, on a machine that runs the first task
            with replacing(path) as part:
                part.write_bytes(self.destination.read(TOKENIZER) or b"")
        return path

    @functools.cached_property
    def paths(self) -> list[str]:
        """The inputs."""
        return [path for path, _, _ in self.description["inputs"]]

    @functools.cached_property
    def input(self) -> Input:
        """The format."""
        found = FORMATS[self.description["format"]](self.settings.columns)
        found.scratch = self.folder / "parts"
        found.kept = self.folder / "scans"
        return found

    # ------------------------------------------------------------------ the first pass

    @property
    def all_types(self) -> bool:
        """Whether types are those of all blocks of text files, not only of the first ones."""
        return self.destination.read("all-types") is not None

    def ask_for_all_types(self) -> None:
        """Makes the plan void."""
        self.destination.write("all-types", b"all\n")

    def scan(self, number: int) -> None:
        """Scans an input, unless that is done."""
        if self.destination.read(_scan_name(number)) is not None:
            return
        with self._naming(number):
            found = self.input.scan(self._local(number), all_types=self.all_types)
            _check_columns(self.paths[number], found)
            self._check_read(number)
        self.save(_scan_name(number), found.to_json())

    def save(self, name: str, value: object) -> None:
        """Writes a JSON file of the state."""
        self.destination.write(name, json.dumps(value).encode())

    def load_scan(self, number: int) -> Scan:
        """Returns what the scan of an input found."""
        return Scan.from_json(self._load(_scan_name(number)))

    def _local(self, number: int) -> str:
        """Returns the path of an input, downloaded and decompressed if need be."""
        path, copy = self.paths[number], self._copy(number)
        kind = _compression(path)
        if kind is None and not is_url(path):
            return path
        if not copy.exists():
            # Continued on another machine, all tasks of an input begin without it.
            with locked(self.folder / "parts" / f"{number:05}.lock", math.inf):
                self._make_copy(number, path, kind, copy)
        return str(copy)

    def _make_copy(self, number: int, path: str, kind: str | None, copy: pathlib.Path) -> None:
        if copy.exists():
            return
        download_path = copy if kind is None else copy.with_name(f"{copy.name}.stored")
        if is_url(path) and not download_path.exists():
            with replacing(download_path) as part:
                download(path, part)
                self._check_unchanged(number)
        if kind is not None:
            with replacing(copy) as part:
                part.touch()
                decompress(kind, str(download_path) if is_url(path) else path, str(part), None, what=path)
                self._check_unchanged(number)
                sync(part)
            download_path.unlink(missing_ok=True)

    def _copy(self, number: int) -> pathlib.Path:
        name = os.path.basename(format_name(self.paths[number]).rstrip("/"))
        return self.folder / "inputs" / f"{number:05}-{uncompressed_name(name)[-_NAME_CHARACTERS:]}"

    def check_read(self) -> None:
        """Raises SourceError if an input has changed since the conversion began."""
        for number in range(len(self.paths)):
            self._check_read(number)

    def _check_read(self, number: int) -> None:
        """Calls :meth:`_check_unchanged` for an input that is read in place, and not from a copy."""
        path = self.paths[number]
        if not is_url(path) and _compression(path) is None:
            self._check_unchanged(number)

    def _check_unchanged(self, number: int) -> None:
        """Raises SourceError if an input is not the one with which the conversion began."""
        path, _, before = self.description["inputs"][number]
        try:
            found = version_of_input(self.input, path)
        except FileNotFoundError:
            found = ""
        if found != before:
            raise SourceError(
                f"{path} has changed during the conversion, which is of one input. Leave it as it is, remove "
                f"{self.destination.name}, and start again."
            )

    @contextlib.contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        """Names the input in errors: its path in place of its copy, and in a note if the format does not expect the error."""
        path, copy = self.paths[number], str(self._copy(number))
        import pyarrow as pa

        try:
            try:
                yield
            except (SourceError, TypesChanged, OSError, ValueError, pa.ArrowException) as error:
                if not _is_disk_full(error):
                    self._check_read(number)  # a change explains any error
                raise
        except (SourceError, TypesChanged) as error:
            error.args = (str(error).replace(copy, path),)
            raise
        except (pa.ArrowException, OverflowError) as error:
            raise SourceError(
                f"{path} cannot be converted: {' '.join(str(error).split()).rstrip('.')}. Correct the value, or leave its "
                "column out with --columns."
            ) from error
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or error.filename is None:
                error.add_note(f"while reading {without_signatures(path)}")
            raise

    def missing_scans(self) -> list[int]:
        """Returns the inputs that have not been scanned."""
        found = self.destination.names("scans")
        return [number for number in range(len(self.paths)) if f"{number:05}.json" not in found]

    # ------------------------------------------------------------------ the plan

    @functools.cached_property
    def plan(self) -> OutputPlan:
        """The plan; made from the scans once they are complete.

        Raises:
          SourceError: there are no records, or inputs have different columns.
          TypesChanged: the column that is needed may be, or have values, in later blocks only.
          SettingsError: there are more output files than records, or a column is unknown or does not fit the encoding.
        """
        content = self.destination.read(_PLAN)
        if content is None:
            content = json.dumps(self._make_plan()).encode()
            self.destination.write(_PLAN, content)
        found = json.loads(content)
        num_records, num_shards = found["ends"][-1], found["shards"]
        bounds = [num_records * shard // num_shards for shard in range(num_shards + 1)]
        types, schema = map(read_schema, found["schemas"])
        return OutputPlan(types, schema, np.array(found["ends"]), np.array(bounds), found["all_types"])

    def _make_plan(self) -> dict[str, Any]:
        scans = in_threads(self.load_scan, range(len(self.paths)))
        ends = list(itertools.accumulate(scan.num_records for scan in scans))
        schema: pa.Schema | None = None
        for path, scan in zip(self.paths, scans, strict=True):
            if scan.schema is not None:
                schema = scan.schema if schema is None else self.input.unify(schema, scan.schema, path)
        if schema is None or not ends[-1]:
            raise SourceError(f"{_list(self.paths)}: there are no records. Expected at least one. Check the input.")
        shards = self.settings.shards or max(1, min(ends[-1], -(-self.description["bytes"] // _SHARD_BYTES)))
        if shards > ends[-1]:
            raise SettingsError(
                f"--shards {shards:,} is more than the {ends[-1]:,} records. Give a number up to {ends[-1]:,}.",
                setting="shards",
            )
        kept = self._choose(schema)
        self.input.check_scans(self.paths, scans, kept.names)
        encoded = [schema_text(one.remove_metadata()) for one in (schema, kept)]
        return {"ends": ends, "shards": shards, "schemas": encoded, "all_types": self.all_types}

    def _choose(self, schema: pa.Schema) -> pa.Schema:
        import pyarrow as pa

        settings = self.settings
        if self.input.examples and settings.encoding == "example":
            if settings.columns is not None:
                raise SettingsError(
                    "the records are Examples already and are copied as they are, so --columns has no effect. Leave it out.",
                    setting="columns",
                )
            return schema
        named = {*(settings.columns or ()), *([settings.column] if settings.column else [])}
        if self.input.late_columns and not self.all_types and not named <= set(schema.names):
            raise TypesChanged("a column that was named is not in the first blocks")
        chosen = choose(schema, settings.columns)
        if settings.encoding != "example":
            try:
                return check_column(chosen, settings.encoding, settings.column)
            except SettingsError:
                if self.all_types or not any(map(pa.types.is_null, chosen.types)):
                    raise
                raise TypesChanged("a column without a value in the first blocks may hold text in others") from None
        feature_kinds(chosen)  # raises for types that do not fit
        return chosen

    # ------------------------------------------------------------------ the output files

    def shard_name(self, shard: int) -> str:
        """Returns the name of an output file."""
        ending = "bin" if self.settings.encoding == "tokens" else "array_record"
        return f"data-{shard:05}-of-{self.plan.num_shards:05}.{ending}"

    def missing_shards(self) -> list[int]:
        """Returns the output files that have not been written."""
        return sorted({*range(self.plan.num_shards)} - self._written())

    def _written(self) -> set[int]:
        """Returns the output files that have been written."""
        found = self.destination.names("entries")
        candidates = [shard for shard in range(self.plan.num_shards) if f"{shard:05}.json" in found]
        return set(itertools.compress(candidates, in_threads(self._is_written, candidates)))

    def _is_written(self, shard: int) -> bool:
        entry = self.destination.read(_entry_name(shard))
        return bool(entry) and self.destination.has(self.shard_name(shard), json.loads(entry))

    def write(self, shard: int) -> None:
        """Writes an output file, unless that is done or types are to be found again."""
        if self._is_written(shard) or self.types_changed:
            return
        name = self.shard_name(shard)
        low, high = self.plan.bounds[shard : shard + 2].tolist()
        try:
            with temporary(self.folder / "parts", name) as part:
                file = self._open(str(part))
                with self._progress(shard) as count:
                    for first, batch in self._batches(low, high):
                        with self._placing():
                            file.write(batch, first)
                        count[shard] = first + batch.num_rows - low
                file.close()
                sync(part)
                row = dataclasses.asdict(describe_file(str(part), file.num_records))
                row |= {"path": self.destination.path(name), "values": file.values}
                self.destination.put(part, name, _entry_name(shard), row)
        except TypesChanged as error:
            if self.plan.all_types:
                raise SourceError(f"{error}. Expected values of one type per column. Correct the file.") from error
            self.ask_for_all_types()

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        """Puts the file, and the record or line in it, before errors that begin with the number of a record."""
        try:
            yield
        except SourceError as error:
            found = _RECORD.match(str(error))
            if found is None:
                raise
            record, ends = int(found[1]), self.plan.ends.tolist()
            number = bisect.bisect_right(ends, record)
            copy = self._local(number)
            place = self.input.place(copy, self.load_scan(number), record - (ends[number - 1] if number else 0))
            what = str(error)[found.end() :] if found[2] == ": " else f"the record {str(error)[found.end() :]}"
            error.args = (f"{place.replace(copy, self.paths[number], 1)}: {what}",)
            raise

    @property
    def types_changed(self) -> bool:
        """Whether the plan is void: a record did not fit its types."""
        return not self.plan.all_types and self.all_types

    def entries(self, details: dict[str, Any]) -> list[FileEntry]:
        """Returns the rows of the manifest once all output files are written."""
        rows = self._rows()
        for shard, row in enumerate(rows):
            # Where the files are now: an unfinished conversion may have been moved, or is mounted elsewhere on this machine.
            row |= {"path": self.destination.path(self.shard_name(shard)), "details": details}
        fields = [field.name for field in dataclasses.fields(FileEntry)]
        return [FileEntry(**{name: row[name] for name in fields}) for row in rows]

    def values(self) -> dict[str, Measure]:
        """Returns what the features hold, once all output files are written; nothing if they were copied unread."""
        return merge(row["values"] for row in self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return in_threads(lambda shard: self._load(_entry_name(shard)), range(self.plan.num_shards))

    def _open(self, path: str) -> ArrayRecordFile | TokenWriter:
        settings = self.settings
        if settings.encoding == "tokens":
            assert settings.tokenizer is not None  # run.py checks it
            return TokenWriter(path, settings.tokenizer, settings.eod)
        return ArrayRecordFile(path, settings.encoding, examples=self.input.examples, compression=settings.compression)

    def _batches(self, low: int, high: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields record number and batch of the records ``[low, high)``, in pieces of about 1 MiB."""
        ends, schema = self.plan.ends.tolist(), self.plan.schema
        self.input.types = self.plan.types
        for number in range(bisect.bisect_right(ends, low), len(ends)):
            begin = ends[number - 1] if number else 0
            if begin >= high:
                return
            start, stop = max(low - begin, 0), min(high, ends[number]) - begin
            if start >= stop:
                continue
            record = begin + start
            with self._naming(number):
                path = self._local(number)
                for batch in self.input.read(path, self.load_scan(number), start, stop, schema):
                    with self._placing():
                        aligned = align(batch, schema, record)
                    for piece in _pieces(aligned):
                        yield record, piece
                        record += piece.num_rows
            if record != begin + stop:
                raise SourceError(
                    f"{self.paths[number]} has {record - begin:,} records now and had {stop:,} when it was counted. Do not "
                    f"change it during the conversion; remove {self.folder} and start again."
                )

    @contextlib.contextmanager
    def _progress(self, shard: int) -> Iterator[np.ndarray]:
        path = self.folder / "progress"
        if not path.exists():  # a worker on a machine that does not share the folder
            self.begin_progress()
        count = np.memmap(path, np.int64, "r+")
        try:
            yield count
        except BaseException:
            count[shard] = 0
            raise

    def begin_progress(self) -> None:
        """Sets the progress of all output files to zero."""
        with replacing(self.folder / "progress") as part:  # a task may have the file of another one in its memory
            np.zeros(self.plan.num_shards, np.int64).tofile(part)

    def progress(self, phase: Phase) -> tuple[int, Callable[[], int]]:
        """Returns the number of inputs or records, and a function that counts those that are done."""
        if phase == "scan":
            return len(self.paths), self.destination.counter("scans")
        bounds, counts = self.plan.bounds, np.memmap(self.folder / "progress", np.int64, "r")
        before = int(np.diff(bounds)[sorted(self._written())].sum())
        return int(bounds[-1]), lambda: before + int(counts.sum())


def task_of(directory: str, phase: Phase) -> Callable[[int], None]:
    """Returns the function that scans an input, or writes an output file. It reads the list of inputs once, not per task."""
    job = Conversion(directory)
    return job.scan if phase == "scan" else job.write


def make_task(directory: str, phase: Phase) -> Callable[[int], None]:
    """Returns :func:`task_of` for a worker. Here, and not in run.py, because workers import what the task needs only."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # there is a process per core
    return task_of(directory, phase)


def version_of_input(reader: Input, path: str) -> str:
    """Returns what changes if an input does: sizes and times of the files in it; of a URL, versions of the objects."""
    if is_url(path):
        versions = [(name, file.version) for name, file in remote_files(path).items()]
    else:
        versions = [(name.removeprefix(path), stamp(name)) for name in reader.files(path)]
    return digest_of(name_bytes("".join(f"{name}\0{version};" for name, version in versions)))


def _check_columns(path: str, scan: Scan) -> None:
    names = [] if scan.schema is None else scan.schema.names
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise SourceError(
            f"{path} has several columns named {twice[0]!r}. Expected a different name for each column. Rename them where "
            "the file is written."
        )


def _is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _compression(path: str) -> str | None:
    return compression_of(path) if is_url(path) or os.path.isfile(path) else None


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= _BATCH_BYTES:  # also one without columns, which Arrow cannot cut
        yield batch
        return
    rows = max(1, batch.num_rows * _BATCH_BYTES // batch.nbytes)
    for low in range(0, batch.num_rows, rows):
        yield batch.slice(low, rows)


def discard_plan(job: Conversion) -> None:
    """Removes the scans, the output files and the plan of a job whose types are to be found again."""
    destination = job.destination
    if destination.read(_PLAN) is not None:
        shards = range(job.plan.num_shards)
        destination.remove_outputs([job.shard_name(shard) for shard in shards])
        destination.remove([f"entries/{name}" for name in destination.names("entries")])
    destination.remove([f"scans/{name}" for name in destination.names("scans")])
    destination.remove([_PLAN])


def _scan_name(number: int) -> str:
    return f"scans/{number:05}.json"


def _entry_name(shard: int) -> str:
    return f"entries/{shard:05}.json"


def _list(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
