"""Which threads call a source, and what an error says that comes from being called on one of them."""

from __future__ import annotations

import itertools
import pickle
import sqlite3
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.threads import note_thread

MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


class Recording:
    """Notes which thread calls which method, and how many calls of ``__getitems__`` are under way at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        self.together = threading.Barrier(2)

    def _note(self, name: str) -> None:
        self.calls.append((name, threading.current_thread().name))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        self._note("getitem")
        return {"x": np.int32(record_id)}

    def __getitems__(self, record_ids: list[int]) -> list[Any]:
        with self.lock:
            self._note("getitems")
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        if len(record_ids) == 8:
            try:
                self.together.wait(0.2)
            except threading.BrokenBarrierError:
                pass
        with self.lock:
            self.under_way -= 1
        return [{"x": np.int32(record_id)} for record_id in record_ids]

    def fingerprint(self) -> str:
        self._note("fingerprint")
        return "recording"

    def close(self) -> None:
        self._note("close")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_threads_that_call_a_source(threads: int) -> None:
    source = Recording()
    for _ in range(2):  # a feed closes the source; the next one over it calls it again
        with meshfeed.Feed(source, MESH, global_batch_size=8, num_threads=threads) as feed:
            state = feed.get_state()
            next(feed)
            next(feed)
            feed.set_state(state)
            batches = [np.asarray(batch["x"]).tolist() for batch in feed]
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(64))
    here = threading.current_thread().name
    by = {name: {thread for what, thread in source.calls if what == name} for name, _ in source.calls}
    assert here not in by["getitems"]
    assert by["fingerprint"] == {"meshfeed-identify"}
    assert [what for what, _ in source.calls].count("fingerprint") == 2, "once per feed, not after set_state"
    assert "getitem" not in by
    assert (source.most > 1) == (threads > 1)


class Database:
    """Rows of a table, through a connection of the constructing thread."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.execute("create table if not exists numbers (x)")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        self.connection.execute("select 1")
        return {"x": np.int32(record_id)}


class OwnFingerprint(Database):
    def fingerprint(self) -> Any:
        return self.connection.execute("select 1").fetchall()


@pytest.mark.parametrize("kind", [Database, OwnFingerprint])
def test_an_error_about_the_thread_says_why_and_what_to_write(kind: type[Database], tmp_path: Path) -> None:
    with pytest.raises(sqlite3.ProgrammingError, match="created in a thread") as raised:
        with meshfeed.Feed(kind(tmp_path / "db"), MESH, global_batch_size=8) as feed:
            next(feed)
    notes = [note for note in raised.value.__notes__ if "meshfeed reads on threads of its own" in note]
    assert len(notes) == 1
    assert "threading.local()" in notes[0]


def test_the_note_is_for_errors_about_threads_on_other_threads_only() -> None:
    def noted(error: Exception) -> bool:
        note_thread(error)
        note_thread(error)
        return getattr(error, "__notes__", []) != [] and len(error.__notes__) == 1

    messages = {
        "SQLite objects created in a thread can only be used in that same thread.": True,
        "There is no current event loop in thread 'meshfeed-prefetch'.": True,
        "signal only works in main thread of the main interpreter": True,
        "can't start new thread": False,
        "record 3 is damaged": False,
    }
    assert [noted(RuntimeError(text)) for text in messages] == [False] * 5, "the thread of the constructor"
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend(noted(RuntimeError(text)) for text in messages))
    thread.start()
    thread.join()
    assert found == list(messages.values())


class PerThread:
    """What the note says to write."""

    def __init__(self, path: Path) -> None:
        self.path, self.local = path, threading.local()

    def __getstate__(self) -> Any:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path, self.local = path, threading.local()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, record_id: int) -> Any:
        if not hasattr(self.local, "connection"):
            self.local.connection = sqlite3.connect(self.path)
        return {"x": np.int32(self.local.connection.execute("select ?", (record_id,)).fetchone()[0])}


def test_a_connection_per_thread_works(tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(PerThread(tmp_path / "db")))
    with meshfeed.Feed(source, MESH, global_batch_size=8, num_threads=2) as feed:
        assert sorted(itertools.chain.from_iterable(np.asarray(batch["x"]).tolist() for batch in feed)) == list(
            range(64)
        )
