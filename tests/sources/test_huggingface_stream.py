"""Streaming datasets, lane by lane."""

from __future__ import annotations

import asyncio
import functools
import gc
import gzip
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

datasets = pytest.importorskip("datasets")

import pyarrow as pa  # noqa: E402  # after the check that it is installed
import pyarrow.parquet as pq  # noqa: E402
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets, load_dataset  # noqa: E402
from huggingface_files import BUILDERS, table_of, write_files  # noqa: E402
from lane_checks import check_lanes, read_batches, read_ids, restored, saved  # noqa: E402

import meshfeed  # noqa: E402
from meshfeed._src.base import hooks  # noqa: E402
from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError, StateMismatchError  # noqa: E402
from meshfeed._src.sources.huggingface import cut  # noqa: E402
from meshfeed.sources import HuggingFace  # noqa: E402

LANES = [1, 2, 3, 4, 5, 12]
SIZES = [20, 0, 35, 5]  # uneven, one of them without a row
N = sum(SIZES)


def one_device():
    return Mesh(np.array(jax.devices()[:1]), ("data",))


def double(row):
    return {"twice": row["id"] * 2}


def keep(row):
    return row["id"] % 3 != 0


def repeat_rows(batch):
    return {"id": [i for i in batch["id"] for _ in range(i % 3)]}


def to_id(row):
    return {"id": int(row["text"])}


def generate(shards):
    for shard in shards:
        for i in range(shard * 10, shard * 10 + 10):
            yield {"id": i}


def generate_alone():
    for i in range(33):
        yield {"id": i}


def stream(paths, suffix="parquet"):
    return load_dataset(BUILDERS[suffix], data_files=paths, split="train", streaming=True)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    return stream(write_files(tmp_path_factory.mktemp("parquet"), "parquet", SIZES)).select_columns(["id", "x"])


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    paths = write_files(tmp_path_factory.mktemp("other"), "parquet", [13, 12], first=1000)
    return stream(paths).select_columns(["id", "x"])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[23], [9, 0, 14, 5], [2] * 14, [8, -1, 8]], ids=["one", "few", "many", "no-bytes"])
@pytest.mark.parametrize("suffix", list(BUILDERS))
def test_files_of_each_format(tmp_path, suffix, sizes):
    if -1 in sizes and suffix in ("parquet", "arrow"):
        pytest.skip("such a file without a byte is damaged, not empty")
    dataset = stream(write_files(tmp_path, suffix, sizes), suffix)
    total = sum(max(size, 0) for size in sizes)
    if suffix == "txt":
        dataset = dataset.map(to_id, remove_columns=["text"])
    else:
        mapped = HuggingFace(dataset.map(double), columns=["id", "twice"])
        for num_lanes in (1, 3, 12):
            check_lanes(mapped, num_lanes, range(total), step=4)
    for num_lanes in LANES:
        check_lanes(HuggingFace(dataset, columns=["id"]), num_lanes, range(total), step=1 if num_lanes > 3 else 3)


PIPELINES = {
    "map": (lambda d: d.map(double), range(N)),
    "filter": (lambda d: d.filter(keep), [i for i in range(N) if i % 3]),
    "batched map": (
        lambda d: d.map(repeat_rows, batched=True, batch_size=4, remove_columns=["x"]),
        [i for i in range(N) for _ in range(i % 3)],
    ),
    "map, filter, map": (lambda d: d.map(double).filter(keep).map(double), [i for i in range(N) if i % 3]),
    "two batched maps": (
        lambda d: (
            d.map(double)
            .map(repeat_rows, batched=True, batch_size=5, remove_columns=["x", "twice"])
            .map(repeat_rows, batched=True, batch_size=3)
        ),
        [i for i in range(N) for _ in range((i % 3) ** 2)],
    ),
    "batch": (lambda d: d.batch(4), range(N)),
    "batch of arrays": (lambda d: d.with_format("numpy").batch(4), range(N)),
    "rename": (lambda d: d.rename_column("x", "z"), range(N)),
    "remove": (lambda d: d.remove_columns("x"), range(N)),
    "cast": (lambda d: d.cast_column("id", datasets.Value("int32")), range(N)),
    "repeat": (lambda d: d.repeat(2), [*range(N), *range(N)]),
    "skip and take": (lambda d: d.skip(5).take(40), range(5, 45)),
    "take, map, skip": (lambda d: d.take(50).map(double).skip(7), range(7, 50)),
    "take of a filter": (lambda d: d.filter(keep).take(17), [i for i in range(N) if i % 3][:17]),
    "with_indices": (lambda d: d.map(lambda row, i: {"number": i}, with_indices=True), range(N)),
    "format and map": (lambda d: d.with_format("numpy").map(double), range(N)),
    "arrow map": (lambda d: d.with_format("arrow").map(lambda t: t, batched=True, batch_size=6), range(N)),
    "arrow filter": (
        lambda d: d.with_format("arrow").filter(
            lambda t: [i.as_py() % 3 != 0 for i in t["id"]], batched=True, batch_size=6
        ),
        [i for i in range(N) if i % 3],
    ),
    "reshard": (lambda d: d.reshard(), range(N)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PIPELINES))
def test_pipelines(parquet, name):
    change, expected = PIPELINES[name]
    source = HuggingFace(change(parquet))
    for num_lanes in LANES:
        check_lanes(source, num_lanes, expected, step=1 if num_lanes in (4, 12) else 6)


