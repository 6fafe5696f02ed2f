"""Texts packed with their images: each token and each image once per epoch, with its own text, on any number of hosts."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simulated_hosts
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed.sources import Folder, Join, Map, Packed
from meshfeed.testing import fake_devices

pytestmark = pytest.mark.slow

DOCUMENTS, BATCH, EPOCHS = 240, 4, 2
TOPOLOGIES = {1: 4, 2: 2, 4: 1}
"""Number of hosts → devices of each."""
PLACES = 20
Row = dict[str, np.ndarray]

TOKENS = [[number * 100 + place for place in range(1 + number * 7 % 19)] for number in range(DOCUMENTS)]
IMAGES = [[f"{number}-{place}" for place in range(number % 4)] for number in range(DOCUMENTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("images")
    for name in (name for names in IMAGES for name in names):
        np.array(name.split("-"), np.int32).tofile(path / name)
    return path


def to_arrays(record: dict[str, Any]) -> dict[str, np.ndarray]:
    images = [np.frombuffer(image["bytes"], np.int32) for image in record["images"]]
    return {"tokens": np.array(record["tokens"], np.int32), "images": np.array(images, np.int32).reshape(-1, 2)}


def make_feed(folder: pathlib.Path, method: str, devices: Any) -> Any:
    texts = [{"tokens": tokens, "images": images} for tokens, images in zip(TOKENS, IMAGES, strict=True)]
    source = Map(Join(texts, Folder(folder), key="images"), to_arrays)
    packed = Packed(source, 48, method=method, block=70, pad_id=-1, max_segments=9, side={"images": 12})
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    how: dict[str, Any] = {"shuffle": True, "seed": 4, "end": "pad", "mask_key": "real", "timeout_seconds": 100}
    return meshfeed.Feed(packed, mesh, global_batch_size=BATCH, num_epochs=EPOCHS, **how)


def on_hosts(hosts: int, make: Callable[[Any], Any], play: Callable[[Any], Any]) -> list[Any]:
    """What ``play(feed)`` returns on each host."""

    def on_host(host: int) -> Any:
        with make(fake_devices(hosts, TOPOLOGIES[hosts], this_process=host)) as feed:
            return play(feed)

    with simulated_hosts.simulation():
        return simulated_hosts.run(hosts, on_host, 500.0)


def rows_here(batch: Any) -> dict[int, Row]:
    """Row of the global batch → its leaves, of the rows that this host holds."""
    rows: dict[int, Row] = {}
    for name, leaf in batch.items():
        for shard in leaf.addressable_shards:
            first = shard.index[0].start or 0
            for number, value in enumerate(np.asarray(shard.data)):
                rows.setdefault(first + number, {})[name] = value
    return rows


def together(parts: list[list[dict[int, Row]]]) -> list[Row]:
    """The rows of all hosts' steps, in order, without padding."""
    found = []
    for step in zip(*parts, strict=True):
        rows = {number: row for part in step for number, row in part.items()}
        assert sorted(rows) == list(range(BATCH))
        found += [row for _, row in sorted(rows.items()) if row["real"]]
    return found


def whole(feed: Any) -> tuple[list[dict[int, Row]], list[str]]:
    """All steps, and the state before each."""
    states, steps = [json.dumps(feed.get_state())], []
    for batch in feed:
        steps.append(rows_here(batch))
        states.append(json.dumps(feed.get_state()))
    return steps, states[:-1]


def rest(states: list[str], feed: Any) -> list[list[dict[int, Row]]]:
    """All further steps from each state."""
    found = []
    for state in states:
        feed.set_state(json.loads(state))
        found.append([rows_here(batch) for batch in feed])
    return found


def check(rows: list[Row]) -> None:
    """Each token and each image is there once per epoch, in its order, and images are in a segment of their text."""
    tokens: list[int] = []
    images: list[list[int]] = []
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            own = row["tokens"][row["segment_ids"] == segment]
            of_segment = row["images"][row["images_mask"] & (row["images_segment"] == segment)]
            assert {int(image[0]) for image in of_segment} <= {int(own[0]) // 100}, "with another text"
            assert np.array_equal(own, own[0] + np.arange(len(own))), "tokens of one text, in order"
            assert of_segment[:, 1].tolist() == list(range(len(of_segment))), "all of its images, in order"
            tokens += own.tolist()
            images += of_segment.tolist()
    assert sorted(tokens) == sorted(list(itertools.chain(*TOKENS)) * EPOCHS)
    assert sorted(images) == sorted(
        [[int(part) for part in name.split("-")] for name in itertools.chain(*IMAGES)] * EPOCHS
    )


@pytest.mark.parametrize("method", ["fit", "split"])
def test_once_per_epoch_with_its_own_text_resumed_on_any_number_of_hosts(folder: pathlib.Path, method: str) -> None:
    make = functools.partial(make_feed, folder, method)
    found = {hosts: on_hosts(hosts, make, whole) for hosts in TOPOLOGIES}
    rows = {hosts: together([steps for steps, _ in parts]) for hosts, parts in found.items()}
    check(rows[1])
    states = found[1][0][1]
    places = np.unique(np.linspace(0, len(states) - 1, PLACES).astype(int)).tolist()
    assert len(places) == PLACES
    for hosts, parts in found.items():
        for steps, own_states in parts:
            assert len(steps) == len(own_states) == len(states)
        assert all(len(state) < 2048 for _, own_states in parts for state in own_states)
        others = [other for other in TOPOLOGIES if other != hosts]
        saved = [found[others[number % 2]][0][1][place] for number, place in enumerate(places)]  # by other hosts
        resumed = on_hosts(hosts, make, functools.partial(rest, saved))
        for number, place in enumerate(places):
            after = together([of_host[number] for of_host in resumed])
            joined = [*rows[hosts][: place * BATCH], *after]
            assert len(joined) == len(rows[1])
            for row, wanted in zip(joined, rows[1], strict=True):
                for name, leaf in wanted.items():
                    np.testing.assert_array_equal(row[name], leaf)
