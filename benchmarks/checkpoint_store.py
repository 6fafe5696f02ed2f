"""Checkpoints in a bucket: MB/s of save and restore beside s3fs, which copies the same files with as many requests at once.

The bucket is moto's, in a process of its own, first as fast as it is and then behind a link of limited bandwidth, as clusters
have one: without it, the server takes most of the processor. "s3fs" uploads the files of a step that lie in a local folder
and downloads them into memory, and neither makes digests nor places arrays on devices.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks._measure import Table, main, spread, with_cpu_devices

with_cpu_devices(8)

BUCKET = "bench"
AT_ONCE = 16  # uploads of a Checkpointer


def serve(bandwidth: float) -> None:
    """Runs moto behind a link of so many bytes per second in each direction, shared by all connections."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app, lock, free_at = DomainDispatcherApplication(create_backend_app), threading.Lock(), [0.0, 0.0]

    def send(num_bytes: int, direction: int) -> None:
        if bandwidth:
            with lock:
                free_at[direction] = max(free_at[direction], time.monotonic()) + num_bytes / bandwidth
                wait = free_at[direction] - time.monotonic()
            time.sleep(max(0.0, wait))

    def link(environ: Any, start_response: Any) -> Iterator[bytes]:
        send(int(environ.get("CONTENT_LENGTH") or 0), 0)
        for part in app(environ, start_response):
            send(len(part), 1)
            yield part

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *args: object) -> None:
            pass

    server = make_server("127.0.0.1", 0, link, threaded=True, request_handler=Quiet)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


@contextlib.contextmanager
def bucket(bandwidth: float) -> Iterator[Any]:
    """Starts the store, and yields s3fs's file system for it."""
    import s3fs

    from meshfeed._src.base import stores

    command = [sys.executable, "-m", "benchmarks.checkpoint_store", "--child", "--bandwidth-mb", str(bandwidth / 1e6)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ |= {
                "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            stores._file_system.cache_clear()
            s3fs.S3FileSystem.clear_instance_cache()
            files = s3fs.S3FileSystem()
            files.mkdir(BUCKET)
            yield files
        finally:
            server.terminate()


def table(options: argparse.Namespace, bandwidth: float) -> Table:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from meshfeed.checkpoint import Checkpointer

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("data"))
    elements = options.mib * (1 << 20) // 4 // 16
    make = jax.jit(lambda key: jax.random.normal(key, (elements // 1024, 1024), jnp.float32), out_shardings=place)
    state = {f"layer{number}": make(jax.random.key(number)) for number in range(16)}
    megabytes = sum(leaf.nbytes for leaf in state.values()) / 1e6
    rates: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        rates.setdefault(name, []).append(megabytes / (time.perf_counter() - start))

    local = pathlib.Path(tempfile.mkdtemp())
    try:
        with bucket(bandwidth) as files, ThreadPoolExecutor(AT_ONCE) as threads:
            files.get(_first_step(files, state), str(local), recursive=True)
            paths = [path for path in local.rglob("*") if path.is_file()]
            for turn in range(options.rounds):
                keys = [f"{BUCKET}/copy{turn}/{path.relative_to(local)}" for path in paths]
                timed("s3fs, upload", lambda keys=keys: list(threads.map(files.put_file, map(str, paths), keys)))
                timed("s3fs, download", lambda keys=keys: list(threads.map(files.cat_file, keys)))
                with Checkpointer(f"s3://{BUCKET}/run{turn}", save_interval_steps=1) as ours:
                    ours.restore(state)  # finds none; connects

                    def save(ours: Any = ours) -> None:
                        ours.save(1, state)
                        ours.wait()

                    timed("meshfeed, save", save)
                    timed("meshfeed, restore", lambda ours=ours: jax.block_until_ready(ours.restore(state)[1]))
                files.rm([f"{BUCKET}/copy{turn}", f"{BUCKET}/run{turn}"], recursive=True)
    finally:
        shutil.rmtree(local)
    rows = []
    for name, peer in (
        ("s3fs, upload", None), ("meshfeed, save", "s3fs, upload"),
        ("s3fs, download", None), ("meshfeed, restore", "s3fs, download"),
    ):  # fmt: skip
        rate = statistics.median(rates[name])
        share = rate / statistics.median(rates[peer]) if peer else None
        rows.append({"way": name, "MB/s": rate, "quartiles": spread(rates[name]), "share of s3fs": share})
    link = f"a link of {bandwidth / 1e6:,.0f} MB/s" if bandwidth else "no limit of the link"
    return Table(f"checkpoint of {megabytes:,.0f} MB in an emulated S3, {link}", rows)


def _first_step(files: Any, state: Any) -> str:
    from meshfeed.checkpoint import Checkpointer

    with Checkpointer(f"s3://{BUCKET}/first", save_interval_steps=1) as first:
        first.save(1, state)
    return f"{BUCKET}/first/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--bandwidths-mb", type=float, nargs="+", default=[0, 100], help="MB per second; 0 for no limit"
    )
    parser.add_argument("--bandwidth-mb", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def measure(options: argparse.Namespace) -> Iterator[Table]:
    for bandwidth in options.bandwidths_mb:
        yield table(options, bandwidth * 1e6)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments, child=lambda options: serve(options.bandwidth_mb * 1e6))
