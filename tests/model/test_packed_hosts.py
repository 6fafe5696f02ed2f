"""Packed rows with images on simulated hosts: 20 times saved and resumed on another number of hosts."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from simulated_hosts import JOIN_SECONDS, Job, _current, simulation

sys.path.insert(0, str(Path(__file__).parent.parent / "sources"))

from packed_rows import ALL, Documents, check_rows, some_documents

import meshfeed
from meshfeed._src.plan.topology import fake_devices
from meshfeed.sources import Packed

HOSTS = (1, 2, 4)
BATCH = 4


def run_hosts(number: int, source: Packed, state: Any, steps: int) -> tuple[list[dict[str, np.ndarray]], Any]:
    """The next global batches of a job of several hosts, joined from the blocks of all, and the state after them."""
    here, job = _current[-1], Job(number)
    found: list[dict[int, dict[str, Any]]] = [{} for _ in range(number)]
    states: list[Any] = [None] * number
    errors: list[BaseException] = []

    def run(host: int) -> None:
        here.job, here.host = job, host
        try:
            devices = np.array(fake_devices(number, 4 // number, this_process=host))
            mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
            settings: dict[str, Any] = {"end": "pad", "mask_key": "real", "shuffle": True, "seed": 3, "num_epochs": 2}
            settings |= {"global_batch_size": BATCH, "name": "packed", "timeout_seconds": 20}
            with meshfeed.Feed(source, NamedSharding(mesh, PartitionSpec("data")), **settings) as feed:
                if state is not None:
                    feed.set_state(state)
                for step, batch in zip(range(steps), feed, strict=False):
                    found[host][step] = dict(batch)
                states[host] = feed.get_state()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(host,), daemon=True) for host in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    assert all(other == states[0] for other in states)
    return [_joined([batches[step] for batches in found]) for step in sorted(found[0])], states[0]


def _joined(parts: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    whole: dict[str, np.ndarray] = {}
    for name in parts[0]:
        whole[name] = np.empty(parts[0][name].shape, parts[0][name].dtype)
        rows = []
        for part in parts:
            indices = part[name].sharding.devices_indices_map(part[name].shape)
            for device, block in part[name].blocks:
                whole[name][indices[device]] = block
                rows += range(*indices[device][0].indices(BATCH))
        assert sorted(rows) == list(range(BATCH))
    return whole


@pytest.mark.parametrize("method", ["split", "fit"])
def test_every_token_and_image_once_resumed_20_times_on_1_2_and_4_hosts(method: str) -> None:
    documents: Documents = some_documents(170)

    def source() -> Packed:
        return Packed(documents, 32, block=60, method=method, **ALL)

    num_steps = -(-2 * len(source()) // BATCH)
    assert num_steps >= 40
    places = np.linspace(0, num_steps, 22).astype(int)
    state: Any = None
    batches: list[dict[str, np.ndarray]] = []
    with simulation():
        for number, (first, end) in enumerate(itertools.pairwise(places)):
            more, state = run_hosts(HOSTS[number % 3], source(), state, int(end - first))
            assert len(more) == end - first
            assert state["position"] == min(int(end) * BATCH, 2 * len(source()))
            batches += more
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    rows = {name: leaf[rows["real"]] for name, leaf in rows.items() if name != "real"}
    check_rows(rows, documents, 32, epochs=2, **ALL)
    ordered = source().with_order(shuffle=True, seed=3)
    for name, leaf in ordered.read_batch(np.arange(2 * len(ordered))).items():
        np.testing.assert_array_equal(rows[name], leaf)  # in the order of one host
