"""``Feed.reshard`` on simulated hosts: the others continue exactly without a lost host, with every kind of source."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent))

from resharding import Job, Numbers, job_of, join, reference, rows_of

import meshfeed
from meshfeed._src.agreement import handover, meeting
from meshfeed._src.feed import iterator
from meshfeed._src.streams import lane

BATCH = 12


@dataclasses.dataclass
class Kind:
    """A source, and the settings that it needs."""

    make: Callable[[], Any]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def memory(count: int, offset: int = 0) -> Any:
    return meshfeed.sources.Memory({"id": np.arange(offset, offset + count, dtype=np.int32)})


def uneven_mixture() -> Any:
    """Lanes that end long before others, which a mixture finds out by what it has read of its components."""
    lanes = [31, 7, 25, 40, 5, 19, 33, 28, 6, 22, 37, 30]
    parts = {"a": meshfeed.sources.Stream(Numbers(lanes).open, fingerprint="a"), "b": memory(24, 1 << 20)}
    return meshfeed.sources.Mixture(parts, {"a": 3, "b": 1}, 8)


def mixture_of_streams(*stages: Any) -> Any:
    parts = {"a": meshfeed.sources.Stream(Numbers([40] * 12).open, fingerprint="a"), "b": memory(500, 1 << 20)}
    return meshfeed.sources.Mixture(parts, weights=[(0, {"a": 1, "b": 1}), *(stages or [(9, {"a": 1, "b": 3})])])


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
    "lanes in epochs": Kind(
        lambda: Numbers([5, 4, 5, 5, 6, 5, 5, 5, 7, 5, 5, 5]), {**LANES, **PADDED, "num_epochs": 6}
    ),
    "lanes under a schedule": Kind(
        lambda: Numbers([60] * 12), {**LANES, "global_batch_size": meshfeed.BatchSchedule([(0, 12), (6, 24)])}
    ),
    "mixture of streams": Kind(mixture_of_streams, LANES),
    "mixture of uneven streams": Kind(uneven_mixture, {**LANES, **PADDED}),
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

        (*found,) = job.run(host_job)
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


def expected_of(name: str) -> tuple[Kind, dict[str, Any], list[dict[int, int]]]:
    kind = KINDS[name]
    settings = settings_of(kind)
    return kind, settings, reference(kind.make, **settings)


BOTH = ["random access", "uneven lanes"]


@pytest.mark.parametrize("name", BOTH)
def test_hosts_that_have_delivered_different_steps_continue_at_the_lowest(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, settings, expected = expected_of(name)
    steps, left = {0: 13, 1: 14, 2: 11, 3: 12}, [0, 2, 3]

    with job_of(4) as job:

        def host_job(host: int) -> list[Any]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(4)), **settings)
            delivered = [rows_of(next(feed)) for _ in range(steps[host])]
            if host not in left:
                job.kill(host, feed)
                return delivered
            feed.reshard(job.mesh(host, left))
            assert feed.step == 11
            assert feed.position == sum(map(len, expected[:11]))
            with feed:
                return [*delivered[:11], *(rows_of(batch) for batch in feed)]

        found = job.run(host_job)
    assert join([part[:11] for part in found]) + join([found[host][11:] for host in left]) == expected
    warned = sorted(record.getMessage() for record in caplog.records if "delivered again" in record.getMessage())
    assert len(warned) == 2
    assert warned[0] == (
        "train: this host had received the batches up to step 11, but host 2 only those before step 11, where all hosts "
        "continue: the batches from step 11 on are delivered again. Continue with the training state that belongs to "
        "feed.step = 11."
    )


@pytest.mark.parametrize("name", ["random access", "uneven lanes", "mixture of streams"])
def test_hosts_leave_and_come_back_while_all_are_well(name: str) -> None:
    """A host outside the sharding gets as many batches, without rows."""
    kind, settings, expected = expected_of(name)
    shardings = [([0, 1, 2], 5), ([1, 2], 4), ([0, 1, 2], 6), ([0, 2], 3), ([0, 1], None)]

    with job_of(3) as job:

        def host_job(host: int) -> list[list[dict[int, int]]]:
            parts: list[list[dict[int, int]]] = []
            feed = None
            for hosts, steps in shardings:
                if feed is None:
                    feed = meshfeed.Feed(kind.make(), job.mesh(host, hosts), **settings)
                else:
                    feed.reshard(job.mesh(host, hosts))
                batches = feed if steps is None else (next(feed) for _ in range(steps))
                parts.append([rows_of(batch) for batch in batches])
                assert host in hosts or not any(parts[-1])
            feed.close()
            return parts

        found = job.run(host_job)
        left = simulated_keys(job)
    assert [step for number in range(len(shardings)) for step in join([part[number] for part in found])] == expected
    assert not left


def simulated_keys(job: Job) -> list[str]:
    import simulated_hosts

    job.job.store = job.store._store
    return simulated_hosts._unexpected(job.job.store.keys())


@pytest.mark.parametrize("name", BOTH)
def test_a_host_that_is_left_out_may_call_after_the_others_have_closed(name: str) -> None:
    kind, settings, expected = expected_of(name)
    closed = threading.Barrier(3)

    with job_of(3) as job:

        def host_job(host: int) -> list[dict[int, int]]:
            with meshfeed.Feed(kind.make(), job.mesh(host, [0, 1, 2]), **settings) as feed:
                delivered = [rows_of(next(feed)) for _ in range(9)]
                if host == 1:
                    closed.wait(20)
                feed.reshard(job.mesh(host, [0, 2]))
                delivered += [rows_of(batch) for batch in feed]
            if host != 1:
                closed.wait(20)
            return delivered

        found = job.run(host_job)
        left = simulated_keys(job)
    assert join([part[:9] for part in found]) + join([part[9:] for part in found]) == expected
    assert not any(found[1][9:])
    assert not left


@pytest.mark.parametrize("name", BOTH)
def test_a_host_that_sat_out_a_meeting_attends_the_next_of_the_same_hosts(name: str) -> None:
    kind, settings, expected = expected_of(name)

    with job_of(3) as job:

        def host_job(host: int) -> list[list[dict[int, int]]]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, [0, 1, 2]), **settings)
            parts = [[rows_of(next(feed)) for _ in range(5)]]
            if host:
                feed.reshard(job.mesh(host, [1, 2]))
            feed.reshard(job.mesh(host, [0, 1, 2]))
            parts.append([rows_of(next(feed)) for _ in range(3)])
            feed.reshard(job.mesh(host, [1, 2]))
            with feed:
                parts.append([rows_of(batch) for batch in feed])
            return parts

        found = job.run(host_job)
    assert [step for number in range(3) for step in join([part[number] for part in found])] == expected


def test_meetings_leave_no_more_keys_the_more_there_were() -> None:
    kind, settings, _ = expected_of("uneven lanes")

    def keys_left(meetings: int) -> int:
        with job_of(3) as job:

            def host_job(host: int) -> None:
                with meshfeed.Feed(kind.make(), job.mesh(host, [0, 1, 2]), **settings) as feed:
                    for number in range(meetings):
                        next(feed)
                        feed.reshard(job.mesh(host, [0, 2] if number % 2 else [0, 1, 2]))

            job.run(host_job)
            assert not simulated_keys(job)
            keys: list[str] = job.job.store.keys()
            return sum("/meet/" in key for key in keys)

    assert keys_left(7) == keys_left(3) == 2


def test_a_host_that_is_left_out_closes_its_feed() -> None:
    kind, settings, expected = expected_of("uneven lanes")

    with job_of(3) as job:

        def host_job(host: int) -> list[dict[int, int]]:
            with meshfeed.Feed(kind.make(), job.mesh(host, [0, 1, 2]), **settings) as feed:
                delivered = [rows_of(next(feed)) for _ in range(9)]
                if host == 0:
                    return delivered
                feed.reshard(job.mesh(host, [1, 2]))
                return [*delivered, *(rows_of(batch) for batch in feed)]

        found = job.run(host_job)
    assert join([part[:9] for part in found]) + join([part[9:] for part in found[1:]]) == expected


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("steps_between", [0, 1, 7])
def test_a_second_host_is_lost_soon_after(name: str, steps_between: int, slots: None) -> None:
    kind, settings, expected = expected_of(name)
    end = 9 + steps_between

    with job_of(4) as job:

        def host_job(host: int) -> list[dict[int, int]]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(4)), **settings)
            delivered = [rows_of(next(feed)) for _ in range(9)]
            if host == 1:
                job.kill(host, feed)
                return delivered
            feed.reshard(job.mesh(host, [0, 2, 3]))
            delivered += [rows_of(next(feed)) for _ in range(steps_between)]
            if host == 3:
                job.kill(host, feed)
                return delivered
            feed.reshard(job.mesh(host, [0, 2]))
            with feed:
                return [*delivered, *(rows_of(batch) for batch in feed)]

        found = job.run(host_job)
    parts = [part[:9] for part in found], [found[h][9:end] for h in (0, 2, 3)], [found[h][end:] for h in (0, 2)]
    assert [step for part in parts for step in join(part)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_it_works_after_an_error_and_from_a_state_of_this_host_alone(name: str) -> None:
    kind, settings, expected = expected_of(name)
    named: list[tuple[int, ...]] = []  # hosts that a StalledError names

    with job_of(3) as job:

        def host_job(host: int) -> list[dict[int, int]]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(3)), **{**settings, "timeout_seconds": 4})
            delivered = [rows_of(next(feed)) for _ in range(9)]
            state = feed.get_state()
            if host == 2:
                job.kill(host, feed)
                return delivered
            error = error_of(lambda: [*feed])
            if isinstance(error, meshfeed.StalledError):
                named.append(error.hosts)
            else:  # the other host has learned of it first, and has already set its state
                assert isinstance(error, meshfeed.PeerError)
                assert error.host == 1 - host
            feed.set_state(state)  # the step that the training state belongs to
            feed.reshard(job.mesh(host, [0, 1]))
            with feed:
                return [*delivered, *(rows_of(batch) for batch in feed)]

        found = job.run(host_job)
    assert named in ([(2,)], [(2,), (2,)])
    assert join([part[:9] for part in found]) + join([part[9:] for part in found[:2]]) == expected


def test_after_it_state_and_reset_work_as_before() -> None:
    kind, settings, expected = expected_of("uneven lanes")

    with job_of(2) as job:

        def host_job(host: int) -> None:
            with meshfeed.Feed(kind.make(), job.mesh(host, [0, 1]), **settings) as feed:
                early = [rows_of(next(feed)) for _ in range(4)]
                feed.reshard(job.mesh(host, [1, 0]))
                state = feed.get_state()
                rest = [rows_of(batch) for batch in feed]
                feed.set_state(state)
                assert [rows_of(batch) for batch in feed] == rest
                feed.reset()
                assert len([rows_of(batch) for batch in feed]) == len(early + rest) == len(expected)

        job.run(host_job)


@pytest.mark.parametrize("load", ["sharded", "once"])
def test_dtypes_stay_those_with_which_the_feed_was_made(load: str) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax.enable_x64(True):
        feed = meshfeed.Feed({"x": np.arange(32) + 2**40}, mesh, global_batch_size=8, load=load)
    with feed:
        next(feed)
        feed.reshard(mesh)
        assert np.array_equal(np.asarray(next(feed)["x"]), np.arange(8, 16) + 2**40)


def test_lost_lanes_are_read_forward_from_a_recent_window_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(lane, "_CHEAP_SECONDS", 1e9)  # or records since the last snapshot are read too, however many
    steps, lanes = 200, 12

    with job_of(2) as job:

        def host_job(host: int) -> list[int]:
            source = Numbers([10_000] * lanes)
            feed = meshfeed.Feed(source, job.mesh(host, [0, 1]), global_batch_size=BATCH, num_lanes=lanes, name="train")
            for _ in range(steps):
                next(feed)
            if host == 1:
                job.kill(host, feed)
                return []
            feed.reshard(job.mesh(host, [0]))
            feed.close()
            assert len(feed.get_state()["lanes"]) == lanes
            return source.given[lanes // 2 :]

        given = job.run(host_job)[0]
    assert min(given) > 0
    # Two windows are read ahead, two batches are ready, and two windows may have begun.
    assert max(given) <= 4 * 8 + 2


def test_what_was_published_before_other_weights_does_not_belong_to_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed that is set to an earlier state may get other weights there."""
    monkeypatch.setattr(handover, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(lane, "_CHEAP_SECONDS", 1e9)  # or lanes may be read from their beginning, which is always right
    kind, settings, _ = expected_of("mixture of streams")
    expected = reference(lambda: mixture_of_streams((3, {"a": 3, "b": 1}), (9, {"a": 1, "b": 3})), **settings)
    saved: dict[int, Any] = {}
    both = threading.Barrier(2, timeout=60)

    with job_of(2) as job:

        def host_job(host: int) -> list[dict[int, int]]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, [0, 1]), **settings)
            for _ in take(feed, 3):
                pass
            saved[host] = feed.get_state()
            for _ in take(feed, 9):
                pass
            both.wait()
            monkeypatch.setattr(handover, "_PAUSE_SECONDS", 1e9)  # so that what was published before stays
            feed.set_state(meshfeed.merge_states(list(saved.values())))
            feed.set_weights({"a": 3, "b": 1})
            for _ in take(feed, 8):
                pass
            both.wait()
            if host == 1:
                job.kill(host, feed)
                return []
            feed.reshard(job.mesh(host, [0]))
            with feed:
                return [rows_of(batch) for batch in feed]

        assert job.run(host_job)[0] == expected[11:]


