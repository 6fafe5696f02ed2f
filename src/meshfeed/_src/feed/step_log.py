"""Logs the contents of each batch, one JSON line per batch, if the logger ``meshfeed.steps`` is at DEBUG."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from meshfeed._src.feed.pipeline import Ready
from meshfeed._src.reading.records import file_of

_log = logging.getLogger("meshfeed.steps")


def logs_steps() -> bool:
    """Whether step logging is enabled."""
    return _log.isEnabledFor(logging.DEBUG)


def log_step(name: str, host: int, ready: Ready, position: int, wait_seconds: float, source: Any) -> None:
    """Logs one line for a delivered batch: ids and files of this host's rows, and times in seconds.

    Args:
      name: name of the feed.
      host: process index.
      ready: the batch; its index, counted from 0, is logged as ``step``.
      position: records delivered before it, over all hosts.
      wait_seconds: time that the caller waited for it.
      source: the feed's source, for file names.
    """
    batch = ready.batch
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "feed": name,
        "host": host,
        "step": batch.step,
        "position": position,
        "global_batch_size": batch.global_batch_size,
        "wait_seconds": round(wait_seconds, 6),
        "transfer_seconds": round(ready.seconds, 6),
        **{key: round(value, 6) for key, value in batch.times.items()},
    }
    if batch.record_ids is not None:
        ids = batch.record_ids.tolist()
        line["record_ids"] = ids
        line["files"] = list(dict.fromkeys(path for path in (file_of(source, i) for i in ids) if path))
    if batch.entries:
        line["lanes"] = {lane: entry.get("records") for lane, entry in batch.entries.items() if isinstance(entry, dict)}
    if batch.bad:
        line["bad_records"] = [list(entry) for entry in batch.bad]
    _log.debug("%s", json.dumps(line))
