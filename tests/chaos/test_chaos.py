"""The short form of scripts/chaos, and a proof that its audit can fail."""

from __future__ import annotations

import pytest
import real
import resharded
import shared_cache
import simulated
from audit import Seen, audit
from scenario import draw


def test_audit_finds_a_lost_a_repeated_and_a_changed_record() -> None:
    good = [Seen(0, 0, {0: 1, 1: 2}), Seen(0, 1, {0: 3}), Seen(1, 1, {0: 3, 1: 4})]
    assert audit(good, {1, 2, 3, 4}) == {"steps": 2, "records": 4, "steps_again": 1}
    for bad, expected in (
        (good, {1, 2, 3, 4, 5}),
        ([*good, Seen(1, 2, {0: 1})], {1, 2, 3, 4}),
        ([*good, Seen(1, 0, {0: 9})], {1, 2, 3, 4}),
        ([*good, Seen(1, 3, {0: 9})], {1, 2, 3, 4, 9}),
    ):
        with pytest.raises(AssertionError):
            audit(bad, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1010))
def test_random_failures_on_simulated_hosts_lose_and_repeat_nothing(seed: int) -> None:
    figures = simulated.play(draw(seed))
    assert figures["incarnations"] >= 1


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_fills_a_shared_cache_damages_and_blocks_nothing() -> None:
    outcomes = [shared_cache.play(seed) for seed in (1, 2)]
    assert all(outcome.fetched <= 10 for outcome in outcomes)


@pytest.mark.slow
def test_a_random_kill_of_real_processes_loses_and_repeats_nothing() -> None:
    seed = next(
        seed
        for seed in range(2000, 3000)
        if (s := draw(seed, hosts=(1, 2), kills=1)).incarnations[0].hosts == 2
        and s.incarnations[0].kill_at_step is not None
        and 4 <= s.incarnations[0].kill_at_step <= 10
        and s.num_records >= 397
    )
    outcome = real.play(draw(seed, hosts=(1, 2), kills=1), devices_per_host=2)
    assert outcome.kills >= 1
    assert outcome.restarts >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "stream"])
def test_hosts_that_are_killed_are_survived_without_a_restart(kind: str) -> None:
    plan = next(
        plan
        for seed in range(3000, 4000)
        if (plan := resharded.draw_plan(seed)).hosts == 3
        and plan.stream.kind == kind
        and [loss.noticed for loss in plan.losses] == [True, False]
    )
    outcome = resharded.play(plan)
    assert outcome.kills == 2
    assert len(outcome.noticed) == len(outcome.planned) == 1  # of the host that is left
