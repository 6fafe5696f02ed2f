"""meshfeed.maxtext in one process: each behaviour of MaxText's loader, and what was broken there."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from interrupts import interrupted
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import meshfeed
from meshfeed import maxtext
from meshfeed._src.base.threads import Threads
from meshfeed._src.feed import generations
from meshfeed.maxtext import MultiHostDataLoadIterator, RemoteIterator, RemoteIteratorWrapper

AUTO = (AxisType.Auto, AxisType.Auto)


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)


def batch_of(number: int, rows: int = 16) -> dict[str, Any]:
    return {"x": np.full((rows, 3), number, np.int32), "deep": [{"y": np.arange(rows, dtype=np.float32) + number}]}


def numbers(batches: Any) -> list[int]:
    return [int(np.asarray(batch["x"])[0, 0]) for batch in batches]


class Restartable:
    """Starts again at each iter(); has no state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (batch_of(number) for number in range(self.count))


class WithLiveState:
    """Read once; its state is the object that it changes."""

    def __init__(self, count: int) -> None:
        self.count, self.state = count, {"at": 0}

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.state["at"] == self.count:
            raise StopIteration
        self.state["at"] += 1
        return batch_of(self.state["at"] - 1)

    def get_state(self) -> dict[str, int]:
        return self.state

    def set_state(self, state: dict[str, int]) -> None:
        self.state = state


