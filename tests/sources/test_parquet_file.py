"""The one reader of Parquet rows, on files that pyarrow wrote."""

import pathlib

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from meshfeed._src.base import errors  # noqa: E402
from meshfeed._src.sources.files.parquet import ParquetFile  # noqa: E402


@pytest.fixture
def path(tmp_path):
    """Row groups of 7, 7, 0, 7 and 4 rows."""
    path = str(tmp_path / "rows.parquet")
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for start, rows in ((0, 7), (7, 7), (14, 0), (14, 7), (21, 4)):
            ids = np.arange(start, start + rows)
            writer.write_table(pa.table({"id": ids, "text": [str(i) for i in ids]}, schema))
    return path


def ids_of(batches):
    found = []
    for first, batch in batches:
        ids = batch.column(0).to_pylist()
        assert ids, "an empty batch"
        assert first == ids[0]
        found += ids
    return found


def test_any_range_of_rows(path):
    with ParquetFile(path) as file:
        assert file.group_rows == [7, 7, 0, 7, 4]
        assert file.schema.names == ["id", "text"]
        for start in range(26):
            assert ids_of(file.batches(start)) == list(range(start, 25))
            for stop in range(start, 26):
                for batch_rows in (None, 1, 3, 100):
                    assert ids_of(file.batches(start, stop, batch_rows=batch_rows)) == list(range(start, stop))


def test_the_range_does_not_move_batch_boundaries(path):
    with ParquetFile(path) as file:
        assert [(first, len(batch)) for first, batch in file.batches(5, 20, batch_rows=3)] == [
            *((5, 1), (6, 1), (7, 3), (10, 3), (13, 1), (14, 3), (17, 3))
        ]


def test_some_columns_of_some_row_groups(path):
    with ParquetFile(path, row_groups=[3, 0]) as file:
        assert file.group_rows == [7, 7]
        batches = list(file.batches(5, 9, ["text"]))
    assert [first for first, _ in batches] == [5, 7]
    assert [batch.to_pydict() for _, batch in batches] == [{"text": ["19", "20"]}, {"text": ["0", "1"]}]


def test_a_whole_row_group(path):
    with ParquetFile(path) as file:
        assert file.read_group(1).column("id").to_pylist() == list(range(7, 14))
        assert file.read_group(2).num_rows == 0
        assert file.read_group(2).schema == file.schema


def test_a_large_row_group_is_read_in_bounded_memory(tmp_path):
    path, num_bytes = str(tmp_path / "large.parquet"), 64 << 20
    values = np.random.default_rng(0).integers(0, 1 << 62, num_bytes // 8)
    pq.write_table(pa.table({"x": values}), path, compression="none", use_dictionary=False)
    pool, before = pa.default_memory_pool(), pa.default_memory_pool().bytes_allocated()
    with ParquetFile(path) as file:
        assert len(file.group_rows) < 10
        largest = 0
        for _, batch in file.batches():
            largest = max(largest, pool.bytes_allocated() - before)
            del batch
    assert largest < num_bytes // 16


def test_a_stream_is_closed_with_its_reader(path):
    stream = open(path, "rb")  # noqa: SIM115
    with ParquetFile("memory://rows", stream=stream) as file:
        assert ids_of(file.batches(20)) == [20, 21, 22, 23, 24]
    assert stream.closed


def test_damage_names_the_file(path, tmp_path):
    content = pathlib.Path(path).read_bytes()
    damaged = bytearray(content)
    damaged[4:40] = b"\xff" * 36  # the header of the first page
    for name, wrong in (("cut", content[:-9]), ("empty", b""), ("garbage", b"PAR1 or not"), ("page", bytes(damaged))):
        target = tmp_path / name
        target.write_bytes(wrong)
        with pytest.raises(errors.CorruptDataError, match="no intact Parquet file") as caught:
            with ParquetFile(str(target)) as file:
                list(file.batches())
        assert caught.value.path == str(target)


def test_an_error_of_the_file_system_may_be_retried(tmp_path):
    with pytest.raises(FileNotFoundError):
        ParquetFile(str(tmp_path / "none.parquet"))
