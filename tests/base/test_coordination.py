"""The key-value store: what is asked of JAX's client, counters of uses, and hosts in messages."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from meshfeed import MeshfeedError
from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.base.coordination import (
    KeyValueStore,
    call_briefly,
    call_in_background,
    finish_calls,
    format_hosts,
    next_use,
)


class Client:
    """Answers as JAX's client of the coordination service; ``error`` is raised by the calls that wait for a key."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        self.calls.append(("set", key, value, allow_overwrite))

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self.calls.append(("get", key, milliseconds))
        if self.error is not None:
            raise self.error
        return "value"

    def key_value_try_get(self, key: str) -> str:
        self.calls.append(("try_get", key))
        if self.error is not None:
            raise self.error
        return "value"

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        self.calls.append(("dir", prefix))
        return [(f"{prefix}0", "a"), (f"{prefix}in/1", "b")]

    def key_value_increment(self, key: str, by: int) -> int:
        self.calls.append(("increment", key, by))
        return 7

    def key_value_delete(self, key: str) -> None:
        self.calls.append(("delete", key))


class State:
    def __init__(self, client: Any) -> None:
        self.client = client
        self.service = None


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> State:
    """The state of JAX's module, with a client; handlers of forks are not registered."""
    state = State(Client())
    monkeypatch.setattr(jax_internals, "_global_state", lambda: state)
    monkeypatch.setattr(jax_internals, "_disown_in_children", lambda: None)
    return state


# ---------------------------------------------------------------------- the store


def test_requests_are_those_of_the_client() -> None:
    client = Client()
    store = KeyValueStore(client)
    store.set("a", "1")
    store.set("a", "2", overwrite=True)
    assert store.get("a", 1.5) == "value"
    assert store.get("a", 0.0) == "value"
    assert store.try_get("a") == "value"
    assert store.directory("run/") == {"0": "a", "in/1": "b"}
    assert store.directory("run") == {"0": "a", "in/1": "b"}
    assert store.increment("n") == 7
    store.delete("run")
    assert client.calls == [
        ("set", "a", "1", False),
        ("set", "a", "2", True),
        ("get", "a", 1500),
        ("get", "a", 1),
        ("try_get", "a"),
        ("dir", "run/"),
        ("dir", "run/"),
        ("increment", "n", 1),
        ("delete", "run"),
    ]


@pytest.mark.parametrize("text", ["DEADLINE_EXCEEDED: after 1 s", "the request Timed Out"])
def test_a_key_that_does_not_come_in_time_is_none(text: str) -> None:
    assert KeyValueStore(Client(RuntimeError(text))).get("a", 1) is None


def test_a_key_that_is_not_there_is_none() -> None:
    assert KeyValueStore(Client(RuntimeError("NOT_FOUND: a"))).try_get("a") is None


def test_other_errors_are_raised() -> None:
    store = KeyValueStore(Client(RuntimeError("UNAVAILABLE")))
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        store.get("a", 1)
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        store.try_get("a")


# ---------------------------------------------------------------------- the client of JAX


def test_a_job_has_a_store_if_jax_has_a_client(state: State) -> None:
    for store in (coordination.key_value_store(), coordination.require_store()):
        assert store is not None
        assert store.try_get("a") == "value"
    state.client = None
    assert coordination.key_value_store() is None


def test_a_client_without_one_of_the_methods_counts_as_none(state: State) -> None:
    class Renamed(Client):
        key_value_increment = property()  # type: ignore[assignment]

    state.client = Renamed()
    assert coordination.key_value_store() is None


def test_a_jax_without_the_private_state_has_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "_global_state", lambda: None)
    assert coordination.key_value_store() is None


def test_a_forked_child_gives_up_the_connection_of_its_parent(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "_inherited", [])
    client = state.client
    jax_internals._disown_client()
    assert state.client is None
    assert jax_internals._inherited == [client], "kept alive: its destructor would close the parent's connection"
    with pytest.raises(MeshfeedError, match=r"process \d+ is a forked child .* in the parent only"):
        coordination.require_store()