@pytest.mark.parametrize(("num_lanes", "mapped"), [(1, True), (4, False), (12, True)])
@pytest.mark.parametrize("probabilities", [None, [0.7, 0.3]])
@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
def test_interleave(parquet, other, strategy, probabilities, mapped, num_lanes):
    parts = [part.map(double) if mapped else part for part in (parquet, other)]
    dataset = interleave_datasets(parts, probabilities=probabilities, seed=3, stopping_strategy=strategy)
    every = [*range(N), *range(1000, 1025)] if strategy == "all_exhausted_without_replacement" else None
    if strategy == "all_exhausted" and num_lanes > 1:
        with pytest.raises(meshfeed.SettingsError, match=r'Mixture\(\{"part0": part0, "part1": part1\}') as caught:
            meshfeed.Feed(
                HuggingFace(dataset),
                Mesh(np.array(jax.devices()[:1]), ("data",)),
                global_batch_size=num_lanes,
                num_lanes=num_lanes,
            )
        assert caught.value.setting == "num_lanes"
        mixed = meshfeed.sources.Mixture({"a": HuggingFace(dataset), "b": HuggingFace(other)}, {"a": 1, "b": 1})
        with pytest.raises(meshfeed.SettingsError, match="all_exhausted"):
            meshfeed.Feed(
                mixed, Mesh(np.array(jax.devices()[:1]), ("data",)), global_batch_size=num_lanes, num_lanes=num_lanes
            )
    else:
        check_lanes(HuggingFace(dataset), num_lanes, every, step=4)


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
@pytest.mark.parametrize("sizes", [[3, 3], [5, 2, 4], [1, 6]])
def test_one_lane_interleaves_as_the_library_does(strategy, sizes):
    def part(number, size):
        rows = datasets.Dataset.from_dict({"id": range(number * 100, number * 100 + size)})
        return rows.to_iterable_dataset()

    dataset = interleave_datasets([part(*pair) for pair in enumerate(sizes)], stopping_strategy=strategy)
    assert read_ids(HuggingFace(dataset).open(0, 1)) == [row["id"] for row in dataset]


def test_choices_follow_the_probabilities_and_start_no_thread(parquet, other):
    before = set(threading.enumerate())
    weighted = interleave_datasets([parquet.repeat(None), other.repeat(None)], probabilities=[0.8, 0.2], seed=1)
    lane = HuggingFace(weighted).open(0, 1)
    from_other = sum(next(lane)["id"] >= 1000 for _ in range(3000)) / 3000
    assert 0.17 < from_other < 0.23
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile


def test_lanes_choose_between_sources_on_their_own(parquet, other):
    def choices(seed, dataset_seed):
        dataset = interleave_datasets([parquet, other], probabilities=[0.5, 0.5], seed=dataset_seed)
        source = HuggingFace(dataset)
        return [[i >= 1000 for i in read_ids(source.open(lane, 2, seed=seed))][:8] for lane in range(2)]

    first, second = choices(0, 3)
    assert first != second
    assert choices(0, 3) == [first, second]
    assert choices(1, 3) != [first, second]
    assert choices(0, None) == choices(0, None)  # without a seed, the feed's decides, not the process


@pytest.mark.parametrize("num_lanes", [1, 5, 12])
def test_concatenate(parquet, other, num_lanes):
    dataset = concatenate_datasets([parquet, other])
    lanes = check_lanes(HuggingFace(dataset), num_lanes, [*range(N), *range(1000, 1025)])
    assert all(ids == sorted(ids) for ids in lanes)
    side_by_side = concatenate_datasets(
        [parquet.select_columns("id"), parquet.select_columns("x").rename_column("x", "z")], axis=1
    )
    check_lanes(HuggingFace(side_by_side), num_lanes, range(N), step=4)


@pytest.mark.parametrize("num_lanes", [1, 5, 12])
def test_generators_and_tables_in_memory(num_lanes):
    shards = IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2, 3]})
    check_lanes(HuggingFace(shards), num_lanes, range(40))
    check_lanes(HuggingFace(IterableDataset.from_generator(generate_alone)), num_lanes, range(33))
    table = datasets.Dataset.from_dict({"id": range(50)})
    check_lanes(HuggingFace(table.to_iterable_dataset()), num_lanes, range(50))
    check_lanes(HuggingFace(table.to_iterable_dataset(4).map(double)), num_lanes, range(50), step=3)
    shuffled = table.shuffle(seed=1)
    expected = shuffled["id"][5:]
    check_lanes(HuggingFace(shuffled.to_iterable_dataset(3).skip(5)), num_lanes, expected, step=3)


def test_groups_by_column_are_read_again(tmp_path):
    rows = pa.table({"id": np.arange(40), "g": np.repeat(np.arange(10), 4)})
    pq.write_table(rows, tmp_path / "g.parquet")
    dataset = stream([str(tmp_path / "g.parquet")]).batch(by_column="g", batch_size=8)
    lanes = [HuggingFace(dataset).open(lane, 2) for lane in range(2)]
    assert not any(hasattr(lane, "get_state") for lane in lanes)  # the library's state leaves rows out: not used
    assert sorted(itertools.chain(*map(read_ids, lanes))) == list(range(40))


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (3, 2), (6, 3), (64, 4)])
def test_lanes_are_read_in_threads_where_pyarrow_decodes_them(parquet, monkeypatch, cpus, threads):
    monkeypatch.setattr("meshfeed._src.sources.huggingface.stream.available_cpus", lambda: cpus)
    assert hooks.read_threads(HuggingFace(parquet)) == threads
    assert hooks.read_threads(HuggingFace(parquet.map(double))) == 1
    assert hooks.read_threads(hooks.unconverted(HuggingFace(parquet))) == 1