class WithState:
    """An iterator like Grain's: read once, with a state; tuples in it must come back as tuples."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> WithState:
        return self

    def __next__(self) -> Any:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return batch_of(self.at - 1)

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at, "pair": (self.at, "x")}

    def set_state(self, state: Any) -> None:
        assert isinstance(state["pair"], tuple)
        self.at = state["at"]


# ---------------------------------------------------------------------- batches


def test_rows_lie_over_all_axes_in_the_order_of_the_mesh() -> None:
    devices = np.array(jax.devices())[::-1].reshape(2, 4)  # the other way round than local_devices
    loader = MultiHostDataLoadIterator([batch_of(5)], Mesh(devices, ("data", "model"), axis_types=AUTO))
    batch = next(loader)
    assert batch["x"].sharding.spec == PartitionSpec(("data", "model"))
    np.testing.assert_array_equal(np.asarray(batch["deep"][0]["y"]), np.arange(16) + 5)
    for shard in batch["deep"][0]["y"].addressable_shards:
        place = devices.reshape(-1).tolist().index(shard.device)
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(2) + 2 * place + 5)
    loader.close()


def test_iter_resets_a_loader_that_starts_again(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(Restartable(4), mesh)
    assert numbers([next(loader), next(loader)]) == [0, 1]
    assert numbers(loader) == [0, 1, 2, 3]
    with pytest.raises(StopIteration) as end:
        next(loader)
    (note,) = end.value.__notes__
    assert note.startswith(f"{loader.name} ended at step 4; iter() starts a loader again")
    assert numbers(loader) == [0, 1, 2, 3]
    loader.reset()
    assert numbers([next(loader)]) == [0]


def test_a_reset_before_the_first_batch_drops_the_read_ahead_only(mesh: Mesh) -> None:
    source = WithLiveState(6)
    with MultiHostDataLoadIterator(source, mesh) as loader:
        loader.start()
        while not source.state["at"]:
            time.sleep(0.01)
        assert numbers(loader) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["generator", "with state"])
def test_iter_goes_on_after_the_last_delivered_batch_of_what_is_read_once(mesh: Mesh, kind: str) -> None:
    source = WithState(6) if kind == "with state" else (batch_of(number) for number in range(6))
    loader = MultiHostDataLoadIterator(source, mesh)
    assert numbers([next(loader), next(loader)]) == [0, 1]
    assert numbers(loader) == [2, 3, 4, 5]  # none of those that were read ahead is lost
    loader.reset()
    with pytest.raises(StopIteration):
        next(loader)


def test_what_is_read_once_goes_back_to_the_last_delivered_batch_and_no_further(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator((batch_of(number) for number in range(4)), mesh)
    assert numbers(loader) == [0, 1, 2, 3]
    for batches in (0, 1, 2):  # nobody has kept the batches after these
        with pytest.raises(meshfeed.StateMismatchError, match="It can be read only once"):
            loader.local_iterator.set_state({"batches": batches})
    loader.local_iterator.set_state({"batches": 3})
    assert numbers([next(loader)]) == [3]
    with pytest.raises(meshfeed.StateMismatchError, match="It can be read only once"):
        loader.local_iterator.set_state({"batches": 5})


def test_what_can_be_read_only_once_says_so_before_it_is_saved(mesh: Mesh) -> None:
    for source in (Restartable(2), WithState(2), [batch_of(0)]):
        with MultiHostDataLoadIterator(source, mesh) as loader:
            assert loader.cannot_resume is None
    with MultiHostDataLoadIterator((batch_of(number) for number in range(2)), mesh) as loader:
        assert loader.cannot_resume is not None
        assert loader.cannot_resume.startswith(
            "the batches come from a generator, which can be read only once. Pass an"
        )


def test_zero_batches_for_ever_after_the_end(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(Restartable(2), mesh, generate_padding_batch=True)
    real = [next(loader), next(loader)]
    assert not loader.out_of_data
    assert numbers([loader.last_local_data]) == [1]
    for _ in range(3):
        zeros = next(loader)
        assert loader.out_of_data
        jax.tree.map(np.testing.assert_array_equal, loader.last_local_data, jax.tree.map(np.zeros_like, batch_of(1)))
        assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), zeros) == jax.tree.map(
            lambda a: (a.shape, a.dtype, a.sharding), real[1]
        )
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(zeros))
        jax.tree.map(lambda leaf: leaf.delete(), zeros)  # as a donating step does
    loader.reset()
    assert (loader.out_of_data, loader.last_local_data) == (False, None)
    assert numbers([next(loader), next(loader), next(loader)]) == [0, 1, 0]


@pytest.mark.parametrize("source", [WithState, Restartable])
def test_a_state_of_the_end_goes_on_with_zero_batches(mesh: Mesh, source: Any) -> None:
    loader = MultiHostDataLoadIterator(source(2), mesh, generate_padding_batch=True)
    real = [next(loader), next(loader)]
    next(loader)
    local_state, state = loader.local_iterator.get_state(), loader.get_state()
    for set_it in (lambda new: new.local_iterator.set_state(local_state), lambda new: new.set_state(state)):
        fresh = MultiHostDataLoadIterator(source(2), mesh, generate_padding_batch=True)
        set_it(fresh)
        for _ in range(2):
            zeros = next(fresh)
            assert jax.tree.map(lambda a: (a.shape, a.dtype), zeros) == jax.tree.map(
                lambda a: (a.shape, a.dtype), real[1]
            )
            assert not np.asarray(zeros["x"]).any()
        assert fresh.local_iterator.get_state() == local_state  # the look at the shape has moved nothing
        set_it(fresh)
        assert fresh.get_state()["position"] in (0, 32)


def test_a_state_of_another_kind_changes_nothing(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(WithState(6), mesh)
    assert numbers([next(loader), next(loader)]) == [0, 1]
    with meshfeed.MultiHostDataLoadIterator({"x": np.arange(64)}, mesh, global_batch_size=8) as feed:
        other = feed.get_state()
    for state in (other, {**loader.get_state(), "hosts": {}}, {}):
        with pytest.raises(meshfeed.StateMismatchError):
            loader.set_state(state)
    assert (loader.step, loader.local_iterator.get_state()["at"]) == (2, 2)
    assert numbers([next(loader)]) == [2]


def test_a_state_behind_the_end_of_a_loader_is_refused(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(Restartable(2), mesh)
    with pytest.raises(meshfeed.StateMismatchError, match="ends earlier"):
        loader.local_iterator.set_state({"batches": 3})
    assert numbers([next(loader)]) == [0]


def test_a_state_that_one_of_several_loaders_refuses_changes_none(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator([WithState(3), WithState(3)], mesh, False, 0.5)
    next(loader)
    with pytest.raises(KeyError, match="at"):
        loader.local_iterator.set_state({"batches": 4, "iterators": [{"at": 2, "pair": ()}, {"pair": ()}]})
    assert numbers(loader) == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("loader", [[], iter([])], ids=["list", "iterator"])
def test_no_data_is_the_end_or_with_padding_a_value_error(mesh: Mesh, loader: Any) -> None:
    with MultiHostDataLoadIterator(loader, mesh) as batches:
        assert [list(batches), list(batches)] == [[], []]
    with MultiHostDataLoadIterator(loader, mesh, generate_padding_batch=True) as batches:
        for _ in range(2):
            with pytest.raises(ValueError, match="no host has a single batch"):
                next(batches)


def test_a_loader_at_its_end_is_not_one_without_data(mesh: Mesh) -> None:
    with MultiHostDataLoadIterator(iter([batch_of(0)]), mesh) as batches:
        assert numbers(list(batches)) == [0]
        assert list(batches) == []  # iter() resets, and an iterator that can be read once goes on
        state = batches.local_iterator.get_state()
    with MultiHostDataLoadIterator([batch_of(0)], mesh) as batches:
        batches.local_iterator.set_state(state)
        with pytest.raises(StopIteration):
            next(batches)


def test_a_batch_that_devices_cannot_share_is_a_value_error_with_the_leafs_path(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator([batch_of(0), batch_of(1, rows=12)], mesh)
    assert numbers([next(loader)]) == [0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\(12, 3\) with local device count 8 at \['x'\]|\['deep'\]"):
            next(loader)


def test_a_shorter_last_batch_that_devices_can_share_is_delivered(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator([batch_of(0), batch_of(1, rows=8)], mesh)
    assert [batch["x"].shape for batch in loader] == [(16, 3), (8, 3)]
    assert loader.position == 24


def test_a_state_after_batches_of_several_sizes_is_taken_again(mesh: Mesh) -> None:
    sizes = [8, 16, 16, 8]
    loader = MultiHostDataLoadIterator([batch_of(n, rows) for n, rows in enumerate(sizes)], mesh)
    assert numbers([next(loader) for _ in range(3)]) == [0, 1, 2]
    again = MultiHostDataLoadIterator([batch_of(n, rows) for n, rows in enumerate(sizes)], mesh)
    again.set_state(loader.get_state())
    assert (again.step, again.position) == (3, 40)
    assert numbers([next(again)]) == [3]
    assert again.position == 48


def test_64_bit_integers_are_narrowed_or_refused(mesh: Mesh) -> None:
    rows = np.arange(8, dtype=np.int64)
    assert next(MultiHostDataLoadIterator([{"x": rows}], mesh))["x"].dtype == np.int32
    with pytest.raises(meshfeed.SourceError, match=r"\['x'\]"):
        next(MultiHostDataLoadIterator([{"x": rows + 2**40}], mesh))


def test_what_a_loader_writes_later_does_not_show(mesh: Mesh) -> None:
    class Refilling:
        def __iter__(self) -> Iterator[Any]:
            buffer = np.zeros((16, 64), np.int32)
            for number in range(5):
                buffer[...] = number
                yield {"x": buffer}

    kept = list(MultiHostDataLoadIterator(Refilling(), mesh))
    assert [set(np.asarray(batch["x"]).reshape(-1).tolist()) for batch in kept] == [{n} for n in range(5)]


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_a_loader_that_is_no_iterable_is_a_value_error(mesh: Mesh, wrong: Any) -> None:
    with pytest.raises(ValueError, match="dataloader should be either"):
        MultiHostDataLoadIterator(wrong, mesh)


def test_what_has_as_numpy_iterator_is_read_by_it(mesh: Mesh) -> None:
    class Dataset:
        def as_numpy_iterator(self) -> Iterator[Any]:
            return iter([batch_of(1), batch_of(2)])

    loader = MultiHostDataLoadIterator(Dataset(), mesh)
    assert numbers(loader) == [1, 2]
    assert numbers(loader) == [1, 2]


# ---------------------------------------------------------------------- factors


@pytest.mark.parametrize("factor", [2, 2.0, np.float32(2)])
def test_a_factor_above_one_joins_batches(mesh: Mesh, factor: Any) -> None:
    loader = MultiHostDataLoadIterator(Restartable(5), mesh, expansion_loading_factor_for_grain=factor)
    batches = list(loader)  # the fifth has no partner and is left out, as in MaxText
    assert [np.asarray(batch["x"])[:, 0].tolist() for batch in batches] == [[0] * 16 + [1] * 16, [2] * 16 + [3] * 16]


def test_a_factor_below_one_takes_a_list_of_loaders_in_turns(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator([WithState(3), WithState(3)], mesh, expansion_loading_factor_for_grain=0.5)
    assert numbers([next(loader) for _ in range(3)]) == [0, 0, 1]
    state = loader.local_iterator.get_state()
    assert [one["at"] for one in state["iterators"]] == [2, 1]
    rest = numbers(loader)
    assert rest == [1, 2, 2]
    again = MultiHostDataLoadIterator([WithState(3), WithState(3)], mesh, expansion_loading_factor_for_grain=0.5)
    again.local_iterator.set_state(state)
    assert numbers(again) == rest


def test_a_list_of_iterators_as_maxtext_keeps_it(mesh: Mesh) -> None:
    loaders = [MultiHostDataLoadIterator(WithState(3), mesh, False, 0.5) for _ in range(2)]
    assert [numbers([next(loaders[turn % 2])])[0] for turn in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("factor", [2.5, "2", True, None, math.nan])
def test_a_factor_that_cannot_be_used_is_refused(mesh: Mesh, factor: Any) -> None:
    with pytest.raises(meshfeed.SettingsError, match="expansion_loading_factor_for_grain"):
        MultiHostDataLoadIterator(Restartable(1), mesh, expansion_loading_factor_for_grain=factor)


def test_what_is_not_a_mesh_is_refused_by_its_name(mesh: Mesh) -> None:
    for wrong in (None, NamedSharding(mesh, PartitionSpec("data"))):
        with pytest.raises(meshfeed.SettingsError, match=r"global_mesh=.*\. Expected a Mesh"):
            MultiHostDataLoadIterator(Restartable(1), wrong)  # type: ignore[arg-type]


def test_a_batch_that_is_one_number_is_named(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"shape \(\) with local device count 8 at the only leaf: its rows must be a"):
        next(MultiHostDataLoadIterator([3], mesh))


def test_a_factor_below_one_says_how_many_loaders_it_wants(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="expected 4 of them"):
        MultiHostDataLoadIterator([WithState(1), WithState(1)], mesh, expansion_loading_factor_for_grain=0.25)


# ---------------------------------------------------------------------- state


def test_local_iterator_is_at_the_last_delivered_batch_in_spite_of_read_ahead(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(WithState(9), mesh)
    assert loader.local_iterator.get_state() == {"at": 0, "pair": (0, "x")}
    for number in range(4):
        next(loader)
        assert loader.local_iterator.get_state() == {"at": number + 1, "pair": (number + 1, "x")}
        assert loader.last_local_data is not None
        assert loader.last_local_data["x"][0, 0] == number
    assert isinstance(loader.local_iterator, WithState)  # as checkpoint code asks for grain.DatasetIterator
    assert loader.local_iterator.count == 9


@pytest.mark.parametrize("source", [WithState, Restartable])
def test_set_state_of_local_iterator_discards_the_read_ahead(mesh: Mesh, source: Any) -> None:
    loader = MultiHostDataLoadIterator(source(9), mesh)
    next(loader)
    state = loader.local_iterator.get_state()
    assert numbers([next(loader), next(loader)]) == [1, 2]
    loader.local_iterator.set_state(state)
    assert numbers([next(loader), next(loader)]) == [1, 2]
    fresh = MultiHostDataLoadIterator(source(9), mesh)
    fresh.local_iterator.set_state(state)
    assert numbers([next(fresh) for _ in range(8)]) == list(range(1, 9))
    with pytest.raises(StopIteration):
        next(fresh)


@pytest.mark.parametrize("state", [[1], None, "x", {"a": 1}, {"batches": None}, 5], ids=repr)
def test_a_state_that_no_loader_has_is_refused_and_changes_nothing(mesh: Mesh, state: Any) -> None:
    loader = MultiHostDataLoadIterator(Restartable(4), mesh)
    next(loader)
    with pytest.raises(meshfeed.StateMismatchError, match=r"'hosts'.*The state is damaged; use another\."):
        loader.local_iterator.set_state(state)
    assert numbers([next(loader), next(loader)]) == [1, 2]


def test_next_of_local_iterator_keeps_both_in_step(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(WithState(4), mesh)
    assert next(loader.local_iterator)["x"][0, 0] == 0
    assert numbers([next(loader)]) == [1]


@pytest.mark.parametrize("source", [WithState, Restartable])
def test_its_own_state_goes_through_the_checkpointer(mesh: Mesh, source: Any, tmp_path: Path) -> None:
    loader = MultiHostDataLoadIterator(source(6), mesh)
    start = loader.get_state()
    next(loader)
    next(loader)
    with meshfeed.checkpoint.Checkpointer(tmp_path, save_interval_steps=1) as checkpointer:
        checkpointer.save(2, {"w": np.ones(3)}, loader)
        next(loader)
        checkpointer.wait()
        fresh = MultiHostDataLoadIterator(source(6), mesh)
        checkpointer.restore({"w": np.ones(3)}, fresh)
    assert (fresh.step, fresh.position) == (2, 32)
    assert numbers([next(fresh) for _ in range(4)]) == [2, 3, 4, 5]
    fresh.set_state(start)
    assert numbers([next(fresh)]) == [0]


def test_grains_iterators_are_saved_as_its_own_handler_saves_them(mesh: Mesh) -> None:
    grain = pytest.importorskip("grain")

    def make() -> Any:
        dataset = grain.MapDataset.range(160).shuffle(seed=3).map(lambda i: {"x": np.full(3, i, np.int32)})
        return dataset.batch(16).to_iter_dataset()

    loader = MultiHostDataLoadIterator(make(), mesh)
    next(loader)
    assert isinstance(loader.local_iterator, grain.DatasetIterator)
    text = json.dumps(loader.local_iterator.get_state(), indent=4)  # MaxText's checkpoint code, for such an iterator
    rest = numbers([next(loader) for _ in range(9)])
    fresh = MultiHostDataLoadIterator(make(), mesh)
    fresh.local_iterator.set_state(json.loads(text))
    assert numbers([next(fresh) for _ in range(9)]) == rest


# ---------------------------------------------------------------------- errors of loaders


class NotReadyError(Exception):
    """Stands for tf.errors.FailedPreconditionError."""


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    fake: Any = types.ModuleType("tensorflow")
    fake.errors = types.SimpleNamespace(FailedPreconditionError=NotReadyError)
    monkeypatch.setitem(sys.modules, "tensorflow", fake)
    pauses: list[float] = []
    monkeypatch.setattr(
        "meshfeed._src.base.retry.time", types.SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    )
    return pauses


class Stumbling:
    """Fails ``fails`` times with ``error`` before batch 1."""

    def __init__(self, fails: float, error: Exception) -> None:
        self.fails, self.error, self.at = fails, error, 0

    def __iter__(self) -> Stumbling:
        return self

    def __next__(self) -> Any:
        if self.at == 1 and self.fails:
            self.fails -= 1
            raise self.error
        if self.at == 3:
            raise StopIteration
        self.at += 1
        return batch_of(self.at - 1)


def test_failed_precondition_is_waited_out(mesh: Mesh, tensorflow: list[float]) -> None:
    assert numbers(MultiHostDataLoadIterator(Stumbling(5, NotReadyError("not yet")), mesh)) == [0, 1, 2]
    assert len(tensorflow) == 5
    assert max(tensorflow) <= 10


def test_failed_precondition_thirty_times_is_a_timeout_error(mesh: Mesh, tensorflow: list[float]) -> None:
    loader = MultiHostDataLoadIterator(Stumbling(math.inf, NotReadyError("never")), mesh)
    next(loader)
    with pytest.raises(TimeoutError, match="Failed to load data after 30 retry attempts"):
        next(loader)
    assert len(tensorflow) == 29


def test_other_errors_are_not_retried_and_come_after_the_good_batches(mesh: Mesh, tensorflow: list[float]) -> None:
    loader = MultiHostDataLoadIterator(Stumbling(1, OSError("gone")), mesh)
    assert numbers([next(loader)]) == [0]
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            next(loader)
    assert not tensorflow


@pytest.mark.parametrize("with_state", [False, True])
def test_an_error_between_joined_batches_loses_none(mesh: Mesh, with_state: bool) -> None:
    class FailingOnce(WithState):
        failed = False

        def __next__(self) -> Any:
            if self.at == 3 and not self.failed:
                self.failed = True
                raise OSError("gone")
            return super().__next__()

    class Stateless:
        def __init__(self) -> None:
            self.iterator = FailingOnce(8)

        def __iter__(self) -> Stateless:
            return self

        def __next__(self) -> Any:
            return next(self.iterator)

    loader = MultiHostDataLoadIterator(FailingOnce(8) if with_state else Stateless(), mesh, False, 2)
    assert numbers([next(loader)]) == [0]
    with pytest.raises(OSError, match="gone"):
        next(loader)
    loader.reset()  # which goes on after the last delivered batch
    assert [np.asarray(batch["x"])[:, 0].tolist() for batch in (next(loader), next(loader))] == [
        [2] * 16 + [3] * 16,
        [4] * 16 + [5] * 16,
    ]


def test_a_generator_that_raised_raises_again_after_a_reset(mesh: Mesh) -> None:
    def read() -> Iterator[Any]:
        yield batch_of(0)
        raise OSError("gone")

    loader = MultiHostDataLoadIterator(read(), mesh, generate_padding_batch=True)
    assert numbers([next(loader)]) == [0]
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):  # asked again it says that the data has ended
            next(loader)
        loader.reset()


# ---------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("padding", [False, True])
def test_an_interrupt_in_next_loses_no_batch(mesh: Mesh, padding: bool) -> None:
    loader = MultiHostDataLoadIterator(WithState(1024), mesh, padding)
    at = point = 0
    while interrupted(lambda: next(loader), point):
        assert loader.local_iterator.get_state()["at"] == at, point
        assert (loader.step, loader.get_state()["step"], loader.position) == (at, at, 16 * at), point
        assert numbers([next(loader)]) == [at], point
        at, point = at + 1, point + 1
        assert loader.local_iterator.get_state()["at"] == at
        assert numbers([loader.last_local_data]) == [at - 1]
    assert point > 30


@pytest.mark.parametrize("own", [True, False], ids=["own state", "loader's state"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("source", [WithState, Restartable])
def test_an_interrupt_once_set_state_has_opened_the_data_changes_nothing(
    mesh: Mesh, source: Any, at: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MultiHostDataLoadIterator(source(9), mesh)
    assert numbers([next(other) for _ in range(5)]) == list(range(5))
    loader = MultiHostDataLoadIterator(source(9), mesh)
    assert numbers([next(loader) for _ in range(at)]) == list(range(at))
    before = loader.local_iterator.get_state()
    wait_until_open = generations.wait_until_open

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        wait_until_open(*args, **kwargs)
        raise KeyboardInterrupt

    resumed, saved = (loader, other) if own else (loader.local_iterator, other.local_iterator)
    state = saved.get_state()
    monkeypatch.setattr(generations, "wait_until_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resumed.set_state(state)
    monkeypatch.undo()
    assert (loader.step, loader.local_iterator.get_state(), loader.out_of_data) == (at, before, False)
    assert numbers(next(loader) for _ in range(3)) == [at, at + 1, at + 2]
    assert loader.local_iterator.get_state() in ({"batches": at + 3}, {"at": at + 3, "pair": (at + 3, "x")})
    assert numbers([loader.last_local_data]) == [at + 2]


def test_a_refused_state_of_the_loader_leaves_saved_states_right(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(WithState(64), mesh)
    for number in range(5):
        assert numbers([next(loader)]) == [number]
    with pytest.raises((KeyError, TypeError, meshfeed.StateMismatchError)):
        loader.local_iterator.set_state({"wrong": 1})
    for number in range(5, 9):
        assert numbers([next(loader)]) == [number]
        assert loader.local_iterator.get_state()["at"] == number + 1


# ---------------------------------------------------------------------- loaders that hang


class Hanging(WithState):
    """Hangs once before batch 2, until it is released. ``iter()`` starts again, unless it is ``read_once``."""

    def __init__(self, *, read_once: bool = False, hangs: Hanging | None = None) -> None:
        super().__init__(6)
        self.read_once = read_once
        self.entered = threading.Event() if hangs is None else hangs.entered
        self.released = threading.Event() if hangs is None else hangs.released
        self.closed: list[Hanging] = [] if hangs is None else hangs.closed

    def __iter__(self) -> Hanging:
        return self if self.read_once else Hanging(read_once=True, hangs=self)

    def __next__(self) -> Any:
        if self.at == 2 and not self.entered.is_set():
            self.entered.set()
            assert self.released.wait(100)
        return super().__next__()

    def close(self) -> None:
        self.closed.append(self)


@pytest.fixture
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setattr("meshfeed._src.base.read_ahead._JOIN_SECONDS", 0.1)
    made = Hanging(read_once=getattr(request, "param", False))
    yield made
    made.released.set()


def promptly(function: Any, *args: Any) -> Any:
    """What ``function`` gives or raises, in the time in which it must come although the loader hangs."""

    def deadline(waited: float) -> None:
        if waited > 20:
            raise TimeoutError(f"{function} has not returned after {waited:.0f} s")

    return Threads(1, "caller").submit(function, *args).result(deadline)


def test_what_is_ready_is_delivered_while_the_loader_hangs(mesh: Mesh, hanging: Hanging) -> None:
    loader = MultiHostDataLoadIterator(hanging, mesh)
    assert numbers([promptly(next, loader)]) == [0]
    assert hanging.entered.wait(60)  # in the read of batch 2
    assert numbers([promptly(next, loader)]) == [1]
    assert promptly(loader.local_iterator.get_state) == {"at": 2, "pair": (2, "x")}
    hanging.released.set()
    assert numbers([next(loader) for _ in range(4)]) == [2, 3, 4, 5]


def test_a_loader_that_hangs_longer_than_the_deadline_is_a_stalled_error(
    mesh: Mesh, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfeed._src.maxtext.loader._TIMEOUT_SECONDS", 1.0)
    loader = MultiHostDataLoadIterator(hanging, mesh)
    assert numbers([promptly(next, loader), promptly(next, loader)]) == [0, 1]
    with pytest.raises(meshfeed.StalledError, match="waiting for host batch 2"):
        promptly(next, loader)
    promptly(loader.close)


@pytest.mark.parametrize("go_back", ["set_state", "reset"])
def test_a_loader_that_starts_again_is_set_and_reset_while_it_hangs(mesh: Mesh, hanging: Hanging, go_back: str) -> None:
    loader = MultiHostDataLoadIterator(hanging, mesh)
    start = loader.local_iterator.get_state()
    assert numbers([promptly(next, loader)]) == [0]
    assert hanging.entered.wait(60)
    if go_back == "reset":
        promptly(loader.reset)
    else:
        promptly(loader.local_iterator.set_state, start)
    assert numbers([promptly(next, loader) for _ in range(6)]) == [0, 1, 2, 3, 4, 5]
    hanging.released.set()


@pytest.mark.parametrize("hanging", [True], indirect=True)
def test_a_state_of_a_loader_that_is_read_once_waits_for_it_with_a_deadline(
    mesh: Mesh, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshfeed._src.sources.host_batches._TURN_SECONDS", 0.2)
    loader = MultiHostDataLoadIterator(hanging, mesh)
    start = loader.local_iterator.get_state()
    assert numbers([promptly(next, loader)]) == [0]
    assert hanging.entered.wait(60)
    with pytest.raises(meshfeed.StalledError, match="another thread has been in next"):
        promptly(loader.local_iterator.set_state, start)
    hanging.released.set()
    monkeypatch.setattr("meshfeed._src.sources.host_batches._TURN_SECONDS", 60)
    assert numbers([promptly(next, loader)]) == [1]  # refused, so nothing has changed
    loader.local_iterator.set_state(start)
    assert numbers([promptly(next, loader) for _ in range(6)]) == [0, 1, 2, 3, 4, 5]


def test_close_does_not_wait_for_a_loader_that_hangs(mesh: Mesh, hanging: Hanging) -> None:
    loader = MultiHostDataLoadIterator(hanging, mesh)
    iterator = loader._local.iterators[0]
    assert numbers([promptly(next, loader)]) == [0]
    assert hanging.entered.wait(60)
    promptly(loader.close)
    assert not hanging.closed  # not while another thread is in it
    hanging.released.set()
    while not hanging.closed:
        time.sleep(0.01)
    assert hanging.closed == [iterator]


# ---------------------------------------------------------------------- remote iterators


def get_ds(dataloading_host_index: int, dataloading_host_count: int) -> range:
    return range(dataloading_host_index, 6 * dataloading_host_count, dataloading_host_count)


def get_many(dataloading_host_index: int, dataloading_host_count: int) -> range:
    return range(1024)


class Stateful:
    """A loader over a range whose iterators have a state."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> WithState:
        return WithState(len(self.dataset))


