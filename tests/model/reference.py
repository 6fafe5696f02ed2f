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

*States.* A state is where the stream stands after the last delivered batch: ``set_state`` of a merged state continues
there on any topology, with any batch size that the mesh and the lanes divide. ``reset`` is the state before step 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

Record = dict[str, np.ndarray]
Value = Callable[[int, int], Record]
"""(record id, epoch) → the record."""

# ---------------------------------------------------------------------- keyed permutations, one number at a time

_MASK = 2**64 - 1
_EPOCH, _BLOCKS, _WITHIN, _SHORT_BLOCK, _REPLACEMENT, _SHARDS, _WINDOW = 1, 2, 3, 4, 5, 6, 7
_LAYOUT, _COMPONENT_SEED = 101, 102
LANE_LAYOUT = 103


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
    return _table(count, key)[number] if count <= 4096 else _feistel(number, count, key)


def _table(count: int, key: int) -> list[int]:
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

    @property
    def total(self) -> int | None:
        return None if self.num_epochs is None else self.count * self.num_epochs

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        epoch, offset = divmod(position, self.count)
        return epoch_id(offset, self.count, self.shuffle, self.seed, epoch), epoch

    def replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        return replacement(self.seed, epoch, record_id, attempt, self.count)


@dataclasses.dataclass
class Shards(Plain):
    """``shuffle="shards"``: each lane reads its part of the epoch's shards in windows of two."""

    lengths: Sequence[int] = ()
    num_lanes: int = 1

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        start, size = steps.batch_of(position)
        lane, number = divmod(position - start, size // self.num_lanes)
        cell = start + number * self.num_lanes + lane
        if self.total is not None and start + size > self.total:
            cell = position  # the last, partial batch takes the remaining cells in order
        epoch = cell // self.count
        number, lane = divmod(cell, self.num_lanes)
        # Lane l holds the cells l, l + L, ...; its part of the epoch's line is as long as its cells in the epoch.
        parts = [self._first(other, epoch + 1) - self._first(other, epoch) for other in range(self.num_lanes)]
        return self._line(epoch, parts)[sum(parts[:lane]) + number - self._first(lane, epoch)], epoch

    def _first(self, lane: int, epoch: int) -> int:
        return -((lane - epoch * self.count) // self.num_lanes)

    def _line(self, epoch: int, parts: Sequence[int]) -> list[int]:
        order = _table(len(self.lengths), key_of(self.seed, _SHARDS, self.count, epoch))
        starts = list(itertools.accumulate(self.lengths, initial=0))
        # The line, in pieces: a new one at each shard and each lane.
        cuts = set(itertools.accumulate(parts, initial=0))
        pieces: list[tuple[bool, list[int]]] = []
        place = 0
        for shard in order:
            for number in range(self.lengths[shard]):
                if not number or place in cuts:
                    pieces.append((place in cuts, []))
                pieces[-1][1].append(starts[shard] + number)
                place += 1
        line: list[int] = []
        windows: list[list[int]] = []
        in_window = 0
        for begins_lane, piece in pieces:
            if begins_lane or in_window == 2:
                windows.append([])
                in_window = 0
            windows[-1].extend(piece)
            in_window += 1
        for window, ids in enumerate(windows):
            key = key_of(self.seed, _WINDOW, self.count, epoch, window)
            line += [ids[permuted(i, len(ids), key)] for i in range(len(ids))]
        return line


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
            component = labels[_table(len(labels), key_of(self._key, _LAYOUT, stage, block))[slot]]
            self._drawn.append((component, self._so_far[component]))
            self._so_far[component] += 1
        return self._drawn[position]


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

    def blocks(self, steps: Steps) -> Blocks:
        starts = [steps.position_of(step) for step, _ in self.stages]
        return Blocks([counts for _, counts in self.stages], starts, key_of(self.seed, _LAYOUT))

    def total_of(self, steps: Steps) -> int | None:
        if self.num_epochs is None:
            return None
        blocks, last = self.blocks(steps), self.stages[-1][1]
        times = [count * self.num_epochs * again for count, again in zip(self.counts, self.repeat, strict=True)]
        done: set[int] = set()
        for position in itertools.count():
            component, number = blocks[position]
            if self.on_end == "stop" and number == times[component]:
                return position
            if number + 1 >= times[component] and last[component]:
                done.add(component)
            in_last = position >= steps.position_of(self.stages[-1][0])
            drawn = [c for c, count in enumerate(last) if count]
            if self.on_end == "repeat" and done >= set(drawn):
                # The end is the last of the places at which a component of the last stage is read in full.
                return self._full(blocks, times, drawn)
            assert position < 100_000 or not in_last
        raise AssertionError

    def _full(self, blocks: Blocks, times: Sequence[int], drawn: Sequence[int]) -> int:
        wanted = {(component, times[component] - 1) for component in drawn}
        position = 0
        while wanted:
            wanted.discard(blocks[position])
            position += 1
        return position

    def at(self, position: int, steps: Steps) -> tuple[int, int]:
        component, number = self.blocks_cached(steps)[position]
        count = self.counts[component]
        epoch, offset = divmod(number, count)
        seed = key_of(self.seed, _COMPONENT_SEED, component)
        return component << 48 | epoch_id(offset, count, self.shuffle, seed, epoch), epoch

    def blocks_cached(self, steps: Steps) -> Blocks:
        last = getattr(self, "_last", None)
        if last is None or last[0] != steps:
            last = self._last = (steps, self.blocks(steps))
        return last[1]

    def replacement(self, record_id: int, epoch: int, attempt: int) -> int:
        component, own = record_id >> 48, record_id & (2**48 - 1)
        return component << 48 | replacement(self.seed, epoch, own, attempt, self.counts[component])


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

    def arrays(self, zero: Record, mask_key: str | None) -> dict[str, np.ndarray]:
        """The global arrays."""
        out = {
            name: np.stack([np.zeros_like(leaf) if row is None else row[name] for row in self.rows])
            for name, leaf in zero.items()
        }
        if mask_key is not None:
            out[mask_key] = np.array([row is not None for row in self.rows])
        return out


class Refused(Exception):
    """The configuration raises instead of giving batches; ``kind`` is the class of the error."""

    def __init__(self, kind: str, when: str) -> None:
        super().__init__(f"{kind} at {when}")
        self.kind, self.when = kind, when


# ---------------------------------------------------------------------- the kinds of stream


@dataclasses.dataclass
class RandomAccess:
    """A stream of a random-access source."""

    order: Any
    value: Value
    pad: bool
    is_bad: Callable[[int], bool] = lambda record_id: False

    def total(self, steps: Steps) -> int | None:
        return self.order.total_of(steps) if isinstance(self.order, Mixed) else self.order.total

    def batch(self, step: int, steps: Steps) -> Batch | None:
        start, size, total = steps.position_of(step), steps.size(step), self.total(steps)
        stop = start + size if total is None else min(start + size, total)
        if stop <= start or (stop < start + size and not self.pad):
            return None
        rows: list[Record | None] = []
        planned: list[int] = []
        bad: list[tuple[int, int, int]] = []
        for position in range(start, stop):
            record_id, epoch = self.order.at(position, steps)
            planned.append(record_id)
            read = record_id
            attempt = 0
            while self.is_bad(read):
                attempt += 1
                read = self.order.replacement(record_id, epoch, attempt)
                if attempt == 1:
                    bad.append((record_id, epoch, step))
            rows.append(self.value(read, epoch))
        tokens = list(planned)
        rows += [None] * (start + size - stop)
        return Batch(step, rows, stop, planned, bad, tokens)

    def length(self, steps: Steps) -> int | None:
        if self.total(steps) is None:
            return None
        return next(step for step in itertools.count() if self.batch(step, steps) is None)


class LaneRecords:
    """The records of one lane over all its epochs, made as they are asked for."""

    def __init__(self, epochs: Iterator[Sequence[Record]]) -> None:
        self._epochs, self._records, self.ended = epochs, list[Record](), False
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
                self._records += records
        return self._records[:count]


@dataclasses.dataclass
class Lanes:
    """A stream that is read as lanes."""

    num_lanes: int
    open: Callable[[int], Iterator[Sequence[Record]]]
    """Lane → its records, one list per epoch."""
    pad: bool

    def __post_init__(self) -> None:
        self._lanes = [LaneRecords(self.open(lane)) for lane in range(self.num_lanes)]

    def batch(self, step: int, steps: Steps) -> Batch | None:
        start, size = steps.position_of(step) // self.num_lanes, steps.size(step) // self.num_lanes
        rows: list[Record | None] = []
        tokens: list[Any] = []
        short = False
        position = 0
        for number, lane in enumerate(self._lanes):
            records = lane.upto(start + size)
            here = records[start:]
            short |= len(here) < size
            rows += [*here, *[None] * (size - len(here))]
            tokens += [(number, int(here[i]["id"])) if i < len(here) else None for i in range(size)]
            position += len(records)
        if not position and all(lane.ended for lane in self._lanes):
            raise Refused("SourceError", "the first step of a stream without records")
        if (short and not self.pad) or all(row is None for row in rows):
            return None
        return Batch(step, rows, position, tokens=tokens)


@dataclasses.dataclass
class HostLists:
    """Host batches: each row shard has its own list of batches, of the same rows."""

    batches: Sequence[Sequence[Sequence[Record]]]  # host → batch → its records, in the order of the host's rows
    rows_of: Callable[[int], Sequence[int]]  # host → its rows of a batch
    pad: bool

    def batch(self, step: int, steps: Steps) -> Batch | None:
        if not any(self.batches):
            raise Refused("SourceError", "the first step of host batches without any")
        rows: list[Record | None] = [None] * steps.size(step)
        short = False
        for host, batches in enumerate(self.batches):
            mine = self.rows_of(host)
            records = batches[step] if step < len(batches) else []
            short |= len(records) < len(mine)
            for row, record in zip(mine, records, strict=False):
                rows[row] = record
        if (short and not self.pad) or all(row is None for row in rows):
            return None
        return Batch(step, rows, self._before(step + 1))

    def _before(self, step: int) -> int:
        return sum(len(records) for batches in self.batches for records in batches[:step])
