"""A program whose reads hang for ever: it catches StalledError for each kind of source named, and leaves with code 3."""

from __future__ import annotations

import functools
import http.server
import pathlib
import sys
import tempfile
import threading
from typing import Any

import jax
import numpy as np

import meshfeed
from meshfeed._src.base import read_ahead, threads

FOREVER = threading.Event()


class Records:
    """Two batches that can be read, and then none: the third waits for ever."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: Any) -> dict[str, Any]:
        if record_id >= 16:
            FOREVER.wait()
        return {"x": np.float32(record_id)}

    def __repr__(self) -> str:
        return "Records()"

    def fingerprint(self) -> str:
        return "hangs"  # or the feed would read records all over the source when it is made


class SlowRecords(Records):
    """Waits so long for each record that Grain lanes read the next block on their pool of threads."""

    def __getitem__(self, record_id: Any) -> dict[str, Any]:
        FOREVER.wait(0.005)
        return super().__getitem__(record_id)


def grain_batches(*, in_thread: bool = False) -> Any:
    import grain

    batches = grain.MapDataset.source(Records()).batch(8).to_iter_dataset()
    if in_thread:
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=1)
    return batches


def grain_lanes() -> Any:
    import grain

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return grain.MapDataset.source(SlowRecords()).to_iter_dataset(options)


def grain_loader() -> Any:
    import grain

    sampler = grain.samplers.SequentialSampler(64, grain.sharding.NoSharding())
    return grain.DataLoader(data_source=Records(), sampler=sampler, operations=[grain.transforms.Batch(8)])


def hugging_face() -> Any:
    import datasets

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        if max(rows["x"]) >= 16:
            FOREVER.wait()
        return rows

    return datasets.Dataset.from_dict({"x": list(range(64))}).with_transform(transform)


class _HalfAFile(http.server.BaseHTTPRequestHandler):
    """Serves files of ``folder``; of whole files other than the first one only the beginning, and then nothing."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, folder: pathlib.Path) -> None:
        self.folder = folder
        super().__init__(*args)

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._begin(200, len(self._content()))

    def _content(self) -> bytes:
        return (self.folder / self.path.strip("/")).read_bytes()

    def _begin(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def do_GET(self) -> None:
        if not (self.folder / self.path.strip("/")).exists():  # there is no manifest
            self._begin(404, 0)
            return
        content = self._content()
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if last:
            content = content[int(first) : int(last) + 1]
            self._begin(206, len(content))
            self.wfile.write(content)
            return
        self._begin(206 if first else 200, len(content))  # the whole file, with an open range or none
        self.wfile.write(content[:100])
        self.wfile.flush()
        if self.path != "/0":
            FOREVER.wait()
        self.wfile.write(content[100:])


def shards() -> Any:
    from array_record.python import array_record_module

    folder = pathlib.Path(tempfile.mkdtemp())
    for shard in range(4):
        writer = array_record_module.ArrayRecordWriter(str(folder / str(shard)), "group_size:1")
        for number in range(4):
            writer.write(np.float32(number).tobytes())
        writer.close()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_HalfAFile, folder=folder))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = meshfeed.sources.ArrayRecord(
        [f"http://127.0.0.1:{server.server_address[1]}/{shard}" for shard in range(4)],
        decode=lambda record: {"x": np.frombuffer(record, np.float32)},
        cache=meshfeed.ShardCache(tempfile.mkdtemp()),
    )
    source.fingerprint = lambda: "hangs"  # type: ignore[method-assign] # see Records.fingerprint
    return source


def maxtext_loader() -> Any:
    """MaxText's loop passes a Grain DataLoader and gives no time-out."""
    from meshfeed import maxtext
    from meshfeed._src.maxtext import loader

    loader._TIMEOUT_SECONDS = 1.0
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return maxtext.MultiHostDataLoadIterator(grain_loader(), mesh)


SOURCES = {
    "plain": Records,
    "threads": Records,
    "grain": grain_lanes,
    "grain_dataset": lambda: meshfeed.sources.HostBatches(grain_batches()),
    "grain_iterator": lambda: iter(grain_batches()),
    "grain_thread": lambda: meshfeed.sources.HostBatches(grain_batches(in_thread=True)),
    "grain_loader": grain_loader,
    "hugging_face": hugging_face,
    "shards": shards,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"global_batch_size": 8},
    "threads": {"global_batch_size": 8, "num_threads": 2},
    "grain": {"global_batch_size": 8, "num_lanes": 1},
    "hugging_face": {"global_batch_size": 8},
    "shards": {"global_batch_size": 8},
}


def make_feed(kind: str) -> Any:
    if kind == "maxtext":
        return maxtext_loader()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(SOURCES[kind](), mesh, timeout_seconds=1, **OPTIONS.get(kind, {}))


def stall(kind: str, *, close: bool) -> Any:
    """A feed that has stalled; it is kept, so that what it holds is there at exit."""
    feed = make_feed(kind)
    try:
        for _ in range(4):
            next(feed)
    except meshfeed.StalledError:
        print("stalled", kind, flush=True)
    if close:
        feed.close()
        print("closed", kind, flush=True)
    return feed


def main() -> None:
    read_ahead._JOIN_SECONDS = threads._CLOSE_SECONDS = 0.2
    close, kinds = sys.argv[1] == "close", sys.argv[2:]
    feeds = [stall(kind, close=close) for kind in kinds]
    waited_for = [thread.name for thread in threading.enumerate() if not thread.daemon]
    print("leaving", len(feeds), *waited_for, flush=True)
    sys.exit(3)


if __name__ == "__main__":
    main()
