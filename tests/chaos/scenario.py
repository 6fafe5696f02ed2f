"""What goes wrong in a run, drawn from a seed, and the sources that it goes wrong in."""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import numpy as np

import meshfeed
from meshfeed.sources import Stream

KINDS = ("random", "stream")


@dataclasses.dataclass(frozen=True)
class Incarnation:
    """One start of the job.

    Attributes:
      hosts: how many.
      kill_at_step: a host is killed when it has delivered this many steps in this incarnation; None: run to the end.
      kill_all: kill every host, or only ``victim``.
      victim: which host.
      fails_at_step: the victim's source raises there instead of being killed.
    """

    hosts: int
    kill_at_step: int | None
    kill_all: bool
    victim: int
    fails_at_step: int | None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A stream, and the ways in which its run is disturbed.

    Attributes:
      seed: of everything random.
      kind: "random" access or "stream".
      num_records: of the source, all lanes together.
      batch: global batch size.
      save_every: steps between saved states.
      prefetch: of the feed.
      error_rate: share of reads that raise OSError once.
      delay_rate: share of reads that sleep up to 20 ms.
      incarnations: starts of the job; the last one runs to the end.
    """

    seed: int
    kind: str
    num_records: int
    batch: int
    save_every: int
    prefetch: int
    error_rate: float
    delay_rate: float
    incarnations: tuple[Incarnation, ...]

    @property
    def num_lanes(self) -> int:
        return 12

    def expected(self) -> set[int]:
        """Ids of all records."""
        if self.kind == "random":
            return set(range(self.num_records))
        return {lane << 20 | i for lane in range(self.num_lanes) for i in range(self.lane_length(lane))}

    def lane_length(self, lane: int) -> int:
        """Records of a lane; uneven, and one may be empty."""
        rng = random.Random(self.seed * 1000 + lane)
        mean = max(1, self.num_records // self.num_lanes)
        return rng.randint(0, 2 * mean)

    def feed(self, incarnation: int, host: int, mesh: Any, *, timeout_seconds: float) -> meshfeed.Feed:
        """The feed of this host in this incarnation."""
        source = self.source(incarnation, host)
        return meshfeed.Feed(source, mesh, **self.settings(), timeout_seconds=timeout_seconds, name="train")

    def settings(self) -> dict[str, Any]:
        """What all feeds of the scenario have in common."""
        return {
            "global_batch_size": self.batch,
            "shuffle": self.kind == "random",
            "seed": self.seed,
            "end": "pad",
            "mask_key": "mask",
            "num_lanes": self.num_lanes if self.kind == "stream" else None,
            "prefetch": self.prefetch,
            # A lane without a state is read from its beginning, where each of its records may fail again.
            "retry": meshfeed.Retry(attempts=2000, initial_seconds=0.001, max_seconds=0.01),
        }

    def source(self, incarnation: int, host: int) -> Any:
        """The source as this host has it in this incarnation."""
        trouble = Trouble(self, incarnation, host)
        if self.kind == "random":
            return Records(self, trouble)
        scenario = self

        def open_lane(lane_index: int, num_lanes: int) -> Any:
            assert num_lanes == scenario.num_lanes
            return Lane(scenario, lane_index, trouble)

        return Stream(open_lane, fingerprint=scenario.seed)


def draw(seed: int, hosts: tuple[int, ...] = (1, 2, 3, 4), kills: int = 2) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    incarnations = []
    for number in range(rng.randint(1, kills) + 1):
        count = rng.choice(hosts)
        last = number > 0 and len(incarnations) >= kills
        step = rng.randint(0, 14)
        failing = rng.random() < 0.25
        incarnations.append(
            Incarnation(
                hosts=count,
                kill_at_step=None if last or failing else step,
                kill_all=rng.random() < 0.5,
                victim=rng.randrange(count),
                fails_at_step=step if failing and not last else None,
            )
        )
    incarnations.append(Incarnation(rng.choice(hosts), None, False, 0, None))
    return Scenario(
        seed=seed,
        kind=rng.choice(KINDS),
        num_records=rng.choice((1, 13, 240, 397, 600)),
        batch=rng.choice((12, 24)),
        save_every=rng.choice((1, 2, 3)),
        prefetch=rng.choice((0, 1, 2, 5)),
        error_rate=rng.choice((0.0, 0.005, 0.03)),
        delay_rate=rng.choice((0.0, 0.1)),
        incarnations=tuple(incarnations),
    )


class DiskGone(Exception):
    """A failure that no retry mends."""


class Trouble:
    """Delays, transient errors and a final failure, drawn for one host of one incarnation."""

    def __init__(self, scenario: Scenario, incarnation: int, host: int) -> None:
        self._rng = random.Random(f"{scenario.seed}/{incarnation}/{host}")
        self._scenario = scenario
        plan = scenario.incarnations[incarnation]
        mine = plan.fails_at_step is not None and plan.victim == host
        self._reads_left = None if not mine else plan.fails_at_step
        self._just_failed = False

    def strike(self, new_step: bool) -> None:
        """May sleep or raise, before a read."""
        if new_step and self._reads_left is not None:
            if self._reads_left <= 0:
                raise DiskGone("the disk is gone")
            self._reads_left -= 1
        if self._rng.random() < self._scenario.delay_rate:
            time.sleep(self._rng.random() * 0.02)
        if not self._just_failed and self._rng.random() < self._scenario.error_rate:
            self._just_failed = True
            raise OSError("a passing fault")
        self._just_failed = False


class Records:
    """Random access."""

    def __init__(self, scenario: Scenario, trouble: Trouble) -> None:
        self._scenario, self._trouble = scenario, trouble

    def __len__(self) -> int:
        return self._scenario.num_records

    def __getitem__(self, record_id: int) -> Any:
        return {"id": np.int32(record_id)}

    def read_batch(self, record_ids: Any) -> Any:
        self._trouble.strike(new_step=True)
        return {"id": record_ids.astype(np.int32)}

    def fingerprint(self) -> Any:
        return self._scenario.seed


class Lane:
    """One lane; half of the scenarios have a state of their own."""

    def __init__(self, scenario: Scenario, lane: int, trouble: Trouble) -> None:
        self._scenario, self._lane, self._trouble = scenario, lane, trouble
        self._number = 0
        if scenario.seed % 2:
            self.get_state = lambda: {"at": (self._number,)}
            self.set_state = self._set_state

    def _set_state(self, state: Any) -> None:
        assert isinstance(state["at"], tuple)
        self._number = state["at"][0]

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._number >= self._scenario.lane_length(self._lane):
            raise StopIteration
        self._trouble.strike(new_step=self._number % 2 == 0)
        self._number += 1
        return {"id": np.int32(self._lane << 20 | (self._number - 1))}
