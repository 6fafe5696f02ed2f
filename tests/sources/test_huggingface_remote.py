"""Streaming datasets over HTTP, from a server in this process."""

from __future__ import annotations

import functools
import http.server
import os
import re
import threading
from pathlib import Path

import pytest

datasets = pytest.importorskip("datasets")
pytest.importorskip("aiohttp")

from huggingface_files import BUILDERS, write_files  # noqa: E402  # after the checks above
from lane_checks import check_lanes, read_ids, restored, saved  # noqa: E402

from meshfeed.sources import HuggingFace  # noqa: E402

SIZES = [9, 14, 5]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with ranges, as object stores serve them; ``broken`` paths answer 503, ``asked`` counts requests."""

    protocol_version = "HTTP/1.1"
    broken: set[str] = set()  # noqa: RUF012  # one server a test
    asked: list[str] = []  # noqa: RUF012

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        self.asked.append(self.path)
        path = Path(self.translate_path(self.path))
        if self.path in self.broken or not path.is_file():
            self.send_error(503 if self.path in self.broken else 404)
            return
        content, status = path.read_bytes(), 200
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        total = len(content)
        if wanted:
            start, stop = int(wanted[1]), int(wanted[2] or total - 1) + 1
            content, status = content[start:stop], 206
        self.send_response(status)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{total}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *unused):
        pass


@pytest.fixture
def server(tmp_path):
    kind = type("OneServer", (Handler,), {"broken": set(), "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=str(tmp_path))) as one:
        thread = threading.Thread(target=one.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{one.server_address[1]}", kind
        one.shutdown()
        thread.join()


def stream(url, tmp_path, suffix):
    paths = write_files(tmp_path / "files", suffix, SIZES)
    urls = [f"{url}/files/{os.path.basename(path)}" for path in paths]
    return datasets.load_dataset(BUILDERS[suffix], data_files=urls, split="train", streaming=True)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_files_behind_urls(server, tmp_path, suffix):
    source = HuggingFace(stream(server[0], tmp_path, suffix), columns=["id"])
    for num_lanes in (2, 5):
        check_lanes(source, num_lanes, range(sum(SIZES)), step=6)


def test_identity_is_that_of_the_same_files_on_disk(server, tmp_path):
    remote = HuggingFace(stream(server[0], tmp_path, "parquet"), columns=["id"])
    paths = sorted(str(path) for path in (tmp_path / "files").iterdir())
    local = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)
    source = HuggingFace(local, columns=["id"])
    assert remote.fingerprint() == source.fingerprint()
    lane = remote.open(1, 4)
    next(lane)
    assert read_ids(restored(source.open(1, 4), saved(lane))) == read_ids(lane)  # a state goes from one to the other


def test_row_groups_are_counted_once_for_all_lanes(server, tmp_path):
    url, handler = server
    source = HuggingFace(stream(url, tmp_path, "parquet"), columns=["id"])
    handler.asked.clear()
    for lane in range(5):
        source.open(lane, 5)
    first = len(handler.asked)
    for lane in range(5):
        source.open(lane, 5)
    assert first > 0
    assert len(handler.asked) == first


def test_a_server_that_fails_is_an_oserror_and_the_lane_goes_on_from_its_state(server, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "STREAMING_OPEN_MAX_RETRIES", 1)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 1)
    url, handler = server
    source = HuggingFace(stream(url, tmp_path, "parquet"), columns=["id"])
    lane = source.open(0, 1)
    ids = [int(next(lane)["id"]) for _ in range(9)]
    handler.broken.update(["/files/01.parquet", "/files/02.parquet"])
    for _ in range(2):
        with pytest.raises(Exception, match=r"503|Service Unavailable|01\.parquet"):
            next(lane)
    handler.broken.clear()
    rest = read_ids(restored(source.open(0, 1), saved(lane)))
    assert ids + rest == list(range(sum(SIZES)))
