from __future__ import annotations

import gzip
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("array_record")

from array_record_files import some_records, write

import meshfeed
from meshfeed._src.base.errors import CorruptDataError, SettingsError, SourceError
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record import rows as array_record
from meshfeed._src.sources.array_record.readers import expected_microseconds
from meshfeed._src.sources.array_record.source import ArrayRecord
from meshfeed._src.sources.files import open_files


@pytest.fixture(scope="module")
def three_files(tmp_path_factory) -> tuple[list[str], list[bytes]]:
    """Files of 40, 0 and 300 records, of three layouts."""
    folder = tmp_path_factory.mktemp("three")
    records = some_records(340)
    paths = [
        write(folder / "b.array_record", records[:40]),
        write(folder / "a.array_record", [], "group_size:1"),
        write(folder / "c.array_record", records[40:], "group_size:16,zstd"),
    ]
    return paths, records


def use_library(monkeypatch, as_list: bool) -> None:
    """Has scattered rows read by the library, one way or the other."""
    monkeypatch.setattr(array_record, "read_direct", lambda *_: None)
    monkeypatch.setattr(readers, "expected_microseconds", lambda *_: (2.0, 1.0) if as_list else (1.0, 2.0))


@given(ids=st.lists(st.integers(0, 339), max_size=60))
@settings(max_examples=60, deadline=None)
def test_records_come_in_the_order_asked_for(three_files, ids: list[int]) -> None:
    paths, records = three_files
    assert ArrayRecord(paths).read_raw(np.array(ids, np.int64)) == [records[i] for i in ids]


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:1,zstd", "group_size:64,brotli:2"])
@pytest.mark.parametrize("as_list", [True, False])
def test_every_way_of_the_library_gives_the_same_bytes(tmp_path, monkeypatch, options: str, as_list: bool) -> None:
    use_library(monkeypatch, as_list)
    records = some_records(700)
    source = ArrayRecord(write(tmp_path / "x", records, options))
    rng = np.random.default_rng(0)
    runs = np.concatenate([np.arange(start, start + 9) for start in (600, 0, 650, 5)])
    requests = [
        np.arange(700),
        np.arange(5, 300),
        rng.permutation(700),
        rng.integers(0, 700, 33),
        np.array([699]),
        runs,
    ]
    for ids in requests:
        assert source.read_raw(ids) == [records[i] for i in ids]


def file_of_records(num_records: int, group_size: int = 1, num_bytes: int = 10**8) -> readers.ShardFile:
    return readers.ShardFile("x", num_bytes, "", num_records, group_size)


def test_predicted_crossover_between_single_reads_and_lists() -> None:
    def reads_as_list(file: readers.ShardFile, rows) -> bool:
        singles, listed = expected_microseconds(file, np.array(rows))
        return listed < singles

    spread = list(range(0, 100_000, 1_000))
    assert not reads_as_list(file_of_records(100_000), spread[:64])
    assert not reads_as_list(file_of_records(1_000_000), spread)
    assert reads_as_list(file_of_records(1_000), list(range(0, 999, 2)))
    assert reads_as_list(file_of_records(100_000, 256), list(range(0, 256, 4)))  # one chunk, decoded once
    assert not reads_as_list(file_of_records(100_000, 256), spread[:8])