def test_remote_iterator_runs_through_colocated_python(mesh: Mesh, tmp_path: Path) -> None:
    wrapper = RemoteIteratorWrapper(get_ds, Stateful, mesh, (16, 99), str(tmp_path))
    assert wrapper.cpu_mesh == mesh
    assert list(wrapper.cpu_devices) == list(mesh.devices.flat)
    assert wrapper.tpu_sharding.spec == wrapper.cpu_sharding.spec == PartitionSpec(("data", "model"))
    first = [next(wrapper) for _ in range(3)]  # leaves of several shapes: only the rows of global_shape count
    assert numbers(first) == [0, 1, 2]
    assert first[0]["deep"][0]["y"].shape == (16,)
    wrapper.save_state(3)
    assert numbers(wrapper) == [3, 4, 5]
    with pytest.raises(StopIteration):
        next(wrapper)
    wrapper.restore_state(3)
    assert numbers(wrapper) == [3, 4, 5]
    wrapper.reset()
    assert numbers(wrapper) == [0, 1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "3" / "iter").iterdir()] == ["process_0-of-1.json"]
    wrapper.close()


class FailsAtFirst(WithState):
    """The first of these iterators cannot read its first batch at once."""

    failed = False

    def __next__(self) -> Any:
        if not self.failed:
            FailsAtFirst.failed = True  # where the batches are read
            raise OSError("the store was busy")
        return super().__next__()


