"""Records of several files that are not in the page cache: the disk is asked for all of a batch at once."""

from __future__ import annotations

import io
import os
import pathlib
import shutil
import tarfile
import time
from typing import Any

import numpy as np
import pytest
from format_files import FOLDER, plain_record

from meshfeed import SourceError
from meshfeed._src.sources.files.open_files import Descriptor
from meshfeed.sources import MDS, WebDataset

FILES, RECORDS = 3, 20


def tars(folder: pathlib.Path) -> tuple[Any, list[Any]]:
    rng, expected = np.random.default_rng(0), []
    for number in range(FILES):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for record in range(RECORDS):
                expected.append(rng.bytes(9_000))
                member = tarfile.TarInfo(f"{number}-{record}.bin")
                member.size = len(expected[-1])
                archive.addfile(member, io.BytesIO(expected[-1]))
    source = WebDataset([str(folder / f"{number}.tar") for number in range(FILES)])
    return source, [{"bin": content} for content in expected]


def mds(folder: pathlib.Path) -> tuple[Any, list[Any]]:
    pytest.importorskip("PIL")
    source = MDS(shutil.copytree(FOLDER / "mds", folder / "mds"))
    return source, [plain_record(record) for record in source.__getitems__(range(len(source)))]


def uncache(folder: pathlib.Path) -> None:
    for path in filter(pathlib.Path.is_file, folder.rglob("*")):
        file = Descriptor(str(path))
        os.fsync(file.number)
        for _ in range(50):  # a page that is just being written stays
            os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)
            if not file.num_bytes or not file.is_cached(0):
                break
            time.sleep(0.1)
        else:
            pytest.skip("this file system keeps what it is told to drop")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The descriptor and the offset of each range that a disk was asked for."""
    found: list[tuple[int, int]] = []

    def advise(number: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            found.append((number, offset))
        really(number, offset, length, advice)

    really = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def test_the_disk_is_asked_for_all_records_of_all_files_at_once(
    tmp_path: pathlib.Path, asked: list[tuple[int, int]]
) -> None:
    source, expected = tars(tmp_path)
    ids = np.random.default_rng(1).permutation(len(expected))[:50]
    source.__getitems__([0, len(expected) - 1])  # looks at the files
    uncache(tmp_path)
    asked.clear()
    for num_asked in (50, 0):  # then all are in the page cache
        assert [record["bin"] for record in source.__getitems__(ids)] == [expected[number]["bin"] for number in ids]
        assert len(asked) == len(set(asked)) == num_asked
        asked.clear()


def test_records_of_mds(tmp_path: pathlib.Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    source, expected = mds(tmp_path)
    monkeypatch.setattr(Descriptor, "is_cached", lambda file, offset: False)  # a page holds several of these records
    ids = np.random.default_rng(1).permutation(len(expected))
    asked.clear()
    assert [plain_record(record) for record in source.__getitems__(ids)] == [expected[number] for number in ids]
    assert len(asked) == len(set(asked)) == len(expected)
    assert len({number for number, _ in asked}) > 1


def test_one_record_is_read_without_asking(tmp_path: pathlib.Path, asked: list[tuple[int, int]]) -> None:
    source, expected = tars(tmp_path)
    uncache(tmp_path)
    assert source[5]["bin"] == expected[5]["bin"]
    assert asked == []


def test_a_file_that_is_missing_is_named_by_the_read(tmp_path: pathlib.Path) -> None:
    source, _ = tars(tmp_path)
    (tmp_path / "2.tar").unlink()
    uncache(tmp_path)
    with pytest.raises(SourceError, match=r"2\.tar"):
        source.__getitems__(np.random.default_rng(1).permutation(FILES * RECORDS))
