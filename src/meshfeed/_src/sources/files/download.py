"""Downloads files in blocks; all connections serve the file that is needed next.

Each block is one range request, so a connection that breaks or stalls costs one block, and the download continues from there.
Every thread that waits for a file takes the next block of the file that is needed first, also if another thread asked for
it. The nearest file therefore gets the whole bandwidth until its last block is requested, whether a connection or the link
is the bottleneck.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from meshfeed._src.base.errors import without_signatures
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry
from meshfeed._src.base.threads import Background
from meshfeed._src.base.wake_up import WakeUp
from meshfeed._src.sources.files.direct import (
    RemoteBytes,
    check_range,
    noted_headers,
    noting_file_system,
    write_at,
)
from meshfeed._src.sources.files.paths import remote_errors

FIRST_BLOCK_BYTES = 4 << 20
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 18, 16 << 20
_IDLE_SECONDS = 2.0  # without a download, after which the progress bar ends
_BLOCK_SECONDS = 0.5  # blocks adapt to take this long: long beside the latency, short beside the deadline


class Download:
    """One file that is being downloaded into ``handle``, an empty file open for writing.

    The file with the smallest ``priority()``, when it is needed, comes first. All answers must be of one version of
    ``remote``.
    """

    def __init__(self, remote: RemoteBytes, handle: int, priority: Callable[[], float]) -> None:
        self.url, self.num_bytes, self.priority = remote.url, remote.num_bytes, priority
        self.remote = remote
        self.error: Exception | None = None
        self.probing = False  # the first block is under way, and the server may send the whole file
        self.in_flight = 0
        self.wake = WakeUp()
        self._requested = 0
        self.given_back: list[tuple[int, int]] = []  # blocks that were taken and not fetched
        self._handle = os.dup(handle)  # closed after the last write, also if the caller is interrupted before

    @property
    def has_blocks(self) -> bool:
        """Whether a block can be taken."""
        return not self.probing and self.error is None and (bool(self.given_back) or self._requested < self.num_bytes)

    @property
    def done(self) -> bool:
        """Whether all blocks have arrived, or one has failed."""
        return not self.in_flight and not self.has_blocks

    def take(self, num_bytes: int) -> tuple[int, int]:
        """Takes a block of at most ``num_bytes``, or one that was given back; returns its first byte and its end."""
        self.in_flight += 1
        if self.given_back:
            return self.given_back.pop()
        start = self._requested
        self._requested = min(start + num_bytes, self.num_bytes)
        return start, self._requested

    def finish(self) -> None:
        """Drops the blocks not taken yet: the whole file has arrived."""
        self._requested = self.num_bytes

    def write(self, content: bytes, start: int) -> None:
        """Writes a block."""
        write_at(self._handle, start, content)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._handle)


class Downloads:
    """The downloads of a process. Thread-safe. A request without an answer for ``read_timeout_seconds`` is sent again."""

    def __init__(self, retry: Retry, read_timeout_seconds: float) -> None:
        self._retry, self._timeout = retry, read_timeout_seconds
        self._bar = FillBar()
        self._lock = threading.Lock()
        self._active: list[Download] = []
        self._block_bytes = FIRST_BLOCK_BYTES
        self._with_ranges: set[str] = set()  # servers that answered a range request with that range

    def run(self, download: Download) -> None:
        """Downloads a file; helps with files that are needed before it.

        Raises:
          SourceError: if the file does not exist or cannot be read.
          OSError: if a block cannot be read after all retries, or cannot be written.
        """
        with self._lock:
            self._active.append(download)
        self._bar.begin(download.num_bytes)
        try:
            while not download.done:
                block = self._take(download)
                if block is None:
                    download.wake.wait(lambda: download.done or download.has_blocks)
                else:
                    self._fetch(*block)
        finally:
            self._bar.end()
            with self._lock:
                self._active.remove(download)
                unused = not download.in_flight
            if unused:
                download.close()
        if download.error is not None:
            raise download.error

    def _take(self, own: Download) -> tuple[Download, int, int] | None:
        """Takes a block of the nearest file that is needed no later than ``own``; None if there is none."""
        with self._lock:
            latest = own.priority()
            ready = [(active.priority(), active is not own, number) for number, active in enumerate(self._active)
                     if active.has_blocks]  # fmt: skip
            priority, _, number = min(ready, default=(math.inf, True, -1))
            if number < 0 or priority > latest:
                return None
            download = self._active[number]
            start, stop = download.take(self._block_bytes)
            download.probing = stop - start < download.num_bytes and not self._serves_ranges(download)
            return download, start, stop

    def _serves_ranges(self, download: Download) -> bool:
        return _server(download.url) in self._with_ranges

    def _fetch(self, download: Download, start: int, stop: int) -> None:
        whole, fetched = False, False
        arrived, size = start, stop - start

        def copy() -> bool:
            nonlocal arrived, size
            while True:
                end = min(arrived + size, stop)
                try:
                    has_all = self._copy(download, arrived, end)
                except TimeoutError:  # of a slow link, each attempt at as many bytes would end before they are there
                    size = max(_MIN_BLOCK_BYTES, (end - arrived) // 2)
                    raise
                arrived = end
                if has_all or arrived == stop:
                    return has_all

        try:
            whole = call_with_retry(copy, self._retry, doing=f"fetching {download.url}", progress=lambda: arrived)
            fetched = True
        except Exception as error:
            download.error = download.error or error
        finally:
            with self._lock:
                self._leave(download, (start, stop), whole=whole, fetched=fetched)
            download.wake.ring()
        if fetched:
            self._bar.arrived(download.num_bytes if whole else stop - start)

    def _leave(self, download: Download, block: tuple[int, int], *, whole: bool, fetched: bool) -> None:
        if whole:
            download.finish()
        elif fetched and download.probing:
            self._with_ranges.add(_server(download.url))
        elif not fetched and download.error is None:  # interrupted
            download.given_back.append(block)
        download.probing = False
        download.in_flight -= 1
        if not download.in_flight and download not in self._active:
            download.close()

    def _copy(self, download: Download, start: int, stop: int) -> bool:
        """Writes a block, or the whole file if the server does not serve ranges; returns whether it was the whole file."""
        files, inner = noting_file_system(download.url, "ShardCache")
        settings = {"timeout": self._timeout} if files.async_impl else {}
        end = None if stop - start == download.num_bytes else stop
        began = time.monotonic()
        try:
            with remote_errors(download.url, "ShardCache"), noted_headers() as headers:
                content = files.cat_file(inner, start=start, end=end, **settings)
                if headers:
                    download.remote.check_answer(headers[-1])
                if headers and len(content) == stop - start:
                    check_range(headers[-1], start, stop, download.url)
        except TimeoutError as error:
            self._block_bytes = max(_MIN_BLOCK_BYTES, (stop - start) // 2)
            if download.url.startswith("http") and not self._serves_ranges(download):
                with remote_errors(download.url, "ShardCache"):
                    return self._stream(files, inner, download)
            what = f"bytes {start:,} to {stop:,} did not arrive within {self._timeout:g} s"
            raise TimeoutError(f"{without_signatures(download.url)}: {what}") from error
        self._adapt(stop - start, time.monotonic() - began)
        whole = len(content) == download.num_bytes != stop - start
        if len(content) != stop - start and not whole:
            raise OSError(
                f"fetched {len(content):,} bytes of {without_signatures(download.url)} instead of {stop - start:,}, of "
                f"{download.num_bytes:,}"
            )
        download.write(content, 0 if whole else start)
        return whole

    def _adapt(self, num_bytes: int, seconds: float) -> None:
        self._block_bytes = adapted_block(self._block_bytes, num_bytes, seconds)

    def _stream(self, files: Any, inner: str, download: Download) -> bool:
        """Downloads a whole file over HTTP with one request: the server may ignore ranges and be slow."""
        import aiohttp

        start = 0
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=self._timeout)
        # With the size, or the client would look it up first, in requests that wait five minutes each.
        with files.open(inner, "rb", block_size=0, size=download.num_bytes, timeout=timeout) as stream:
            while content := stream.read(_MIN_BLOCK_BYTES, timeout=self._timeout):
                download.write(content, start)
                start += len(content)
        if start != download.num_bytes:
            raise OSError(
                f"fetched {start:,} bytes of {without_signatures(download.url)}, which has {download.num_bytes:,}"
            )
        return True


def adapted_block(block_bytes: int, num_bytes: int, seconds: float) -> int:
    """Returns the size of the next blocks, after a request for ``num_bytes`` took ``seconds``."""
    wanted = int(num_bytes * min(2.0, max(0.5, _BLOCK_SECONDS / max(seconds, 1e-6))))
    if num_bytes >= block_bytes or wanted < num_bytes:  # a short last block does not shrink the next ones
        return min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, wanted))
    return block_bytes


def _server(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


class FillBar:
    """Shows the downloads of a process, until none has been under way for two seconds.

    Only on a terminal (standard error), and if rich is installed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = self._ends = 0
        self._total = 0
        self._progress: Any = None
        self._ended = sys.stderr is None or not sys.stderr.isatty()  # None if closed: 2>&-

    def begin(self, num_bytes: int) -> None:
        """Adds a download."""
        with self._lock:
            self._active += 1
            self._total += num_bytes
            if not self._ended:
                self._show()

    def arrived(self, num_bytes: int) -> None:
        """Adds bytes that have arrived."""
        progress = self._progress
        if progress is not None:
            progress.advance(progress.task_ids[0], num_bytes)

    def end(self) -> None:
        """Ends a download, whether it succeeded or not."""
        with self._lock:
            self._active -= 1
            self._ends += 1
            if self._active or self._progress is None:
                return
            Background(functools.partial(self._stop_later, self._ends), "meshfeed-fill-bar").start()

    def _show(self) -> None:
        if self._progress is None:
            self._progress = _start_progress()
            self._ended = self._progress is None
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], total=self._total)

    def _stop_later(self, ends: int) -> None:
        time.sleep(_IDLE_SECONDS)
        with self._lock:
            progress = self._progress
            if self._active or ends != self._ends or progress is None:
                return
            self._progress, self._ended = None, True
        progress.stop()


def _start_progress() -> Any:
    """Returns a started ``rich.progress.Progress`` with one task, or None without rich."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        return None
    columns = (TextColumn("filling the shard cache"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task("", total=0)
    progress.start()
    return progress