class StatefulFailsAtFirst(Stateful):
    def __iter__(self) -> WithState:
        return FailsAtFirst(len(self.dataset))


def test_an_error_of_the_first_batch_that_passes_loses_no_batch(mesh: Mesh) -> None:
    wrapper = RemoteIteratorWrapper(get_ds, StatefulFailsAtFirst, mesh, (16, 99))
    assert numbers(wrapper) == [0, 1, 2, 3, 4, 5]
    wrapper.close()


def test_an_interrupt_of_the_remote_wrapper_loses_no_batch(mesh: Mesh, tmp_path: Path) -> None:
    wrapper = RemoteIteratorWrapper(get_many, Stateful, mesh, (16, 3), str(tmp_path), elastic=True)
    at = point = 0
    while interrupted(lambda: next(wrapper), point):
        if at % 2:
            wrapper.save_state(at)
            assert json.loads((tmp_path / str(at) / "iter" / "process_0.json").read_text())["at"] == at
        assert numbers([next(wrapper)]) == [at], point
        at, point = at + 1, point + 7
    assert point > 30
    wrapper.close()


def test_an_elastic_iterator_shares_one_file(mesh: Mesh, tmp_path: Path) -> None:
    wrapper = RemoteIteratorWrapper(get_ds, Stateful, mesh, (16, 3), str(tmp_path), elastic=True)
    next(wrapper)
    wrapper.save_state(np.int32(7))
    assert [path.name for path in (tmp_path / "7" / "iter").iterdir()] == ["process_0.json"]
    fresh = RemoteIteratorWrapper(get_ds, Stateful, mesh, (16, 3), str(tmp_path), elastic=True)
    fresh.restore_state(7)
    assert numbers([next(fresh)]) == [1]


