"""Servers that stand in for object stores: moto for S3, emulators of Google's and Azure's, a small Hugging Face Hub.

Each is used through the real client library. :func:`running` starts one; clients are configured as users do it, by
environment variables and fsspec's configuration, so child processes find them too.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import http.server
import importlib
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import fsspec.config
import pytest

from meshfeed._src.base import stores

SECRET = "c2VjcmV0LXRoYXQtbm8tbG9nLXNob3dz"


class Store(abc.ABC):
    """A running store with the bucket, container or repository :attr:`root`.

    Attributes:
      name: the protocol.
      root: URL below which tests write.
      environment: what clients need, also for child processes.
      options: what fsspec's configuration needs, by protocol.
    """

    name: str
    root: str
    environment: dict[str, str]
    options: dict[str, dict[str, Any]]

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends the server."""

    def put(self, name: str, content: bytes) -> str:
        """Writes an object; returns its URL."""
        url = f"{self.root}/{name}"
        stores.ask(url, "pipe_file", content)
        return url

    def get(self, name: str) -> bytes:
        """Returns the content of an object."""
        return stores.ask(f"{self.root}/{name}", "cat_file")

    def objects(self, folder: str) -> dict[str, bytes]:
        """Returns the objects below a folder."""
        files, path = stores.open_store(f"{self.root}/{folder}")
        return {found.removeprefix(f"{path}/"): files.cat_file(found) for found in files.find(path)}


def forget_clients() -> None:
    """Drops file systems, which keep the endpoint and the credentials with which they were made."""
    stores._file_system.cache_clear()
    for name in ("s3", "gs", "az", "hf"):
        with contextlib.suppress(ImportError):
            fsspec.get_filesystem_class(name).clear_instance_cache()


@contextlib.contextmanager
def running(make: Callable[[], Store]) -> Iterator[Store]:
    """Starts a store and configures its clients."""
    store = make()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        for name, value in store.options.items():
            patch.setitem(fsspec.config.conf, name, value)
            patch.setenv(f"FSSPEC_{name.upper()}", json.dumps(value))
        forget_clients()
        try:
            yield store
        finally:
            forget_clients()
            store.stop()


def need(*modules: str) -> None:
    """Skips the test if a package is not installed, and names it."""
    for module in modules:
        pytest.importorskip(module, reason=f"{module} is not installed")


# ------------------------------------------------------------------------ S3


