"""A value that no device holds is read by one host: all hosts stop before its step, as after any failed read.

The host would otherwise fail alone, when all have agreed on the step, and the others wait in the collective of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import simulated_hosts
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed.testing import fake_devices

HOSTS, ROWS, STEPS = 3, 12, 5
BAD = 2 * ROWS + 6  # in step 2; in order, its row is host 1's


class Records:
    def __init__(self, dtype: type[np.integer[Any]]) -> None:
        self._dtype = dtype

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        return {"x": self._dtype(2**40 if record_id == BAD else record_id)}

    def fingerprint(self) -> str:
        return "records"


def lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
    records = Records(np.int64)
    for record_id in range(lane_index, ROWS * STEPS, num_lanes):
        yield records[record_id]


def batches_of(host: int) -> list[dict[str, np.ndarray]]:
    rows = ROWS // HOSTS
    values = [np.arange(rows, dtype=np.int64) for _ in range(STEPS)]
    if host == 1:
        values[2] = values[2] + 2**40
    return [{"x": one} for one in values]


def steps_and_error(make_feed: Callable[[int, Mesh], Any]) -> list[tuple[int, BaseException | None]]:
    def on_host(host: int) -> tuple[int, BaseException | None]:
        devices = np.array(fake_devices(HOSTS, 2, this_process=host))
        steps = 0
        with make_feed(host, Mesh(devices, ("data",), axis_types=(AxisType.Auto,))) as feed:
            try:
                for _ in feed:
                    steps += 1
            except meshfeed.MeshfeedError as error:
                return steps, error
        return steps, None

    with simulated_hosts.simulation():
        return simulated_hosts.run(HOSTS, on_host)


KINDS: dict[str, Callable[[int], Any]] = {
    "random access": lambda host: Records(np.int64),
    "unsigned": lambda host: Records(np.uint64),
    "stream": lambda host: meshfeed.sources.Stream(lane),
    "host batches": lambda host: meshfeed.sources.HostBatches(batches_of(host)),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("load", ["sharded", "once"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_hosts_stop_before_the_step(kind: str, load: str, prefetch: int) -> None:
    if kind == "host batches" and load == "once":
        pytest.skip("each host makes its own rows")

    def make_feed(host: int, mesh: Mesh) -> Any:
        settings: dict[str, Any] = {"num_lanes": 6} if kind == "stream" else {}
        return meshfeed.MultiHostDataLoadIterator(
            KINDS[kind](host),
            mesh,
            global_batch_size=ROWS,
            load=load,
            prefetch=prefetch,
            timeout_seconds=20,
            **settings,
        )

    found = steps_and_error(make_feed)
    assert [steps for steps, _ in found] == [2] * HOSTS
    (bad,) = [host for host, (_, error) in enumerate(found) if isinstance(error, meshfeed.SourceError)]
    assert "does not fit in" in str(found[bad][1])
    for host in {*range(HOSTS)} - {bad}:
        error = found[host][1]
        assert isinstance(error, meshfeed.PeerError)
        assert error.host == bad
        assert "does not fit in" in str(error)


def test_with_64_bit_types_it_is_a_value_as_any_other() -> None:
    def make_feed(host: int, mesh: Mesh) -> Any:
        return meshfeed.MultiHostDataLoadIterator(Records(np.int64), mesh, global_batch_size=ROWS, timeout_seconds=20)

    jax.config.update("jax_enable_x64", True)
    try:
        assert steps_and_error(make_feed) == [(STEPS, None)] * HOSTS
    finally:
        jax.config.update("jax_enable_x64", False)
