"""Open files: reads of them, and more shards than a process may have open."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pathlib
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pytest

import meshfeed
from meshfeed._src.sources.files.open_files import Descriptor, Lru
from meshfeed._src.sources.files.shard_reader import read_spans

CHILD = pathlib.Path(__file__).with_name("open_files_child.py")


@pytest.mark.slow
def test_more_shards_than_files_may_be_open(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("array_record")
    ways = ["rows", "library", "threads", "mixture"]
    for needed, way in (("fsspec", "cache"), ("grain", "grain")):
        try:
            __import__(needed)
        except ImportError:
            continue
        ways.append(way)
    from array_record_files import write

    for shard in range(240):
        write(tmp_path / f"shard-{shard:03d}", [np.int64(4 * shard + row).tobytes() for row in range(4)])
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), *ways], stdout=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == [f"{way} worked" for way in ways]
    assert done.returncode == 0


def test_a_read_goes_on_where_the_system_stopped_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call reads at most 2 GiB, and a signal or a network file system may end it earlier."""
    (tmp_path / "x").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: pread(file, min(size, 7), start))
    file = Descriptor(str(tmp_path / "x"))
    assert (file.read(3, 60), file.read(90, 200), file.read(100, 101)) == (
        bytes(range(3, 60)),
        bytes(range(90, 100)),
        b"",
    )
    starts, stops = np.array([50, 0, 8, 99]), np.array([90, 8, 12, 130])
    found = [bytes(range(low, min(high, 100))) for low, high in zip(starts, stops, strict=True)]
    assert read_spans(file, starts, stops) == found
    assert read_spans(file, starts[:1], stops[:1]) == found[:1]


def test_what_is_least_recently_used_goes_first() -> None:
    made: list[str] = []

    def get(key: str, weight: int = 1) -> str:
        def make() -> tuple[str, int]:
            made.append(key)
            return key.upper(), weight

        return kept.get(key, make)

    kept: Lru[str, str] = Lru(lambda: 3, 10)
    assert [get(key) for key in "abcabd"] == list("ABCABD")
    assert made == list("abcd")
    assert kept.oldest_first() == [("a", "A"), ("b", "B"), ("d", "D")]
    get("e", weight=9)  # a goes for the number, b for the weight
    assert (kept.oldest_first(), kept.weight) == ([("d", "D"), ("e", "E")], 10)
    get("f", weight=11)  # kept although it is too heavy: somebody wants it now
    assert (kept.oldest_first(), kept.weight) == ([("f", "F")], 11)
    assert (kept.find("f"), kept.find("e"), "f" in kept) == ("F", None, True)
    kept.drop(["f", "gone"])
    assert (len(kept), kept.weight) == (0, 0)


@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process .* is multi-threaded")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    """Which held the lock at the fork, in a read; the child has no such thread."""
    lru: Lru[str, str] = Lru(lambda: 2, 2)
    lru.get("a", lambda: ("x", 1))
    with lru._lock:
        child = os.fork()
        if not child:
            signal.alarm(5)
            os._exit(lru.find("a") != "x")
    assert os.waitpid(child, 0)[1] == 0


def test_evicted_copies_of_compressed_files_are_closed(tmp_path: pathlib.Path) -> None:
    """A copy keeps its disk space while it is open; of compressed files, no source knows the size before they are there."""
    for number in range(12):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            member = tarfile.TarInfo("a.bin")
            member.size = 100_000
            tar.addfile(member, io.BytesIO(os.urandom(100_000)))
        (tmp_path / f"{number:02d}.tar.gz").write_bytes(gzip.compress(content.getvalue()))
    cache = meshfeed.ShardCache(tmp_path / "cache", max_bytes=800_000)
    source = meshfeed.sources.WebDataset(f"{tmp_path}/*.tar.gz", cache=cache)
    assert [len(source[record_id]["bin"]) for record_id in range(12)] == [100_000] * 12
    evicted = 0
    for handle in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            path = os.readlink(handle)
            evicted += handle.stat().st_size * (path.startswith(str(tmp_path)) and path.endswith(" (deleted)"))
    assert evicted <= 800_000 // 4
    source.close()
