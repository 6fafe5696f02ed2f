"""What a host outside the mesh learns if the hosts that read a stream cannot begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import simulated_hosts
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed._src.agreement import handshake
from meshfeed._src.base import coordination
from meshfeed._src.plan.topology import fake_devices

HOSTS, PARTICIPANTS = 3, 2


class Lanes:
    """A stream that cannot be opened while ``broken``."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def open(self, lane_index: int, num_lanes: int) -> Iterator[dict[str, np.ndarray]]:
        if self.broken:
            raise PermissionError("not allowed")
        return iter([{"x": np.int32(number)} for number in range(8)])

    def fingerprint(self) -> str:
        return "lanes"


def feed_of(host: int, source: Lanes, **changes: Any) -> meshfeed.Feed:
    devices = fake_devices(HOSTS, 1, this_process=host)[:PARTICIPANTS]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.Feed(source, mesh, global_batch_size=4, num_lanes=2, **{"timeout_seconds": 15, **changes})


def error_of(feed: meshfeed.Feed) -> Exception:
    with pytest.raises(Exception) as caught:
        next(feed)
    return caught.value


def on_all_hosts(job: Callable[[int], Any]) -> list[Any]:
    found: dict[int, Any] = {}
    with simulated_hosts.simulation():
        simulated_hosts.run(HOSTS, lambda host: found.update({host: job(host)}))
    return [found[host] for host in range(HOSTS)]


@pytest.mark.slow
@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1}])
def test_it_names_the_host_that_could_not_open_its_data_and_goes_on_with_the_others(
    failing: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_GRACE_SECONDS", 0.4)
    together = threading.Barrier(HOSTS)

    def job(host: int) -> tuple[Exception, list[int]]:
        source = Lanes(host in failing)
        with feed_of(host, source) as feed:
            error = error_of(feed)
            together.wait(30)
            source.broken = False
            if host in failing:  # the others wait for it, though it has failed before
                time.sleep(1.0)
            feed.reset()
            steps = [feed.step for _ in feed]
            together.wait(30)
            feed.reset()
            return error, [*steps, *(feed.step for _ in feed)]

    found = on_all_hosts(job)
    assert [steps for _, steps in found] == [[1, 2, 3, 4] * 2] * HOSTS
    outside = found[-1][0]
    assert isinstance(outside, meshfeed.PeerError)
    assert outside.host == min(failing)
    assert "failed before its first batch: PermissionError: not allowed" in str(outside)


def test_it_raises_the_error_about_different_settings() -> None:
    def job(host: int) -> str:
        with feed_of(host, Lanes(False), end="pad", mask_key="m" if host else "n") as feed:
            return repr(error_of(feed))

    first, second, outside = on_all_hosts(job)
    assert "AgreementError" in first
    assert first == second == outside


@pytest.mark.slow
def test_it_names_the_host_that_did_not_come() -> None:
    done = threading.Event()

    def job(host: int) -> Exception | None:
        if host == 1:
            done.wait(30)
            return None
        try:
            with feed_of(host, Lanes(False), timeout_seconds=2 if host == 0 else 20) as feed:
                return error_of(feed)
        finally:
            if host == 2:
                done.set()

    first, _, outside = on_all_hosts(job)
    assert isinstance(outside, meshfeed.StalledError)
    assert (str(outside), outside.hosts) == (str(first), (1,))


def test_it_names_the_host_that_closed_its_feed_first() -> None:
    def job(host: int) -> Exception | None:
        feed = feed_of(host, Lanes(False))
        if host == 2:
            return error_of(feed)
        feed.close()
        coordination.finish_calls()
        return None

    outside = on_all_hosts(job)[-1]
    assert isinstance(outside, meshfeed.PeerError)
    assert str(outside).startswith("host 0 closed its feed")
