"""Rows of columns in many chunks, of mapped files and in memory, are those that Arrow has."""

from __future__ import annotations

import math
import pathlib
import threading
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")

from meshfeed._src.base.errors import SourceError  # noqa: E402  # after the checks that both are installed
from meshfeed._src.sources.huggingface import gather  # noqa: E402
from meshfeed.sources import HuggingFace  # noqa: E402

CHUNKS, ROWS = 24, 5  # of each chunk; the last has fewer


def lists(ids: np.ndarray) -> Any:
    values = np.repeat(ids, 3).astype(np.int16) * 10 + np.tile([1, 2, 3], len(ids)).astype(np.int16)
    return pa.ListArray.from_arrays(np.arange(0, 3 * len(ids) + 1, 3, dtype=np.int32), values)


def fixed(ids: np.ndarray, dtype: type, *sizes: int) -> Any:
    array = pa.array((np.repeat(ids, math.prod(sizes)) * 7 + np.arange(len(ids) * math.prod(sizes))).astype(dtype))
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


# Name → the column's values for some ids, which differ from row to row.
COLUMNS: dict[str, Any] = {
    "int8": lambda ids: pa.array(ids.astype(np.int8)),
    "int64": lambda ids: pa.array(ids * 1_000_003),
    "float16": lambda ids: pa.array(ids.astype(np.float16)),
    "bool": lambda ids: pa.array(ids % 3 == 0),
    "list": lists,
    "one": lambda ids: fixed(ids, np.int32, 1),
    "fixed": lambda ids: fixed(ids, np.uint8, 4),
    "nested": lambda ids: fixed(ids, np.int64, 2, 2),
    "struct": lambda ids: pa.StructArray.from_arrays([pa.array(ids), pa.array(ids * 0.5)], ["a", "b"]),
}


def table_of(first: int, num_chunks: int) -> Any:
    """A table of ``num_chunks`` chunks, whose ids follow one another from ``first``."""
    parts = []
    for number in range(num_chunks):
        ids = np.arange(first + number * ROWS, first + number * ROWS + ROWS - (number == num_chunks - 1))
        parts.append(pa.table({name: make(ids) for name, make in COLUMNS.items()}))
    return pa.concat_tables(parts)


def mapped(table: Any, path: pathlib.Path) -> Any:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return datasets.Dataset.from_file(str(path))


def make(kind: str, folder: pathlib.Path) -> Any:
    one, two = table_of(0, CHUNKS), table_of(1_000, CHUNKS)
    if kind == "memory":
        return datasets.Dataset(datasets.table.InMemoryTable(one))
    if kind == "mapped":
        return mapped(one, folder / "one")
    if kind == "sliced":
        return mapped(one, folder / "one").select(range(3, 40))
    both = [mapped(one, folder / "one"), datasets.Dataset(datasets.table.InMemoryTable(two))]
    if kind == "two files":
        both[1] = mapped(two, folder / "two")
    return datasets.concatenate_datasets(both)


@pytest.mark.parametrize("max_regions", [None, 2])
@pytest.mark.parametrize("kind", ["memory", "mapped", "sliced", "two files", "mapped and memory"])
@pytest.mark.parametrize("name", list(COLUMNS))
def test_rows_of_many_chunks_are_those_of_the_table(
    name: str, kind: str, max_regions: int | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_regions is not None:
        monkeypatch.setattr(gather, "_MAX_REGIONS", max_regions)
    dataset = make(kind, tmp_path).select_columns([name])
    source: Any = HuggingFace(dataset)
    expected = dataset.with_format("arrow")[:].column(name).to_pylist()
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, len(dataset), 600):  # few rows of a chunk, and many
        ids = rng.integers(0, len(dataset), size)
        rows = source.read_batch(ids)[name]
        found = (
            [dict(zip(rows, pair, strict=True)) for pair in zip(*rows.values(), strict=True)]
            if name == "struct"
            else rows
        )
        for row, record in zip(found, ids.tolist(), strict=True):
            assert (row if name == "struct" else row.tolist()) == expected[record]
        if name != "struct" and size > 1:
            rows[...] = 0  # a copy, that the table does not see
            assert source.read_batch(ids[:1])[name][0].tolist() == expected[ids[0]]


@pytest.mark.parametrize("last", ["null", "longer", "null in a list"])
def test_a_chunk_whose_rows_must_be_checked_is_named_among_others(last: str, tmp_path: pathlib.Path) -> None:
    odd = {"null": [[1, 2], None], "longer": [[1, 2, 3], [4, 5, 6]], "null in a list": [[1, 2], [None, 3]]}[last]
    lists = [[[i, i + 1], [i + 2, i + 3]] for i in range(8)]
    chunks = [pa.table({"x": pa.array(values, pa.list_(pa.int32()))}) for values in [*lists, odd]]
    source: Any = HuggingFace(mapped(pa.concat_tables(chunks), tmp_path / "one"))
    assert source.read_batch([5, 0, 14])["x"].tolist() == [[4, 5], [0, 1], [7, 8]]
    with pytest.raises(
        SourceError, match="'x'.* record 17" if last != "longer" else r"lists of lengths \[3\] in record 17"
    ):
        source.read_batch([5, 0, 17])
    if last == "longer":
        assert source.read_batch([17, 16])["x"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert source.read_batch([0, 5])["x"].tolist() == [[0, 1], [4, 5]]


def test_chunks_of_one_buffer_whose_lists_have_other_lengths() -> None:
    values = np.arange(12, dtype=np.int32)
    buffer = pa.py_buffer(values.tobytes())

    def chunk(start: int, width: int) -> Any:
        inner = pa.Array.from_buffers(pa.int32(), 6, [None, buffer.slice(4 * start, 24)])
        return pa.ListArray.from_arrays(np.arange(0, 7, width, dtype=np.int32), inner)

    table = pa.chunked_array([chunk(6, 2), chunk(0, 3)])
    source: Any = HuggingFace(datasets.Dataset(datasets.table.InMemoryTable(pa.table({"x": table}))))
    assert source.read_batch([2, 0])["x"].tolist() == [[10, 11], [6, 7]]
    assert source.read_batch([4, 3])["x"].tolist() == [[3, 4, 5], [0, 1, 2]]


def test_several_threads_may_describe_the_same_chunks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_MAX_REGIONS", 3)
    dataset = make("mapped and memory", tmp_path).select_columns(["list"])
    source: Any = HuggingFace(dataset)
    expected = dataset.with_format("arrow")[:].column("list").to_pylist()
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(200):
            ids = rng.integers(0, len(dataset), 16)
            if source.read_batch(ids)["list"].tolist() != [expected[i] for i in ids.tolist()]:
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
