"""A warning for loops over a feed that has ended, which give nothing because ``iter(feed)`` does not reset it."""

from __future__ import annotations

import logging

_log = logging.getLogger("meshfeed.feed")


class SecondPass:
    """Warns at the first ``iter(feed)`` after the end, and never again.

    Args:
      name: of the feed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def begins(self) -> None:
        """``iter(feed)`` was called, and the feed has ended."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: iterating again after the end of the stream gives no batches, because iter(feed) does not reset "
                "the feed. For several epochs pass num_epochs=; to start from the first batch call reset().",
                self._name,
            )
