"""Reading ArrayRecord files past the library gives its bytes, or leaves the work to it."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from array_record_files import some_records, write
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed import CorruptDataError, SourceError
from meshfeed._src.base.memory import is_aligned
from meshfeed._src.reading.records import SourceReader
from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.rows import read_direct, read_into
from meshfeed._src.sources.files import open_files as pool_of_files
from meshfeed._src.sources.files.open_files import Descriptor, ShardPool
from meshfeed.sources import ArrayRecord, DecodeRaw

riegeli = pytest.importorskip(
    "meshfeed._src.sources.array_record._riegeli", reason="the package was installed without a C compiler"
)

PLAIN = "group_size:1,uncompressed"
ZSTD = "group_size:1,zstd:3"
needs_zstd = pytest.mark.skipif(not riegeli.HAS_ZSTD, reason="this system has no libzstd")
both = pytest.mark.parametrize("options", [PLAIN, pytest.param(ZSTD, marks=needs_zstd)], ids=["plain", "zstd"])


def random_bytes(sizes: list[int], seed: int = 0, *, values: int = 256) -> list[bytes]:
    """Fewer values than 256 can be compressed."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, values, size, np.uint8).tobytes() for size in sizes]


def direct_file(path: str, num_records: int) -> readers.DirectFile | None:
    file = Descriptor(path)
    return readers.open_direct(lambda: file, num_records)


def some_file(path: str, num_records: int) -> readers.DirectFile:
    file = direct_file(path, num_records)
    assert file is not None
    return file


def open_file(file: readers.DirectFile) -> readers.OpenFile:
    return readers.OpenFile("", os.stat("/"), lambda: None, file)


def footer_of(path: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The offsets and the sizes of the records of a file."""
    with open(path, "rb") as file:
        footer = readers._read_footer(file.fileno(), os.path.getsize(path), number)
    assert footer is not None
    return footer[0], footer[1]


def read_directly(path: str, number: int, rows: list[int] | np.ndarray) -> list[bytes] | None:
    """Rows without any help of the library, as bytes and, by size, into buffers; None if they cannot be read this way."""
    file, rows = some_file(path, number), np.asarray(rows, np.int64)
    found = read_direct([open_file(file)], None, rows)
    sizes = footer_of(path, number)[1][rows]
    guard = 7  # bytes on both sides that must not be written
    for size in np.unique(sizes[sizes > 0]).tolist():
        alike = np.flatnonzero(sizes == size)
        out = np.full(len(alike) * size + 2 * guard, 0xA5, np.uint8)
        done = read_into([file], None, rows[alike], np.arange(len(alike)) * size + guard, out, width=size)
        assert (out[:guard] == 0xA5).all()
        assert (out[len(out) - guard :] == 0xA5).all()
        if found is not None:
            assert done
            assert out[guard:-guard].tobytes() == b"".join([found[slot] for slot in alike.tolist()])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("direct")


SIZES = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(130_000, 132_000))


@both
@given(sizes=st.lists(SIZES, max_size=40), values=st.sampled_from([2, 16, 256]))
@settings(max_examples=40, deadline=None)
def test_records_of_all_sizes_are_those_that_were_written(
    folder: pathlib.Path, options: str, sizes: list[int], values: int
) -> None:
    records = random_bytes([*sizes, 5], values=values)
    path = write(folder / "sizes", records, options)
    assert read_directly(path, len(records), np.arange(len(records))) == records
    order = np.random.default_rng(1).integers(0, len(records), 30)
    assert read_directly(path, len(records), order) == [records[i] for i in order]
    assert ArrayRecord(path).read_raw(order) == [records[i] for i in order]


def test_every_length_has_the_hash_that_the_library_stores(folder: pathlib.Path) -> None:
    """0 to 200 bytes go through each branch of the hash."""
    records = random_bytes(list(range(200)))
    path = write(folder / "lengths", records, PLAIN)
    assert read_directly(path, 200, np.arange(200)) == records


def test_the_hash_of_known_bytes() -> None:
    """Every Riegeli file begins with a block header and a chunk without data, and so with three hashes."""
    signature = bytes.fromhex(
        "83af70d10d884a3f 0000000000000000 4000000000000000 91bac23c9287e1a9"
        "0000000000000000 e19f13c0e9b1c372 7300000000000000 0000000000000000"
    )
    stored = np.frombuffer(signature, "<u8").tolist()
    assert riegeli.hash(signature[8:24]) == stored[0]
    assert riegeli.hash(signature[32:]) == stored[3]
    assert riegeli.hash(b"") == stored[5]
    assert riegeli.hash(b"\0") != stored[5]


def test_chunks_begin_at_every_place_before_the_edge_of_a_block(folder: pathlib.Path) -> None:
    """So that the header of the next block falls into each byte of a chunk's own header, and of what follows it."""
    records = random_bytes([65_466] * 240)  # chunks of a block less one byte: each begins one byte before the last
    path = write(folder / "edges", records, PLAIN)
    before = -footer_of(path, 240)[0] % 65_536
    assert set(range(1, 100)) <= set(before.tolist())
    assert read_directly(path, 240, np.arange(240)) == records


@pytest.mark.slow
@both
def test_no_flipped_bit_gives_other_bytes(folder: pathlib.Path, options: str) -> None:
    records = random_bytes([40, 41, 300, 3], values=20)
    path = pathlib.Path(write(folder / "flips", records, options))
    whole = path.read_bytes()
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))
    rng = np.random.default_rng(0)
    refused = opened = 0
    for place in used.tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        file = direct_file(str(path), 4)
        if file is not None:
            opened += 1
            for row in range(4):
                out = np.zeros(len(records[row]), np.uint8)
                if read_into([file], None, np.array([row]), np.array([0]), out, width=len(out)):
                    assert out.tobytes() == records[row]
                else:
                    refused += 1
        try:
            found = ArrayRecord(str(path)).read_raw(np.arange(4))
        except CorruptDataError:
            continue
        assert found == records
    assert len(used) > 400
    assert opened > 300
    assert refused > 300


