"""The contents of window reports: what hosts compare, and what those without data learn from the others."""

from __future__ import annotations

import collections
import json
import logging
import random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from meshfeed import SkipBad, SourceError
from meshfeed._src.agreement.messages import WindowReport
from meshfeed._src.agreement.window_report import WindowReports
from meshfeed._src.base.errors import Failure
from meshfeed._src.base.exact_json import tree_to_json
from meshfeed._src.streams.protocol import EMPTY_BATCHES, EMPTY_STREAM, HostBatch


def make(**settings: Any) -> WindowReports:
    defaults: dict[str, Any] = {
        "first_step": 0,
        "bad_records": None,
        "blocks_of": None,
        "num_rows": lambda size: size // 2,
    }
    return WindowReports(**{**defaults, **settings})


def batch(step: int, rows: int = 4, **fields: Any) -> HostBatch:
    tree = {"x": np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)}
    return HostBatch(step, **{"global_batch_size": 8, "tree": tree, "num_bytes": rows * 12, **fields})


def sent(contents: Any) -> Any:
    return json.loads(json.dumps(contents))


def reduced(side: WindowReports, *contents: Any, first: int = 0, end: int = 1) -> tuple[Any, Failure | None]:
    return side.reduce({host: WindowReport(end, contents=sent(one)) for host, one in enumerate(contents)}, first, end)


# ---------------------------------------------------------------------- reports


def test_the_first_report_has_the_structure_of_the_records_and_their_bytes() -> None:
    contents = make().contents([batch(0), batch(1)])
    assert contents.pop("element")  # type: ignore[misc]
    assert contents == {"bytes": 48, "records": "['x'] int32[3]"}
    assert make(first_step=1).contents([batch(0)]) == {}
    assert make().contents([]) == {}
    assert make().contents([batch(1)]) == {}


def test_bytes_are_those_of_the_largest_batch_of_a_schedule() -> None:
    assert make(largest_batch=16).contents([batch(0)])["bytes"] == 96
    assert make(largest_batch=4).contents([batch(0)])["bytes"] == 48


def test_records_are_compared_only_where_hosts_hold_whole_ones_and_some() -> None:
    assert make(compare_records=False).contents([batch(0)]) == {"bytes": 48}
    assert make().contents([batch(0, rows=0)]) == {"bytes": 0}


def test_a_host_without_a_record_needs_the_structure() -> None:
    assert make().contents([batch(0, tree=None)]) == {"needs_element": True}
    assert make().contents([batch(4), batch(5, tree=None)]) == {"needs_element": True}


def test_ended_lanes_and_padding_of_unknown_size_are_reported() -> None:
    assert make().contents([batch(4, ended={2: 30}), batch(5, ended={3: 31})]) == {"ended": {"2": 30, "3": 31}}
    padding = batch(5, ended={(6 << 32) | 2: 4}, size_from_others=True, global_batch_size=6)
    assert make(compare_sizes=True).contents([batch(4), padding]) == {
        "unsized": {"size": 6, "ended": {str((6 << 32) | 2): 4}},
        "sizes": {"4": 8},
    }


def test_bad_records_are_reported_with_the_lanes_that_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def after(step: int, ended: Any) -> int:
        seen.append(dict(ended))
        return 100

    side = make(bad_records=SkipBad(0.5), records_after=after)
    with caplog.at_level(logging.WARNING, "meshfeed.exchange"):
        contents = side.contents([batch(4, ended={2: 30}), batch(5, bad=[(7, 0, "x"), (9, 0, "cut short")])])
    assert contents == {"ended": {"2": 30}, "bad": {"5": [(7, 0), (9, 0)]}, "last_bad": "record 9: cut short"}
    assert seen == [{2: 30}, {2: 30}]
    assert [record.getMessage() for record in caplog.records] == [
        "replaced 2 bad records in step 5; record 9: cut short"
    ]
    side.contents([batch(6)])
    assert seen[2:] == [{2: 30}]
    padded = make(bad_records=SkipBad(0.5), records_after=after, compare_sizes=True)
    padded.contents([batch(4, ended={(5 << 32): 2})])
    assert seen[3:] == [{}], "padding of host batches is merged by the reducer"


