"""The feed on real processes: one stream on any topology, and errors instead of waiting."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import feed_jobs
from host_pools import host_pools

from meshfeed._src.order.epochs import EpochOrder

BATCH = 24
SETTINGS: dict[str, Any] = {"global_batch_size": BATCH, "shuffle": True, "seed": 7, "num_epochs": 2}


def expected_ids(shuffle: Any = True) -> list[list[int]]:
    order = EpochOrder(feed_jobs.RECORDS, shuffle=shuffle, seed=7, num_epochs=2)
    ids = order.ids_at(np.arange(2 * feed_jobs.RECORDS))[0]
    steps = len(ids) // BATCH
    return [ids[k * BATCH : (k + 1) * BATCH].tolist() for k in range(steps)]


VARIANTS = [
    {"layout": "mesh", **SETTINGS},
    {"layout": "rows", "prefetch": 0, **SETTINGS},
    {"layout": "model", "prefetch": 8, **SETTINGS},
    {"layout": "model-first", **SETTINGS},
    {"layout": "permuted", "num_threads": 3, **SETTINGS},
    {"layout": "sequence", **SETTINGS},
    {"layout": "rows", "num_threads": "auto", "prefetch": "auto", **SETTINGS},
    {"layout": "rows", "load": "once", **SETTINGS},
    {"layout": "model", "load": "once", **SETTINGS},
    {"layout": "sequence", "load": [0], **SETTINGS},
]
WORKERS = [
    {"layout": "permuted", "num_workers": 1, **SETTINGS},
    {"layout": "sequence", "num_workers": 3, "prefetch": 0, **SETTINGS},
]
TOPOLOGIES = [(1, 8), (2, 4), (4, 2), (3, 2)]


@pytest.fixture(scope="module")
def pools() -> Any:
    with host_pools({topology: topology for topology in TOPOLOGIES}, timeout_seconds=240) as pools:
        yield pools


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_global_batches_are_the_same_bits_on_every_topology(pools: Any, topology: tuple[int, int]) -> None:
    variants = VARIANTS + (WORKERS if topology == (2, 4) else [])
    if topology[0] * topology[1] % 4:
        variants = [v for v in variants if v["layout"] != "permuted"]  # a mesh of 3 × 2 with 24 rows
    for result in pools[topology].run(feed_jobs.run_variants, variants, expected_ids()):
        assert result.value == len(variants) * len(expected_ids())


def test_save_anywhere_and_resume_on_any_topology(pools: Any) -> None:
    state = None
    journey = [
        ((4, 2), "model", 2),
        ((3, 2), "rows", 1),
        ((1, 8), "sequence", 0),
        ((2, 4), "permuted", 3),
        ((4, 2), "rows", 2),
    ]
    for topology, layout, steps in journey:
        results = pools[topology].run(feed_jobs.run_some, SETTINGS, layout, state, steps, expected_ids())
        states = {result.value for result in results}
        assert len(states) == 1, "random access has one state, the same on every host"
        state = states.pop()


@pytest.mark.parametrize("where", ["random", "stream", "batches"])
@pytest.mark.parametrize("topology", [(2, 4), (4, 2)])
def test_a_read_that_fails_on_one_host_stops_all_before_that_step(pools: Any, topology: Any, where: str) -> None:
    results = [result.value for result in pools[topology].run(feed_jobs.failing, 1, 7, where)]
    for host, value in enumerate(results):
        assert value["steps"] == 7, results
        assert value["waited"] < feed_jobs.TIMEOUT_SECONDS / 2
        if host == 1:
            assert value["type"] == ("ZeroDivisionError" if where == "batches" else "RuntimeError")
        else:
            assert value["type"] == "PeerError"
            assert "host 1 failed in the read of step 7" in value["text"]
            assert ("division by zero" if where == "batches" else "disk on fire") in value["text"]
        assert value["again"] == value["type"]


@pytest.mark.parametrize(
    "field", ["seed", "shuffle", "end", "source.records", "source.content", "position", "bad_records", "jax_enable_x64"]
)
def test_hosts_that_differ_are_told_before_the_first_batch(pools: Any, field: str) -> None:
    for result in pools[(2, 4)].run(feed_jobs.differing, field):
        assert result.value.startswith("AgreementError: hosts differ in "), result.value
        assert field in result.value
        assert "host 0" in result.value
        assert "host 1" in result.value


@pytest.mark.parametrize("bad_host", [0, 1])
@pytest.mark.parametrize("when", ["settings", "construct", "layout", "open", "open exits", "state", "state exits"])
def test_a_host_that_fails_before_its_first_batch_is_named_on_the_others(pools: Any, when: str, bad_host: int) -> None:
    results = [result.value for result in pools[(2, 4)].run(feed_jobs.fails_early, when, bad_host)]
    bad, good = results[bad_host], results[1 - bad_host]
    kinds = {
        "settings": "SettingsError",
        "construct": "SourceError",
        "layout": "PlanError",
        "open": "PermissionError",
        "open exits": "SystemExit",
        "state": "StateMismatchError",
        "state exits": "SystemExit",
    }
    assert bad["type"] == kinds[when]
    assert good["type"] == "PeerError", results
    assert good["waited"] < feed_jobs.TIMEOUT_SECONDS / 2
    assert f"host {bad_host} failed before its first batch" in good["text"]
    assert bad["text"][:60] in good["text"]
    if when.startswith(("open", "state")):
        assert (bad["again"], good["again"]) == (1, 1), "the same processes can go on together"


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("how", ["close", "raise", "drop", "reset"])
def test_a_host_that_leaves_early_is_named_on_the_others(pools: Any, how: str, leaver: int) -> None:
    results = [result.value for result in pools[(2, 4)].run(feed_jobs.leaves, how, [leaver], 5)]
    done = {
        "close": "closed its feed",
        "raise": "closed its feed",
        "drop": "dropped its feed",
        "reset": "reset its feed",
    }
    reason = " after ZeroDivisionError: division by zero" if how == "raise" else ""
    value = results[1 - leaver]
    assert value["type"] == "PeerError", results
    assert value["text"].startswith(f"host {leaver} {done[how]} at step 5{reason}. This host requests step ")
    assert "take the same number of steps on all of them" in value["text"]
    assert value["host"] == leaver
    assert value["waited"] < feed_jobs.TIMEOUT_SECONDS / 2
    assert results[leaver]["steps"] == 5


@pytest.mark.parametrize("how", ["close", "drop", "reset"])
def test_hosts_that_leave_at_the_same_step_hear_nothing_of_it(pools: Any, how: str) -> None:
    for result in pools[(2, 4)].run(feed_jobs.leaves, how, [0, 1], 5):
        assert result.value == {
            "steps": 5,
            "type": None,
            "text": "",
            "host": None,
            "waited": 0.0,
            "again": 1,
            "log": [],
        }


def test_a_state_that_all_hosts_refuse_is_no_failure_of_a_host(pools: Any) -> None:
    for result in pools[(2, 4)].run(feed_jobs.refused_everywhere):
        assert result.value == ["refused", 1] * 2


def test_a_mesh_that_leaves_hosts_out(pools: Any) -> None:
    steps = [result.value for result in pools[(4, 2)].run(feed_jobs.on_a_part_of_the_mesh)]
    assert steps == [25, 0, 25, 0]
    steps = [result.value for result in pools[(4, 2)].run(feed_jobs.on_all_with_a_host_left_out)]
    assert steps == [16] * 4


@pytest.mark.parametrize("host", [0, 1])
def test_an_interrupt_in_the_first_next_of_one_host_loses_nothing_on_any(pools: Any, host: int) -> None:
    """Before, between and after the agreement on the settings and the start of what reads."""
    functions = ["_started", "_make_startup", "start", "begin", "pipeline", "result", "peek", "pop"]
    for result in pools[(2, 4)].run(feed_jobs.interrupted_starts, functions, host, expected_ids()):
        assert result.value == [len(expected_ids())] * len(functions)


def test_feeds_of_some_hosts_do_not_shift_the_names_of_others(pools: Any) -> None:
    found = [dict.fromkeys(result.value) for result in pools[(4, 2)].run(feed_jobs.some_hosts_make_more_feeds)]
    # Names count from whatever earlier tests in these processes used; those that hosts share are equal on them.
    some = [{name.rpartition("-of-")[2] for name, _ in names if "-of-" in name} for names in found]
    assert some == [{"host-0", "hosts-0-1"}, {"hosts-0-1", "hosts-1-3"}, {"hosts-1-3"}, {"host-3", "hosts-1-3"}]
    of_all = [[name for name, _ in names if "-of-" not in name and name != "same"] for names in found]
    assert of_all[0] == of_all[1] == of_all[2] == of_all[3]
    assert len(of_all[0]) == 4  # two feeds and two loaders
    assert {steps for names in found for name, steps in names if not name.startswith("maxtext")} == {4}


def test_feeds_of_one_name_over_unlike_hosts_do_not_meet(pools: Any) -> None:
    steps = [result.value for result in pools[(4, 2)].run(feed_jobs.feeds_made_in_another_order)]
    assert steps == [[40], [40, 40], [40, 40], [40]]


@pytest.mark.parametrize("start", [True, False])
def test_feeds_may_be_read_in_any_order_once_they_are_started(start: bool, pools: Any) -> None:
    for result in pools[(2, 4)].run(feed_jobs.feeds_read_in_another_order, start):
        assert result.value == "" if start else "of several feeds, call start() of each first" in result.value


@pytest.mark.parametrize(("num_workers", "prefetch"), [(0, 2), (1, 2), (0, 0)])
def test_a_host_that_hangs_is_shown_in_the_logs_of_the_others_with_records_file_and_stack(
    pools: Any, num_workers: int, prefetch: int
) -> None:
    here, _ = [result.value for result in pools[2, 4].run(feed_jobs.hangs, 1, num_workers, prefetch)]
    entries = [text for text in here["log"] if "waited" in text and "host 1 has not read it yet" in text]
    assert entries, here["log"]
    shown = [text for text in entries if "/data/part-2" in text and "in read_from_the_dead_disk" in text]
    assert shown, entries
    assert re.search(
        r"host 1 is (waiting for workers to read|reading) step \d+ \(records \d+, .*/data/part-2\) for ", shown[0]
    )
    assert any("in read_from_the_dead_disk" in stall and "/data/part-2" in stall for stall in here["stalls"])
