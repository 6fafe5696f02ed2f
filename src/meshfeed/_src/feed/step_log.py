"""The log of steps: a line of JSON for each delivered batch, if the logger ``meshfeed.steps`` is enabled for DEBUG."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping

from meshfeed._src.base.types import JsonValue
from meshfeed._src.feed.pipeline import Ready

STEP_LOG = logging.getLogger("meshfeed.steps")


def log_step(
    name: str, host: int, ready: Ready, position: int, wait_seconds: float, contents: Mapping[str, JsonValue]
) -> None:
    """Logs one line for a delivered batch: ids and files of this host's rows, and times in seconds.

    ``position`` is the number of records delivered before it; ``contents`` is the stream's description of the batch.
    """
    batch = ready.batch
    line: dict[str, JsonValue] = {
        "time": round(time.time(), 3),
        "feed": name,
        "host": host,
        "step": batch.step,
        "position": position,
        "global_batch_size": batch.global_batch_size,
        "wait_seconds": round(wait_seconds, 6),
        "transfer_seconds": round(ready.seconds, 6),
        **{key: round(value, 6) for key, value in batch.times.items()},
        **contents,
    }
    if batch.bad:
        line["bad_records"] = [list(entry) for entry in batch.bad]
    STEP_LOG.debug("%s", json.dumps(line))