@pytest.mark.slow
def test_offsets_and_sizes_that_are_wrong_touch_no_other_memory(folder: pathlib.Path) -> None:
    """As a footer would have them that was made to do harm: hashes are no seal."""
    records = random_bytes([int(size) for size in np.random.default_rng(0).integers(0, 3000, 300)], values=20)
    rng, sound = np.random.default_rng(1), 0
    for options in (PLAIN, *([ZSTD] if riegeli.HAS_ZSTD else [])):
        path = write(folder / "harm", records, options)
        right, num_bytes = footer_of(path, 300)[0], os.path.getsize(path)
        for trial in range(600):
            offsets = np.sort(rng.integers(0, num_bytes, 41))
            if trial % 2:  # real places, other sizes
                first = int(rng.integers(0, 250))
                offsets = right[first : first + 41].copy()
            offsets[1:] += np.maximum.accumulate(offsets)[:-1] == offsets[1:]
            if (np.diff(offsets) <= 0).any():
                continue
            sizes = rng.integers(1, 5000, 40)
            opened = Descriptor(path)
            index = riegeli.Index(offsets, sizes, options == ZSTD)
            file = readers.DirectFile(index, lambda opened=opened: opened)
            for row in range(40):
                out = np.full(int(sizes[row]) + 64, 0xA5, np.uint8)
                sound += read_into([file], None, np.array([row]), np.array([32]), out, width=int(sizes[row]))
                assert (out[:32] == 0xA5).all()
                assert (out[len(out) - 32 :] == 0xA5).all()
            sound += read_direct([open_file(file)], None, np.arange(40)) is not None
    assert sound < 100


@both
def test_a_damaged_record_is_named_and_the_others_still_read(folder: pathlib.Path, options: str) -> None:
    records = random_bytes([64] * 100)
    path = pathlib.Path(write(folder / "damaged", records, options))
    content = bytearray(path.read_bytes())
    content[content.index(records[23])] ^= 1  # what is random is stored as it is by zstd, too
    path.write_bytes(content)
    source = ArrayRecord(str(path), decode_batch=DecodeRaw(np.uint8, 64))
    for _ in range(10):  # damage is no reason to leave the direct way
        with pytest.raises(CorruptDataError, match=r"damaged: record 23 \(row 23 of the file\) is damaged"):
            SourceReader(source).read(np.arange(40))
    assert source.read_rows(np.arange(40)) is None
    rows = source.read_rows(np.arange(24, 100))
    assert [row.tobytes() for row in rows] == records[24:]


