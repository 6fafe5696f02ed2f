"""Random combinations of sources and orders of many levels, against their definitions in ``lists.py``.

``play`` compares a whole stream with its definition, read by several hosts and resumed half way.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "streams"))

from lists import (
    Node,
    Settings,
    buckets,
    concat,
    default_num_lanes,
    joined,
    mapped,
    mixture,
    negated,
    packed,
    padded,
    sample,
    split,
    split_by_shards,
    subset,
    zipped,
)
from reference import RandomAccess, Steps
from stream_parts import rows_of_host, settings_of

import meshfeed
from meshfeed._src.state.state import parse_state
from meshfeed._src.streams.random_access import RandomAccessStream


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


def leaf(first: int, lengths: Sequence[int], shards: Sequence[int] | None, known: bool) -> Node:
    source = Documents(first, lengths, shards, known)
    return Node(
        lambda given: Documents(first, lengths, shards, known),
        len(lengths),
        lambda i, draw: source[i],
        lambda i: frozenset({i}),
        None if shards is None else list(shards),
        f"Documents({first}, {list(lengths)}, {shards}, {known})",
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
        if node.levels >= 3 and 1 <= node.count <= 250:
            break
    shuffles: list[Any] = [False, True]
    if not node.packed:
        shuffles.append(rng.randint(1, 12))
    if node.shards is not None:
        shuffles += 2 * [(2, False), (rng.randint(1, 3), rng.random() < 0.5)]
    shuffle = rng.choice(shuffles)
    lanes = [None, 1, 2, 4]
    if node.fewest is not None:
        # More lanes than records of a component are refused.
        lanes = [count for count in (1, 2, 4) if count <= node.fewest]
    return node, {
        "shuffle": shuffle,
        "seed": rng.randrange(1 << 40),
        "num_epochs": rng.randint(1, 2),
        "global_batch_size": rng.choice([4, 8]),
        "end": "pad",
        "mask_key": "real",
        "num_lanes": rng.choice(lanes) if isinstance(shuffle, tuple) else None,
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
        return _over(rng, lambda: buckets(_documents(rng, 1), (3, 7, 12)))
    return mapped(node, negated)


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
    kind = rng.choice(["slice", "ids", "sample", "concat", "map", "mixture", "split", "split by shards", "join"])
    if kind == "concat":
        return concat([below() for _ in range(rng.randint(1, 3))])
    if kind == "mixture":
        return _mixture(rng, below)
    node = below()
    if kind == "slice":
        start, step = rng.randrange(node.count), rng.choice([1, 1, 2, -1])
        return subset(node, slice(start, None, step))
    if kind == "ids":
        ids = [rng.randrange(node.count) for _ in range(rng.randint(1, node.count))]
        return subset(node, sorted(ids) if rng.random() < 0.5 else ids)
    if kind == "join":
        return joined(node)
    if kind == "split by shards" and node.shards is not None:
        return split_by_shards(node, rng.choice([0.5, 0.7]), rng.randrange(9))
    if kind.startswith("split"):
        return split(node, rng.choice([0.5, 0.7]), rng.randrange(9))
    return sample(node, rng.randint(1, 2 * node.count), rng.randrange(9)) if kind == "sample" else mapped(node, negated)


def _mixture(rng: random.Random, below: Callable[[], Node]) -> Node:
    nodes = {str(number): below() for number in range(rng.randint(1, 3))}
    weights = {name: rng.choice([1, 2, 0.5]) for name in nodes}
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
        _check(node, settings, whole)
        for count in hosts:
            if count > 1:
                assert _read(node, settings, count) == whole, f"{count} hosts"
        if len(whole) > 1:
            step = random.Random(number).randrange(1, len(whole))
            assert _read(node, settings, 1, step) == whole[step:], f"resumed at step {step}"
    except Exception as error:
        error.add_note(what)
        raise
    return node, settings


def keywords_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as keywords of a feed."""
    shuffle = settings["shuffle"]
    return {**settings, "shuffle": meshfeed.ShardShuffle(*shuffle) if isinstance(shuffle, tuple) else shuffle}


def _read(node: Node, settings: dict[str, Any], hosts: int, step: int = 0) -> list[list[tuple[bool, Any]]]:
    """The rows of every batch from a step on: whether each is real, and its record."""
    settings = keywords_of(settings)
    streams = [RandomAccessStream(node.make(None), settings_of(**settings)) for _ in range(hosts)]
    readers = []
    for host, stream in enumerate(streams):
        cursor = stream.start()
        if step:
            text = json.dumps(stream.state(stream.replay_from(cursor, step, None)).to_json())
            cursor = RandomAccessStream(node.make(None), settings_of(**settings)).restore(parse_state(json.loads(text)))
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
    return {name: _row(leaf, row) if isinstance(leaf, dict) else leaf[row].tolist() for name, leaf in tree.items()}


def _check(node: Node, settings: dict[str, Any], batches: list[list[tuple[bool, Any]]]) -> None:
    """Asserts that the batches are those of the definition."""
    size, shuffle = settings["global_batch_size"], settings["shuffle"]
    num_lanes = 1
    if isinstance(shuffle, tuple):
        num_lanes = settings["num_lanes"] or default_num_lanes([size], node.shards_for(shuffle))
    ordered = node.ordered(Settings(shuffle, settings["seed"], settings["num_epochs"], size, num_lanes))
    model, steps = RandomAccess(ordered.order, ordered.value, pad=True), Steps((), ((0, size),))
    for step, rows in enumerate(batches):
        batch = model.batch(step, steps)
        assert batch is not None, f"{len(batches)} batches, not {step}"
        arrays = batch.arrays("real")
        assert rows == _rows_of(arrays), f"step {step}"
    assert model.batch(len(batches), steps) is None, f"only {len(batches)} batches"