@pytest.mark.parametrize(("num_lanes", "mapped"), [(1, False), (3, True), (5, False), (12, True), (12, False)])
def test_shuffle_buffer(parquet, mapped, num_lanes):
    source = HuggingFace(parquet.map(double) if mapped else parquet, shuffle_buffer=40)
    lanes = check_lanes(source, num_lanes, range(N), step=2, epoch=0, seed=7)
    again = check_lanes(source, num_lanes, range(N), epoch=1, seed=7, step=9)
    assert again != lanes
    assert [sorted(ids) for ids in again] == [sorted(ids) for ids in lanes]  # the same records in each lane
    assert [read_ids(source.open(lane, num_lanes, epoch=0, seed=7)) for lane in range(num_lanes)] == lanes
    assert [read_ids(source.open(lane, num_lanes, epoch=0, seed=8)) for lane in range(num_lanes)] != lanes


HELD_OUT = {
    "take of lines": lambda rows: rows.take(25),
    "skip of lines": lambda rows: rows.skip(25),
    "take after a filter": lambda rows: rows.filter(keep).take(12),
    "filter by number": lambda rows: rows.filter(lambda row, number: number % 4 != 0, with_indices=True),
    "side by side": lambda rows: concatenate_datasets([rows, rows.rename_column("id", "other")], axis=1),
    "take of a mixture": lambda rows: interleave_datasets([rows.take(30), rows.skip(30)], [0.5, 0.5], seed=3).take(20),
}


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("held_out", HELD_OUT.values(), ids=HELD_OUT)
def test_a_shuffle_moves_no_row_between_the_parts_of_a_split(tmp_path, held_out, num_lanes):
    files = write_files(tmp_path / "data", "jsonl", SIZES)
    rows = held_out(load_dataset("json", data_files=files, split="train", streaming=True).remove_columns("x"))
    stored = sorted(read_ids(HuggingFace(rows).open(0, 1)))
    if held_out is not HELD_OUT["take of a mixture"]:  # which has draws of its own
        assert stored == sorted(row["id"] for row in rows)
    for seed, epoch in [(0, 0), (0, 1), (5, 0)]:
        source = HuggingFace(rows, shuffle_buffer=40)
        lanes = [list(source.open(lane, num_lanes, epoch=epoch, seed=seed)) for lane in range(num_lanes)]
        assert sorted(int(row["id"]) for lane in lanes for row in lane) == stored
        assert all(row["other"] == row["id"] for lane in lanes for row in lane if "other" in row)


def test_a_state_of_the_order_by_seed_below_a_take_is_refused(tmp_path):
    files = write_files(tmp_path / "data", "jsonl", SIZES)
    rows = load_dataset("json", data_files=files, split="train", streaming=True).take(25)
    lane = HuggingFace(rows, shuffle_buffer=8).open(0, 1)
    state = lane.get_state()
    assert "in order" in str(state)
    old = json.loads(json.dumps(state).replace('"in order", ', ""))
    assert old != state
    with pytest.raises(StateMismatchError, match=r"lanes\.0\.cut"):
        lane.set_state(old)


def test_a_buffer_too_small_to_shuffle_is_said(parquet, caplog):
    with caplog.at_level("WARNING", "meshfeed"):
        for lane in range(5):
            HuggingFace(parquet, shuffle_buffer=9).open(lane, 5)
        first, second = (read_ids(HuggingFace(parquet, shuffle_buffer=9).open(0, 5, seed=seed)) for seed in (1, 2))
    assert sorted(first) == sorted(second)
    assert first != second
    assert [message for message in caplog.messages if "use at least 10" in message] == caplog.messages[-3:]


def test_epochs_are_alike_without_a_shuffle_and_states_do_not_mix(parquet):
    source = HuggingFace(parquet.map(double))
    assert read_ids(source.open(1, 3, epoch=0)) == read_ids(source.open(1, 3, epoch=5))
    lane = source.open(1, 3, epoch=0)
    next(lane)
    with pytest.raises(StateMismatchError, match=r"lanes\.1\.epoch.*saved 0, current 1"):
        source.open(1, 3, epoch=1).set_state(lane.get_state())


def test_its_own_shuffle_is_refused_with_an_offer(parquet):
    with pytest.raises(SourceError, match=r"shuffle\(buffer_size=100\).*lose.*shuffle_buffer=100"):
        HuggingFace(parquet.shuffle(seed=1, buffer_size=100).map(double))


@pytest.mark.parametrize("sizes", [[1], [7], [64, 3], [1000]])
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_batches_are_the_records(parquet, num_lanes, sizes):
    source = HuggingFace(parquet)
    for lane in range(num_lanes):
        batches = read_batches(source.open(lane, num_lanes), sizes)
        records = list(source.open(lane, num_lanes))
        np.testing.assert_array_equal(np.concatenate([b["x"] for b in batches]), [r["x"] for r in records])
        assert batches[0]["x"].dtype == records[0]["x"].dtype == np.int32
        assert isinstance(records[0]["id"], np.int64)
    lane = source.open(0, 1)
    lane.next_batch(13)
    again = restored(source.open(0, 1), saved(lane))
    assert next(again)["id"] == 13
    assert again.next_batch(5)["id"][0] == 14


def test_a_state_in_a_large_file_skips_row_groups(tmp_path, monkeypatch):
    (path,) = write_files(tmp_path, "parquet", [1000], rows_per_group=100)
    source = HuggingFace(stream([path]), columns=["id"])
    lane = source.open(0, 1)
    for _ in range(950):
        next(lane)
    state = saved(lane)
    read = []
    original = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, *a, row_groups, **k: read.append(row_groups) or original(
            self, *a, row_groups=row_groups, **k
        )
    )  # fmt: skip
    assert read_ids(restored(source.open(0, 1), state)) == list(range(950, 1000))
    assert read == [[9]]
    assert len(state) < 200


