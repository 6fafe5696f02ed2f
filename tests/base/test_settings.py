"""The keywords of a feed, over their declaration, and defaults that follow from other settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshfeed
from meshfeed._src.base.settings import SETTINGS, FeedSettings, default_num_lanes

# What each keyword takes: value → the value that is kept. A new keyword needs a line here and in REFUSED.
ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "global_batch_size": [
        (None, None), (1, 1), (np.int64(8), 8), (2**40, 2**40),
        (meshfeed.BatchSchedule([(0, 8), (4, 16)]), [[0, 8], [4, 16]]), (meshfeed.BatchSchedule([(0, 8), (4, 8)]), 8),
    ],
    "shuffle": [
        (False, False), (True, True), (np.bool_(True), True), (1, 1), (np.int32(512), 512), ("shards", "shards"),
        (meshfeed.ShardShuffle(3), {"window_shards": 3, "affinity": False}),
    ],
    "seed": [(0, 0), (2**64 - 1, 2**64 - 1), (np.uint64(2**64 - 1), 2**64 - 1)],
    "num_epochs": [(None, None), (1, 1), (np.int8(3), 3)],
    "end": [("drop", "drop"), ("pad", "pad")],
    "mask_key": [(None, None), ("mask", "mask")],
    "balance": [(None, None), ("attention", "attention"), ("tokens", "tokens"), (len, "len")],
    "num_lanes": [(None, None), (1, 1), (np.int64(64), 64)],
    "load": [
        ("sharded", "sharded"), ("once", "once"), ([3, 1], [1, 3]), ((0,), [0]), ({2}, [2]), (range(2), [0, 1]),
        ([np.int64(5)], [5]),
    ],
    "prefetch": [(0, 0), (2, 2), (np.uint8(7), 7), ("auto", "auto")],
    "num_workers": [(0, 0), (3, 3), (np.int64(2), 2), (meshfeed.Workers(4, gc_every=7), 4), ("auto", "auto")],
    "num_threads": [(None, None), (1, 1), (np.int64(9), 9), ("auto", "auto")],
    "retry": [(meshfeed.Retry(3, 1, 2, OSError), {"attempts": 3, "initial_seconds": 1, "max_seconds": 2, "on": ["OSError"]})],
    "bad_records": [(None, None), (meshfeed.SkipBad(0.5), {"max_fraction": 0.5})],
    "check_replicas": [(False, False), (True, True), (np.bool_(False), False)],
    "timeout_seconds": [(300, 300.0), (0.5, 0.5), (np.float32(2), 2.0)],
    "name": [(None, None), ("train", "train")],
}  # fmt: skip

REFUSED: dict[str, list[Any]] = {
    "global_batch_size": [0, -1, 1.5, True, "8", [8], [(0, 8)], np.array([8])],
    "shuffle": [0, -1, 1.5, None, "shard", "", [1], meshfeed.ShardShuffle],
    "seed": [-1, 2**64, 0.5, None, True, "0"],
    "num_epochs": [0, -1, 1.5, True, float("inf"), "1"],
    "end": ["last", "", None, True, 0, ["drop"]],
    "mask_key": ["", 1, True, b"mask", ["mask"]],
    "balance": ["flops", "", 1, True, ["attention"]],
    "num_lanes": [0, -1, 2.0, True, "8"],
    "load": ["twice", "", None, True, 0, [], [0, 0], [-1], [0.5], [True], b"\0", ["once"], {0: 1}],
    "prefetch": [-1, 1.5, None, True, "2", "Auto"],
    "num_workers": [-1, 1.5, None, True, "2", [1]],
    "num_threads": [0, -1, 1.5, True, "2"],
    "retry": [None, 3, True, meshfeed.Retry, {"attempts": 3}],
    "bad_records": [0.5, True, meshfeed.SkipBad, "skip"],
    "check_replicas": [None, 0, 1, "yes"],
    "timeout_seconds": [0, -1, None, True, "5", float("inf"), float("nan")],
    "name": ["", "a/b", 3, True, b"train"],
}


def settings_of(name: str, value: Any) -> FeedSettings:
    """The settings with one changed, and what that one needs."""
    return FeedSettings(**{**({"end": "pad"} if name == "mask_key" else {}), name: value})


def test_every_keyword_has_its_values_here() -> None:
    assert list(ACCEPTED) == list(REFUSED) == list(SETTINGS)


@pytest.mark.parametrize(("name", "value", "kept"), [(n, v, k) for n, pairs in ACCEPTED.items() for v, k in pairs])
def test_what_a_keyword_takes_is_kept_as_plain_json(name: str, value: Any, kept: Any) -> None:
    found = settings_of(name, value).to_json()[name]
    assert (found, type(found)) == (kept, type(kept))
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(("name", "value"), [(n, value) for n, values in REFUSED.items() for value in values])
def test_a_wrong_value_names_the_keyword_and_what_it_takes(name: str, value: Any) -> None:
    with pytest.raises(meshfeed.SettingsError) as info:
        settings_of(name, value)
    assert str(info.value).startswith(f"{name}={value!r}"), str(info.value)
    assert f"; it takes {SETTINGS[name].takes}." in str(info.value)
    assert info.value.setting == name


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.complex_numbers(),
    st.lists(st.one_of(st.integers(-1, 3), st.text(max_size=1), st.none()), max_size=3),
    st.dictionaries(st.integers(0, 2), st.none(), max_size=2),
    st.sampled_from([object(), int, np.zeros((2, 2)), np.array(3), np.float64("nan"), range(3), slice(2), ...]),
)


@given(name=st.sampled_from(list(SETTINGS)), value=ANYTHING)
def test_any_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    try:
        kept = settings_of(name, value).to_json()
    except meshfeed.SettingsError as error:
        found = (error.setting, "; it takes " in str(error))
    else:
        json.dumps(kept, allow_nan=False)
        found = (name, True)
    assert found == (name, True)


def test_the_type_is_named_only_where_the_value_does_not_show_it() -> None:
    texts = []
    for name, value in (("prefetch", 1.5), ("end", "last"), ("num_workers", True), ("retry", None), ("prefetch", -1)):
        with pytest.raises(meshfeed.SettingsError) as info:
            settings_of(name, value)
        texts.append(str(info.value).partition(";")[0])
    assert texts == ["prefetch=1.5 (float)", "end='last'", "num_workers=True", "retry=None", "prefetch=-1 (int)"]


def test_a_mask_needs_padding() -> None:
    with pytest.raises(meshfeed.SettingsError, match=r"mask_key='m' with end='drop'; a mask needs end='pad'") as info:
        FeedSettings(mask_key="m")
    assert info.value.setting == "mask_key"


@pytest.mark.parametrize("feed", [meshfeed.Feed, meshfeed.remote.RemoteFeed])
def test_the_constructors_have_the_declared_keywords_and_defaults(feed: Any) -> None:
    parameters = inspect.signature(feed).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert found == {field.name: field.default for field in dataclasses.fields(FeedSettings)}
    assert list(found) == list(SETTINGS)


def test_constructors_and_docstrings_are_as_written_from_the_declaration() -> None:
    """Their text, so annotations and descriptions too: ``scripts/check --fix`` writes it."""
    path = pathlib.Path(__file__).parents[2] / "scripts" / "signatures.py"
    spec = importlib.util.spec_from_file_location("signatures", path)
    assert spec is not None
    assert spec.loader is not None
    signatures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(signatures)
    assert [keyword.name for keyword in signatures.declared()] == list(SETTINGS)
    assert signatures.outdated() == {}
    documented = inspect.getdoc(meshfeed.Feed)
    assert documented is not None
    text = " ".join(documented.split())
    assert [keyword.name for keyword in signatures.declared() if f"{keyword.name}: {keyword.doc}" not in text] == []


@pytest.mark.parametrize(
    ("sizes", "num_shards", "expected"),
    [
        ((8,), None, 8), ((64,), None, 64), ((128,), None, 64), ((130,), None, 26), ((67,), None, 1),
        ((12, 18), None, 6), ((1, 64), None, 1),
        ((256,), 1000, 64), ((256,), 100, 8), ((96,), 1000, 48), ((7,), 1000, 7), ((101,), 1000, 1), ((256,), 15, 1),
        ((256,), 0, 1), ((12,), 40, 4), ((24, 36), 40, 4),
    ],
)  # fmt: skip
def test_the_default_number_of_lanes(sizes: tuple[int, ...], num_shards: int | None, expected: int) -> None:
    assert default_num_lanes(sizes, num_shards) == expected
