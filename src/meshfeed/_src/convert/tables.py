"""Tables: Parquet files and Hugging Face datasets on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshfeed._src.base.errors import CorruptDataError, missing_package
from meshfeed._src.convert.inputs import Input, Scan
from meshfeed._src.sources.files.parquet import ParquetFile

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_ROWS = 1000  # of a dataset, read at a time


class ParquetFiles(Input):
    """Rows of Parquet files."""

    name = "parquet"

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        with ParquetFile(path) as file:
            return Scan(file.metadata.num_rows, file.schema)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        with ParquetFile(path) as file:
            names = [name for name in schema.names if name in file.schema.names]
            for _, batch in file.batches(start, stop, names):
                yield batch


class Datasets(Input):
    """Hugging Face datasets: folders that ``save_to_disk`` wrote, and Arrow files."""

    name = "huggingface"

    def num_bytes(self, path: str) -> int:
        """See :class:`Input`."""
        if os.path.isfile(path):
            return super().num_bytes(path)
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.endswith(".arrow"))

    def _open(self, path: str) -> datasets.Dataset:
        try:
            import datasets
        except ImportError as error:
            raise missing_package(f"reading {path}", error, "hf") from error
        try:
            found = datasets.Dataset.from_file(path) if os.path.isfile(path) else datasets.load_from_disk(path)
        except Exception as error:  # whatever Arrow, json and datasets raise for a damaged folder
            raise CorruptDataError(
                f"{path} cannot be opened as a Hugging Face dataset: {error}. Save it again with save_to_disk.",
                path=path,
            ) from error
        assert isinstance(found, datasets.Dataset)  # formats.py refuses a folder of several splits
        return found.with_format("arrow")

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        dataset = self._open(path)
        return Scan(len(dataset), dataset.features.arrow_schema.remove_metadata())

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        dataset = self._open(path)
        for low in range(start, stop, _ROWS):
            table: pa.Table = dataset[low : min(low + _ROWS, stop)]  # type: ignore[assignment]  # formatted as Arrow
            yield from table.select([name for name in schema.names if name in table.column_names]).to_batches()