def test_row_groups_without_rows_are_passed_over(tmp_path):
    with pq.ParquetWriter(tmp_path / "a.parquet", table_of([0]).schema) as writer:
        for ids in ([], [0, 1, 2], [], [3]):
            writer.write_table(table_of(ids))
    write_files(tmp_path / "b", "parquet", [0])
    dataset = stream([str(tmp_path / "a.parquet"), str(tmp_path / "b" / "00.parquet")])
    for num_lanes in (1, 2, 3):
        check_lanes(HuggingFace(dataset, columns=["id"]), num_lanes, range(4))


def test_a_footer_is_read_once_for_all_lanes(tmp_path, monkeypatch):
    source = HuggingFace(stream(write_files(tmp_path, "parquet", [20, 21, 22])))
    opened = []
    original = cut._ParquetFiles._open
    monkeypatch.setattr(cut._ParquetFiles, "_open", lambda self, i: opened.append(i) or original(self, i))
    for lane_index in range(2):  # one file each, and the third is cut by row groups
        source.open(lane_index, 2)
    assert sorted(opened) == [0, 1, 2]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "arrow"])
def test_no_lane_has_only_an_empty_file(tmp_path, suffix):
    sizes = [4, 0, 4, 4, 0, 4]
    source = HuggingFace(stream(write_files(tmp_path, suffix, sizes), suffix), columns=["id"])
    assert [len(ids) for ids in check_lanes(source, 4, range(16))] == [4, 4, 4, 4]


def test_only_the_columns_asked_for_are_read(tmp_path, monkeypatch):
    dataset = stream(write_files(tmp_path, "parquet", [10]))
    asked = []
    original = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda self, *a, columns, **k: asked.append(columns) or original(
            self, *a, columns=columns, **k
        )
    )  # fmt: skip
    assert set(next(HuggingFace(dataset, columns=["x"]).open(0, 1))) == {"x"}
    assert set(next(HuggingFace(dataset.select_columns(["x", "id"]), columns=["id"]).open(0, 1))) == {"id"}
    next(HuggingFace(dataset.map(double), columns=["twice"]).open(0, 1))
    assert asked == [["x"], ["id"], None]


@pytest.mark.parametrize(
    ("change", "columns", "message"),
    [
        (lambda d: d, None, r"column 's' holds string.*columns=\['id', 'x'\]"),
        (lambda d: d.map(double), None, r"column 's' holds str.*columns="),
        (lambda d: d.map(lambda row: {"n": None}), ["n"], "column 'n' is null in a record of lane 0"),
        (lambda d: d.map(lambda row: {"n": [[1], [2, 3]]}), ["n"], "ragged rows: column 'n' .* a record of lane 0"),
        (lambda d: d.map(double), ["nope"], r"no column 'nope'; it has \['id', 's', 'twice', 'x'\]"),
    ],
)
def test_what_no_device_holds_is_named_with_a_remedy(tmp_path, change, columns, message):
    dataset = change(stream(write_files(tmp_path, "parquet", [4])))
    with pytest.raises(SourceError, match=message) as error:
        next(HuggingFace(dataset, columns=columns).open(0, 1))
    assert error.value.lane_index == 0


def test_records_before_a_bad_one_are_given_and_nothing_after(tmp_path):
    pq.write_table(pa.table({"id": range(6), "x": [[1], [2], [3], None, [5], [6]]}), tmp_path / "a.parquet")
    lane = HuggingFace(stream([str(tmp_path / "a.parquet")])).open(0, 1)
    assert lane.next_batch(10)["id"].tolist() == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(SourceError, match="column 'x' is null in a record of lane 0") as error:
            lane.next_batch(10)
        assert (error.value.lane_index, error.value.record_id) == (0, None)


