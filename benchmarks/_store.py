"""An object store over HTTP with a limited bandwidth, in a process of its own: ``python -m benchmarks._store FOLDER``.

Serves the files of a folder, with ranges and ETags; S3 clients can read the folders in it as buckets. The bandwidth is
shared by all connections, as a link is. GET of ``/-/sent`` returns the bytes sent of files since the last such request,
and the number of requests.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import os
import pathlib
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

from tests.sources.http_store import RangeHandler

_CHUNK_BYTES = 1 << 14
_HEADERS = {"Accept_Ranges": "bytes", "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: str, bandwidth: float, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.bandwidth, self.latency = folder, bandwidth, latency
        self.sent = self.requests = 0
        self._free_at = 0.0
        self.lock = threading.Lock()

    def send(self, num_bytes: int) -> None:
        """Waits for this connection's turn on the link."""
        with self.lock:
            self.sent += num_bytes
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self.bandwidth
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))


class _Handler(RangeHandler):
    server: _Server

    def _answer(self, *, body: bool) -> None:
        if self.path == "/-/sent":
            content = f"{self.server.sent} {self.server.requests}".encode()
            self.server.sent = self.server.requests = 0
            self.head(200, len(content))
            self.wfile.write(content)
            return
        with self.server.lock:
            self.server.requests += 1
        time.sleep(self.server.latency)
        path = pathlib.Path(self.server.folder + self.path)
        if not path.is_file():
            self.head(404, 0)
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            part = self.wanted_range(size)
            start, stop = part or (0, size)
            ranged = {"Content_Range": f"bytes {start}-{stop - 1}/{size}"} if part else {}
            self.head(206 if part else 200, stop - start, ETag=f'"{self.path}"', **_HEADERS, **ranged)
            file.seek(start)
            while body and (content := file.read(min(_CHUNK_BYTES, stop - file.tell()))):
                self.server.send(len(content))
                try:
                    self.wfile.write(content)
                except ConnectionError:  # the client has enough
                    self.close_connection = True
                    return


@contextlib.contextmanager
def serve(folder: str, *, bandwidth: float, latency: float = 0.0) -> Iterator[str]:
    """Serves a folder with ``bandwidth`` bytes per second and ``latency`` seconds per request; yields its URL."""
    command = [sys.executable, "-m", "benchmarks._store", folder, str(bandwidth), str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def sent(url: str) -> tuple[int, int]:
    """Bytes of files that a store has sent since the last call, and the requests; ``url`` is any on it."""
    with urllib.request.urlopen(urllib.parse.urljoin(url, "/-/sent")) as answer:
        num_bytes, requests = map(int, answer.read().split())
    return num_bytes, requests


def bytes_sent(url: str) -> int:
    """The bytes of :func:`sent`."""
    return sent(url)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("bandwidth", type=float)
    parser.add_argument("latency", type=float)
    options = parser.parse_args()
    server = _Server(options.folder, options.bandwidth, options.latency)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