def test_the_handler_of_forks_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(coordination.os, "register_at_fork", lambda **handlers: registered.append(handlers))
    jax_internals._disown_in_children.cache_clear()
    for _ in range(2):
        jax_internals._disown_in_children()
    assert registered == [{"after_in_child": jax_internals._disown_client}]


# ---------------------------------------------------------------------- uses


def test_uses_of_a_name_are_counted_until_the_client_is_replaced(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_counters", coordination._Counters())
    assert [next_use("a"), next_use("a"), next_use("b"), next_use("a")] == [0, 1, 0, 2]
    state.client = Client()
    assert [next_use("a"), next_use("a")] == [0, 1]
    state.client = None
    next_use("a")
    state.client = Client()
    assert next_use("a") == 0


def test_a_client_without_weak_references_is_counted_too(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_counters", coordination._Counters())

    class Slotted(Client):
        __slots__ = ()

    state.client = 5  # no weak references; no client either, so only the counter looks at it
    monkeypatch.setattr(jax_internals, "coordination_client", lambda: state.client)
    assert [next_use("a"), next_use("a")] == [0, 1]
    state.client = 6
    assert next_use("a") == 0


def test_a_replaced_client_is_not_kept_alive(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_counters", coordination._Counters())
    assert next_use("a") == 0
    state.client = None  # the only reference
    assert coordination._counters._client() is None


# ---------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([3], "host 3"),
        ([3, 1], "hosts 1, 3"),
        (range(8), "hosts 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(9), "hosts 0, 1, 2, 3, 4, 5, 6, 7, … (9 in all)"),
        (range(4096), "hosts 0, 1, 2, 3, 4, 5, 6, 7, … (4,096 in all)"),
    ],
)
def test_hosts_are_listed_in_short(hosts: Any, text: str) -> None:
    assert format_hosts(hosts) == text


# ---------------------------------------------------------------------- calls to a coordinator that may be gone


def test_a_coordinator_that_is_gone_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_BRIEFLY_SECONDS", 0.2)
    gone = threading.Event()
    start = time.monotonic()
    call_briefly(lambda: gone.wait(60) and None, name="test", at_exit=False)
    assert 0.2 <= time.monotonic() - start < 30
    gone.set()


def test_a_call_is_over_when_it_returns_and_its_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    called: list[bool] = []
    call_briefly(lambda: called.append(threading.current_thread().daemon), name="test", at_exit=False)
    assert called == [True]
    with caplog.at_level(logging.DEBUG, "meshfeed.process"):
        call_briefly(lambda: 1 / 0 and None, name="test", at_exit=False)
    assert [record.getMessage() for record in caplog.records] == ["test: division by zero"]


@pytest.mark.parametrize("at_exit", [True, False])
def test_without_a_thread_at_exit_only_what_must_be_said_is_said(
    at_exit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    called: list[int] = []
    call_briefly(lambda: called.append(1), name="test", at_exit=at_exit)
    assert called == [1] * at_exit


def test_a_call_in_the_background_is_waited_for_only_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    go, called = threading.Event(), list[int]()
    call_in_background(lambda: called.append(go.wait(60)), name="test")
    assert called == []
    threading.Timer(0.1, go.set).start()
    finish_calls()
    assert called == [True]
    with caplog.at_level(logging.DEBUG, "meshfeed.process"):
        call_in_background(lambda: 1 / 0 and None, name="test")
        finish_calls()
    assert [record.getMessage() for record in caplog.records] == ["test: division by zero"]


def test_a_coordinator_that_is_gone_holds_up_the_end_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_BRIEFLY_SECONDS", 0.2)
    gone = threading.Event()
    for _ in range(3):
        call_in_background(lambda: gone.wait(60) and None, name="test")
    start = time.monotonic()
    finish_calls()
    waited = time.monotonic() - start
    gone.set()
    assert 0.2 <= waited < 30


@pytest.mark.slow
def test_a_call_in_the_background_ends_before_the_interpreter() -> None:
    code = """
import time
from meshfeed._src.base.coordination import call_in_background

def slow():
    time.sleep(0.5)
    print("called", flush=True)

call_in_background(slow, name="test")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "called\n"
    assert not done.stderr
