"""What one host costs in a job of up to 4,096 hosts that mixes 35 components in 10,000 shards of an object store.

Two hosts run the whole feed in one process: host 0, which reduces, and the last, which does not. The answers of the others
are those of the last host, so the reducer works on as many values as in a real job, and each request of a host to the
coordinator or the store is counted. What all hosts together cost is a figure times their number. Time on the network and
in the coordination service is not in these figures; ``scripts/bench agreement`` drives the real one.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import _store
from benchmarks._measure import Table, main, with_cpu_devices

ROOT = pathlib.Path(__file__).parents[1]
SIZES = ((2, 100, 1), (64, 1_000, 8), (512, 10_000, 35), (4_096, 10_000, 35))  # hosts, shards, components
RECORDS, RECORD_BYTES, DEVICES, ROWS = 16, 1024, 4, 4  # of a shard; of a host
STEPS = 200


def probes_of(source: Any) -> dict[str, str]:
    """What all hosts together publish of a mixture: the digests that identify its components."""
    from meshfeed._src.reading import shared_probes

    known: dict[str, str] = {}
    token = shared_probes._known.set(known)
    if components := getattr(source, "components", None):
        components.identities()
    shared_probes._known.reset(token)
    return known


def echoing_store(num_hosts: int, host: Any, probes: Mapping[str, str]) -> Any:
    """A key-value store in which all other hosts appear to have written the same values as the last host.

    Of what identifies a mixture, host 1 appears to have read all that other hosts read.
    """
    from memory_store import MemoryStore

    last = str(num_hosts - 1)
    of_another = re.compile(r"(?<=/)\d+$")

    class Echoing(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.calls: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
            self.num_bytes: collections.Counter[int] = collections.Counter()

        def _key(self, key: str) -> str:
            found = of_another.search(key)
            return key[: found.start()] + last if found and 0 < int(found[0]) < int(last) and "/in/" in key else key

        def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
            self.calls[host()]["set"] += 1
            super().set(key, value, overwrite=overwrite)

        def get(self, key: str, seconds: float) -> str | None:
            self.calls[host()]["get"] += 1
            return super().get(self._key(key), seconds)

        def try_get(self, key: str) -> str | None:
            self.calls[host()]["get"] += 1
            return super().try_get(self._key(key))

        def directory(self, prefix: str) -> dict[str, str]:
            self.calls[host()]["list"] += 1
            found = super().directory(prefix)
            if "/probes/" in prefix:
                found |= {str(number): "{}" for number in range(2, int(last))} | {"1": json.dumps(probes)}
            elif last in found:
                found |= {str(number): found[last] for number in range(1, int(last))}
            self.num_bytes[host()] += sum(map(len, found.values()))
            return found

        def delete(self, key: str) -> None:
            self.calls[host()]["delete"] += 1
            super().delete(key)

        def increment(self, key: str) -> int:
            self.calls[host()]["increment"] += 1
            return super().increment(key)

    return Echoing()


def write(folder: str, shards: int, components: int) -> dict[str, str]:
    """Writes a manifest per component, of files that all have the same content; returns component → its path."""
    from array_record.python.array_record_module import ArrayRecordWriter

    from meshfeed._src.sources.files.manifest import FileEntry, write_manifest

    path = f"{folder}/records"
    writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
    for number in range(RECORDS):
        writer.write(number.to_bytes(4, "little") * (RECORD_BYTES // 4))
    writer.close()
    size, digest = os.path.getsize(path), "xxh3_64:0123456789abcdef"
    found = {}
    for number in range(components):
        names = [f"c{number}-{i:05}.array_record" for i in range(number, shards, components)]
        for name in names:
            os.link(path, f"{folder}/{name}")
        entries = [FileEntry(f"{folder}/{name}", size, RECORDS, digest, {"group_size": 1}) for name in names]
        found[f"c{number}"] = f"c{number}.json"
        write_manifest(f"{folder}/c{number}.json", "ArrayRecord", entries)
    return found


def child(options: argparse.Namespace) -> None:
    """Runs the two hosts of one size in this process and prints their figures."""
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("model", "chaos")]
    import numpy as np
    import psutil
    import simulated_hosts
    from jax.sharding import AxisType, Mesh

    import meshfeed
    from meshfeed._src.plan.topology import fake_devices

    hosts, url, manifests = options.hosts, options.url, json.loads(options.manifests)
    process = psutil.Process()
    decode = meshfeed.sources.DecodeRaw(np.int32, RECORD_BYTES // 4)
    ready, figures = threading.Barrier(2), {}

    def source() -> Any:
        parts = {
            name: meshfeed.sources.ArrayRecord(f"{url}/{path}", decode_batch=decode) for name, path in manifests.items()
        }
        if len(parts) == 1:
            return next(iter(parts.values()))
        return meshfeed.sources.Mixture(parts, weights={name: 1.0 + i % 3 for i, name in enumerate(parts)})

    def play(host: int) -> None:
        devices = fake_devices(hosts, DEVICES, this_process=host)
        mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
        settings: dict[str, Any] = {"shuffle": "shards" if options.order == "shards" else True, "num_epochs": None}
        first = host == 0
        if first:
            _store.sent(url)
            before = process.memory_info().rss, process.num_fds(), threading.active_count()
        ready.wait()
        begun = time.perf_counter()
        feed = meshfeed.Feed(source(), mesh, global_batch_size=ROWS * hosts, **settings)
        next(feed)
        seconds = time.perf_counter() - begun
        ready.wait()
        if first:
            figures["first batch, s"] = seconds
            figures["requests to the store, first batch"] = _store.sent(url)[1] / 2
            figures["requests to the coordinator, first batch"] = calls()
        for _ in range(STEPS):
            next(feed)
        ready.wait()
        if first:
            figures["… and 200 steps"] = calls()
            figures["KB read by the reducer, first batch and 200 steps"] = store.num_bytes[0] / 1024
            figures["requests to the store per batch"] = _store.sent(url)[1] / 2 / STEPS
            figures["threads"] = (threading.active_count() - before[2]) / 2
            figures["descriptors"] = (process.num_fds() - before[1]) / 2
            figures["MiB"] = (process.memory_info().rss - before[0]) / 2 / 2**20
        ready.wait()
        state = feed.get_state()
        feed.close()
        if first:
            figures["state, bytes"] = len(json.dumps(state))
        ready.wait()
        begun = time.perf_counter()
        with meshfeed.Feed(source(), mesh, global_batch_size=ROWS * hosts, **settings) as feed:
            feed.set_state(state)
            next(feed)
            if first:
                figures["restart, s"] = time.perf_counter() - begun
            ready.wait()

    def calls() -> str:
        return f"{sum(store.calls[1].values())} / {sum(store.calls[0].values())}"

    with simulated_hosts.simulation():
        here = simulated_hosts._current[-1]
        # The last host counts as 1, regardless of how many hosts there are.
        store = echoing_store(hosts, lambda: min(here.host, 1), probes_of(source()))
        job = simulated_hosts.Job(hosts, store)
        errors: list[BaseException] = []

        def run_as(host: int) -> None:
            here.job, here.host = job, host
            try:
                play(host)
            except BaseException as error:
                errors.append(error)
                ready.abort()

        players = [threading.Thread(target=run_as, args=(host,), daemon=True) for host in (0, hosts - 1)]
        for player in players:
            player.start()
        for player in players:
            player.join()
        if errors:
            raise errors[0]
    print(json.dumps(figures), flush=True)
    os._exit(0)


def one(folder: str, url: str, order: str, size: tuple[int, int, int], manifests: Mapping[str, str]) -> dict[str, Any]:
    """Returns the row of one size."""
    hosts, shards, components = size
    command = [sys.executable, "-m", "benchmarks.cluster", "--child", "--hosts", str(hosts), "--url", url]
    command += ["--order", order, "--manifests", json.dumps(manifests)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, check=True, cwd=ROOT)
    row = {"hosts": hosts, "shards": shards, "components": components, "order": order}
    return row | json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace) -> Iterator[Table]:
    rows = []
    for size in [size for size in SIZES if size[0] in options.of]:
        with tempfile.TemporaryDirectory() as folder:
            manifests = write(folder, *size[1:])
            with _store.serve(folder, bandwidth=1e9, latency=options.latency) as url:
                rows += [one(folder, url, order, size, manifests) for order in ("records", "shards")]
    note = "Requests to the coordinator are those of a host / of the reducer. MiB, threads and descriptors are of one host."
    yield Table(
        f"one host, {ROWS} rows of {RECORD_BYTES} bytes per batch, {options.latency * 1e3:.0f} ms per request",
        rows,
        note,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--latency", type=float, default=0.005, help="seconds per request to the store")
    parser.add_argument("--of", type=int, nargs="*", default=[size[0] for size in SIZES], help="numbers of hosts")
    for name in ("--url", "--manifests", "--order"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


if __name__ == "__main__":
    with_cpu_devices(1)
    main(__doc__, measure, add_arguments, child)
