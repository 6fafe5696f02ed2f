"""Mixtures of random-access components: exact shares, arithmetic positions, stages that leave the past alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed._src.base.errors import SettingsError, SourceError, StateMismatchError
from meshfeed._src.base.groups import group_by
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.mixture import MixtureOrder, MixtureSettings, StagedBlocks, join_ids, split_ids
from meshfeed._src.order.saved_mixture import check_stages
from meshfeed._src.order.weights import Stage, block_counts, check_all_named, nest_stages, parse_weights, write_stages

SIZES = {"web": 1000, "code": 300, "books": 50}
WEIGHTS = {"web": 5, "code": 3, "books": 1}


def mixture(sizes=SIZES, stages=((0, WEIGHTS),), **kwargs) -> MixtureOrder:
    options = {
        "block": 64,
        "seed": 3,
        "num_epochs": None,
        "on_end": "repeat",
        "repeat": {},
        "identities": sizes,
        **kwargs,
    }
    shuffle = options.pop("shuffle", True)
    stages = [stage if isinstance(stage, Stage) else Stage(*stage) for stage in stages]
    return MixtureOrder(sizes, MixtureSettings(stages=stages, **options), shuffle)


ENDLESS, FINITE = mixture(), mixture(num_epochs=5)


def drawn(order: MixtureOrder, start: int, stop: int) -> np.ndarray:
    return order.ids_at(np.arange(start, stop))[0]


# --- weights --------------------------------------------------------------------------------------------------------


@given(
    weights=st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 100), min_size=1),
    block=st.integers(2000, 100_000),
)
@settings(max_examples=100, deadline=None)
def test_largest_remainder(weights, block):
    names = sorted(weights)
    try:
        counts = block_counts(weights, names, block)
    except SettingsError:
        assert min(weights.values()) / sum(weights.values()) * block < 1
        return
    assert sum(counts) == block
    for name, count in zip(names, counts, strict=True):
        assert abs(count - block * weights[name] / sum(weights.values())) < 1 + 1e-6


def test_block_counts_by_hand():
    assert block_counts({"a": 1, "b": 1, "c": 1}, ["a", "b", "c"], 8) == (3, 3, 2)
    assert block_counts({"a": 0.7, "c": 0.3}, ["a", "b", "c"], 10) == (7, 0, 3)
    with pytest.raises(SettingsError, match=r"'b'.*never get a record.*block=1001"):
        block_counts({"a": 1000, "b": 1}, ["a", "b"], 10)
    assert block_counts({"a": 1000, "b": 1}, ["a", "b"], 1001) == (1000, 1)
    with pytest.raises(SettingsError, match=r"never get a record\. Raise the weight, or leave"):
        block_counts({"a": 2**30, "b": 1}, ["a", "b"], 1000)


def test_a_block_that_memory_does_not_hold_is_refused():
    assert sum(block_counts({"a": 2, "b": 1}, ["a", "b"], 2**24)) == 2**24
    with pytest.raises(SettingsError, match="at most 16,777,216"):
        block_counts({"a": 2, "b": 1}, ["a", "b"], 2**24 + 1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "no component"),
        ({"a": 0}, "no component"),
        ({"x": 1}, "unknown component 'x'; the components are 'a', 'b'"),
        ({"a": -1}, "-1 for 'a'"),
        ({"a": float("nan")}, "nan for 'a'"),
        ({"a": True}, "True for 'a'"),
        ({"a": "1"}, "'1' for 'a'"),
        (3, r"\{name: weight\}"),
        ([], r"\{name: weight\}"),
        ([(1, {"a": 1})], "begins at step 1, expected 0"),
        ([(0, {"a": 1}), (0, {"b": 1})], "begins at step 0, expected more than 0"),
        ([(0, {"a": 1}), (2.5, {"b": 1})], "stage"),
        ([{"a": 1}], "stage"),
    ],
)
def test_wrong_weights_are_named(weights, message):
    with pytest.raises(SettingsError, match=message) as raised:
        parse_weights(weights, ["a", "b"])
    assert raised.value.setting == "weights"


def test_a_component_that_no_weight_names_is_an_error_or_with_stages_a_warning(caplog):
    names = ["a", "b", "c", "d"]
    check_all_named({"d": 0, "a": 1, "c": 2, "b": 1}, names)
    check_all_named([(0, {"a": 1, "b": 1}), (5, {"c": 0, "d": 1})], names)
    assert caplog.records == []
    with pytest.raises(SettingsError) as raised:
        check_all_named({"b": 3, "d": 0}, names)
    assert raised.value.setting == "weights"
    assert str(raised.value) == (
        "weights leaves out the components 'a', 'c', which would never be read. Name every component, as in "
        "weights={'a': 1, 'b': 3, 'c': 1, 'd': 0} (0: not read), or remove it from the components."
    )
    check_all_named([(0, {"a": 1}), (5, {"c": 1})], names)
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        (
            "meshfeed.mixture",
            "WARNING",
            "no stage of weights names the components 'b', 'd': not read until a stage does.",
        )
    ]


def test_weights_are_written_as_they_are_read():
    stages = parse_weights([(0, {"a": 1, "b": 0}), (10, {"a": 0.5, "b": np.float32(0.5)})], ["a", "b"])
    assert stages == ((0, {"a": 1}), (10, {"a": 0.5, "b": 0.5}))
    text = write_stages(stages)
    assert parse_weights(eval(text.removeprefix("weights=")), ["a", "b"]) == stages


def test_a_mixture_within_a_mixture_shares_its_weight() -> None:
    outer = ((0, {"a": 3, "b": 1}), (20, {"b": 2}), (30, {"b": 2, "a": 1}))
    inner = ((0, {"x": 1, "y": 2}), (10, {"y": 5}), (20, {"x": 1, "y": 1}))
    assert nest_stages(outer, "a", inner) == (
        (0, {"a/x": 1, "a/y": 2, "b": 1}),
        (10, {"a/y": 3, "b": 1}),
        (20, {"b": 2}),
        (30, {"b": 2, "a/x": 0.5, "a/y": 0.5}),
    )
    assert nest_stages(outer, "b", ((0, {"z": 4}), (5, {"z": 1}))) == tuple(
        (step, {"b/z" if name == "b" else name: weight for name, weight in weights.items()}) for step, weights in outer
    )


# --- the stream -----------------------------------------------------------------------------------------------------


def test_every_block_holds_the_shares_exactly_in_an_order_of_its_own():
    component, _ = split_ids(drawn(mixture(), 0, 64 * 50))
    blocks = component.reshape(50, 64)
    counts = block_counts(WEIGHTS, list(SIZES), 64)
    for block in blocks:
        assert tuple(np.bincount(block, minlength=3)) == counts
    assert np.unique(blocks, axis=0).shape[0] == 50


@pytest.mark.parametrize("shuffle", [False, True, 16])
def test_each_component_comes_in_its_own_order_and_epochs(shuffle):
    order = mixture(shuffle=shuffle)
    mixed, epochs = order.ids_at(np.arange(20_000))
    component, ids = split_ids(mixed)
    for number, size in enumerate(SIZES.values()):
        own, own_epochs = ids[component == number], epochs[component == number]
        np.testing.assert_array_equal(own_epochs, np.arange(own.size) // size)
        for epoch in range(own.size // size):
            np.testing.assert_array_equal(np.sort(own[epoch * size : (epoch + 1) * size]), np.arange(size))
        if shuffle is False:
            np.testing.assert_array_equal(own, np.arange(own.size) % size)


def test_components_of_one_length_have_unlike_orders():
    component, ids = split_ids(drawn(mixture({"a": 5000, "b": 5000}, ((0, {"a": 1, "b": 1}),)), 0, 64 * 30))
    first, second = ids[component == 0], ids[component == 1]
    assert (first == second).mean() < 0.02


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_position_has_one_record_however_it_is_requested(data):
    names = list(SIZES)
    stages, position = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        stages.append((position, {name: data.draw(st.integers(1, 4)) for name in chosen}))
        position += data.draw(st.integers(1, 300))
    order = mixture(stages=stages, block=data.draw(st.integers(12, 70)))
    together, epochs = order.ids_at(np.arange(1500))
    where = np.array(data.draw(st.lists(st.integers(0, 1499), min_size=1, max_size=50)))
    ids, some_epochs = order.ids_at(where)
    np.testing.assert_array_equal(ids, together[where])
    np.testing.assert_array_equal(some_epochs, epochs[where])
    component, _ = split_ids(together)
    for first, weights in stages:
        after = [s[0] for s in stages if s[0] > first]
        used = set(component[first : after[0] if after else 1500].tolist())
        assert used <= {names.index(name) for name in weights}
    # no component skips or repeats a record where stages meet
    for number, size in enumerate(SIZES.values()):
        own = (together & ((1 << 48) - 1))[component == number] + epochs[component == number] * size
        if own.size >= size:
            np.testing.assert_array_equal(np.sort(own[:size]), np.arange(size))
        assert np.unique(own).size == own.size


@given(st.integers(0, 12_000), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_positions_between_are_those_one_by_one(start, count):
    for order in (ENDLESS, FINITE):
        assert order.total is None or order.total > 8192
        stop = min(start + count, 12_000 if order.total is None else order.total)
        begin = min(start, stop)
        for found, wanted in zip(order.ids_between(begin, stop), order.ids_at(np.arange(begin, stop)), strict=True):
            np.testing.assert_array_equal(found, wanted)
            found[:] = -1  # the caller's own
    for start, stop in ((FINITE.total - 1, FINITE.total + 1), (-1, 1)):
        with pytest.raises(IndexError):
            FINITE.ids_between(start, stop)


def test_a_later_stage_leaves_the_past_as_it_was():
    before = drawn(mixture(), 0, 3000)
    order = mixture({**SIZES, "new": 77}, ((0, WEIGHTS), (1000, {"new": 1, "web": 1})))
    after = drawn(order, 0, 3000)
    np.testing.assert_array_equal(after[:1000], before[:1000])
    assert set(split_ids(after[1000:])[0].tolist()) == {0, 3}


def test_far_positions_cost_no_walk_and_are_right():
    sizes = {"a": 10**9, "b": 10**6}
    far = 9 * 10**11 // 2048 * 2048
    mixed, epochs = mixture(sizes, ((0, {"a": 3, "b": 1}),), block=2048).ids_at(np.arange(far, far + 4096))
    component, ids = split_ids(mixed)
    assert np.bincount(component).tolist() == [3072, 1024]
    assert epochs[component == 0][0] == far * 3 // 4 // 10**9
    assert epochs[component == 1][0] == far // 4 // 10**6
    assert ids.max() < 10**9
    assert np.unique(mixed).size > 4000


def test_ids_name_component_and_record():
    mixed = join_ids(np.array([0, 3]), np.array([7, 9]))
    assert mixed.tolist() == [7, 3 << 48 | 9]
    component, ids = split_ids(mixed)
    assert component.tolist() == [0, 3]
    assert ids.tolist() == [7, 9]


def test_position_of_inverts_locate():
    stages = [Stage(0, {"a": 1, "b": 2}), Stage(100, {"b": 1, "c": 1}), Stage(333, {"a": 1})]
    blocks = StagedBlocks(["a", "b", "c"], stages, 16, 5)
    component, offsets = blocks.locate(np.arange(700))
    for position in (0, 1, 15, 16, 99, 100, 101, 332, 333, 334, 699):
        assert blocks.position_of(int(component[position]), int(offsets[position])) == position
    assert blocks.position_of(2, 10**6) is None


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_components_from_a_position_are_those_of_locate_up_to_a_block_or_stage(data):
    firsts = [0, *sorted(data.draw(st.sets(st.integers(1, 100), max_size=3)))]
    stages = [Stage(first, {"a": 1, "b": data.draw(st.integers(1, 3))}) for first in firsts]
    blocks = StagedBlocks(["a", "b"], stages, data.draw(st.integers(8, 20)), 5)
    position, count = data.draw(st.integers(0, 150)), data.draw(st.integers(1, 40))
    found = blocks.components_from(position, count)
    np.testing.assert_array_equal(found, blocks.locate(np.arange(position, position + found.size))[0])
    stage = max(first for first in firsts if first <= position)
    left = blocks.block - (position - stage) % blocks.block
    later = [first - position for first in firsts if first > position]
    assert found.size == min([count, left, *later])


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_group_by_lists_where_each_value_is(values):
    found = [(value, here.tolist()) for value, here in group_by(np.array(values, np.int64))]
    assert found == [(value, [i for i, v in enumerate(values) if v == value]) for value in sorted(set(values))]


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_repeat_ends_when_every_component_was_read_in_full(num_epochs):
    order = mixture(num_epochs=num_epochs)
    assert order.total is not None
    component, ids = split_ids(drawn(order, 0, order.total))
    fullest = [np.sum(component == number) / size for number, size in enumerate(SIZES.values())]
    assert min(fullest) == num_epochs
    last = int(np.argmin(fullest))
    assert component[-1] == last
    for number, size in enumerate(SIZES.values()):
        assert np.unique(ids[component == number]).size == size


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_stop_ends_before_the_first_repetition(num_epochs):
    order = mixture(num_epochs=num_epochs, on_end="stop")
    assert order.total is not None
    endless = mixture()
    epochs = endless.ids_at(np.arange(order.total + 1))[1]
    assert epochs[:-1].max() == num_epochs - 1
    assert epochs[-1] == num_epochs
    with pytest.raises(IndexError, match=rf"\[0, {order.total}\)"):
        order.ids_at(np.array([order.total]))


def test_the_end_looks_at_all_stages():
    stages = [(0, {"books": 1}), (30, {"web": 1, "code": 1})]
    stop = mixture(stages=stages, num_epochs=1, on_end="stop")
    repeat = mixture(stages=stages, num_epochs=1)
    assert 30 + 600 - 64 <= stop.total <= 30 + 600 + 64  # code's 300 records end first; books never ended
    assert 30 + 2000 - 64 <= repeat.total <= 30 + 2000 + 64
    assert mixture(stages=[(0, {"books": 1}), (60, WEIGHTS)], num_epochs=1, on_end="stop").total == 50
    assert mixture(num_epochs=None).total is None


def test_stop_for_ever_contradicts_itself():
    with pytest.raises(SettingsError) as raised:
        mixture(num_epochs=None, on_end="stop")
    assert raised.value.setting == "on_end"
    assert str(raised.value) == (
        "on_end='stop' with num_epochs=None: a component without an end never stops the mixture. Pass a number of epochs, "
        "or on_end='repeat'."
    )


def test_components_out_of_range():
    with pytest.raises(SourceError, match="0 records"):
        mixture({"a": 0}, ((0, {"a": 1}),))
    assert mixture({"a": 2**48}, ((0, {"a": 1}),), num_epochs=1).total == 2**48
    with pytest.raises(SettingsError) as raised:
        mixture({"a": 5, "b": 2**48 + 1}, ((0, {"a": 1}),))
    assert raised.value.setting == "components"
    assert str(raised.value) == (
        "component 'b' has 281474976710657 records; a mixture takes at most 2**48 per component."
    )


# --- golden values ----------------------------------------------------------------------------------------------------


GOLDEN_COMPONENTS = [2, 0, 0, 1, 0, 2, 2, 0, 0, 2, 0, 0, 2, 2, 2]
GOLDEN_IDS = [44, 866, 681, 91, 562, 37, 46, 535, 937, 15, 313, 735, 8, 3, 22]


def test_the_algorithm_has_not_changed():
    """If this fails, saved states would continue with different records: raise MIXTURE_VERSION, and only then these."""
    order = mixture(stages=((0, WEIGHTS), (100, {"books": 1, "web": 1})))
    component, ids = split_ids(drawn(order, 95, 110))
    assert component.tolist() == GOLDEN_COMPONENTS
    assert ids.tolist() == GOLDEN_IDS


def test_config_is_json_and_distinguishes_mixtures():
    config = mixture().config()
    assert json.loads(json.dumps(config)) == config
    assert config["mixture"]["stages"] == [[0, 0, WEIGHTS]]
    assert config["mixture"]["components"] == [["web", 1000], ["code", 300], ["books", 50]]
    assert config["algorithm"] == EpochOrder(5, shuffle=False, seed=0, num_epochs=1).config()["algorithm"]
    assert mixture(shuffle=1).config()["shuffle"] == 1
    assert mixture(shuffle=True).config()["shuffle"] is True


# --- states ---------------------------------------------------------------------------------------------------------


def config_of(weights, sizes=SIZES, batch=10, **kwargs):
    stages = [Stage(step * batch, w, step) for step, w in parse_weights(weights, list(sizes))]
    return mixture(sizes, stages, **kwargs).config()["mixture"]


SAVED = config_of([(0, WEIGHTS), (50, {"web": 1}), (200, {"code": 1})])


@pytest.mark.parametrize(
    "weights",
    [
        [(0, WEIGHTS), (50, {"web": 1}), (200, {"code": 1})],
        [(0, WEIGHTS), (50, {"web": 7})],  # the same share
        [(0, WEIGHTS), (50, {"web": 1}), (100, {"books": 2, "web": 1})],  # a later stage, from here on
        [(0, WEIGHTS), (50, {"web": 1}), (100, {"new": 1}), (900, {"code": 1})],
    ],
)
def test_what_has_not_begun_is_free(weights):
    check_stages(SAVED, config_of(weights, {**SIZES, "new": 10}), 1000, step=100)


def test_before_the_first_record_everything_is_free():
    check_stages(SAVED, config_of({"books": 1}, block=32), 0)


def test_a_changed_weight_prints_the_stages_to_write():
    changed = {"web": 1, "code": 1}
    with pytest.raises(StateMismatchError) as raised:
        check_stages(config_of(WEIGHTS), config_of(changed), 1000, step=100)
    error = raised.value
    assert error.field == "mixture.stages[0]"
    assert error.saved == (0, WEIGHTS)
    assert error.current == (0, changed)
    text = error.remedy[error.remedy.index("weights=[") :]
    assert text == write_stages([(0, WEIGHTS), (100, changed)])
    repaired = config_of(eval(text.removeprefix("weights=")))
    check_stages(config_of(WEIGHTS), repaired, 1000, step=100)


@pytest.mark.parametrize(
    ("weights", "stages_to_write"),
    [
        (
            [(0, WEIGHTS), (50, {"code": 1}), (200, {"web": 1})],
            [(50, {"web": 1}), (100, {"code": 1}), (200, {"web": 1})],
        ),
        ([(0, WEIGHTS), (60, {"web": 1})], [(50, {"web": 1})]),
        ([(0, WEIGHTS)], [(50, {"web": 1}), (100, WEIGHTS)]),
        ([(0, WEIGHTS), (50, {"web": 1}), (70, {"code": 2})], [(50, {"web": 1}), (100, {"code": 2})]),
        ([(0, WEIGHTS), (200, {"code": 2})], [(50, {"web": 1}), (100, WEIGHTS), (200, {"code": 2})]),
    ],
)
def test_every_way_to_change_the_past_is_refused_and_repaired(weights, stages_to_write):
    with pytest.raises(StateMismatchError, match=r"mixture\.stages\[[12]\]") as raised:
        check_stages(SAVED, config_of(weights), 1000, step=100)
    expected = [(0, WEIGHTS), *stages_to_write]
    assert write_stages(expected) in raised.value.remedy
    check_stages(SAVED, config_of(expected), 1000, step=100)


@pytest.mark.parametrize(
    ("sizes", "weights", "field", "message"),
    [
        ({"web": 1000, "code": 300}, [(0, {"web": 5, "code": 3}), (50, {"web": 1})], "mixture.stages[0]", "books"),
        ({"code": 300, "web": 1000, "books": 50}, None, "mixture.components.web.number", "in the order"),
        ({"new": 5, **SIZES}, None, "mixture.components.web.number", "additions last"),
        ({**SIZES, "code": 301}, None, "mixture.components.code", "new name"),
    ],
)
def test_changed_components_are_named(sizes, weights, field, message):
    weights = weights or [(0, WEIGHTS), (50, {"web": 1})]
    with pytest.raises(StateMismatchError, match=message) as raised:
        check_stages(SAVED, config_of(weights, sizes), 1000, step=100)
    assert raised.value.field == field


def test_a_component_dropped_by_later_stages_must_stay_for_the_past():
    saved, current = config_of(WEIGHTS), config_of([(0, WEIGHTS), (100, {"web": 1})])
    current["components"] = [entry for entry in current["components"] if entry[0] != "books"]
    with pytest.raises(StateMismatchError) as raised:
        check_stages(saved, current, 1000, step=100)
    assert (raised.value.field, raised.value.saved, raised.value.current) == ("mixture.components.books", 50, None)
    assert raised.value.remedy == (
        "Delivered records came from it and must remain replayable: keep it among the components (in the order "
        "['web', 'code', 'books'], additions last) and leave it out of later stages."
    )


def test_a_component_that_no_begun_stage_uses_may_change():
    sizes = {**SIZES, "later": 9}
    saved = config_of([(0, WEIGHTS), (200, {"later": 1})], sizes)
    check_stages(saved, config_of([(0, WEIGHTS), (200, {"later": 1})], {**SIZES, "later": 10}), 1000)
    check_stages(saved, config_of(WEIGHTS, SIZES), 1000)


def test_identities_are_compared_by_field():
    identity = {"kind": "array_record", "records": 1000, "content": "abc"}
    saved = mixture(identities={**SIZES, "web": identity}).config()["mixture"]
    current = mixture(identities={**SIZES, "web": {**identity, "content": "abd"}}).config()["mixture"]
    with pytest.raises(StateMismatchError, match="'abc'") as raised:
        check_stages(saved, current, 1)
    assert raised.value.field == "mixture.components.web.content"
    without = mixture(identities={**SIZES, "web": {"kind": "array_record", "records": 1000}}).config()["mixture"]
    with_none = mixture(identities={**SIZES, "web": {**identity, "content": None}}).config()["mixture"]
    for one, other in ((without, with_none), (with_none, without)):
        with pytest.raises(StateMismatchError, match="missing") as raised:
            check_stages(one, other, 1)
        assert raised.value.field == "mixture.components.web.content"


@pytest.mark.parametrize(
    ("name", "kwargs"), [("block", {"block": 32}), ("on_end", {"on_end": "stop", "num_epochs": 1})]
)
def test_block_and_end_must_match(name, kwargs):
    saved, current = config_of(WEIGHTS), config_of(WEIGHTS, **kwargs)
    with pytest.raises(StateMismatchError) as raised:
        check_stages(saved, current, 10)
    assert (raised.value.field, raised.value.saved, raised.value.current) == (
        f"mixture.{name}",
        saved[name],
        kwargs[name],
    )
    assert raised.value.remedy == f"Pass {name}={saved[name]!r}, or start a new stream without the state."


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        {"stages": []},
        {**SAVED, "stages": [[0]]},
        {**SAVED, "components": 3},
        {**SAVED, "stages": [[0, 0, {"web": None}]]},
        {**SAVED, "stages": [[0, 0, {"web": "all"}]]},
        {**SAVED, "stages": [[0, 0, {"web": 0}]]},
        {**SAVED, "stages": [[0, 0, ["web"]]]},
        {**SAVED, "components": [["other", None], *SAVED["components"][1:]]},  # its identity would go unchecked
    ],
)
def test_a_broken_mixture_is_refused(broken):
    with pytest.raises(StateMismatchError, match="changed or damaged") as raised:
        check_stages(broken, SAVED, 10)
    assert (raised.value.field, raised.value.saved) == ("mixture", broken)
    assert raised.value.current == "version, block, on_end, components and stages"


def test_check_saved_passes_the_step():
    order = mixture(stages=[(0, {"web": 1})])
    with pytest.raises(StateMismatchError, match=r"\(7, \{'web': 1\}\)"):
        order.check_saved(config_of(WEIGHTS), 70, 7)