@pytest.mark.parametrize("mapped", [False, True])
def test_after_one_error_the_iterator_is_never_called_again(tmp_path, monkeypatch, mapped):
    dataset = stream(write_files(tmp_path, "parquet", [40], rows_per_group=10))
    source = HuggingFace(dataset.map(double) if mapped else dataset, columns=["id"])
    original, calls = pq.ParquetFile.iter_batches, []

    def fail_once(self, *args, **kwargs):
        calls.append(kwargs["row_groups"])
        if len(calls) == 3:
            raise OSError("connection reset")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail_once)
    lane = source.open(0, 1)
    ids = []
    with pytest.raises(OSError, match="connection reset"):
        ids.extend(int(record["id"]) for record in lane)
    for _ in range(3):
        with pytest.raises(OSError, match="connection reset"):
            next(lane)
    assert ids == list(range(20))
    assert read_ids(restored(source.open(0, 1), saved(lane))) == list(range(20, 40))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_damaged_file_is_named(tmp_path, suffix):
    paths = write_files(tmp_path, suffix, [30, 30])
    source = HuggingFace(stream(paths, suffix), columns=["id"])
    whole = Path(paths[1]).read_bytes()
    for content in (b"", b"garbage" * 100, whole[: len(whole) // 3]):
        Path(paths[1]).write_bytes(content)
        with pytest.raises(CorruptDataError, match=r"01\.") as error:
            read_ids(source.open(1, 2))
        assert error.value.path == paths[1]
    Path(paths[1]).unlink()
    with pytest.raises(FileNotFoundError, match="01"):
        read_ids(source.open(1, 2))
    with pytest.raises(SourceError, match=r"01\..*is missing"):
        source.fingerprint()


@pytest.mark.parametrize(
    ("suffix", "contents"),
    [
        ("jsonl", [b"\0" * 100, b"\xff" * 100, b'{"id": 1, "x": [']),
        ("csv", [b"\xff" * 100, b'id,x\n"1,2\n']),
        ("jsonl.gz", [b"\0" * 100, gzip.compress(b'{"id": 1}\n' * 1000)[:-20]]),
    ],
)
def test_so_is_one_that_datasets_itself_reads(tmp_path, suffix, contents):
    kind = suffix.partition(".")[0]
    paths = write_files(tmp_path, kind, [30, 30])
    if suffix.endswith(".gz"):
        for number, path in enumerate(paths):
            paths[number] = f"{path}.gz"
            Path(paths[number]).write_bytes(gzip.compress(Path(path).read_bytes()))
            Path(path).unlink()
    source = HuggingFace(stream(paths, kind))
    for content in contents:
        Path(paths[1]).write_bytes(content)
        with pytest.raises(
            CorruptDataError, match=rf"01\.{suffix} is no intact file for datasets' \w+ reader"
        ) as error:
            read_ids(source.open(1, 2))
        assert error.value.path.endswith(paths[1])


def test_errors_of_the_users_generator_stay_as_they_are():
    def rows(shards):
        raise ValueError("of the user")
        yield {"id": 1}

    source = HuggingFace(
        datasets.IterableDataset.from_generator(
            rows, gen_kwargs={"shards": ["a", "b"]}, features=datasets.Features({"id": datasets.Value("int64")})
        )
    )
    with pytest.raises(ValueError, match="of the user") as error:
        read_ids(source.open(0, 2))
    assert not isinstance(error.value, meshfeed.MeshfeedError)


def test_wrong_datasets_are_refused(parquet):
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(SourceError, match="split by node already"):
        HuggingFace(split_dataset_by_node(parquet, 0, 2))
    with pytest.raises(SettingsError, match=r"unknown columns \['nope'\].*\['id', 'x'\]"):
        HuggingFace(parquet, columns=["nope"])


def test_read_amplification_is_stated_once_and_only_where_there_is_any(tmp_path, caplog):
    text = stream(write_files(tmp_path, "jsonl", [10] * 16), "jsonl")
    with caplog.at_level(logging.WARNING, "meshfeed"):
        for source, num_lanes in ((HuggingFace(text), 8), (HuggingFace(text), 12), (HuggingFace(text.take(50)), 4)):
            for lane in range(num_lanes):
                source.open(lane, num_lanes)
    assert len(caplog.messages) == 2
    assert "12 lanes" in caplog.messages[0]
    assert "4 of 16 files (12.jsonl, 13.jsonl, 14.jsonl, …)" in caplog.messages[0]
    assert "read 3.0 times" in caplog.messages[0]
    assert "4 × the work of every row" in caplog.messages[1]


def test_the_dataset_itself_is_left_as_it_is(other):
    dataset = other.map(double)
    rows = iter(dataset)
    first = [next(rows)["id"] for _ in range(5)]
    source = HuggingFace(dataset)
    lanes = [source.open(lane, 3) for lane in range(3)]
    turns = [next(lane)["id"] for _ in range(4) for lane in lanes]  # in turns: they must not share a position
    assert len(set(turns)) == 12
    assert first + [row["id"] for row in rows] == list(range(1000, 1025))


def test_through_the_feed(tmp_path):
    dataset = stream(write_files(tmp_path, "parquet", [30, 0, 41, 25])).map(double)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def feed(data=dataset):
        return meshfeed.MultiHostDataLoadIterator(
            HuggingFace(data, columns=["id", "twice"], shuffle_buffer=32),
            mesh,
            global_batch_size=16,
            num_lanes=4,
            num_epochs=2,
            seed=3,
        )

    with feed() as first:
        states, batches = [first.get_state()], []
        for batch in first:
            batches.append(batch["id"].tolist())
            assert (batch["twice"] == 2 * batch["id"]).all()
            states.append(first.get_state())
    assert sorted(itertools.chain(*batches)) == sorted([*range(96), *range(96)])
    for point in (0, 1, 5, 6, 9, 12):
        with feed() as second:
            second.set_state(json.loads(json.dumps(states[point])))
            assert [batch["id"].tolist() for batch in second] == batches[point:]
    grown = stream(write_files(tmp_path / "grown", "parquet", [30, 0, 41, 26])).map(double)
    with feed(grown) as other, pytest.raises(StateMismatchError, match=r"source\.files"):
        other.set_state(states[3])


def refill(number):
    """Writes to the same array at each call, one that a CPU device would use as it is."""
    if not hasattr(refill, "array"):
        raw = np.empty(8 * 16 * 4 + 64, np.uint8)
        refill.array = raw[-raw.ctypes.data % 64 :][: 8 * 16 * 4].view(np.int32).reshape(8, 16)
    refill.array[:] = np.asarray(number).reshape(-1, 1)
    return refill.array


def map_row(row):
    return {"rows": refill(row["id"])[0]}


def map_table(table):
    flat = pa.array(refill(table["id"].to_numpy()).reshape(-1))
    return pa.table({"rows": pa.FixedSizeListArray.from_arrays(flat, 16)})


@pytest.mark.parametrize(
    ("change", "buffer"),
    [
        (lambda d: d.map(map_row), 0),
        (lambda d: d.map(map_row), 16),
        (lambda d: d.with_format("arrow").map(map_table, batched=True, batch_size=8), 0),
        (lambda d: d.with_format("arrow").map(map_table, batched=True, batch_size=8), 16),
    ],
)
def test_functions_may_write_to_the_same_arrays_again(tmp_path, change, buffer):
    paths = write_files(tmp_path, "parquet", [64])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    source = HuggingFace(change(stream(paths).select_columns(["id"])), columns=["rows"], shuffle_buffer=buffer)
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, num_lanes=1) as feed:
        batches = list(feed)
    rows = np.concatenate([np.asarray(batch["rows"]) for batch in batches])
    assert (rows == rows[:, :1]).all()
    assert sorted(rows[:, 0].tolist()) == list(range(64))
    if not buffer:
        assert rows[:, 0].tolist() == list(range(64))


async def double_later(row):
    await asyncio.sleep(row["id"] % 2 * 1e-4)
    return double(row)


def test_async_functions_resume_exactly_and_end_with_their_lane(parquet):
    source = HuggingFace(parquet.map(double_later))
    lanes = check_lanes(source, 3, range(N), step=5)
    gc.collect()  # lanes that the check did not close
    before, enabled = len(os.listdir("/proc/self/fd")), gc.isenabled()
    gc.disable()  # as many training loops do
    try:
        for lane_index in range(3):
            lane = source.open(lane_index, 3)
            assert [int(next(lane)["id"]) for _ in range(4)] == lanes[lane_index][:4]
            restored(lane, saved(lane))
            assert int(next(lane)["id"]) == lanes[lane_index][4]
            lane.close()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("as_stream", [False, True])
def test_a_table_in_memory_may_be_made_of_arrays_that_are_written_later(as_stream, read_only):
    raw = np.empty(64 * 16 * 4 + 64, np.uint8)
    array = raw[-raw.ctypes.data % 64 :][: 64 * 16 * 4].view(np.int32).reshape(64, 16)
    array[:] = np.arange(64)[:, None]
    values = array.reshape(-1).view()
    values.flags.writeable = not read_only  # as pandas gives its columns; the array below can still be written
    table = pa.table({"rows": pa.FixedSizeListArray.from_arrays(pa.array(values), 16)})
    dataset = datasets.Dataset(table)
    assert np.shares_memory(np.asarray(dataset.data.table["rows"].chunk(0).values), array)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    source = HuggingFace(dataset.to_iterable_dataset() if as_stream else dataset)
    lanes = {"num_lanes": 1} if as_stream else {}
    with meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, **lanes) as feed:
        batches = list(feed)
    array[:] = -1
    assert np.concatenate([np.asarray(batch["rows"])[:, 0] for batch in batches]).tolist() == list(range(64))