def test_a_missing_state_is_an_error_and_not_a_fresh_start(mesh: Mesh, tmp_path: Path) -> None:
    wrapper = RemoteIteratorWrapper(get_ds, Stateful, mesh, (16, 3), str(tmp_path))
    next(wrapper)
    with pytest.raises(FileNotFoundError, match=r"99/iter/process_0-of-1\.json"):
        wrapper.restore_state(99)
    assert numbers([next(wrapper)]) == [1]


def test_remote_errors_come_with_type_and_message(mesh: Mesh) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        RemoteIteratorWrapper(lambda **_: 1 / 0, Stateful, mesh, (16, 3))
    wrapper = RemoteIteratorWrapper(get_ds, Stateful, mesh, (32, 3))
    with pytest.raises(ValueError, match=r"\['x'\]|\['deep'\]"):
        next(wrapper)
    with pytest.raises(ValueError, match="mesh has 8 devices"):
        RemoteIteratorWrapper(get_ds, Stateful, mesh, (20, 3))
    with pytest.raises(meshfeed.SettingsError, match="preprocessing_fn cannot be sent"):
        RemoteIteratorWrapper(get_ds, _Untransportable(), mesh, (16, 3))


class _Untransportable:
    def __call__(self, dataset: Any) -> Any:
        return dataset

    def __reduce__(self) -> Any:
        raise TypeError("holds an open socket")


