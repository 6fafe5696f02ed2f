"""A host without a device in the sharding gets as many batches of a stream as the hosts that read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import follower_jobs
import pytest
from host_pools import host_pools

from meshfeed.testing import HostPool

pytestmark = [pytest.mark.multihost, pytest.mark.slow]
UNEVEN = [57, 40, 90, 41]


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    with host_pools({"hosts": (3, 2)}, timeout_seconds=240) as pools:
        yield pools["hosts"]


def values(results: Any) -> list[Any]:
    return [result.value for result in results]


@pytest.mark.parametrize("hosts", [[0, 1], [1, 2], [0, 2]])
@pytest.mark.parametrize(
    "case",
    [
        {"lengths": UNEVEN, "global_batch_size": 8, "end": "drop"},
        {"lengths": UNEVEN, "global_batch_size": 8, "end": "pad", "prefetch": 0},
        {"lengths": UNEVEN, "global_batch_size": 16, "end": "drop", "load": "once", "num_epochs": 2},
    ],
)
def test_it_follows_to_the_end_through_resets_and_resumes(pool: HostPool, hosts: list[int], case: Any) -> None:
    if case.get("load") == "once" and hosts != [0, 1]:
        return
    found = values(pool.run(follower_jobs.run, hosts, case))
    assert len({one["spec"] for one in found}) == 1
    assert len({one["steps"] for one in found}) == 1
    states = [one["state"] for one in found]
    other = [host for host in range(3) if host != hosts[0]]
    positions = values(pool.run(follower_jobs.resume, other, case, states))
    assert len(set(positions)) == 1


def test_it_may_come_when_the_others_have_ended(pool: HostPool) -> None:
    assert values(pool.run(follower_jobs.late, [0, 1])) == [44, 44, 44]


def test_it_names_the_host_that_failed(pool: HostPool) -> None:
    assert values(pool.run(follower_jobs.failing, [0, 1])) == ["3 RuntimeError ", "3 PeerError 0", "3 PeerError 0"]


def test_it_does_not_wait_for_ever_for_a_feed_that_nobody_built(pool: HostPool) -> None:
    *_, outside = values(pool.run(follower_jobs.absent, [0, 1]))
    assert "step 0: host 0 has not begun this stream" in outside
    assert "timeout_seconds=2" in outside


@pytest.mark.parametrize(
    ("hosts", "kind", "message"),
    [
        ([0, 1], "host batches", "sharding has no device of this host, 2, so the host batches that it makes"),
        ([0], "one host", "the stream is read by host 0 alone"),
    ],
)
def test_what_it_cannot_follow_is_refused(pool: HostPool, hosts: list[int], kind: str, message: str) -> None:
    found = values(pool.run(follower_jobs.refused, hosts, kind))
    assert all(message in one for one in found[len(hosts) :])
    assert all(one.isdigit() for one in found[: len(hosts)])


def test_a_checkpoint_loop_on_all_hosts_ends(pool: HostPool, tmp_path: Path) -> None:
    assert values(pool.run(follower_jobs.checkpointed, [0, 1], str(tmp_path / "run"))) == [[0, 3, 2, 4]] * 3
