"""WebDataset's tar archives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshfeed._src.convert.buffers import binary
from meshfeed._src.convert.inputs import Input, Scan
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed._src.sources.files.shard_reader import read_spans
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
