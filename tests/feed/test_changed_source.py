"""A state is not continued over other files, columns or lanes: the error names the field."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed

pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")


def write(path: Path, first: int, count: int) -> None:
    import pyarrow as pa
    from array_record.python.array_record_module import ArrayRecordWriter

    ids = np.arange(first, first + count)
    pq.write_table(pa.table({"id": ids, "x": ids * 2}), path.with_suffix(".parquet"))
    writer = ArrayRecordWriter(str(path.with_suffix(".array_record")), "group_size:1")
    for i in ids:
        writer.write(int(i).to_bytes(8, "little"))
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        write(tmp_path / f"part-{number}", number * 20, 20)
    return tmp_path


def decode(record: bytes) -> dict[str, Any]:
    return {"id": np.int32(int.from_bytes(record, "little"))}


def array_record(folder: Path) -> Any:
    return meshfeed.sources.ArrayRecord(str(folder / "*.array_record"), decode=decode)


def grain_stream(folder: Path) -> Any:
    grain = importlib.import_module("grain")
    files = sorted(map(str, folder.glob("*.array_record")))
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files)).map(decode).to_iter_dataset()


def hf_stream(folder: Path, **options: Any) -> Any:
    files = sorted(map(str, folder.glob("*.parquet")))
    dataset = datasets.load_dataset("parquet", data_files=files, streaming=True, split="train")
    return meshfeed.sources.HuggingFace(dataset, **options)


def make_feed(source: Any, **options: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, **options)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "grown": lambda folder: write(folder / "part-2", 40, 25),
    "renamed": lambda folder: [
        (folder / f"part-1{kind}").rename(folder / f"part-9{kind}") for kind in (".parquet", ".array_record")
    ],
    "missing": lambda folder: [(folder / f"part-3{kind}").unlink() for kind in (".parquet", ".array_record")],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [array_record, grain_stream, hf_stream])
def test_changed_files_are_refused_and_moved_ones_are_the_same(
    folder: Path, make: Callable[[Path], Any], change: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with make_feed(make(folder)) as feed:
        next(feed)
        state = feed.get_state()
        expected = np.asarray(next(feed)["id"]).tolist()
    moved = tmp_path_factory.mktemp("moved")
    shutil.copytree(folder, moved, dirs_exist_ok=True)
    with make_feed(make(moved)) as feed:
        feed.set_state(state)
        assert np.asarray(next(feed)["id"]).tolist() == expected
    CHANGES[change](folder)
    with make_feed(make(folder)) as feed:
        with pytest.raises(meshfeed.StateMismatchError) as info:
            feed.set_state(state)
        assert info.value.field.startswith("source"), info.value.field
        assert feed.position == 0


@pytest.mark.parametrize("make", [array_record, grain_stream, hf_stream])
def test_a_file_that_is_missing_on_resume_is_named(folder: Path, make: Callable[[Path], Any]) -> None:
    for path in sorted(folder.iterdir()):
        path.rename(folder / f"{path.stem}-of-00004{path.suffix}".replace("part-", "part-0000"))
    with make_feed(make(folder)) as feed:
        next(feed)
        state = feed.get_state()
    for path in folder.glob("part-00002-of-00004.*"):
        path.unlink()
    with make_feed(make(folder)) as feed, pytest.raises(meshfeed.StateMismatchError) as info:
        feed.set_state(state)
    expected = "The saved source had 4 files, the current one has 3. Missing: part-00002-of-00004."
    assert info.value.remedy.startswith(expected), info.value.remedy


def test_other_columns_and_other_lanes_are_refused(folder: Path) -> None:
    with make_feed(hf_stream(folder), num_lanes=4) as feed:
        next(feed)
        state = feed.get_state()
    with (
        make_feed(hf_stream(folder, columns=["id"]), num_lanes=4) as feed,
        pytest.raises(meshfeed.StateMismatchError) as info,
    ):
        feed.set_state(state)
    assert "columns" in info.value.field
    with make_feed(hf_stream(folder), num_lanes=2) as feed, pytest.raises(meshfeed.StateMismatchError) as info:
        feed.set_state(state)
    assert info.value.field == "num_lanes"
    assert (info.value.saved, info.value.current) == (4, 2)


def test_a_changed_mixture_without_a_stage_prints_the_stages_to_write(folder: Path) -> None:
    def mix(weights: Any) -> Any:
        return meshfeed.sources.Mixture({"a": array_record(folder), "b": array_record(folder)}, weights, block=16)

    with make_feed(mix({"a": 1, "b": 1})) as feed:
        next(feed)
        state = feed.get_state()
    with make_feed(mix({"a": 3, "b": 1})) as feed, pytest.raises(meshfeed.StateMismatchError) as info:
        feed.set_state(state)
    assert "mixture" in info.value.field
    assert "[(0, {" in str(info.value).replace("'", '"').replace('"', "'") or "(0, {" in str(info.value)
    with make_feed(mix([(0, {"a": 1, "b": 1}), (1, {"a": 3, "b": 1})])) as feed:
        feed.set_state(state)
        next(feed)
