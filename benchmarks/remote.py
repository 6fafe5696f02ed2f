"""Remote ArrayRecord files: opening 10,000 of them with a manifest, and batches of records without a cache.

An HTTP server on this machine answers each request after a delay. Files are shuffled uniformly; the feed reads batches of 64
records of 8 KB as byte ranges. Client and server share the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import tempfile
from multiprocessing.connection import Connection

import numpy as np

from benchmarks._measure import Table, Way, main, rates, take_turns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--records", type=int, default=4_000, help="in each file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way in each round")


class _Server(asyncio.Protocol):
    """Answers GET and HEAD with ranges of files, each after a delay."""

    def __init__(self, files: dict[str, bytes], latency: float) -> None:
        self._files, self._latency, self._received = files, latency, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            asyncio.get_running_loop().call_later(self._latency, self._answer, head)

    def _answer(self, head: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        content = self._files.get(path.decode())
        wanted = re.search(rb"range: bytes=(\d*)-(\d+)", head.lower())
        if content is None:
            answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        elif wanted:
            first, last = (int(wanted[1]), int(wanted[2])) if wanted[1] else (-int(wanted[2]), len(content))
            body = content[first : last + 1]
            start = first % len(content)
            answer = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n" % len(body)
            answer += b"Content-Range: bytes %d-%d/%d\r\n\r\n" % (start, start + len(body) - 1, len(content)) + body
        else:
            answer = b"HTTP/1.1 200 OK\r\nAccept-Ranges: bytes\r\nContent-Length: %d\r\n\r\n" % len(content)
            answer += b"" if method == b"HEAD" else content
        self._transport.write(answer)  # type: ignore[attr-defined]


def _serve(folder: str, latency: float, ready: Connection) -> None:
    files = {f"/{name}": open(f"{folder}/{name}", "rb").read() for name in os.listdir(folder)}  # noqa: SIM115

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Server(files, latency), "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def _write(folder: str, options: argparse.Namespace) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    from meshfeed._src.sources.files.manifest import FileEntry, write_manifest

    rng = np.random.default_rng(0)
    for number in range(options.files):
        writer = ArrayRecordWriter(f"{folder}/{number}.array_record", "group_size:1,uncompressed")
        for _ in range(options.records):
            writer.write(rng.integers(0, 256, 8192, np.uint8).tobytes())
        writer.close()
    names = [f"{folder}/train-{number:05}-of-10000.array_record" for number in range(10_000)]
    digest = "xxh3_64:0123456789abcdef"
    entries = [FileEntry(name, 100 << 20, 1000, digest, {"group_size": 1}) for name in names]
    write_manifest(f"{folder}/manifest.json", "ArrayRecord", entries)


def measure(options: argparse.Namespace) -> list[Table]:
    import jax

    import meshfeed
    from meshfeed.sources import ArrayRecord, DecodeRaw

    turns = {"rounds": options.rounds, "seconds": options.seconds}
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, options)
        here, there = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, options.latency, there))
        server.start()
        try:
            url = f"http://127.0.0.1:{here.recv()}"
            urls = [f"{url}/{number}.array_record" for number in range(options.files)]

            def feed(num_threads: int | None) -> Way:
                source = ArrayRecord(urls, decode_batch=DecodeRaw(np.uint8, 8192))
                batches = meshfeed.Feed(
                    source, mesh, global_batch_size=64, shuffle=True, num_epochs=None, num_threads=num_threads
                )
                next(batches)

                def run() -> int:
                    next(batches)
                    return 1

                return Way(run, drain=8, close=batches.close)

            def open_manifest() -> int:
                return 1 if len(ArrayRecord(f"{url}/manifest.json")) else 0

            ways = {"by default": feed(None), **{f"num_threads={number}": feed(number) for number in (1, 2, 8)}}
            direct = take_turns(ways, **turns)
            opened = take_turns({"with a manifest": Way(open_manifest)}, **turns)
        finally:
            server.kill()
    what = f"batches of 64 × 8 KB, {options.latency * 1e3:.0f} ms per request"
    return [
        rates(what, "batches", direct, ours="by default"),
        rates("a data set of 10,000 files", "opens", opened, ours="with a manifest"),
    ]


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
