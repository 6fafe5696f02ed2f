"""Hosts of one controller that JAX numbers but does not connect: one of them serves the store that all agree through."""

from __future__ import annotations

import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import colocated_python
from jax.sharding import AxisType, Mesh

import meshfeed
from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.base.stacks import feed_stacks
from meshfeed._src.remote import served_store
from meshfeed._src.remote.client import Endpoint, RemoteClient, make_payload, rows_of
from meshfeed._src.remote.served_store import Address, StoreClient, _Server

DEVICES_PER_HOST = 2


class Target:
    """Something that runs on a host and needs the others."""

    def __init__(self, mesh: Mesh) -> None:
        store = coordination.require_store()
        store.set(f"seen/{coordination.process_index()}", "", overwrite=True)
        self.calls = {"seen": lambda: sorted(store.directory("seen")), "close": lambda: None}

    def numbers(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def spec(self) -> Any:
        return None


class Job:
    """Hosts of two devices each, with the state of the module that a process of its own would have."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.clients: dict[int, list[Any]] = {}
        self.servers: list[_Server] = []

    def on(self, host: int, function: Callable[[], Any]) -> Any:
        with self._patch.context() as patch:
            patch.setattr(coordination, "process_index", lambda: host)
            patch.setattr(coordination, "process_count", lambda: 8 // DEVICES_PER_HOST)
            patch.setattr(jax_internals, "_substitutes", self.clients.setdefault(host, []))
            return function()

    def store_of(self, host: int) -> Address | None:
        clients = self.clients.get(host)
        return clients[0].address if clients else None


class Hosts:
    """What JAX returns to a controller for an object on the hosts of a mesh."""

    def __init__(self, job: Job, payload: bytes) -> None:
        self._job, self._payload = job, payload
        self._endpoints: dict[int, Endpoint] = {}

    def __getattr__(self, name: str) -> Callable[[jax.Array], jax.Array]:
        return functools.partial(self._call, name)

    def _call(self, name: str, request: jax.Array) -> jax.Array:
        rows, answers = [], {}
        for device in request.sharding.mesh.devices.flat:  # type: ignore[attr-defined]
            host = device.id // DEVICES_PER_HOST
            endpoint = self._endpoints.setdefault(host, Endpoint(self._payload))
            if host not in answers:
                call = functools.partial(getattr(endpoint, name), request)
                answers[host] = rows_of(self._job.on(host, call))[0]
            rows.append(answers[host])
        return jax.device_put(np.stack(rows), request.sharding)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(monkeypatch)

    def serve(host: str) -> _Server:
        made.servers.append(_Server(host))
        return made.servers[-1]

    monkeypatch.setattr(served_store, "_Server", serve)
    monkeypatch.setattr(colocated_python, "colocated_python_class", lambda kind: functools.partial(Hosts, made))
    monkeypatch.setattr(colocated_python, "colocated_cpu_devices", lambda mesh: mesh)
    yield made
    for server in made.servers:
        end(server)


def client_of(hosts: list[int]) -> RemoteClient:
    devices = [device for device in jax.devices() if device.id // DEVICES_PER_HOST in hosts]
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    return RemoteClient(make_payload(Target, setting="make_source", what="a function"), mesh)


def test_the_hosts_of_one_controller_get_one_store(job: Job) -> None:
    client = client_of([1, 2, 3])
    assert client.call("seen")[-1] == ["1", "2", "3"]
    address = job.store_of(1)
    assert address is not None
    assert [job.store_of(host) for host in range(4)] == [None, address, address, address]
    assert client_of([1, 3]).call("seen") == [["1", "2", "3"]] * 2  # hosts that have one serve no other
    assert client_of([0, 1, 2, 3]).call("seen")[-1] == ["0", "1", "2", "3"]  # a host that came later joins it
    assert [job.store_of(host) for host in range(4)] == [address] * 4


def test_hosts_with_different_stores_are_refused(job: Job) -> None:
    for hosts in ([0, 1], [2, 3]):
        client_of(hosts)
    with pytest.raises(
        meshfeed.MeshfeedError,
        match=r"no common key-value store.*remote feeds over parts.*Create a remote feed over all",
    ):
        client_of([1, 2])


def test_hosts_of_which_jax_connects_only_some_are_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "_own_client", lambda: object() if coordination.process_index() == 1 else None)
    with pytest.raises(
        meshfeed.MeshfeedError, match=r"only some of them are connected by JAX\. .*jax\.distributed\.init"
    ):
        client_of([0, 1])


def test_without_its_server_a_new_store_is_served(job: Job) -> None:
    client_of([0, 1, 2])
    before = job.store_of(1)
    end(job.servers[0])
    for client, *_ in job.clients.values():
        client._local = threading.local()  # its connections have ended, too
    client_of([1, 2])
    assert job.store_of(1) == job.store_of(2) != before


def test_hosts_that_cannot_reach_each_other_say_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(host: str) -> _Server:
        server = _Server(host)
        end(server)
        return server

    monkeypatch.setattr(served_store, "_Server", gone)
    with pytest.raises(
        meshfeed.MeshfeedError, match=r"cannot reach the key-value store.*Let these hosts connect.*jax\.dist"
    ):
        client_of([0, 1])


def end(server: _Server) -> None:
    server.thread.start()
    server.shutdown()
    server.server_close()


@pytest.fixture
def server() -> Iterator[_Server]:
    made = _Server("127.0.0.1")
    made.thread.start()
    yield made
    end(made)


def test_a_get_waits_for_another_thread_and_ends_in_time(server: _Server) -> None:
    store = jax_internals.KeyValueStore(StoreClient(server.address))
    start = time.monotonic()
    assert store.get("a", 0.3) is None
    assert 0.3 <= time.monotonic() - start < 20
    setter = threading.Timer(0.2, lambda: store.set("a", "1"))
    setter.start()
    assert store.get("a", 30) == "1"
    setter.join()


def test_who_waits_for_the_store_or_serves_it_is_not_shown_as_reading(server: _Server) -> None:
    store = jax_internals.KeyValueStore(StoreClient(server.address))
    waiting = threading.Thread(target=store.get, args=("a", 60), name="meshfeed-waits", daemon=True)
    waiting.start()
    deadline = time.monotonic() + 60
    while not server.table._changed._waiters:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shown = feed_stacks()
    assert not [text for text in ("meshfeed-waits", "meshfeed-store", "served_store.py") if text in shown], shown
    store.set("a", "1")
    waiting.join(60)


def test_all_increments_of_many_threads_that_connect_at_once_count(server: _Server) -> None:
    store = jax_internals.KeyValueStore(StoreClient(server.address))
    together, seen = threading.Barrier(256), []

    def count() -> None:
        together.wait(60)
        seen.append(store.increment("n"))

    threads = [threading.Thread(target=count, daemon=True) for _ in range(256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == list(range(1, 257))


def test_an_interrupt_does_not_leave_its_answer_to_the_next_call(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = jax_internals.KeyValueStore(StoreClient(server.address))
    store.set("a", "1")
    with monkeypatch.context() as patch:

        def interrupted(connection: http.client.HTTPConnection) -> None:
            raise KeyboardInterrupt

        patch.setattr(http.client.HTTPConnection, "getresponse", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.try_get("a")
    assert store.try_get("none") is None
    assert store.try_get("a") == "1"


def test_nothing_is_answered_without_the_token(server: _Server) -> None:
    host, port, _ = server.address
    with pytest.raises(meshfeed.MeshfeedError, match="403"):
        StoreClient(Address(host, port, "guessed")).key_value_set("a", "1")
    client = StoreClient(server.address)
    with pytest.raises(LookupError, match="no method '__init__'"):
        client._call("__init__")
    assert not server.table._values
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("POST", "/", json.dumps(["key_value_set", ["a", "1"]]))
    assert connection.getresponse().status == 403
    connection.close()


def test_the_client_has_the_methods_of_jaxs_client_and_no_others(server: _Server) -> None:
    client = StoreClient(server.address)
    client.key_value_set("/jobs//a/", "1")
    client.key_value_set("jobs/a/b", "2")
    client.key_value_set("jobs2", "3")
    assert client.key_value_increment("n", 3) == 3
    assert client.key_value_increment("n", 4) == 7
    assert client.key_value_try_get("jobs/a") == "1"
    assert client.key_value_dir_get("jobs") == [["jobs/a", "1"], ["jobs/a/b", "2"]]
    with pytest.raises(LookupError, match=r"^ALREADY_EXISTS: jobs/a$"):
        client.key_value_set("jobs/a", "4")
    client.key_value_set("jobs/a", "5", allow_overwrite=True)
    assert client.blocking_key_value_get("jobs/a", 1) == "5"
    with pytest.raises(LookupError, match=r"^DEADLINE_EXCEEDED: none$"):
        client.blocking_key_value_get("none", 1)
    client.key_value_delete("jobs")
    assert client.key_value_try_get("jobs2") == "3"
    with pytest.raises(LookupError, match=r"^NOT_FOUND: jobs/a$"):
        client.key_value_try_get("jobs/a")
    assert not hasattr(client, "shutdown")


def test_what_is_no_request_ends_its_connection_without_a_word(
    server: _Server, capsys: pytest.CaptureFixture[str]
) -> None:
    host, port, token = server.address
    head = f"POST / HTTP/1.1\r\nAuthorization: {token}\r\n"
    for sent in ("\x00\x16\x03", "GET / HTTP/1.1\r\n\r\n", f"{head}\r\n", f"{head}Content-Length: x\r\n\r\n"):
        with socket.create_connection((host, port), 30) as connection:
            connection.sendall(sent.encode())
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    assert StoreClient(server.address).answers()
    assert capsys.readouterr().err == ""


def test_a_server_that_ends_is_named(server: _Server) -> None:
    client = StoreClient(server.address)
    client.key_value_set("a", "1")
    other = _Server("127.0.0.1")
    gone = StoreClient(other.address)
    end(other)
    with pytest.raises(meshfeed.MeshfeedError, match=f"127.0.0.1:{other.address.port} does not answer.*has ended"):
        gone.key_value_try_get("a")
    assert not gone.answers()
    assert client.answers()


def test_a_connection_that_was_dropped_while_idle_is_opened_again() -> None:
    server = _Server("127.0.0.1")
    server.thread.start()
    client = StoreClient(server.address)
    client.key_value_set("a", "1")
    connection = client._local.connection
    assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    first = connection.sock
    assert client.key_value_try_get("a") == "1"
    assert connection.sock is first
    first.shutdown(socket.SHUT_WR)  # the server closes its side too, as a network between them would
    time.sleep(0.2)
    assert client.key_value_try_get("a") == "1"
    assert connection.sock is not first
    server.shutdown()
