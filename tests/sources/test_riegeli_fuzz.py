"""Damaged and hostile ArrayRecord files neither crash the extension nor get bytes past its hashes.

A hash covers a chunk and not its position, so a whole chunk that is copied over another one is read as it is.

`scripts/sanitize` runs this file against a build with AddressSanitizer and UndefinedBehaviorSanitizer, for longer.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import time

import numpy as np
import pytest
from array_record_files import write

from meshfeed._src.sources.array_record import readers
from meshfeed._src.sources.array_record.rows import read_direct, read_into
from meshfeed._src.sources.files.open_files import Descriptor

riegeli = pytest.importorskip(
    "meshfeed._src.sources.array_record._riegeli", reason="the package was installed without a C compiler"
)

SECONDS = float(os.environ.get("MESHFEED_FUZZ_SECONDS", "2"))
SEED = int(os.environ.get("MESHFEED_FUZZ_SEED", time.time_ns() % 2**32))
GUARD = 64
HEADER_BYTES = 40
BLOCK_BYTES, BLOCK_HEADER_BYTES = 1 << 16, 24


@pytest.fixture(autouse=True)
def _seed_in_the_report() -> None:
    print(f"MESHFEED_FUZZ_SEED={SEED}")


def corpus(folder: pathlib.Path) -> list[tuple[bytes, list[bytes]]]:
    """Files of several layouts that the library itself wrote, with their records."""
    rng = np.random.default_rng(0)
    found = []
    for name, options in (("plain", "uncompressed"), ("zstd", "zstd:3"), ("padded", "zstd,pad_to_block_boundary:true")):
        for sizes in ([1], [0, 3, 40, 300], [70_000, 5, 130_000], [64] * 300):
            records = [rng.integers(0, 9, size, np.uint8).tobytes() for size in sizes]
            path = write(folder / name, records, f"group_size:1,{options}")
            found.append((pathlib.Path(path).read_bytes(), records))
    return found


def chunks(content: bytes, offsets: list[int]) -> list[bytes]:
    """The chunk at each offset, without the headers of blocks and the padding that may follow; the last offset is an end."""
    found = []
    for begin, end in itertools.pairwise(offsets):
        blocks = range(begin // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES)
        chunk = b"".join(
            content[max(begin, block + BLOCK_HEADER_BYTES) : min(end, block + BLOCK_BYTES)] for block in blocks
        )
        found.append(chunk[: HEADER_BYTES + int.from_bytes(chunk[8:16], "little")])
    return found


def offsets_of(path: pathlib.Path, num_records: int) -> list[int]:
    opened = Descriptor(str(path))
    footer = readers._read_footer(opened.number, opened.num_bytes, num_records)
    assert footer is not None
    return footer[0].tolist()


def damaged(content: bytes, offsets: list[int], rng: np.random.Generator) -> bytes:
    """Bits flipped, bytes moved or written over, chunks copied over others, or the end cut off."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 9)):
        at, length = int(rng.integers(len(changed))), int(rng.integers(1, 200))
        match rng.integers(5):
            case 0:
                changed[at] ^= 1 << int(rng.integers(8))
            case 1:
                changed[at : at + length] = rng.bytes(len(changed[at : at + length]))
            case 2:
                source = int(rng.integers(len(changed)))
                changed[at : at + length] = changed[source : source + len(changed[at : at + length])]
            case 3:
                source, target = rng.integers(len(offsets) - 1, size=2).tolist()
                chunk = changed[offsets[source] : offsets[source + 1]]
                if len(chunk) == offsets[target + 1] - offsets[target] and len(changed) == len(content):
                    changed[offsets[target] : offsets[target + 1]] = chunk
            case _:
                del changed[max(at, 1) :]
    return bytes(changed)


def with_hostile_footer(content: bytes, num_records: int, rng: np.random.Generator) -> bytes | None:
    """A footer whose numbers are wrong and whose hashes are right, as somebody would write it who means harm.

    The footer is stored uncompressed in one block, which the reader takes as it takes any other.
    """
    postscript = memoryview(content)[-(1 << 16) :]
    changed = bytearray(content)
    footer_at = int.from_bytes(varint_at(bytes(postscript), b"\x08"), "little")
    if footer_at % (1 << 16) > 60_000 or footer_at + 50_000 > len(content):
        return None
    messages = [b""]
    for _ in range(num_records):
        offset, size = (int(rng.choice([0, 1, 64, 1 << 22, 1 << 23, 1 << 40, (1 << 62) - 1])) for _ in range(2))
        if rng.integers(3):
            offset, size = int(rng.integers(len(content))), int(rng.integers(400))
        messages.append(b"\x08" + varint(offset) + b"\x10" + varint(size) + b"\x18\x01")
    messages[1:] = sorted(messages[1:], key=lambda message: first_varint(message[1:]))
    sizes, values = b"".join(varint(len(message)) for message in messages), b"".join(messages)
    data = b"\0" + varint(len(sizes)) + sizes + values
    if len(data) > 40_000 or (footer_at + HEADER_BYTES + len(data)) // (1 << 16) != footer_at // (1 << 16):
        return None
    header = (
        len(data).to_bytes(8, "little")
        + riegeli.hash(data).to_bytes(8, "little")
        + (ord("r") | len(messages) << 8).to_bytes(8, "little")
        + len(values).to_bytes(8, "little")
    )
    chunk = riegeli.hash(header).to_bytes(8, "little") + header + data
    changed[footer_at : footer_at + len(chunk)] = chunk
    return bytes(changed)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def first_varint(content: bytes) -> int:
    value = 0
    for shift, byte in enumerate(content):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            break
    return value