def test_ends_that_were_read_ahead_before_other_weights_do_not_belong_to_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane, "_CHEAP_SECONDS", 1e9)
    settings = {**settings_of(KINDS["mixture of uneven streams"]), "prefetch": 4}
    lengths = [*[40] * 7, 12, *[40] * 4]

    def make() -> Any:
        parts = {"a": meshfeed.sources.Stream(Numbers(lengths).open, fingerprint="a"), "b": memory(240, 1 << 20)}
        return meshfeed.sources.Mixture(parts, {"a": 1, "b": 0}, 8)

    def play(feed: meshfeed.Feed) -> Iterator[Any]:
        yield from (rows_of(next(feed)) for _ in range(10))
        both.wait()
        monkeypatch.setattr(handover, "_PAUSE_SECONDS", 1e9)  # so that what was published before stays
        feed.set_weights({"b": 1}, from_step=20)  # all lanes read "b" before they end
        yield from (rows_of(next(feed)) for _ in range(12))
        both.wait()

    def whole(host: int) -> list[Any]:
        with meshfeed.Feed(make(), job.mesh(0, [0]), **settings) as feed:
            return [*play(feed), *(rows_of(batch) for batch in feed)]

    both = threading.Barrier(1)
    with job_of(1) as job:
        expected = job.run(whole)[0]
    monkeypatch.setattr(handover, "_PAUSE_SECONDS", 0.0)
    both = threading.Barrier(2, timeout=60)
    with job_of(2) as job:

        def host_job(host: int) -> list[Any]:
            feed = meshfeed.Feed(make(), job.mesh(host, [0, 1]), **settings)
            for _ in play(feed):
                pass
            if host == 1:
                job.kill(host, feed)
                return []
            feed.reshard(job.mesh(host, [0]))
            with feed:
                return [rows_of(batch) for batch in feed]

        assert job.run(host_job)[0] == expected[22:]


