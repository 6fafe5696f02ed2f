"""A source over a store that is down raises in time: the error names the URL, how long was tried, and what to check."""

from __future__ import annotations

import contextlib
import http.server
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "sources"))

import array_record_files
import http_store
from store_servers import S3, forget_clients, running

import meshfeed
from meshfeed._src.base import stores
from meshfeed._src.sources.files import direct, paths
from meshfeed.sources import ArrayRecord, Tokens

ANSWER, ALIVE, FIRST = 2.0, 0.5, 0.5
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_ANSWER_SECONDS", ANSWER)
    monkeypatch.setattr(stores, "ANSWER_SECONDS", ANSWER)
    monkeypatch.setattr(stores, "_ALIVE_SECONDS", ALIVE)
    monkeypatch.setattr(direct, "_FIRST_ANSWER_SECONDS", FIRST)


class Busy(http.server.BaseHTTPRequestHandler):
    """Answers every request with 503."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = answer


@contextlib.contextmanager
def refusing() -> Iterator[int]:
    """A port that refuses connections."""
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]  # the system accepts


@contextlib.contextmanager
def busy() -> Iterator[int]:
    """A port that answers every request with 503."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextlib.contextmanager
def url_at(scheme: str, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if scheme == "http":
        yield f"http://127.0.0.1:{port}/bucket/x"
        return
    pytest.importorskip("s3fs")
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    forget_clients()
    try:
        yield "s3://bucket/x"
    finally:
        forget_clients()


def open_source(url: str) -> Any:
    return ArrayRecord(url)


def open_tokens(url: str) -> Any:
    return Tokens(url, sequence_length=8)


@pytest.mark.slow
@pytest.mark.parametrize("server", [refusing, silent, busy])
@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize(
    ("make", "suffix"), [(open_source, ".array_record"), (open_source, "/*.array_record"), (open_tokens, ".bin")]
)
def test_a_store_that_is_down(
    server: Callable[[], contextlib.AbstractContextManager[int]],
    scheme: str,
    make: Callable[[str], Any],
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server() as port, url_at(scheme, port, monkeypatch) as url:
        start = time.monotonic()
        with pytest.raises(
            OSError, match=r"attempts? in \d+ s\)\. Check the URL, the network, .* the store is up"
        ) as raised:
            make(url + suffix)
        # Alone 2.5 s; with attempts that each wait for ANSWER, 14 s.
        assert time.monotonic() - start < ANSWER + ALIVE + FIRST + 4
        assert url.removesuffix("/x") in str(raised.value)


@pytest.mark.slow
def test_a_manifest_does_not_wait_for_a_dead_store() -> None:
    with silent() as port:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"manifest\.json"):
            ArrayRecord(f"http://127.0.0.1:{port}/manifest.json")
        assert time.monotonic() - start < ANSWER + ALIVE + 2


@pytest.mark.slow
def test_the_retry_of_a_cache_is_kept(tmp_path: pathlib.Path) -> None:
    def attempts(retry: meshfeed.Retry) -> int:
        cache = meshfeed.ShardCache(tmp_path / str(retry.attempts), retry=retry)
        with silent() as port, pytest.raises(OSError, match=r"attempts? in") as raised:
            paths.look_up(f"http://127.0.0.1:{port}/x", "Test", cache._retry)
        return int(str(raised.value).partition(" attempt")[0].rpartition("(")[2])

    assert attempts(meshfeed.Retry()) == 1
    assert attempts(meshfeed.Retry(attempts=3, initial_seconds=0)) == 3


class Slow(http_store._Handler):
    """Takes longer for a manifest than a store may take that is down, and refuses one in a folder."""

    def _answer(self, *, body: bool) -> None:
        if self.path == "/slow/manifest.json":
            time.sleep(ANSWER + 1)
        if self.path == "/refused/manifest.json":
            self.head(400, 0)
            return
        super()._answer(body=body)


@pytest.mark.slow
def test_a_slow_answer_of_a_store_that_is_up(tmp_path: pathlib.Path) -> None:
    store = http_store.Store()
    store.RequestHandlerClass = Slow
    content = pathlib.Path(array_record_files.write(tmp_path / "a", [b"abc"] * 3)).read_bytes()
    for folder in ("slow", "refused"):
        start = time.monotonic()
        assert len(ArrayRecord(store.put(f"{folder}/a", content))) == 3
        assert (time.monotonic() - start > ANSWER) == (folder == "slow")


@pytest.mark.slow
def test_a_slow_listing_of_a_store_that_is_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pathlib.Path(array_record_files.write(tmp_path / "a", [b"abc"] * 3)).read_bytes()
    with running(S3) as store:
        with monkeypatch.context() as patch:
            patch.setattr(stores, "ANSWER_SECONDS", 60.0)  # the first request makes a client, which may take seconds
            store.put("a/x", content)

        def hook(after: bool) -> None:
            method, path = store.requests[-1]
            if not after and method == "GET" and "list-type" in path and "max-keys" not in path.lower():
                time.sleep(ANSWER + 1)

        store.hook = hook
        start = time.monotonic()
        assert len(ArrayRecord("s3://meshfeed/a/*")) == 3
        assert time.monotonic() - start > ANSWER


def test_what_counts_as_out_of_reach() -> None:
    class Answer(Exception):
        def __init__(self, status: int) -> None:
            self.status = status

    def of(cause: BaseException) -> OSError:
        error = OSError("mapped")
        error.__cause__ = cause
        return error

    assert [status for status in (400, 404, 416, 429, 500, 503) if stores.is_unreachable(of(Answer(status)))] == [
        429,
        500,
        503,
    ]
    for status in (404, 503):  # as the client of Hugging Face raises them
        error = OSError("of an answer")
        error.response = Answer(status)  # type: ignore[attr-defined]
        assert stores.is_unreachable(of(error)) == (status == 503)
    assert stores.is_unreachable(of(ConnectionResetError()))
    assert stores.is_unreachable(TimeoutError())
    assert not stores.is_unreachable(of(ValueError()))