@needs_zstd
def test_rows_of_several_files_lie_in_the_order_asked_for(folder: pathlib.Path) -> None:
    records = random_bytes([96] * 300, values=9)
    paths = [
        write(folder / f"several-{i}", records[100 * i : 100 * i + 100], options)
        for i, options in enumerate((PLAIN, ZSTD, ""))  # zstd:3 is the library's own choice
    ]
    source = ArrayRecord(paths)
    rng = np.random.default_rng(3)
    for ids in (rng.integers(0, 300, 64), np.arange(300), np.arange(300)[::-3], np.array([299]), np.arange(120, 150)):
        rows = source.read_rows(ids)
        assert is_aligned(rows)
        assert rows.shape == (len(ids), 96)
        assert rows.tobytes() == b"".join(records[i] for i in ids)
        assert source.read_raw(ids) == [records[i] for i in ids]
    assert source.read_rows(np.array([], np.int64)) is None
    with pytest.raises(IndexError, match="record id 300 is out of range"):
        source.read_rows([300])


def test_what_cannot_be_read_so_is_left_to_the_library(folder: pathlib.Path, caplog) -> None:
    caplog.set_level("DEBUG", logger="meshfeed")
    records = random_bytes([80] * 20)
    for name, options, stored in (
        ("brotli", "group_size:1,brotli:2", records),
        ("snappy", "group_size:1,snappy", records),
        ("groups", "group_size:4,uncompressed", records),
        ("transposed", "group_size:1,transpose,uncompressed", records),
        ("unlike", PLAIN, [*records[:-1], b"short"]),
    ):
        source = ArrayRecord(write(folder / f"left-{name}", stored, options))
        assert source.read_rows(np.arange(20)) is None, name
        assert source.read_raw(np.arange(20)) == stored, name
        how = "directly" if name == "unlike" else "by the array_record library"
        assert f"left-{name} is read {how}" in caplog.text
    mixed = ArrayRecord([write(folder / "one", records, PLAIN), write(folder / "two", random_bytes([81] * 5), PLAIN)])
    assert mixed.read_rows(np.arange(20)) is not None
    assert mixed.read_rows(np.array([3, 22])) is None


@both
def test_padded_files_are_read_right(folder: pathlib.Path, options: str) -> None:
    records = random_bytes([1000] * 50)
    path = write(folder / "padded", records, f"{options},pad_to_block_boundary:true")
    assert read_directly(path, 50, np.arange(50)) == records
    assert read_directly(path, 50, [49, 0, 7]) == [records[i] for i in (49, 0, 7)]
    assert ArrayRecord(path).read_raw(np.arange(50)) == records


def test_without_the_extension_everything_is_as_before(folder: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "riegeli", None)
    records = random_bytes([8] * 30)
    source = ArrayRecord(write(folder / "without", records, PLAIN), decode_batch=DecodeRaw(np.int64))
    source._pool = ShardPool()
    assert source.read_rows(np.arange(30)) is None
    assert SourceReader(source).read(np.arange(30)).tobytes() == b"".join(records)