def test_bad_records_of_a_lost_host_stay_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(record: Any) -> Any:
        if int(record["id"]) % 17 == 5:
            raise ValueError("not nice")
        return record

    def make() -> Any:
        return meshfeed.sources.Map(memory(300), decode)

    settings: dict[str, Any] = {"global_batch_size": BATCH, "name": "train", "shuffle": True}
    settings["bad_records"] = meshfeed.SkipBad(max_fraction=0.5)

    def states(hosts: int, lost: int | None) -> list[Any]:
        with job_of(hosts) as job:

            def host_job(host: int) -> Any:
                feed = meshfeed.Feed(make(), job.mesh(host, range(hosts)), **settings)
                for _ in range(11):
                    next(feed)
                if host == lost:
                    job.kill(host, feed)
                    return None
                if lost is not None:
                    feed.reshard(job.mesh(host, [host for host in range(hosts) if host != lost]))
                state = feed.get_state()
                feed.close()
                return state

            return [state for state in job.run(host_job) if state is not None]

    whole, left = (meshfeed.merge_states(states(3, lost)) for lost in (None, 1))
    assert whole["num_skipped"] > 3
    assert len(whole["skipped"]) == 3
    assert left == whole


# ------------------------------------------------------------------ refusals


def error_of(function: Callable[[], object]) -> Exception:
    with pytest.raises(meshfeed.MeshfeedError) as caught:
        function()
    return caught.value