def test_single_reads_only_of_what_the_page_cache_has(tmp_path) -> None:
    path = write(tmp_path / "x", [bytes(4096)] * 2000)
    file, taken = readers.inspect_file(path), []

    class Library:
        def read(self, *rows):
            taken.append("single" if len(rows) == 2 else "list")
            return [b"x"] * (1 if len(rows) == 2 else len(rows[0]))

    opened = readers.OpenFile(path, os.stat(path), Library, None)
    rows = np.arange(0, 2000, 100)
    pathlib.Path(path).read_bytes()
    assert len(readers.read_by_library(opened, file, rows, 0)) == 20
    assert set(taken) == {"single"}
    with open(path, "rb") as stored:
        os.fsync(stored.fileno())
        os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(stored.fileno(), [bytearray(1)], file.num_bytes // 2, os.RWF_NOWAIT)
        except OSError:
            pass
        else:
            pytest.skip("this file system keeps its pages")
    taken.clear()
    assert len(readers.read_by_library(opened, file, rows, 0)) == 20
    assert taken == ["list"]


def test_globs_lists_and_order(three_files, tmp_path) -> None:
    paths, records = three_files
    folder = os.path.dirname(paths[0])
    by_name = ArrayRecord(os.path.join(folder, "*.array_record"))
    assert [by_name[0], by_name[339], len(by_name)] == [records[0], records[339], 340]
    reverse = ArrayRecord([pathlib.Path(paths[2]), "file://" + paths[0]])
    assert [reverse[0], reverse[300]] == [records[40], records[0]]
    assert reverse.file_of(299) == paths[2]
    assert reverse.file_of(300) == paths[0]
    odd = write(tmp_path / "odd[1].array_record", some_records(3))
    assert len(ArrayRecord(odd)) == 3


def test_decoders(tmp_path) -> None:
    rows = np.arange(40, dtype=np.int32).reshape(10, 4)
    path = write(tmp_path / "x", [row.tobytes() for row in rows])

    def decode_batch(records: list[bytes]) -> dict:
        return {"tokens": np.frombuffer(b"".join(records), np.int32).reshape(len(records), -1)}

    for source in (
        ArrayRecord(path, decode=lambda record: {"tokens": np.frombuffer(record, np.int32)}),
        ArrayRecord(path, decode_batch=decode_batch),
    ):
        np.testing.assert_array_equal(source[np.int64(3)]["tokens"], rows[3])
        np.testing.assert_array_equal([r["tokens"] for r in source.__getitems__([9, 0])], rows[[9, 0]])
        assert source.read_raw([2]) == [rows[2].tobytes()]
    assert ArrayRecord(path).__getitems__([1]) == [rows[1].tobytes()]
    with pytest.raises(SettingsError, match="both decode and decode_batch"):
        ArrayRecord(path, len, len)


@pytest.mark.parametrize("record_id", [-1, 340])
def test_ids_out_of_range(three_files, record_id: int) -> None:
    with pytest.raises(IndexError, match=f"record id {record_id} is out of range.* 340 records"):
        ArrayRecord(three_files[0]).read_raw([0, record_id])


def test_missing_files_are_named(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    good = write(tmp_path / "good", some_records(1))
    for paths, message in [
        ([], "empty list"),
        (str(tmp_path / "*.nothing"), r"no file matches .*\*\.nothing"),
        ([good, str(tmp_path / "gone")], "there is no file .*gone"),
        (tmp_path / "folder", "got the folder .*folder"),
        (7, "got 7 "),
        ([good, None], "got None for its files"),
        (
            pathlib.Path("gs://bucket/x"),
            r"no file 'gs:/bucket/x' .*\. Pass the URL as text, 'gs://bucket/x': pathlib merges",
        ),
        (
            pathlib.Path("s3://bucket/*.x"),
            r"no file matches 's3:/bucket/\*\.x' .*\. Pass the URL as text, 's3://bucket/\*",
        ),
        ("nosuchprotocol://bucket/x", "fsspec cannot open.*nosuchprotocol"),
    ]:
        with pytest.raises((SourceError, SettingsError), match=message):
            ArrayRecord(paths)  # type: ignore[arg-type]


def test_urls_that_are_no_files(memory) -> None:
    memory.pipe_file("/bucket/x", b"1")
    with pytest.raises(CorruptDataError, match=r"memory:///bucket/x: 1 bytes without the postscript"):
        ArrayRecord("memory://bucket/*")
    with pytest.raises(SourceError, match=r"got the folder 'memory://bucket'"):
        ArrayRecord("memory://bucket")
    with pytest.raises(SourceError, match=r"no file matches 'memory://bucket/\*.y'"):
        ArrayRecord("memory://bucket/*.y")


@pytest.mark.parametrize("options", ["group_size:1", "group_size:4"])
def test_compressed_files_are_read_from_a_copy_in_the_cache(options: str, tmp_path: pathlib.Path) -> None:
    records = [b"", *some_records(20)]
    path = pathlib.Path(f"{write(tmp_path / 'a', records, options)}.gz")
    path.write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    with pytest.raises(SettingsError, match=r"compressed file .*a.gz' and no cache"):
        ArrayRecord(path)
    source = ArrayRecord(path, cache=meshfeed.ShardCache(tmp_path / "cache"))
    assert source.read_raw(np.arange(21)) == records
    path.write_bytes(gzip.compress(b"x" * 100))
    with pytest.raises(CorruptDataError, match=r"a.gz: 100 bytes are not a whole ArrayRecord file"):
        ArrayRecord(path, cache=meshfeed.ShardCache(tmp_path / "other"))


def test_a_folder_is_no_cache() -> None:
    with pytest.raises(SettingsError, match=r"cache='/tmp/cache'. Expected a meshfeed.ShardCache") as error:
        ArrayRecord("memory://bucket/*", cache="/tmp/cache")  # type: ignore[arg-type]
    assert error.value.setting == "cache"


def test_damaged_files_are_refused_by_name(tmp_path) -> None:
    whole = pathlib.Path(write(tmp_path / "whole", some_records(3000))).read_bytes()
    noise = np.random.default_rng(0).bytes(2 << 16)
    flipped_footer = bytearray(whole)
    flipped_footer[-(1 << 16) + 70] ^= 1
    for name, content in {
        "empty": b"",
        "short": whole[:-1],
        "half": whole[: len(whole) // 2],
        "appended": whole + b"xx",
        "text": b"hello\n" * 100,
        "noise": noise,
        "flipped_footer": bytes(flipped_footer),
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CorruptDataError, match=f"{name}.*(ArrayRecord|empty)") as caught:
            ArrayRecord([tmp_path / "whole", path])
        assert caught.value.path == str(path)


def test_a_file_of_no_records_is_no_damage_but_no_source_either(tmp_path) -> None:
    path = write(tmp_path / "zero", [])
    with pytest.raises(SourceError, match=r"0 records in all.*zero") as caught:
        ArrayRecord(path)
    assert not isinstance(caught.value, CorruptDataError)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_flipped_bit_names_file_and_record(tmp_path, monkeypatch, as_list: bool) -> None:
    use_library(monkeypatch, as_list)
    records = some_records(400)
    first = write(tmp_path / "first", records[:100])
    second = pathlib.Path(write(tmp_path / "second", records[100:]))
    content = bytearray(second.read_bytes())
    content[content.index(records[123])] ^= 1
    second.write_bytes(content)
    source = ArrayRecord([first, second])
    for ids in ([5, 123, 300], np.arange(400), [123]):
        with pytest.raises(CorruptDataError, match=r"second: record 123 \(row 23 of the file\) is damaged") as caught:
            source.read_raw(ids)
        assert (caught.value.path, caught.value.record_id) == (str(second), 123)
    others = [i for i in range(400) if i != 123]  # an error does not spoil the reader for the rest
    assert source.read_raw(others) == [records[i] for i in others]


def test_a_file_that_changes_or_goes_is_noticed_when_it_is_opened(tmp_path) -> None:
    path = write(tmp_path / "x", some_records(10))
    source = ArrayRecord(path)
    write(tmp_path / "x", some_records(11))
    with pytest.raises(SourceError, match=r"has changed.* 10 records .* 11 in"):
        source[0]
    os.unlink(path)
    with pytest.raises(SourceError, match="is gone"):
        source[0]


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:1,zstd"])
def test_a_file_that_is_cut_short_while_it_is_open_gives_no_empty_records(tmp_path, monkeypatch, options: str) -> None:
    """As the library does, without a word."""
    records = [np.random.default_rng(i).bytes(500) for i in range(300)]
    source = ArrayRecord(write(tmp_path / "x", [b"", *records], options))
    assert source.read_raw([0, 1, 2]) == [b"", *records[:2]]
    os.truncate(tmp_path / "x", 70_000)
    for way in ("direct", True, False):
        if way != "direct":
            use_library(monkeypatch, way)
        for ids in ([290, 3, 299], np.arange(290, 300), [299]):
            with pytest.raises(SourceError, match=r"has changed since .* 70,000 now"):
                source.read_raw(ids)


def test_fingerprint(three_files, tmp_path) -> None:
    paths, records = three_files
    found = ArrayRecord(paths).fingerprint()
    assert found["kind"] == "array_record"
    assert found["records"] == 340
    assert found["files"]["count"] == 3
    assert found["files"]["bytes"] == sum(os.path.getsize(path) for path in paths)
    moved = []
    for path in paths:
        moved.append(tmp_path / os.path.basename(path))
        moved[-1].write_bytes(pathlib.Path(path).read_bytes())
    assert ArrayRecord(moved).fingerprint() == found
    assert ArrayRecord(moved[::-1]).fingerprint() != found
    other = [bytes(len(record)) for record in records]  # same sizes, names and counts
    write(moved[0], other[:40])
    assert ArrayRecord(moved).fingerprint()["files"] == ArrayRecord(paths).fingerprint()["files"]
    assert ArrayRecord(moved).fingerprint() != found


def test_open_readers_are_bounded(tmp_path) -> None:
    paths = [write(tmp_path / f"{i}", some_records(2, i)) for i in range(9)]
    source = ArrayRecord(paths)
    source._pool = pool = open_files.ShardPool(max_files=3)
    assert source.read_raw(np.arange(18)[::-1])[-1] == some_records(1)[0]
    assert len(pool) == 3
    source.close()
    assert len(pool) == 0
    assert source[17] == some_records(1, 9)[0]
    few_chunks = open_files.ShardPool(max_entries=2 * open_files._LEAST_ENTRIES)
    source._pool = few_chunks
    source.read_raw(np.arange(18))
    assert len(few_chunks._known) == 2


def test_threads_read_right_while_readers_are_dropped(tmp_path) -> None:
    paths = [write(tmp_path / f"{i}", some_records(50, 50 * i)) for i in range(6)]
    records = some_records(300)
    source = ArrayRecord(paths)
    source._pool = open_files.ShardPool(max_files=2)
    wrong: list[object] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            ids = rng.integers(0, 300, 40)
            if source.read_raw(ids) != [records[i] for i in ids]:
                wrong.append(ids)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_pickle_carries_no_open_file(three_files) -> None:
    source = ArrayRecord(three_files[0])
    source[0]
    copy = pickle.loads(pickle.dumps(source))
    assert copy[339] == three_files[1][339]
    assert copy.fingerprint() == source.fingerprint()


@pytest.mark.slow
def test_the_library_is_imported_only_when_needed() -> None:
    code = (
        "import sys, meshfeed._src.sources.array_record.source;"
        "assert not {'array_record', 'fsspec', 'grain', 'orbax'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
