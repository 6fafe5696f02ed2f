"""Errors as JSON: what another host learns of an exception, and exceptions made again."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

import meshfeed
from meshfeed._src.base.errors import LEFT, Failure


def sent(failure: Failure) -> Failure:
    return Failure.from_json(json.loads(json.dumps(failure.to_json())))


@hypothesis.given(st.text(), st.text(), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))
def test_json_keeps_every_field(kind: str, message: str, host: int | None, step: int | None) -> None:
    failure = Failure(kind, message, host, step, {"setting": "seed", "types": [1]} if step else {})
    assert sent(failure) == failure


def test_json_is_small() -> None:
    assert Failure("OSError", "no disk").to_json() == {"kind": "OSError", "message": "no disk"}
    assert Failure("OSError", "no disk", 0, 0).to_json() == {
        "kind": "OSError",
        "message": "no disk",
        "host": 0,
        "step": 0,
    }


def test_an_exception_is_its_kind_message_and_notes() -> None:
    error = OSError("no disk")
    failure = Failure.of(error, 3)
    assert (failure.kind, failure.message, failure.host) == ("OSError", "no disk", 3)
    assert str(failure) == "OSError: no disk"
    error.add_note("rack 4")
    error.add_note("shelf 2")
    assert str(Failure.of(error)) == "OSError: no disk (rack 4; shelf 2)"
    assert Failure.of(error).host is None
    assert len(Failure.of(ValueError("x" * 5000)).message) == 2000
    assert str(Failure.of(KeyboardInterrupt())) == "KeyboardInterrupt"


def test_a_leave_notice_reads_as_a_sentence_about_the_host() -> None:
    notice = Failure.left("closed its feed at step 5", 2)
    assert (notice.kind, notice.host, str(notice)) == (LEFT, 2, "closed its feed at step 5")
    assert len(Failure.left("x" * 5000, 2).message) == 2000


class Own(Exception):
    pass


class OwnValue(ValueError):
    pass


class TwoArguments(RuntimeError):
    def __new__(cls, one: Any, two: Any) -> TwoArguments:
        return super().__new__(cls, one, two)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("wrong"), ValueError, "wrong"),
        (FileNotFoundError(2, "No such file", "a.npy"), FileNotFoundError, "[Errno 2] No such file: 'a.npy'"),
        (KeyError("x"), KeyError, "'x'"),
        (meshfeed.SettingsError("seed is wrong", setting="seed"), meshfeed.SettingsError, "seed is wrong"),
        (meshfeed.PeerError("gone", host=3, peer_message="x"), meshfeed.PeerError, "gone"),
        (Own("theirs"), meshfeed.MeshfeedError, "Own: theirs"),
        (OwnValue("theirs"), ValueError, "OwnValue: theirs"),
        (ValueError(object), ValueError, "<class 'object'>"),  # the argument is no JSON
        (RuntimeError(), RuntimeError, "RuntimeError()"),
        (Exception("plain"), meshfeed.MeshfeedError, "Exception: plain"),
    ],
)
def test_exceptions_are_made_again(error: Exception, kind: type[Exception], text: str) -> None:
    error.add_note("a note")
    again = sent(Failure.exact(error)).exception()
    assert (type(again), str(again)) == (kind, text)
    assert again.__notes__ == ["a note"]
    own = {key: value for key, value in vars(error).items() if key != "__notes__"}
    if kind is type(error):
        assert {key: value for key, value in vars(again).items() if key != "__notes__"} == own


def test_arguments_and_attributes_come_back() -> None:
    again = sent(Failure.exact(meshfeed.StateMismatchError("seed", 1, 2, "Use seed=1."))).exception()
    assert isinstance(again, meshfeed.StateMismatchError)
    assert (again.field, again.saved, again.current, again.remedy) == ("seed", 1, 2, "Use seed=1.")
    plain = sent(Failure.exact(ValueError("wrong", 3))).exception()
    assert plain.args == ("wrong", 3)


def test_a_type_that_takes_other_arguments_becomes_its_base() -> None:
    TwoArguments.__module__ = "meshfeed.testing"
    failure = Failure.exact(TwoArguments("a", "b"))
    assert type(failure.exception()) is RuntimeError
    assert str(failure.exception()) == "TwoArguments: ('a', 'b')"


@pytest.mark.parametrize("kind", ["SourceError", "AgreementError"])
def test_a_failure_of_all_hosts_needs_no_details(kind: str) -> None:
    error = Failure(kind, "the sources differ").exception()
    assert type(error) is getattr(meshfeed, kind)
    assert str(error) == "the sources differ"


def test_an_unknown_kind_is_named() -> None:
    error = Failure("Oddity", "what is this").exception()
    assert type(error) is meshfeed.MeshfeedError
    assert str(error) == "Oddity: what is this"


def test_a_tuple_stays_one() -> None:
    error = meshfeed.StalledError("late", hosts=(1, 2), waited_seconds=3.0)
    rebuilt: Any = sent(Failure.exact(error)).exception()
    assert (type(rebuilt), rebuilt.hosts, rebuilt.waited_seconds) == (meshfeed.StalledError, (1, 2), 3.0)