@pytest.mark.slow
def test_hosts_that_mean_different_hosts_are_told_and_can_call_again() -> None:
    kind, settings, expected = expected_of("random access")

    with job_of(3) as job:

        def host_job(host: int) -> Any:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(3)), **settings)
            for _ in range(5):
                next(feed)
            if host == 1:
                job.kill(host, feed)
                return None
            error = None if host else error_of(lambda: feed.reshard(job.mesh(host, [0, 1, 2])))
            while feed.config()["participants"] != [0, 2]:
                try:
                    feed.reshard(job.mesh(host, [0, 2]))
                except meshfeed.AgreementError:  # of the other's first call
                    assert host == 2
            with feed:
                return error, [rows_of(batch) for batch in feed]

        found = job.run(host_job)
    assert join([found[0][1], found[2][1]]) == expected[5:]
    assert isinstance(found[0][0], meshfeed.AgreementError)
    assert str(found[0][0]).startswith(
        "hosts called reshard with shardings over different hosts (host 0: hosts 0, 1, 2; host 2: hosts 0, 2). Find out"
    )


@pytest.mark.slow
def test_a_host_that_does_not_call_is_named_and_the_call_can_be_repeated() -> None:
    kind, settings, expected = expected_of("uneven lanes")
    gave_up = threading.Barrier(3)

    with job_of(3) as job:

        def host_job(host: int) -> Any:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(3)), **{**settings, "timeout_seconds": 2})
            for _ in range(5):
                next(feed)
            if host != 1:
                error = error_of(lambda: feed.reshard(job.mesh(host, range(3), 1)))
                assert isinstance(error, meshfeed.StalledError)
                assert error.hosts == (1,)
                assert "or has not called reshard" in str(error)
            gave_up.wait(30)
            feed.reshard(job.mesh(host, range(3)))
            with feed:
                return [rows_of(batch) for batch in feed]

        assert join(job.run(host_job)) == expected[5:]


