"""The files of a streaming Hugging Face dataset: reading them from any row, their sizes and row counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
from datasets import Dataset, DownloadConfig, Features

from meshfeed._src.base.errors import CorruptDataError, SourceError
from meshfeed._src.sources.files import paths as file_paths
from meshfeed._src.sources.files.parquet import ParquetFile
from meshfeed._src.sources.huggingface.internals import Leaf, Node, table_cast, xgetsize, xopen


def local_path(path: str) -> str | None:
    """The path on this machine, or None for a URL."""
    if path.startswith("file://"):
        return path[len("file://") :]
    return None if "://" in path else path


class FeatureCast:
    """Casts tables to the types of features; tables with other columns stay as they are.

    The schema is cached, since datasets derives it on every call, which costs as much as reading a small table.
    """

    def __init__(self, features: Features | None) -> None:
        self._features = features
        self._schema: pa.Schema | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        if self._features is None:
            return table
        if self._schema is None or self._schema.names != table.column_names:
            if not set(table.column_names) <= self._features.keys():
                return table
            self._schema = Features({name: self._features[name] for name in table.column_names}).arrow_schema
        return table if table.schema == self._schema else table_cast(table, self._schema)


Files: TypeAlias = "_ParquetFiles | _ArrowFiles | _DatasetShards | _Generated"
"""The files (or other parts) that a dataset reads in sequence.

``count`` is their number, ``paths`` are their paths or URLs, or None if they are not files, and ``is_table`` is whether
they are read as Arrow tables. ``group_rows`` returns the rows of each row group of a file, or None if they cannot be
counted without reading it; ``is_empty`` whether it is known to have no rows; and ``read`` its tables (or examples) from a
row on. Table boundaries depend only on the file.
"""


def open_files(node: Node, columns: Sequence[str] | None) -> Files:
    """The files of a leaf of a dataset's tree.

    Args:
      node: the leaf.
      columns: the columns to read, or None for all; only for files whose columns can be read separately.
    """
    leaf = Leaf(node)
    if leaf.shards is not None:
        return _DatasetShards(*leaf.shards, columns)
    if leaf.is_plain_parquet:
        return _ParquetFiles(leaf, columns)
    if leaf.arrow_files is not None and all(map(local_path, leaf.arrow_files[0])):
        return _ArrowFiles(*leaf.arrow_files)
    return _Generated(leaf)


class _ParquetFiles:
    """Local or remote Parquet files, read one row group at a time."""

    is_table = True

    def __init__(self, leaf: Leaf, columns: Sequence[str] | None) -> None:
        self.paths = [str(path) for path in leaf.kwargs["files"]]
        self.count = len(self.paths)
        self._row_groups = leaf.kwargs.get("row_groups_list") or [None] * self.count
        self._cast = FeatureCast(leaf.builder.info.features)
        wanted = leaf.builder.config.columns
        self._columns = wanted if columns is None else [c for c in columns if wanted is None or c in wanted]
        self._batch_rows = leaf.builder.config.batch_size
        self._download = _download_config(leaf)

    def group_rows(self, file_index: int) -> Sequence[int]:
        with self._open(file_index) as file:
            return file.group_rows

    def is_empty(self, file_index: int) -> bool:
        return not sum(self.group_rows(file_index))

    def read(self, file_index: int, first_row: int) -> Iterator[pa.Table]:
        with self._open(file_index) as file:
            for _, batch in file.batches(first_row, columns=self._columns, batch_rows=self._batch_rows):
                yield self._cast(pa.Table.from_batches([batch]))

    def _open(self, file_index: int) -> ParquetFile:
        path, groups = self.paths[file_index], self._row_groups[file_index]
        local = local_path(path)
        if local is not None and "::" not in path:
            return ParquetFile(local, row_groups=groups)
        return ParquetFile(path, stream=xopen(path, "rb", download_config=self._download), row_groups=groups)


class _ArrowFiles:
    """Local Arrow IPC files, in the file or stream format, through a memory map."""

    is_table = True

    def __init__(self, paths: list[str], cast: Callable[[pa.Table], pa.Table] | None) -> None:
        self.paths = paths
        self.count = len(paths)
        self._cast = cast

    def group_rows(self, file_index: int) -> Sequence[int]:
        return [len(batch) for batch in self._batches(file_index)]

    def is_empty(self, file_index: int) -> bool:
        return not any(len(batch) for batch in self._batches(file_index))

    def read(self, file_index: int, first_row: int) -> Iterator[pa.Table]:
        skip = first_row
        for batch in self._batches(file_index):
            if len(batch) <= skip:
                skip -= len(batch)
                continue
            table = pa.Table.from_batches([batch.slice(skip)])
            skip = 0
            yield table if self._cast is None else self._cast(table)

    def _batches(self, file_index: int) -> Iterator[pa.RecordBatch]:
        path = self.paths[file_index]
        with pa.memory_map(str(local_path(path))) as source:
            try:
                try:
                    yield from pa.ipc.open_stream(source)
                except pa.ArrowInvalid:  # not the stream format, or damaged
                    source.seek(0)
                    reader = pa.ipc.open_file(source)
                    for index in range(reader.num_record_batches):
                        yield reader.get_batch(index)
            except pa.ArrowInvalid as error:
                raise CorruptDataError(
                    f"{path} is no intact Arrow file ({error}). Expected what the writer wrote. Write it again.",
                    path=path,
                ) from error


class _DatasetShards:
    """Shards of a map-style dataset (``Dataset.to_iterable_dataset``)."""

    paths = None
    is_table = True

    def __init__(self, shards: Sequence[Dataset], batch_rows: int, columns: Sequence[str] | None) -> None:
        self.count = len(shards)
        self.shards = shards
        chosen = None if columns is None else list(columns)
        self._formatted = [shard.with_format("arrow", columns=chosen) for shard in shards]
        self._batch_rows = batch_rows

    def group_rows(self, file_index: int) -> Sequence[int]:
        # Groups of the size in which tables are read, so splitting between groups decodes nothing twice.
        rows, size = len(self.shards[file_index]), self._batch_rows
        return [min(size, rows - start) for start in range(0, rows, size)]

    def is_empty(self, file_index: int) -> bool:
        return not len(self.shards[file_index])

    def read(self, file_index: int, first_row: int) -> Iterator[pa.Table]:
        shard, start = self._formatted[file_index], first_row
        while start < len(shard):
            stop = min(start - start % self._batch_rows + self._batch_rows, len(shard))
            yield shard[start:stop]
            start = stop


class _Generated:
    """Anything that datasets generates from lists of files: CSV, JSON, text, image folders, generators."""

    def __init__(self, leaf: Leaf) -> None:
        self._generate = leaf.generate
        self._parts = leaf.parts()
        self.count = len(self._parts)
        self.is_table = leaf.is_table
        self.paths = _paths_in(leaf.kwargs, self.count)
        self._download = _download_config(leaf)

    def group_rows(self, file_index: int) -> None:
        return None

    def is_empty(self, file_index: int) -> bool:
        if self.paths is None:
            return False
        local = local_path(self.paths[file_index])
        if local is not None:
            return os.path.isfile(local) and os.path.getsize(local) == 0
        return xgetsize(self.paths[file_index], download_config=self._download) == 0

    def read(self, file_index: int, first_row: int) -> Iterator[Any]:
        if self.paths is not None and local_path(self.paths[file_index]) and self.is_empty(file_index):
            return  # the CSV and JSON readers fail on empty files
        skip = first_row
        for _, item in self._generate(**self._parts[file_index]):
            if not self.is_table:
                if skip:
                    skip -= 1
                    continue
                yield item
            elif len(item) <= skip:
                skip -= len(item)
            else:
                yield item.slice(skip)
                skip = 0


def file_sizes(node: Node, paths: Sequence[str]) -> list[int]:
    """Sizes in bytes of the local or remote files of a leaf of a dataset's tree.

    Raises:
      SourceError: a file is missing; names the file.
    """
    download = _download_config(Leaf(node))

    def size_of(path: str) -> int:
        try:
            return xgetsize(local_path(path) or path, download_config=download)
        except FileNotFoundError:
            raise SourceError(
                f"the file {path} of the dataset is missing. Restore it, or make the dataset again from the files that "
                "are there."
            ) from None

    return file_paths.in_threads(size_of, paths)  # each remote size is a round trip


def _download_config(leaf: Leaf) -> DownloadConfig:
    """The options with which datasets opens a leaf's files, such as the token of a private repository."""
    return DownloadConfig(
        storage_options=getattr(leaf.builder, "storage_options", None) or {}, token=getattr(leaf.builder, "token", None)
    )


