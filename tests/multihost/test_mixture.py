"""Mixtures and columns on real processes: the same rows on any number of hosts, and no host reads more than its part."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mixture_jobs
from host_pools import host_pools

import meshfeed

TOPOLOGIES = [(2, 4), (3, 2)]


@pytest.fixture(scope="module")
def pools() -> Any:
    with host_pools({topology: topology for topology in TOPOLOGIES}, timeout_seconds=240) as pools:
        yield pools


def rows(kind: str, steps: int) -> list[Any]:
    """Batches of one process, through all stages of the mixture."""
    with mixture_jobs.make_feed(kind, prefetch=0) as feed:
        batches = [next(feed) for _ in range(steps)]
    return [np.stack([np.asarray(b["component"]), np.asarray(b["value"])], 1).tolist() for b in batches]


@pytest.mark.parametrize("kind", ["random", "lanes"])
def test_a_mixture_with_stages_travels_between_topologies(pools: Any, kind: str) -> None:
    expected = rows(kind, 16)
    assert {tuple(sorted({row[0] for row in batch})) for batch in expected} >= {(0, 1, 2), (1, 2), (0, 2)}
    state, done = None, 0
    for topology, steps in (((2, 4), 3), ((3, 2), 6), ((2, 4), 1), ((3, 2), 3)):
        results = pools[topology].run(mixture_jobs.run_some, kind, state, expected[done : done + steps])
        done += steps
        state = json.dumps(meshfeed.merge_states([json.loads(result.value) for result in results]))
    mixture_jobs.run_some(kind, state, expected[done:])


@pytest.mark.parametrize("kind", ["random", "lanes"])
def test_weights_that_are_set_in_the_run_are_those_of_stages(pools: Any, kind: str) -> None:
    expected = rows(kind, 16)
    for topology, other, late in (((2, 4), (3, 2), 1), ((3, 2), (2, 4), 0)):
        results = pools[topology].run(mixture_jobs.set_weights_in_run, kind, expected[:9], late)
        state = json.dumps(meshfeed.merge_states([json.loads(result.value) for result in results]))
        results = pools[other].run(mixture_jobs.resume_with_first_weights, kind, state, expected[9:])
        assert {result.value for result in results} == {16}


@pytest.mark.parametrize(
    ("how", "kinds", "texts"),
    [
        ("weights", ["AgreementError"] * 2, ["hosts differ in mixture.stages"] * 2),
        ("steps", ["AgreementError"] * 2, ["hosts differ in mixture.stages"] * 2),
        ("one", ["PeerError", "PeerError"], ["host 1 set the weights of its feed at step 3", "host 0 "]),
        ("wrong", ["PeerError", "SettingsError"], ["host 1 failed before its first batch: SettingsError", "'wiki'"]),
    ],
)
def test_hosts_that_set_different_weights_name_each_other(
    pools: Any, how: str, kinds: list[str], texts: list[str]
) -> None:
    found = [result.value for result in pools[2, 4].run(mixture_jobs.set_weights_unlike, how)]
    assert [one["type"] for one in found] == kinds, found
    for one, text in zip(found, texts, strict=True):
        assert text in one["text"]
        assert one["seconds"] < 25, "before its timeout"


@pytest.mark.parametrize("kind", ["random", "lanes"])
def test_a_start_loses_nothing_in_any_order_of_calls(pools: Any, kind: str) -> None:
    for result in pools[2, 4].run(mixture_jobs.start_in_every_way, kind, rows(kind, 3)):
        assert result.value == [3, 3, 3, 3, 3, 0]


@pytest.mark.parametrize(
    ("how", "raised"),
    [
        ("close", "PeerError: host 1 closed its feed"),
        ("reset", "PeerError: host 1 reset its feed"),
        ("differ", "Agree"),
    ],
)
def test_a_host_that_leaves_a_start_is_named_by_the_next_next(pools: Any, how: str, raised: str) -> None:
    found = [result.value for result in pools[2, 4].run(mixture_jobs.start_unlike, how)]
    assert found[0].startswith(raised), found
    assert how != "differ" or found[1] == found[0]


def test_with_the_sequence_sharded_no_host_reads_whole_examples(pools: Any, tmp_path: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    data = np.random.default_rng(0).integers(1, 2**31, (96, 1536), np.int32)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "x")}}
    layout = ts.ChunkLayout(chunk_shape=(1, 64))
    ts.open(spec, create=True, dtype=ts.int32, shape=data.shape, chunk_layout=layout).result().write(data).result()
    few_rows = 10 * 1536 * 4  # whole ones, for the records' structure and the source's identity
    for hosts, devices in TOPOLOGIES:
        results = pools[hosts, devices].run(mixture_jobs.bytes_of_columns, str(tmp_path / "x"), (None, "seq"))
        for result in results:
            assert data.nbytes / hosts <= result.value <= data.nbytes / hosts + few_rows