def test_a_sharding_that_does_not_fit_is_refused_on_all_hosts_and_changes_nothing() -> None:
    kind, settings, expected = expected_of("random access")

    with job_of(2) as job:

        def host_job(host: int) -> Any:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, [0, 1]), **settings)
            for _ in range(5):
                next(feed)
            per_host = 5 if host else 1
            error = error_of(lambda: feed.reshard(job.mesh(host, [0, 1], per_host)))
            assert feed.step == 5
            rest = [rows_of(next(feed)) for _ in range(3)]
            feed.reshard(job.mesh(host, [0, 1], 3))
            with feed:
                return error, rest + [rows_of(batch) for batch in feed]

        (peer, zero), (own, one) = job.run(host_job)
    assert isinstance(own, meshfeed.PlanError)
    assert isinstance(peer, meshfeed.PeerError)
    assert peer.host == 1
    assert str(peer).startswith(
        "host 1 cannot continue on this sharding: PlanError: the global batch of size 12 cannot"
    )
    assert join([zero, one]) == expected[5:]


def test_a_host_may_be_ahead_by_what_another_has_ready() -> None:
    kind, settings, expected = expected_of("random access")
    ahead = threading.Event()

    with job_of(2) as job:

        def host_job(host: int) -> list[Any]:
            with meshfeed.Feed(kind.make(), job.mesh(host, [0, 1]), **settings, prefetch=30 * host) as feed:
                delivered = [rows_of(next(feed)) for _ in range(1 if host else 25)]
                ahead.wait(20) if host else ahead.set()
                feed.reshard(job.mesh(host, [0, 1]))
                return [delivered[0], *(rows_of(batch) for batch in feed)]

        assert join(job.run(host_job)) == expected


def test_hosts_of_different_pasts_are_refused() -> None:
    kind, settings, _ = expected_of("random access")

    with job_of(2) as job:

        def host_job(host: int) -> Exception:
            with meshfeed.Feed(kind.make(), job.mesh(host, [0, 1]), **settings) as feed:
                state = feed.get_state()
                for _ in range(30):
                    next(feed)
                if host:
                    feed.set_state(state)
                return error_of(lambda: feed.reshard(job.mesh(host, [0, 1])))

        errors = job.run(host_job)
    assert {type(error) for error in errors} == {meshfeed.AgreementError}
    assert "different steps (host 0: step 30; host 1: step 0), more than 20 apart" in str(errors[1])
    assert "Call set_state with the same state on all of them first" in str(errors[1])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 9])
def test_a_host_that_waits_in_next_learns_that_another_called(steps: int) -> None:
    kind, settings, expected = expected_of("uneven lanes")

    with job_of(3) as job:

        def host_job(host: int) -> Any:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(3)), **settings)
            for _ in range(steps):
                next(feed)
            if host == 2:
                job.kill(host, feed)
                return None
            error = None if host else error_of(lambda: [*feed])  # waits for host 2
            feed.reshard(job.mesh(host, [0, 1]))
            with feed:
                return error, feed.step, [rows_of(batch) for batch in feed]

        (error, step, zero), (_, _, one), _ = job.run(host_job)
    assert isinstance(error, meshfeed.PeerError)
    assert error.host == 1
    assert f"host 1 called reshard of its feed at step {steps}" in str(error)
    assert step == steps
    assert join([zero, one]) == expected[steps:]


def test_feeds_with_different_settings_are_refused() -> None:
    with job_of(2) as job:

        def host_job(host: int) -> Exception:
            settings: dict[str, Any] = {"global_batch_size": BATCH, "name": "train", "seed": host, "shuffle": True}
            with meshfeed.Feed(memory(400), job.mesh(host, [0, 1]), **settings) as feed:
                return error_of(lambda: feed.reshard(job.mesh(host, [0, 1])))

        errors = job.run(host_job)
    assert {type(error) for error in errors} == {meshfeed.AgreementError}
    assert "hosts that call reshard differ in seed (host 0: 0; host 1: 1)" in str(errors[0])


