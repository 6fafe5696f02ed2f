"""Which keys of a feed's generations the reducer keeps for hosts that follow late."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import CountingStore

from meshfeed._src.agreement import followers
from meshfeed._src.agreement.followers import Follower, Summary, announce_failure, follow_key
from meshfeed._src.agreement.messages import Announcement, Stop, aside_key
from meshfeed._src.base.errors import Failure, PeerError, StalledError


@pytest.mark.parametrize("last", ["announces", "fails"])
def test_a_generation_without_an_announcement_leaves_no_key_of_those_before(last: str) -> None:
    store = CountingStore()
    for generation in (0, 1, 2, 18):
        Summary(store, "feed/x", generation).add(Announcement(0, 8, None))
    assert store.keys == [follow_key("feed/x", 18)]
    store.set("meshfeed/follow/feed/x-on-all-0/3", "another scope")
    Summary(store, "feed/x", 20)  # left before its first announcement
    if last == "announces":
        Summary(store, "feed/x", 34).add(Announcement(0, 8, None))
        Summary(store, "feed/x", 35).add(Announcement(0, 8, None))
    else:
        announce_failure(store, "feed/x", 35, PermissionError("not allowed"))
    kept = (34, 35) if last == "announces" else (35,)
    assert store.keys == ["meshfeed/follow/feed/x-on-all-0/3", *(follow_key("feed/x", one) for one in kept)]


def follower(store: CountingStore, generation: int, timeout_seconds: float = 60) -> Follower:
    return Follower(
        store,
        scope="feed/x",
        generation=generation,
        participants=(3, 5),
        num_followers=1,
        first_step=0,
        timeout_seconds=timeout_seconds,
    )


def test_a_follower_may_be_fifteen_generations_behind() -> None:
    store = CountingStore()
    for generation in range(16):
        Summary(store, "feed/x", generation).add(Announcement(0, 8, Stop(0, ())))
    stop = follower(store, 0).wait_for(0)
    assert stop is not None
    assert stop.step == 0


def test_a_follower_that_is_further_behind_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "ASIDE_SECONDS", 0.1)
    store = CountingStore()
    for generation in range(17):
        Summary(store, "feed/x", generation).add(Announcement(0, 8, Stop(0, ())))
    message = r"step 0: host 3 has left this stream and begun 16 others since.* same calls on all hosts"
    with pytest.raises(StalledError, match=message) as caught:
        follower(store, 0).wait_for(0)
    assert caught.value.hosts == (3,)
    assert caught.value.waited_seconds < 30


def test_a_follower_is_told_that_a_host_has_left_for_another_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "ASIDE_SECONDS", 0.1)
    store = CountingStore()
    store.set("meshfeed/other/aside", json.dumps(Failure.left("another feed", 5).to_json()))
    notice = Failure.left("called reshard after step 2", 5)
    store.set(aside_key("meshfeed/feed/x/0"), json.dumps(notice.to_json()))
    with pytest.raises(PeerError, match=r"host 5.*called reshard after step 2"):
        follower(store, 0).wait_for(0)


def test_a_follower_that_only_reads_ahead_waits_until_it_was_asked_for_as_long() -> None:
    one = follower(CountingStore(), 0, timeout_seconds=0.2)
    one.asked_at = math.inf
    threading.Timer(0.6, lambda: setattr(one, "asked_at", time.monotonic())).start()
    begun = time.monotonic()
    with pytest.raises(StalledError, match="has announced no further step"):
        one.wait_for(0)
    assert time.monotonic() - begun > 0.75
