"""Figures as events of ``jax.monitoring``, which passes them to every listener that the program has registered.

An event has the name of a field of ``FeedStats`` below ``/meshfeed/``, and its value is the increment since the previous
event: a listener that adds up the values of a name has that field. Fields in seconds are durations, the others scalars.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

_log = logging.getLogger("meshfeed.monitoring")
PREFIX = "/meshfeed/"


def record(feed: str, increments: Mapping[str, float]) -> None:
    """Records increments of a feed's figures; an error of a listener is logged and does not reach the caller.

    Args:
      feed: name of the feed; listeners receive it as the keyword ``feed``.
      increments: field → increment.
    """
    from jax import monitoring  # worker processes import this module, and do without JAX

    try:
        for name, value in increments.items():
            if name.endswith("_seconds"):
                monitoring.record_event_duration_secs(PREFIX + name, value, feed=feed)
            else:
                monitoring.record_scalar(PREFIX + name, value, feed=feed)
    except Exception:
        _log.exception("%s: a listener of jax.monitoring failed; the other figures of this moment are lost", feed)