def varint_at(postscript: bytes, tag: bytes) -> bytes:
    """The footer's offset as the postscript has it: the first field of its first record."""
    magic = varint(0x71930E704FDAE05E)
    end = postscript.index(magic) - 1
    start = postscript.rindex(tag, 0, end)
    return first_varint(postscript[start + 1 : end]).to_bytes(8, "little")


def read_everything(path: pathlib.Path, num_records: int, rng: np.random.Generator) -> list[bytes | None] | None:
    """Each record, or None where it is refused, by single reads; then all of them by one call."""
    opened = Descriptor(str(path))
    file = readers.open_direct(lambda: opened, num_records)
    if file is None:
        return None
    footer = readers._read_footer(opened.number, opened.num_bytes, num_records)
    assert footer is not None
    found: list[bytes | None] = []
    for row, size in enumerate(footer[1].tolist()):
        as_bytes = read_direct([readers.OpenFile("", os.stat(path), lambda: None, file)], None, np.array([row]))
        found.append(None if as_bytes is None else as_bytes[0])
        if size:
            out = np.full(size + 2 * GUARD, 0xA5, np.uint8)
            sound = read_into([file], None, np.array([row]), np.array([GUARD]), out, width=size)
            assert (out[:GUARD] == 0xA5).all()
            assert (out[size + GUARD :] == 0xA5).all()
            assert (out[GUARD : size + GUARD].tobytes() if sound else None) == found[-1]
    order = rng.permutation(num_records)
    if footer[1].sum() < 1 << 26:
        together = read_direct([readers.OpenFile("", os.stat(path), lambda: None, file)], None, order)
        assert together == (None if None in found else [found[row] for row in order.tolist()])
    return found


@pytest.mark.slow
def test_what_is_read_of_a_damaged_file_is_the_record_of_a_whole_chunk_at_its_place(tmp_path: pathlib.Path) -> None:
    files, rng, path = corpus(tmp_path), np.random.default_rng(SEED), tmp_path / "damaged"
    deadline, opened, intact, moved, trials = time.monotonic() + SECONDS, 0, 0, 0, 0
    offsets = []
    for content, records in files:
        path.write_bytes(content)
        assert read_everything(path, len(records), rng) == records
        offsets.append(offsets_of(path, len(records)))
    while time.monotonic() < deadline or trials < 200:
        trials += 1
        number = int(rng.integers(len(files)))
        content, records = files[number]
        written = damaged(content, offsets[number], rng)
        path.write_bytes(written)
        found = read_everything(path, len(records), rng)
        if found is None:
            continue
        opened += 1
        whole = chunks(content, offsets[number])
        record_of = dict(zip(whole, records, strict=True))
        for row, stored in enumerate(chunks(written, offsets[number])):
            if stored == whole[row]:
                assert found[row] == records[row]
                intact += 1
            else:
                assert found[row] is None or found[row] == record_of.get(stored)
                moved += found[row] is not None
    assert opened
    assert intact
    assert moved


@pytest.mark.slow
def test_hostile_footers_reach_no_other_memory(tmp_path: pathlib.Path) -> None:
    files, rng, path = corpus(tmp_path), np.random.default_rng(SEED), tmp_path / "hostile"
    deadline, opened, trials = time.monotonic() + SECONDS, 0, 0
    # Few of them open, and a busy machine makes few trials in that time.
    while time.monotonic() < deadline or trials < 50 or (not opened and trials < 5_000):
        trials += 1
        content, records = files[int(rng.integers(len(files)))]
        hostile = with_hostile_footer(content, len(records), rng)
        if hostile is None:
            continue
        path.write_bytes(hostile)
        found = read_everything(path, len(records), rng)
        opened += found is not None
        assert found is None or all(record is None or record in records for record in found)
    assert opened
