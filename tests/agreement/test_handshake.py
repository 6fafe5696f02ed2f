"""The handshake: what differs and where, hosts that fail or refuse a state, and rounds that leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts import CountingStore, Job

from meshfeed import AgreementError, PeerError, SkipBad, StalledError
from meshfeed._src.agreement import followers, handshake
from meshfeed._src.agreement.handshake import Handshake, agreed_settings, compare
from meshfeed._src.base import coordination, jax_internals, reduction, waits
from meshfeed._src.base.errors import Failure
from meshfeed._src.base.settings import BatchSchedule, FeedSettings
from meshfeed._src.streams.protocol import Cursor

SEED = {"seed": 0}
FEED = "meshfeed/feed/train"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(handshake, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(reduction, "_FIRST_NOTE_SECONDS", 0.0)
    return Job(CountingStore(), monkeypatch)


def make(hosts: int) -> list[Handshake]:
    return [Handshake("feed/train", range(hosts)) for _ in range(hosts)]


def settings_of(host: int, **settings: Any) -> dict[str, Any]:
    return {host: {"settings": settings, "refused": False}}


# ---------------------------------------------------------------------- what is compared


def test_equal_settings_differ_in_nothing() -> None:
    assert compare(settings_of(0, a=1, b=[1, 2]) | settings_of(1, b=[1, 2], a=1)) == {
        "failure": None,
        "differences": [],
    }


def test_differences_name_the_field_the_values_and_the_hosts() -> None:
    values = (
        settings_of(2, a=1, b={"y": 1, "x": 2}) | settings_of(0, a=2, b={"x": 2, "y": 1}) | settings_of(1, a=1, c="z")
    )
    assert compare(values)["differences"] == [
        "a (host 0: 2; hosts 1, 2: 1)",
        'b (hosts 0, 2: {"x": 2, "y": 1}; host 1: null)',
        'c (hosts 0, 2: null; host 1: "z")',
    ]


@pytest.mark.parametrize("length", [117, 118, 119, 500])
def test_long_values_are_cut(length: int) -> None:
    (text,) = compare(settings_of(0, a="x" * length) | settings_of(1, a=1))["differences"]
    shown = text.removeprefix("a (host 0: ").removesuffix("; host 1: 1)")
    assert len(shown) == min(length + 2, 120)
    assert shown.endswith('"' if length <= 118 else "...")


def test_long_values_are_shown_from_where_they_differ() -> None:
    stages = [[step, 24 * step, {"web": 1, "code": 2}] for step in range(20)]
    (text,) = compare(settings_of(0, a=[*stages, 1]) | settings_of(1, a=[*stages, 2]))["differences"]
    assert re.fullmatch(r"a \(host 0: \.\.\..{20,40}, 1\]; host 1: \.\.\..{20,40}, 2\]\)", text)


def test_a_failure_goes_before_differences_and_the_first_host_before_others() -> None:
    failures = [Failure("OSError", "no disk", host).to_json() for host in range(3)]
    values = settings_of(0, a=1) | {2: {"failure": failures[2]}, 1: {"failure": failures[1]}} | settings_of(3, a=2)
    assert compare(values) == {"failure": failures[1], "differences": []}


@hypothesis.given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=4), st.randoms()
)
def test_any_order_gives_the_same_differences(hosts: list[dict[str, int]], rng: random.Random) -> None:
    values = {host: {"settings": one, "refused": False} for host, one in enumerate(hosts)}
    order = list(values)
    rng.shuffle(order)
    outcome = compare({host: values[host] for host in order})
    assert outcome == compare(values)
    assert json.loads(json.dumps(outcome)) == outcome
    differ = {field for field in "abc" if len({one.get(field) for one in hosts}) > 1}
    assert {text[0] for text in outcome["differences"]} == differ


RAMP = [[0, 8], [4, 16]]


@pytest.mark.parametrize(("size", "compared"), [(8, 8), (BatchSchedule(RAMP), RAMP)])
def test_all_that_must_be_equal_is_compared(size: int | BatchSchedule, compared: object) -> None:
    settings = FeedSettings(
        global_batch_size=size, shuffle=True, end="pad", mask_key="mask", load="once", check_replicas=True
    )
    cursor = Cursor(None, 3, 24, num_skipped=2)  # type: ignore[arg-type]
    agreed = agreed_settings(settings, {"source": {"kind": "Memory", "records": 5}}, cursor, "P(data) over data=8")
    assert agreed == {
        "sharding": "P(data) over data=8",
        "source.kind": "Memory",
        "source.records": 5,
        "position": 24,
        "step": 3,
        "load": "once",
        "mask_key": "mask",
        "bad_records": None,
        "balance": None,
        "num_skipped": None,
        "check_replicas": True,
        "global_batch_size": compared,
    }
    skipping = dataclasses.replace(settings, bad_records=SkipBad(0.25), global_batch_size=None)
    agreed = agreed_settings(skipping, {}, cursor, "")
    assert (agreed["bad_records"], agreed["num_skipped"], agreed["global_batch_size"]) == (
        {"max_fraction": 0.25},
        2,
        None,
    )


# ---------------------------------------------------------------------- rounds


@pytest.mark.parametrize(
    ("participants", "host", "needed"), [((0, 1), 1, True), ((0,), 0, False), ((0, 2), 1, False), ((1,), 0, False)]
)
def test_a_handshake_takes_place_among_several_hosts_of_which_this_is_one(
    participants: tuple[int, ...], host: int, needed: bool, job: Job
) -> None:
    def run() -> None:
        one = Handshake("feed/train", participants)
        assert one.needed == needed
        if not needed:
            one.fail(OSError("no disk"), refused=True)
            one.withdraw()
            one.agree(SEED, 0.05)
            one.leave()
            assert one.in_force

    job.on(host, run)
    assert not job.store.calls


def test_a_new_handshake_is_not_in_force() -> None:
    one = Handshake("feed/train", (1, 0))
    assert (one.participants, one.round, one.in_force) == ((0, 1), 0, False)


def test_hosts_agree_once_in_each_generation_and_leave_few_keys(job: Job) -> None:
    hosts = make(3)

    def agree(host: int) -> None:
        hosts[host].agree(SEED, 30)

    assert job.run(range(3), agree) == [None] * 3
    assert job.store.keys == [f"{FEED}/settings/0/out"]
    assert all(one.in_force for one in hosts)
    assert [one.round for one in hosts] == [1] * 3
    requests = job.store.calls.total()
    assert job.run(range(3), agree) == [None] * 3
    assert job.store.calls.total() == requests
    job.store.set(f"{FEED}/1/0/out", "of a window")
    for host, one in enumerate(hosts):
        job.on(host, one.withdraw)
    assert not any(one.in_force for one in hosts)
    assert job.run(range(3), agree) == [None] * 3
    assert job.store.keys == [f"{FEED}/settings/1/out"], "the windows of the last generation and its round are gone"
    assert [one.round for one in hosts] == [2] * 3
    for host, one in enumerate(hosts):
        job.on(host, one.leave)
    assert job.store.keys == []


def test_a_healthy_round_takes_two_requests_of_a_host(job: Job) -> None:
    job.store.set(f"{FEED}/settings/0/out", '{"result": {"failure": null, "differences": []}}')
    job.store.calls.clear()
    job.on(1, make(2)[1].agree, SEED, 30)
    assert job.store.calls == {"set": 1, "get": 1}


def test_after_it_left_a_host_says_nothing(job: Job) -> None:
    one = make(2)[1]
    job.on(1, one.leave)
    assert job.store.keys == [f"{FEED}/left"]
    job.on(1, one.fail, OSError("no disk"))
    job.on(1, one.leave)
    assert job.store.keys == [f"{FEED}/left"]
    assert job.store._values[f"{FEED}/left"] == "1"


def test_hosts_that_differ_raise_the_same_and_meet_in_the_next_round(job: Job) -> None:
    hosts = make(2)
    fields = [f"field-{number}" for number in range(6)]
    for error in job.run(range(2), lambda host: hosts[host].agree(dict.fromkeys(fields, host), 30)):
        assert isinstance(error, AgreementError)
        assert str(error) == (
            "hosts differ in "
            + ", and in ".join(f"field-{number} (host 0: 0; host 1: 1)" for number in range(4))
            + ". Start all hosts with the same source, settings and state."
        )
    assert not any(one.in_force for one in hosts)
    assert [one.round for one in hosts] == [1, 1]
    assert job.run(range(2), lambda host: hosts[host].agree(SEED, 30)) == [None, None]
    assert job.store.keys == [f"{FEED}/settings/1/out"]


def disagreement(job: Job, settings: list[dict[str, object]]) -> str:
    hosts = make(2)
    (first, second) = job.run(range(2), lambda host: hosts[host].agree(settings[host], 30))
    assert isinstance(first, AgreementError)
    assert str(first) == str(second)
    return str(first)


def test_digests_are_named_only_if_nothing_that_can_be_read_differs(job: Job) -> None:
    digests = [{"source.source.content": text, "source.content": text, "source.all_records": text} for text in "ab"]
    each = ", and in ".join(f'{name} (host 0: "a"; host 1: "b")' for name in digests[0])
    assert disagreement(job, digests) == (
        f"hosts differ in {each}. A content is a digest of records: the files differ, or the functions that read them. "
        "A function that draws random numbers must take them from its parameter rng. Every host needs the "
        "whole data, and reads only its own rows of it. Start all hosts with the same source, settings and state."
    )


def test_the_number_of_records_is_named_without_their_digests(job: Job) -> None:
    settings = [
        {"source.records": n, "source.content": str(n), "source.all_records": str(n), "seed": n} for n in (7, 8)
    ]
    assert disagreement(job, settings) == (
        "hosts differ in source.records (host 0: 7; host 1: 8), and in seed (host 0: 7; host 1: 8). Every host needs "
        "the whole data, and reads only its own rows of it. Start all hosts with the same source, settings and state."
    )


@pytest.mark.parametrize("here", [0, 1])
def test_hosts_that_do_not_come_are_named(here: int, job: Job) -> None:
    job.store.set(f"{FEED}/settings/0/in/{1 - here}", '{"settings": {"seed": 0}, "refused": false}')
    if here == 1:
        job.store.set(f"{FEED}/settings/0/late", "[[2, 3], 2]")
    one = make(4)[here]
    with pytest.raises(StalledError) as caught:
        job.on(here, one.agree, SEED, 0.05)
    assert caught.value.hosts == (2, 3)
    assert str(caught.value) == (
        "agreeing on the settings of train: "
        f"hosts 2, 3 did not arrive within {caught.value.waited_seconds:.0f} s (this is host {here} of 4). Check the "
        "log of that host: it has stopped, is still starting, or runs different code (without name=, feeds over the "
        "same hosts are matched by their order of creation; of several feeds, call start() of each first, or request their "
        "first batches in the same order on all hosts)."
    )
    assert (one.round, one.in_force) == (1, False)
    late = make(4)[2]
    if here == 0:
        with pytest.raises(StalledError):
            job.on(2, late.agree, SEED, 30)
        assert late.round == 1, "hosts can meet in the next round"


def test_a_reducer_interrupted_after_it_gave_up_raises_that(job: Job) -> None:
    job.store.set(f"{FEED}/settings/0/out", json.dumps({"stalled": [[[1], 1], 3.0, "", ""]}))
    with pytest.raises(StalledError, match="host 1 did not arrive within 3 s"):
        job.on(0, make(2)[0].agree, SEED, 30)


@pytest.mark.parametrize("here", [0, 1])
def test_an_interrupted_agreement_can_be_made_again(here: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(2)[here]
    real = job.store.get if here else job.store.directory

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(job.store, "get" if here else "directory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.on(here, one.agree, SEED, 30)
    assert (one.round, one.in_force) == (1, False), "the round is this generation's"
    monkeypatch.setattr(job.store, "get" if here else "directory", real)
    other = make(2)[1 - here]
    assert job.run(range(2), lambda host: (one if host == here else other).agree(SEED, 30)) == [None, None]


# ---------------------------------------------------------------------- hosts that fail or refuse


@pytest.mark.parametrize("bad", [0, 1])
def test_a_host_that_failed_is_named_on_the_others_after_the_grace_period(bad: int, job: Job) -> None:
    hosts = make(3)
    job.on(bad, hosts[bad].fail, OSError("no disk"))
    assert hosts[bad].round == 1
    start = time.monotonic()
    for error in job.run({0, 1, 2} - {bad}, lambda host: hosts[host].agree(SEED, 30)):
        assert isinstance(error, PeerError)
        assert (error.host, error.peer_message) == (bad, "OSError: no disk")
        assert str(error) == f"host {bad} failed before its first batch: OSError: no disk. See the log of host {bad}."
    assert 0.3 < time.monotonic() - start < 10
    assert [one.round for one in hosts] == [1] * 3
    assert job.run(range(3), lambda host: hosts[host].agree(SEED, 30)) == [None] * 3, "the next round is joint"


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_left_before_a_round_is_named_in_it(gone: int, job: Job) -> None:
    hosts = make(2)
    assert job.run(range(2), lambda host: hosts[host].agree(SEED, 30)) == [None, None]
    for one in hosts:
        one.withdraw()
    job.on(gone, hosts[gone].leave, "closed its feed at step 3 after ValueError: the loss is nan")
    with pytest.raises(PeerError) as caught:
        job.on(1 - gone, hosts[1 - gone].agree, SEED, 30)
    assert caught.value.peer_message == "closed its feed at step 3 after ValueError: the loss is nan"
    assert str(caught.value) == f"host {gone} {caught.value.peer_message}. See the log of host {gone}."
    job.on(1 - gone, hosts[1 - gone].leave, "closed its feed at step 3")
    assert not job.store.keys


@pytest.mark.parametrize(("bad", "refused"), [(0, False), (0, True), (1, False), (1, True)])
def test_followers_are_told_by_a_reducer_that_cannot_take_part(
    bad: int, refused: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others than the reducer leave that to it, and a host that refused a state may still take part."""
    monkeypatch.setattr(coordination, "process_count", lambda: 3)
    one = make(2)[bad]
    job.on(bad, lambda: one.fail(OSError("no disk"), refused=refused))
    told = [key for key in job.store.keys if key.startswith("meshfeed/follow/")]
    assert bool(told) == (bad == 0 and not refused)


