"""Shards of other loaders, read with our sources: WebDataset's tar archives, and data sets of Mosaic Streaming."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshfeed._src.base.errors import SourceError
from meshfeed._src.convert.inputs import Input, Scan, binary
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.shard_cache import ShardCache
from meshfeed._src.sources.files.shard_reader import read_spans
from meshfeed._src.sources.mds import MDS
from meshfeed._src.sources.webdataset import TarIndex
from meshfeed._src.sources.webdataset import scan as scan_tar

if TYPE_CHECKING:
    import pyarrow as pa


_ROWS = 256


class WebDatasets(Input):
    """Samples of tar archives: the key, and the bytes of each file by its extension."""

    name = "webdataset"

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        index = scan_tar(Descriptor(path), path)
        names = ["__key__", *sorted(name for name in index.names() if name)]
        return Scan(index.num_samples, pa.schema([(name, pa.large_binary()) for name in names]))

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        archive = Descriptor(path)
        index: TarIndex = scan_tar(archive, path)
        for low in range(start, stop, _ROWS):
            rows = np.arange(low, min(low + _ROWS, stop))
            samples = index.records(rows, read_spans(archive, *index.bounds(rows)), path)
            for sample in samples:
                sample["__key__"] = sample["__key__"].encode("utf-8", "surrogateescape")
            yield pa.RecordBatch.from_arrays(
                [binary([sample.get(name) for sample in samples]) for name in schema.names], schema=schema
            )


class Mds(Input):
    """Samples of Mosaic Streaming's MDS. JSON becomes text; images stay the bytes of their files."""

    name = "mds"

    def num_bytes(self, path: str) -> int:
        """See :class:`Input`."""
        return sum(shard["raw_data"]["bytes"] for shard in _mds_index(path)["shards"])

    def scan(self, path: str, *, all_types: bool) -> Scan:
        """See :class:`Input`."""
        import pyarrow as pa

        shard = _mds_index(path)["shards"][0]
        encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
        with self._opened(path) as source:
            first, count = source[0], len(source)
        kinds = {name: _mds_type(name, encodings[name], first[name]) for name in self.columns or first if name in first}
        fields = [(name, kinds.get(name, pa.null())) for name in sorted(first)]
        return Scan(count, pa.schema(fields), more=encodings)

    def read(self, path: str, scan: Scan, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """See :class:`Input`."""
        import pyarrow as pa

        with self._opened(path, [name for name in schema.names if name in scan.more]) as source:
            for low in range(start, stop, _ROWS):
                rows = source.__getitems__(range(low, min(low + _ROWS, stop)))
                columns = [[_mds_value(row.get(name), scan.more.get(name)) for row in rows] for name in schema.names]
                try:
                    arrays = [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
                except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                    raise SourceError(
                        f"{path}: records {low} to {low + len(rows) - 1} hold values that differ from record 0 in type or "
                        f"rank: {error}. Leave the column out with --columns."
                    ) from error
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    @contextlib.contextmanager
    def _opened(self, path: str, columns: Sequence[str] | None = None) -> Iterator[MDS]:
        """Opens a data set; shards that are stored compressed are unpacked into a temporary folder of the job."""
        with contextlib.ExitStack() as stack:
            cache = None
            if any(shard.get("zip_data") for shard in _mds_index(path)["shards"]):
                cache = ShardCache(
                    stack.enter_context(tempfile.TemporaryDirectory(prefix="mds.", suffix=".part", dir=self.scratch))
                )
            source = MDS(path, columns, image_bytes=True, cache=cache)
            stack.callback(source.close)
            yield source


def _mds_index(path: str) -> dict[str, Any]:
    with open(os.path.join(path, "index.json"), "rb") as file:
        return json.load(file)


def _mds_type(name: str, encoding: str, value: object) -> pa.DataType:
    """Returns the Arrow type of a column, by its encoding or its first value."""
    import pyarrow as pa

    if encoding == "json" or isinstance(value, str) or encoding == "str_decimal":
        return pa.large_string()
    if isinstance(value, bytes):
        return pa.large_binary()
    if isinstance(value, np.ndarray | np.generic):
        kind = pa.from_numpy_dtype(value.dtype)
        for _ in range(np.ndim(value)):
            kind = pa.list_(kind)
        return kind
    if isinstance(value, list):
        raise SourceError(
            f"the column {name!r} holds lists ({encoding}), which convert does not read. Choose other columns with --columns."
        )
    return pa.float64() if isinstance(value, float) else pa.int64()


def _mds_value(value: object, encoding: str | None) -> object:
    if encoding == "json":
        return json.dumps(value, ensure_ascii=False)
    if encoding == "str_decimal":
        return str(value)
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim > 1 else value
