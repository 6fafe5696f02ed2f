"""check_resumable itself: it passes what continues exactly, and finds each way of not doing so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshfeed._src.base.errors import SettingsError
from meshfeed.testing import check_resumable

ROWS, STEPS = 4, 6


class Counter:
    """Exact: batch k holds the rows k*4 ... k*4+3. Each fault below is one line of it gone wrong."""

    def __init__(self, steps: int | None = STEPS) -> None:
        self.steps, self.k, self.closed = steps, 0, False

    def __iter__(self) -> Iterator[Any]:
        return self

    def make(self, k: int) -> Any:
        rows = np.arange(k * ROWS, k * ROWS + ROWS, dtype=np.int32)
        return {"x": np.stack([rows, -rows], axis=1), "y": rows.astype(np.float32)}

    def __next__(self) -> Any:
        if self.steps is not None and self.k >= self.steps:
            raise StopIteration
        self.k += 1
        return self.make(self.k - 1)

    def get_state(self) -> Any:
        return {"meshfeed": 1, "k": self.k}

    def set_state(self, state: Any) -> None:
        self.k = state["k"]

    def reset(self) -> None:
        self.k = 0

    def close(self) -> None:
        self.closed = True


def test_an_exact_feed_passes_at_every_step_and_is_closed() -> None:
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Counter())
        return made[-1]

    assert check_resumable(make) == STEPS + 1
    assert all(feed.closed for feed in made)


def test_an_endless_feed_is_compared_up_to_max_steps() -> None:
    assert check_resumable(lambda: Counter(None), max_steps=5) == 6


def test_given_save_points_are_joined_by_the_first_and_the_last() -> None:
    assert check_resumable(Counter, save_points=[3]) == 3
    with pytest.raises(SettingsError, match=r"save_points=\[9\]: the run has 6 batches, so points are 0..6"):
        check_resumable(Counter, save_points=[3, 9])
    with pytest.raises(SettingsError, match=r"make_feed=.*a function that makes a new feed"):
        check_resumable(Counter())
    for wrong in (0, True, 2.5):
        with pytest.raises(SettingsError, match=f"max_steps={wrong}") as error:
            check_resumable(Counter, max_steps=wrong)  # type: ignore[arg-type]
        assert error.value.setting == "max_steps"
    assert check_resumable(Counter, max_steps=1) == 2


def test_batches_of_random_keys_pass() -> None:
    assert check_resumable(Keys) == STEPS + 1


def test_an_empty_feed_passes() -> None:
    assert check_resumable(lambda: Counter(0)) == 1


class Jax(Counter):
    def make(self, k: int) -> Any:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        return jax.device_put(super().make(k), NamedSharding(mesh, PartitionSpec("data")))


class Keys(Counter):
    def make(self, k: int) -> Any:
        return jax.random.split(jax.random.key(k, impl=self.impl(k)), ROWS)

    def impl(self, k: int) -> str:
        return "threefry2x32"


class OtherKeys(Keys):
    resumed = False

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.resumed = True

    def impl(self, k: int) -> str:
        return "rbg" if self.resumed else "threefry2x32"


class Skips(Counter):
    def set_state(self, state: Any) -> None:
        self.k = state["k"] + (state["k"] == 2)


class SkipsInJax(Jax, Skips): ...


class SavesTooEarly(Counter):
    """Wrong only in what it saves right after a restore."""

    restored = False

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.restored = True

    def __next__(self) -> Any:
        self.restored = False
        return super().__next__()

    def get_state(self) -> Any:
        return {"meshfeed": 1, "k": max(0, self.k - 1) if self.restored and self.k == 4 else self.k}


class KeepsReadAhead(Counter):
    """set_state on a running one leaves what it has read ahead."""

    ahead: Any = None

    def __next__(self) -> Any:
        batch = super().__next__() if self.ahead is None else self.ahead
        self.k += self.ahead is not None
        self.ahead = self.make(self.k) if self.k < STEPS else None
        return batch


class OtherDtype(Counter):
    resumed = False

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.resumed = True

    def make(self, k: int) -> Any:
        batch = super().make(k)
        return {**batch, "y": batch["y"].astype(np.float64)} if self.resumed else batch


class OtherLeaves(OtherDtype):
    def make(self, k: int) -> Any:
        return {"x": Counter.make(self, k)["x"]} if self.resumed else Counter.make(self, k)


class OtherStructure(OtherDtype):
    def make(self, k: int) -> Any:
        rows = list(Counter.make(self, k).values())
        return tuple(rows) if self.resumed else rows


class OneBit(OtherDtype):
    def make(self, k: int) -> Any:
        batch = Counter.make(self, k)
        if self.resumed and k == 5:
            batch["x"][2, 1] ^= 1
        return batch


class NegativeZero(OtherDtype):
    def make(self, k: int) -> Any:
        batch = Counter.make(self, k)
        if self.resumed and k == 0:
            batch["y"][0] = -0.0
        return batch


class EndsEarly(Counter):
    resumed = False

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.resumed = True

    def __next__(self) -> Any:
        if self.resumed and self.k == STEPS - 1:
            raise StopIteration
        return super().__next__()


class StartsAgain(Counter):
    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.k = 0
            raise


class GoesOnWhenRestoredAtTheEnd(Counter):
    def set_state(self, state: Any) -> None:
        self.k = state["k"] % STEPS


class BadReset(Counter):
    def reset(self) -> None:
        self.k = 1


class NoJson(Counter):
    def get_state(self) -> Any:
        return {"meshfeed": 1, "k": self.k, "rng": object()}


class NoState:
    def __next__(self) -> Any:
        raise StopIteration


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Skips,
            r"set back while running: batch 2 differs. Leaf \"\['x'\]\", row 0 is the first of 4 rows "
            r"\(of 4 at the host\) that differ. The row is row 0 of batch 3 of the uninterrupted run",
        ),
        (SkipsInJax, r"batch 2 differs. Leaf \"\['x'\]\", row 0 .* row 0 of batch 3 of the uninterrupted run"),
        (
            SavesTooEarly,
            r"restored at step 4, saved immediately and restored again: batch 4 differs.* batch 3 of the uninter",
        ),
        (KeepsReadAhead, r"set to step 3 while it was running behind step 0: batch 3 differs.* row 0 of batch 4 of"),
        (OtherDtype, r"Leaf \"\['y'\]\" is float64\[4\] at the host, expected float32\[4\]"),
        (OtherLeaves, r"Its leaves are \[\"\['x'\]\"\], expected \[\"\['x'\]\", \"\['y'\]\"\]"),
        (
            OtherStructure,
            r"batch 0 differs\. Its structure is PyTreeDef\(\(\*, \*\)\), expected PyTreeDef\(\[\*, \*\]\)",
        ),
        (OneBit, r"batch 5 differs. Leaf \"\['x'\]\", row 2 is the first of 1 rows .* The row is not in the uninter"),
        (OtherKeys, r"Leaf '' is key<rbg>\[4, 4\] at .*, expected key<fry>\[4, 2\] at "),
        (NegativeZero, r"batch 0 differs. Leaf \"\['y'\]\", row 0 is the first of 1 rows"),
        (EndsEarly, r"it ended before batch 5; the uninterrupted run has 6 batches"),
        (
            StartsAgain,
            r"after StopIteration: it did not end after 6 batches. .* row 0 of batch 0 of the uninterrupted run",
        ),
        (GoesOnWhenRestoredAtTheEnd, r"(restored|set) .*: it did not end after 6 batches. .* row 0 of batch 0"),
        (BadReset, r"reset after the end: batch 0 differs. .* row 0 of batch 1"),
        (NoJson, r"get_state\(\) of NoJson returned a value that cannot be represented as JSON"),
        (NoState, r"NoState has no get_state"),
    ],
)
def test_every_fault_is_found_and_named(kind: type, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_resumable(kind)


def test_faults_of_an_endless_feed_are_found() -> None:
    """It is reset while it runs, and compared with the steps that were asked for."""
    for kind, message in (
        (BadReset, r"^reset while it was running: batch 0 differs\. .* row 0 of batch 1 of the uninterrupted run"),
        (
            Skips,
            r"^set to step 2 while it was running behind step 0: batch 2 differs\. .* row 0 of batch 3 of the uninter",
        ),
    ):
        with pytest.raises(AssertionError, match=message):
            check_resumable(lambda kind=kind: kind(None), max_steps=4)


class OtherShards(Jax):
    """Its rows lie on other devices once it was restored."""

    resumed = False

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.resumed = True

    def make(self, k: int) -> Any:
        batch = super().make(k)
        if not self.resumed:
            return batch
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def test_other_numbers_of_shards_are_a_difference() -> None:
    with pytest.raises(AssertionError, match=r"batch 0 differs\. Leaf \"\['x'\]\" has 2 shards here, expected 4"):
        check_resumable(OtherShards)


def test_jax_arrays_are_compared_shard_by_shard() -> None:
    assert check_resumable(Jax, save_points=[2]) == 3


class Records(Counter):
    """A lane iterator: records of bytes, a state with a tuple that must come back as one."""

    def make(self, k: int) -> Any:
        return f"record {k}".encode()

    def get_state(self) -> Any:
        return {"place": (self.k, b"x")}

    def set_state(self, state: Any) -> None:
        assert isinstance(state["place"], tuple)
        self.k = state["place"][0]


def test_lane_iterators_with_tuples_in_their_state() -> None:
    assert check_resumable(Records) == STEPS + 1


def test_a_grain_dataset_is_iterated_and_checked() -> None:
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(20).shuffle(seed=3).to_iter_dataset().filter(lambda x: x % 3 > 0).batch(4)
    assert check_resumable(lambda: dataset) == 4 + 1
