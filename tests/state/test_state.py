"""The state as a value: its JSON form, what is refused and in which words, fingerprints, and states of several hosts."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.base.errors import StateMismatchError
from meshfeed._src.state import state as state_module
from meshfeed._src.state.state import (
    FeedState,
    Ledgers,
    about_files,
    compare_fingerprints,
    count_skipped,
    digest_of,
    flatten,
    kind_mismatch,
    merge_states,
    missing_shards,
    parse_state,
    seal,
    unseal,
)

STATE: dict[str, Any] = {
    "meshfeed": 1,
    "kind": "random_access",
    "position": 6400,
    "segments": [[0, 0, 64]],
    "fingerprint": {"source": {"kind": "memory", "records": 10_000}, "seed": 0},
}
LANES: dict[str, Any] = {**STATE, "kind": "lanes", "step": 100, "num_lanes": 12}
REMEDY = "Pass the result of get_state(). If this was read from a file, the file is damaged: use an earlier checkpoint."
OTHER = "For a position of Grain or MaxText, see `meshfeed import-position`; other loaders' states cannot be converted."
CUT = f"It is truncated or not JSON (Expecting ',' delimiter: line 1 column 3 (char 2)). {REMEDY}"
NEWER = "A newer version of meshfeed wrote this state; upgrade meshfeed to read it."
ENTRIES = "[[record id, epoch, reason, step], …]"
CHANGED = "The state was changed or damaged; use an earlier checkpoint."


def refusal(call: Any, *arguments: Any) -> tuple[str, Any, Any, str]:
    """Field, saved value, current value and remedy of the error that a call raises."""
    with pytest.raises(StateMismatchError) as caught:
        call(*arguments)
    return caught.value.field, caught.value.saved, caught.value.current, caught.value.remedy


# --- digests --------------------------------------------------------------------------------------------------------


def test_a_digest_never_changes_and_does_not_depend_on_the_order_of_keys() -> None:
    value = {"b": [1, 2.5, None, "é"], "a": {"d": True, "c": ""}}
    assert digest_of(value) == digest_of(dict(reversed(value.items()))) == "2552445f7ed852c8"
    assert seal({"records": 3, "epoch": 0}) == {"records": 3, "epoch": 0, "digest": "e4814bfa11a2942f"}


def test_a_sealed_entry_comes_back_and_a_changed_one_does_not() -> None:
    sealed = seal({"records": 3})
    assert unseal(sealed, "lanes.4") == {"records": 3}
    assert sealed.keys() == {"records", "digest"}, "the sealed entry is left as it was"
    changed = {**sealed, "records": 4}
    assert refusal(unseal, changed, "lanes.4") == (
        "lanes.4.digest", sealed["digest"], digest_of({"records": 4}), CHANGED,
    )  # fmt: skip
    for entry in ({"records": 3}, None, "digest"):
        assert refusal(unseal, entry, "hosts.0") == ("hosts.0", entry, "an object with a digest", CHANGED)


# --- the JSON form --------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 2**62 - 1)
INDICES = st.integers(0, 5000).map(str)
LEDGER = st.lists(st.tuples(NUMBERS, NUMBERS, st.text(max_size=5), NUMBERS).map(list), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
STATES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["random_access", "lanes", "host_batches"]),
        "position": NUMBERS,
        "segments": st.lists(st.lists(NUMBERS, min_size=3, max_size=3), max_size=2),
        "fingerprint": st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    },
    optional={
        "step": NUMBERS,
        "num_lanes": NUMBERS,
        "lanes": st.dictionaries(INDICES, JSON, max_size=3),
        "hosts": st.dictionaries(INDICES, JSON, max_size=3),
        "skipped": st.dictionaries(INDICES, LEDGER, max_size=3),
        "num_skipped": NUMBERS,
        "num_unlisted": st.dictionaries(INDICES, NUMBERS, max_size=3),
    },
)


@given(STATES)
def test_every_state_comes_back_as_it_was_from_a_value_or_from_text(fields: dict[str, Any]) -> None:
    state = {"meshfeed": 2 if "num_unlisted" in fields else 1, **fields}
    assert parse_state(state).to_json() == state
    text = json.dumps(state)
    assert (
        parse_state(text) == parse_state(text.encode()) == parse_state(bytearray(text.encode())) == parse_state(state)
    )


def test_fields_are_in_this_order_and_absent_ones_are_left_out() -> None:
    assert list(parse_state(LANES).to_json()) == [
        "meshfeed", "kind", "position", "segments", "fingerprint", "step", "num_lanes",
    ]  # fmt: skip
    state = FeedState("random_access", 0, [], {})
    assert state.to_json() == {
        "meshfeed": 1, "kind": "random_access", "position": 0, "segments": [], "fingerprint": {},
    }  # fmt: skip


def test_a_state_is_a_copy_on_the_way_in_and_out() -> None:
    given_state = json.loads(json.dumps(STATE))
    parsed = parse_state(given_state)
    given_state["segments"].append("changed")
    given_state["fingerprint"]["seed"] = "changed"
    written = parsed.to_json()
    written["segments"].append("changed")
    assert parsed.to_json() == STATE


def test_the_version_is_the_lowest_that_can_read_the_state() -> None:
    assert parse_state({**STATE, "num_unlisted": {"0": 1}}).to_json()["meshfeed"] == 2, "version 1 has no such field"
    exact = {**LANES, "lanes": {"0": {"__meshfeed__": ["scalar", "<i4", "00000000"]}}}
    assert parse_state(exact).to_json()["meshfeed"] == 2
    assert parse_state({**LANES, "lanes": {"0": {"__tuple__": []}}}).to_json()["meshfeed"] == 1


@pytest.mark.parametrize(
    ("state", "field", "saved", "current", "remedy"),
    [
        ("[1", "state", "[1", "JSON", CUT),
        ([1], "state", [1], "a JSON object", REMEDY),
        ("[1]", "state", [1], "a JSON object", REMEDY),
        (None, "state", None, "a JSON object", REMEDY),
        ({}, "meshfeed", None, 3, f"This is not the state of a feed. {REMEDY} {OTHER}"),
        ({**STATE, "meshfeed": True}, "meshfeed", True, 3, f"This is not the state of a feed. {REMEDY} {OTHER}"),
        ({**STATE, "meshfeed": "1"}, "meshfeed", "1", 3, f"This is not the state of a feed. {REMEDY} {OTHER}"),
        ({**STATE, "meshfeed": 4}, "meshfeed", 4, 3, NEWER),
        ({**STATE, "meshfeed": 0}, "meshfeed", 0, 3, f"There is no such version. {REMEDY}"),
        ({**STATE, "meshfeed": 2}, "meshfeed", 2, 1, f"Nothing in the state needs that version. {REMEDY}"),
        ({**STATE, "epoch": 3}, "epoch", 3, "no such field", REMEDY),
        ({**STATE, "kind": "lane"}, "kind", "lane", "random_access or lanes or host_batches", REMEDY),
        ({**STATE, "kind": 3}, "kind", 3, "str", REMEDY),
        ({**STATE, "position": "6400"}, "position", "6400", "int", REMEDY),
        ({**STATE, "position": 64.0}, "position", 64.0, "int", REMEDY),
        ({**STATE, "position": True}, "position", True, "int", REMEDY),
        ({**STATE, "position": -1}, "position", -1, "int", REMEDY),
        ({**STATE, "position": 2**62}, "position", 2**62, "a number below 2**62, the limit of every stream", REMEDY),
        ({**STATE, "segments": {}}, "segments", {}, "list", REMEDY),
        ({**STATE, "fingerprint": []}, "fingerprint", [], "dict", REMEDY),
        ({**LANES, "step": "1"}, "step", "1", "int", REMEDY),
        ({**LANES, "num_lanes": None}, "num_lanes", None, "int", REMEDY),
        ({**LANES, "lanes": []}, "lanes", [], "dict", REMEDY),
        ({**LANES, "hosts": []}, "hosts", [], "dict", REMEDY),
        ({**STATE, "skipped": []}, "skipped", [], "dict", REMEDY),
        ({**STATE, "num_skipped": -1}, "num_skipped", -1, "int", REMEDY),
        ({**STATE, "num_unlisted": 3}, "num_unlisted", 3, "dict", REMEDY),
        ({**LANES, "lanes": {"0": {}, "x": {}}}, "lanes.x", "x", "a number", REMEDY),
        ({**LANES, "lanes": {0: {}}}, "lanes.0", 0, "a number", REMEDY),
        ({**LANES, "hosts": {"-1": {}}}, "hosts.-1", "-1", "a number", REMEDY),
        ({**STATE, "skipped": {"": []}}, "skipped.", "", "a number", REMEDY),
        ({**STATE, "num_unlisted": {"1.5": 1}}, "num_unlisted.1.5", "1.5", "a number", REMEDY),
        ({**STATE, "skipped": {"3": 7}}, "skipped.3", 7, ENTRIES, REMEDY),
        ({**STATE, "skipped": {"3": [[1, 0, "bad"]]}}, "skipped.3", [[1, 0, "bad"]], ENTRIES, REMEDY),
        ({**STATE, "skipped": {"3": [[1, 0, 5, 2]]}}, "skipped.3", [[1, 0, 5, 2]], ENTRIES, REMEDY),
        ({**STATE, "skipped": {"3": [[1, 0, "", 2], 5]}}, "skipped.3", [[1, 0, "", 2], 5], ENTRIES, REMEDY),
        ({**STATE, "num_unlisted": {"3": -1}}, "num_unlisted.3", -1, "a number of records", REMEDY),
        ({**STATE, "num_unlisted": {"3": True}}, "num_unlisted.3", True, "a number of records", REMEDY),
    ],
)  # fmt: skip
def test_what_is_no_state_is_refused(state: Any, field: str, saved: Any, current: Any, remedy: str) -> None:
    assert refusal(parse_state, state) == (field, saved, current, remedy)


@pytest.mark.parametrize(
    "path", ["state.json", b"state.json", bytearray(b"state.json"), pathlib.Path("state.json"), "gs://bucket/state", "3.json"]
)  # fmt: skip
def test_a_path_is_no_state_and_the_error_says_what_to_pass(path: Any) -> None:
    text = path.decode() if isinstance(path, bytes | bytearray) else str(path)
    field, saved, current, remedy = refusal(parse_state, path)
    assert (field, saved, current) == ("state", str(path) if isinstance(path, pathlib.Path) else path, "JSON")
    assert f"If this is the path of a file, pass json.loads(open({text!r}).read())" in remedy
    assert "Checkpointer.restore restores a checkpoint folder." in remedy


@pytest.mark.parametrize("text", ["", "{", "[1", b"\x80\x04}", "state\n", '{"kind": "random_acc'])
def test_text_that_was_cut_short_is_not_taken_for_a_path(text: Any) -> None:
    assert "truncated or not JSON" in refusal(parse_state, text)[3]


@pytest.mark.parametrize(
    ("field", "kind"), [("kind", "str"), ("position", "int"), ("segments", "list"), ("fingerprint", "dict")]
)
def test_a_state_without_a_field_is_cut_short(field: str, kind: str) -> None:
    without = {key: value for key, value in STATE.items() if key != field}
    remedy = f"The state has no {field!r}, so it is truncated or damaged. {REMEDY}"
    assert refusal(parse_state, without) == (field, "missing", kind, remedy)


def test_zero_and_the_last_position_are_positions() -> None:
    assert parse_state({**STATE, "position": 0, "segments": []}).position == 0
    assert parse_state({**STATE, "position": 2**62 - 1}).position == 2**62 - 1
    assert parse_state({**STATE, "num_unlisted": {"0": 0}}).num_unlisted == {"0": 0}


def test_an_error_shows_the_first_80_characters_of_a_long_value() -> None:
    assert refusal(parse_state, "x" * 78)[1] == "x" * 78
    assert refusal(parse_state, "x" * 79)[1] == "'" + "x" * 76 + "..."
    assert refusal(parse_state, {**STATE, "extra": ["y" * 90]})[1] == "['" + "y" * 75 + "..."


# --- fingerprints ---------------------------------------------------------------------------------------------------


def test_flatten_names_each_value_by_its_path() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [{"e": 2}], 3: None}) == {
        "a.b": 1,
        "a.c": {},
        "d": [{"e": 2}],
        "3": None,
    }
    assert flatten({"b": 1}, "a") == {"a.b": 1}
    assert flatten(5, "a") == {"a": 5}


FINGERPRINT = {
    "order": {"algorithm": "feistel-square", "version": 2},
    "source": {"kind": "array_record", "files": {"count": 4, "bytes": 800}},
    "shuffle": True, "seed": 3, "num_epochs": 2, "end": "drop", "num_lanes": 8, "batches": 5,
}  # fmt: skip
ORDER = "This version of meshfeed orders records differently; continue with the version that saved the state."
VALUE = "Pass the saved value, or start a new stream without the state."
EPOCHS = (
    f"{VALUE} To be able to train longer than planned, start the stream with num_epochs=None and end the loop after a "
    "number of steps."
)
SOURCE = "Pass the source that the state was saved with, or start a new stream without the state."


@pytest.mark.parametrize(
    ("change", "field", "current", "remedy"),
    [
        ({"order": {"algorithm": "feistel-square", "version": 3}}, "order.version", 3, ORDER),
        ({"source": {"kind": "memory", "files": {"count": 4, "bytes": 800}}}, "source.kind", "memory", SOURCE),
        ({"source": {"kind": "array_record", "files": {"count": 4, "bytes": 801}}}, "source.files.bytes", 801,
         f"As many files as before, but they have 1 byte more in all. {SOURCE}"),
        ({"source": {"kind": "array_record"}}, "source.files.count", "missing", "The saved source had 4 files"),
        ({"shuffle": 1}, "shuffle", 1, VALUE),
        ({"shuffle": "shards", "order": {"algorithm": "shard-windows", "version": 2}}, "shuffle", "shards", VALUE),
        ({"seed": 4}, "seed", 4, VALUE),
        ({"num_epochs": 3}, "num_epochs", 3, EPOCHS),
        ({"num_epochs": None}, "num_epochs", None, EPOCHS),
        ({"end": "pad"}, "end", "pad", VALUE),
        ({"num_lanes": 4}, "num_lanes", 4, "Pass the saved number, or num_lanes=None to take it from the state."),
        ({"batches": 6}, "batches", 6, "Use the saved value, or start a new stream without the state."),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(change: dict[str, Any], field: str, current: Any, remedy: str) -> None:
    found = refusal(compare_fingerprints, FINGERPRINT, {**FINGERPRINT, **change})
    assert found[:3] == (field, flatten(FINGERPRINT)[field], current)
    if field == "source.files.count":
        assert found[3] == SOURCE, "an unknown number of files is no other number of files"
    else:
        assert found[3] == remedy


def test_fingerprints_that_mean_the_same_match() -> None:
    compare_fingerprints(FINGERPRINT, FINGERPRINT)
    compare_fingerprints(FINGERPRINT, dict(reversed(FINGERPRINT.items())))
    compare_fingerprints(FINGERPRINT, {**FINGERPRINT, "order": dict(reversed(FINGERPRINT["order"].items()))})
    compare_fingerprints({"source": {"shape": [1, 2]}}, {"source": {"shape": (1, 2)}})
    compare_fingerprints({"num_epochs": None}, {"num_epochs": 3})  # an endless stream may be given an end
    compare_fingerprints({"end": None}, {})  # absent and None are the same


def test_fields_that_only_one_side_has_are_differences() -> None:
    assert refusal(compare_fingerprints, {}, {"mask": "m"})[:3] == ("mask", None, "m")
    assert refusal(compare_fingerprints, {"mask": "m"}, {})[:3] == ("mask", "m", None)
    assert refusal(compare_fingerprints, {"source": {"a": 1}}, {"source": {"a": 1, "b": 2}})[:3] == (
        "source.b", "missing", 2,
    )  # fmt: skip
    assert refusal(compare_fingerprints, {"seed": 1, "end": "pad"}, {"end": "drop", "seed": 2})[0] == "end"
    named = {"source": {"a": "missing", "b": 1}}  # a value that reads like the word for none
    assert refusal(compare_fingerprints, named, {"source": {"b": 1}})[:2] == ("source.a", "missing")


def test_a_fingerprint_without_a_field_is_damaged_or_of_another_stream() -> None:
    def lacks(field: str) -> str:
        return f"The state has no {field!r}: it is damaged or belongs to a different stream. "

    without_seed = {name: value for name, value in FINGERPRINT.items() if name != "seed"}
    assert refusal(compare_fingerprints, without_seed, FINGERPRINT) == ("seed", None, 3, lacks("seed") + VALUE)
    assert refusal(compare_fingerprints, {"source": {"a": 1}}, {"source": {"a": 1, "b": 2}}) == (
        "source.b", "missing", 2, lacks("source.b") + SOURCE,
    )  # fmt: skip
    assert refusal(compare_fingerprints, {"seed": None}, {"seed": 2}) == ("seed", None, 2, VALUE)


def test_missing_files_are_named_only_if_the_source_has_another_number_of_files() -> None:
    def files(count: int) -> dict[str, Any]:
        return {"source": {"files": {"count": count}}}

    names = [f"/data/a-0000{number}-of-00009" for number in (0, 4, 8)]
    assert refusal(compare_fingerprints, files(9), files(3), lambda: names)[3] == (
        "The saved source had 9 files, the current one has 3. Missing: a-00001-of-00009, a-00002-of-00009, "
        f"a-00003-of-00009 and 3 more. {SOURCE}"
    )
    assert refusal(compare_fingerprints, files(9), files(3))[3] == (
        f"The saved source had 9 files, the current one has 3. {SOURCE}"
    )
    other = {"seed": {"count": 9}}
    assert refusal(compare_fingerprints, other, {"seed": {"count": 3}}, lambda: names)[3] == VALUE
    assert about_files({"a.count": 3}, {"a.count": 3, "b.count": 1}, names) == ""
    three = [f"a-{number}-of-5" for number in (0, 1)]
    assert about_files({"a.count": 5, "b.count": 1}, {"a.count": 2, "b.count": 2}, three) == (
        "The saved source had 5 files, the current one has 2. Missing: a-2-of-5, a-3-of-5, a-4-of-5. "
    )


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["/a/x-0-of-3.tar", "x-2-of-3.tar"], ["x-1-of-3.tar"]),
        (["x-00001-of-00002", "x-00002-of-00002"], []),  # counted from 1
        (["x-00002-of-00002"], ["x-00001-of-00002"]),
        (["x-3-of-12"], [f"x-{number}-of-12" for number in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11)]),
        (["x-00000-of-00002", "x-00001-of-00002", "y-00001-of-00002.gz"], ["y-00000-of-00002.gz"]),
        (["x-0-of-2", "y-1-of-2"], ["x-1-of-2", "y-0-of-2"]),
        (["part-1", "part-3", "states-of-mind"], []),
    ],
)
def test_the_missing_files_of_a_numbered_set(names: list[str], missing: list[str]) -> None:
    assert missing_shards(names) == missing


def test_a_state_of_a_different_kind_of_source() -> None:
    error = kind_mismatch("lanes", "random_access")
    assert (error.field, error.saved, error.current) == ("kind", "lanes", "random_access")
    assert error.remedy == "The state belongs to a different kind of source; pass that source, or start a new stream."


# --- states of several hosts ----------------------------------------------------------------------------------------

MERGE = "Merge states that the hosts took after the same step of one feed."


@given(
    st.dictionaries(st.integers(0, 40), st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.sets(st.integers(0, 40)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_lanes_held_by_any_hosts_make_one_state_in_the_order_of_the_lanes(
    lanes: dict[int, int], held: list[set[int]], random: Any
) -> None:
    held[0] = held[0] | set(lanes)  # every lane has a host; some have several
    states = [{**LANES, "lanes": {str(i): {"records": n} for i, n in lanes.items() if i in own}} for own in held]
    random.shuffle(states)
    merged = merge_states(states)
    assert merged == {**LANES, "lanes": {str(i): {"records": n} for i, n in lanes.items()}}
    assert list(merged["lanes"]) == [str(lane) for lane in sorted(lanes)]


def test_states_without_entries_are_merged_to_what_each_of_them_is() -> None:
    assert merge_states([STATE, json.loads(json.dumps(STATE))]) == STATE
    assert merge_states([{**LANES, "lanes": {}}])["lanes"] == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "host_batches"), ("position", 6464), ("step", 101), ("segments", [[0, 0, 32]]), ("num_lanes", 6),
        ("fingerprint", {"seed": 1}),
    ],
)  # fmt: skip
def test_states_of_different_steps_or_streams_are_not_merged(field: str, value: Any) -> None:
    assert refusal(merge_states, [LANES, LANES, {**LANES, field: value}]) == (field, LANES.get(field), value, MERGE)


def test_a_host_outside_of_the_mesh_does_not_know_how_many_records_were_replaced() -> None:
    knowing, behind = {**STATE, "num_skipped": 7}, {**STATE, "num_skipped": 3}
    for states in ([knowing, STATE], [STATE, knowing], [behind, knowing, STATE]):
        assert merge_states(states) == knowing
    assert "num_skipped" not in merge_states([STATE, STATE])


def test_no_states_are_no_state() -> None:
    assert refusal(merge_states, []) == ("states", [], "at least one state", "Pass the states of the hosts.")


def lane(**fields: Any) -> dict[str, Any]:
    return {"records": 5, "epoch": 0, "taken": 7, "ended": False, **fields}


def test_of_two_entries_of_a_lane_the_one_that_resumes_faster_is_kept() -> None:
    slow, fast = lane(skip=9, state="a"), lane(skip=2, state="b")
    for first, second in ((slow, fast), (fast, slow)):
        merged = merge_states([{**LANES, "lanes": {"3": first}}, {**LANES, "lanes": {"3": second}}])
        assert merged["lanes"] == {"3": fast}
    assert merge_states([{**LANES, "lanes": {"3": fast}}, {**LANES, "lanes": {"3": lane()}}])["lanes"]["3"] == lane()
    assert merge_states([{**LANES, "lanes": {"3": lane()}}, {**LANES, "lanes": {"3": fast}}])["lanes"]["3"] == lane()


@pytest.mark.parametrize(
    ("part", "left", "right"),
    [
        ("lanes", lane(), lane(records=6)),
        ("lanes", lane(), lane(epoch=1)),
        ("lanes", lane(), lane(taken=8)),
        ("lanes", lane(), lane(ended=True)),
        ("lanes", lane(), 3),
        ("lanes", 3, lane()),
        ("hosts", {"batches": 1}, {"batches": 2}),
        ("skipped", [[1, 0, "", 0]], [[2, 0, "", 0]]),
        ("skipped", [[1, 0, "", 0]], [[2, 0, "", 0], [1, 0, "", 0]]),
    ],
)
def test_entries_that_contradict_each_other_are_refused(part: str, left: Any, right: Any) -> None:
    states = [{**LANES, part: {"0": left, "4": left}}, {**LANES, part: {"0": left, "4": right}}]
    assert refusal(merge_states, states) == (f"{part}.4", left, right, MERGE)


def test_a_ledger_is_the_longest_that_a_host_has_and_its_count_the_largest() -> None:
    ledger = [[1, 0, "bad", 0], [9, 0, "", 3], [4, 1, "", 5]]
    states = [
        {**STATE, "meshfeed": 2, "skipped": {"1": ledger[:count], "0": []}, "num_unlisted": {"1": 10 * count, "2": 1}}
        for count in (1, 3, 2)
    ]
    merged = merge_states(states)
    assert merged == {**STATE, "meshfeed": 2, "skipped": {"0": [], "1": ledger}, "num_unlisted": {"1": 30, "2": 1}}


# --- ledgers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def host_3_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module.coordination, "process_index", lambda: 3)
    monkeypatch.setattr(state_module.coordination, "process_count", lambda: 4)


def bad(*record_ids: int) -> list[tuple[int, int, str]]:
    return [(record_id, 2, f"reason {record_id}") for record_id in record_ids]


@pytest.mark.usefixtures("host_3_of_4")
def test_a_host_lists_its_share_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MAX_LISTED", 12)
    monkeypatch.setattr(state_module, "MAX_REASONS", 8)
    restored = Ledgers({"1": [[5, 0, "", 0]]}, {"1": 6})
    assert restored.after([], 10) is restored
    first = restored.after(bad(7), 10)
    assert first.state_fields() == {
        "skipped": {"1": [[5, 0, "", 0]], "3": [[7, 2, "reason 7", 10]]},
        "num_unlisted": {"1": 6},
    }
    second = first.after(bad(8, 9, 10, 11), 11)
    assert second.listed["3"] == [[7, 2, "reason 7", 10], [8, 2, "reason 8", 11], [9, 2, "", 11]]
    assert second.num_unlisted == {"1": 6, "3": 2}
    third = second.after(bad(12, 13, 14), 12)
    assert third.listed == second.listed
    assert third.num_unlisted == {"1": 6, "3": 5}
    assert first.num_unlisted == {"1": 6}, "a ledger is a value"


@pytest.mark.usefixtures("host_3_of_4")
def test_every_host_may_list_one_record_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "MAX_LISTED", 3)
    monkeypatch.setattr(state_module, "MAX_REASONS", 3)
    ledgers = Ledgers().after(bad(7, 8), 0)
    assert ledgers.state_fields() == {"skipped": {"3": [[7, 2, "reason 7", 0]]}, "num_unlisted": {"3": 1}}


def test_ledgers_are_read_from_a_state() -> None:
    assert Ledgers.of_state(parse_state(STATE)).state_fields() == {"skipped": None, "num_unlisted": None}
    fields = {"skipped": {"0": [[1, 0, "bad", 0]]}, "num_unlisted": {"0": 4}}
    assert Ledgers.of_state(parse_state({**STATE, **fields})).state_fields() == fields


def test_records_that_several_hosts_list_are_counted_once() -> None:
    ledgers = {"0": [[1, 0, "bad", 0], [2, 0, "bad", 1]], "1": [[1, 0, "", 0], [1, 1, "", 0], [1, 0, "", 7]]}
    assert count_skipped(parse_state({**STATE, "skipped": ledgers})) == 4
    assert count_skipped(parse_state({**STATE, "skipped": ledgers, "num_skipped": 0})) == 0
    assert count_skipped(parse_state(STATE)) == 0


def test_data_that_differ_are_named_by_what_differs() -> None:

    files = {"count": 2, "bytes": 1000, "digest": "a"}
    source = {"kind": "parquet", "files": files, "records": 9, "content": "a"}

    def difference(saved: Any, current: Any) -> tuple[str, str]:
        with pytest.raises(StateMismatchError) as error:
            compare_fingerprints({"source": saved}, {"source": current})
        return error.value.field, error.value.remedy.partition(" Pass the source")[0]

    assert difference(source, {**source, "content": "b"}) == (
        "source.content",
        "The content of records differs although the number of records and the names and sizes of the files are the same: up "
        "to four records spread over the source are compared, and one that cannot be read, of which the log has a warning, "
        "counts as different. A function that draws random numbers must take them from its parameter rng.",
    )
    assert difference(source, {**source, "files": {**files, "digest": "b"}}) == (
        "source.files.digest",
        "Names, sizes or order of files differ. Their number and total size are the same: a file was renamed or replaced by "
        "another.",
    )
    assert difference(source, {**source, "files": {**files, "bytes": 1024, "digest": "b"}}) == (
        "source.files.bytes",
        "As many files as before, but they have 24 bytes more in all.",
    )
    assert difference(source, {**source, "files": {**files, "bytes": 990}})[1].endswith("10 bytes less in all.")
    whole = {"kind": "concat", "sources": [source, {"kind": "memory", "records": 9, "content": "a"}]}
    changed = {**whole, "sources": [source, {"kind": "memory", "records": 9, "content": "b"}]}
    assert difference(whole, changed) == (
        "source.sources[1].content",
        "The content of records differs although the number of records is the same: up to four records spread over the "
        "source are compared, and one that cannot be read, of which the log has a warning, counts as different. A function "
        "that draws random numbers must take them from its parameter rng.",
    )
    assert difference({"kind": "x", "content": "a"}, {"kind": "x", "content": "b"})[1] == (
        "The content of records differs: up to four records spread over the source are compared, and one that cannot be "
        "read, of which the log has a warning, counts as different. A function that draws random numbers must take them from "
        "its parameter rng."
    )
    assert difference(whole, {**whole, "sources": [source]})[0] == "source.sources"