def test_digests_of_replicated_blocks_are_those_of_the_first_steps() -> None:
    def blocks(tree: Any, size: int) -> Any:
        return {f"rows 0 to {size}": tree["x"][:2], "rows 2 to 4": tree["x"][2:]}

    side = make(first_step=3, blocks_of=blocks)
    digests = side.contents([batch(5), batch(6), batch(7)])["digests"]
    assert list(digests) == ["step 5, rows 0 to 8", "step 5, rows 2 to 4", "step 6, rows 0 to 8", "step 6, rows 2 to 4"]
    assert digests["step 5, rows 0 to 8"] == digests["step 6, rows 0 to 8"] != digests["step 5, rows 2 to 4"]
    assert len(digests["step 5, rows 2 to 4"]) == 16
    assert "digests" not in side.contents([batch(4, tree=None), batch(7)])
    transposed = make(blocks_of=lambda tree, size: {"columns": tree["x"].T})
    assert transposed.contents([batch(1)])["digests"] != {}


# ---------------------------------------------------------------------- the reducer


def test_reports_are_merged() -> None:
    contents, failure = reduced(
        make(), {"ended": {"2": 30}}, {"element": {"a": 1}}, {"element": {"b": 2}, "ended": {"3": 31, "2": 30}}
    )
    assert failure is None
    assert contents == {"element": {"a": 1}, "ended": {"2": 30, "3": 31}}
    assert reduced(make(), {}, {}) == ({}, None)


def test_lanes_that_ended_count_for_the_bad_records_of_later_windows() -> None:
    seen = []

    def after(step: int, ended: Any) -> int:
        seen.append((step, dict(ended)))
        return 100

    side = make(bad_records=SkipBad(0.5), records_after=after)
    reduced(side, {"ended": {"2": 30}})
    reduced(side, {"ended": {"3": 31}}, first=1, end=2)
    assert seen == [(0, {2: 30}), (1, {2: 30, 3: 31})]
    padded = make(bad_records=SkipBad(0.5), records_after=after, compare_sizes=True)
    reduced(padded, {"ended": {str(1 << 32): 2}})
    assert seen[2:] == [(0, {})]


def test_records_of_different_structure_are_an_error_naming_the_hosts() -> None:
    _, failure = reduced(make(), {"records": "int8[]"}, {}, {"records": "int32[]"}, {"records": "int8[]"})
    assert failure == Failure(
        "AgreementError",
        "hosts read records of different structure (hosts 0, 3: int8[]; host 2: int32[]). Start all hosts with the same "
        "source.",
    )
    assert reduced(make(), {"records": "int8[]"}, {}, {"records": "int8[]"})[1] is None


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (lambda x: (x,), lambda x: [x], "hosts 0, 2: PyTreeDef((*,)); host 1: PyTreeDef([*])"),
        (
            lambda x: {"x": x},
            lambda x: {"x": x, "y": None},
            "hosts 0, 2: PyTreeDef({'x': *}); host 1: PyTreeDef({'x': *, 'y': None})",
        ),
        (
            lambda x: {"x": x},
            lambda x: collections.OrderedDict(x=x),
            "hosts 0, 2: PyTreeDef({'x': *}); host 1: a class that is registered as a pytree",
        ),
    ],
)
def test_so_are_records_of_equal_leaves_in_different_containers(one: Any, other: Any, shown: str) -> None:
    def contents(make_tree: Any) -> Any:
        return make().contents([batch(0, tree=make_tree(np.zeros((4, 3), np.int32)))])

    _, failure = reduced(make(), contents(one), contents(other), contents(one))
    assert failure is not None
    assert failure.message.startswith(f"hosts read records of different structure ({shown}).")
    assert reduced(make(), contents(other), contents(other))[1] is None


def test_sizes_that_do_not_fit_are_an_error_naming_two_hosts() -> None:
    _, failure = reduced(
        make(compare_sizes=True), {"sizes": {"1": 8, "2": 8}}, {"sizes": {"1": 8}}, {"sizes": {"2": 6}}
    )
    assert failure == Failure(
        "AgreementError",
        "the host batches of step 2 do not form one global batch: the rows of host 0 belong to a batch of 8, those of host "
        "2 to a batch of 6. Make batches with the same number of rows per device on all hosts.",
    )
    assert reduced(make(compare_sizes=True), {"sizes": {"1": 8}}, {"sizes": {"1": 8, "2": 6}})[1] is None


def test_replicas_that_differ_are_an_error_naming_two_hosts() -> None:
    _, failure = reduced(make(), {"digests": {"a": "1"}}, {"digests": {"b": "2", "a": "1"}}, {"digests": {"b": "3"}})
    assert failure == Failure(
        "AgreementError",
        "hosts 1 and 2 hold the same rows but read different bytes (b). Their sources or decoders differ: compare the files, "
        "and look for randomness without rng=.",
    )


