"""Sources as lists of records, defined a second time in plain Python: slices and loops.

A :class:`Node` is a source together with its records, one epoch in order, and what a feed makes of it: an order of
``reference.py`` and the record of each id. Nothing of meshfeed is used to compute them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import reference
from reference import Mixed, MixedLanes, Plain, Record, Sequences, ShardLanes, Shards, key_of, permuted, table

from meshfeed.sources import (
    Buckets,
    Concat,
    Join,
    Map,
    Memory,
    Mixture,
    Packed,
    Padded,
    Sample,
    Subset,
    Zip,
    random_split,
)

Stages = Sequence[tuple[int, Mapping[str, float]]]
"""First step, and component → weight."""
Draw = tuple[int, int, int]
"""Seed, epoch and record id of the feed, by which random numbers are drawn."""
NO_DRAW: Draw = (0, 0, 0)
Origin = frozenset[int]
"""The records of the lowest sources, as they are told apart there."""
Windows = tuple[int, bool]
"""``window_shards`` and ``affinity`` of an order by shards."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a feed on which the order of records depends."""

    shuffle: bool | int | Windows
    seed: int
    num_epochs: int | None
    size: int = 0  # of every batch, for buckets
    num_lanes: int = 1
    added: Stages = ()  # by ``set_weights``

    @property
    def windows(self) -> Windows | None:
        """None if the order is not by shards."""
        return self.shuffle if isinstance(self.shuffle, tuple) else None

    def lanes(self, lengths: Sequence[int], seed: int, **changes: Any) -> ShardLanes:
        """The lanes over so many records of each shard."""
        assert self.windows is not None
        return ShardLanes(
            lengths, self.num_lanes, seed, **{"window": self.windows[0], "affinity": self.windows[1], **changes}
        )


@dataclasses.dataclass
class Ordered:
    """The records of a feed: their order, the record of an id, and what is read for it."""

    order: Any
    value: Callable[[int, int], Record]
    origin: Callable[[int], Origin]
    first: int = 0  # the record that shows the structure


@dataclasses.dataclass
class Node:
    """A source and its definition.

    Attributes:
      make: makes the source; the argument is passed to those at the bottom.
      count: number of records, one epoch in order.
      read: the record of an id below ``count``.
      origin: what is read for it.
      shards: how many records are in each file; None if they are not in files, or not in their order.
      text: the source as code.
      levels: sources one over the other.
      feed: the records of a feed, if they are not those of the list in an order of ids.
      feed_shards: what the lanes of a feed read as shards, if not ``shards``.
      mixed: of a mixture: its components, and their weights.
      grouped: of buckets: the records before they are padded, and what puts others into the same buckets.
      packed: whether it is packed sequences, whose documents the feed shuffles.
      steps: whether the records depend on steps, so that there is no list.
      fewest: of a mixture that stops: records of its smallest component; lanes by shards cannot be more.
    """

    make: Callable[[Any], Any]
    count: int
    read: Callable[[int, Draw], Record]
    origin: Callable[[int], Origin]
    shards: list[int] | None
    text: str
    levels: int = 1
    feed: Callable[[Settings], Ordered] | None = None
    feed_shards: Callable[[Windows], list[int]] | None = None
    mixed: tuple[list[Node], list[float]] | None = None
    grouped: tuple[Node, Callable[[Node], Node]] | None = None
    packed: bool = False
    steps: bool = False
    fewest: int | None = None

    def records(self) -> list[Record]:
        """All records of an epoch in order."""
        return [self.read(number, NO_DRAW) for number in range(self.count)]

    def shards_for(self, windows: Windows) -> list[int]:
        """Records of each shard that the lanes of a feed read."""
        assert self.shards is not None
        return self.shards if self.feed_shards is None else self.feed_shards(windows)

    def ordered(self, settings: Settings) -> Ordered:
        """What a feed gives."""
        if self.feed is not None:
            return self.feed(settings)
        return Ordered(
            _order(self.count, self.shards, settings),
            lambda i, epoch: self.read(i, (settings.seed, epoch, i)),
            self.origin,
        )


