"""What a restore tells about itself: a progress bar on terminals, one line of the log, and events of ``jax.monitoring``."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Self

import jax
from etils import epath

from meshfeed._src.base.coordination import process_count, process_index

_log = logging.getLogger("meshfeed.checkpoint")
_BAR_AFTER_SECONDS = 3.0
_BAR_WIDTH = 32
_GIB = 1 << 30


class RestoreProgress:
    """Counts the bytes of one restore on this host."""

    def __init__(self, directory: epath.Path, total_bytes: int) -> None:
        self._directory = directory
        self._total_bytes = total_bytes
        self._bytes = 0
        self._started = time.perf_counter()
        self._drawn = 0.0
        self._bar = process_index() == 0 and sys.stderr is not None and sys.stderr.isatty()  # None if closed: 2>&-

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stderr.write("\n")

    def add(self, count: int) -> None:
        """Counts bytes read from storage."""
        self._bytes += count
        now = time.perf_counter()
        if self._bar and now - self._started > _BAR_AFTER_SECONDS and now - self._drawn > 0.2:
            self._drawn = now
            self._draw(now - self._started)

    def _draw(self, seconds: float) -> None:
        # Reads are spread evenly over the processes.
        share = min(1.0, self._bytes / max(1, self._total_bytes // process_count()))
        bar = "█" * int(share * _BAR_WIDTH)
        gib = self._bytes / _GIB
        sys.stderr.write(f"\rrestoring {bar:<{_BAR_WIDTH}} {share:4.0%} {gib:.2f} GiB {gib / seconds:.2f} GiB/s")
        sys.stderr.flush()

    def finish(self, held_bytes: int) -> None:
        """Logs and records the totals."""
        seconds = max(time.perf_counter() - self._started, 1e-9)
        read, held = self._bytes / _GIB, held_bytes / _GIB
        text = "restored %s: host %d read %.3f of %.3f GiB in %.2f s (%.3f GiB/s), holds %.3f GiB"
        total, speed = self._total_bytes / _GIB, read / seconds
        _log.info(text, self._directory, process_index(), read, total, seconds, speed, held)
        scheme, is_url, _ = os.fspath(self._directory).partition("://")
        storage = {"gs": "gcs", "s3": "s3"}.get(scheme, "local") if is_url else "local"
        labels = {"storage_type": storage, "custom_prefix": ""}
        worker = "/jax/orbax/read/worker"
        jax.monitoring.record_event_duration_secs(f"{worker}/total_duration_secs", seconds, **labels)
        jax.monitoring.record_scalar(f"{worker}/io/requested/gbytes", read, **labels)
        jax.monitoring.record_scalar(f"{worker}/io/requested/throughput/gbytes_per_sec", speed, **labels)
        jax.monitoring.record_event_duration_secs("/jax/checkpoint/read/durations_sec", seconds)
        if process_index() == 0:
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", held)
            jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", held / seconds)