def _paths_in(kwargs: Mapping[str, object], count: int) -> list[str] | None:
    """The list of ``count`` file names among a generator's arguments; None if there is none."""
    for name in ("base_files", "files", "original_files", *kwargs):
        value = kwargs.get(name)
        if isinstance(value, list) and len(value) == count and all(isinstance(i, str | os.PathLike) for i in value):
            return [str(item) for item in value]
    return None


# A lane whose only file is empty would end the stream for all lanes, so empty files are not assigned to lanes. With
# more files than this, every lane gets several, and checking each file would take too long.
_MAX_LOOKED_INTO = 4096


class Counts:
    """Cached row counts of files, since each count of a remote file is a round trip."""

    def __init__(self) -> None:
        self._group_rows: dict[int, Sequence[int] | None] = {}
        self._filled: list[int] | None = None

    def group_rows(self, files: Files, file_index: int) -> Sequence[int] | None:
        """Rows of each row group of a file, or None if they cannot be counted without reading the file."""
        if file_index not in self._group_rows:
            self._group_rows[file_index] = files.group_rows(file_index)
        return self._group_rows[file_index]

    def filled(self, files: Files) -> list[int]:
        """Indices of the files that are not known to be empty, ascending."""
        if self._filled is None:
            checked = range(files.count) if files.count <= _MAX_LOOKED_INTO else ()
            empty = file_paths.in_threads(files.is_empty, checked)
            self._filled = [index for index in range(files.count) if not (checked and empty[index])]
        return self._filled
