"""The ledger of bad records: bounded, exact in number, and joined over hosts; states of version 1 are read."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import old_states
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.state import state as ledger
from meshfeed._src.state.state import Ledgers


class HalfBad(meshfeed.sources.Memory):
    """Every record with an odd id is bad."""

    def read_batch(self, record_ids: Any, columns: Any = None) -> Any:
        for record_id in np.asarray(record_ids).tolist():
            if record_id % 2:
                raise ValueError(f"record {record_id} is cut short " + "x" * 150)
        return super().read_batch(record_ids, columns=columns)


def make_feed(num_records: int = 400, max_fraction: float = 0.6) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    source = HalfBad({"x": np.arange(num_records, dtype=np.int32)})
    return meshfeed.MultiHostDataLoadIterator(
        source, mesh, global_batch_size=40, num_epochs=None, prefetch=0, bad_records=meshfeed.SkipBad(max_fraction)
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_LISTED", 50)
    monkeypatch.setattr(ledger, "MAX_REASONS", 30)


@pytest.mark.usefixtures("small")
def test_a_state_lists_so_many_bad_records_and_counts_the_others() -> None:
    with make_feed() as feed:
        for _ in range(2):
            next(feed)
        before = feed.get_state()
        assert "num_unlisted" not in before
        assert before["meshfeed"] == 1, "an older meshfeed can read it"
        for _ in range(18):
            next(feed)
        state = feed.get_state()
    listed = state["skipped"]["0"]
    assert [entry[0] for entry in listed] == list(range(1, 100, 2))
    assert [bool(reason) for _, _, reason, _ in listed] == [True] * 30 + [False] * 20
    assert [entry[3] for entry in listed] == [step for step in (0, 1, 2) for _ in range(20)][:50]
    assert (state["num_skipped"], state["num_unlisted"]) == (400, {"0": 350})
    assert state["meshfeed"] == 2


def test_a_state_stays_below_a_megabyte() -> None:
    ledgers = Ledgers()
    for step in range(1_000):
        ledgers = ledgers.after([(10**15 + step, 10**6, "ValueError: " + "x" * 190)] * 100, step)
    fields = ledgers.state_fields()
    assert len(json.dumps(fields)) < 1_000_000
    assert len(fields["skipped"]["0"]) + fields["num_unlisted"]["0"] == 100_000


@pytest.mark.usefixtures("small")
def test_the_count_continues_from_a_state_whose_ledger_is_full() -> None:
    with make_feed() as feed:
        for _ in range(4):
            next(feed)
        state = json.loads(json.dumps(feed.get_state()))
        for _ in range(2):
            next(feed)
        later = feed.get_state()
    with make_feed() as feed:
        feed.set_state(state)
        assert feed.get_state() == state
        for _ in range(2):
            next(feed)
        assert feed.get_state() == later
    assert later["num_skipped"] == 120
    with make_feed(max_fraction=0.4) as feed:
        feed.set_state(state)
        with pytest.raises(meshfeed.SourceError, match=r"100 of the 200 records up to step 4 are bad"):
            next(feed)


@pytest.mark.usefixtures("small")
def test_states_of_hosts_that_saw_more_or_less_of_a_ledger_are_joined() -> None:
    with make_feed() as feed:
        for _ in range(4):
            next(feed)
        state = feed.get_state()
    other = json.loads(json.dumps(state))  # of another host: host 0's ledger as it was at the last restore
    other["skipped"] = {"0": state["skipped"]["0"][:45], "1": [[7, 0, "bad", 1]]}
    del other["num_unlisted"]
    other["meshfeed"] = 1
    merged = meshfeed.merge_states([other, state])
    assert merged["skipped"] == {"0": state["skipped"]["0"], "1": [[7, 0, "bad", 1]]}
    assert merged["num_unlisted"] == {"0": 30}
    assert meshfeed.merge_states([state, other]) == merged


@pytest.mark.parametrize("count", [-1, 1.5, "3", None, True])
def test_a_count_changed_by_hand_is_refused(count: Any) -> None:
    with make_feed() as feed:
        state = feed.get_state()
        with pytest.raises(meshfeed.StateMismatchError) as info:
            feed.set_state({**state, "num_unlisted": {"0": count}})
        assert info.value.field == "num_unlisted.0"


def test_a_state_of_version_1_is_continued() -> None:
    path = pathlib.Path(__file__).parent.parent / "data" / "lane_state_version_1.json"
    state = json.loads(path.read_text())
    with old_states.make_feed() as feed:
        batches = [np.asarray(batch["x"]).tolist() for batch in feed]
        last = feed.get_state()
    with old_states.make_feed() as feed:
        feed.set_state(state)
        assert (feed.step, feed.position) == (2, 8)
        assert [np.asarray(batch["x"]).tolist() for batch in feed] == batches[old_states.STEPS_BEFORE :]
        state = feed.get_state()
    for field in ("meshfeed", "position", "skipped", "num_skipped"):
        assert state[field] == last[field]
