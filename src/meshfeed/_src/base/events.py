"""Figures as events of ``jax.monitoring``, which passes them to every registered listener.

An event is named ``/meshfeed/`` and a field of ``FeedStats``. Its value is the increment of that field since the previous
event, so the values add up to the field. Fields in seconds are recorded as durations, the others as scalars.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

_log = logging.getLogger("meshfeed.monitoring")
PREFIX = "/meshfeed/"


def record(feed: str, increments: Mapping[str, float]) -> None:
    """Records increments of a feed's figures; a listener's error is logged, not raised.

    Args:
      feed: name of the feed; listeners receive it as the keyword ``feed``.
      increments: field → increment.
    """
    from jax import monitoring  # not at the top: worker processes import this module, and do not import JAX

    try:
        for name, value in increments.items():
            if name.endswith("_seconds"):
                monitoring.record_event_duration_secs(PREFIX + name, value, feed=feed)
            else:
                monitoring.record_scalar(PREFIX + name, value, feed=feed)
    except Exception:
        _log.exception("%s: a listener of jax.monitoring failed; the remaining figures of this event are lost", feed)