def test_a_failed_import_of_the_extension_is_logged_at_debug_level() -> None:
    program = """
import logging, sys
logging.basicConfig(level="DEBUG")
sys.modules["meshfeed._src.sources.array_record._riegeli"] = None
import meshfeed._src.sources.array_record.readers as direct
print(direct.riegeli)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "None\n")
    assert "DEBUG:meshfeed:ArrayRecord files are read by the array_record library" in ended.stderr


def test_without_libzstd_compressed_files_are_left_to_the_library(folder: pathlib.Path, monkeypatch) -> None:
    class WithoutZstd:
        HAS_ZSTD = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(riegeli, name)

    records = random_bytes([8] * 30)
    path = write(folder / "no-libzstd", records, ZSTD)
    monkeypatch.setattr(readers, "riegeli", WithoutZstd())
    assert direct_file(path, 30) is None
    assert ArrayRecord(path).read_raw(np.arange(30)) == records


def uncache(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@both
@pytest.mark.parametrize("on_disk", [None, True, False])  # asked for all records at once, or read by several threads
def test_records_that_are_not_in_the_page_cache(folder: pathlib.Path, options: str, on_disk: bool | None) -> None:
    records = random_bytes([int(size) for size in np.random.default_rng(0).integers(0, 20_000, 400)], values=20)
    path = write(folder / "cold", records, options)
    file, rng = some_file(path, 400), np.random.default_rng(1)
    if on_disk is not None:
        file.index.on_disk = on_disk
    for rows in (rng.permutation(400), np.arange(400), rng.integers(0, 400, 700), np.arange(0)):
        uncache(path)
        assert read_direct([open_file(file)], None, np.asarray(rows, np.int64)) == [records[row] for row in rows]
        uncache(path)
        assert read_directly(path, 400, rows) == [records[row] for row in rows]
    if on_disk is not None:
        assert file.index.on_disk is on_disk


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_damaged_record_that_is_not_in_the_page_cache_is_found(folder: pathlib.Path, on_disk: bool) -> None:
    path = write(folder / "damaged", random_bytes([5_000] * 100), PLAIN)
    file = some_file(path, 100)
    file.index.on_disk = on_disk
    offset = footer_of(path, 100)[0][70] + 2_000
    with open(path, "r+b") as stored:
        stored.seek(offset)
        flipped = stored.read(1)[0] ^ 1
        stored.seek(offset)
        stored.write(bytes([flipped]))
    uncache(path)
    assert read_direct([open_file(file)], None, np.random.default_rng(0).permutation(100)) is None
    with pytest.raises(AttributeError):
        del file.index.on_disk


def test_records_of_many_files_by_one_call(folder: pathlib.Path) -> None:
    sizes = np.random.default_rng(0).integers(0, 500, 600).tolist()
    records = random_bytes(sizes, values=20)
    paths = [write(folder / f"many-{i}", records[5 * i : 5 * i + 5], ZSTD if i % 2 else PLAIN) for i in range(120)]
    source = ArrayRecord(paths)
    ids = np.random.default_rng(1).permutation(600)
    assert source.read_raw(ids) == [records[i] for i in ids]
    assert source.read_raw(np.arange(600)) == records
    opened = [some_file(path, 5) for path in paths]
    assert (
        read_direct(list(map(open_file, opened)), np.repeat(np.arange(120), 5), np.tile(np.arange(5), 120)) == records
    )


def test_arguments_that_would_touch_other_memory_are_refused(folder: pathlib.Path) -> None:
    path = write(folder / "arguments", random_bytes([24] * 10), PLAIN)
    index, fds = [some_file(path, 10).index], np.array([os.open(path, os.O_RDONLY)])
    out, rows, places = np.empty(48, np.uint8), np.arange(2), np.array([0, 24])
    assert riegeli.read(index, fds, None, rows, places, out, 24) == 2
    for wrong in (np.array([0, 25]), np.array([-1, 24]), np.array([0, 1 << 62])):
        with pytest.raises(ValueError, match="no room for a record"):
            riegeli.read(index, fds, None, rows, wrong, out, 24)
    with pytest.raises(ValueError, match="no room for a record"):
        riegeli.read(index, fds, None, rows, places, out, 25)
    for files, numbers, wanted in ((index, None, places[:1]), (index * 2, None, places), (index, rows[:1], places)):
        with pytest.raises(ValueError, match="differ in length"):
            riegeli.read(files, fds, numbers, rows, wanted, out, 24)
    with pytest.raises(IndexError, match="file index"):
        riegeli.read(index, fds, np.array([0, 1]), rows, places, out, 24)
    for width in (0, -1):
        with pytest.raises(ValueError, match="width is not positive"):
            riegeli.read(index, fds, None, rows, places, out, width)
    assert riegeli.read(index, fds, None, rows, None, None, 0) == [out[:24].tobytes(), out[24:].tobytes()]
    for numbers, error in ((rows[:1], ValueError), (np.array([0, 1]), IndexError), (rows.astype(np.int32), TypeError)):
        with pytest.raises(error):
            riegeli.read(index, fds, numbers, rows, None, None, 0)
    with pytest.raises(TypeError, match="sequence of Index"):
        riegeli.read([3], fds, None, rows, places, out, 24)
    with pytest.raises(TypeError, match="int64"):
        riegeli.read(index, fds, None, rows.astype(np.int32), places, out, 24)
    with pytest.raises(TypeError, match="int64"):
        riegeli.read(index, fds, None, rows, places.astype(np.float64), out, 24)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        riegeli.read(index, fds, None, rows, places, out, 24)
    os.close(int(fds[0]))
    for offsets, sizes in (([0, 0], [1]), ([5, 3], [1]), ([0, 9], [-1]), ([0, 9], [1, 2]), ([-1, 9], [1]), ([], [])):
        with pytest.raises(ValueError, match="not the offsets and sizes"):
            riegeli.Index(np.array(offsets, np.int64), np.array(sizes, np.int64), False)


def test_a_file_that_changes_under_it_gives_no_wrong_bytes(folder: pathlib.Path) -> None:
    records = random_bytes([500] * 400)
    path = write(folder / "cut", records, PLAIN)
    source = ArrayRecord(path)
    assert source.read_raw(np.arange(3)) == records[:3]
    os.truncate(path, 70_000)
    assert source.read_raw(np.arange(3)) == records[:3]
    for ids in ([390, 3, 395], np.arange(390, 400), [399]):
        with pytest.raises(SourceError, match=r"cut has changed .* 70,000 now"):
            source.read_raw(ids)


def test_who_overrides_read_raw_means_other_bytes(folder: pathlib.Path) -> None:
    class Inverted(ArrayRecord):
        def read_raw(self, record_ids):
            return [bytes(255 - byte for byte in record) for record in super().read_raw(record_ids)]

    records = random_bytes([16] * 5)
    path = write(folder / "inverted", records, PLAIN)
    decode = DecodeRaw(np.uint8, 16)
    plain = SourceReader(ArrayRecord(path, decode_batch=decode)).read(np.arange(5))
    assert (SourceReader(Inverted(path, decode_batch=decode)).read(np.arange(5)) == 255 - plain).all()
    patched = ArrayRecord(path, decode_batch=decode)
    patched.read_raw = lambda ids: [bytes(16)] * len(ids)
    assert not SourceReader(patched).read(np.arange(5)).any()


def test_who_overrides_the_decoder_is_called(folder: pathlib.Path) -> None:
    class Shifted(DecodeRaw):
        def __call__(self, records):
            return super().__call__(records) + 100

    class Delegating:
        def __init__(self, decode):
            self._decode = decode

        def __call__(self, records):
            return self._decode(records) + 100

        def __getattr__(self, name):
            return getattr(self._decode, name)

    path = write(folder / "shifted", random_bytes([16] * 5), PLAIN)
    decode = DecodeRaw(np.int32, 4)
    plain = SourceReader(ArrayRecord(path, decode_batch=decode)).read(np.arange(5))
    for other in (Shifted(np.int32, 4), Delegating(decode)):
        assert (SourceReader(ArrayRecord(path, decode_batch=other)).read(np.arange(5)) == plain + 100).all()


def test_rows_that_the_file_has_not_are_refused(folder: pathlib.Path) -> None:
    path = write(folder / "few", random_bytes([24] * 10), PLAIN)
    file, out = some_file(path, 10), np.zeros(240, np.uint8)
    places = np.arange(10) * 24
    assert read_into([file], None, np.arange(10), places, out, width=24)
    for rows in ([10], [9, 10], [0, 1, 2, 1 << 40], [-1], [3, 1 << 62]):
        rows = np.array(rows, np.int64)
        assert not read_into([file], None, rows, places[: len(rows)], out, width=24)
        assert read_direct([open_file(file)], None, rows) is None
    few = write(folder / "same-name", random_bytes([24] * 10), PLAIN)
    os.utime(few, ns=(0, 0))
    small = ArrayRecord(few)
    assert len(small.read_raw(np.arange(10))) == 10
    write(folder / "same-name", random_bytes([24] * 300), PLAIN)  # as many bytes: files end at the edge of a block
    os.utime(few, ns=(0, 0))
    large = ArrayRecord(few)
    assert large.read_raw(np.arange(300)) == random_bytes([24] * 300)


@pytest.mark.parametrize("options", ["group_size:4,uncompressed", "group_size:1,brotli:2", PLAIN])
def test_empty_records_of_a_file_that_is_gone_are_read_while_it_is_open(folder: pathlib.Path, options: str) -> None:
    records = [b"", b"one", b"", b"three", b"four"]
    path = write(folder / "gone", records, options)
    source = ArrayRecord(path)
    assert source.read_raw(np.arange(5)) == records
    os.unlink(path)
    assert source.read_raw(np.arange(5)) == records
    write(folder / "gone", random_bytes([70_000] * 3), options)  # another file of that name
    assert source.read_raw(np.arange(5)) == records


EXITING = """
import sys, threading, time
import numpy as np
from meshfeed.sources import ArrayRecord

