"""Processes that share the folder of a shard cache, one of which is killed in mid-download."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import xxhash
from http_store import Store

_PROCESSES, _SHARDS, _SHARD_BYTES = 4, 10, 600_000
_SECONDS = 120.0

_READER = """
import random, sys, threading, xxhash
import fsspec.implementations.http
from meshfeed._src.sources.files.shard_cache import ShardCache
folder, seed, *urls = sys.argv[1:]
cache = ShardCache(folder, stall_seconds=20)
cache._downloads._block_bytes = 1 << 18
random.Random(int(seed)).shuffle(urls)
found = {}
def read(urls):
    for url in urls:
        with cache.open(url) as path:
            found[url] = xxhash.xxh3_64_hexdigest(path.read_bytes())
print("ready", flush=True)
sys.stdin.readline()
threads = [threading.Thread(target=read, args=(urls[part::3],)) for part in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(" ".join(found[url] for url in sorted(found)), cache.stats().fetched, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial came to.

    Attributes:
      in_mid_download: whether the killed process had a download under way.
      fetched: files fetched by the processes that were not killed.
      seconds: from the kill to the end of the last of them.
    """

    in_mid_download: bool
    fetched: int
    seconds: float


def _start(folder: pathlib.Path, seed: int, urls: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _READER, str(folder), str(seed), *urls]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(reader: subprocess.Popen[str]) -> tuple[list[str], int]:
    answer, _ = reader.communicate("go\n", timeout=_SECONDS)
    assert reader.returncode == 0, f"a process ended with {reader.returncode}"
    *digests, fetched = answer.split("\n")[-2].split()
    return digests, int(fetched)


def play(seed: int) -> Outcome:
    """Runs a trial; raises AssertionError if a copy is damaged, or TimeoutExpired if a process is blocked."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, Store() as store:
        folder = pathlib.Path(name)
        store.answered = lambda *_: time.sleep(0.05)
        urls = sorted(store.put(f"{shard}.shard", rng.randbytes(_SHARD_BYTES + shard)) for shard in range(_SHARDS))
        wanted = [xxhash.xxh3_64_hexdigest(store.files[url.rsplit("/", 1)[1]]) for url in urls]
        readers = [_start(folder, seed + number, urls) for number in range(_PROCESSES)]
        try:
            for reader in readers:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "ready\n"
            for reader in readers:
                assert reader.stdin is not None
                reader.stdin.write("go\n")
                reader.stdin.flush()
            victim = readers.pop(rng.randrange(_PROCESSES))
            while not _is_downloading(victim, folder) and victim.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.1))
            began = time.monotonic()
            victim.send_signal(signal.SIGSTOP)  # to see what it holds
            held = _is_downloading(victim, folder)
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            ended = [_end(reader) for reader in readers]
            seconds = time.monotonic() - began
            assert all(digests == wanted for digests, _ in ended)
            after, fetched = _end(_start(folder, seed, urls))
            assert (after, fetched) == (wanted, 0), "a whole copy was damaged or lost"
            assert len(list(folder.glob("meshfeed_*.shard"))) == _SHARDS
        finally:
            for reader in readers:
                reader.kill()
            store.shutdown()
        return Outcome(held, sum(fetched for _, fetched in ended), seconds)


def _is_downloading(reader: subprocess.Popen[str], folder: pathlib.Path) -> bool:
    for lock in folder.glob(f"meshfeed_{'?' * 32}.lock"):
        try:
            if f"process {reader.pid} on" in lock.read_text(errors="replace"):
                return True
        except FileNotFoundError:
            continue
    return False
