"""A remote mixture along shards on several hosts: what each downloads per epoch, and after a change of their number.

Hosts are simulated in one process: each has the reader of its rows, and a cache folder of its own with room for 1.1 times
its share of the set. They read in turn from an HTTP server in another process, which counts bytes. A share is the set
divided by the number of hosts. Shards have from a half to one and a half of ``--records``, so that lanes end within shards.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import _data
from benchmarks._measure import Table, main, with_cpu_devices
from benchmarks._store import sent, serve
from tests.streams.stream_parts import rows_of_host, settings_of

with_cpu_devices(1)

VALUES = 128  # int32 per record
ROOM = 1.1  # of a host's share
LANES, BATCH = 48, 384  # divided by 8, 6 and 4 hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--components", type=int, default=8)
    parser.add_argument("--shards", type=int, default=160, help="per component")
    parser.add_argument("--records", type=int, default=24, help="per shard, about, of 512 bytes")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--only", default="epochs,changes,stalls")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="of the throttled job")
    parser.add_argument("--ratio", type=float, default=1.3, help="bandwidth over consumption of the throttled job")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds per request of the throttled job")


def write_components(root: str, options: argparse.Namespace) -> int:
    """Writes a folder of shards per component; returns the bytes of all."""
    rng, total = np.random.default_rng(1), 0
    for number in range(options.components):
        folder = os.path.join(root, f"c{number}")
        os.mkdir(folder)
        lengths = rng.integers(options.records // 2, options.records * 3 // 2 + 1, options.shards)
        total += _data.write_mds(folder, lengths.tolist(), VALUES, number << 24)
    return total


def mixture(url: str, components: int, cache: Any) -> Any:
    """The components by their sizes, so that all end together."""
    from meshfeed.sources import MDS, Mixture

    parts = {f"c{number}": MDS(f"{url}/c{number}", cache=cache) for number in range(components)}
    return Mixture(parts, {name: len(part) for name, part in parts.items()})


class Hosts:
    """The hosts of a job.

    Args:
      url: where the components are.
      total: bytes of all shards.
      folders: the cache folder of each host.
      options: the options of the benchmark.
      settings: of the feed.
      state: where to begin; None for the beginning.
    """

    def __init__(
        self,
        url: str,
        total: int,
        folders: Sequence[str],
        options: argparse.Namespace,
        settings: dict[str, Any],
        state: Any = None,
    ) -> None:
        import meshfeed
        from meshfeed._src.state.state import parse_state
        from meshfeed._src.streams.random_access import RandomAccessStream
        from meshfeed._src.streams.random_access_reader import _files_of_steps as files_of_steps

        number = len(folders)
        self._settings = settings_of(global_batch_size=BATCH, num_lanes=LANES, **settings)
        self._caches = [meshfeed.ShardCache(folder, int(ROOM * total / number)) for folder in folders]
        self._stream: Any = None
        self._readers: list[Any] = []
        self.least_bytes = 0  # of the files that hosts need and do not have
        for host, cache in enumerate(self._caches):
            self._stream = RandomAccessStream(mixture(url, options.components, cache), self._settings)
            start = self._stream.start()
            cursor = start if state is None else self._stream.restore(parse_state(json.loads(state)))
            rows = rows_of_host(list(range(number)), host)
            self._readers.append(self._stream.open_reader(cursor, rows, hosts_agree=True))
            self._start, self.num_steps = start, self._stream.num_steps(start)
            plan: Any = files_of_steps(self._stream.source, cursor, self.num_steps, rows, None)
            missing = {file for files in plan for file in files if not cache.is_cached(file.url)}
            self.least_bytes += sum(file.num_bytes for file in missing)

    def read(self, steps: int) -> list[int]:
        """Reads steps on all hosts, and returns the bytes that each host downloaded for them."""
        before = [cache.stats().fetched_bytes for cache in self._caches]
        for _ in range(steps):
            for reader in self._readers:
                reader.next()
        return [cache.stats().fetched_bytes - a for cache, a in zip(self._caches, before, strict=True)]

    def state_at(self, step: int) -> str:
        """The state before a step, as JSON."""
        return json.dumps(self._stream.state(self._stream.replay_from(self._start, step, None)).to_json())

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        for cache in self._caches:  # fetches under way continue to completion
            while any(cache.directory.glob("*.part")):
                time.sleep(0.01)
            for plan in cache.directory.glob("*.plan"):  # as that of a process that has ended, which this one has not
                plan.unlink()


def shuffles() -> dict[str, Any]:
    import meshfeed

    return {"with affinity": meshfeed.ShardShuffle(affinity=True), '"shards"': "shards"}


def epochs(url: str, total: int, options: argparse.Namespace) -> Table:
    """Two epochs, whose files each cache fetches ahead."""
    rows = []
    for name, shuffle in shuffles().items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            folders = [f"{folder}/{host}" for host in range(options.hosts)]
            hosts = Hosts(url, total, folders, options, {"shuffle": shuffle, "num_epochs": 2})
            sent(url)
            row: dict[str, Any] = {"order": name, "least possible": hosts.least_bytes / total}
            for epoch, steps in enumerate((hosts.num_steps // 2, -(-hosts.num_steps // 2)), 1):
                shares = [
                    options.hosts * found / total for found in hosts.read(steps)
                ]  # of the files that are complete
                num_bytes, requests = sent(url)
                row |= {
                    f"epoch {epoch}: sent / set": num_bytes / total,
                    f"epoch {epoch}: mean and most shares of a host": f"{sum(shares) / len(shares):.3f}, {max(shares):.3f}",
                    f"epoch {epoch}: requests": requests,
                }
            hosts.close()
            rows.append(row)
    return Table(
        f"What {options.hosts} hosts download",
        rows,
        f"{options.components} components of {options.shards} shards of {options.records} records on average, "
        f"{total:,} bytes in all; {LANES} lanes, batches of {BATCH}, caches of {ROOM} shares.",
    )


def changes(url: str, total: int, options: argparse.Namespace) -> Table:
    """An epoch on 8 hosts, and the next one on fewer, whose folders are those of some of the 8."""
    cases = [("every second", [0, 2, 4, 6]), ("the first", [0, 1, 2, 3])]
    cases += [("spread", [0, 2, 3, 4, 5, 7]), ("the first", [0, 1, 2, 3, 4, 5])]
    rows = []
    for name, kept in cases:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            folders = [f"{folder}/{host}" for host in range(8)]
            settings = {"shuffle": shuffles()["with affinity"], "num_epochs": 2}
            hosts = Hosts(url, total, folders, options, settings)
            steps = hosts.num_steps // 2
            hosts.read(steps)
            state = hosts.state_at(steps)
            hosts.close()
            fewer = Hosts(url, total, [folders[host] for host in kept], options, settings, state)
            sent(url)
            fewer.read(fewer.num_steps - steps)
            held = sum(_overlap(host, 8, new, len(kept)) for new, host in enumerate(kept))
            row = {"hosts": f"8 → {len(kept)}, {name}", "sent / set": sent(url)[0] / total}
            row |= {"least possible": fewer.least_bytes / total, "rows that moved": 1 - held}
            rows.append(row)
            fewer.close()
    return Table("The epoch after a change of the number of hosts, with affinity", rows)


def _overlap(old: int, olds: int, new: int, news: int) -> float:
    """The share of the rows that both host ``old`` of ``olds`` and host ``new`` of ``news`` read."""
    return max(0.0, min((old + 1) / olds, (new + 1) / news) - max(old / olds, new / news))


def train(url: str, folder: str, max_bytes: int, components: int, step_seconds: float, settings: dict[str, Any]) -> Any:
    """What each host of a real job runs: two epochs, with a fixed time per step; stalled shares of both."""
    import jax

    import meshfeed

    cache = meshfeed.ShardCache(os.path.join(folder, str(jax.process_index())), max_bytes)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    stalled: list[float] = []
    with meshfeed.Feed(mixture(url, components, cache), mesh, num_epochs=2, end="drop", **settings) as feed:
        before = None
        for _ in range(2):
            for _ in range(len(feed) // 2):
                next(feed)
                time.sleep(step_seconds)
            stats = feed.stats() if before is None else feed.stats(since=before)
            stalled.append(stats.stall_fraction)
            before = feed.stats()
        return stalled, feed.stats().startup_seconds, cache.stats().fetched_bytes


def stalls(root: str, total: int, options: argparse.Namespace) -> Table:
    """Two real processes that share a link."""
    import meshfeed
    from meshfeed.testing import HostPool

    records = sum(
        len(mixture(root, options.components, None).components.sources[f"c{n}"]) for n in range(options.components)
    )
    batch, lanes = 64, 2
    consumption = total / (records / batch * options.step_seconds)
    cases = [
        ("with affinity, caches of 1.1 shares", meshfeed.ShardShuffle(affinity=True), ROOM / 2),
        ('"shards", caches of 10 % of the set', "shards", 0.1),
    ]
    rows = []
    with serve(root, bandwidth=options.ratio * consumption, latency=options.latency) as url, HostPool(2, 1) as pool:
        for name, shuffle, share in cases:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                settings = {"global_batch_size": batch, "num_lanes": lanes, "shuffle": shuffle}
                sent(url)
                found = pool.run(
                    train, url, folder, int(share * total), options.components, options.step_seconds, settings,
                    timeout_seconds=1200,
                )  # fmt: skip
                hosts = [result.value for result in found]
                rows.append(
                    {
                        "order and cache": name,
                        "waiting, epoch 1": max(stalled[0] for stalled, _, _ in hosts),
                        "waiting, epoch 2": max(stalled[1] for stalled, _, _ in hosts),
                        "first batch s": max(startup for _, startup, _ in hosts),
                        "sent / set": sent(url)[0] / total,
                    }
                )
    return Table(
        f"Share of the run spent waiting, 2 processes, bandwidth {options.ratio:g} × consumption",
        rows,
        f"{records:,} records, batches of {batch}, {lanes} lanes, {options.step_seconds:g} s per step, "
        f"{options.latency * 1e3:g} ms per request. The first batch is left out.",
    )


def measure(options: argparse.Namespace) -> Iterator[Table]:
    with tempfile.TemporaryDirectory() as root:
        total = write_components(root, options)
        with serve(root, bandwidth=1e9) as url:
            if "epochs" in options.only:
                yield epochs(url, total, options)
            if "changes" in options.only:
                yield changes(url, total, options)
        if "stalls" in options.only:
            yield stalls(root, total, options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