class S3(Store):
    """moto, behind a middleware that counts requests and fails some.

    Attributes:
      failing: fraction of requests that are answered with 503; ``num_failed`` counts them.
      requests: method and path of each request.
      sent: bytes of the objects that were downloaded.
      hook: called before each request with False, and after it with True.
      client: of boto3, past the middleware.
    """

    name = "s3"

    def __init__(self, bucket: str = "meshfeed") -> None:
        need("moto", "s3fs", "boto3")
        self.root, self._bucket = f"s3://{bucket}", bucket
        import boto3
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        self.failing, self.num_failed, self.sent = 0.0, 0, 0
        self.requests: list[tuple[str, str]] = []
        self.hook: Callable[[bool], None] = lambda _: None
        self._random, self._lock = random.Random(0), threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)

        class Quiet(MotoRequestHandler):
            protocol_version = "HTTP/1.1"  # or each request takes a connection of its own

            def log(self, *args: object) -> None:
                pass

        self._servers = [make_server("127.0.0.1", 0, app, True, request_handler=Quiet) for app in (self, self._app)]
        self._threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in self._servers]
        for thread in self._threads:
            thread.start()
        self.endpoint, direct = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.options = {}
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": SECRET}
        self.client = boto3.client("s3", endpoint_url=direct, region_name="us-east-1", **keys)
        with urllib.request.urlopen(urllib.request.Request(f"{direct}/moto-api/reset", method="POST")):
            pass  # moto's buckets belong to the process
        self.client.create_bucket(Bucket=bucket)

    def __call__(self, environ: dict[str, Any], respond: Callable[..., Any]) -> Any:
        """Answers a request: the WSGI application."""
        query = environ.get("QUERY_STRING", "")
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"] + (f"?{query}" if query else "")))
        if self.failing and self._random.random() < self.failing:
            self.num_failed += 1
            with contextlib.suppress(Exception):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = b"<Error><Code>ServiceUnavailable</Code><Message>Please try again.</Message></Error>"
            respond("503 Service Unavailable", [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
            return [body]
        self.hook(False)
        answer = self._app(environ, respond)
        if environ["REQUEST_METHOD"] == "GET" and "list-type" not in query:
            answer = list(answer)
            with self._lock:
                self.sent += sum(map(len, answer))
        self.hook(True)
        return answer

    def keys(self, prefix: str = "") -> list[str]:
        """Returns the keys below a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def uploads(self) -> list[str]:
        """Returns the keys of uploads in parts that are not complete."""
        return [found["Key"] for found in self.client.list_multipart_uploads(Bucket=self._bucket).get("Uploads", ())]

    def stop(self) -> None:
        """See :class:`Store`. Refuses connections from now on; safe to call again."""
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
        self._servers, self._threads = [], []


# ------------------------------------------------------------------------ Google Cloud Storage


class Google(Store):
    """gcp-storage-emulator, with the headers of answers that it leaves out."""

    name, root = "gs", "gs://meshfeed"

    def __init__(self) -> None:
        need("gcp_storage_emulator", "gcsfs")
        from gcp_storage_emulator.handlers import objects
        from gcsfs.core import GCSFileSystem

        for name in ("gs", "gcs"):  # not the class that asks for the kind of bucket by gRPC, which the emulator lacks
            fsspec.register_implementation(name, GCSFileSystem, clobber=True)
        plain = getattr(objects.download, "plain", objects.download)

        def download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
            plain(request, response, storage, *args, **kwargs)
            with contextlib.suppress(Exception):  # the object is absent, as the response says
                entry = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
                response["x-goog-generation"] = entry["generation"]
                response["x-goog-hash"] = f"crc32c={entry['crc32c']},md5={entry['md5Hash']}"

        download.plain = plain  # type: ignore[attr-defined]
        objects.download = download
        server = importlib.reload(importlib.import_module("gcp_storage_emulator.server"))  # takes the function above
        self._server = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="meshfeed")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{self._server._api._httpd.server_address[1]}"
        self.environment = {"NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        options = {"token": "anon", "endpoint_url": self.endpoint, "project": "test"}
        self.options = {"gs": options, "gcs": options}

    def stop(self) -> None:
        """See :class:`Store`."""
        self._server.stop()


# ------------------------------------------------------------------------ Azure


def azurite() -> str | None:
    """Returns the path of Azurite, from PATH or where ``scripts/azurite`` installs it; None if it is not installed."""
    here = pathlib.Path(__file__).parents[2] / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return os.environ.get("AZURITE") or shutil.which("azurite-blob") or (str(here) if here.exists() else None)


class Azure(Store):
    """Azurite, Microsoft's emulator, a program of Node.js."""

    name, root = "az", "az://meshfeed"

    def __init__(self) -> None:
        need("adlfs")
        program = azurite()
        if program is None:
            pytest.skip("Azurite is not installed: run scripts/azurite")
        self._folder = tempfile.mkdtemp(prefix="azurite-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        self._process = subprocess.Popen(
            [program, "--blobPort", str(port), *options], stdout=subprocess.DEVNULL, cwd=self._folder
        )
        self.endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        # The account that Azurite documents; its key is public.
        key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
        text = (
            f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={self.endpoint};"
        )
        self.environment = {"AZURE_STORAGE_CONNECTION_STRING": text}
        self.options = {}
        _wait_for(port, self._process)
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(text) as client:
            client.create_container("meshfeed")

    def stop(self) -> None:
        """See :class:`Store`."""
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)


# ------------------------------------------------------------------------ Hugging Face


class Hub(Store):
    """The routes of the Hugging Face Hub that ``HfFileSystem`` reads a dataset with; tests put files directly.

    Attributes:
      requests: method and path of each request.
      sent: bytes of the objects that were downloaded.
    """

    name, root = "hf", "hf://datasets/meshfeed/data"

    def __init__(self) -> None:
        need("huggingface_hub")
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                store._answer(self)

            do_HEAD = do_POST = do_GET

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": SECRET}
        self.options = {"hf": {"endpoint": self.endpoint}}  # the library reads the variable when it is imported

    def put(self, name: str, content: bytes) -> str:
        """See :class:`Store`."""
        self.files[name] = content
        return f"{self.root}/{name}"

    def get(self, name: str) -> bytes:
        """See :class:`Store`."""
        return self.files[name]

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.requests.append((request.command, request.path))
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        repository = "/api/datasets/meshfeed/data"
        if path.startswith(f"{repository}/tree/"):
            folder = path.removeprefix(f"{repository}/tree/").partition("/")[2]
            recursive = "recursive=true" in request.path.lower()
            found = self._tree(folder, recursive)
            if found:
                self._send(request, 200, json.dumps(found).encode())
            else:
                self._send(request, 404, b'{"error": "no such folder"}', {"X-Error-Code": "EntryNotFound"})
        elif path.startswith(f"{repository}/paths-info/"):
            asked = (
                json.loads(body)["paths"] if body.startswith(b"{") else urllib.parse.parse_qs(body.decode())["paths"]
            )
            entries = {entry["path"]: entry for entry in self._tree("", True)}
            self._send(request, 200, json.dumps([entries[name] for name in asked if name in entries]).encode())
        elif path in (repository, f"{repository}/revision/main"):
            info = {
                "id": "meshfeed/data",
                "sha": "0" * 40,
                "private": False,
                "siblings": [],
                "tags": [],
                "downloads": 0,
            }
            self._send(request, 200, json.dumps(info).encode())
        elif path.startswith("/datasets/meshfeed/data/resolve/"):
            self._resolve(request, path.removeprefix("/datasets/meshfeed/data/resolve/").partition("/")[2])
        else:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        start = f"{folder}/" if folder else ""
        for name, content in self.files.items():
            if not name.startswith(start):
                continue
            parts = name.removeprefix(start).split("/")
            for depth in range(1, len(parts)):
                if recursive or depth == 1:
                    inner = start + "/".join(parts[:depth])
                    entries[inner] = {"type": "directory", "path": inner, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                oid = hashlib.sha1(content).hexdigest()
                entries[name] = {"type": "file", "path": name, "oid": oid, "size": len(content)}
        return list(entries.values())

    def _resolve(self, request: http.server.BaseHTTPRequestHandler, name: str) -> None:
        content = self.files.get(name)
        if content is None:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": "0" * 40,
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        if span is None:
            self._send(request, 200, content, headers)
            return
        start, stop = int(span[1]), min(int(span[2] or len(content) - 1) + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(request, 206, content[start:stop], headers)

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def stop(self) -> None:
        """See :class:`Store`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


STORES: dict[str, Callable[[], Store]] = {"s3": S3, "gs": Google, "az": Azure, "hf": Hub}
