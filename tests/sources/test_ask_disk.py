"""A disk is asked for exactly the records that a read needs, through all views, and only if they are missing."""

from __future__ import annotations

import io
import pathlib
import tarfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_record_files import write
from test_shard_reader import uncache

from meshfeed._src.base import hooks
from meshfeed._src.reading.records import SourceReader
from meshfeed.sources import (
    ArrayRecord,
    Buckets,
    Concat,
    DecodeRaw,
    Join,
    Map,
    Memory,
    Mixture,
    Packed,
    Sample,
    Subset,
    Tokens,
    WebDataset,
    Zip,
)


class InMemory:
    """Documents of 1 to 4 tokens; notes which of them were read."""

    def __init__(self, count: int = 60) -> None:
        self.count, self.asked, self.read = count, set[int](), set[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, record_id: int) -> Any:
        self.read.add(int(record_id))
        return {"tokens": np.full(record_id % 4 + 1, record_id, np.int32)}

    def lengths(self) -> np.ndarray:
        return np.arange(self.count) % 4 + 1


class Files(InMemory):
    """Notes also which of them were asked for."""

    def ask_disk(self, record_ids: np.ndarray) -> bool:
        self.asked |= set(record_ids.tolist())
        return bool(len(record_ids))


def alike(source: Any) -> Any:
    return Map(source, lambda record: {"n": record["tokens"][0]})


def others() -> Any:
    return Memory({"tokens": np.arange(60), "more": np.ones(60)})


BUILT: dict[str, Callable[[InMemory, InMemory], Any]] = {
    "view": lambda a, b: alike(Subset(a, slice(5, None, 3))),
    "sample": lambda a, b: alike(Sample(a, 150)),
    "map": lambda a, b: alike(a),
    "join": lambda a, b: Map(Join(alike(a), others(), key="n", other_key="tokens", into="other"), lambda r: r["other"]),
    "zip": lambda a, b: Zip({"a": alike(a), "b": alike(Subset(b, slice(None, None, -1)))}),
    "zip with memory": lambda a, b: Zip({"a": alike(a), "b": others()}),
    "concat": lambda a, b: Concat([alike(a), alike(b)]),
    "mixture": lambda a, b: Mixture({"a": alike(a), "b": alike(Subset(b, slice(10, 40)))}, {"a": 1, "b": 1}, 60),
    "buckets": lambda a, b: Buckets(a, (2, 4)),
    "packed": lambda a, b: Packed(a, 8),
    "packed mixture": lambda a, b: Packed(Mixture({"a": a, "b": b}, {"a": 1, "b": 1}, 60), 8),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_is_asked_for_is_what_is_read(name: str) -> None:
    files = Files(), Files()
    source: Any = BUILT[name](*files)
    order = source.make_order(
        shuffle=True,
        seed=1,
        num_epochs=1,
        batch_sizes=[6],
        position_of_step=lambda step: 6 * step,
        segments=[(0, 6)],
        num_lanes=None,
    ) if hooks.find(source, hooks.NumbersRecords) else None  # fmt: skip
    ids = np.arange(6) if order is None else order.ids_at(np.arange(6))[0]
    reader = SourceReader(source)
    reader.read(ids)
    reader.read(ids)  # a mixture compares its components at first
    for each in files:
        each.asked.clear()
        each.read.clear()
    on_disk = hooks.on_disk(source)
    assert on_disk is not None
    assert not any(each.read for each in files), "asking reads nothing"
    assert on_disk.ask_disk(ids) is True
    reader.read(ids)
    assert [each.asked for each in files] == [each.read for each in files]
    assert files[0].asked


@pytest.mark.parametrize("name", ["view", "zip", "concat", "mixture", "packed", "buckets", "map"])
def test_nothing_is_asked_for_without_files(name: str) -> None:
    assert hooks.on_disk(BUILT[name](InMemory(), InMemory())) is None


SIZE, RECORDS = 9_000, 40


def array_records(folder: pathlib.Path) -> Any:
    rng = np.random.default_rng(0)
    for name in "ab":
        write(folder / f"{name}.array_record", [rng.bytes(SIZE) for _ in range(RECORDS)], "group_size:1,uncompressed")
    return ArrayRecord(str(folder / "*.array_record"), decode_batch=DecodeRaw(np.uint8, SIZE))


def tars(folder: pathlib.Path) -> Any:
    rng = np.random.default_rng(0)
    for name in "ab":
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for record in range(RECORDS):
                member = tarfile.TarInfo(f"{name}{record}.bin")
                member.size = SIZE
                archive.addfile(member, io.BytesIO(rng.bytes(SIZE)))
    return WebDataset(str(folder / "*.tar"))


def token_files(folder: pathlib.Path) -> str:
    rng = np.random.default_rng(0)
    for name, dtype in (("a", np.uint16), ("b", np.uint32)):
        tokens = rng.integers(1, 50_000, SIZE * RECORDS, dtype)
        tokens[SIZE - 1 :: SIZE] = 0
        np.save(folder / f"{name}.npy", tokens)
    return str(folder / "*.npy")


def tokens(folder: pathlib.Path) -> Any:
    return Tokens(token_files(folder), SIZE, next_token=False)


def token_documents(folder: pathlib.Path) -> Any:
    return Tokens.documents(token_files(folder), eod=0)


@pytest.mark.parametrize("make", [array_records, tars, tokens, token_documents])
def test_the_disk_fetches_what_is_missing(make: Callable[[pathlib.Path], Any], tmp_path: pathlib.Path) -> None:
    source = make(tmp_path)
    source.close()
    ids = np.random.default_rng(1).permutation(2 * RECORDS)[:30]
    uncache(tmp_path)
    assert source.ask_disk(ids) is False, "the files have not been looked at"
    expected = source.__getitems__(ids)
    uncache(tmp_path)
    assert source.ask_disk(np.empty(0, np.int64)) is False
    assert source.ask_disk(ids) is True
    deadline = time.monotonic() + 10
    while source.ask_disk(ids):
        assert time.monotonic() < deadline, "the records have not arrived"
        time.sleep(0.01)
    for one, two in zip(source.__getitems__(ids), expected, strict=True):
        np.testing.assert_equal(one, two)
    (tmp_path / sorted(path.name for path in tmp_path.iterdir())[0]).unlink()
    source.close()
    assert source.ask_disk(ids) is False, "a file that is gone is for the read to report"
