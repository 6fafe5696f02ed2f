"""Random combinations of sources and orders, defined a second time in plain Python: lists, slices and loops.

A :class:`Node` is a source together with its records as a list. Nothing of meshfeed is used to compute them; permutations
and mixtures are those of ``reference.py``. ``play`` compares a whole stream with its definition, read by several hosts and
resumed half way.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "streams"))

import reference
from stream_parts import rows_of_host, settings_of

import meshfeed
from meshfeed._src.state.state import parse_state
from meshfeed._src.streams.random_access import RandomAccessStream
from meshfeed.sources import Buckets, Concat, Map, Mixture, Packed, Padded, Sample, Subset, Zip

Rec = dict[str, Any]
"""Leaf → its values as a tuple, or the record of a part of a Zip."""


class Documents:
    """Documents of unequal length in files; token t of document d is ``1000 * d + t + 1``."""

    def __init__(self, first: int, lengths: Sequence[int], shards: Sequence[int] | None, known: bool) -> None:
        self._first, self._lengths = first, list(lengths)
        if shards is not None:
            self.shard_lengths = lambda: np.array(shards, np.int64)
        if known:
            self.lengths = lambda: np.array(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        first = 1000 * (self._first + record_id) + 1
        return {"tokens": np.arange(first, first + self._lengths[record_id], dtype=np.int32)}

    def fingerprint(self) -> Any:
        return {"documents": [self._first, self._lengths]}


@dataclasses.dataclass
class Node:
    """A source and its definition.

    Attributes:
      make: makes the source.
      records: its records, one epoch in order.
      shards: how many of them are in each file; None if they are not in files, or not in their order.
      levels: sources one over the other.
      text: the source as code.
      components: of a mixture, or what is mapped over one: the records of each component.
      shares: of a mixture: records of each component in a block, ``on_end``.
      weights: of a mixture: the weight of each component.
      parts: of a mixture: its components.
      documents: of packed sequences: the documents, and how many are in a block.
      grouped: of buckets: the records before they are padded, and the boundaries.
    """

    make: Callable[[], Any]
    records: list[Rec]
    shards: list[int] | None
    levels: int
    text: str
    components: list[list[Rec]] | None = None
    shares: tuple[list[int], str] | None = None
    weights: list[float] | None = None
    parts: list[Node] | None = None
    documents: tuple[Node, int] | None = None
    grouped: tuple[list[Rec], tuple[int, ...]] | None = None


def leaf(first: int, lengths: Sequence[int], shards: Sequence[int] | None, known: bool) -> Node:
    records = [{"tokens": tuple(1000 * (first + d) + 1 + t for t in range(n))} for d, n in enumerate(lengths)]
    text = f"Documents({first}, {list(lengths)}, {shards}, {known})"
    return Node(
        lambda: Documents(first, lengths, shards, known), records, None if shards is None else list(shards), 1, text
    )


def shard_of(node: Node) -> list[int]:
    """The file of each record."""
    assert node.shards is not None
    return [number for number, count in enumerate(node.shards) for _ in range(count)]


def subset(node: Node, indices: slice | list[int]) -> Node:
    chosen = list(range(len(node.records))[indices] if isinstance(indices, slice) else indices)
    shards = None
    if node.shards is not None and chosen == sorted(chosen):
        counts = Counter(shard_of(node)[i] for i in chosen)
        shards = [counts[number] for number in range(len(node.shards))]
    return Node(
        lambda: Subset(node.make(), indices),
        [node.records[i] for i in chosen],
        shards,
        node.levels + 1,
        f"Subset({node.text}, {indices})",
    )


def sample(node: Node, times: int) -> Node:
    return Node(
        lambda: Sample(node.make(), times * len(node.records)),
        node.records * times,
        None if node.shards is None else node.shards * times,
        node.levels + 1,
        f"Sample({node.text}, {times * len(node.records)})",
    )


def concat(nodes: Sequence[Node]) -> Node:
    in_files = all(node.shards is not None for node in nodes)
    return Node(
        lambda: Concat([node.make() for node in nodes]),
        [record for node in nodes for record in node.records],
        [count for node in nodes for count in node.shards or ()] if in_files else None,
        max(node.levels for node in nodes) + 1,
        f"Concat([{', '.join(node.text for node in nodes)}])",
    )


def _negated(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "tokens": -record["tokens"]}


def mapped(node: Node) -> Node:
    def negated(records: list[Rec]) -> list[Rec]:
        return [{**record, "tokens": tuple(-token for token in record["tokens"])} for record in records]

    return dataclasses.replace(
        node,
        make=lambda: Map(node.make(), _negated),
        records=negated(node.records),
        levels=node.levels + 1,
        text=f"Map({node.text}, negated)",
        components=None if node.components is None else [negated(records) for records in node.components],
        parts=None,
        documents=None,
    )


def mixture(nodes: Sequence[Node], weights: Sequence[float], block: int, on_end: str) -> Node:
    parts: list[Node] = []
    flat: list[float] = []
    for node, weight in zip(nodes, weights, strict=True):
        inner = node.weights if node.parts is not None else None
        parts += node.parts or [node]
        flat += [weight] if inner is None else [weight * share / sum(inner) for share in inner]
    names = [str(number) for number in range(len(parts))]
    shares = reference.shares(dict(zip(names, flat, strict=True)), names, block)
    if not all(shares):
        raise ValueError("a component has no share")
    counts = [len(part.records) for part in parts]
    order = reference.Mixed(counts, [(0, shares)], False, 0, 1, on_end, [1] * len(parts))
    steps = reference.Steps((), ((0, 1),))
    records = [
        _mixed_record([part.records for part in parts], order, p, steps) for p in range(order.total_of(steps) or 0)
    ]
    if not records:
        raise ValueError("the mixture stops at once")
    shards = None
    if all(part.shards is not None for part in parts):
        runs = max(1, sum(count > 0 for part in parts for count in part.shards or ()) // len(parts))
        ends = [len(records) * i // runs for i in range(runs + 1)]
        shards = [b - a for a, b in itertools.pairwise(ends)]
    given = {str(number): weight for number, weight in enumerate(weights)}
    return Node(
        lambda: Mixture({str(n): node.make() for n, node in enumerate(nodes)}, given, block, on_end=on_end),
        records,
        shards,
        max(node.levels for node in nodes) + 1,
        f"Mixture([{', '.join(node.text for node in nodes)}], {list(weights)}, {block}, {on_end!r})",
        components=[part.records for part in parts],
        shares=(shares, on_end),
        weights=flat,
        parts=parts,
    )


def _mixed_record(components: list[list[Rec]], order: reference.Mixed, position: int, steps: reference.Steps) -> Rec:
    record_id, _ = order.at(position, steps)
    return components[record_id >> 48][record_id & (2**48 - 1)]


def packed(node: Node, length: int, method: str, block: int) -> Node:
    """Packs by hand; see docs/decisions/packing.md."""
    rows: list[list[tuple[int, ...]]] = []  # the segments of each sequence
    counts: list[int] = []  # sequences of each block
    for first in range(0, len(node.records), block):
        documents = [record["tokens"] for record in node.records[first : first + block]]
        found = (_split if method == "split" else _fit)(documents, length)
        rows += found
        counts.append(len(found))
    if not rows:
        raise ValueError("no token is left")
    shards = None
    if node.shards is not None:
        begins = Counter[int]()
        for number, count in enumerate(counts):
            begins[shard_of(node)[number * block]] += count
        shards = [begins[number] for number in range(len(node.shards))]
    return Node(
        lambda: Packed(node.make(), length, method=method, block=block),
        [_sequence(segments, length) for segments in rows],
        shards,
        node.levels + 1,
        f"Packed({node.text}, {length}, method={method!r}, block={block})",
        documents=(node, block),
    )


def _sequence(segments: list[tuple[int, ...]], length: int) -> Rec:
    tokens = [token for segment in segments for token in segment]
    ids = [number for number, segment in enumerate(segments, 1) for _ in segment]
    positions = [at for segment in segments for at in range(len(segment))]
    padding = [0] * (length - len(tokens))
    return {
        name: tuple(v + padding) for name, v in (("tokens", tokens), ("segment_ids", ids), ("positions", positions))
    }


def _split(documents: list[tuple[int, ...]], length: int) -> list[list[tuple[int, ...]]]:
    flat = [(number, token) for number, document in enumerate(documents) for token in document]
    rows = [flat[i : i + length] for i in range(0, len(flat), length)]
    return [[tuple(t for _, t in group) for _, group in itertools.groupby(row, lambda pair: pair[0])] for row in rows]


def _fit(documents: list[tuple[int, ...]], length: int) -> list[list[tuple[int, ...]]]:
    whole = [[document[i : i + length]] for document in documents for i in range(0, len(document) - length + 1, length)]
    rests = [(number, document[len(document) // length * length :]) for number, document in enumerate(documents)]
    bins: list[list[tuple[int, tuple[int, ...]]]] = []
    changed: list[int] = []  # when each bin got its last document
    for time, (number, rest) in enumerate(sorted((r for r in rests if r[1]), key=lambda pair: -len(pair[1]))):
        room = [length - sum(len(document) for _, document in b) for b in bins]
        fitting = [i for i in range(len(bins)) if room[i] >= len(rest)]
        if not fitting:
            bins.append([])
            changed.append(0)
        chosen = min(fitting, key=lambda i: (room[i], -changed[i])) if fitting else len(bins) - 1
        bins[chosen].append((number, rest))
        changed[chosen] = time
    ordered = sorted(sorted(b) for b in bins)
    return whole + [[document for _, document in b] for b in ordered]


def padded(node: Node, length: int) -> Node:
    def pad(records: list[Rec]) -> list[Rec]:
        return [_padded(record, length) for record in records]

    return dataclasses.replace(
        node,
        make=lambda: Padded(node.make(), length),
        records=pad(node.records),
        levels=node.levels + 1,
        text=f"Padded({node.text}, {length})",
        components=None if node.components is None else [pad(records) for records in node.components],
        parts=None,
    )


def _padded(record: Rec, length: int) -> Rec:
    tokens = record["tokens"]
    rest = length - len(tokens)
    return {**record, "tokens": (*tokens, *[0] * rest), "mask": (*[True] * len(tokens), *[False] * rest)}


def buckets(node: Node, boundaries: tuple[int, ...]) -> Node:
    return Node(
        lambda: Buckets(node.make(), boundaries),
        node.records,
        node.shards,
        node.levels + 1,
        f"Buckets({node.text}, {boundaries})",
        grouped=(node.records, boundaries),
    )


def grouped_again(node: Node, view: Callable[[Node], Node], text: str, make: Callable[[Any], Any]) -> Node:
    """A view of buckets: buckets of the view."""
    assert node.grouped is not None
    seen = view(dataclasses.replace(node, grouped=None, documents=None, components=None, parts=None))
    return dataclasses.replace(
        seen, make=lambda: make(node.make()), text=text, grouped=(seen.records, node.grouped[1]), levels=node.levels + 1
    )


def zipped(node: Node) -> Node:
    last_first = subset(node, slice(None, None, -1))
    return Node(
        lambda: Zip({"a": node.make(), "b": last_first.make()}),
        [{"a": a, "b": b} for a, b in zip(node.records, last_first.records, strict=True)],
        node.shards,
        last_first.levels + 1,
        f"Zip(a={node.text}, b={last_first.text})",
    )


# ---------------------------------------------------------------------- drawing


def draw(number: int) -> tuple[Node, dict[str, Any]]:
    """A random source of at least 3 levels, and the settings of its feed: the order is one level more."""
    rng = random.Random(number)
    while True:
        try:
            node = _top(rng)
        except ValueError:  # a mixture or packing that cannot be made
            continue
        if node.levels >= 3 and 1 <= len(node.records) <= 250:
            break
    shuffles: list[Any] = [False, True]
    if node.documents is None:
        shuffles.append(rng.randint(1, 12))
    if node.shards is not None:
        shuffles += 2 * ["shards", meshfeed.ShardShuffle(rng.randint(1, 3), rng.random() < 0.5)]
    shuffle = rng.choice(shuffles)
    by_shards = isinstance(shuffle, str | meshfeed.ShardShuffle)
    lanes = [None, 1, 2, 4]
    if by_shards and node.shares is not None and node.shares[1] == "stop":
        # More lanes than records of a component are refused.
        lanes = [count for count in (1, 2, 4) if count <= min(map(len, node.components or []))]
    return node, {
        "shuffle": shuffle,
        "seed": rng.randrange(1 << 40),
        "num_epochs": rng.randint(1, 2),
        "global_batch_size": rng.choice([4, 8]),
        "end": "pad",
        "mask_key": "real",
        "num_lanes": rng.choice(lanes) if by_shards else None,
    }


def _top(rng: random.Random) -> Node:
    kind = rng.choice(["packed", "packed", "padded", "rows", "mixture", "buckets", "views of buckets", "zip"])
    if kind == "packed":
        return _packed(rng, rng.randint(1, 3), 8)
    if kind == "padded":
        return padded(_documents(rng, 3), 12)
    if kind == "mixture":
        rows = rng.choice(["packed", "padded"])
        return _mixture(rng, lambda: _rows(rng, 2, rows))
    if kind == "zip":
        return zipped(_rows(rng, 2))
    if kind == "rows":
        return _rows(rng, 3)
    node = buckets(_documents(rng, 2), (3, 7, 12))
    if kind == "buckets":
        return node
    if rng.random() < 0.5:
        step = rng.choice([1, 2])
        text = f"Subset({node.text}, [::{step}])"
        return grouped_again(
            node,
            lambda n: subset(n, slice(None, None, step)),
            text,
            lambda source: Subset(source, slice(None, None, step)),
        )
    other = buckets(_documents(rng, 2), (3, 7, 12))
    mixed = mixture([_ungrouped(node), _ungrouped(other)], [2, 1], 6, "repeat")
    return dataclasses.replace(
        mixed,
        make=lambda: Mixture({"0": node.make(), "1": other.make()}, {"0": 2, "1": 1}, 6),
        levels=max(node.levels, other.levels) + 1,
        text=f"Mixture([{node.text}, {other.text}], [2, 1], 6)",
        grouped=(mixed.records, (3, 7, 12)),
        components=None,
        parts=None,
    )


def _ungrouped(node: Node) -> Node:
    return dataclasses.replace(node, grouped=None)


def _packed(rng: random.Random, depth: int, length: int) -> Node:
    return packed(_documents(rng, depth), length, rng.choice(["split", "fit"]), rng.choice([5, 9, 64]))


def _documents(rng: random.Random, depth: int) -> Node:
    if depth == 0 or rng.random() < 0.1:
        lengths = [rng.choice([0, 1, 2, 3, 5, 8, 12]) for _ in range(rng.randint(4, 24))] + [4]
        files: list[int] | None = []
        left = len(lengths)
        while left:
            files.append(rng.randint(0, min(left, 6)))
            left -= files[-1]
        return leaf(rng.randrange(1000), lengths, files if rng.random() < 0.85 else None, rng.random() < 0.5)
    return _over(rng, lambda: _documents(rng, depth - 1))


def _rows(rng: random.Random, depth: int, kind: str | None = None) -> Node:
    kind = kind or rng.choice(["packed", "padded"])
    if depth == 0 or rng.random() < 0.2:
        return _packed(rng, 1, 8) if kind == "packed" else padded(_documents(rng, 1), 12)
    return _over(rng, lambda: _rows(rng, depth - 1, kind))


def _over(rng: random.Random, below: Callable[[], Node]) -> Node:
    kind = rng.choice(["slice", "ids", "sample", "concat", "map", "mixture"])
    if kind == "concat":
        return concat([below() for _ in range(rng.randint(1, 3))])
    if kind == "mixture":
        return _mixture(rng, below)
    node = below()
    number = len(node.records)
    if kind == "slice":
        start, step = rng.randrange(number), rng.choice([1, 1, 2, -1])
        return subset(node, slice(start, None, step))
    if kind == "ids":
        ids = [rng.randrange(number) for _ in range(rng.randint(1, number))]
        return subset(node, sorted(ids) if rng.random() < 0.5 else ids)
    return sample(node, rng.randint(1, 2)) if kind == "sample" else mapped(node)


def _mixture(rng: random.Random, below: Callable[[], Node]) -> Node:
    nodes = [below() for _ in range(rng.randint(1, 3))]
    weights = [rng.choice([1, 2, 0.5]) for _ in nodes]
    return mixture(nodes, weights, rng.choice([8, 12]), rng.choice(["repeat", "stop"]))


# ---------------------------------------------------------------------- comparing


def play(number: int, hosts: Sequence[int] = (1,)) -> tuple[Node, dict[str, Any]]:
    """Compares combination ``number`` with its definition, read by so many hosts, and resumed.

    Raises:
      AssertionError: it differs.
    """
    node, settings = draw(number)
    what = f"combination {number}: {node.text} with {settings}"
    try:
        whole = _read(node, settings, 1)
        for count in hosts:
            if count > 1:
                assert _read(node, settings, count) == whole, f"{count} hosts"
        if len(whole) > 1:
            step = random.Random(number).randrange(1, len(whole))
            assert _read(node, settings, 1, step) == whole[step:], f"resumed at step {step}"
        _check(node, settings, whole)
    except Exception as error:
        error.add_note(what)
        raise
    return node, settings


def _read(node: Node, settings: dict[str, Any], hosts: int, step: int = 0) -> list[list[tuple[bool, Any]]]:
    """The rows of every batch from a step on: whether each is real, and its record."""
    streams = [RandomAccessStream(node.make(), settings_of(**settings)) for _ in range(hosts)]
    readers = []
    for host, stream in enumerate(streams):
        cursor = stream.start()
        if step:
            text = json.dumps(stream.state(stream.replay_from(cursor, step, None)).to_json())
            cursor = RandomAccessStream(node.make(), settings_of(**settings)).restore(parse_state(json.loads(text)))
        readers.append(stream.open_reader(cursor, rows_of_host(list(range(hosts)), host), hosts_agree=hosts > 1))
    batches = []
    for _ in range(step, streams[0].num_steps(streams[0].start()) or 0):
        batches.append([row for reader in readers for row in _rows_of(reader.next().tree)])
    return batches


def _rows_of(tree: dict[str, Any]) -> list[tuple[bool, Any]]:
    tree = dict(tree)
    real = tree.pop("real")
    return [(bool(real[row]), _row(tree, row)) for row in range(len(real))]


def _row(tree: dict[str, Any], row: int) -> Any:
    return {
        name: _row(leaf, row) if isinstance(leaf, dict) else tuple(leaf[row].tolist()) for name, leaf in tree.items()
    }


def _check(node: Node, settings: dict[str, Any], batches: list[list[tuple[bool, Any]]]) -> None:
    rows = [record for batch in batches for real, record in batch if real]
    shuffle, epochs = settings["shuffle"], settings["num_epochs"]
    by_shards = isinstance(shuffle, str | meshfeed.ShardShuffle)
    if node.grouped is not None:
        _check_grouped(node, batches, epochs)
    elif node.components is not None and node.shares is not None:
        _check_mixed(node, settings, rows, by_shards)
    elif node.documents is not None and shuffle is not False:
        _check_packed(node, settings, rows, by_shards)
    elif by_shards:
        assert len(rows) == epochs * len(node.records)
        for epoch in range(epochs):
            part = rows[epoch * len(node.records) : (epoch + 1) * len(node.records)]
            if settings["num_lanes"] in (1,) or epochs == 1:  # lanes reach an epoch's end at different steps
                assert _counted(part) == _counted(node.records)
        assert _counted(rows) == _counted(node.records * epochs)
        if shuffle in ("shards", meshfeed.ShardShuffle()) and settings["num_lanes"] is not None:
            order = reference.Shards(
                len(node.records), True, settings["seed"], epochs, node.shards or (), settings["num_lanes"]
            )
            steps = reference.Steps((), ((0, settings["global_batch_size"]),))
            assert rows == [node.records[order.at(position, steps)[0]] for position in range(len(rows))]
    else:
        order = reference.Plain(len(node.records), shuffle, settings["seed"], epochs)
        steps = reference.Steps((), ((0, settings["global_batch_size"]),))
        assert rows == [node.records[order.at(position, steps)[0]] for position in range(order.total or 0)]


def _counted(records: Sequence[Rec]) -> Counter[str]:
    return Counter(json.dumps(record, sort_keys=True) for record in records)


def _check_mixed(node: Node, settings: dict[str, Any], rows: list[Rec], by_shards: bool) -> None:
    assert node.components is not None
    assert node.shares is not None
    shares, on_end = node.shares
    epochs = settings["num_epochs"]
    counts = [len(records) for records in node.components]
    if by_shards:
        known = _counted([record for records in node.components for record in records])
        found = _counted(rows)
        assert found.keys() <= known.keys()
        if on_end == "repeat":
            assert all(found[record] >= epochs for record in known)
        return
    order = reference.Mixed(
        counts, [(0, shares)], settings["shuffle"], settings["seed"], epochs, on_end, [1] * len(counts)
    )
    steps = reference.Steps((), ((0, settings["global_batch_size"]),))
    assert len(rows) == order.total_of(steps)
    assert rows == [_mixed_record(node.components, order, position, steps) for position in range(len(rows))]


def _check_packed(node: Node, settings: dict[str, Any], rows: list[Rec], by_shards: bool) -> None:
    assert node.documents is not None
    documents, block = node.documents
    tokens = [record["tokens"] for record in documents.records]
    if by_shards:
        shuffle = settings["shuffle"]
        size = 2 if isinstance(shuffle, str) else shuffle.window_shards
        files = [count for count in documents.shards or () if count]
        sizes = [sum(files[i : i + size]) for i in range(0, len(files), size)]
    else:
        sizes = [len(tokens[i : i + block]) for i in range(0, len(tokens), block)]
    ends = list(itertools.accumulate(sizes, initial=0))
    groups = [Counter(t for document in tokens[a:b] for t in document) for a, b in itertools.pairwise(ends)]
    epochs = settings["num_epochs"]
    used = [[t for t, s in zip(row["tokens"], row["segment_ids"], strict=True) if s] for row in rows]
    assert Counter(t for row in used for t in row) == Counter(t for d in tokens for t in d for _ in range(epochs))
    if not by_shards:
        per_epoch = len(rows) // epochs
        for epoch in range(epochs):
            part = used[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert Counter(t for row in part for t in row) == Counter(t for d in tokens for t in d)
    assert all(any(Counter(row) <= group for group in groups) for row in used), "documents of different blocks"


def _check_grouped(node: Node, batches: list[list[tuple[bool, Any]]], epochs: int) -> None:
    assert node.grouped is not None
    records, boundaries = node.grouped
    found: list[Rec] = []
    for batch in batches:
        rows = [record for real, record in batch if real]
        lengths = [sum(record["mask"]) for record in rows]
        wanted = min(boundary for boundary in boundaries if boundary >= max(lengths))
        assert {len(record["tokens"]) for record in rows} == {wanted}
        found += [{"tokens": record["tokens"][:n]} for record, n in zip(rows, lengths, strict=True)]
    assert _counted(found) == _counted(records * epochs)