def test_a_stream_without_a_record_on_any_host_is_an_error() -> None:
    assert reduced(make(), {"empty": True}, {"empty": True})[1] == Failure("SourceError", EMPTY_STREAM)
    assert reduced(make(compare_sizes=True), {"empty": True})[1] == Failure("SourceError", EMPTY_BATCHES)
    assert reduced(make(), {"empty": True}, {})[1] is None


def test_a_structure_that_cannot_be_described_is_an_error_if_a_host_needs_it() -> None:
    element = {"element": {"unsupported": "records are odd"}}
    assert reduced(make(), element, {"needs_element": True})[1] == Failure(
        "SourceError", "a host has no record of its own, and records are odd"
    )
    assert reduced(make(), element, {})[1] is None
    assert reduced(make(), {"element": {"a": 1}}, {"needs_element": True})[1] is None
    assert reduced(make(), {}, {"needs_element": True})[1] is None


def test_a_report_that_cannot_be_made_goes_before_all_other_failures() -> None:
    failed = Failure.of(MemoryError("for the digests"), 1).to_json()
    _, failure = reduced(make(), {"records": "a", "empty": True}, {"failed": failed, "records": "b", "empty": True})
    assert failure == Failure(
        "SourceError", "host 1 failed while it prepared its batches: MemoryError: for the digests"
    )


def test_differences_go_before_too_many_bad_records() -> None:
    side = make(bad_records=SkipBad(0.25), records_after=lambda step, ended: 4)
    bad = {"bad": {"0": [[1, 0], [2, 0]]}, "last_bad": "record 2: x"}
    contents, failure = reduced(side, {**bad, "records": "a"}, {"records": "b"})
    assert failure is not None
    assert failure.kind == "AgreementError"
    assert contents == {"bad": {"0": 2}}
    _, failure = reduced(make(bad_records=SkipBad(0.25), records_after=lambda step, ended: 4), bad)
    assert failure is not None
    assert failure.step == 0


words = st.sampled_from("ab")
contents_of_a_host = st.fixed_dictionaries(
    {},
    optional={
        "records": words,
        "digests": st.dictionaries(words, words),
        "sizes": st.dictionaries(st.sampled_from("01"), st.integers(1, 2)),
        "bad": st.dictionaries(st.sampled_from("0123"), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)))),
        "empty": st.just(True),
        "needs_element": st.just(True),
        "element": st.sampled_from([tree_to_json({"a": np.zeros(2)}), {"unsupported": "odd"}]),
        "failed": st.just({"kind": "OSError", "message": "no disk"}),
    },
)


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.lists(contents_of_a_host, min_size=1, max_size=4), st.randoms())
def test_reports_in_any_order_give_the_same_contents_and_failure(hosts: list[Any], rng: random.Random) -> None:
    def result(order: list[int]) -> Any:
        side = make(bad_records=SkipBad(0.5), records_after=lambda step, ended: 2 * (step + 1))
        return side.reduce({host: WindowReport(4, contents=sent(hosts[host])) for host in order}, 0, 4)

    order = list(range(len(hosts)))
    rng.shuffle(order)
    expected = result(sorted(order))
    assert result(order) == expected
    assert json.loads(json.dumps(expected[0])) == expected[0]


# ---------------------------------------------------------------------- padding of host batches


def test_padding_is_summed_over_hosts_and_rows_that_several_hold_count_once() -> None:
    keys = [str((5 << 32) | row) for row in (0, 2, 6)]
    contents, _ = reduced(
        make(compare_sizes=True),
        {"ended": {keys[0]: 2}},
        {"ended": {keys[0]: 2, keys[1]: 1}},
        {"ended": {keys[2]: 2, str(6 << 32): 1}},
    )
    assert contents["ended"] == {str(5 << 32): 5, str(6 << 32): 1}


def test_padding_of_unknown_size_takes_the_size_that_the_others_have() -> None:
    unsized = {"size": 4, "ended": {str((6 << 32) | 1): 2, str((7 << 32) | 3): 1, str((9 << 32) | 3): 1}}
    contents, failure = reduced(
        make(compare_sizes=True), {"sizes": {"5": 8, "6": 12, "4": 8}}, {"unsized": unsized}, {}
    )
    assert failure is None
    assert contents == {"sizes": {"5": 8, "6": 12}, "ended": {str(6 << 32): 4, str(7 << 32): 3}}


