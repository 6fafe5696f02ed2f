"""What hosts learn of one that fails while another still reads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import simulated_hosts
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed._src.agreement import windows
from meshfeed._src.plan.topology import fake_devices

HOSTS, LATE, FAILING = 3, 1, 2


class Records:
    """Records of which one host cannot read those of the third step, and another reads them late."""

    def __init__(self, host: int, go_on: threading.Event) -> None:
        self._host, self._go_on = host, go_on

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        if 2 * HOSTS <= number < 3 * HOSTS:
            if self._host == FAILING:
                raise ValueError("the disk is gone")
            if self._host == LATE:
                assert self._go_on.wait(30)
        return {"id": np.int32(number)}

    def fingerprint(self) -> str:
        return "records"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_others_do_not_wait_for_one_that_still_reads(monkeypatch: pytest.MonkeyPatch, prefetch: int) -> None:
    monkeypatch.setattr(windows, "_ERROR_GRACE_SECONDS", 0.4)
    go_on, ended = threading.Event(), list[int]()

    def job(host: int) -> tuple[int, Exception]:
        devices = fake_devices(HOSTS, 1, this_process=host)
        mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
        retry = meshfeed.Retry(attempts=1)
        with meshfeed.Feed(
            Records(host, go_on), mesh, global_batch_size=HOSTS, prefetch=prefetch, retry=retry, timeout_seconds=20
        ) as feed:
            with pytest.raises((meshfeed.PeerError, ValueError)) as caught:
                list(feed)
            ended.append(host)
            if set(ended) >= {0, FAILING}:
                go_on.set()
            return feed.step, caught.value

    found: dict[int, Any] = {}
    with simulated_hosts.simulation():
        simulated_hosts.run(HOSTS, lambda host: found.update({host: job(host)}))
    assert {step for step, _ in found.values()} <= {1, 2}
    assert str(found[FAILING][1]) == "the disk is gone"
    for host in (0, LATE):
        error = found[host][1]
        assert isinstance(error, meshfeed.PeerError)
        assert error.host == FAILING
        assert "the disk is gone" in str(error)
