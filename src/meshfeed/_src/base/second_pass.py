"""Warns about loops over an exhausted feed, which yield nothing because ``iter(feed)`` does not reset it."""

from __future__ import annotations

import logging

_log = logging.getLogger("meshfeed.feed")


class SecondPass:
    """Warns once, at the first ``iter(feed)`` after the end.

    Args:
      name: name of the feed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def begins(self) -> None:
        """Records that ``iter(feed)`` was called on an exhausted feed."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: iterating again after the end of the stream gives no batches, because iter(feed) does not reset "
                "the feed. For several epochs pass num_epochs=; to start from the first batch call reset().",
                self._name,
            )
