"""The local iterator as checkpoint code of Orbax, Grain and MaxText uses it: at the last delivered batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh
from orbax.checkpoint import v1

import meshfeed
from meshfeed.maxtext import MultiHostDataLoadIterator, RemoteIterator

FILE = "process_0-of-1.json"


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def pipeline() -> Any:
    return grain.MapDataset.range(320).shuffle(seed=3).to_iter_dataset().batch(8)


def loader_with_bytes() -> Any:
    """Grain's DataLoader, whose state is bytes."""
    sampler = grain.samplers.IndexSampler(
        320, num_epochs=1, seed=3, shuffle=True, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 320, 1),
        sampler=sampler,
        operations=[grain.transforms.Batch(8)],
        worker_count=0,
    )


def packed() -> Any:
    """A pipeline whose state holds tuples, which Grain's own files keep as lists."""
    documents = grain.MapDataset.range(400).map(lambda i: {"x": np.full(5, i, np.int32)})
    return grain.experimental.ConcatThenSplitIterDataset(
        documents.to_iter_dataset(), length_struct={"x": 10}, split_full_length_features=False
    ).batch(8)


PIPELINES = [pipeline, loader_with_bytes, packed]


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), left, right)


class Own:
    """A loader with a state that JSON alone would change: tuples and bytes."""

    def __init__(self) -> None:
        self.at, self.notes = 0, "kept"

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> Any:
        self.at += 1
        return np.full((8, 2), self.at, np.int32)

    def get_state(self) -> Any:
        return {"at": (self.at, b"x"), "remainder_slices": [1, 2]}

    def set_state(self, state: Any) -> None:
        (self.at, mark), slices = state["at"], state["remainder_slices"]
        assert mark == b"x"
        assert slices == [1, 2]


class Restartable:
    """Has no state."""

    def __iter__(self) -> Iterator[Any]:
        return (np.full((8, 2), number + 1, np.int32) for number in range(40))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("make", PIPELINES)
def test_orbax_v1_stores_the_last_delivered_batch_in_grains_file(
    mesh: Mesh, make: Callable[[], Any], tmp_path: Path
) -> None:
    own = iter(make())
    with MultiHostDataLoadIterator(make(), mesh) as loader:
        for _ in range(3):
            assert_same(next(loader), next(own))
        v1.save_checkpointables(tmp_path / "ours", {"iter": loader.local_iterator})
        v1.save_checkpointables(tmp_path / "grains", {"iter": own})
        text = (tmp_path / "grains" / "iter" / FILE).read_text()
        assert (tmp_path / "ours" / "iter" / FILE).read_text() == text
        rest = [next(own) for _ in range(4)]
        for name in ("ours", "grains"):
            next(loader)
            v1.load_checkpointables(tmp_path / name, {"iter": loader.local_iterator})
            for batch in rest:
                assert_same(next(loader), batch)
    if make is not packed:  # whose own files Grain continues wrongly
        again = iter(make())
        v1.load_checkpointables(tmp_path / "ours", {"iter": again})
        assert_same(next(again), rest[0])


@pytest.mark.parametrize("make", PIPELINES)
def test_grains_handler_saves_and_restores_it(mesh: Mesh, make: Callable[[], Any], tmp_path: Path) -> None:
    with MultiHostDataLoadIterator(make(), mesh) as loader, ocp.CheckpointManager(tmp_path) as manager:
        for _ in range(3):
            next(loader)
        manager.save(3, args=grain.checkpoint.CheckpointSave(loader.local_iterator))
        manager.wait_until_finished()
        rest = [next(loader) for _ in range(4)]
        restored = manager.restore(3, args=grain.checkpoint.CheckpointRestore(loader.local_iterator))
        assert restored is loader.local_iterator
        for batch in rest:
            assert_same(next(loader), batch)


@pytest.mark.parametrize("make", [Own, Restartable, lambda: [Own(), Own()]])
def test_loaders_that_are_not_grains_are_saved_exactly(mesh: Mesh, make: Callable[[], Any], tmp_path: Path) -> None:
    factor = 0.5 if isinstance(make(), list) else -1
    with MultiHostDataLoadIterator(make(), mesh, False, factor) as loader:
        for _ in range(3):
            next(loader)
        v1.save_checkpointables(tmp_path / "saved", {"iter": loader.local_iterator})
        rest = [next(loader) for _ in range(4)]
    with MultiHostDataLoadIterator(make(), mesh, False, factor) as fresh:
        v1.load_checkpointables(tmp_path / "saved", {"iter": fresh.local_iterator})
        for batch in rest:
            assert_same(next(fresh), batch)


def test_the_state_is_taken_when_save_is_called_and_the_file_written_later(mesh: Mesh, tmp_path: Path) -> None:
    class Folder:
        async def await_creation(self) -> Any:
            (tmp_path / "made").mkdir()
            return tmp_path / "made"

    async def save() -> None:
        writing = await loader.local_iterator.save(Folder())
        next(loader)
        assert not list(tmp_path.iterdir())
        await writing

    with MultiHostDataLoadIterator(pipeline(), mesh) as loader:
        next(loader)
        asyncio.run(save())
    assert json.loads((tmp_path / "made" / FILE).read_text()) == {"next_index": 8}


