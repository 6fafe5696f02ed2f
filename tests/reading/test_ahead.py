"""Fetching files before they are read."""

from __future__ import annotations

from typing import Any

import pytest

from meshfeed._src.reading.ahead import FetchAhead


def test_close_while_a_fetch_starts_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    class File:
        cache, num_bytes, ahead_bytes, plan_bytes = None, 1, 10, 10

        def follow(self, next_use: Any) -> None:
            pass

        def unfollow(self, next_use: Any) -> None:
            pass

        def is_here(self) -> bool:
            ahead.close()  # as the reader's thread may do at this moment
            return False

    ahead = FetchAhead(iter([[File()]]))
    ahead.reached(0)
    assert ahead._thread.join(60.0)
    assert not caplog.messages