def test_remote_iterator_by_itself(mesh: Mesh, tmp_path: Path) -> None:
    dummy = jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec(("data", "model"))))
    step = jax.device_put(np.int32(2), NamedSharding(mesh, PartitionSpec()))
    remote = RemoteIterator(get_ds, Stateful, (16, 3), str(tmp_path))
    assert numbers([remote.get_next(dummy), remote.get_next(dummy)]) == [0, 1]
    remote.save_state(step)
    assert numbers([remote.get_next(dummy)]) == [2]
    fresh = RemoteIterator(get_ds, Stateful, (16, 3), str(tmp_path))
    fresh.restore_state(step)
    assert numbers([fresh.get_next(dummy)]) == [2]
    fresh.reset()
    assert numbers([fresh.get_next(dummy)]) == [0]


def test_a_remote_iterator_whose_data_cannot_be_opened_again_keeps_its_place(mesh: Mesh, tmp_path: Path) -> None:
    broken = False

    def open_dataset(**how: Any) -> Any:
        if broken:
            raise OSError("unreachable")
        return get_ds(**how)

    flat = Mesh(mesh.devices.reshape(-1), ("data",), axis_types=(AxisType.Auto,))
    dummies = [
        jax.device_put(np.zeros(8), NamedSharding(each, PartitionSpec(each.axis_names))) for each in (mesh, flat)
    ]
    remote = RemoteIterator(open_dataset, Stateful, (16, 3), str(tmp_path))
    assert numbers([remote.get_next(dummies[0])]) == [0]
    broken = True
    with pytest.raises(OSError, match="unreachable"):
        remote.get_next(dummies[1])
    with pytest.raises(OSError, match="unreachable"):
        remote.reset()
    assert numbers([remote.get_next(dummies[0])]) == [1]
    broken = False
    assert numbers([remote.get_next(dummies[1]), remote.get_next(dummies[1])]) == [2, 3]
    remote.close()


def test_the_module_has_maxtexts_names() -> None:
    assert maxtext.__all__ == ["MultiHostDataLoadIterator", "RemoteIterator", "RemoteIteratorWrapper"]
