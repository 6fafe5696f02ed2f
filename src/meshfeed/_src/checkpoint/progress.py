"""Reports a restore in the log, in ``jax.monitoring`` under the names that Orbax users graph, and as a progress bar."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any, Self

import jax
from etils import epath

from meshfeed._src.base.coordination import process_count, process_index

_log = logging.getLogger("meshfeed.checkpoint")
_BAR_AFTER_SECONDS = 3.0
_BAR_WIDTH = 32
_GIB = 1 << 30


def storage_type(directory: Any) -> str:
    """Returns ``gcs``, ``s3`` or ``local``, as a label for monitoring events."""
    text = str(directory)
    return {"gs": "gcs", "s3": "s3"}.get(text.split("://", 1)[0], "local") if "://" in text else "local"


class RestoreProgress:
    """Counts the bytes of one restore on this host.

    Args:
      directory: the item being restored.
      total_bytes: stored bytes of everything restored, over all hosts.
    """

    def __init__(self, directory: epath.Path, total_bytes: int) -> None:
        self._directory = directory
        self._total_bytes = total_bytes
        self._bytes = 0
        self._started = time.perf_counter()
        self._drawn = 0.0
        self._lock = threading.Lock()
        self._bar = process_index() == 0 and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\n")

    def add(self, count: int) -> None:
        """Counts bytes read from storage; safe to call from several threads."""
        with self._lock:
            self._bytes += count
            now = time.perf_counter()
            if self._bar and now - self._started > _BAR_AFTER_SECONDS and now - self._drawn > 0.2:
                self._drawn = now
                self._draw(now - self._started)

    def _draw(self, seconds: float) -> None:
        # Reads are spread evenly over the processes.
        share = min(1.0, self._bytes / max(1, self._total_bytes // process_count()))
        bar = "█" * int(share * _BAR_WIDTH)
        rate = self._bytes / _GIB / seconds
        sys.stderr.write(f"\rrestoring {bar:<{_BAR_WIDTH}} {share:4.0%} {self._bytes / _GIB:.2f} GiB {rate:.2f} GiB/s")
        sys.stderr.flush()

    def finish(self, read_bytes: int, held_bytes: int) -> None:
        """Logs and records the totals.

        Args:
          read_bytes: bytes that this host read from storage, decoded.
          held_bytes: bytes that this host now holds.
        """
        seconds = time.perf_counter() - self._started
        rate = read_bytes / seconds if seconds else 0.0
        storage = storage_type(self._directory)
        _log.info(
            "restored %s: host %d read %.3f of %.3f GiB in %.2f s (%.3f GiB/s), holds %.3f GiB",
            self._directory,
            process_index(),
            read_bytes / _GIB,
            self._total_bytes / _GIB,
            seconds,
            rate / _GIB,
            held_bytes / _GIB,
        )
        labels = {"storage_type": storage, "custom_prefix": ""}
        jax.monitoring.record_event_duration_secs("/jax/orbax/read/worker/total_duration_secs", seconds, **labels)
        jax.monitoring.record_scalar("/jax/orbax/read/worker/io/requested/gbytes", read_bytes / _GIB, **labels)
        jax.monitoring.record_scalar(
            "/jax/orbax/read/worker/io/requested/throughput/gbytes_per_sec", rate / _GIB, **labels
        )
        jax.monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", seconds)
        if process_index() == 0:
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", held_bytes / _GIB)
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", held_bytes / _GIB / max(seconds, 1e-9))