def test_fingerprint(tmp_path, parquet):
    def fingerprint(dataset, **how):
        return HuggingFace(dataset, **how).fingerprint()

    paths = write_files(tmp_path / "a", "parquet", [5, 6])
    base = fingerprint(stream(paths))
    moved = fingerprint(stream(write_files(tmp_path / "b", "parquet", [5, 6])))
    assert moved == base
    assert json.loads(json.dumps(base)) == base
    grown = fingerprint(stream(write_files(tmp_path / "c", "parquet", [5, 60])))
    assert grown["files"]["bytes"] != base["files"]["bytes"]
    missing = fingerprint(stream(paths[:1]))
    assert (missing["files"]["count"], base["files"]["count"]) == (1, 2)
    (tmp_path / "b" / "01.parquet").rename(tmp_path / "b" / "02.parquet")
    renamed = fingerprint(stream(sorted(str(path) for path in (tmp_path / "b").iterdir())))
    assert renamed["files"]["digest"] != base["files"]["digest"]
    structures = [
        fingerprint(change(stream(paths)))["structure"]
        for change in (
            lambda d: d,
            lambda d: d.map(double),
            lambda d: d.filter(keep),
            lambda d: d.take(5),
            lambda d: d.take(6),
        )
    ]
    assert len({repr(value) for value in structures}) == len(structures)
    assert fingerprint(stream(paths), columns=["id"])["columns"] == ["id"]


@pytest.mark.slow
def test_fingerprint_is_the_same_in_another_process(tmp_path):
    paths = write_files(tmp_path, "parquet", [5, 6])
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[2])\n"
        "import test_huggingface_stream as t\n"
        "d = t.stream(json.loads(sys.argv[1])).map(t.double).filter(t.keep)\n"
        "print(json.dumps(t.HuggingFace(d).fingerprint()))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, json.dumps(paths), json.dumps([str(Path(__file__).parent), *sys.path])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(out.stdout) == HuggingFace(stream(paths).map(double).filter(keep)).fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, stop: rows.map(stop),
        lambda rows, stop: rows.filter(lambda row: bool(stop(row))),
        lambda rows, stop: rows.with_format("arrow").map(lambda table: stop({"id": 5}) or table, batched=True),
    ],
    ids=["map", "filter", "tables"],
)
def test_a_function_that_raises_stop_iteration_does_not_end_the_data(parquet, change):
    def stop(row):
        return next(iter(())) if row["id"] == 5 else row

    lane = HuggingFace(change(parquet, stop)).open(0, 1)
    for _ in range(2):
        with pytest.raises(SourceError, match="in lane 0, raised StopIteration, which does not end the data") as error:
            list(lane)
        assert error.value.lane_index == 0
    assert isinstance(error.value.__context__.__cause__, StopIteration)  # whose traceback names the line


def test_it_travels_to_worker_processes(parquet):
    source = pickle.loads(pickle.dumps(HuggingFace(parquet.map(double), shuffle_buffer=20)))
    check_lanes(source, 2, range(N), step=20)