def test_a_missing_file_says_what_to_do_and_moves_nothing(mesh: Mesh, tmp_path: Path) -> None:
    async def load() -> None:
        await (await loader.local_iterator.load(tmp_path))

    with MultiHostDataLoadIterator(pipeline(), mesh) as loader:
        next(loader)
        for problem, error in (("does not exist", FileNotFoundError), ("damaged", meshfeed.StateMismatchError)):
            with pytest.raises(error, match=rf"{FILE}.*{problem}"):
                asyncio.run(load())
            (tmp_path / FILE).write_text('{"next_in')
        assert loader.local_iterator.get_state() == {"next_index": 8}


def test_a_remote_iterators_file_is_grains(mesh: Mesh, tmp_path: Path) -> None:
    for make in PIPELINES:
        path = tmp_path / make.__name__
        dummy = jax.device_put(np.zeros(8), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
        remote = RemoteIterator(
            lambda make=make, **_: make(), lambda dataset: dataset, global_shape=None, checkpoint_path=path
        )
        own = iter(make())
        for _ in range(3):
            assert_same(remote.get_next(dummy), next(own))
        remote.save_state(np.array([3]))
        v1.save_checkpointables(path / "grains", {"iter": own})
        assert (path / "3" / "iter" / FILE).read_text() == (path / "grains" / "iter" / FILE).read_text()
        next_one = next(own)
        remote.get_next(dummy)
        remote.restore_state(np.array([3]))
        assert_same(remote.get_next(dummy), next_one)
        remote.close()


def test_a_feeds_local_iterator_is_saved_by_orbax_v1(mesh: Mesh, tmp_path: Path) -> None:
    with meshfeed.Feed(np.arange(320), mesh, global_batch_size=8, shuffle=True) as feed:
        for _ in range(3):
            next(feed)
        v1.save_checkpointables(tmp_path / "saved", {"iter": feed.local_iterator})
        batch = np.asarray(next(feed))
        next(feed)
        v1.load_checkpointables(tmp_path / "saved", {"iter": feed.local_iterator})
        assert_same(next(feed), batch)


# ---------------------------------------------------------------------- other names


def test_methods_that_could_move_the_loader_are_refused_by_name(mesh: Mesh) -> None:
    class Moving(Own):
        def skip(self, batches: int) -> None:
            self.at += batches

        state_dict = Own.get_state

    with MultiHostDataLoadIterator(Moving(), mesh) as loader:
        next(loader)
        view = loader.local_iterator
        for name in ("skip", "state_dict"):
            with pytest.raises(AttributeError, match=rf"Moving\.{name}\(\).*get_state"):
                getattr(view, name)
            assert not hasattr(view, name)
        assert view.notes == "kept"
        assert view.get_state()["at"][0] == 1
    generator = (np.zeros((8, 2)) for _ in range(3))
    with MultiHostDataLoadIterator(generator, mesh) as loader:
        next(loader)
        for name in ("send", "throw"):
            assert not hasattr(loader.local_iterator, name)


def test_close_of_the_local_iterator_closes_the_loader(mesh: Mesh) -> None:
    loader = MultiHostDataLoadIterator(pipeline(), mesh)
    next(loader)
    loader.local_iterator.close()
    with pytest.raises(meshfeed.MeshfeedError, match="closed"):
        next(loader)
    assert loader.local_iterator.get_state() == {"next_index": 8}


# ---------------------------------------------------------------------- iterators that iter() does not start again


def elastic() -> Any:
    """Grain's ElasticIterator, whose ``iter()`` gives the same iterator each time, but not itself."""
    numbers = grain.MapDataset.range(320).shuffle(seed=3)
    return grain.experimental.ElasticIterator(numbers, 8, grain.sharding.ShardOptions(0, 1))


def test_an_elastic_iterator_goes_on_after_the_last_delivered_batch(mesh: Mesh) -> None:
    expected = [np.asarray(batch) for batch in elastic()]
    with MultiHostDataLoadIterator(elastic(), mesh) as loader:
        for batch in expected[:3]:
            assert_same(next(loader), batch)
        state = loader.local_iterator.get_state()
        assert state == {"global_next_index": 24}
        for batch in expected[3:6]:
            assert_same(next(loader), batch)
        loader.reset()
        for batch in expected[6:9]:
            assert_same(next(loader), batch)
        loader.local_iterator.set_state(state)
        assert_same(next(loader), expected[3])
    with meshfeed.Feed(meshfeed.sources.HostBatches(elastic()), mesh) as feed:
        for batch in expected[:3]:
            assert_same(next(feed), batch)
        saved = feed.get_state()
        for batch in expected[3:6]:
            assert_same(next(feed), batch)
        feed.set_state(saved)
        assert_same(next(feed), expected[3])
        feed.reset()
        assert_same(next(feed), expected[0])