@pytest.mark.parametrize("load", ["sharded", "once"])
def test_hosts_with_devices_in_another_order_are_refused(load: str) -> None:
    """Each would take the rows of the other: half of the records twice, half of them never."""
    with job_of(2) as job:

        def host_job(host: int) -> tuple[list[Any], Exception, Exception]:
            settings: dict[str, Any] = {"global_batch_size": BATCH, "timeout_seconds": 20, "load": load}
            usual = job.mesh(host, [0, 1], 2)
            other = Mesh(usual.devices[::-1] if host else usual.devices, ("data",), axis_types=(AxisType.Auto,))
            with meshfeed.Feed(memory(400), other, name="first", **settings) as feed:
                at_first = error_of(lambda: next(feed))
            with meshfeed.Feed(memory(400), usual, name="second", **settings) as feed:
                again = error_of(lambda: feed.reshard(other))
                feed.reshard(usual)
                return rows_of(next(feed)), at_first, again

        found = job.run(host_job)
    assert {row for rows, _, _ in found for row in rows} == set(range(BATCH))
    for _, at_first, again in found:
        for error, who in ((at_first, "hosts"), (again, "hosts that call reshard")):
            assert isinstance(error, meshfeed.AgreementError)
            assert f'{who} differ in sharding (host 0: "P(data) over data=4 of devices ' in str(error)


def test_readers_that_are_gone_are_left_out_of_load() -> None:
    kind = Kind(lambda: memory(400), {"load": [0, 1]})
    settings = settings_of(kind)
    expected = reference(kind.make, **{**settings, "load": "once"})

    with job_of(3) as job:

        def host_job(host: int) -> Any:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, range(3)), **settings)
            for _ in range(5):
                next(feed)
            if host == 0:
                job.kill(host, feed)
                return None
            feed.reshard(job.mesh(host, [1, 2]))
            rest = [rows_of(next(feed)) for _ in range(5)]
            assert bool(any(rest)) == (host == 1)
            error = error_of(lambda: feed.reshard(job.mesh(host, [2])))
            feed.close()
            return error, rest

        found = job.run(host_job)
    assert join([found[1][1], found[2][1]]) == expected[5:10]
    assert "load=[0, 1]: none of these hosts has a device in the sharding passed to reshard" in str(found[2][0])


class Batches:
    """Host batches that can be read again."""

    def __init__(self, host: int, rows: int) -> None:
        self._host, self._rows = host, rows

    def __iter__(self) -> Any:
        for number in range(8):
            yield {"id": np.full(self._rows, self._host << 16 | number, np.int32)}


