"""Simulates what hosts download through a :class:`meshfeed.ShardCache` that holds a limited number of bytes."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import BatchSchedule, default_num_lanes
from meshfeed._src.base.types import RecordIds, RecordOrder
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.shards import ShardOrder
from meshfeed._src.order.steps import StepSchedule

_MAX_HOSTS = 16  # with different rows that are simulated
Evict = Literal["farthest", "oldest"]


class DownloadCounts(NamedTuple):
    """The downloads of a host.

    Attributes:
      num_uses: number of shards that batches need, counted once per batch.
      num_downloads: how many of them were not in the cache.
      num_bytes: bytes downloaded.
    """

    num_uses: int
    num_downloads: int
    num_bytes: int

    @property
    def hit_rate(self) -> float:
        """The fraction of uses that need no download, from 0 to 1."""
        return 1 - self.num_downloads / max(1, self.num_uses)


def shards_of_steps(
    order: RecordOrder, lengths: RecordIds, *, batch_size: int, rows: Sequence[tuple[int, int]], steps: range
) -> Iterator[RecordIds]:
    """Yields the shards that each step needs on a host.

    Args:
      order: the order of the records.
      lengths: number of records of each shard, int64 ``[shards]``.
      batch_size: number of rows of the global batch.
      rows: the host's rows of the global batch, as ranges ``(first, stop)``.
      steps: the steps to simulate.

    Yields:
      The indices of the shards, int64 ``[n]``, ascending.
    """
    ends = np.cumsum(lengths)
    held = np.concatenate([np.arange(first, stop) for first, stop in rows])
    for step in steps:
        yield np.unique(np.searchsorted(ends, order.ids_at(step * batch_size + held)[0], side="right"))


def simulate_cache(
    uses: Iterable[ArrayLike],
    shard_bytes: Sequence[int] | RecordIds,
    max_bytes: int,
    *,
    evict: Evict = "farthest",
    skip: int = 0,
) -> DownloadCounts:
    """Simulates a cache of shards, and counts the downloads.

    Args:
      uses: the indices of the shards that each step needs.
      shard_bytes: size of each shard in bytes.
      max_bytes: capacity of the cache; the shards of the current step are kept even if they exceed it.
      evict: ``"farthest"`` removes the shard whose next use is farthest (Belady, 1966), as the cache does for a feed;
        ``"oldest"`` removes the least recently used (LRU).
      skip: number of first steps that fill the cache and are not counted.
    """
    steps: list[list[int]] = [np.asarray(step, np.int64).tolist() for step in uses]
    rank: dict[int, float] = {}  # of each shard in the cache; the smallest is removed first
    heap: list[tuple[float, int]] = []
    held = num_uses = num_downloads = num_bytes = 0
    for number, (step, ranks) in enumerate(zip(steps, _ranks(steps, evict), strict=True)):
        missing = [shard for shard in step if rank.pop(shard, None) is None]  # no rank: not removed during this step
        new_bytes = sum(int(shard_bytes[shard]) for shard in missing)
        held += new_bytes
        if number >= skip:
            num_uses += len(step)
            num_downloads += len(missing)
            num_bytes += new_bytes
        while held > max_bytes and heap:
            first, shard = heapq.heappop(heap)
            if rank.get(shard) == first:  # if not, the shard has been used since
                del rank[shard]
                held -= int(shard_bytes[shard])
        for shard, new in zip(step, ranks, strict=True):
            rank[shard] = new
            heapq.heappush(heap, (new, shard))
    return DownloadCounts(num_uses, num_downloads, num_bytes)


def _ranks(steps: Sequence[Sequence[int]], evict: Evict) -> list[list[float]]:
    """Returns the ranks of the shards of each step in the cache after that step; the smallest is removed first."""
    if evict == "oldest":
        return [[number] * len(step) for number, step in enumerate(steps)]
    ranks: list[list[float]] = []
    next_use: dict[int, int] = {}
    for number, step in reversed(list(enumerate(steps))):
        ranks.append([-next_use.get(shard, math.inf) for shard in step])
        next_use.update(dict.fromkeys(step, number))
    return ranks[::-1]


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
        num_lanes = self.num_lanes or default_num_lanes([batch_size], self.num_shards)
        if batch_size % num_lanes:
            raise SettingsError(
                f"--num-lanes {num_lanes} does not divide --global-batch-size {batch_size}.", setting="num_lanes"
            )
        schedule = StepSchedule(BatchSchedule([(0, batch_size)]))
        return ShardOrder(lengths, num_lanes=num_lanes, seed=0, num_epochs=2, segments=schedule.runs())


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
      host → its downloads; if more than 16 hosts have different rows, of 16 that are spread evenly.
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


def cache_json(found: dict[int, DownloadCounts]) -> list[dict[str, object]]:
    """Returns one entry per simulated host."""
    return [
        {"host": host, "downloads": one.num_downloads, "bytes": one.num_bytes, "hit_rate": round(one.hit_rate, 4)}
        for host, one in found.items()
    ]


def cache_lines(found: dict[int, DownloadCounts], num_bytes: int) -> Iterator[str]:
    """Yields a table of the simulated hosts."""
    yield f"{'host':>8}  {'downloads':>10}  {'bytes per epoch':>18}  {'share of the set':>16}  {'hit rate':>8}"
    for host, one in itertools.islice(found.items(), _MAX_HOSTS):
        share = one.num_bytes / num_bytes
        yield f"{host:>8}  {one.num_downloads:>10,}  {one.num_bytes:>18,}  {share:>16.3f}  {one.hit_rate:>8.3f}"
    if (more := len(found) - _MAX_HOSTS) > 0:
        yield f"{'…':>8}  {'':>10}  {more:,} more hosts read the same rows; --json shows them"
