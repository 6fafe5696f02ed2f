"""The conformance check on every kind of source and pipeline through the feed, over two epochs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

sys.path.insert(0, str(Path(__file__).parent.parent / "multihost"))
sys.path.insert(0, str(Path(__file__).parent.parent / "feed"))

import tf_pipelines
from forced_numbers import PlacesHere
from format_files import FOLDER
from source_pipelines import BATCH, NAMES, STREAMS, make_feed, write_files

import meshfeed
from meshfeed._src.feed.sizing import Numbers
from meshfeed.testing import check_resumable


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("datasets")
    path = tmp_path_factory.mktemp("files")
    write_files(str(path))
    return str(path)


# A lane without a record would be repeated for ever; and Grain shuffles a window in a second.
ONE_EPOCH = ("grain filter", "grain iter filter", "grain window shuffle", "hf json", "hf csv", "hf text")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sources_and_pipelines(name: str, folder: str) -> None:
    epochs = 1 if name in ONE_EPOCH else 2
    points = [] if name == "grain window shuffle" else [2, 5]
    found = check_resumable(lambda: make_feed(name, folder, num_epochs=epochs), max_steps=26, save_points=points)
    assert found == len(points) + 2


def check_places(make: Callable[..., Any], changes: int) -> None:
    """Compares a feed whose lanes change places every few steps with one that reads them where they are.

    Args:
      make: makes the feed.
      changes: how often they do at least; 0 if they have no state and stay.
    """

    def values(feed: Any) -> list[Any]:
        return [[np.asarray(leaf).tolist() for leaf in jax.tree.leaves(batch)] for batch in feed]

    with make() as feed:
        expected = values(feed)
    with make(num_workers="auto", prefetch=0) as feed:
        forced = PlacesHere(feed, [Numbers(2, 1, 0), Numbers(0, 1, 0), Numbers(3, 1, 0)])
        found = []
        for batch in feed:
            found += values([batch])
            coming = feed._pipeline._reader._places._coming
            if coming is not None and coming._going is not None:
                coming._going.wait()
    assert found == expected
    assert len(forced.used) > changes
    assert ("num_workers" in forced.reads.unchangeable) == (not changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_lanes_of_sources_and_pipelines_change_places(name: str, folder: str) -> None:
    epochs = 1 if name in ONE_EPOCH else 4
    changes = 0 if name == "stream without state" else min(epochs, 2)
    check_places(lambda **options: make_feed(name, folder, num_epochs=epochs, **options), changes)


def write_parquet(folder: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "rows.parquet"
    if not path.exists():
        pq.write_table(pa.table({"x": list(range(17))}), path, row_group_size=4)
    return path


FORMATS: dict[str, Callable[[Path], Any]] = {
    "mds": lambda folder: meshfeed.sources.MDS(folder / "mds", ["int64", "array_f32_2x3"]),
    "parquet": lambda folder: meshfeed.sources.Parquet(write_parquet(folder)),
    "webdataset": lambda folder: meshfeed.sources.WebDataset(
        f"{folder}/tar/shard-*.tar", lambda record: {"x": int(record["cls"])}
    ),
}


@pytest.fixture(scope="module")
def tf_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    pytest.importorskip("tensorflow")
    pytest.importorskip("tensorflow_datasets")
    path = tmp_path_factory.mktemp("tf")
    tf_pipelines.write_files(str(path))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", tf_pipelines.NAMES)
def test_tfds_and_tf_data(name: str, tf_folder: str) -> None:
    lanes = {} if name in tf_pipelines.RANDOM else {"num_lanes": 2}  # a lane takes 30 ms to open

    def feed() -> Any:
        return tf_pipelines.make_feed(name, tf_folder, jax.devices(), num_epochs=2, **lanes)

    assert check_resumable(feed, max_steps=26, save_points=[3]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in tf_pipelines.NAMES if name not in tf_pipelines.RANDOM])
def test_lanes_of_tfds_and_tf_data_change_places(name: str, tf_folder: str) -> None:
    def feed(**options: Any) -> Any:
        return tf_pipelines.make_feed(name, tf_folder, jax.devices(), num_epochs=4, num_lanes=2, **options)

    check_places(feed, 0 if name == "generator" else 2)  # tf.data has no state of a generator


@pytest.mark.parametrize("make", FORMATS.values(), ids=list(FORMATS))
def test_formats_that_other_libraries_wrote(make: Callable[[Path], Any], tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    folder = shutil.copytree(FOLDER, tmp_path / "formats")

    def feed() -> Any:
        return meshfeed.Feed(make(folder), mesh, global_batch_size=3, shuffle=True, num_epochs=2)

    assert check_resumable(feed, save_points=[2, 5]) == 4


class Restartable:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(7):
            yield {"x": np.arange(BATCH) + BATCH * i}


class Stateful:
    """One-shot, with a state of its own."""

    def __init__(self) -> None:
        self.batches, self.place = list(Restartable()), 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.place == len(self.batches):
            raise StopIteration
        self.place += 1
        return self.batches[self.place - 1]

    def get_state(self) -> Any:
        return {"place": (self.place, b"x")}

    def set_state(self, state: Any) -> None:
        self.place = state["place"][0]


def grain_loader() -> Any:
    grain = pytest.importorskip("grain")
    sampler = grain.samplers.IndexSampler(
        num_records=7 * BATCH, num_epochs=1, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=3
    )
    return grain.DataLoader(
        data_source=range(7 * BATCH), sampler=sampler, operations=[grain.transforms.Batch(BATCH, drop_remainder=True)]
    )


def grain_batches() -> Any:
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(9 * BATCH).shuffle(seed=2).to_iter_dataset().filter(lambda x: x % 5 != 0)
    return iter(dataset.batch(BATCH, drop_remainder=True))


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "make", [lambda: list(Restartable()), Restartable, Stateful, grain_loader, grain_batches],
    ids=["list", "iterable", "stateful", "grain loader", "grain iterator"],
)  # fmt: skip
def test_batches_of_the_host(make: Callable[[], Any], prefetch: int) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def feed() -> Any:
        batches = meshfeed.sources.HostBatches(make())
        return meshfeed.MultiHostDataLoadIterator(batches, mesh, prefetch=prefetch, num_epochs=2)

    assert check_resumable(feed, save_points=[1, 6, 9]) == 5
