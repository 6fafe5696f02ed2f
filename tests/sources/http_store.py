"""A small object store over HTTP, for tests, that misbehaves as told; and a proxy that cuts connections to a real one."""

from __future__ import annotations

import hashlib
import http.server
import socket
import sys
import threading

BLOCK = 4 << 20  # bytes of the first request of a large file


class Store(http.server.ThreadingHTTPServer):
    """An object store of a few bytes, over HTTP, that misbehaves when told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.fetches: list[str] = []
        self.ranges = True
        self.versions = True  # whether answers say which version it is
        self.suffix = (
            0  # status of the answer to "the last bytes": of the whole file, an error, or the first bytes; 0: right
        )
        self.names_ranges = True  # whether the answer to a range says which it is
        self.range_requests = 0
        self.asked: list[tuple[str, str]] = []  # method and name of each request
        self.fail = 0  # so many fetches answer 503
        self.cut = 0  # so many fetches break off half-way
        self.broken: dict[tuple[str, int], str] = {}  # (name, first byte) → "cut" or "stall": once, half-way; or "busy"
        self.shifted = 0  # so many range requests are answered with the range one byte later
        self.requests: list[tuple[str, int, int]] = []  # name, first byte and bytes sent of each GET
        self.hold = threading.Event()  # requests for the end of "slow…" wait for it after their first half
        self.hold.set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def answered(self, name: str, first: int) -> None:
        """Called half-way through each answer."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def put(self, name: str, content: bytes) -> str:
        self.files[name] = content
        return self.url(name)


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """HEAD and GET of files and of ranges of them; what is answered is a subclass's."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms between its parts

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        raise NotImplementedError

    def wanted_range(self, num_bytes: int) -> tuple[int, int] | None:
        """First byte and the one after the last of those wanted of so many; None if the whole file is wanted."""
        wanted = self.headers.get("Range")
        if not wanted:
            return None
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        if not start:
            return max(0, num_bytes - int(end)), num_bytes
        return int(start), min(int(end) + 1, num_bytes) if end else num_bytes

    def head(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


class _Handler(RangeHandler):
    server: Store

    def _answer(self, *, body: bool) -> None:
        store, name = self.server, self.path.lstrip("/")
        store.asked.append((self.command, name))
        content = store.files.get(name)
        if content is None:
            self.head(404, 0)
            return
        whole, wanted = len(content), self.headers.get("Range")
        etag = hashlib.md5(content).hexdigest()
        suffix = wanted is not None and wanted.startswith("bytes=-")
        ranged = store.ranges and wanted is not None and not (suffix and store.suffix == 200)
        first, stop = (self.wanted_range(whole) if ranged else None) or (0, whole)
        if suffix and store.suffix in (400, 416, 501):
            self.head(store.suffix, 0)
            return
        if suffix and store.suffix == 206:  # taken for the first bytes
            first, stop = 0, stop - first
        if body and ranged and store.shifted and stop < whole:
            store.shifted -= 1
            first, stop = first + 1, stop + 1
        content = content[first:stop]
        ends = first + len(content) == whole
        fetched = body and wanted in (None, "bytes=0-", f"bytes=0-{BLOCK - 1}")
        store.range_requests += body and ranged and not fetched
        broken = store.broken.pop((name, first), None) if body else None
        if self._is_busy(name, fetched, broken):
            self.head(503, 0, **({"Retry_After": "7"} if broken else {}))
            return
        headers = {"ETag": f'"{etag}"'} if store.versions else {}
        headers |= {"Accept_Ranges": "bytes"} if store.ranges else {}
        if ranged and store.names_ranges:
            headers["Content_Range"] = f"bytes {first}-{first + len(content) - 1}/{whole}"
        self.head(206 if ranged else 200, len(content), **headers)
        if body:
            self._send(name, first, content, broken, cuttable=fetched, ends=ends)

    def _is_busy(self, name: str, fetched: bool, broken: str | None) -> bool:
        store = self.server
        if fetched:
            store.fetches.append(name)
        if fetched and store.fail:
            store.fail -= 1
            return True
        return broken == "busy"

    def _send(self, name: str, first: int, content: bytes, broken: str | None, *, cuttable: bool, ends: bool) -> None:
        store, half = self.server, len(content) // 2
        store.requests.append((name, first, half if broken else len(content)))
        self.wfile.write(content[:half])
        self.wfile.flush()
        if broken == "stall":
            store.hold.wait(60)
        if broken:
            self.close_connection = True
            return
        store.answered(name, first)
        if cuttable and store.cut:
            store.cut -= 1
            self.close_connection = True
            return
        if name.startswith("slow") and ends:
            store.hold.wait(60)
        try:
            self.wfile.write(content[half:])
        except ConnectionError:
            pass


class CuttingProxy:
    """Passes connections on to a server, and cuts the first ``cuts`` answers that exceed ``after`` bytes there.

    Args:
      port: the port of the server on this machine.
      after: bytes of an answer before the cut.
      cuts: how many answers are cut.
    """

    def __init__(self, port: int, after: int, cuts: int) -> None:
        self._port, self._after, self.cuts = port, after, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._copy, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        copied = 0
        try:
            while content := source.recv(1 << 16):
                target.sendall(content)
                copied += len(content)
                if answers and self.cuts and copied > self._after:
                    self.cuts -= 1
                    break
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def close(self) -> None:
        self._listener.close()
