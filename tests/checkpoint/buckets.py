"""An emulated S3 for tests, which counts what it sends and fails when asked to, and its clients in any process."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

BUCKET = "s3://bucket"


class Server:
    """The bucket ``BUCKET`` of an emulated S3, served by a thread of this process.

    Attributes:
      endpoint: its URL.
      fail: the fraction of requests that are refused as by an overloaded store.
      requests: number of requests.
      sent: bytes of the objects that were downloaded.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Handler(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"  # or each request takes a connection of its own

            def log(self, type: str, message: str, *args: Any) -> None:
                pass

        self.fail, self.requests, self.sent = 0.0, 0, 0
        self._rng, self._lock = random.Random(3), threading.Lock()
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        with self._lock:
            self.requests += 1
            fails = self._rng.random() < self.fail
        if fails:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            text = b"<Error><Code>ServiceUnavailable</Code><Message>Please reduce your request rate.</Message></Error>"
            start("503 Service Unavailable", [("Content-Type", "text/xml"), ("Content-Length", str(len(text)))])
            return [text]
        body = self._application(environ, start)
        if environ["REQUEST_METHOD"] == "GET" and "list-type" not in environ.get("QUERY_STRING", ""):
            body = list(body)
            with self._lock:
                self.sent += sum(map(len, body))
        return body

    def stop(self) -> None:
        """Refuses connections from now on."""
        self._server.shutdown()
        self._server.server_close()


def environment_for(endpoint: str) -> dict[str, str]:
    """Returns the environment with which clients of S3 use an endpoint."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }


def forget_clients() -> None:
    """Lets clients be made again: they keep the endpoint and the credentials that they were made with."""
    import s3fs

    from meshfeed._src.base import stores

    stores._file_system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@contextlib.contextmanager
def emulated_s3() -> Iterator[Server]:
    """Starts an S3 with the bucket ``BUCKET``, which clients in this process and in those that it starts use."""
    import pytest

    for library in ("s3fs", "moto.server"):
        pytest.importorskip(library)
    from meshfeed._src.base.errors import CheckpointError
    from meshfeed._src.base.stores import ask

    before, server = dict(os.environ), Server()
    os.environ.update(environment_for(server.endpoint))
    forget_clients()
    try:
        with contextlib.suppress(CheckpointError):  # it exists: all servers of a process have the same buckets
            ask(BUCKET, "mkdir")
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_clients()
        server.stop()
