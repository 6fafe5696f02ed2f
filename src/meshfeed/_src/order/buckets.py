"""An order in which all records of a batch come from one bucket, so that batches have only a few shapes.

Each bucket is a separate stream: its records in the order of :class:`EpochOrder`, epoch after epoch without a gap, cut
into batches. A batch belongs to the epoch of its last record. Epoch e therefore has ``(e + 1) * n // size - e * n // size``
batches of a bucket of n records, and both the number of batches before an epoch and the batch at a given place of an epoch
follow from the sizes of the buckets alone.

With ``shuffle``, the batches of an epoch are permuted. Without it, they come in the order in which a sequential read of the
records would complete them. By shards, each bucket has the order of :class:`ShardOrder` over its records in each shard, all
with the same permutation of the shards, and each batch comes at a random place within its share of the epoch: all buckets
are then at about the same shards.

A finite stream ends with the records that fill no batch of their bucket, from the longest bucket to the shortest. They share
batches, which have the shape of the longest bucket in them. Every record therefore occurs exactly once per epoch.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence

import numpy as np

from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.base.types import JsonValue, RecordIds
from meshfeed._src.order.caching import Caching, cached
from meshfeed._src.order.epochs import EpochOrder, checked_positions
from meshfeed._src.order.permutation import derive_key, mix64_array, permute
from meshfeed._src.order.shards import ShardOrder, shards_config

ALGORITHM = "length-buckets"
VERSION = 1

_RECORDS, _BATCHES, _LINE = 121, 122, 123  # purpose of a derived key
_CHUNK = 4096  # batches whose places are computed together: a few take a third as long


class BucketOrder(Caching):
    """The order of records in buckets.

    Args:
      buckets: record ids of each bucket, ascending, integers [records]; may be memory-mapped. Buckets are sorted from the
        shortest records to the longest.
      num_records: records of the source, in a bucket or not.
      global_batch_size: rows of every batch.
      shuffle: False, True, or records per block, applied within each bucket, see :class:`EpochOrder`; or the settings of
        an order by shards.
      seed: 0 to 2**64 - 1.
      num_epochs: number of epochs, or None for an endless stream.
      shard_lengths: by shards, records of each bucket in each shard, int64[shards] each.
      num_lanes: by shards, the number of lanes, which divides the batch size.
    """

    def __init__(
        self,
        buckets: Sequence[np.ndarray],
        *,
        num_records: int,
        global_batch_size: int,
        shuffle: bool | int | ShardShuffle,
        seed: int,
        num_epochs: int | None,
        shard_lengths: Sequence[RecordIds] = (),
        num_lanes: int | None = None,
    ) -> None:
        self._buckets, self._num_records, self._size = tuple(buckets), num_records, global_batch_size
        self._shuffle, self._seed, self._num_epochs = shuffle, seed, num_epochs
        self._counts = np.array([len(ids) for ids in buckets], np.int64)
        self._used = np.flatnonzero(self._counts)
        self._per_epoch = int(self._counts.sum())
        self._shard_lengths, self._num_lanes = shard_lengths, num_lanes
        # An EpochOrder rejects an empty bucket.
        self._orders = {bucket: self._order_of(bucket) for bucket in self._used.tolist()}
        self.total = None if num_epochs is None else self._per_epoch * num_epochs
        self._num_full = None if num_epochs is None else self._num_before(num_epochs)
        self._make_caches()

    def _make_caches(self) -> None:
        self._places = cached(self._compute_places, 4)  # two for the reader, and for the plan of files to fetch

    def _order_of(self, bucket: int) -> EpochOrder | ShardOrder:
        """The order of the records of a bucket, as places among its records."""
        seed = derive_key(self._seed, _RECORDS, bucket)
        if not isinstance(self._shuffle, ShardShuffle):
            return EpochOrder(int(self._counts[bucket]), shuffle=self._shuffle, seed=seed, num_epochs=None)
        assert self._num_lanes is not None
        return ShardOrder(
            self._shard_lengths[bucket],
            shuffle=self._shuffle,
            num_lanes=self._num_lanes,
            seed=seed,
            num_epochs=self._num_epochs,
            segments=[(0, self._size)],
            line=(self._seed, _LINE, self._per_epoch),
        )

    def config(self) -> dict[str, JsonValue]:
        """The part of the fingerprint that describes the order."""
        config: dict[str, JsonValue] = {"shuffle": self._shuffle, "seed": self._seed}
        if isinstance(self._shuffle, ShardShuffle):
            assert self._num_lanes is not None
            config = shards_config(self._shuffle, self._seed, self._num_lanes)
            lengths = np.stack(self._shard_lengths).astype("<i8").tobytes()
            config |= {"shards": hashlib.sha256(lengths).hexdigest()[:16], "places": config.pop("algorithm")}
        return {
            **config,
            "algorithm": ALGORITHM,
            "version": VERSION,
            "buckets": {"global_batch_size": self._size, "num_epochs": self._num_epochs},
        }

    def ids_between(self, start: int, stop: int) -> tuple[RecordIds, RecordIds]:
        """Returns :meth:`ids_at` for positions ``[start, stop)``."""
        return self.ids_at(np.arange(start, stop, dtype=np.int64))

    def ids_at(self, positions: RecordIds) -> tuple[RecordIds, RecordIds]:
        """Returns record ids and epochs at ``positions``, int64[n] each.

        A record in a batch of a longer bucket b than its own has the id ``record + num_records * (1 + b)``, so that ids
        determine the shape of a batch.

        Raises:
          IndexError: a position is outside the stream.
        """
        positions = checked_positions(positions, self.total)
        record_ids, epochs = np.empty_like(positions), np.empty_like(positions)
        steps, rows = np.divmod(positions, self._size)
        for step in np.unique(steps).tolist():
            here = np.flatnonzero(steps == step)
            if self._num_full is not None and step >= self._num_full:
                found = self._last_ids(step - self._num_full, rows[here])
            else:
                bucket, number = self.batch_at(step)
                found = self._ids_of(bucket, number * self._size + rows[here])
            record_ids[here], epochs[here] = found
        return record_ids, epochs

    def batch_at(self, step: int) -> tuple[int, int]:
        """Returns the bucket of the batch at ``step``, and the number of the batch in that bucket's stream."""
        low = step * self._size // self._per_epoch  # an epoch has at most as many batches as its records fill
        # Rounding down hides less than one batch per bucket.
        high = (step + len(self._counts)) * self._size // self._per_epoch + 1
        epoch = low + bisect.bisect_right(range(low, high + 1), step, key=self._num_before) - 1
        chunk, within = divmod(step - self._num_before(epoch), _CHUNK)
        place = int(self._places(epoch, chunk)[within])
        begins = self._begins(epoch)
        first = np.concatenate([[0], np.cumsum(self._begins(epoch + 1) - begins)])
        bucket = int(np.searchsorted(first, place, side="right")) - 1
        return bucket, int(begins[bucket]) + place - int(first[bucket])

    def _begins(self, epoch: int) -> np.ndarray:
        """Number of batches of each bucket before an epoch, int64[buckets]."""
        return epoch * self._counts // self._size

    def _num_before(self, epoch: int) -> int:
        return int(self._begins(epoch).sum())

    def _compute_places(self, epoch: int, chunk: int) -> np.ndarray:
        """The batches at the places of one chunk of an epoch, numbered bucket by bucket; int64[places]."""
        count = self._num_before(epoch + 1) - self._num_before(epoch)
        places = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, count))
        key = derive_key(self._seed, _BATCHES, self._per_epoch, epoch)
        if isinstance(self._shuffle, ShardShuffle):
            return self._spread(epoch, key)[places]
        return permute(places, count, key) if self._shuffle else self._as_completed(epoch)[places]

    def _spread(self, epoch: int, key: int) -> np.ndarray:
        """The batches of an epoch in the order of the share of the bucket's records before each, at random within it."""
        begins = self._begins(epoch)
        counts = self._begins(epoch + 1) - begins
        numbers: np.ndarray = np.arange(int(counts.sum())) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        hashes = mix64_array(mix64_array(np.arange(len(numbers), dtype=np.uint64)) ^ np.uint64(key))
        within = (hashes >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return np.argsort((numbers + within) / np.repeat(self._counts, counts), kind="stable")

    def _as_completed(self, epoch: int) -> np.ndarray:
        """The batches of an epoch in the order of their last records."""
        begins, ends = self._begins(epoch), self._begins(epoch + 1)
        last = [
            self._buckets[bucket][
                (np.arange(begins[bucket], ends[bucket]) + 1) * self._size - 1 - epoch * self._counts[bucket]
            ]
            for bucket in self._used.tolist()
        ]
        return np.argsort(np.concatenate(last), kind="stable")

    def _ids_of(self, bucket: int, places: np.ndarray) -> tuple[RecordIds, RecordIds]:
        """Record ids and epochs at places of a bucket's stream."""
        within, epochs = self._orders[bucket].ids_at(places)
        return self._buckets[bucket][within].astype(np.int64), epochs

    def _last_ids(self, batch: int, rows: np.ndarray) -> tuple[RecordIds, RecordIds]:
        """Record ids and epochs of rows of a batch of records that fill no batch of their bucket."""
        assert self._num_epochs is not None
        begins = self._begins(self._num_epochs) * self._size
        left = self._num_epochs * self._counts - begins
        longest_first = np.arange(len(left))[::-1]
        ends = np.cumsum(left[longest_first])
        places = batch * self._size + rows
        # The first row has the longest bucket, so it determines the shape even if it is not among the rows.
        bucket_at = np.searchsorted(ends, np.append(places, batch * self._size), side="right")
        record_ids, epochs = np.empty_like(places), np.empty_like(places)
        shape = int(longest_first[bucket_at[-1]])
        for at in np.unique(bucket_at[:-1]).tolist():
            bucket, here = int(longest_first[at]), np.flatnonzero(bucket_at[:-1] == at)
            within = places[here] - (ends[at] - left[bucket])
            record_ids[here], epochs[here] = self._ids_of(bucket, begins[bucket] + within)
            if bucket != shape:
                record_ids[here] += self._num_records * (1 + shape)
        return record_ids, epochs