source = ArrayRecord(sys.argv[1])
source.read_raw([0, 1])

def read():
    while True:
        source.read_rows(np.arange(6))

for _ in range(2):
    threading.Thread(target=read, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.slow
@both
def test_a_program_may_end_while_its_threads_read(folder: pathlib.Path, options: str) -> None:
    """What a thread has of its own goes before the thread does."""
    path = write(folder / "exiting", random_bytes([1 << 20] * 6, values=20), options)
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", EXITING, path], capture_output=True, text=True, timeout=100)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_records_of_another_size_than_decode_raw_takes(folder: pathlib.Path) -> None:
    path = write(folder / "size", random_bytes([24] * 8), PLAIN)
    with pytest.raises(ValueError, match=r"record 0 of 3 has 24 bytes; int32\[5\] takes 20") as caught:
        SourceReader(ArrayRecord(path, decode_batch=DecodeRaw(np.int32, 5))).read(np.arange(3))
    assert any("while decoding 3 records" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError) as caught:
        SourceReader(ArrayRecord(path, decode_batch=DecodeRaw(np.int32, 5))).read(np.arange(1))
    assert caught.value.__notes__ == [f"while decoding record 0 of {path}"]


def test_a_decoder_of_the_other_kind(folder: pathlib.Path) -> None:
    path = write(folder / "kind", random_bytes([24] * 8), PLAIN)
    with pytest.raises(TypeError) as of_one:
        SourceReader(ArrayRecord(path, decode_batch=lambda record: np.frombuffer(record, np.int32))).read(np.arange(3))
    hint = "decode_batch= gets a list of records; pass a function that takes a single one as decode="
    assert of_one.value.__notes__[-1] == hint
    with pytest.raises(TypeError) as of_all:
        SourceReader(ArrayRecord(path, decode=b"".join)).read(np.arange(3))
    hint = "decode= gets a single record; pass a function that takes a list of them as decode_batch="
    assert of_all.value.__notes__[-1] == hint


@pytest.mark.slow
def test_files_are_closed_when_nobody_holds_them(folder: pathlib.Path) -> None:
    def open_files() -> int:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(os.path.exists(link) and "closing-" in os.readlink(link) for link in links)

    paths = [write(folder / f"closing-{i}", some_records(5), PLAIN) for i in range(6)]
    source = ArrayRecord(paths)
    source._pool = pool = ShardPool(max_files=4)
    source.read_raw(np.arange(30))
    gc.collect()
    assert (len(pool), open_files()) == (4, 4)
    source.close()
    gc.collect()
    assert (len(pool), open_files()) == (0, 0)


def test_most_of_the_files_that_a_process_may_open_are_left_to_others(monkeypatch) -> None:
    monkeypatch.setattr(pool_of_files.resource, "getrlimit", lambda _: (1024, 1024))
    assert pool_of_files.max_open_files() == 256
    monkeypatch.setattr(pool_of_files.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert pool_of_files.max_open_files() == 1024


@pytest.mark.parametrize("num_records", [0, 1, 7, 3_000])
@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        pytest.param(ZSTD, marks=needs_zstd),
        "group_size:5,uncompressed",
        "group_size:4,transpose:true,uncompressed",
    ],
)
def test_records_are_counted_as_the_library_counts_them(options: str, num_records: int, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "x", random_bytes([size % 60 for size in range(num_records)]), options)
    found = readers._read_metadata(path)
    assert found is not None
    assert found == readers._read_metadata_by_library(path)


def test_the_library_counts_what_is_damaged_or_compressed_in_other_ways(tmp_path: pathlib.Path) -> None:
    assert readers._read_metadata(write(tmp_path / "brotli", random_bytes([9] * 50), "group_size:1,brotli")) is None
    whole = pathlib.Path(write(tmp_path / "whole", random_bytes([900] * 200), PLAIN)).read_bytes()
    last = len(whole) - (1 << 16)
    offset = readers._footer_offset(whole[last:])
    assert offset is not None
    places = [*range(last + 24, last + 64 + 12), *range(offset, offset + 200)]  # of the postscript, and of the footer
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1
        (tmp_path / "flipped").write_bytes(content)
        assert readers._read_metadata(str(tmp_path / "flipped")) is None, place
    for content in (whole[:-1], whole + b"xx", whole[: 1 << 16], whole[1 << 16 :], b"", bytes(1 << 16)):
        (tmp_path / "cut").write_bytes(content)
        assert readers._read_metadata(str(tmp_path / "cut")) is None