def default_num_lanes(sizes: Sequence[int], shards: Sequence[int]) -> int:
    """The largest common divisor of the sizes up to an eighth of the shards, at most 64."""
    limit = max(1, min(64, sum(count > 0 for count in shards) // 8))
    return max(lanes for lanes in range(1, limit + 1) if math.gcd(*sizes) % lanes == 0)


def _order(count: int, shards: Sequence[int] | None, settings: Settings) -> Plain:
    if settings.windows is None:
        return Plain(count, settings.shuffle, settings.seed, settings.num_epochs)  # type: ignore[arg-type]
    assert shards is not None
    return Shards(settings.lanes(shards, settings.seed), settings.seed, settings.num_epochs)


# ---------------------------------------------------------------------- views


def view(node: Node, ids: Sequence[int], shards: list[int] | None, make: Callable[[Any], Any], text: str) -> Node:
    """Some records of a source; ``make`` takes the source."""
    if node.grouped is not None:  # buckets of the view
        below, group = node.grouped
        found = group(view(below, ids, shards, lambda source: source, text))
        return dataclasses.replace(found, make=lambda given: make(node.make(given)), text=text)
    return Node(
        lambda given: make(node.make(given)),
        len(ids),
        lambda i, draw: node.read(ids[i], draw),
        lambda i: node.origin(ids[i]),
        shards,
        text,
        node.levels + 1,
    )


def shard_of(node: Node) -> list[int]:
    """The file of each record."""
    assert node.shards is not None
    return [number for number, count in enumerate(node.shards) for _ in range(count)]


def _in_shards(node: Node, ids: Sequence[int]) -> list[int] | None:
    """How many of the records are in each file; None if they do not follow its order."""
    if node.shards is None or list(ids) != sorted(ids):
        return None
    files = shard_of(node)
    counts = Counter(files[i] for i in ids)
    return [counts[number] for number in range(len(node.shards))]


def subset(node: Node, indices: slice | list[int]) -> Node:
    ids = list(range(node.count)[indices] if isinstance(indices, slice) else indices)
    shards = _in_shards(node, ids)
    return view(node, ids, shards, lambda source: Subset(source, indices), f"Subset({node.text}, {indices})")


def sample(node: Node, count: int, seed: int = 0) -> Node:
    times, more = divmod(count, node.count)
    key = key_of(seed, reference.SAMPLE, node.count)
    rest = sorted(permuted(i, node.count, key) for i in range(more))
    shards = None
    if node.shards is not None:
        shards = node.shards * times + (_in_shards(node, rest) or [] if rest else [])
    ids = [*range(node.count)] * times + rest
    return view(node, ids, shards, lambda source: Sample(source, count, seed=seed), f"Sample({node.text}, {count})")


def split(node: Node, fraction: float, seed: int = 0) -> Node:
    """The first part of a random split by records.

    Raises:
      ValueError: a part would be empty.
    """
    key = key_of(seed, reference.SPLIT, node.count)
    ids = sorted(permuted(i, node.count, key) for i in range(round(fraction * node.count)))
    _check_parts(node, ids)
    fractions = {"a": fraction, "b": 1 - fraction}

    def make(source: Any) -> Any:
        return random_split(source, fractions, seed=seed)["a"]

    return view(node, ids, _in_shards(node, ids), make, f"random_split({node.text}, {fractions})['a']")


def _check_parts(node: Node, ids: Sequence[int]) -> None:
    if not 0 < len(ids) < node.count:
        raise ValueError("a part is empty")


def split_by_shards(node: Node, fraction: float, seed: int = 0) -> Node:
    """The first part of a random split by files: those of which the middle lies in it.

    Raises:
      ValueError: a part would be empty, or files would be in both.
    """
    assert node.shards is not None
    if (node.grouped[0] if node.grouped else node).text.startswith("Sample("):
        raise ValueError("a Sample has records of a file several times")
    dealt = table(len(node.shards), key_of(seed, reference.SPLIT_SHARDS, node.count, len(node.shards)))
    before, files = 0, set[int]()
    for number in dealt:
        if before + node.shards[number] // 2 < round(fraction * node.count):
            files.add(number)
        before += node.shards[number]
    ids = [i for i, number in enumerate(shard_of(node)) if number in files]
    _check_parts(node, ids)
    fractions = {"a": fraction, "b": 1 - fraction}

    def make(source: Any) -> Any:
        return random_split(source, fractions, seed=seed, by="shard")["a"]

    text = f"random_split({node.text}, {fractions}, by='shard')['a']"
    return view(node, ids, _in_shards(node, ids), make, text)


def _one_after_the_other(nodes: Sequence[Node], make: Callable[[Any], Any], text: str) -> Node:
    places = [(node, i) for node in nodes for i in range(node.count)]
    in_files = all(node.shards is not None for node in nodes)
    return Node(
        make,
        len(places),
        lambda i, draw: places[i][0].read(places[i][1], draw),
        lambda i: places[i][0].origin(places[i][1]),
        [count for node in nodes for count in node.shards or ()] if in_files else None,
        text,
        max(node.levels for node in nodes) + 1,
    )


def concat(nodes: Sequence[Node]) -> Node:
    def make(given: Any) -> Any:
        return Concat([node.make(given) for node in nodes])

    text = f"Concat([{', '.join(node.text for node in nodes)}])"
    if nodes[0].grouped is not None:
        found = nodes[0].grouped[1](_one_after_the_other([node.grouped[0] for node in nodes if node.grouped], make, ""))
        return dataclasses.replace(found, make=make, text=text)
    return _one_after_the_other(nodes, make, text)


def zipped(node: Node) -> Node:
    """Each record with the one at the same distance from the end."""
    other = subset(node, slice(None, None, -1))
    return Node(
        lambda given: Zip({"a": node.make(given), "b": other.make(given)}),
        node.count,
        lambda i, draw: {"a": node.read(i, _own_draw(draw, 0)), "b": other.read(i, _own_draw(draw, 1))},
        lambda i: node.origin(i) | other.origin(i),
        node.shards,
        f"Zip(a={node.text}, b={other.text})",
        other.levels + 1,
    )


def _own_draw(draw: Draw, number: int) -> Draw:
    """Random numbers of a part of a Zip, which no other part gets."""
    seed, epoch, record_id = draw
    return key_of(seed, reference.OWN_NUMBERS, number), epoch, record_id


def mapped(
    node: Node,
    function: Callable[[Any], Any],
    make: Callable[[Any], Any] | None = None,
    text: str = "Map({}, negated)",
) -> Node:
    """A function of each record. A mixture and buckets keep their order; packed sequences are a list."""
    feed = node.feed

    def ordered(settings: Settings) -> Ordered:
        assert feed is not None
        below = feed(settings)
        return dataclasses.replace(below, value=lambda i, epoch: function(below.value(i, epoch)))

    over = make or (lambda source: Map(source, function))
    keeps = feed is not None and not node.packed
    grouped = None
    if node.grouped is not None:
        below, group = node.grouped
        grouped = below, lambda records: mapped(group(records), function, make, text)
    return dataclasses.replace(
        node,
        make=lambda given: over(node.make(given)),
        read=lambda i, draw: function(node.read(i, draw)),
        levels=node.levels + 1,
        text=text.format(node.text),
        feed=ordered if keeps else None,
        feed_shards=node.feed_shards if keeps else None,
        mixed=None,
        packed=False,
        grouped=grouped,
    )


def joined(node: Node) -> Node:
    """Each record joined to one of five others by its tokens, which are then added to it."""
    listed = view(
        node,
        list(range(node.count)),
        node.shards,
        lambda source: Join(source, OTHERS, key=key_of_tokens, other_key="key", into="other"),
        f"Join({node.text})",
    )
    return mapped(listed, plus_its_key, lambda source: Map(source, plus_other), "Map({}, plus_other)")


OTHERS = Memory({"key": np.arange(5) * 3, "add": np.arange(5, dtype=np.int32) * 3})


def key_of_tokens(record: Record) -> int:
    return int(np.abs(record["tokens"]).sum()) % 5 * 3


def plus_its_key(record: Record) -> Record:
    return {**record, "tokens": record["tokens"] + np.int32(key_of_tokens(record))}


def plus_other(record: Record) -> Record:
    kept = {name: leaf for name, leaf in record.items() if name != "other"}
    return {**kept, "tokens": record["tokens"] + record["other"]["add"]}


def negated(record: Record) -> Record:
    return {**record, "tokens": -record["tokens"]}


# ---------------------------------------------------------------------- mixtures


def mixture(
    nodes: Mapping[str, Node],
    weights: Mapping[str, float] | Stages,
    block: int,
    on_end: str = "repeat",
    take: Mapping[str, int] | None = None,
    repeat: Mapping[str, int] | None = None,
) -> Node:
    """A mixture; one within another is flattened.

    Raises:
      ValueError: a component would have no share, or no record at all.
    """
    given_stages: Stages = [(0, weights)] if isinstance(weights, Mapping) else weights
    keywords: dict[str, Any] = {"on_end": on_end, "take": take, "repeat": repeat}

    def make(given: Any) -> Any:
        components = {name: node.make(given) for name, node in nodes.items()}
        return Mixture(components, weights, block, **{name: value for name, value in keywords.items() if value})  # type: ignore[arg-type]

    text = f"Mixture({{{', '.join(f'{n!r}: {node.text}' for n, node in nodes.items())}}}, {weights}, {block}, **{keywords})"
    first = next(iter(nodes.values()))
    if first.grouped is not None:
        below = {name: node.grouped[0] for name, node in nodes.items() if node.grouped}
        found = first.grouped[1](_mixture(below, given_stages, block, on_end, take or {}, repeat or {}, make, ""))
        return dataclasses.replace(found, make=make, text=text)
    return _mixture(nodes, given_stages, block, on_end, take or {}, repeat or {}, make, text)


def _mixture(
    nodes: Mapping[str, Node],
    given_stages: Stages,
    block: int,
    on_end: str,
    take: Mapping[str, int],
    repeat: Mapping[str, int],
    make: Callable[[Any], Any],
    text: str,
) -> Node:
    parts: list[Node] = []
    again: list[int] = []
    within: list[tuple[str, float, float]] = []  # part → name, its weight and all weights of what has that name
    for name, node in nodes.items():
        inner = node.mixed or ([_first(node, take.get(name, node.count))], [1.0])
        parts += inner[0]
        again += [repeat.get(name, 1)] * len(inner[0])
        within += [(name, share, sum(inner[1])) for share in inner[1]]
    names = [str(number) for number in range(len(parts))]

    def of_parts(weights: Mapping[str, float]) -> list[float]:
        return [weights.get(name, 0) * share / whole for name, share, whole in within]

    def in_block(weights: Mapping[str, float]) -> list[int]:
        """Records of each part in a block."""
        return reference.shares(dict(zip(names, of_parts(weights), strict=True)), names, block)

    shares = [(step, in_block(weights)) for step, weights in given_stages]
    if not all(itertools.chain.from_iterable(counts for _, counts in shares)):
        raise ValueError("a component has no share")
    counts = [part.count for part in parts]
    common: dict[str, Any] = {"counts": counts, "on_end": on_end, "repeat": again}
    in_order = Mixed(stages=shares, shuffle=False, seed=0, num_epochs=1, **common)
    one = reference.Steps((), ((0, 1),))

    def feed(given: Settings) -> Ordered:
        order: Any
        added = {step: in_block(weights) for step, weights in given.added}
        settings = {**common, "stages": sorted({**dict(shares), **added}.items())}
        if given.windows is not None:
            order = MixedLanes(
                lambda number, seed: given.lanes(parts[number].shards or (), seed),
                given.num_lanes,
                seed=given.seed,
                num_epochs=given.num_epochs,
                **settings,
            )
        else:
            order = Mixed(shuffle=given.shuffle, seed=given.seed, num_epochs=given.num_epochs, **settings)  # type: ignore[arg-type]
        return Ordered(order, lambda i, epoch: read(i, (given.seed, epoch, i)), origin)

    def read(record_id: int, draw: Draw) -> Record:
        return parts[record_id >> 48].read(record_id & (2**48 - 1), draw)

    def origin(record_id: int) -> Origin:
        return parts[record_id >> 48].origin(record_id & (2**48 - 1))

    count = 0 if len(shares) > 1 else in_order.total_of(one) or 0
    if len(shares) == 1 and not count:
        raise ValueError("the mixture stops at once")
    in_files = all(part.shards is not None for part in parts)
    files = [length for part in parts for length in part.shards or ()]
    # As a list, the components advance together: as many equal runs as they have files on average, taken or not.
    whole = [length for node in nodes.values() for part in (node.mixed or ([node],))[0] for length in part.shards or ()]
    runs = max(1, sum(length > 0 for length in whole) // len(parts))
    ends = [count * i // runs for i in range(runs + 1)]
    return Node(
        make,
        count,
        lambda i, draw: read(in_order.at(i, one)[0], draw),
        lambda i: origin(in_order.at(i, one)[0]),
        [b - a for a, b in itertools.pairwise(ends)] if in_files else None,
        text,
        max(node.levels for node in nodes.values()) + 1,
        feed=feed,
        feed_shards=lambda windows: files,
        mixed=(parts, of_parts(given_stages[0][1])) if len(shares) == 1 and not take and not repeat else None,
        steps=len(shares) > 1,
        fewest=min(counts) if on_end == "stop" else None,
    )


def _first(node: Node, count: int) -> Node:
    """The first records of a component, for ``take``."""
    return node if count == node.count else subset(node, slice(count))


# ---------------------------------------------------------------------- packing and buckets

Segment = tuple[int, int, int]
"""Document, its first token, and the token after the last."""
Segments = list[Segment]
"""A sequence."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Keywords of Packed by which a sequence holds more than its documents, or fewer of them."""

    align: int = 1
    bos_id: int | None = None
    max_segments: int | None = None
    cumulative_lengths: str | None = None
    sequence_order: tuple[str, int] | None = None
    side: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """Those that are not at their defaults."""
        usual = Limits()
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if value != getattr(usual, name)}

    @property
    def before(self) -> int:
        """Tokens before each piece."""
        return 0 if self.bos_id is None else 1

    def taken(self, count: int) -> int:
        """The tokens of a sequence that a piece of so many takes."""
        return -(-(count + self.before) // self.align) * self.align

    def slots(self, length: int) -> int:
        """Most pieces of a sequence."""
        return min(self.max_segments or length, length // self.taken(1))

    def bind(self, length: int, method: str) -> bool:
        """Whether not only the tokens decide what a sequence holds."""
        uneven = method == "split" and self.align > 1 and self.before > 0
        return bool(self.side) or self.slots(length) < length // self.taken(1) or uneven


class _Packing:
    """Sequences of documents; see docs/decisions/packing.md."""

    def __init__(self, node: Node, length: int, method: str, block: int, limits: Limits) -> None:
        self._node, self._length, self._method, self._limits = node, length, method, limits
        records = [node.read(number, NO_DRAW) for number in range(node.count)]
        self._lengths = [len(record["tokens"]) for record in records]
        self._sizes = [[len(record[leaf]) for leaf in limits.side] for record in records]
        self.bounds = [*range(0, node.count, block), node.count]
        self.listed = self._sequences(self.bounds, range(len(self.bounds) - 1), None, 0)

    def _sequences(self, bounds: Sequence[int], dealt: Sequence[int], seed: int | None, epoch: int) -> list[Segments]:
        """The sequences of an epoch, whose blocks come in the order ``dealt``."""
        found: list[Segments] = []
        for number in dealt:
            first, stop = bounds[number], bounds[number + 1]
            order = list(range(stop - first))
            if seed is not None:
                order = table(stop - first, key_of(seed, reference.DOCUMENTS, epoch, number))
            documents = [(first + i, self._lengths[first + i]) for i in order]
            binding = self._limits.bind(self._length, self._method)
            if self._method == "split" and not binding:
                found += _split(documents, self._length, self._limits)
                continue
            if binding:
                sizes = [self._sizes[document] for document, _ in documents]
                fitted = _within(documents, sizes, self._length, self._limits, self._method == "split", seed is None)
            else:
                fitted = _fit(documents, self._length, seed is None)
            if seed is not None:
                key = key_of(seed, reference.SEQUENCES, epoch, number)
                fitted = [fitted[permuted(i, len(fitted), key)] for i in range(len(fitted))]
            found += fitted
        return found

    def in_windows(self, window: int) -> list[int]:
        """The first document of each window of files, and the number of documents."""
        ends = [*itertools.accumulate(count for count in self._node.shards or () if count)]
        return sorted({0, *ends[window - 1 :: window], self._node.count})

    def counts(self, bounds: Sequence[int]) -> list[int]:
        """Sequences of each block."""
        return [len(self._sequences(bounds, [number], None, 0)) for number in range(len(bounds) - 1)]

    def in_files(self) -> list[int] | None:
        """How many sequences are of blocks that begin in each file."""
        if self._node.shards is None:
            return None
        begins, files = Counter[int](), shard_of(self._node)
        for number, count in enumerate(self.counts(self.bounds)):
            begins[files[self.bounds[number]]] += count
        return [begins[number] for number in range(len(self._node.shards))]

    def record(self, segments: Segments) -> Record:
        limits, before = self._limits, self._limits.before
        record = {name: np.zeros(self._length, np.int32) for name in ("tokens", "segment_ids", "positions")}
        begins, at, end = list[int](), 0, 0
        for number, (document, first, stop) in enumerate(segments, 1):
            begins.append(at)
            end = at + before + stop - first
            record["tokens"][at:end] = [limits.bos_id] * before + list(
                self._node.read(document, NO_DRAW)["tokens"][first:stop]
            )
            record["segment_ids"][at:end] = number
            record["positions"][at:end] = np.arange(end - at)
            at += limits.taken(stop - first)
        if limits.sequence_order is not None:
            order = _order_of_tokens(*limits.sequence_order, self._length)
            record = {name: leaf[order] for name, leaf in record.items()}
        if limits.cumulative_lengths is not None:
            assert limits.max_segments is not None
            starts = [*begins, *[end] * (limits.max_segments + 1 - len(begins))]
            record[limits.cumulative_lengths] = np.array(starts, np.int32)
        for leaf, most in limits.side.items():
            record |= self._entries(segments, leaf, most)
        return record

    def _entries(self, segments: Segments, leaf: str, most: int) -> Record:
        """The entries of a leaf that belong to a sequence: those of the documents that begin in it."""
        shape = self._node.read(0, NO_DRAW)[leaf]
        values, mask, of = (
            np.zeros((most, *shape.shape[1:]), shape.dtype),
            np.zeros(most, bool),
            np.zeros(most, np.int32),
        )
        at = 0
        for number, (document, first, _) in enumerate(segments, 1):
            for entry in self._node.read(document, NO_DRAW)[leaf] if first == 0 else ():
                values[at], mask[at], of[at] = entry, True, number
                at += 1
        return {leaf: values, f"{leaf}_mask": mask, f"{leaf}_segment": of}

    def origin(self, segments: Segments) -> Origin:
        return frozenset().union(*(self._node.origin(document) for document, _, _ in segments))

    def feed(self, settings: Settings) -> Ordered:
        """The sequences of a feed, which shuffles the documents of each block."""
        listed = self.listed
        places = Plain(len(listed), False, settings.seed, settings.num_epochs)
        if settings.shuffle is False:
            return Ordered(places, lambda i, epoch: self.record(listed[i]), lambda i: self.origin(listed[i]))
        bounds, epochs = self.bounds, dict[int, list[Segments]]()
        if settings.windows is not None:
            bounds = self.in_windows(settings.windows[0])
            lanes = settings.lanes(self.counts(bounds), settings.seed, window=1, mixes=False)  # packing has mixed them
            places = Shards(lanes, settings.seed, settings.num_epochs)

        def segments(record_id: int) -> Segments:
            epoch, place = divmod(record_id, places.count)
            if epoch not in epochs:
                blocks: Sequence[int] = range(len(bounds) - 1)
                if settings.windows is None:
                    key = key_of(settings.seed, reference.PACKED_BLOCKS, self._node.count, epoch)
                    blocks = table(len(blocks), key)
                epochs[epoch] = self._sequences(bounds, blocks, settings.seed, epoch)
            return epochs[epoch][place]

        return Ordered(Sequences(places), lambda i, epoch: self.record(segments(i)), lambda i: self.origin(segments(i)))


def _order_of_tokens(kind: str, shards: int, length: int) -> list[int]:
    """The tokens of a sequence, those of the first shard first."""
    if kind == "striped":
        return [token for shard in range(shards) for token in range(shard, length, shards)]
    each = length // (2 * shards)
    chunks = [[*range(start, start + each)] for start in range(0, length, each)]
    return [token for shard in range(shards) for token in chunks[shard] + chunks[-1 - shard]]


def packed(node: Node, length: int, method: str = "split", block: int = 65_536, limits: Limits | None = None) -> Node:
    """Packs documents by hand.

    Raises:
      ValueError: no token is left.
    """
    limits = limits or Limits()
    packing = _Packing(node, length, method, block, limits)
    listed = packing.listed
    if not listed:
        raise ValueError("no token is left")
    return Node(
        lambda given: Packed(node.make(given), length, method=method, block=block, **limits.keywords()),
        len(listed),
        lambda i, draw: packing.record(listed[i]),
        lambda i: packing.origin(listed[i]),
        packing.in_files(),
        f"Packed({node.text}, {length}, method={method!r}, block={block}, **{limits.keywords()})",
        node.levels + 1,
        feed=packing.feed,
        feed_shards=lambda windows: packing.counts(packing.in_windows(windows[0])),
        packed=True,
    )


def _split(documents: Sequence[tuple[int, int]], length: int, limits: Limits) -> list[list[Segment]]:
    """Documents end to end, each with what is before it and the gap after it, and what of them is in each sequence."""
    places, at = dict[int, tuple[int, int, int]](), limits.before
    for number, (document, count) in enumerate(documents):
        places |= {at + token: (number, document, token) for token in range(count)}
        at += limits.taken(count) if count else 0
    size = length - limits.before
    ends = range(limits.before, at - limits.before, size)
    rows = [[places[place] for place in range(end, end + size) if place in places] for end in ends]
    pieces = [[list(group) for _, group in itertools.groupby(row, lambda token: token[0])] for row in rows]
    return [[(piece[0][1], piece[0][2], piece[-1][2] + 1) for piece in row] for row in pieces]


def _fit(documents: Sequence[tuple[int, int]], length: int, by_first: bool) -> list[list[Segment]]:
    whole = [[(d, i, i + length)] for d, count in documents for i in range(0, count - length + 1, length)]
    rests = [(i, d, count // length * length, count) for i, (d, count) in enumerate(documents) if count % length]
    bins: list[list[tuple[int, int, int, int]]] = []
    changed: list[int] = []  # when each bin got its last document
    for time, rest in enumerate(sorted(rests, key=lambda rest: rest[2] - rest[3])):
        room = [length - sum(stop - first for _, _, first, stop in b) for b in bins]
        fitting = [i for i in range(len(bins)) if room[i] >= rest[3] - rest[2]]
        if not fitting:
            bins.append([])
            changed.append(0)
        chosen = min(fitting, key=lambda i: (room[i], -changed[i])) if fitting else len(bins) - 1
        bins[chosen].append(rest)
        changed[chosen] = time
    bins = [sorted(b) for b in bins]
    return whole + [[(d, first, stop) for _, d, first, stop in b] for b in (sorted(bins) if by_first else bins)]


def _within(
    documents: Sequence[tuple[int, int]],
    sizes: Sequence[Sequence[int]],
    length: int,
    limits: Limits,
    cuts: bool,
    by_first: bool,
) -> list[list[Segment]]:
    """Documents within limits: those that are longer than a sequence fill whole ones, and what is left is packed."""
    size, capacity = length - limits.before, [length // limits.align, limits.slots(length), *limits.side.values()]
    whole = [[(d, i, i + size)] for d, count in documents for i in range(0, count - size + 1, size)]
    places = [i for i, (_, count) in enumerate(documents) if count % size]
    lengths = [documents[i][1] % size for i in places]
    # Entries belong to the first piece of a document.
    needs = [[0] * len(sizes[i]) if documents[i][1] > size else list(sizes[i]) for i in places]
    vectors = [[limits.taken(count) // limits.align, 1, *need] for count, need in zip(lengths, needs, strict=True)]
    fewest = max(
        (-(-sum(column) // most) for column, most in zip(zip(*vectors, strict=True), capacity, strict=False)), default=0
    )
    Bins = list[list[tuple[int, int, int]]]  # place, first and last token of each piece
    found: Bins | None = _filled(lengths, needs, length, limits) if cuts and places else None
    close = fewest + fewest // 256
    order = sorted(
        range(len(places)),
        key=lambda i: (
            -max(a / b for a, b in zip(vectors[i], capacity, strict=True)),
            *(-number for number in vectors[i]),
        ),
    )
    mixed = [order[i] for i in table(len(order), key_of(0, 114))] if order else []
    for one in (order, mixed):
        if found is not None and len(found) <= close:
            break
        bins, room = Bins(), list[list[int]]()
        for i in one:
            fits = (all(a <= b for a, b in zip(vectors[i], left, strict=True)) for left in room)
            number = next((number for number, enough in enumerate(fits) if enough), len(bins))
            if number == len(bins):
                bins.append([])
                room.append(list(capacity))
            bins[number].append((i, 0, lengths[i]))
            room[number] = [a - b for a, b in zip(room[number], vectors[i], strict=True)]
        if found is None or len(bins) < len(found):
            found = bins
    found = [sorted(one) for one in found or []]
    rest = sorted(found) if by_first else found
    first_of = [documents[i][1] // size * size for i in places]
    return whole + [
        [(documents[places[i]][0], first_of[i] + first, first_of[i] + stop) for i, first, stop in one] for one in rest
    ]


def _filled(
    lengths: Sequence[int], needs: Sequence[Sequence[int]], length: int, limits: Limits
) -> list[list[tuple[int, int, int]]]:
    """Sequences filled one after the other: a share of the pieces with few tokens, then those with many."""
    most, slots = list(limits.side.values()), limits.slots(length)

    def tokens_for(i: int) -> tuple[Any, ...]:
        share = max([1 / slots, *(need / limit for need, limit in zip(needs[i], most, strict=True))])
        return (lengths[i] / share, lengths[i], *reversed(needs[i]))

    waiting = sorted(range(len(lengths)), key=tokens_for)
    left_tokens = sum(map(limits.taken, lengths))
    left_needs = [sum(column) for column in zip(*needs, strict=True)] or [0] * len(most)
    cut: tuple[int, int] | None = None
    found: list[list[tuple[int, int, int]]] = []
    while waiting or cut:
        row, tokens, room = list[tuple[int, int, int]](), length, list(most)
        items = len(waiting) + (cut is not None)
        ways = [(left_tokens, length), (items, slots), *zip(left_needs, most, strict=True)]
        lows = -(-items // max(-(-number // limit) for number, limit in ways)) - 1

        def fits(*new: int) -> bool:
            return all(sum(needs[i][k] for i in new) <= room[k] for k in range(len(room)))  # noqa: B023

        while True:
            start = 0
            if cut is not None:
                (item, start), cut = cut, None
            elif len(row) == slots or tokens <= limits.before or not waiting:
                break
            elif (
                lows > 0
                and len(row) + 1 < slots
                and len(waiting) > 1
                and fits(waiting[0], waiting[-1])
                and limits.taken(lengths[waiting[0]]) <= tokens
            ):
                item, lows = waiting.pop(0), lows - 1
            elif fits(waiting[-1]):
                item = waiting.pop()
            elif len(waiting) > 1 and fits(waiting[0]):
                item = waiting.pop(0)
            else:
                break
            count = min(lengths[item] - start, tokens - limits.before)
            row.append((item, start, start + count))
            tokens, left_tokens = tokens - limits.taken(count), left_tokens - limits.taken(count)
            if start == 0:
                room = [a - b for a, b in zip(room, needs[item], strict=True)]
                left_needs = [a - b for a, b in zip(left_needs, needs[item], strict=True)]
            if start + count < lengths[item]:
                cut = item, start + count
                break
        left_tokens = max(left_tokens, 1)
        found.append(row)
    return found


def pad_to(record: Record, length: int) -> Record:
    count = len(record["tokens"])
    tokens = np.zeros(length, record["tokens"].dtype)
    tokens[:count] = record["tokens"]
    return {**record, "tokens": tokens, "mask_of": np.arange(length) < count}


def padded(node: Node, length: int) -> Node:
    return mapped(
        node,
        lambda record: pad_to(record, length),
        lambda source: Padded(source, length, mask_key="mask_of"),
        f"Padded({{}}, {length}, mask_key='mask_of')",
    )


def buckets(node: Node, boundaries: tuple[int, ...]) -> Node:
    """Records in buckets: their ids are those of the records, raised in batches that buckets share."""
    lengths = [len(node.read(number, NO_DRAW)["tokens"]) for number in range(node.count)]
    of = [min(i for i, boundary in enumerate(boundaries) if boundary >= length) for length in lengths]
    ids = [[i for i, bucket in enumerate(of) if bucket == number] for number in range(len(boundaries))]

    def feed(settings: Settings) -> Ordered:
        def order_of(bucket: int) -> Plain:
            seed = key_of(settings.seed, reference.RECORDS, bucket)
            if settings.windows is None:
                return Plain(len(ids[bucket]), settings.shuffle, seed, None)  # type: ignore[arg-type]
            counts = Counter(shard_of(node)[i] for i in ids[bucket])
            line = (settings.seed, reference.LINE, node.count)
            lanes = settings.lanes([counts[number] for number in range(len(node.shards or ()))], seed, line=line)
            return Shards(lanes, seed, settings.num_epochs)

        def value(record_id: int, epoch: int) -> Record:
            times, own = divmod(record_id, node.count)
            bucket = times - 1 if times else of[own]
            return pad_to(node.read(own, NO_DRAW), boundaries[bucket])

        shuffle: Any = False if settings.windows else settings.shuffle
        order = reference.Grouped(
            ids, settings.size, shuffle, settings.seed, settings.num_epochs, order_of, settings.windows is not None
        )
        longest = next(numbers for numbers in reversed(ids) if numbers)
        return Ordered(order, value, lambda i: node.origin(i % node.count), longest[0])

    return Node(
        lambda given: Buckets(node.make(given), boundaries, mask_key="mask_of"),
        node.count,
        lambda i, draw: pad_to(node.read(i, draw), boundaries[of[i]]),
        node.origin,
        node.shards,
        f"Buckets({node.text}, {boundaries}, mask_key='mask_of')",
        node.levels + 1,
        feed=feed,
        grouped=(node, lambda records: buckets(records, boundaries)),
    )
