"""Reads arrays from a store: whole chunks through fsspec, each one request, which TensorStore decodes from memory.

TensorStore has drivers of its own for two stores. It would find credentials and endpoints in other ways than the client that
listed the step, and retry by other rules; and there would be a second way of reading for all other stores.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.store_path import StorePath
from meshfeed._src.base.stores import open_store, store_errors
from meshfeed._src.base.threads import Threads
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint.layout import Box, slices

_METADATA = {"zarr": ".zarray", "zarr3": "zarr.json"}


def database_of(directory: StorePath) -> dict[str, JsonValue]:
    """Returns TensorStore's own access to a folder in S3, for an OCDBT database that Orbax wrote locally.

    Raises:
      CheckpointError: TensorStore has no driver for this store.
    """
    url = str(directory)
    file_system, path = open_store(url)
    if not hasattr(file_system, "call_s3"):
        raise CheckpointError(
            f"{url}: is an OCDBT database, as Orbax writes it to folders, which is read from folders, gs:// and s3:// only. "
            "Copy the step into a folder; or save it there with a Checkpointer, which writes each chunk as an object."
        )
    bucket, key, _ = file_system.split_path(path)
    with store_errors(url):
        file_system.connect()
    client = file_system.s3.meta
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": f"{key}/",
        "endpoint": client.endpoint_url,
        "aws_region": client.region_name,
    }


def write_into(room: NDArray[np.generic], part: ts.TensorStore, context: ts.Context) -> ts.WriteFutures:
    """Starts reading all values of ``part`` into the memory of ``room``, which has their shape and dtype."""
    return ts.array(room, copy=False, write=True, context=context).write(part[ts.d[:].translate_to[0]])


class ChunkReader:
    """Fetches and decodes chunks of the arrays below a folder in zarr's format, of version 2 or 3.

    Each thread holds one read's bytes and decoded values. Chunks are decoded in the memory of TensorStore's context.
    """

    def __init__(self, directory: StorePath, num_threads: int, context: ts.Context) -> None:
        self._directory, self._context = directory, context
        self._threads = Threads(num_threads, "meshfeed-chunks")
        self._reads = itertools.count()
        self._metadata: dict[str, bytes] = {}

    def open(self, spec: dict[str, JsonValue], name: str) -> Any:
        """Starts opening an array; the result of the future has its shape, dtype and chunks, but no values."""
        key = metadata_key_of(spec)

        def run() -> ts.TensorStore:
            self._metadata[name] = (self._directory / name / key).read_bytes()
            return self._memory(spec, f"metadata/{name}/", {key: self._metadata[name]})

        return self._threads.submit(run)

    def _memory(self, spec: dict[str, JsonValue], prefix: str, content: dict[str, bytes]) -> ts.TensorStore:
        kvstore: dict[str, JsonValue] = {"driver": "memory", "path": prefix}
        memory = ts.KvStore.open(kvstore, context=self._context).result()
        for key, value in content.items():
            memory[key] = value
        return ts.open({**spec, "kvstore": kvstore}, open=True, read=True, context=self._context).result()

    def read(
        self, spec: dict[str, JsonValue], store: ts.TensorStore, name: str, box: Box, room: NDArray[np.generic]
    ) -> Callable[[], NDArray[np.generic]]:
        """Starts reading a box; the result waits until its values are in ``room``."""
        key = metadata_key_of(spec)

        def run() -> NDArray[np.generic]:
            content = {key: self._metadata[name]}
            for chunk in self._chunks(store, name, box):
                try:
                    content[chunk] = (self._directory / name / chunk).read_bytes()
                except FileNotFoundError:
                    pass  # TensorStore knows whether the fill value takes its place
            prefix = f"read-{next(self._reads)}/"  # of its own, since two reads may need one chunk
            try:
                part = self._memory(spec, prefix, content)[slices(box)]
                content.clear()
                write_into(room, part, self._context).result()
                return room
            finally:
                memory = ts.KvStore.open({"driver": "memory", "path": prefix}, context=self._context).result()
                memory.delete_range(ts.KvStore.KeyRange()).result()

        return self._threads.submit(run).result

    def _chunks(self, store: ts.TensorStore, name: str, box: Box) -> list[str]:
        """Returns the names of the chunks that hold a box; of the shards, if each holds several chunks."""
        metadata = json.loads(self._metadata[name])
        layout = store.chunk_layout.write_chunk
        shape: Sequence[int] = [size or 1 for size in layout.shape or ()] if store.rank else []
        ranges = [range(start // size, -(-stop // size)) for (start, stop), size in zip(box, shape, strict=True)]
        numbers = [list(map(str, parts)) for parts in itertools.product(*ranges)]
        encoding = metadata.get("chunk_key_encoding", {})
        if encoding.get("name") == "default":  # of version 3
            separator = encoding.get("configuration", {}).get("separator", "/")
            return [separator.join(["c", *parts]) for parts in numbers]
        separator = encoding.get("configuration", {}).get("separator") or metadata.get("dimension_separator") or "."
        return [separator.join(parts) or "0" for parts in numbers]


def metadata_key_of(spec: Mapping[str, JsonValue]) -> str:
    """Returns the name of the file of metadata of an array with this spec of TensorStore's."""
    return str(spec.get("metadata_key") or _METADATA[spec["driver"]])
