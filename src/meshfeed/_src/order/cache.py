"""Simulates the downloads of a host whose :class:`meshfeed.ShardCache` holds a limited number of bytes."""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from meshfeed._src.base.types import RecordIds, RecordOrder

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
    coming: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
    for number, step in enumerate(steps):
        for shard in step:
            coming[shard].append(number)
    rank: dict[int, float] = {}  # of each shard in the cache; the smallest is removed first
    heap: list[tuple[float, int]] = []
    held = num_uses = num_downloads = num_bytes = 0
    for number, step in enumerate(steps):
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
        for shard in step:
            coming[shard].popleft()
            rank[shard] = number if evict == "oldest" else -(coming[shard][0] if coming[shard] else math.inf)
            heapq.heappush(heap, (rank[shard], shard))
    return DownloadCounts(num_uses, num_downloads, num_bytes)
