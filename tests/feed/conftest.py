"""What tests of threads check."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails if a thread of meshfeed that the test has started is still running at its end."""
    others = set(threading.enumerate())
    yield
    new = set(threading.enumerate()) - others
    assert not [thread for thread in new if thread.name.startswith("meshfeed") and thread.is_alive()]
