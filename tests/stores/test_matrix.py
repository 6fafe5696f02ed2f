"""What works in which object store: the table of docs/how-to/storage.md. Each cell runs, or names why it does not."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import click.testing
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from store_servers import STORES, Store, forget_clients, running

import meshfeed
from meshfeed._src.cli.main import main
from meshfeed._src.convert.run import convert, run_here
from meshfeed._src.convert.writers import Settings
from meshfeed._src.monitoring.exporters import read_logs
from meshfeed._src.sources.files.manifest import read_manifest
from meshfeed.checkpoint import Checkpointer
from meshfeed.sources import ArrayRecord, Parquet, Tokens

READ_ONLY = "read-only: the Hub takes a commit per file"
RECORDS = [np.full(64, number, np.int32).tobytes() for number in range(60)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=list(STORES))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with running(STORES[request.param]) as found:
        folder = tmp_path_factory.mktemp("data")
        for shard in range(2):
            writer = ArrayRecordWriter(str(folder / f"part-{shard}.array_record"), "group_size:1,uncompressed")
            for record in RECORDS[30 * shard : 30 * shard + 30]:
                writer.write(record)
            writer.close()
        pq.write_table(pa.table({"n": range(100)}), folder / "table.parquet", row_group_size=10)
        np.arange(1000, dtype=np.uint16).tofile(folder / "tokens.bin")
        for path in folder.iterdir():
            found.put(f"data/{path.name}", path.read_bytes())
        yield found


def lists(store: Store, folder: pathlib.Path) -> None:
    assert len(ArrayRecord(f"{store.root}/data/*.array_record")) == 60
    with pytest.raises(meshfeed.SourceError, match=f"no file matches '{store.root}/none/"):
        ArrayRecord(f"{store.root}/none/*.array_record")
    with pytest.raises(meshfeed.SourceError, match=f"there is no file '{store.root}/data/none.array_record'"):
        ArrayRecord(f"{store.root}/data/none.array_record")


def reads_directly(store: Store, folder: pathlib.Path) -> None:
    source = ArrayRecord(f"{store.root}/data/*.array_record")
    assert [source[number] for number in (59, 0, 31)] == [RECORDS[number] for number in (59, 0, 31)]
    assert Parquet(f"{store.root}/data/table.parquet")[77]["n"] == 77
    tokens = Tokens(f"{store.root}/data/tokens.bin", sequence_length=10, dtype=np.uint16)
    assert tokens[3]["tokens"].tolist() == list(range(30, 41))


def reads_through_a_cache(store: Store, folder: pathlib.Path) -> None:
    cache = meshfeed.ShardCache(folder / "cache")
    source = ArrayRecord(
        f"{store.root}/data/*.array_record", decode=lambda record: np.frombuffer(record, np.int32), cache=cache
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with meshfeed.Feed(source, mesh, global_batch_size=8, shuffle="shards", num_epochs=1, end="drop") as feed:
        seen = sorted(int(row[0]) for batch in feed for row in np.asarray(batch))
    assert len(seen) == len(set(seen)) == 56
    assert any((folder / "cache").iterdir())


def notices_a_change(store: Store, folder: pathlib.Path) -> None:
    url = store.put("changing/a.array_record", store.get("data/part-0.array_record"))
    assert ArrayRecord(url, cache=meshfeed.ShardCache(folder / "cache"))[0] == RECORDS[0]
    source = ArrayRecord(url)
    assert source[0] == RECORDS[0]
    store.put("changing/a.array_record", store.get("data/part-1.array_record"))
    if store.name == "hf":  # whose client keeps what it has listed until the process ends
        forget_clients()
    assert ArrayRecord(url, cache=meshfeed.ShardCache(folder / "cache"))[0] == RECORDS[30]  # not the copy in the folder
    if store.name in ("s3", "gs"):  # whose answers carry the version; others are looked up once a minute
        with pytest.raises(meshfeed.SourceError, match=r"changing/a\.array_record has changed since the source was"):
            source[1]


def writes_a_manifest(store: Store, folder: pathlib.Path) -> None:
    url = f"{store.root}/data/manifest.json"
    ended = click.testing.CliRunner().invoke(main, ["manifest", f"{store.root}/data/*.array_record", "--to", url])
    assert ended.exit_code == 0, ended.output
    assert [file.num_records for file in read_manifest(url).files] == [30, 30]
    assert ArrayRecord(url)[59] == RECORDS[59]


def converts_from_it(store: Store, folder: pathlib.Path) -> None:
    (folder / "table.parquet").write_bytes(store.get("data/table.parquet"))
    results = [
        convert([data], str(folder / name), Settings(shards=2), run_here)
        for data, name in ((f"{store.root}/data/table.parquet", "remote"), (str(folder / "table.parquet"), "local"))
    ]
    assert [result.num_records for result in results] == [100, 100]
    for path in (folder / "local").glob("data-*"):
        assert path.read_bytes() == (folder / "remote" / path.name).read_bytes()


def converts_to_it(store: Store, folder: pathlib.Path) -> None:
    (folder / "table.parquet").write_bytes(store.get("data/table.parquet"))
    data, settings = [str(folder / "table.parquet")], Settings(shards=3)
    convert(data, str(folder / "local"), settings, run_here)
    convert(data, f"{store.root}/converted", settings, run_here)
    assert store.objects("converted") == {path.name: path.read_bytes() for path in (folder / "local").iterdir()}
    assert convert(data, f"{store.root}/converted", settings, run_here).was_complete


def takes_logs(store: Store, folder: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    url = f"{store.root}/logs"
    with meshfeed.Feed({"x": np.arange(64)}, mesh, global_batch_size=8, num_epochs=None, name="train") as feed:
        with meshfeed.monitoring.log(feed, url, seconds=1000):
            next(feed)
            next(feed)
        feed.report(f"{store.root}/pages/report.html")
    assert [log.samples[-1].stats.batches for log in read_logs([url])] == [2]
    assert store.get("pages/report.html").startswith(b"<!DOCTYPE html>")


def keeps_checkpoints(store: Store, folder: pathlib.Path) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    url = f"{store.root}/run"

    def make() -> meshfeed.Feed:
        return meshfeed.Feed({"x": np.arange(64)}, mesh, global_batch_size=8, num_epochs=None, name="train")

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    state = {"w": jax.device_put(np.arange(64, dtype=np.float32), sharding), "n": np.arange(3)}
    with make() as feed, Checkpointer(url, max_to_keep=1, save_interval_steps=1) as checkpoints:
        for step in (1, 2):
            next(feed)
            assert checkpoints.save(step, state, feed)
    with make() as feed, Checkpointer(url) as checkpoints:
        empty = jax.tree.map(lambda leaf: leaf * 0, state)
        step, found = checkpoints.restore(empty, feed)
        assert (step, feed.step) == (2, 2)
        jax.tree.map(np.testing.assert_array_equal, found, state)
        assert checkpoints.steps() == [2]
    ended = click.testing.CliRunner().invoke(main, ["verify", url])
    assert ended.exit_code == 0, ended.output


def sees_new_files(store: Store, folder: pathlib.Path) -> None:
    pattern = f"{store.root}/growing/*.array_record"
    for number in (0, 1):
        store.put(f"growing/{number}.array_record", store.get(f"data/part-{number}.array_record"))
        if store.name == "hf":  # whose client keeps what it has listed until the process ends
            forget_clients()
        assert len(ArrayRecord(pattern)) == 30 * (number + 1)


CELLS: dict[str, Callable[[Store, pathlib.Path], None]] = {
    "list": lists,
    "new files": sees_new_files,
    "direct reads": reads_directly,
    "shard cache": reads_through_a_cache,
    "changed files": notices_a_change,
    "manifest": writes_a_manifest,
    "convert from": converts_from_it,
    "convert to": converts_to_it,
    "logs and pages": takes_logs,
    "checkpoints": keeps_checkpoints,
}
NOT_RUN = {("hf", name): READ_ONLY for name in ("manifest", "convert to", "logs and pages", "checkpoints")}
# TensorStore reads the address of the emulator from the environment when it is loaded.
NOT_RUN["gs", "checkpoints"] = "runs in a process of its own: tests/checkpoint/test_object_stores.py"


@pytest.mark.parametrize("capability", list(CELLS))
def test_cell(store: Store, capability: str, tmp_path: pathlib.Path) -> None:
    if reason := NOT_RUN.get((store.name, capability)):
        pytest.skip(reason)
    CELLS[capability](store, tmp_path)
