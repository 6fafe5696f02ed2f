"""What ``"auto"`` decides: from made-up measurements, and on a made-up clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.base.settings import FeedSettings
from meshfeed._src.feed import sizing
from meshfeed._src.feed.pipeline import PrefetchDepth
from meshfeed._src.feed.recorder import StatsRecorder
from meshfeed._src.feed.sizing import Numbers, Sizer, Window, climb, control
from meshfeed._src.reading.reads import AutoReads, ReadNumbers

START = Numbers(0, 1, 2)


def window(capacity: float = 100.0, **changes: Any) -> Window:
    base = {"end": 0.0, "rate": capacity, "stalled": 1.0, "uneven": 0.0, "peers": 0.0, "cores": 1.0, "work": 1.0}
    return Window(**{**base, "capacity": capacity, **changes})


def climbed(
    capacity: Callable[[Numbers], float], can: Callable[[Numbers], bool] = lambda n: True, workers: int = 8, **of: Any
) -> tuple[Numbers, list[Numbers]]:
    """What climb() returns from START, and what it tried."""

    def found(numbers: Numbers) -> Window:
        return window(capacity(numbers), **{name: of[name](numbers) if callable(of[name]) else of[name] for name in of})

    search = climb(START, found(START), lambda n: n.num_threads <= 16 and can(n), workers)
    tried: list[Numbers] = []
    try:
        wanted, _ = next(search)
        while True:
            tried.append(wanted)
            wanted, _ = search.send(found(wanted))
    except StopIteration as end:
        return end.value, tried


def test_reads_that_wait_get_threads_and_no_processes() -> None:
    best, tried = climbed(lambda n: 10.0 * (n.num_workers or n.num_threads), cores=0.1)
    assert best == Numbers(0, 16, 2)
    assert not any(numbers.num_workers for numbers in tried)


def test_processes_are_tried_only_where_there_can_be_more_of_them_than_threads() -> None:
    best, tried = climbed(lambda n: 10.0 * n.readers, workers=16, cores=lambda n: float(n.readers))
    assert best == Numbers(0, 16, 2)
    assert not any(numbers.num_workers for numbers in tried)
    best, tried = climbed(lambda n: 10.0 * n.readers, workers=50, cores=lambda n: float(n.readers))
    assert best == Numbers(50, 16, 2)
    assert [numbers.num_workers for numbers in tried if numbers.num_workers] == [50]


def test_decoding_that_holds_the_lock_of_python_gets_processes() -> None:
    best, tried = climbed(lambda n: 10.0 * (n.num_workers or 1))
    assert best == Numbers(8, 1, 2)
    assert [numbers.num_threads for numbers in tried if not numbers.num_workers] == [4]


def test_the_cores_limit_the_processes() -> None:
    assert climbed(lambda n: 10.0 * (n.num_workers or 1), workers=3)[0] == Numbers(3, 1, 2)
    assert climbed(lambda n: 10.0 * (n.num_workers or 1), workers=0)[0] == START


def test_a_limit_in_the_source_changes_nothing() -> None:
    best, tried = climbed(lambda n: 10.0)
    assert best == START
    assert len(tried) == 2  # threads, processes


def test_a_machine_that_has_become_faster_is_no_gain() -> None:
    for again, best in ((119.0, START), (110.0, Numbers(0, 4, 2))):
        search = climb(START, window(100.0), lambda n: n.num_threads <= 4, 0)
        assert [next(search)[0], search.send(window(120.0))[0]] == [Numbers(0, 4, 2), START]
        with pytest.raises(StopIteration) as end:
            search.send(window(again))
        assert end.value.value == best


def test_a_clear_gain_of_threads_is_not_measured_again() -> None:
    assert climbed(lambda n: 10.0 * n.num_threads, cores=0.1)[1] == [Numbers(0, 4, 2), Numbers(0, 16, 2)]


def test_short_reads_get_no_processes() -> None:
    best, tried = climbed(lambda n: 10.0 * (n.num_workers or 1), work=0.0009)
    assert best == START
    assert tried == [Numbers(0, 4, 2), Numbers(0, 2, 2)]
    assert climbed(lambda n: 10.0 * (n.num_workers or 1), work=0.0011)[0].num_workers, "sending takes less"


def test_a_small_gain_is_not_worth_a_thread_nor_a_larger_one_a_process() -> None:
    assert climbed(lambda n: 100.0 if n == START else 104.0)[0] == START
    assert climbed(lambda n: 100.0 if n == START else 107.0, work=0.0009)[0].num_threads > 1
    assert climbed(lambda n: 109.0 if n.num_workers else 100.0)[0] == START


def test_two_threads_are_tried_for_short_reads_that_four_do_not_make_faster() -> None:
    two_cores = {1: 100.0, 2: 112.0, 4: 104.0, 8: 100.0}
    assert climbed(lambda n: two_cores[n.num_threads], work=0.0002)[0] == Numbers(0, 2, 2)
    assert climbed(lambda n: 100.0 if n.num_threads == 1 else 112.0, work=0.0002)[0] == Numbers(0, 4, 2)
    assert climbed(lambda n: 112.0 if n.num_threads == 2 else 100.0, work=0.002)[0] == START, "processes come next"


def test_a_step_that_waits_little_may_gain_little() -> None:
    for again, best in ((100.0, Numbers(0, 2, 2)), (103.0, START)):
        search = climb(START, window(100.0, stalled=0.08), lambda n: n.num_threads <= 2, 0)  # four take too much
        next(search)
        assert search.send(window(105.0, stalled=0.0))[0] == START, "measured once more"
        with pytest.raises(StopIteration) as end:
            search.send(window(again, stalled=0.08))
        assert end.value.value == best


def test_uneven_reads_get_prefetched_batches() -> None:
    search = climb(START, window(stalled=0.2, uneven=0.5), lambda n: n.prefetch <= 32, 8)
    assert next(search)[0] == Numbers(0, 1, 4)
    assert search.send(window(stalled=0.1, uneven=0.5))[0] == Numbers(0, 1, 8)
    with pytest.raises(StopIteration) as end:
        search.send(window(stalled=0.09, uneven=0.5))
    assert end.value.value == Numbers(0, 1, 4)


def test_reads_that_are_too_slow_on_average_get_threads_however_uneven_they_are() -> None:
    search = climb(START, window(stalled=0.9, uneven=0.4), lambda n: True, 8)
    assert next(search)[0] == Numbers(0, 4, 2)
    search = climb(START, window(stalled=0.5, uneven=0.4, peers=0.2), lambda n: True, 8)
    assert next(search)[0] == Numbers(0, 1, 4), "the rest of the wait is for other hosts"


def test_threads_are_tried_where_prefetched_batches_do_not_help() -> None:
    search = climb(START, window(stalled=0.2, uneven=0.5), lambda n: True, 8)
    assert [next(search)[0], search.send(window(stalled=0.2, uneven=0.5))[0]] == [Numbers(0, 1, 4), Numbers(0, 4, 2)]
    assert next(climb(START, window(stalled=0.2, uneven=0.5), lambda n: n.prefetch == 2, 8))[0] == Numbers(0, 4, 2)


@given(seed=st.integers(0, 10**9), workers=st.integers(0, 64), cores=st.floats(0, 4), worst=st.floats(0.01, 0.99))
def test_climbing_never_ends_lower_and_always_ends(seed: int, workers: int, cores: float, worst: float) -> None:
    def capacity(numbers: Numbers) -> float:
        return 1.0 + hash((seed, *numbers)) % 1000

    def can(numbers: Numbers) -> bool:
        return hash((seed, numbers.num_workers)) % 100 > 10 * worst

    best, tried = climbed(capacity, can, workers, cores=cores)
    assert capacity(best) >= capacity(START)
    assert best == START or capacity(best) >= 1.05 * capacity(START)
    assert all(can(numbers) and numbers.num_workers <= max(2, workers) for numbers in tried)
    assert len(tried) <= 15


def talk(*answers: Window | None, now: Numbers = START) -> tuple[list[Numbers], list[str]]:
    """What control() yields after each answer, and what it concludes."""
    reasons: list[str] = []
    talking = control(now, lambda n: n.num_threads <= 2, 0, lambda reason, measuring: reasons.append(reason))
    assert next(talking)[0] == now
    return [talking.send(answer)[0] for answer in answers], reasons


def test_nothing_is_tried_while_the_step_does_not_wait() -> None:
    wanted, reasons = talk(window(stalled=0.01), window(stalled=0.04))
    assert wanted == [START, START]
    assert "4% of the time" in reasons[-1]


def test_nothing_is_tried_for_a_host_that_waits_for_others() -> None:
    wanted, reasons = talk(window(stalled=0.9, peers=0.8))
    assert wanted == [START]
    assert "other hosts" in reasons[-1]


def test_a_search_without_result_is_not_repeated_at_once() -> None:
    tried = window(100.0)
    wanted, _ = talk(tried, tried, *(window(end=at) for at in (1.0, 300.0, 599.0, 601.0)))
    assert wanted == [Numbers(0, 2, 2), START, START, START, START, Numbers(0, 2, 2)]


def test_a_search_is_repeated_soon_if_reading_becomes_much_slower() -> None:
    slow = [window(40.0, end=2.0)] * 10
    wanted, _ = talk(window(100.0), window(100.0), window(100.0, end=1.0), *slow)
    assert wanted == [Numbers(0, 2, 2)] + [START] * 11 + [Numbers(0, 2, 2)]


def test_numbers_that_cannot_be_used_end_the_climb() -> None:
    assert talk(window(), None)[0] == [Numbers(0, 2, 2), START]


# ---------------------------------------------------------------------- the Sizer, on a made-up clock


class Run:
    """A feed and a step on a made-up clock.

    Args:
      seconds: numbers → seconds to read a batch.
      step_seconds: duration of a training step.
      start_seconds: time for workers to start.
      batch_bytes: bytes of a host batch.
      options: the feed's keywords.
    """

    def __init__(
        self,
        seconds: Callable[[ReadNumbers], float],
        *,
        step_seconds: float = 0.0,
        start_seconds: float = 1.0,
        batch_bytes: int = 1,
        **options: Any,
    ) -> None:
        auto: dict[str, Any] = {"num_workers": "auto", "num_threads": "auto", "prefetch": "auto", **options}
        settings = FeedSettings(global_batch_size=8, **auto)
        self.prefetch = PrefetchDepth(settings.prefetch, "feed")
        self.prefetch.batch_bytes = batch_bytes
        self.now = self.cpu = 0.0
        self.sizer = Sizer(settings, self.prefetch, clock=lambda: self.now, cpu_clock=lambda: self.cpu)
        self.stats = StatsRecorder()
        self.production = (0, 0.0)
        self.seconds, self.step_seconds, self.start_seconds = seconds, step_seconds, start_seconds
        self.cores = 1.0
        self.together = self.offset = 0  # the number of threads whose batches come together, and the first of them
        self.used: list[ReadNumbers] = []
        self.reads = AutoReads()
        self._asked = 0.0
        self.sizer.begin(self, alone=True)

    def adapt(self, auto: AutoReads) -> None:
        self.reads = auto
        auto.begin(ReadNumbers(0, 1))

    def take(self, batches: int) -> dict[str, Any]:
        """Takes batches; returns what was chosen."""
        for _ in range(batches):
            self._follow()
            waited = max(0.0, self.seconds(self.reads.in_use) - self.step_seconds)
            if self.reads.in_use.num_threads == self.together:  # readers that began together end together
                since = next((i for i, used in enumerate(reversed(self.used)) if used != self.reads.in_use), 0)
                waited *= self.together * ((since + self.offset) % self.together == 0)
            self.now += waited + self.step_seconds
            self.cpu += self.cores * (waited + self.step_seconds)
            sums = dict(self.stats.counts.sums)
            sums["batches"] += 1
            sums["wait_seconds"] += waited
            sums["read_seconds"] += self.seconds(self.reads.in_use)
            self.stats.counts = self.stats.counts._replace(sums=sums)
            self.production = (sums["batches"], 0.0)
            self.used.append(self.reads.in_use)
            self.sizer.delivered(self.stats, self)  # type: ignore[arg-type]
        return self.sizer.tuned()

    def _follow(self) -> None:
        wanted, used = self.reads.wanted, self.reads.in_use
        if wanted.num_workers > used.num_workers:
            self._asked = self._asked or self.now
            if self.now - self._asked < self.start_seconds:
                wanted = used._replace(num_threads=wanted.num_threads)
        if wanted.num_workers == self.reads.wanted.num_workers:
            self._asked = 0.0
        self.reads.in_use = wanted


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_cpus", lambda: 8)
    monkeypatch.setattr(sizing, "host_memory_bytes", lambda: 64 << 30)


def test_a_slow_disk_gets_threads_within_40_batches() -> None:
    run = Run(lambda n: 0.05 / (n.num_workers or n.num_threads))
    run.cores = 0.1
    tuned = run.take(40)
    assert (tuned["num_threads"], tuned["num_workers"], tuned["prefetch"]) == (16, 0, 2)
    assert [found["num_threads"] for found in tuned["tried"]] == [1, 4]
    assert json.loads(json.dumps(tuned)) == tuned
    run.take(140)
    assert run.sizer.tuned()["state"] == "settled"
    assert "faster than num_workers=0, num_threads=1" in run.sizer.tuned()["reason"]


def test_processes_are_started_within_100_short_batches_of_decoding_that_holds_the_lock_of_python() -> None:
    noise = np.random.default_rng(0)
    run = Run(lambda n: noise.normal(0.0024, 0.0002) / (1.25 if n.num_workers else 1.0))
    run.take(100)
    assert run.reads.wanted.num_workers
    run.take(1000)
    assert run.sizer.tuned()["num_workers"] == 4


def test_threads_whose_batches_come_together_are_not_given_up() -> None:
    for offset in range(16):
        run = Run(lambda n: 0.1 / n.num_threads, num_workers=0)
        run.together, run.offset = 16, offset
        assert run.take(250)["num_threads"] == 16, f"batches come together from batch {offset}"


def test_a_clear_gain_ends_the_measurement_of_fast_batches() -> None:
    run = Run(lambda n: 0.004 / n.num_threads, num_workers=0)
    run.cores = 0.1
    assert run.take(250)["num_threads"] == 16
    assert run.used.count(ReadNumbers(0, 4)) < 160  # 0.1 s, and the reads under way; 0.3 s would be 300


def test_noise_seldom_hides_a_gain_of_an_eighth_and_makes_none() -> None:
    def chosen(gain: float, seed: int) -> int:
        noise = np.random.default_rng(seed)
        run = Run(
            lambda n: max(0.1, noise.normal(1.0, 0.2)) * 0.01 / (1.0 if n.num_threads == 1 else gain), num_workers=0
        )
        run.take(400)
        assert run.sizer.tuned()["state"] == "settled"
        return run.reads.in_use.num_threads

    assert sum(chosen(1.125, seed) > 1 for seed in range(30)) >= 24
    assert sum(chosen(0.97, seed) > 1 for seed in range(30)) <= 1


def test_short_windows_find_no_gain_in_noise_that_lasts() -> None:
    def chosen(seed: int) -> int:
        noise = np.random.default_rng(seed)
        slow = 0.0  # lasts for ten batches, of the 27 of the shortest window

        def seconds(numbers: ReadNumbers) -> float:
            nonlocal slow
            slow = 0.9 * slow + 0.044 * noise.normal()
            return (1 + slow) * (0.003 if numbers.num_threads == 1 else 0.0031)

        run = Run(seconds, num_workers=0)
        run.take(800)
        assert run.sizer.tuned()["state"] == "settled"
        return run.reads.in_use.num_threads

    assert sum(chosen(seed) > 1 for seed in range(60)) <= 1


def test_slow_decoding_gets_processes_and_threads_that_hinder_are_left_soon() -> None:
    run = Run(lambda n: 0.05 / n.num_workers if n.num_workers else 0.05 * n.num_threads)
    assert run.take(300)["num_workers"] == 8
    # of 8 batches of a window; some come after the switch
    assert run.used.count(ReadNumbers(0, 4)) < 16


def test_a_feed_that_is_fast_enough_stays_as_it_is() -> None:
    run = Run(lambda n: 0.02, step_seconds=0.03)
    tuned = run.take(300)
    assert set(run.used) == {(0, 1)}
    assert (tuned["state"], tuned["num_workers"], tuned["num_threads"]) == ("settled", 0, 1)


def test_a_step_that_begins_to_wait_later_gets_more() -> None:
    run = Run(lambda n: 0.02 / n.num_threads, step_seconds=0.03, num_workers=0)
    assert run.take(300)["num_threads"] == 1
    run.step_seconds = 0.004
    assert run.take(300)["num_threads"] == 16


def test_only_keywords_that_are_auto_are_chosen_and_shown() -> None:
    run = Run(lambda n: 0.05 / (n.num_workers or n.num_threads), num_workers=0, prefetch=5)
    tuned = run.take(300)
    assert tuned["num_threads"] == 16
    assert not tuned.keys() & {"num_workers", "prefetch"}
    assert run.prefetch.depth == 5


def test_batches_ahead_stay_within_the_memory() -> None:
    run = Run(lambda n: 0.05 / (n.num_workers or n.num_threads), batch_bytes=1 << 30)  # 16 in a quarter of it
    run.cores = 0.1
    assert run.take(400)["num_threads"] == 4


def test_workers_that_do_not_start_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(lambda n: 0.05 / (n.num_workers or 1), start_seconds=1e9)
    tuned = run.take(3000)
    assert tuned["num_workers"] == 0
    why = "starting 4 worker processes and opening the source in them took more than 60 s"
    assert f"num_workers stays at 0: {why}" in tuned["reason"]


def test_a_source_without_processes_keeps_its_reason() -> None:
    run = Run(lambda n: 0.05 / (n.num_workers or 1))
    run.reads.keep("num_workers", "it cannot be pickled")
    tuned = run.take(300)
    assert set(run.used) <= {(0, 1), (0, 4)}
    assert "num_workers stays at 0: it cannot be pickled" in tuned["reason"]


def test_a_pause_of_the_loop_does_not_count() -> None:
    def pauses(every: int) -> Run:
        run = Run(lambda n: 0.05 / n.num_threads, num_workers=0)
        for batch in range(600):
            run.now += 30.0 * (every and batch % every == every - 1)  # a checkpoint, or an evaluation
            run.take(1)
        return run

    assert pauses(70).sizer.tuned()["num_threads"] == pauses(0).sizer.tuned()["num_threads"] == 16


def test_a_pause_is_a_step_that_takes_far_longer_than_those_before() -> None:
    sizer, outside = Run(lambda n: 0.05).sizer, itertools.count(1)
    assert not any(sizer._is_interrupted(0.2 * next(outside)) for _ in range(100))
    assert not sizer._is_interrupted(20.0 + 1.4), "less than five usual steps and half a second"
    assert sizer._is_interrupted(21.4 + 2.0)
    assert not sizer._is_interrupted(23.4 + 0.2)


def test_an_interrupt_inside_a_decision_begins_it_again() -> None:
    run = Run(lambda n: 0.05 / n.num_threads, num_workers=0)
    run.take(20)
    run.sizer._control.close()  # as a KeyboardInterrupt inside it leaves it
    assert run.take(400)["num_threads"] == 16
