"""Hosts that call different methods of their Checkpointers at the same time are told so."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from etils import epath
from memory_store import MemoryStore

from meshfeed._src.base import coordination
from meshfeed._src.checkpoint import agreement, directory
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.saves import OrbaxBarrier


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Callable[[], object]]], list[Any]]:
    """Calls one function per host, each on a thread of its own; returns the values or errors."""
    here, store = threading.local(), MemoryStore()
    for module in (agreement, coordination):
        monkeypatch.setattr(module, "process_index", lambda: here.host)
        monkeypatch.setattr(module, "process_count", lambda: 2)
        monkeypatch.setattr(module, "require_store", lambda: store)
    monkeypatch.setattr(agreement, "next_use", lambda name: 0)

    def run_all(functions: list[Callable[[], object]]) -> list[Any]:
        found: dict[int, Any] = {}

        def run_as(host: int) -> None:
            here.host = host
            try:
                found[host] = functions[host]()
            except Exception as error:
                found[host] = error

        threads = [threading.Thread(target=run_as, args=(host,)) for host in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [found[host] for host in range(len(functions))]

    return run_all


def test_a_host_that_leaves_while_another_saves(run: Callable[[list[Callable[[], object]]], list[Any]]) -> None:
    def save() -> object:
        return Agreement("saving step 3 in /here", 20, kind="saving a step").attempt(lambda: 1)

    def leave() -> object:
        return Agreement("saving the last step in /here", 20, kind="leaving its Checkpointer").collect("it failed")

    errors = run([save, leave])
    for error, doing in zip(errors, ("saving step 3 in /here", "saving the last step in /here"), strict=True):
        assert isinstance(error, agreement.CheckpointError)
        assert str(error).startswith(
            f"{doing}: hosts do different things at the same time (host 0: saving a step; host 1: leaving its "
            "Checkpointer). All hosts must call save, restore and close"
        )


@pytest.mark.parametrize("kind", ["leaving its Checkpointer", "saving a step"])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_host_that_leaves_by_an_exception_tells_those_that_come_later(leaver: int, kind: str, run: Any) -> None:
    def leave() -> object:
        with Agreement("saving the last step", 0.05, kind="leaving its Checkpointer") as brief:
            brief.partial = True
            return brief.collect("it raised")

    def come() -> object:
        time.sleep(0.5)
        return Agreement("doing what all do", 20, kind=kind).collect(None)

    found = run([leave, come] if leaver == 0 else [come, leave])[1 - leaver]
    if kind.startswith("leaving"):
        assert found[leaver] == "it raised"
    else:
        assert isinstance(found, agreement.CheckpointError)
        for host, does in ((leaver, "leaving its Checkpointer"), (1 - leaver, kind)):
            assert f"host {host}: {does}" in str(found)


def test_hosts_may_see_the_folder_under_different_paths(
    run: Callable[[list[Callable[[], object]]], list[Any]],
) -> None:
    def restore(path: str) -> Callable[[], object]:
        return lambda: Agreement(f"restoring {path}", 20, kind="restoring an item").collect(path)

    assert run([restore("/a"), restore("/b")]) == [{0: "/a", 1: "/b"}] * 2


def test_a_folder_that_hosts_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = epath.Path(tmp_path / "a"), epath.Path(tmp_path / "b")
    mark = directory.put_mark(mine)
    directory.check_shared(mine, mark, 1800)
    with pytest.raises(
        agreement.CheckpointError, match=r"b: this host does not see what host 0 wrote there 0\.4 s ago"
    ):
        directory.check_shared(other, mark, 0.5)  # before the other hosts stop waiting for this one
    monkeypatch.setattr(directory, "_SEEN_SECONDS", 0.3)
    with pytest.raises(agreement.CheckpointError, match=r"wrote there 0\.3 s ago, so hosts do not share this folder"):
        directory.check_shared(other, mark, 1800)
    directory.remove_unfinished(mine)  # a killed host has not removed it
    assert not list(mine.iterdir())
    directory.remove_mark(mine, mark)
    assert directory.put_mark(epath.Path("gs://bucket/run")) is None


def test_a_barrier_outside_a_save_says_which_one_a_host_does_not_reach(run: Any) -> None:
    (error,) = run([lambda: OrbaxBarrier()(key="finalize.7", timeout_ms=50)])
    assert str(error).startswith(f"finalize.7: host 1 did not arrive within {error.waited_seconds:.0f} s")
