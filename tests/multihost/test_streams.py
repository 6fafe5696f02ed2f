"""Streams on real processes: uneven lanes, elastic resume, ends, bad records, replicas and stalls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stream_jobs
from host_pools import host_pools

import meshfeed
from meshfeed._src.order.epochs import EpochOrder

TOPOLOGIES = [(1, 8), (2, 4), (4, 2)]
UNEVEN = [57, 40, 90, 90, 41, 40, 88, 73]
CASES: list[dict[str, Any]] = [
    {"lengths": UNEVEN, "global_batch_size": 8, "end": "drop"},
    {"lengths": UNEVEN, "global_batch_size": 8, "end": "pad"},
    {"lengths": UNEVEN, "global_batch_size": 16, "end": "pad", "prefetch": 0},
    {"lengths": UNEVEN, "global_batch_size": 16, "end": "drop", "prefetch": 8, "layout": "replicas"},
    {"lengths": [5, 0, 7, 9, 3, 3, 3, 3], "global_batch_size": 16, "end": "pad"},
    {"lengths": [0, 0, 7, 9, 3, 3, 3, 3], "global_batch_size": 8, "end": "pad", "layout": "replicas"},
    {"lengths": [5, 0, 7, 9, 3, 3, 3, 3], "global_batch_size": 16, "end": "drop"},
    {"lengths": [2, 2, 2, 3, 2, 2, 2, 2], "global_batch_size": 16, "end": "pad"},
    {"lengths": [5, 3, 4, 6, 3, 3, 3, 3], "global_batch_size": 16, "end": "pad", "num_epochs": 3},
    {"lengths": [5, 3, 4, 6, 3, 3, 3, 3], "global_batch_size": 16, "end": "drop", "num_epochs": 3, "num_threads": 3},
    {"lengths": UNEVEN, "global_batch_size": 8, "end": "pad", "num_workers": "auto", "num_threads": "auto"},
    {"lengths": [13, 9], "global_batch_size": 8, "end": "pad"},
    {"lengths": [9], "global_batch_size": 8, "end": "pad", "stateful": False},
]


@pytest.fixture(scope="module")
def pools() -> Any:
    with host_pools({topology: topology for topology in TOPOLOGIES}, timeout_seconds=240) as pools:
        yield pools


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_uneven_lanes_end_at_the_same_step_with_exact_rows(pools: Any, topology: tuple[int, int]) -> None:
    results = [result.value for result in pools[topology].run(stream_jobs.run, CASES)]
    assert all(value == results[0] for value in results)
    assert results[0][0] == (40, 320)
    assert results[0][1] == (90, sum(UNEVEN))


@pytest.mark.parametrize("end", ["drop", "pad"])
@pytest.mark.parametrize("stateful", [True, False])
def test_lanes_move_between_hosts(pools: Any, end: str, stateful: bool) -> None:
    case = {"lengths": UNEVEN, "global_batch_size": 16, "end": end, "stateful": stateful}
    states: list[str] | None = None
    journey: list[tuple[tuple[int, int], str, int | None]] = [
        ((4, 2), "replicas", 3), ((1, 8), "rows", 0), ((2, 4), "rows", 12), ((4, 2), "rows", 2), ((2, 4), "replicas", None)
    ]  # fmt: skip
    for topology, layout, steps in journey:
        results = pools[topology].run(stream_jobs.go_on, {**case, "layout": layout}, states, steps)
        states = [result.value for result in results]
    # num_lanes=None takes the number from the state, and a part of the lanes is not enough
    results = pools[(2, 4)].run(stream_jobs.go_on, case, None, 2)
    parts = [result.value for result in results]
    pools[(1, 8)].run(stream_jobs.go_on, {**case, "num_lanes": None}, parts, 3)
    (result,) = pools[(1, 8)].run(stream_jobs.go_on, case, parts[:1], 1, check=False)
    assert isinstance(result.error, meshfeed.StateMismatchError)
    assert "[4, 5, 6, 7]" in str(result.error)


@pytest.mark.parametrize("topology", [(2, 4), (4, 2)])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_hosts_that_bring_their_own_batches_stop_at_the_same_step(pools: Any, topology: Any, prefetch: int) -> None:
    counts = [57, 40, 90, 90][: topology[0]]
    rows = 2 * topology[1]
    run = lambda *args: [r.value for r in pools[topology].run(stream_jobs.host_batches, *args, prefetch)]  # noqa: E731
    for value in run(counts, "drop", {}):
        assert value[:2] == (40, 40 * rows * topology[0])
    for host, value in enumerate(run(counts, "pad", {0: 3})):
        assert value[0] == max(counts)
        assert value[1] == sum(counts) * rows - (rows - 3)
        assert sum(value[2]) == counts[host] * rows - (rows - 3 if host == 0 else 0)
    for value in run([0, *counts[1:]], "drop", {}):
        assert value[:2] == (0, 0)
    for value in run([0, *counts[1:]], "pad", {}):
        assert value[:2] == (max(counts[1:]), sum(counts[1:]) * rows)


@pytest.mark.parametrize("global_batch_size", [16, None])
def test_hosts_without_a_batch_pad_before_and_after_a_resume(pools: Any, global_batch_size: int | None) -> None:
    counts = [3, 1, 0, 5]
    results = pools[(4, 2)].run(stream_jobs.host_batches_resumed, counts, global_batch_size)
    for count, result in zip(counts, results, strict=True):
        assert result.value == (sum(counts) * 4, [4] * count + [0] * (5 - count))


def test_padded_rows_that_several_hosts_hold_count_once(pools: Any) -> None:
    for result in pools[(2, 4)].run(stream_jobs.host_batches_that_others_hold_too):
        assert result.value == (5, 4 * 8 + 5)


def test_bad_records_are_replaced_alike_on_every_topology(pools: Any) -> None:
    bad = [3, 77, 150]
    seen = {}
    for topology in TOPOLOGIES:
        results = [r.value for r in pools[topology].run(stream_jobs.skip_bad, bad, 0.05, "rows", 16)]
        assert all(value["error"] is None for value in results)
        steps = [{k: v for value in results for k, v in value["rows"][s].items()} for s in range(12)]
        seen[topology] = steps
        states = [json.loads(value["state"]) for value in results]
        ledger = meshfeed.merge_states(states)["skipped"]
        delivered = {entry[0] for entries in ledger.values() for entry in entries}
        assert delivered <= set(bad)
        assert sum(value["skipped"] for value in results) == len(delivered) >= 2
        assert not any(v in bad for step in steps for v in step.values())
    assert seen[(1, 8)] == seen[(2, 4)] == seen[(4, 2)]


def test_too_many_bad_records_fail_all_hosts_at_one_step_on_every_topology_and_after_a_resume(pools: Any) -> None:
    late = [20, 50, 70, 90, 100, 105, 110, *range(112, 128, 2)]  # 7 of 112 records up to step 6, 15 of 128 up to step 7
    bad = EpochOrder(200, shuffle=True, seed=0, num_epochs=1).ids_at(np.array(late))[0].tolist()
    for resumed, topology, layout in (
        (0, (1, 8), "rows"),
        (0, (4, 2), "rows"),
        (0, (2, 4), "replicas"),  # both hosts read every row
        (5, (2, 4), "rows"),
        (6, (4, 2), "replicas"),
        (6, (1, 8), "rows"),
    ):
        state = None
        if resumed:  # on other hosts
            before = (4, 2) if topology != (4, 2) else (2, 4)
            results = [r.value for r in pools[before].run(stream_jobs.skip_bad, bad, 0.1, "rows", 16, None, resumed)]
            assert all(value["error"] is None for value in results)
            merged = meshfeed.merge_states([json.loads(value["state"]) for value in results])
            assert merged["num_skipped"] == sum(position < resumed * 16 for position in late)
            state = json.dumps(merged)
        results = [r.value for r in pools[topology].run(stream_jobs.skip_bad, bad, 0.1, layout, 16, state)]
        for value in results:
            assert resumed + len(value["rows"]) == 7, (topology, layout, resumed)
            assert value["error"].startswith(
                "SourceError: 15 of the 128 records up to step 7 are bad, a fraction of 0.12;"
            )
            assert "is damaged). Check the data; raise max_fraction only" in value["error"]


def test_replicas_that_differ_are_named(pools: Any) -> None:
    for result in pools[(2, 4)].run(stream_jobs.replicas, False):
        assert result.value == "8 batches"
    for result in pools[(2, 4)].run(stream_jobs.replicas, True):
        assert "hosts 0 and 1" in result.value
        assert "['x']" in result.value


def test_a_host_that_stalls_is_named_on_the_others(pools: Any) -> None:
    for result in pools[(2, 4)].run(stream_jobs.stalls, 6.0):
        waited, text = result.value.split("|", 1)
        assert float(waited) < 30
        assert "host 1" in text, text
        assert "slow.array_record" in text, text


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_a_stream_that_is_empty_everywhere_is_an_error_on_every_host(pools: Any, end: str) -> None:
    for topology in ((1, 8), (2, 4)):
        for result in pools[topology].run(stream_jobs.empty, end):
            assert result.value.startswith("SourceError: the stream is empty: none of its lanes has a record."), result


def test_a_host_that_resumes_by_dropping_records_is_waited_for_unless_it_hangs(pools: Any) -> None:
    assert [result.value for result in pools[(2, 4)].run(stream_jobs.slow_resume, False)] == ["step 11", "step 11"]
    for result in pools[(2, 4)].run(stream_jobs.slow_resume, True):
        assert "resuming lane 1: dropped 200 of 400 records" in result.value
        assert "host 1" in result.value


WITHOUT_LANES: list[dict[str, Any]] = [
    {"lengths": [9, 10], "sizes": [(0, 8)], "end": "drop", "load": [0]},
    {"lengths": [9, 10], "sizes": [(0, 8)], "end": "pad", "load": [1]},
    {"lengths": [9, 10], "sizes": [(0, 8)], "end": "drop", "load": [1], "num_workers": 1},
    {"lengths": [9, 10], "sizes": [(0, 8)], "end": "drop", "load": [2], "num_epochs": None},
    {"lengths": [30, 31, 33, 30], "sizes": [(0, 8), (2, 16), (5, 8)], "end": "drop", "load": [0, 2, 3]},
    {"lengths": [30, 31, 20, 30], "sizes": [(0, 16), (2, 8), (5, 24)], "end": "pad", "load": [0, 1, 3]},
    {"lengths": [40, 41], "sizes": [(0, 8), (2, 32)], "end": "drop", "load": [1, 2, 3], "num_threads": 2},
    {"lengths": [40, 41], "sizes": [(0, 8), (2, 24), (4, 16)], "end": "drop", "load": "once"},
]


def test_a_host_without_lanes_ends_with_the_others_and_lanes_last_for_every_size(pools: Any) -> None:
    values = [result.value for result in pools[4, 2].run(stream_jobs.hosts_without_lanes, WITHOUT_LANES)]
    assert all(value == values[0] for value in values)
    assert min(values[0]) >= 2


@pytest.mark.parametrize("kind", ["lanes", "mixture", "random access"])
def test_a_host_outside_the_mesh_gets_as_many_batches(pools: Any, kind: str) -> None:
    assert [result.value for result in pools[4, 2].run(stream_jobs.outside_of_the_mesh, kind)] == ["5"] * 4


def test_host_batches_are_refused_on_a_host_outside_the_mesh(pools: Any) -> None:
    *inside, outside = [r.value for r in pools[4, 2].run(stream_jobs.outside_of_the_mesh, "host batches")]
    assert inside == ["5"] * 3
    assert "sharding has no device of this host, 3" in outside
    assert "only on hosts 0, 1, 2" in outside


@pytest.mark.parametrize("global_batch_size", [16, None])
def test_a_host_that_only_pads_knows_the_spec_of_the_others(pools: Any, global_batch_size: int | None) -> None:
    (first, known), *others = [
        result.value for result in pools[4, 2].run(stream_jobs.spec_where_only_others_have_batches, global_batch_size)
    ]
    assert first == known
    for before, after in others:
        assert "with the first next(feed)" in before
        assert after == known
