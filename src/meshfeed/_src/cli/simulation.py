"""What ``meshfeed plan`` simulates: ``--simulate``, and the downloads of ``--cache``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.reading.fetch_policy import default_ahead_bytes
from meshfeed._src.simulation.dataset import FileRecords, Rows, SimulatedData
from meshfeed._src.simulation.hosts import Cache, Store
from meshfeed._src.simulation.simulate import (
    HostDownloads,
    Setup,
    Simulation,
    dataset_of,
    simulate_data,
    simulate_order,
)
from meshfeed._src.simulation.units import parse_bytes


def simulated(
    manifests: Sequence[str], cache: str | None, rows: Sequence[Rows] | None, options: Mapping[str, Any]
) -> Simulation:
    """Returns the simulation for the options of ``meshfeed plan``."""
    if manifests:
        dataset = dataset_of(list(manifests), options["weights"])
    elif options["weights"] is not None:
        raise SettingsError("--weights is for several manifests. Omit it, or pass manifests.", setting="weights")
    else:
        dataset = _equal_shards(options)
    assert cache is not None
    return simulate_data(
        dataset,
        rows,
        hosts=options["hosts"],
        bandwidth=options["bandwidth"],
        step_seconds=options["step_seconds"],
        cache=cache,
        global_batch_size=options["global_batch_size"],
        shuffle=options["shuffle"],
        num_lanes=options["num_lanes"],
        ahead_bytes=options["ahead"],
        shared_bandwidth=options["shared_bandwidth"],
        latency_seconds=options["latency"],
        requests_per_second=options["requests_per_second"],
        price_per_1000_requests=options["request_price"],
        price_per_gb=options["egress_price"],
        num_epochs=options["epochs"],
    )


def _equal_shards(options: Mapping[str, Any]) -> SimulatedData:
    number, num_bytes, num_records = (options[name] for name in ("shards", "shard_bytes", "shard_records"))
    names = [f"shard {shard}" for shard in range(number)]
    files = FileRecords(names, np.full(number, num_bytes, np.int64), np.full(number, num_records, np.int64))
    return SimulatedData.of_files([files], None, f"{number:,} shards")


def downloads_of_hosts(
    rows: Sequence[Rows], cache: str, options: Mapping[str, Any]
) -> tuple[Mapping[int, HostDownloads], int]:
    """Returns what hosts download in two epochs from a store that answers at once, and the bytes of the data set."""
    dataset, max_bytes = _equal_shards(options), parse_bytes("cache", cache)
    shuffle, batch_size, num_lanes = (options[name] for name in ("shuffle", "global_batch_size", "num_lanes"))
    if num_lanes is not None and batch_size % num_lanes:
        raise SettingsError(
            f"--num-lanes {num_lanes} does not divide --global-batch-size {batch_size}.", setting="num_lanes"
        )
    setup = Setup(
        rows=rows,
        batch_size=batch_size,
        cache=Cache(max_bytes, default_ahead_bytes(max_bytes)),
        store=Store(bandwidth=1e18),
        step_seconds=1.0,
        num_lanes=num_lanes,
    )
    return simulate_order(dataset, True if shuffle is None else shuffle, setup).hosts, sum(dataset.file_bytes())


def _hit_rate(one: HostDownloads) -> float:
    return 1 - one.downloads[-1] / max(1, one.uses[-1])


def cache_json(found: Mapping[int, HostDownloads]) -> list[dict[str, object]]:
    """Returns one entry per simulated host, for the last epoch."""
    return [
        {
            "host": host,
            "downloads": one.downloads[-1],
            "bytes": one.num_bytes[-1],
            "hit_rate": round(_hit_rate(one), 4),
        }
        for host, one in found.items()
    ]


def cache_lines(found: Mapping[int, HostDownloads], num_bytes: int) -> Iterator[str]:
    """Yields a table of the simulated hosts, for the last epoch."""
    yield f"{'host':>8}  {'downloads':>10}  {'bytes per epoch':>18}  {'share of the set':>16}  {'hit rate':>8}"
    for host, one in found.items():
        share = one.num_bytes[-1] / num_bytes
        yield f"{host:>8}  {one.downloads[-1]:>10,}  {one.num_bytes[-1]:>18,}  {share:>16.3f}  {_hit_rate(one):>8.3f}"
