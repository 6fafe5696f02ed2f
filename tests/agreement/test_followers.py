"""Which keys of a feed's generations the reducer keeps for hosts that follow late."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import CountingStore

from meshfeed._src.agreement.followers import Summary, announce_failure, follow_key
from meshfeed._src.agreement.messages import Announcement


@pytest.mark.parametrize("last", ["announces", "fails"])
def test_a_generation_without_an_announcement_leaves_no_key_of_those_before(last: str) -> None:
    store = CountingStore()
    for generation in (0, 1, 2, 12):
        Summary(store, "feed/x", generation).add(Announcement(0, 8, None))
    assert store.keys == [follow_key("feed/x", 12)]
    store.set("meshfeed/follow/feed/x-on-all-0/3", "another scope")
    Summary(store, "feed/x", 13)  # left before its first announcement
    if last == "announces":
        Summary(store, "feed/x", 14).add(Announcement(0, 8, None))
        Summary(store, "feed/x", 15).add(Announcement(0, 8, None))
    else:
        announce_failure(store, "feed/x", 15, PermissionError("not allowed"))
    kept = (14, 15) if last == "announces" else (15,)
    assert store.keys == ["meshfeed/follow/feed/x-on-all-0/3", *(follow_key("feed/x", one) for one in kept)]
