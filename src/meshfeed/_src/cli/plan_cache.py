"""``meshfeed plan --cache``: what each host downloads per epoch, from sizes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.base.types import RecordOrder
from meshfeed._src.order.cache import DownloadCounts, shards_of_steps, simulate_cache
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.shards import ShardOrder, default_num_lanes
from meshfeed._src.order.steps import StepSchedule

_MAX_HOSTS = 16  # with different rows that are simulated


@dataclasses.dataclass(frozen=True)
class ShardSet:
    """Shards of equal size, and how a feed reads them.

    Attributes:
      num_shards: number of shards.
      shard_bytes: size of each in bytes.
      shard_records: records of each.
      shuffle: as for the feed: ``"shards"``, True, False, or a number of records.
      num_lanes: as for the feed; None for its default.
    """

    num_shards: int
    shard_bytes: int
    shard_records: int
    shuffle: bool | int | str
    num_lanes: int | None

    def order(self, batch_size: int) -> RecordOrder:
        """Returns the order of two epochs, of the seed 0."""
        lengths = np.full(self.num_shards, self.shard_records)
        if self.shuffle != "shards":
            assert not isinstance(self.shuffle, str)
            return EpochOrder(int(lengths.sum()), shuffle=self.shuffle, seed=0, num_epochs=2)
        num_lanes = self.num_lanes or default_num_lanes(batch_size, self.num_shards)
        if batch_size % num_lanes:
            raise SettingsError(
                f"--num-lanes {num_lanes} does not divide --global-batch-size {batch_size}.", setting="num_lanes"
            )
        schedule = StepSchedule(BatchSchedule([(0, batch_size)]))
        return ShardOrder(lengths, num_lanes=num_lanes, seed=0, num_epochs=2, step_schedule=schedule)


def downloads_of_hosts(
    dataset: ShardSet, rows: Sequence[Sequence[tuple[int, int]]], batch_size: int, max_bytes: int
) -> dict[int, DownloadCounts]:
    """Returns what hosts download in the second of two epochs.

    Args:
      dataset: the shards.
      rows: the row ranges of each host.
      batch_size: rows of the global batch.
      max_bytes: bytes that each host's cache holds.

    Returns:
      host → its downloads; of hosts spread over all if more than 16 have different rows.
    """
    lengths = np.full(dataset.num_shards, dataset.shard_records)
    steps = int(lengths.sum()) // batch_size
    order, sizes = dataset.order(batch_size), np.full(dataset.num_shards, dataset.shard_bytes)
    reading = {tuple(ranges): host for host, ranges in reversed(list(enumerate(rows))) if ranges}
    chosen = sorted(reading.values())
    if len(chosen) > _MAX_HOSTS:
        chosen = [chosen[i] for i in np.linspace(0, len(chosen) - 1, _MAX_HOSTS).astype(int).tolist()]
    found: dict[tuple[tuple[int, int], ...], DownloadCounts] = {}
    for host in chosen:
        uses = shards_of_steps(order, lengths, batch_size=batch_size, rows=rows[host], steps=range(2 * steps))
        found[tuple(rows[host])] = simulate_cache(uses, sizes, max_bytes, skip=steps)
    return {host: found[tuple(ranges)] for host, ranges in enumerate(rows) if tuple(ranges) in found}


def to_json(found: dict[int, DownloadCounts]) -> list[dict[str, object]]:
    """Returns one entry per simulated host."""
    return [
        {"host": host, "downloads": one.num_downloads, "bytes": one.num_bytes, "hit_rate": round(one.hit_rate, 4)}
        for host, one in found.items()
    ]


def lines(found: dict[int, DownloadCounts], num_bytes: int) -> list[str]:
    """Returns a table of the simulated hosts and a summary."""
    table = [f"{'host':>8}  {'downloads':>10}  {'bytes per epoch':>18}  {'share of the set':>16}  {'hit rate':>8}"]
    shown = list(found.items())[:_MAX_HOSTS]
    table += [
        f"{host:>8}  {one.num_downloads:>10,}  {one.num_bytes:>18,}  {one.num_bytes / num_bytes:>16.3f}  "
        f"{one.hit_rate:>8.3f}"
        for host, one in shown
    ]
    if len(shown) < len(found):
        table.append(
            f"{'…':>8}  {'':>10}  {len(found) - len(shown):,} more hosts read the same rows; --json shows them"
        )
    return table
