"""A second, plain implementation of what a feed promises: it says every batch, position and end of a configuration.

One process, one record at a time, nothing of meshfeed imported. Whoever finds the library and this file at odds has
found a fault in one of the two, or a rule that docs/ does not state. The rules:

*Random access.* The stream is one sequence of records. Position p of it is record ``order(p)``, which depends on the
source, ``shuffle``, ``seed`` and p. Epochs follow one another without a gap. Step k holds the positions from the sum of
the sizes of the steps before it on, row r at the r-th of them. ``end="drop"`` ends before the first step that does not
fill; ``"pad"`` fills its rows with zeros, mask False. ``position`` counts real records. A bad record's row holds the
first readable one of a keyed walk over the other records.

*Order.* See docs/decisions/order.md: ``False``, uniform, blocks, ``"shards"`` (lanes of cells), mixtures by blocks.

*Streams.* Lane i of L fills the rows ``[i * size / L, (i + 1) * size / L)`` of every batch with its own records in order,
all epochs of the lane one after the other. ``"drop"`` ends before the first step that some lane cannot fill. ``"pad"``
ends with the longest lane; the rows of a lane that has ended are zeros. A lane without a record cannot repeat its
epochs, and a stream without any record has no structure: both are a SourceError.

*Host batches.* Each host's rows are its own batches. ``"drop"`` ends with the first host, ``"pad"`` with the last.

*Hosts.* None of this depends on hosts, devices, the layout, ``load``, prefetching, threads or workers. A host without
rows gets as many batches and the same positions. So does a host outside of the mesh, by itself with random access, and
following the others with a stream; host batches, and a stream that one host reads alone, are refused there (SettingsError).
A failure on one host stops all hosts at the step in which it falls: there the failing host raises its error and every
other host a PeerError.

*Another sharding.* ``reshard`` continues the same stream at the delivered position, after an error too; hosts that have
delivered more go back to the lowest step of all. Hosts that it leaves out are outside of the mesh from then on; hosts of
``load=[...]`` that are left out read again once they are back.

*Weights.* After ``set_weights`` a mixture is the one with that stage: in place of stages that were added and have not begun,
and beside those that it was made with. The stages are part of the state, and stay after ``reset``. What has been delivered
cannot change, nor that a lane has ended: weights with which a random-access mixture would have ended earlier, or not with the
padded batch with which it has ended, are refused.

*States.* A state is where the stream stands after the last delivered batch: ``set_state`` of a merged state continues
there on any topology, with any batch size that the mesh and the lanes divide. ``reset`` is the state before step 0.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

Record = dict[str, Any]
"""Leaf → its value, or the record of a part of a Zip."""
Value = Callable[[int, int], Record]
"""(record id, epoch) → the record."""

# ---------------------------------------------------------------------- keyed permutations, one number at a time

_MASK = 2**64 - 1
_EPOCH, _BLOCKS, _WITHIN, _SHORT_BLOCK, _REPLACEMENT, _SHARDS, _WINDOW, _PIECES = 1, 2, 3, 4, 5, 6, 7, 8
_LAYOUT, _COMPONENT_SEED, LANE_LAYOUT, _LANES = 101, 102, 103, 105
PACKED_BLOCKS, DOCUMENTS, SEQUENCES = 111, 112, 113
RECORDS, _BATCHES, LINE = 121, 122, 123
SPLIT, SPLIT_SHARDS, SAMPLE = 131, 132, 133
OWN_NUMBERS = 134


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(seed: int, *parts: int) -> int:
    key = mix(seed)
    for part in parts:
        key = mix(((key * 0xD1342543DE82EF95) & _MASK) ^ mix(part & _MASK))
    return key


def permuted(number: int, count: int, key: int) -> int:
    """Where a keyed permutation of [0, count) sends a number."""
    return table(count, key)[number] if count <= 4096 else _feistel(number, count, key)


@functools.lru_cache(4096)
def table(count: int, key: int) -> list[int]:
    return sorted(range(count), key=lambda i: mix(mix(i) ^ key))


def _feistel(number: int, count: int, key: int) -> int:
    bits = (count - 1).bit_length()
    low = max(bits // 2, bits - 24)
    rows = -(-count // 2**low)
    constants = [mix(key ^ mix(i)) | (i % 2 == 0) for i in range(12)]
    while True:
        row, column = divmod(number, 2**low)
        for a, b, c, d in zip(*[iter(constants)] * 4, strict=True):
            row = (row + ((((column * a + b) ** 2 & _MASK) >> 32) * rows >> 32)) % rows
            column ^= ((row * c + d) ** 2 & _MASK) >> (64 - low)
        number = row * 2**low + column
        if number < count:
            return number


# ---------------------------------------------------------------------- orders of random-access sources


def epoch_id(offset: int, count: int, shuffle: bool | int, seed: int, epoch: int) -> int:
    """The record at an offset in an epoch of ``count`` records."""
    if shuffle is False:
        return offset
    if shuffle is True or count <= shuffle:
        return permuted(offset, count, key_of(seed, _EPOCH, count, epoch))
    return _blocked(offset, count, shuffle, seed, epoch)


def _blocked(offset: int, count: int, size: int, seed: int, epoch: int) -> int:
    """Blocks of ``size`` records in random order, each shuffled; the short block has a random place of its own."""
    blocks, short = -(-count // size), count % size
    lengths = [size] * blocks
    if short:
        short_slot = key_of(seed, _SHORT_BLOCK, count, epoch) % blocks
        lengths[short_slot] = short
    slot = 0
    while offset >= lengths[slot]:
        offset, slot = offset - lengths[slot], slot + 1
    key = key_of(seed, _BLOCKS, count, epoch)
    if not short:
        block = permuted(slot, blocks, key)
    elif slot == short_slot:
        block = blocks - 1
    else:
        block = permuted(slot - (slot > short_slot), blocks - 1, key)
    within = key_of(seed, _WITHIN, count, epoch)
    return block * size + permuted(offset, lengths[slot], mix(((within * 0xD1342543DE82EF95) & _MASK) ^ mix(slot)))


def replacement(seed: int, epoch: int, record_id: int, attempt: int, count: int) -> int:
    """The record that is tried in the place of a bad one."""
    if count <= 1:
        return record_id
    step = permuted((attempt - 1) % (count - 1), count - 1, key_of(seed, _REPLACEMENT, epoch, record_id))
    return (record_id + 1 + step) % count


@dataclasses.dataclass
class Plain:
    """All records of one source, epoch after epoch."""

    count: int
    shuffle: bool | int
    seed: int
    num_epochs: int | None

    def total_of(self, steps: Steps) -> int | None:
        return None if self.num_epochs is None else self.count * self.num_epochs

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        epoch, offset = divmod(position, self.count)
        return epoch_id(offset, self.count, self.shuffle, self.seed, epoch), epoch

    def replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        return replacement(self.seed, epoch, record_id, attempt, self.count)


# ---------------------------------------------------------------------- orders by shards


def cell_of(position: int, steps: Steps, total: int | None, num_lanes: int) -> int:
    """The cell at a position: record number t of a lane is in the cell ``t * num_lanes + lane``."""
    start, size = steps.batch_of(position)
    if total is not None and start + size > total:
        return position  # the last, partial batch takes the remaining cells in order
    lane, number = divmod(position - start, size // num_lanes)
    return start + number * num_lanes + lane


class ShardLanes:
    """Lanes that each read their part of the epoch's shards in windows of a few.

    Args:
      lengths: records of each shard.
      window: shards, or pieces of them, in a window.
      affinity: whether the parts are the same in every epoch, and their pieces are permuted instead.
      mixes: whether the records of a window are permuted.
      line: parts of the key of the permutation of shards.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        num_lanes: int,
        seed: int,
        window: int = 2,
        affinity: bool = False,
        mixes: bool = True,
        line: tuple[int, ...] = (),
    ) -> None:
        self.lengths, self.count, self.num_lanes, self._seed = lengths, sum(lengths), num_lanes, seed
        self._window, self._affinity, self._mixes = window, affinity, mixes
        self._line_key = line or (seed, _SHARDS, self.count)
        self._lines: dict[int, list[int]] = {}

    def records_of(self, lane: int, epochs: int) -> int:
        """How many records a lane has in the first epochs: lane l holds the cells l, l + L, ..."""
        return -((lane - epochs * self.count) // self.num_lanes)

    def at(self, cell: int) -> tuple[int, int]:
        """The record of a cell, and its epoch."""
        epoch = cell // self.count
        number, lane = divmod(cell, self.num_lanes)
        # A lane's part of the epoch's line is as long as its cells in the epoch.
        parts = [self.records_of(n, epoch + 1) - self.records_of(n, epoch) for n in range(self.num_lanes)]
        if epoch not in self._lines:
            self._lines[epoch] = self._line(epoch, parts)
        return self._lines[epoch][sum(parts[:lane]) + number - self.records_of(lane, epoch)], epoch

    def _line(self, epoch: int, parts: Sequence[int]) -> list[int]:
        order = table(len(self.lengths), key_of(*self._line_key, 0 if self._affinity else epoch))
        starts = list(itertools.accumulate(self.lengths, initial=0))
        # The line, in pieces: a new one at each shard and each lane.
        cuts = set(itertools.accumulate(parts, initial=0))
        lanes: list[list[list[int]]] = []
        place = 0
        for shard in order:
            for number in range(self.lengths[shard]):
                if place in cuts:
                    lanes.append([])
                if not number or place in cuts:
                    lanes[-1].append([])
                lanes[-1][-1].append(starts[shard] + number)
                place += 1
        if self._affinity:
            mixed = table(sum(map(len, lanes)), key_of(self._seed, _PIECES, epoch))
            rank = iter(sorted(range(len(mixed)), key=mixed.__getitem__))
            lanes = [[piece for _, piece in sorted((next(rank), piece) for piece in lane)] for lane in lanes]
        line: list[int] = []
        windows = [lane[i : i + self._window] for lane in lanes for i in range(0, len(lane), self._window)]
        for number, pieces in enumerate(windows):
            ids = [record_id for piece in pieces for record_id in piece]
            key = key_of(self._seed, _WINDOW, self.count, epoch, number)
            line += [ids[permuted(i, len(ids), key)] for i in range(len(ids))] if self._mixes else ids
        return line


class Shards(Plain):
    """``shuffle="shards"`` of one source."""

    def __init__(self, lanes: ShardLanes, seed: int, num_epochs: int | None) -> None:
        super().__init__(lanes.count, False, seed, num_epochs)
        self.lanes = lanes

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        return self.lanes.at(cell_of(position, steps, self.total_of(steps), self.lanes.num_lanes))


class Sequences:
    """Packed sequences that are packed anew in each epoch: their ids count on from epoch to epoch."""

    def __init__(self, places: Plain) -> None:
        self._places = places

    def total_of(self, steps: Steps) -> int | None:
        return self._places.total_of(steps)

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        place, epoch = self._places.at(position, steps)
        return epoch * self._places.count + place, epoch

    def replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        times, place = divmod(record_id, self._places.count)
        return times * self._places.count + self._places.replacement(place, epoch, attempt)


class Grouped:
    """Records in buckets: all rows of a batch are of one bucket, until too few are left.

    Args:
      buckets: the records of each bucket.
      order_of: bucket → the order of its records, as places among them.
      by_shards: whether the batches of an epoch come as the buckets' lanes advance.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        size: int,
        shuffle: bool | int,
        seed: int,
        num_epochs: int | None,
        order_of: Callable[[int], Plain],
        by_shards: bool,
    ) -> None:
        self._buckets, self._size, self._shuffle, self._seed = buckets, size, shuffle, seed
        self._count, self._num_epochs, self._by_shards = sum(map(len, buckets)), num_epochs, by_shards
        self._orders = [order_of(number) if ids else None for number, ids in enumerate(buckets)]
        self._steps = Steps((), ((0, size),))
        self._batches: list[tuple[int, int]] = []  # of whole epochs: bucket, number of the batch in it
        self._epochs = 0

    def total_of(self, steps: Steps) -> int | None:
        return None if self._num_epochs is None else self._count * self._num_epochs

    def _full(self, bucket: int, epochs: int) -> int:
        """Full batches of a bucket in so many epochs."""
        return epochs * len(self._buckets[bucket]) // self._size

    def _epoch(self, epoch: int) -> list[tuple[int, int]]:
        """The batches whose last record is in an epoch, in the order in which they come."""
        found = [
            (bucket, number)
            for bucket in range(len(self._buckets))
            for number in range(self._full(bucket, epoch), self._full(bucket, epoch + 1))
        ]
        key = key_of(self._seed, _BATCHES, self._count, epoch)
        if self._by_shards:  # at a random place within the share of the bucket's records that the batch takes
            at = [
                (number + (mix(mix(i) ^ key) >> 11) / 2**53) / len(self._buckets[bucket])
                for i, (bucket, number) in enumerate(found)
            ]
            return [found[i] for i in sorted(range(len(found)), key=at.__getitem__)]
        if self._shuffle:
            return [found[permuted(i, len(found), key)] for i in range(len(found))]
        return sorted(found, key=lambda batch: self._last(*batch, epoch))

    def _last(self, bucket: int, number: int, epoch: int) -> int:
        ids = self._buckets[bucket]
        return ids[(number + 1) * self._size - 1 - epoch * len(ids)]

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        step, row = divmod(position, self._size)
        while step >= len(self._batches) and self._epochs != self._num_epochs:
            self._batches += self._epoch(self._epochs)
            self._epochs += 1
        if step < len(self._batches):
            bucket, number = self._batches[step]
            return self._record(bucket, number * self._size + row)
        # The rest, from the longest bucket to the shortest. A batch has the shape of its first row.
        assert self._num_epochs is not None
        rest = [
            (bucket, place)
            for bucket in reversed(range(len(self._buckets)))
            for place in range(
                self._full(bucket, self._num_epochs) * self._size, self._num_epochs * len(self._buckets[bucket])
            )
        ]
        first = position - row - len(self._batches) * self._size
        (shape, _), (bucket, place) = rest[first], rest[first + row]
        record_id, epoch = self._record(bucket, place)
        return record_id + (self._count * (1 + shape) if bucket != shape else 0), epoch

    def _record(self, bucket: int, place: int) -> tuple[int, int]:
        order = self._orders[bucket]
        assert order is not None
        within, epoch = order.at(place, self._steps)
        return self._buckets[bucket][within], epoch

    def replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        times, own = divmod(record_id, self._count)
        ids = next(ids for ids in self._buckets if own in ids)
        other = ids[replacement(self._seed, epoch, ids.index(own), attempt, len(ids))]
        return times * self._count + other


# ---------------------------------------------------------------------- mixtures


def shares(weights: Mapping[str, float], names: Sequence[str], block: int) -> list[int]:
    """Records of each component in a block, by largest remainder; ties go to the earlier component."""
    exact = {name: Fraction(weights[name]) for name in names if weights.get(name)}
    quotas = {name: block * weight / sum(exact.values()) for name, weight in exact.items()}
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_rest = sorted(quotas, key=lambda name: counts[name] - quotas[name])
    for name in by_rest[: block - sum(counts.values())]:
        counts[name] += 1
    return [counts.get(name, 0) for name in names]


class Blocks:
    """Which component each position of a mixture draws from, and the how many-eth of that component it is."""

    def __init__(self, counts: Sequence[Sequence[int]], starts: Sequence[int], key: int) -> None:
        self._counts, self._starts, self._key = counts, starts, key
        self._drawn: list[tuple[int, int]] = []  # of the positions so far
        self._so_far = [0] * len(counts[0])

    def __getitem__(self, position: int) -> tuple[int, int]:
        while position >= len(self._drawn):
            at = len(self._drawn)
            stage = max(i for i, start in enumerate(self._starts) if start <= at)
            counts = self._counts[stage]
            block, slot = divmod(at - self._starts[stage], sum(counts))
            labels = [number for number, count in enumerate(counts) for _ in range(count)]
            component = labels[table(len(labels), key_of(self._key, _LAYOUT, stage, block))[slot]]
            self._drawn.append((component, self._so_far[component]))
            self._so_far[component] += 1
        return self._drawn[position]


def end_of(blocks: Blocks, times: Sequence[int], drawn: Sequence[int], on_end: str) -> int:
    """How many records a mixture has, of which each component is read so many times.

    ``drawn`` are the components of the last stage: the others may never be read in full.
    """
    # "repeat" ends with the last of the places at which a component is read in full; "stop" before one is read again.
    wanted = {(component, times[component] - 1) for component in drawn if times[component]}
    for position in range(100_000):
        component, number = blocks[position]
        if on_end == "stop" and number == times[component]:
            return position
        wanted.discard((component, number))
        if on_end == "repeat" and not wanted:
            return position + 1
    raise AssertionError("a mixture without an end")


@dataclasses.dataclass
class Mixed:
    """A mixture of random-access components, each with an order and epochs of its own."""

    counts: Sequence[int]
    stages: Sequence[tuple[int, Sequence[int]]]  # first step, records of each component in a block
    shuffle: bool | int
    seed: int
    num_epochs: int | None
    on_end: str = "repeat"
    repeat: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._last: tuple[Any, Any] = (None, None)

    def _kept(self, steps: Steps) -> Any:
        """What follows from where the steps begin."""
        starts = tuple(steps.position_of(step) for step, _ in self.stages)
        if self._last[0] != starts:
            self._last = starts, self._laid_out(starts)
        return self._last[1]

    @property
    def _drawn(self) -> list[int]:
        return [component for component, count in enumerate(self.stages[-1][1]) if count]

    def _laid_out(self, starts: tuple[int, ...]) -> Any:
        blocks = Blocks([counts for _, counts in self.stages], starts, key_of(self.seed, _LAYOUT))
        if self.num_epochs is None:
            return blocks, None
        again = self.repeat or [1] * len(self.counts)
        times = [count * self.num_epochs * more for count, more in zip(self.counts, again, strict=True)]
        return blocks, end_of(blocks, times, self._drawn, self.on_end)

    def total_of(self, steps: Steps) -> int | None:
        return self._kept(steps)[1]

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        component, number = self._kept(steps)[0][position]
        count = self.counts[component]
        epoch, offset = divmod(number, count)
        seed = key_of(self.seed, _COMPONENT_SEED, component)
        return component << 48 | epoch_id(offset, count, self.shuffle, seed, epoch), epoch

    def replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        component, own = record_id >> 48, record_id & (2**48 - 1)
        return component << 48 | replacement(self.seed, epoch, own, attempt, self.counts[component])


class MixedLanes(Mixed):
    """A mixture by shards: each lane mixes its parts of all components, in blocks of its own.

    Args:
      lengths: records of each shard of each component.
      lanes_of: component, its seed → the lanes of that component.
    """

    def __init__(self, lanes_of: Callable[[int, int], ShardLanes], num_lanes: int, **settings: Any) -> None:
        super().__init__(shuffle=False, **settings)
        self._num_lanes = num_lanes
        self._lanes = [lanes_of(c, key_of(self.seed, _COMPONENT_SEED, c)) for c in range(len(self.counts))]

    def _laid_out(self, starts: tuple[int, ...]) -> Any:
        counts, first = [counts for _, counts in self.stages], [start // self._num_lanes for start in starts]
        of_lane = [Blocks(counts, first, key_of(self.seed, _LANES, lane)) for lane in range(self._num_lanes)]
        if self.num_epochs is None:
            return of_lane, None
        again = self.repeat or [1] * len(self.counts)
        ends = [
            end_of(
                blocks,
                [part.records_of(lane, self.num_epochs * more) for part, more in zip(self._lanes, again, strict=True)],
                self._drawn,
                self.on_end,
            )
            for lane, blocks in enumerate(of_lane)
        ]
        # All lanes end together.
        return of_lane, self._num_lanes * (min(ends) if self.on_end == "stop" else max(ends))

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        of_lane, total = self._kept(steps)
        number, lane = divmod(cell_of(position, steps, total, self._num_lanes), self._num_lanes)
        component, rank = of_lane[lane][number]
        record_id, epoch = self._lanes[component].at(rank * self._num_lanes + lane)
        return component << 48 | record_id, epoch


# ---------------------------------------------------------------------- steps


@dataclasses.dataclass(frozen=True)
class Steps:
    """Where each step begins: delivered steps as they were, later ones by the schedule."""

    sizes: tuple[int, ...]  # of the delivered steps
    schedule: tuple[tuple[int, int], ...]

    def size(self, step: int) -> int:
        if step < len(self.sizes):
            return self.sizes[step]
        return next(size for first, size in reversed(self.schedule) if first <= step)

    def position_of(self, step: int) -> int:
        return sum(self.size(before) for before in range(step))

    def batch_of(self, position: int) -> tuple[int, int]:
        """Start and size of the batch that holds a position."""
        start = step = 0
        while start + self.size(step) <= position:
            start, step = start + self.size(step), step + 1
        return start, self.size(step)


@dataclasses.dataclass
class Batch:
    """One global batch: a record or None (padding) per row, and where the feed stands after it."""

    step: int
    rows: list[Record | None]
    position: int
    ids: list[int] | None = None
    bad: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # id, epoch, step
    tokens: list[Any] = dataclasses.field(
        default_factory=list
    )  # what each row was read as, to find where a fault falls
    before: int = 0  # the position before it
    replaced: list[int] = dataclasses.field(default_factory=list)  # rows with a record in the place of a bad one

    def arrays(self, mask_key: str | None) -> Record:
        """The global arrays; rows without a record are zeros like the others."""
        first = next(row for row in self.rows if row is not None)
        out = _stacked([row if row is not None else _stacked([first], np.zeros_like) for row in self.rows])
        if mask_key is not None:
            out[mask_key] = np.array([row is not None for row in self.rows])
        return out


def _stacked(records: Sequence[Record], stack: Callable[..., Any] = lambda *leaves: np.stack(leaves)) -> Record:
    return {
        name: _stacked([record[name] for record in records], stack)  # type: ignore[arg-type]
        if isinstance(leaf, dict)
        else stack(*(record[name] for record in records))
        for name, leaf in records[0].items()
    }


class Refused(Exception):
    """The configuration raises instead of giving batches; ``kind`` is the class of the error."""

    def __init__(self, kind: str, when: str) -> None:
        super().__init__(f"{kind} at {when}")
        self.kind, self.when = kind, when


# ---------------------------------------------------------------------- rows of about equal work

_CHOSEN, _SWAPPED = 32, 32


def balanced(costs: Sequence[float]) -> list[int]:
    """The rows of a batch in balanced order: halves of about equal cost, and so on as long as a part is even."""
    return _halved(list(range(len(costs))), lambda group: _halves(group, costs))


def balanced_of_shards(costs: Sequence[Sequence[int]]) -> list[int]:
    """The same where a row costs one number for each shard of the sequence: halves of about equal cost in all of them."""
    return _halved(list(range(len(costs))), lambda group: _halves_of_shards(group, costs))


def _halved(group: list[int], halves: Callable[[list[int]], tuple[list[int], list[int]]]) -> list[int]:
    if len(group) < 2 or len(group) % 2:
        return group
    left, right = halves(group)
    return _halved(left, halves) + _halved(right, halves)


def _pairs(group: list[int], total: Callable[[int], float]) -> list[tuple[int, int]]:
    by_cost = sorted(group, key=lambda row: -total(row))
    return list(zip(by_cost[::2], by_cost[1::2], strict=True))


def _halves(group: list[int], costs: Sequence[float]) -> tuple[list[int], list[int]]:
    pairs = sorted(_pairs(group, costs.__getitem__), key=lambda pair: costs[pair[1]] - costs[pair[0]])
    gaps = [costs[a] - costs[b] for a, b in pairs]
    chosen = [i for i in range(len(pairs)) if not _CHOSEN <= i < max(_CHOSEN, len(pairs) - _CHOSEN)]
    signs = [-1 if i % 2 else 1 for i in range(len(pairs))]  # of those that are not chosen
    total = sum(sign * gap for i, (sign, gap) in enumerate(zip(signs, gaps, strict=True)) if i not in chosen)
    for i in chosen:
        signs[i] = -1 if total > 0 else 1
        total += signs[i] * gaps[i]
    left = [a if sign > 0 else b for (a, b), sign in zip(pairs, signs, strict=True)]
    right = [b if sign > 0 else a for (a, b), sign in zip(pairs, signs, strict=True)]
    for _ in range(3 if len(left) <= _SWAPPED else 0):
        gap = sum(costs[row] for row in left) - sum(costs[row] for row in right)
        after = {(i, j): abs(gap - 2 * (costs[a] - costs[b])) for i, a in enumerate(left) for j, b in enumerate(right)}
        i, j = min(after, key=after.__getitem__)
        if after[i, j] < abs(gap):
            left[i], right[j] = right[j], left[i]
    return left, right


def _halves_of_shards(group: list[int], costs: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    def minus(a: Sequence[int], b: Sequence[int]) -> list[int]:
        return [x - y for x, y in zip(a, b, strict=True)]

    def product(a: Sequence[int], b: Sequence[int]) -> int:
        return sum(x * y for x, y in zip(a, b, strict=True))

    def gap_of(pair: tuple[int, int]) -> list[int]:
        return minus(costs[pair[0]], costs[pair[1]])

    pairs = sorted(_pairs(group, lambda row: sum(costs[row])), key=lambda pair: -product(gap_of(pair), gap_of(pair)))
    gap = [0] * len(costs[group[0]])
    left, right = list[int](), list[int]()
    for a, b in pairs:
        if product(gap, gap_of((a, b))) > 0:
            a, b = b, a
        left, right, gap = [*left, a], [*right, b], [x + y for x, y in zip(gap, gap_of((a, b)), strict=True)]
    for _ in range(8 if len(left) <= _SWAPPED else 0):
        gap = minus(
            [sum(costs[row][s] for row in left) for s in range(len(gap))],
            [sum(costs[row][s] for row in right) for s in range(len(gap))],
        )
        after = {
            (i, j): [g - 2 * d for g, d in zip(gap, gap_of((a, b)), strict=True)]
            for i, a in enumerate(left)
            for j, b in enumerate(right)
        }
        i, j = min(after, key=lambda at: product(after[at], after[at]))
        if product(after[i, j], after[i, j]) >= product(gap, gap):
            break
        left[i], right[j] = right[j], left[i]
    return left, right


# ---------------------------------------------------------------------- the kinds of stream


@dataclasses.dataclass
class RandomAccess:
    """A stream of a random-access source."""

    order: Any
    value: Value
    pad: bool
    is_bad: Callable[[int], bool] = lambda record_id: False
    origin: Callable[[int], Any] = lambda record_id: record_id
    """Record id → what is read for it, to find where a fault falls."""
    first: int = 0
    """The record that shows the structure."""
    cost: Callable[[int], float | list[int]] | None = None
    """Record id → cost of its row, or of each shard of it, by which rows are balanced; None if they are not."""

    def batch(self, step: int, steps: Steps) -> Batch | None:
        start, size, total = steps.position_of(step), steps.size(step), self.order.total_of(steps)
        stop = start + size if total is None else min(start + size, total)
        if stop <= start or (stop < start + size and not self.pad):
            return None
        rows: list[Record | None] = []
        planned: list[int] = []
        bad: list[tuple[int, int, int]] = []
        replaced: list[int] = []
        ordered = [self.order.at(position, steps) for position in range(start, stop)]
        if self.cost is not None:
            costs: list[Any] = [self.cost(record_id) for record_id, _ in ordered]
            by_shards = isinstance(costs[0], list)
            ordered = [ordered[row] for row in (balanced_of_shards(costs) if by_shards else balanced(costs))]
        for row, (record_id, epoch) in enumerate(ordered):
            planned.append(record_id)
            read = record_id
            attempt = 0
            while self.is_bad(read):
                attempt += 1
                read = self.order.replacement(record_id, epoch, attempt)
                if attempt == 1:
                    bad.append((record_id, epoch, step))
                    replaced.append(row)
            rows.append(self.value(read, epoch))
        tokens = [self.origin(record_id) for record_id in planned]
        rows += [None] * (start + size - stop)
        return Batch(step, rows, stop, planned, bad, tokens, start, replaced)

    def length(self, steps: Steps) -> int | None:
        if self.order.total_of(steps) is None:
            return None
        return next(step for step in itertools.count() if self.batch(step, steps) is None)


@dataclasses.dataclass(frozen=True)
class Bad:
    """A record of a lane that cannot be decoded: the next one takes its row."""

    record_id: int
    epoch: int


class LaneRecords:
    """The records of one lane over all its epochs, made as they are asked for.

    Attributes:
      bad: bad records, with the number of good ones before each.
    """

    def __init__(self, epochs: Iterator[Sequence[Record | Bad]]) -> None:
        self._epochs, self._records, self.ended = epochs, list[Record](), False
        self.bad: list[tuple[int, Bad]] = []
        self._refused: Refused | None = None

    def upto(self, count: int) -> list[Record]:
        while len(self._records) < count and not self.ended:
            if self._refused is not None:  # again: a generator that has raised only ends
                raise self._refused
            try:
                records = next(self._epochs, None)
            except Refused as refused:
                self._refused = refused
                raise
            if records is None:
                self.ended = True
            else:
                for record in records:
                    if isinstance(record, Bad):
                        self.bad.append((len(self._records), record))
                    else:
                        self._records.append(record)
        return self._records[:count]


@dataclasses.dataclass
class Lanes:
    """A stream that is read as lanes."""

    num_lanes: int
    open: Callable[[int], Iterator[Sequence[Record | Bad]]]
    """Lane → its records, one list per epoch."""
    pad: bool

    def __post_init__(self) -> None:
        self._lanes = [LaneRecords(self.open(lane)) for lane in range(self.num_lanes)]

    def upto(self, lane: int, count: int) -> list[Record]:
        """The first records of a lane."""
        return self._lanes[lane].upto(count)

    def batch(self, step: int, steps: Steps) -> Batch | None:
        start, size = steps.position_of(step) // self.num_lanes, steps.size(step) // self.num_lanes
        rows: list[Record | None] = []
        tokens: list[Any] = []
        short = False
        position = before = 0
        bad: list[tuple[int, int, int]] = []
        for number, lane in enumerate(self._lanes):
            records = lane.upto(start + size)
            before += min(start, len(records))
            bad += [(one.record_id, one.epoch, step) for place, one in lane.bad if start <= place < start + size]
            here = records[start:]
            short |= len(here) < size
            rows += [*here, *[None] * (size - len(here))]
            tokens += [(number, int(here[i]["id"])) if i < len(here) else None for i in range(size)]
            position += len(records)
        if not position and all(lane.ended for lane in self._lanes):
            raise Refused("SourceError", "the first step of a stream without records")
        if (short and not self.pad) or all(row is None for row in rows):
            return None
        return Batch(step, rows, position, bad=bad, tokens=tokens, before=before)


@dataclasses.dataclass
class HostLists:
    """Host batches: each row shard has its own list of batches, of the same rows."""

    batches: Sequence[Callable[[int], Sequence[Record] | None]]  # host → step → the records of its batch, or None
    rows_of: Callable[[int, int], Sequence[int]]  # host, size of a batch → its rows, in the order of its records
    pad: bool
    empty: bool  # no host has a batch

    def batch(self, step: int, steps: Steps) -> Batch | None:
        if self.empty:
            raise Refused("SourceError", "the first step of host batches without any")
        before = sum(len(self._rows(number, steps)[0]) for number in range(step))
        rows, short = self._rows(step, steps)
        if (short and not self.pad) or not rows:
            return None
        size = steps.size(step)
        return Batch(step, [rows.get(row) for row in range(size)], before + len(rows), before=before)

    def _rows(self, step: int, steps: Steps) -> tuple[dict[int, Record], bool]:
        """The records of a step by row, and whether some host has too few."""
        rows: dict[int, Record] = {}
        short = False
        for host, batches in enumerate(self.batches):
            mine = self.rows_of(host, steps.size(step))
            records = batches(step) or []
            short |= len(records) < len(mine)
            rows.update(zip(mine, records, strict=False))
        return rows, short
