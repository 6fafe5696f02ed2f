"""A key-value store that one host serves to the others, where JAX's coordination service does not connect them.

Under one controller the hosts of the accelerators run Python in processes of the runtime. They are numbered, but nobody
called ``jax.distributed.initialize()`` there, and it can no longer be called, because the runtime has made JAX's backend
already. :class:`meshfeed._src.remote.client.RemoteClient` then has one host serve a store, and all use it.

JAX's own service is not started a second time: when it vanishes, its client aborts the process, which is the runtime's.
The requests are JSON over HTTP, on connections that stay open, and carry a random token that the hosts get through the
controller. Meant for tens to hundreds of hosts: the server has a thread for each thread of each host that uses it.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import http.client
import http.server
import json
import logging
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from meshfeed._src.base import coordination, jax_internals
from meshfeed._src.base.errors import MeshfeedError
from meshfeed._src.base.threads import Background

_log = logging.getLogger("meshfeed.store")
_CALL_SECONDS = 30.0  # longest wait for an answer, beyond what the request itself waits
_KEEPALIVE_SECONDS = 60  # of silence, after which the system asks
_SHORTLY_SECONDS = 5.0


class Address(NamedTuple):
    """Where a store is served, and the token that its requests carry."""

    host: str
    port: int
    token: str


class Table:
    """The values. The methods of JAX's client of its coordination service, with the same texts in errors.

    Keys come without the slashes that JAX's service ignores.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Stores a value."""
        with self._changed:
            if not allow_overwrite and key in self._values:
                raise LookupError(f"ALREADY_EXISTS: {key}")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        """Waits for a key."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout=milliseconds / 1000):
                raise TimeoutError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]

    def key_value_try_get(self, key: str) -> str:
        """Returns the value of a key."""
        with self._changed:
            if key not in self._values:
                raise LookupError(f"NOT_FOUND: {key}")
            return self._values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        """Returns all keys below ``prefix``, and their values."""
        with self._changed:
            return [(key, value) for key, value in self._values.items() if key.startswith(f"{prefix}/")]

    def key_value_increment(self, key: str, by: int) -> int:
        """Adds to a counter, 0 at first."""
        with self._changed:
            number = int(self._values.get(key, "0")) + by
            self._values[key] = str(number)
            self._changed.notify_all()
            return number

    def key_value_delete(self, key: str) -> None:
        """Deletes a key, and all below it."""
        with self._changed:
            for name in [name for name in self._values if name == key or name.startswith(f"{key}/")]:
                del self._values[name]


_METHODS = frozenset(name for name in vars(Table) if "key_value" in name)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"  # the connection stays open
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        """Calls a method of the table."""
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.token.encode()):
            self.close_connection = True  # nothing more is read from a stranger
            self.send_error(http.HTTPStatus.FORBIDDEN)
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            name, args, keywords = json.loads(body)
            if name not in _METHODS:
                raise LookupError(f"no method {name!r}")
            key = "/".join(filter(None, args[0].split("/")))
            answer = {"value": getattr(self.server.table, name)(key, *args[1:], **keywords)}
        except Exception as error:
            answer = {"error": str(error)}
        data = json.dumps(answer).encode()
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the log of a training job is not that of a web server."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 4096  # all threads of all hosts may connect at once

    def __init__(self, host: str) -> None:
        self.table, self.token = Table(), secrets.token_hex(32)
        super().__init__((host, 0), _Handler)
        self.thread = Background(self.serve_forever, "meshfeed-store")

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs what a connection ended with, such as that of a host that was killed; it is no error of this process."""
        _log.debug("a connection from %s ended: %r", client_address, sys.exception())

    @property
    def address(self) -> Address:
        """Where other hosts find it."""
        host, port = self.server_address[:2]
        return Address(str(host), int(port), self.token)


class _Connection(http.client.HTTPConnection):
    """A connection that may have nothing to do for hours: networks between machines of a cloud drop it after minutes."""

    def connect(self) -> None:
        """Connects, and has the system ask the other side now and then, which also keeps the connection in the network."""
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)

    def close_if_closed(self) -> None:
        """Closes a connection that was closed elsewhere, so that the next request opens another."""
        if self.sock is None:
            return
        self.sock.settimeout(0)
        try:
            if self.sock.recv(1, socket.MSG_PEEK):
                return
        except BlockingIOError:  # open, and silent
            return
        except OSError:
            pass
        self.close()


class StoreClient:
    """The methods of :class:`Table`, over HTTP. Thread-safe: each thread has a connection of its own.

    Raises:
      MeshfeedError: the server does not answer.
      LookupError: what :class:`Table` raises, of any type, with its text.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._local = threading.local()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _METHODS:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, **keywords: object) -> Any:
        host, port, token = self.address
        waits = args[1] / 1000 if name == "blocking_key_value_get" else 0.0
        connection: _Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _Connection(host, port)
        connection.timeout = _CALL_SECONDS + waits
        connection.close_if_closed()
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            connection.request("POST", "/", json.dumps([name, args, keywords]), {"Authorization": token})
            response = connection.getresponse()
            data = response.read()
            if response.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(f"{response.status} {response.reason}")
            answer = json.loads(data)
        except BaseException as error:  # an interrupt, too, leaves a request without its answer
            connection.close()
            if not isinstance(error, (OSError, http.client.HTTPException, ValueError)):
                raise
            raise MeshfeedError(
                f"the key-value store of this job at {host}:{port} does not answer: {error!r}. The process that serves it, "
                "on one of the hosts of the mesh, has ended, or its machine cannot be reached."
            ) from error
        if "error" in answer:
            raise LookupError(answer["error"])
        return answer["value"]

    def answers(self) -> bool:
        """Whether the server answers."""
        with contextlib.suppress(MeshfeedError):
            self._call("key_value_dir_get", "none/")
            return True
        return False


def _store() -> str | None:
    """Returns the address of the store that this process uses, ``""`` if it needs none of ours, None if it lacks one."""
    client = jax_internals.coordination_client()
    if isinstance(client, StoreClient):
        return json.dumps(client.address) if client.answers() else None
    return "" if client is not None or coordination.process_count() == 1 else None


def _serve(host: int) -> str | None:
    """Serves a store until this process ends, if this is ``host``; returns its address."""
    if coordination.process_index() != host:
        return None
    server = _Server(_own_name())
    server.thread.start()
    return json.dumps(server.address)


def _join(text: str) -> None:
    """Uses the store at an address in this process, in place of JAX's.

    Raises:
      MeshfeedError: it cannot be reached.
    """
    address = Address(*json.loads(text))
    try:
        with socket.create_connection(address[:2], _SHORTLY_SECONDS):
            pass
    except OSError as error:
        raise MeshfeedError(
            f"{socket.gethostname()} cannot reach the key-value store of this job at {address.host}:{address.port}, on "
            f"another host of the mesh: {error}. Let these hosts connect to each other, or call "
            "jax.distributed.initialize() in the processes that run colocated Python, before anything else."
        ) from error
    if _store() != text:
        jax_internals.substitute(StoreClient(address))


CALLS: dict[str, Callable[..., str | None]] = {"store": _store, "serve": _serve, "join": _join}
"""What the controller calls on the hosts."""


def _own_name() -> str:
    """Returns the address of this machine in the network that it reaches others through."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; a datagram socket sends nothing here
            return str(probe.getsockname()[0])
        except OSError:  # no route out of this machine
            return socket.gethostbyname(socket.gethostname())
