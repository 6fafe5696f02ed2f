"""A progress bar while a cache fills for the first time."""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any

from meshfeed._src.base.threads import Background

_IDLE_SECONDS = 2.0


class FillBar:
    """Shows the downloads of a process, until none has been under way for two seconds.

    Only on a terminal (standard error), and if rich is installed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = self._ends = 0
        self._total = 0
        self._progress: Any = None
        self._ended = not sys.stderr.isatty()

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
