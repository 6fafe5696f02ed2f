"""More shards than a process may have files open."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from meshfeed._src.sources.files.open_files import Lru

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
    import numpy as np
    from array_record_files import write

    for shard in range(240):
        write(tmp_path / f"shard-{shard:03d}", [np.int64(4 * shard + row).tobytes() for row in range(4)])
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), *ways], stdout=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == [f"{way} worked" for way in ways]
    assert done.returncode == 0


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