def test_host_batches_keep_their_rows() -> None:
    with job_of(2) as job:

        def host_job(host: int) -> Any:
            source = meshfeed.sources.HostBatches(Batches(host, 6))
            with meshfeed.Feed(source, job.mesh(host, [0, 1], 2), timeout_seconds=10) as feed:
                delivered = [rows_of(next(feed)) for _ in range(3)]
                error = error_of(lambda: feed.reshard(job.mesh(host, [0])))
                devices = np.array(job.devices(host, [0, 1], 2)).reshape(2, 2)
                mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
                feed.reshard(NamedSharding(mesh, PartitionSpec(("data", "model"))))
                return error, delivered + [rows_of(batch) for batch in feed]

        found = job.run(host_job)
        iterator = meshfeed.sources.HostBatches(iter(Batches(0, 12)))

        def once(_: int) -> Exception:
            with meshfeed.Feed(iterator, job.mesh(0, [0])) as feed:
                next(feed)
                return error_of(lambda: feed.reshard(job.mesh(0, [0])))

    for error, _ in found:
        assert isinstance(error, meshfeed.SettingsError)
        assert "the source is host batches, which are not elastic" in str(error)
    steps = join([rows for _, rows in found])
    assert steps == [{row: (row // 6) << 16 | number for row in range(12)} for number in range(8)]

    with job_of(1) as job:
        error = job.run(once)[0]
    assert "reshard drops what was read ahead, and the batches come from a" in str(error)


# ------------------------------------------------------------------ any history


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps on some hosts; ``ahead``: further batches that hosts take before they continue in the next phase."""

    hosts: tuple[int, ...]
    steps: int
    ahead: dict[int, int]
    killed: int | None


def draw_history(rng: random.Random, processes: int) -> list[Phase]:
    alive, phases, hosts = list(range(processes)), list[Phase](), tuple(range(processes))
    while len(phases) < 5:
        victim = rng.choice([None, *hosts]) if len(alive) > 2 else None
        ahead = {host: rng.choice((0, 0, 1, 2)) for host in hosts}
        alive = [host for host in alive if host != victim]
        following = tuple(sorted(rng.sample(alive, rng.randint(min(2, len(alive)), len(alive)))))
        ahead[rng.choice([host for host in following if host in hosts] or [hosts[0]])] = 0
        if not set(following) & set(hosts):  # lanes would be known to nobody who continues
            following = tuple(sorted({*following, *(host for host in hosts if host != victim)}))
            ahead = dict.fromkeys(hosts, 0)
        phases.append(Phase(hosts, rng.randint(0, 5), ahead, victim))
        hosts = following
    return [*phases, Phase(hosts, -1, {}, None)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random access", "uneven lanes", "lanes without a state", "mixture of streams"])
@pytest.mark.parametrize("seed", range(3))  # `scripts/chaos --reshard N` draws more
def test_any_history_of_hosts_gives_the_same_stream(seed: int, name: str, slots: None) -> None:
    rng = random.Random(f"{seed} {name}")
    kind, settings, expected = expected_of(name)
    history = draw_history(rng, 4)

    with job_of(4) as job:

        def host_job(host: int) -> list[list[dict[int, int]] | None]:
            feed: meshfeed.Feed | None = None
            parts: list[list[dict[int, int]] | None] = []
            for phase in history:
                if feed is None:
                    feed = meshfeed.Feed(kind.make(), job.mesh(host, phase.hosts), **settings)
                else:
                    feed.reshard(job.mesh(host, phase.hosts))
                first = feed.step
                delivered = [rows_of(batch) for batch in (feed if phase.steps < 0 else take(feed, phase.steps))]
                parts.append(delivered)
                if host == phase.killed:
                    job.kill(host, feed)
                    return parts
                with contextlib.suppress(meshfeed.PeerError):  # another host has called reshard
                    for _ in take(feed, phase.ahead.get(host, 0) if host in phase.hosts else 0):
                        pass
                assert feed.step >= first
            assert feed is not None
            feed.close()
            return parts

        found = job.run(host_job)
    for number, phase in enumerate(history):
        assert all(len(found[host]) > number for host in phase.hosts)
    steps = [join([part[number] for part in found if len(part) > number]) for number in range(len(history))]
    assert [step for part in steps for step in part] == expected


def take(feed: meshfeed.Feed, count: int) -> Iterator[Any]:
    return (next(feed) for _ in range(count))


def test_an_interrupted_call_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the call waits for the other host, which is then found waiting."""
    kind, settings, expected = expected_of("uneven lanes")
    called = threading.Event()

    class Interrupted(meeting.Meetings):
        def meet(self, participants: Any, offer: Any, conclude: Any, *, timeout_seconds: float) -> Any:
            if not called.is_set() and job.here == 0:
                timeout_seconds = 0.5  # the other comes only after the interrupt
            try:
                return super().meet(participants, offer, conclude, timeout_seconds=timeout_seconds)
            except meshfeed.StalledError:
                raise KeyboardInterrupt from None

    monkeypatch.setattr(iterator, "Meetings", Interrupted)
    with job_of(2) as job:

        def host_job(host: int) -> list[dict[int, int]]:
            feed = meshfeed.Feed(kind.make(), job.mesh(host, [0, 1]), **settings)
            for _ in range(7):
                next(feed)
            if host == 0:
                with pytest.raises(KeyboardInterrupt):
                    feed.reshard(job.mesh(host, [0, 1]))
                assert feed.step == 7
                called.set()
            called.wait(30)
            feed.reshard(job.mesh(host, [0, 1]))
            with feed:
                return [rows_of(batch) for batch in feed]

        assert join(job.run(host_job)) == expected[7:]


def mixture_of_records() -> Any:
    parts = {name: {"id": np.arange(400, dtype=np.int32) + start} for name, start in (("a", 0), ("b", 1 << 16))}
    return meshfeed.sources.Mixture(parts, weights={"a": 1, "b": 1}, block=BATCH)


@pytest.mark.parametrize("make", [mixture_of_records, mixture_of_streams])
def test_weights_set_before_and_after_it_hold(make: Callable[[], Any], slots: None) -> None:
    settings = settings_of(KINDS["mixture of streams" if make is mixture_of_streams else "random access"])
    first, second = {"a": 3, "b": 1}, {"a": 1, "b": 4}

    def play(feed: meshfeed.Feed, until: int, weights: Any = None) -> list[Any]:
        feed.start()
        taken = [rows_of(next(feed)) for _ in range(until - feed.step)]
        if weights is not None:
            feed.set_weights(weights)
        return taken

    def whole(host: int) -> list[Any]:
        with meshfeed.Feed(make(), job.mesh(0, [0]), **settings) as feed:
            return [*play(feed, 4, first), *play(feed, 12, second), *play(feed, 18)]

    with job_of(1) as job:
        expected = job.run(whole)[0]

    with job_of(3) as job:

        def host_job(host: int) -> list[Any]:
            feed = meshfeed.Feed(make(), job.mesh(host, range(3)), **settings)
            delivered = [*play(feed, 4, first), *play(feed, 9)]
            if host == 1:
                job.kill(host, feed)
                return delivered
            feed.start()
            feed.reshard(job.mesh(host, [0, 2]))
            with feed:
                return [*delivered, *play(feed, 12, second), *play(feed, 18)]

        found = job.run(host_job)
    assert join([part[:9] for part in found]) + join([found[host][9:] for host in (0, 2)]) == expected


def test_a_feed_that_is_closed_at_the_end_of_the_data_does_not_name_an_error() -> None:
    with job_of(2) as job:
        closed = threading.Event()

        def host_job(host: int) -> Any:
            with meshfeed.Feed(memory(36), job.mesh(host, range(2)), global_batch_size=12, timeout_seconds=20) as feed:
                assert len(list(feed)) == 3
                if host == 1:
                    feed.close()
                    closed.set()
                    return None
                assert closed.wait(20)
                feed.reset()
                return error_of(lambda: next(feed))

        error, _ = job.run(host_job)
        assert isinstance(error, meshfeed.PeerError)
        assert error.peer_message == "closed its feed at step 3"


@pytest.mark.parametrize("extra", [0, 1])
def test_a_reset_after_different_numbers_of_batches_is_logged_on_every_host(extra: int) -> None:
    with job_of(3) as job:

        def host_job(host: int) -> None:
            with meshfeed.Feed(memory(120), job.mesh(host, range(3)), global_batch_size=12, timeout_seconds=20) as feed:
                if host == 1:
                    for _ in range(extra):
                        next(feed)  # a look at a batch
                for _ in range(4):
                    next(feed)
                feed.reset()
                feed.reset()
                for _ in range(4):
                    next(feed)
                feed.reset()
                next(feed)

        job.run(host_job)
        texts = [[entry.getMessage() for entry in job.job.warnings[host]] for host in range(3)]
        assert [len(found) for found in texts] == [extra] * 3
        for text in texts[0] if extra else ():
            assert text.startswith(
                "feed-0/0 was reset after different numbers of batches (hosts 0, 2: 4; host 1: 5). Unless a step failed,"
            )


def test_a_reset_after_an_error_is_not_compared() -> None:
    with job_of(2) as job:

        def host_job(host: int) -> None:
            with meshfeed.Feed(
                Broken(host), job.mesh(host, range(2)), global_batch_size=12, timeout_seconds=20
            ) as feed:
                if host == 1:
                    next(feed)
                    next(feed)
                else:
                    with pytest.raises(meshfeed.PeerError):
                        list(feed)
                feed.reset()
                next(feed)

        job.run(host_job)
        texts = [entry.getMessage() for host in range(2) for entry in job.job.warnings[host]]
        assert not [text for text in texts if "different numbers" in text]


class Broken:
    """Records of which host 1 cannot read the second half."""

    def __init__(self, host: int) -> None:
        self._host = host

    def __len__(self) -> int:
        return 120

    def __getitem__(self, number: int) -> Any:
        if number >= 60 and self._host == 1:
            raise ValueError("the disk is on fire")
        return {"id": np.int32(number)}

    def fingerprint(self) -> str:
        return "broken"


def test_a_feed_that_is_dropped_after_an_error_is_as_good_as_closed() -> None:
    with job_of(2) as job:

        def fail(host: int) -> weakref.ref[meshfeed.Feed]:
            feed = meshfeed.Feed(Broken(host), job.mesh(host, range(2)), global_batch_size=12, timeout_seconds=20)
            with pytest.raises(ValueError if host else meshfeed.PeerError, match="the disk is on fire"):
                list(feed)
            return weakref.ref(feed)

        def host_job(host: int) -> None:
            dropped, end = fail(host), time.monotonic() + 10
            while dropped() is not None and time.monotonic() < end:  # its threads may be about to end
                gc.collect()
                time.sleep(0.01)

        job.run(host_job)
        end = time.monotonic() + 10
        while left := simulated_keys(job) + [thread.name for thread in job.job.threads if thread.is_alive()]:
            assert time.monotonic() < end, left
            time.sleep(0.01)