def test_images_are_decoded_by_the_library(tmp_path):
    pytest.importorskip("PIL")
    pixels = np.random.default_rng(0).integers(0, 255, (6, 4, 5, 3), np.uint8)
    features = datasets.Features({"id": datasets.Value("int64"), "image": datasets.Image()})
    datasets.Dataset.from_dict({"id": range(6), "image": list(pixels)}, features=features).to_parquet(
        tmp_path / "a.parquet"
    )
    source = HuggingFace(stream([str(tmp_path / "a.parquet")]))
    for lane in range(2):
        for record in source.open(lane, 2):
            np.testing.assert_array_equal(record["image"], pixels[record["id"]])
    check_lanes(source, 2, range(6))


@pytest.mark.parametrize("make_writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_an_arrow_file_that_is_truncated_while_it_is_read(tmp_path: Path, make_writer) -> None:
    """Through a memory map, the kernel would end the process."""
    table, path = pa.table({"x": np.arange(1 << 16)}), tmp_path / "0.arrow"
    with make_writer(str(path), table.schema) as writer:
        for _ in range(8):
            writer.write_table(table)
    files = cut._ArrowFiles([str(path)], None)
    tables = files.read(0, 10)
    assert next(tables)["x"][0].as_py() == 10
    path.open("r+b").truncate(600_000)
    with pytest.raises(CorruptDataError, match=r"0.arrow is no intact Arrow file"):
        list(tables)


def uneven_files(folder):
    sizes = [60, 60, 60, 36, 60, 60, 60, 60]
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        pq.write_table(pa.table({"id": range(first, first + size)}), folder / f"{number}.parquet", row_group_size=20)
    files = sorted(map(str, folder.glob("*.parquet")))
    return load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder / "c"))


def ids_of(feed, steps=None):
    return [np.asarray(batch["id"]).tolist() for batch in itertools.islice(feed, steps)]


@pytest.mark.parametrize("skipped", [0, 33])
def test_lanes_of_uneven_files_lose_only_the_remainder(tmp_path, caplog, skipped):
    dataset = uneven_files(tmp_path)
    source = HuggingFace(dataset.skip(skipped) if skipped else dataset)
    with meshfeed.Feed(source, one_device(), global_batch_size=8, num_lanes=8) as feed:
        delivered = sorted(itertools.chain(*ids_of(feed)))
        assert feed.get_state()["fingerprint"]["cut"] == 2
    total = 456 - skipped
    assert len(delivered) == len(set(delivered)) == total - total % 8
    assert delivered[0] >= skipped
    assert max(source.lane_lengths(8)) - min(source.lane_lengths(8)) <= 1
    assert sum(source.lane_lengths(8)) == total
    assert not [text for text in caplog.messages if "delivered" in text]
    by_files = source.with_cut(1)
    assert min(by_files.lane_lengths(8)) * 8 <= 0.65 * total  # what was delivered before


