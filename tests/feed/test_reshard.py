"""``Feed.reshard`` on simulated hosts: the others continue exactly without a lost host, with every kind of source."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from resharding import Job, Numbers, job_of, join, reference, rows_of

import meshfeed
from meshfeed._src.agreement import handover

BATCH = 12


@dataclasses.dataclass
class Kind:
    """A source, and the settings that it needs."""

    make: Callable[[], Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def memory(count: int, offset: int = 0) -> Any:
    return meshfeed.sources.Memory({"id": np.arange(offset, offset + count, dtype=np.int32)})


def mixture_of_streams() -> Any:
    parts = {"a": meshfeed.sources.Stream(Numbers([40] * 12).open, fingerprint="a"), "b": memory(500, 1 << 20)}
    return meshfeed.sources.Mixture(parts, weights=[(0, {"a": 1, "b": 1}), (9, {"a": 1, "b": 3})])


UNEVEN = [31, 7, 25, 40, 0, 19, 33, 28, 16, 22, 37, 30]
PADDED = {"end": "pad", "mask_key": "mask"}
LANES = {"num_lanes": 12}
KINDS = {
    "random access": Kind(lambda: memory(400), {"shuffle": True, "seed": 3}),
    "padded end": Kind(lambda: memory(397), {"shuffle": 50, **PADDED}),
    "batch schedule": Kind(
        lambda: memory(700), {"global_batch_size": meshfeed.BatchSchedule([(0, 12), (6, 24), (14, 12)])}
    ),
    "load once": Kind(lambda: memory(400), {"load": "once"}),
    "mixture": Kind(
        lambda: meshfeed.sources.Mixture({"a": memory(200), "b": memory(300, 1 << 20)}, weights={"a": 1, "b": 2}),
        {"shuffle": True},
    ),
    "lanes": Kind(lambda: Numbers([34] * 12), LANES),
    "lanes without a state": Kind(lambda: Numbers([34] * 12, resumable=False), LANES),
    "uneven lanes": Kind(lambda: Numbers(UNEVEN), {**LANES, **PADDED}),
    "lanes in epochs": Kind(lambda: Numbers([5, 4, 5, 5, 6, 5, 5, 5, 7, 5, 5, 5]), {**LANES, **PADDED, "num_epochs": 6}),
    "lanes under a schedule": Kind(
        lambda: Numbers([60] * 12), {**LANES, "global_batch_size": meshfeed.BatchSchedule([(0, 12), (6, 24)])}
    ),
    "mixture of streams": Kind(mixture_of_streams, LANES),
    "lanes in threads": Kind(lambda: Numbers([34] * 12), {**LANES, "num_threads": 3}),
}


def settings_of(kind: Kind) -> dict[str, Any]:
    return {"global_batch_size": BATCH, "timeout_seconds": 20, "name": "train", **kind.settings}


@pytest.fixture(params=["published often", "published once"])
def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are read forward from a recent window, or from the start of the generation."""
    monkeypatch.setattr(handover, "_PAUSE_SECONDS", 0.0 if request.param == "published often" else 1e9)


@pytest.mark.parametrize("name", KINDS)
def test_the_others_continue_exactly_without_a_lost_host(name: str, slots: None) -> None:
    kind = KINDS[name]
    settings = settings_of(kind)
    expected = reference(kind.make, **settings)
    before, hosts, left = 11, [0, 1, 2], [0, 2]

    with job_of(3) as job:

        def host_job(host: int) -> list[Any]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, hosts), **settings)
            delivered = [rows_of(next(feed)) for _ in range(before)]
            if host not in left:
                job.kill(host, feed)
                return delivered
            feed.reshard(job.mesh(host, left))
            assert feed.step == before
            assert feed.config()["participants"] == left
            state = feed.get_state()
            delivered += [rows_of(batch) for batch in feed]
            feed.close()
            return [*delivered, state]

        *found, = job.run(host_job)
    first = join([part[:before] for part in found])
    rest = join([found[host][before:-1] for host in left])
    assert first + rest == expected

    # The states are those of a feed on the new sharding.
    state = meshfeed.merge_states([found[host][-1] for host in left])
    with job_of(1) as job:

        def resume(host: int) -> list[Any]:
            with meshfeed.Feed(kind.make(), job.mesh(0, [0]), **settings) as feed:
                feed.set_state(state)
                return [rows_of(batch) for batch in feed]

        assert job.run(resume)[0] == expected[before:]