def test_padding_of_unknown_size_stands_for_the_same_rows_on_another_host() -> None:
    unsized = {"size": 4, "ended": {str((6 << 32) | 1): 2}}
    contents, _ = reduced(
        make(compare_sizes=True),
        {"unsized": unsized},
        {"sizes": {"5": 8}, "ended": {str((6 << 32) | 2): 4, str(6 << 32): 1}},
    )
    assert contents["ended"] == {str(6 << 32): 5}


def test_the_ledger_of_padded_rows_does_not_grow() -> None:
    side = make(compare_sizes=True)
    for first in range(0, 1000, 10):
        hosts = [
            {"ended": {str((step + 1) << 32 | row): 2 for step in range(first, first + 10)}}
            for row in (0, 0, 6)  # hosts 0 and 1 hold the same rows
        ]
        contents, failure = reduced(side, *hosts, first=first, end=first + 10)
        assert failure is None
        side.learn(contents)
        for step in range(first, first + 10):
            ended, _ = side.known_at(step)
            assert sum(missing for key, missing in ended.items() if key >> 32 == step + 1) == 4
            assert len(ended) <= 10


# ---------------------------------------------------------------------- announcements


def test_announced_lanes_and_counts_are_known() -> None:
    side = make()
    side.learn({"ended": {"2": 30}, "bad": {"1": 4}})
    side.learn({"ended": {"3": 31}})
    side.learn({})
    assert side.known_at(0) == ({2: 30, 3: 31}, 0)
    assert side.known_at(1) == ({2: 30, 3: 31}, 4)


def test_rows_of_padding_have_the_announced_structure_and_size() -> None:
    side = make(compare_sizes=True)
    tree = {"x": np.ones((4, 3), np.float32), "y": [np.ones(4, np.int8)]}
    contents, _ = reduced(side, make().contents([batch(0, tree=tree)]))
    side.learn({**contents, "sizes": {"5": 12, "6": 20}})
    side.learn({"element": {"not": "this"}})
    zeros = side.materialize(batch(5, tree=None, size_from_others=True))
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in {"x": zeros["x"], "y": zeros["y"][0]}.items()} == {
        "x": ((6, 3), np.float32),
        "y": ((6,), np.int8),
    }
    assert not zeros["x"].any()
    known = batch(5, tree=None)
    assert side.materialize(known)["x"].shape == (4, 3)
    other = batch(7, tree=None, size_from_others=True)
    assert side.materialize(other)["x"].shape == (4, 3), "not announced: the smallest size"
    side.learn({"ended": {str(9 << 32): 1}})
    side.known_at(5)
    late = batch(6, tree=None, size_from_others=True)
    assert side.materialize(late)["x"].shape == (10, 3)
    assert late.global_batch_size == 20
    past = batch(5, tree=None, size_from_others=True)
    assert side.materialize(past)["x"].shape == (4, 3), "sizes of delivered steps are forgotten"


def test_a_batch_with_data_is_its_data() -> None:
    one = batch(0)
    assert make().materialize(one) is one.tree


def test_padding_without_a_record_anywhere_is_an_error() -> None:
    with pytest.raises(SourceError, match="no host has a record"):
        make().materialize(batch(0, tree=None))


# ---------------------------------------------------------------------- a single process


def test_alone_the_limit_holds_too(caplog: pytest.LogCaptureFixture) -> None:
    side = make(bad_records=SkipBad(0.25), records_after=lambda step, ended: 8 * (step + 1) - sum(ended.values()))
    side.check_alone(batch(0, bad=[(1, 0, "x"), (2, 0, "y")]))
    assert "replaced 2 bad records in step 0; record 2: y" in caplog.text
    side.check_alone(batch(1))
    assert side.known_at(1)[1] == 2
    with pytest.raises(SourceError, match="2 of the 7 records up to step 1 are bad"):
        side.check_alone(batch(1, ended={0: 9}))


def test_alone_ended_lanes_and_padding_are_known() -> None:
    side = make()
    side.check_alone(batch(0, ended={2: 30}))
    side.check_alone(batch(1, ended={3: 31}))
    assert side.known_at(1)[0] == {2: 30, 3: 31}
    padded = make(compare_sizes=True)
    padded.check_alone(batch(1, ended={(2 << 32) | 3: 1, (2 << 32) | 6: 2}))
    assert padded.known_at(0)[0] == {2 << 32: 3}
    assert padded.known_at(1)[0] == {2 << 32: 3}
    assert padded.known_at(2)[0] == {}