WRAPPERS = {
    "plain": lambda source: source,
    "map": lambda source: meshfeed.sources.Map(source, lambda record: {"id": record["id"] + 1}),
    "shuffle buffer": lambda source: meshfeed.sources.ShuffleBuffer(source, 64),
    "mixture": lambda source: meshfeed.sources.Mixture(
        {"a": source, "b": [{"id": np.int64(-i)} for i in range(1, 65)]}, {"a": 3, "b": 1}, block=16
    ),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_state_from_before_lanes_were_even_continues_with_its_lanes(tmp_path, monkeypatch, wrap):
    source = HuggingFace(uneven_files(tmp_path))
    make = functools.partial(meshfeed.Feed, sharding=one_device(), global_batch_size=8, num_epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr(type(source), "cut_version", lambda self, num_lanes: 1)
        with make(WRAPPERS[wrap](source)) as feed:
            first = ids_of(feed, 20)
            state = feed.get_state()
            rest = ids_of(feed)
    assert "cut" not in state["fingerprint"]
    if wrap == "plain":
        assert sorted(np.transpose(first)[3].tolist()) == list(range(180, 200))  # the lane reads the short file
    with make(WRAPPERS[wrap](source)) as feed:
        assert ids_of(feed, 20) != first
        feed.set_state(state)
        again = ids_of(feed)
        assert again == rest
        feed.reset()
        assert ids_of(feed, 20) == first
        new = json.loads(json.dumps(state))
        new["fingerprint"]["cut"] = 3
        with pytest.raises(StateMismatchError, match="cut"):
            feed.set_state(new)


def _in_parts(num_parts: int) -> IterableDataset:
    return Dataset.from_dict({"x": list(range(64))}).to_iterable_dataset(num_shards=num_parts)


def _generated(num_parts: int) -> IterableDataset:
    return IterableDataset.from_generator(
        lambda parts: ({"x": part} for part in parts), gen_kwargs={"parts": [*range(num_parts)]}
    )


def _joined(first: int) -> IterableDataset:
    halves = (Dataset.from_dict({"x": [*range(64)][part]}) for part in (slice(first), slice(first, None)))
    return concatenate_datasets([half.to_iterable_dataset() for half in halves])


def _from(first: int) -> IterableDataset:
    return Dataset.from_dict({"x": list(range(first, first + 64))}).to_iterable_dataset(num_shards=4)


def _interleaved(seed: int) -> IterableDataset:
    return interleave_datasets([_in_parts(2), _in_parts(4)], probabilities=[0.3, 0.7], seed=seed)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [(_in_parts, 2, 4), (_generated, 64, 128), (_joined, 32, 16), (_from, 0, 1), (_interleaved, 1, 2)],
)
def test_a_state_of_other_parts_or_rows_is_refused(make, before, after):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with meshfeed.Feed(make(before), mesh, global_batch_size=8, num_lanes=2) as feed:
        for _ in range(4):
            next(feed)
        state = feed.get_state()
        rest = [np.asarray(batch["x"]).tolist() for batch in feed]
    with meshfeed.Feed(make(after), mesh, global_batch_size=8, num_lanes=2) as other:
        with pytest.raises(StateMismatchError, match=r"num_shards=|differ|mismatch|interleave"):
            _resumed(other, state)
    with meshfeed.Feed(make(before), mesh, global_batch_size=8, num_lanes=2) as same:
        assert _resumed(same, state) == rest
    lane = HuggingFace(make(before)).open(0, 2)
    next(lane)
    older = {name: value for name, value in lane.get_state().items() if name not in ("parts", "rows")}
    expected = next(lane)["x"]
    lane.set_state(older)  # of a version that did not store them
    assert next(lane)["x"] == expected


def test_a_state_of_other_rows_of_the_same_files_is_refused(tmp_path):
    pq.write_table(pa.table({"x": np.arange(64)}), tmp_path / "a.parquet", row_group_size=8)
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{number}\n" for number in range(64)))

    def opened(kind, **options):
        path = str(tmp_path / f"a.{kind}")
        return HuggingFace(load_dataset(kind, data_files=path, split="train", streaming=True, **options)).open(0, 1)

    for kind, options, others in [
        ("parquet", {"filters": [("x", ">=", 4)]}, {"filters": [("x", ">=", 2)]}),
        ("parquet", {}, {"filters": [("x", ">=", 2)]}),
        ("csv", {}, {"skiprows": [1, 2]}),
    ]:
        lane = opened(kind, **options)
        next(lane)
        state, expected = lane.get_state(), next(lane)["x"]
        again = opened(kind, **options)
        again.set_state(state)
        assert next(again)["x"] == expected
        with pytest.raises(StateMismatchError, match=r"lanes\.0\.(rows|cut)"):
            opened(kind, **others).set_state(state)


def _resumed(feed, state):
    feed.set_state(state)
    return [np.asarray(batch["x"]).tolist() for batch in feed]


def test_nulls_change_nothing_of_the_records_after_them(tmp_path):
    lists = pa.array([[1, None], [2], None, [3, 4]], pa.list_(pa.int32()))
    table = pa.table(
        {"x": pa.array([None, 1, 2, 3], pa.int32()), "l": lists, "p": lists.cast(pa.large_list(pa.int8()))}
    )
    pq.write_table(table, tmp_path / "0.parquet")
    source = HuggingFace(stream([str(tmp_path / "0.parquet")])).unconverted()

    def described(record):
        return {name: (getattr(value, "dtype", None), np.array(value).tolist()) for name, value in record.items()}

    lane, states = source.open(0, 1), []
    for row in range(4):
        states.append(saved(lane))
        record = described(next(lane))
        assert {name: value for name, (_, value) in record.items()} == table.slice(row, 1).to_pylist()[0]
        for state in states:
            again = restored(source.open(0, 1), state)
            assert record in map(described, again), (row, state)
    assert described(next(restored(source.open(0, 1), states[1])))["l"] == (np.int32, [2])


@pytest.mark.parametrize(
    "change", [lambda d: d.select_columns(["id", "x"]).skip(3), lambda d: d.take(9).select_columns(["x", "id"])]
)
def test_columns_of_ranges_of_rows(tmp_path, change):
    source = HuggingFace(change(stream(write_files(tmp_path, "parquet", [20]))), columns=["id"])
    check_lanes(source, 2, [row["id"] for row in change(stream(write_files(tmp_path, "parquet", [20])))])


@pytest.mark.parametrize(
    "change", [lambda d: d, lambda d: d.filter(lambda row: True), lambda d: d.rename_column("k", "key")]
)
def test_columns_keep_their_dtypes_below_functions(change):
    features = datasets.Features(
        {
            "k": datasets.Value("uint8"),
            "grid": datasets.Array2D((1, 2), "uint8"),
            "nested": {"n": datasets.Value("int8"), "l": datasets.List(datasets.Value("float16"))},
        }
    )
    rows = {"k": [1, 2], "grid": [[[1, 2]]] * 2, "nested": [{"n": 1, "l": [1.0]}] * 2}
    record = next(HuggingFace(change(Dataset.from_dict(rows, features=features).to_iterable_dataset())).open(0, 1))
    assert [record["grid"].dtype, record["nested"]["n"].dtype, record["nested"]["l"].dtype] == [
        "uint8",
        "int8",
        "float16",
    ]


@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_a_null_in_a_list_is_named_below_functions(kind):
    features = datasets.Features({"x": datasets.List(datasets.Value(kind))})
    dataset = Dataset.from_dict({"x": [[1, None]]}, features=features).to_iterable_dataset()
    for changed in (dataset, dataset.filter(lambda row: True)):
        with pytest.raises(SourceError, match=r"column 'x' .* lane 0"):
            next(HuggingFace(changed).open(0, 1))


def test_a_generator_of_names_that_are_no_files():
    def rows(names):
        for name in names:
            yield from ({"id": len(name) + number} for number in range(4))

    dataset = IterableDataset.from_generator(rows, gen_kwargs={"names": ["a", "bb"]})
    with meshfeed.Feed(dataset, one_device(), global_batch_size=4, num_lanes=2) as feed:
        assert np.asarray(next(feed)["id"]).tolist() == [1, 2, 2, 3]
    other = IterableDataset.from_generator(rows, gen_kwargs={"names": ["a", "cc"]})
    assert HuggingFace(other).fingerprint() != HuggingFace(dataset).fingerprint()
