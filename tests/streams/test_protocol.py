"""What the kinds of stream share: the comparison of a saved fingerprint with the feed's."""

from __future__ import annotations

from typing import Any

import pytest

from meshfeed import StateMismatchError
from meshfeed._src.state.state import FeedState
from meshfeed._src.streams.protocol import check_fingerprint


def state_with(**fingerprint: Any) -> FeedState:
    return FeedState("random_access", 0, [], fingerprint)


def test_the_saved_mixture_is_returned_and_not_compared() -> None:
    state = state_with(seed=1, mixture={"stages": [1]})
    assert check_fingerprint(state, {"seed": 1, "mixture": {"stages": [2]}}, []) == {"stages": [1]}
    assert state.fingerprint == {"seed": 1, "mixture": {"stages": [1]}}
    assert check_fingerprint(state_with(seed=1), {"seed": 1, "mixture": {"stages": [2]}}, []) is None
    with pytest.raises(StateMismatchError, match=r"in 'mixture': saved {'stages': \[1\]}, current None"):
        check_fingerprint(state, {"seed": 1}, [])


def test_missing_files_are_named_if_the_source_lists_its_files() -> None:
    class Source:
        def file_names(self) -> list[str]:
            return ["a-00000-of-00003", "a-00002-of-00003"]

    state, current = state_with(source={"files": {"count": 3}}), {"source": {"files": {"count": 2}}}
    with pytest.raises(StateMismatchError) as raised:
        check_fingerprint(state, current, Source())
    assert raised.value.field == "source.files.count"
    assert "Missing: a-00001-of-00003. " in raised.value.remedy
    with pytest.raises(StateMismatchError) as raised:
        check_fingerprint(state, current, [])
    assert "Missing" not in raised.value.remedy
