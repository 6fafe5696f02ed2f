"""The key-value store: what is asked of JAX's client, counters of uses, and hosts in messages."""

from __future__ import annotations

import threading
import time

from meshfeed._src.base import coordination


def test_a_coordinator_that_is_gone_holds_nobody_up() -> None:
    gone = threading.Event()
    start = time.monotonic()
    coordination.call_briefly(lambda: gone.wait(60) and None, name="test", at_exit=False)
    assert time.monotonic() - start < 30
    gone.set()