def test_a_failure_for_followers_replaces_those_of_generations_long_before() -> None:
    store = CountingStore()
    for generation in range(1, 23):
        store.set(followers.follow_key("feed/train", generation), "{}")
    followers.announce_failure(store, "feed/train", 18, OSError("no disk"))
    gone = {followers.follow_key("feed/train", number) for number in range(1, 23)} - set(store.keys)
    assert gone == {followers.follow_key("feed/train", number) for number in (1, 2)}
    assert "no disk" in (store.try_get(followers.follow_key("feed/train", 18)) or "")


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("how", ["failed", "closed", "closed in force"])
def test_a_host_that_is_gone_is_named_in_later_rounds_too(
    gone: int, how: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may begin and abandon generations before they wait: ``start``, then ``set_state``."""
    monkeypatch.setattr(handshake, "ASIDE_SECONDS", 0.2)
    hosts = make(3)
    if how == "closed in force":
        assert job.run(range(3), lambda host: hosts[host].agree(SEED, 30)) == [None] * 3
    if how == "failed":
        job.on(gone, lambda: hosts[gone].fail(OSError("no disk"), for_good=True))
        job.on(gone, hosts[gone].leave)
        words = "failed before its first batch: OSError: no disk"
    else:
        words = "closed its feed at step 0"
        job.on(gone, hosts[gone].leave, words)
    others = [host for host in range(3) if host != gone]
    for host in others:
        hosts[host].withdraw()
        for _ in range(2):
            job.on(host, hosts[host].begin)
            job.on(host, hosts[host].abandon, None)
    for error in job.run(others, lambda host: hosts[host].agree(SEED, 30)):
        assert isinstance(error, PeerError), error
        assert str(error) == f"host {gone} {words}. See the log of host {gone}."
        assert error.host == gone
    for host in others:
        job.on(host, hosts[host].leave, "closed its feed at step 0")
    assert not job.store.keys


def test_an_abandoned_round_names_the_host_and_its_keys_go_with_the_next(job: Job) -> None:
    hosts = make(2)
    hosts[1].begin()
    job.on(1, hosts[1].abandon, "reset its feed at step 0")
    (error,) = job.run([0], lambda host: hosts[host].agree(SEED, 30))
    assert isinstance(error, PeerError)
    assert error.peer_message == "reset its feed at step 0"
    job.store.set(f"{FEED}/1/0/in/1", "a notice in the windows of the abandoned generation")
    hosts[1].begin()
    job.on(1, hosts[1].abandon, None)  # and the other one before it published anything
    hosts[0].begin()
    hosts[0].abandon(None)
    assert job.run(range(2), lambda host: hosts[host].agree(SEED, 30)) == [None, None]
    assert job.store.keys == [f"{FEED}/settings/2/out"]
    assert [one.round for one in hosts] == [3, 3]


@pytest.mark.parametrize("host", [0, 1])
def test_only_the_reducer_knows_that_there_is_no_result(host: int, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(2)[host]
    calls: list[bool] = []

    def check() -> None:
        calls.append(one.others_may_have_agreed)
        raise ValueError("closed")

    with pytest.raises(ValueError, match="closed"):
        job.on(host, one.agree, SEED, 30, check)
    assert calls == [host == 1]
    assert (one.round, one.in_force) == (1, False)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_leaves_after_it_refused_a_state_is_named_with_that(gone: int, job: Job) -> None:
    hosts = make(2)
    job.on(gone, lambda: hosts[gone].fail(ValueError("another seed"), refused=True))
    job.on(gone, hosts[gone].leave, "closed its feed at step 0")
    with pytest.raises(PeerError) as caught:
        job.on(1 - gone, hosts[1 - gone].agree, SEED, 30)
    assert caught.value.peer_message == "ValueError: another seed"


def test_a_host_that_leaves_after_its_round_says_nothing_there(job: Job) -> None:
    hosts = make(2)
    assert job.run(range(2), lambda host: hosts[host].agree(SEED, 30)) == [None, None]
    job.on(1, hosts[1].leave, "closed its feed at step 9")
    assert job.store.keys == [f"{FEED}/gone/1", f"{FEED}/left", f"{FEED}/settings/0/out"]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_host_that_refused_a_state_and_then_comes_is_waited_for(
    bad: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_GRACE_SECONDS", 10)  # the machine may be loaded
    hosts = make(2)
    job.on(bad, lambda: hosts[bad].fail(ValueError("another seed"), refused=True))
    assert hosts[bad].round == 0

    def agree(host: int) -> None:
        if host == bad:
            time.sleep(0.1)
            hosts[host].withdraw()
        hosts[host].agree(SEED, 30)

    assert job.run(range(2), agree) == [None, None]
    assert [one.round for one in hosts] == [1, 1]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_host_that_was_given_up_joins_the_next_round(bad: int, job: Job) -> None:
    hosts = make(2)
    job.on(bad, lambda: hosts[bad].fail(ValueError("another seed"), refused=True))
    (error,) = job.run([1 - bad], lambda host: hosts[host].agree(SEED, 30))
    assert isinstance(error, PeerError)
    assert error.peer_message == "ValueError: another seed"
    assert job.run(range(2), lambda host: hosts[host].agree(SEED, 30)) == [None, None]
    assert [one.round for one in hosts] == [2, 2]


def test_if_all_refuse_the_same_state_none_has_failed(job: Job) -> None:
    hosts = make(2)
    for host, one in enumerate(hosts):
        job.on(host, lambda one=one: one.fail(ValueError("another seed"), refused=True))

    def agree(host: int) -> None:
        time.sleep(0.5 * host)  # longer than the grace period
        hosts[host].agree(SEED, 30)

    assert job.run(range(2), agree) == [None, None]


@pytest.mark.parametrize("slow", [0, 1])
def test_hosts_that_all_refuse_a_state_and_then_take_another_wait_for_each_other(slow: int, job: Job) -> None:
    hosts = make(2)
    for host, one in enumerate(hosts):
        job.on(host, lambda one=one: one.fail(ValueError("another seed"), refused=True))

    def take_another(host: int) -> None:
        if host == slow:
            time.sleep(1.0)  # to open its data at the other state, longer than the grace period
        hosts[host].withdraw()
        hosts[host].agree(SEED, 30)

    assert job.run(range(2), take_another) == [None, None]


def test_a_failure_is_reported_at_the_deadline_even_if_no_host_is_ready(job: Job) -> None:
    hosts = make(2)
    job.on(1, hosts[1].fail, OSError("no disk"))
    job.on(0, lambda: hosts[0].fail(ValueError("another seed"), refused=True))
    (error,) = job.run([0], lambda host: hosts[host].agree(SEED, 0.05))
    assert isinstance(error, PeerError)
    assert error.host == 1


def test_a_feed_of_the_job_before_says_nothing_in_the_next_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an in-process resize, feeds have the same names and numbers again, and the old one may be dropped only then."""
    client = object()
    monkeypatch.setattr(jax_internals, "coordination_client", lambda: client)
    old = make(2)
    assert job.run(range(2), lambda host: old[host].agree(SEED, 30)) == [None, None]
    old[1].withdraw()
    old[1].begin()
    job.store.delete(FEED)
    client = object()
    new = make(2)

    def agree(host: int) -> None:
        if host == 1:
            time.sleep(0.2)  # the value of host 0 is in the round
            assert not old[1].others_may_have_agreed
            for one in old:
                one.fail(OSError("no disk"), for_good=True)
                one.leave("dropped its feed at step 3")
        new[host].agree(SEED, 5)

    assert job.run(range(2), agree) == [None, None]
    assert job.store.keys == [f"{FEED}/settings/0/out"]


def test_a_round_in_which_a_host_fails_leaves_what_hosts_still_read(job: Job) -> None:
    hosts = make(3)
    assert job.run(range(3), lambda host: hosts[host].agree(SEED, 30)) == [None] * 3
    job.store.set(f"{FEED}/1/0/out", "of a window which hosts 1 and 2 have not seen yet")
    job.on(1, lambda: hosts[1].fail(ValueError("another seed"), refused=True))
    hosts[0].withdraw()
    (error,) = job.run([0], lambda host: hosts[host].agree(SEED, 30))
    assert isinstance(error, PeerError)
    assert f"{FEED}/1/0/out" in job.store.keys
    for host in (1, 2):
        job.on(host, hosts[host].withdraw)
        hosts[host].begin()
        hosts[host].abandon(None)
    assert job.run(range(3), lambda host: hosts[host].agree(SEED, 30)) == [None] * 3
    assert job.store.keys == [f"{FEED}/settings/2/out"]


def test_a_withdrawn_failure_is_gone(job: Job) -> None:
    one = make(2)[1]
    job.on(1, lambda: one.fail(ValueError("another seed"), refused=True))
    assert job.store.keys == [f"{FEED}/settings/0/in/1"]
    job.on(1, one.withdraw)
    assert job.store.keys == []
    calls = job.store.calls.total()
    job.on(1, one.withdraw)
    assert job.store.calls.total() == calls


def test_a_failure_that_cannot_be_published_masks_nothing(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.store.set = None
    one = make(2)[1]
    job.on(1, one.fail, OSError("no disk"))
    assert one.round == 1
    assert "cannot report this host's failure to the other hosts" in caplog.text


def test_no_store_is_an_error_of_agree_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "process_index", lambda: 1)
    monkeypatch.setattr(coordination, "key_value_store", lambda: None)
    one = make(2)[1]
    one.fail(OSError("no disk"))
    one.leave()
    with pytest.raises(Exception, match=r"jax\.distributed"):
        one.agree(SEED, 1)


def test_the_grace_period_of_the_reducer_begins_with_its_failure_and_ends_if_it_recovers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(2)[1]
    failed = json.dumps({"failure": Failure("OSError", "no disk", 0).to_json()})
    tick = one._give_up_reducer(one._reduction(job.store))

    def give_up(now: float) -> None:
        monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
        tick(now)

    give_up(0.0)
    job.store.set(f"{FEED}/settings/0/in/0", failed)
    give_up(10.0)
    give_up(10.25)
    job.store.delete(f"{FEED}/settings/0/in/0")
    give_up(10.3)
    job.store.set(f"{FEED}/settings/0/in/0", failed)
    give_up(10.35)
    give_up(10.6)
    with pytest.raises(handshake._GivenUp) as caught:
        give_up(10.7)
    assert caught.value.outcome == {"failure": json.loads(failed)["failure"], "differences": []}


@pytest.mark.parametrize("aside", [0, 1])
def test_a_host_that_has_left_for_another_sharding_is_named(
    aside: int, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "ASIDE_SECONDS", 0.1)
    feeds = make(3)
    assert job.run(range(3), lambda host: feeds[host].agree(SEED, timeout_seconds=20)) == [None] * 3
    job.on(aside, feeds[aside].step_aside, "called reshard after step 2")
    others = [host for host in range(3) if host != aside]
    for host in others:
        feeds[host].withdraw()
    found = job.run(others, lambda host: feeds[host].agree(SEED, timeout_seconds=20))
    for error in found:
        assert isinstance(error, PeerError), error
        assert error.host == aside
        assert "called reshard after step 2" in str(error)
