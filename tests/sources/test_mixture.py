"""Mixtures through the feed: shares, order, resume with other stages and batch sizes, random access and lanes."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict

import jax
import numpy as np
import pytest

import meshfeed
from meshfeed import SettingsError, SourceError, StateMismatchError
from meshfeed._src.order.mixture import join_ids, split_ids
from meshfeed.sources import Map, Memory, Mixture, Stream
from meshfeed.testing import check_resumable

SIZES = {"web": 200, "code": 90, "books": 31}
WEIGHTS = {"web": 5, "code": 3, "books": 1}


def memory(name: str, size: int = 0) -> Memory:
    number, size = list(SIZES).index(name) if name in SIZES else 9, size or SIZES.get(name, 50)
    return Memory({"component": np.full(size, number, np.int32), "value": np.arange(size, dtype=np.int32)})


class Records(Stream):
    """A stream that is cut by taking every num_lanes-th record; with state, or without."""

    def __init__(self, name: str, size: int, *, stateful: bool, log: list | None = None) -> None:
        number = list(SIZES).index(name)

        def opened(lane_index: int, num_lanes: int, epoch: int = 0):
            if log is not None:
                log.append((name, lane_index, num_lanes, epoch))
            iterator = Counter(number, range(lane_index, size, num_lanes))
            return iterator if stateful else iter(list(iterator))

        super().__init__(opened, fingerprint={"name": name, "size": size})


class Counter:
    def __init__(self, number: int, values: range) -> None:
        self.number, self.values, self.next = number, values, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= len(self.values):
            raise StopIteration
        self.next += 1
        return {"component": np.int32(self.number), "value": np.int32(self.values[self.next - 1])}

    def get_state(self):
        return (self.next,)

    def set_state(self, state):
        assert isinstance(state, tuple), "tuples stay tuples"
        (self.next,) = state


def random_mixture(weights=WEIGHTS, names=("web", "code", "books"), **kwargs):
    return Mixture({name: memory(name) for name in names}, weights, block=30, **kwargs)


def stream_mixture(weights=WEIGHTS, *, kinds=("stateful", "plain", "random"), **kwargs):
    components = {}
    for name, kind in zip(SIZES, kinds, strict=True):
        components[name] = memory(name) if kind == "random" else Records(name, SIZES[name], stateful=kind == "stateful")
    return Mixture(components, weights, block=9, **kwargs)


def mesh(devices: int = 8, axes=("data",), shape=None):
    from jax.sharding import AxisType

    shape = shape or (devices,)
    return jax.make_mesh(
        shape, axes, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[: int(np.prod(shape))]
    )


def feed(source, *, batch=24, devices=4, **kwargs):
    settings = {"seed": 7, "prefetch": 0, **kwargs}
    if not hasattr(source, "bind"):
        settings.setdefault("shuffle", True)
    return meshfeed.MultiHostDataLoadIterator(source, mesh(devices), global_batch_size=batch, **settings)


def rows(feed_or_iterable, steps=None):
    out = []
    for step, batch in enumerate(feed_or_iterable):
        out.append(np.stack([np.asarray(batch["component"]), np.asarray(batch["value"])], axis=1))
        if steps is not None and step + 1 == steps:
            break
    return np.concatenate(out) if out else np.empty((0, 2), np.int32)


# --- random access --------------------------------------------------------------------------------------------------


def test_batches_hold_the_records_that_record_ids_names():
    with feed(random_mixture(), num_epochs=None) as stream:
        for step in range(12):
            ids = stream.record_ids(step)
            component, record_ids = split_ids(ids)
            got = rows([next(stream)])
            np.testing.assert_array_equal(got[:, 0], component)
            np.testing.assert_array_equal(got[:, 1], record_ids)
            again = stream.read(ids)
            np.testing.assert_array_equal(again["value"], record_ids)


def test_shares_hold_in_every_block():
    with feed(random_mixture(), batch=30, devices=2, num_epochs=None) as stream:
        for _ in range(8):
            counts = np.bincount(rows([next(stream)])[:, 0], minlength=3)
            assert counts.tolist() == [17, 10, 3]


@pytest.mark.parametrize("on_end", ["repeat", "stop"])
def test_resumable_at_every_step(on_end):
    assert check_resumable(lambda: feed(random_mixture(on_end=on_end), batch=48, end="pad", mask_key="real")) > 3


@pytest.mark.slow
def test_same_stream_on_other_devices_workers_and_threads():
    expected = rows(feed(random_mixture(), num_epochs=None), 10)
    for kwargs in ({"devices": 8}, {"devices": 1}, {"prefetch": 2}, {"num_threads": 3}, {"num_workers": 1}):
        with feed(random_mixture(), num_epochs=None, **kwargs) as other:
            np.testing.assert_array_equal(rows(other, 10), expected)


def test_the_end_is_that_of_the_slowest_component():
    got = rows(feed(random_mixture(), batch=8, end="pad", mask_key="real", devices=2, num_epochs=1))
    for number, (_, size) in enumerate(SIZES.items()):
        assert np.unique(got[got[:, 0] == number, 1]).size == size
    stopped = rows(feed(random_mixture(on_end="stop"), batch=8, devices=2))
    for number in range(3):
        own = stopped[stopped[:, 0] == number, 1]
        assert np.unique(own).size == own.size


def test_a_new_stage_from_here_on_continues_and_the_past_stays_replayable():
    first = feed(random_mixture(), num_epochs=None)
    past = rows(first, 5)
    state = json.loads(json.dumps(first.get_state()))
    changed = {"web": 1, "code": 0, "books": 1}
    with pytest.raises(StateMismatchError) as raised:
        feed(random_mixture(changed), num_epochs=None).set_state(state)
    assert raised.value.field == "mixture.stages[0]"
    assert "weights=[(0, {'web': 5, 'code': 3, 'books': 1}), (5, {'web': 1, 'books': 1})]" in raised.value.remedy
    written = eval(raised.value.remedy[raised.value.remedy.index("weights=[") + 8 :])
    second = feed(random_mixture(written), num_epochs=None)
    second.set_state(state)
    assert set(rows(second, 4)[:, 0].tolist()) == {0, 2}
    np.testing.assert_array_equal(
        second.read(np.concatenate([second.record_ids(s) for s in range(5)]))["value"], past[:, 1]
    )
    # the same stream as if the stages had been written from the start
    whole = rows(feed(random_mixture(written), num_epochs=None), 9)
    third = feed(random_mixture(written), num_epochs=None)
    third.set_state(second.get_state())
    np.testing.assert_array_equal(whole[:120], past)
    np.testing.assert_array_equal(rows(third, 3), rows(feed_at(written, 9), 3))


def feed_at(weights, steps):
    stream = feed(random_mixture(weights), num_epochs=None)
    for _ in range(steps):
        next(stream)
    return stream


def test_an_added_component_and_a_changed_batch_size_keep_begun_stages_where_they_were():
    weights = [(0, WEIGHTS), (4, {"web": 1}), (12, {"new": 1, "code": 1})]
    names = ("web", "code", "books", "new")
    first = feed(random_mixture(weights, names), num_epochs=None)
    past = rows(first, 6)
    state = first.get_state()
    # 6 steps of 24 are delivered and stage 1 began at record 96; from here on steps are 48 rows
    second = feed(random_mixture(weights, names), batch=48, num_epochs=None)
    second.set_state(state)
    rest = rows(second, 8)
    assert set(rest[: 6 * 48, 0].tolist()) == {0}
    assert set(rest[6 * 48 :, 0].tolist()) == {1, 9}
    own = np.concatenate([past, rest])
    web = own[own[:, 0] == 0, 1]
    assert np.unique(web[:200]).size == 200
    assert np.unique(web[200:]).size == web.size - 200 == 190
    resumed = feed(random_mixture(weights, names), batch=48, num_epochs=None)
    resumed.set_state(second.get_state())
    np.testing.assert_array_equal(
        np.concatenate([resumed.record_ids(s) for s in range(14)]),
        np.concatenate([second.record_ids(s) for s in range(14)]),
    )
    np.testing.assert_array_equal(split_ids(resumed.record_ids(2))[1], past[48:72, 1])


@pytest.mark.parametrize("times", [1, 2])
def test_a_component_may_be_added_below_functions(times):
    def over(mixture, added=1):
        for _ in range(times):
            mixture = Map(mixture, lambda record: {**record, "value": record["value"] + added})
        return mixture

    first = feed(over(random_mixture()), num_epochs=None)
    next(first)
    state = json.loads(json.dumps(first.get_state()))
    names, stages = ("web", "code", "books", "new"), [(0, WEIGHTS), (4, {"new": 1})]
    whole, resumed = (feed(over(random_mixture(stages, names)), num_epochs=None) for _ in range(2))
    resumed.set_state(state)
    np.testing.assert_array_equal(rows(resumed, 5), rows(whole, 6)[24:])
    changed = Mixture({"web": memory("web"), "code": memory("code", 91), "books": memory("books")}, WEIGHTS, 30)
    others = {"mixture.components.code.records": over(changed), "source.content": over(random_mixture(), 2)}
    for field, other in others.items():
        with pytest.raises(StateMismatchError) as raised:
            feed(other, num_epochs=None).set_state(state)
        assert raised.value.field.endswith(field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda: Mixture({"web": memory("web"), "code": memory("code", 91), "books": memory("books")}, WEIGHTS, 30),
         "mixture.components.code.records"),
        (lambda: Mixture({"code": memory("code"), "web": memory("web"), "books": memory("books")}, WEIGHTS, 30),
         "mixture.components.web.number"),
        (lambda: random_mixture({"web": 5, "code": 3, "books": 0}), "mixture.stages[0]"),
        (lambda: Mixture({name: memory(name) for name in SIZES}, WEIGHTS, block=60), "mixture.block"),
        (lambda: memory("web"), "source.kind"),
    ],
)  # fmt: skip
def test_a_changed_mixture_is_refused_by_field(change, field):
    stream = feed(random_mixture(), num_epochs=None)
    next(stream)
    state = stream.get_state()
    other = feed(change(), num_epochs=None)
    before = other.get_state()
    with pytest.raises(StateMismatchError) as raised:
        other.set_state(state)
    assert raised.value.field == field
    assert other.get_state() == before


def test_the_state_of_35_components_is_small():
    sources = {f"domain-{i:02}": memory("web") for i in range(35)}
    stream = feed(Mixture(sources, dict.fromkeys(sources, 1)), num_epochs=None)
    next(stream)
    assert len(json.dumps(stream.get_state())) < 6000


def test_read_refuses_ids_that_name_nothing():
    stream = feed(random_mixture())
    with pytest.raises(SourceError, match=r"component 3.*0 to 2"):
        stream.read([join_ids(3, 0)])
    with pytest.raises(SourceError, match="record 90 of component 'code', which has 90 records"):
        stream.read([join_ids(1, 90)])
    np.testing.assert_array_equal(stream.read([join_ids(1, 89), join_ids(0, 3)])["value"], [89, 3])


def test_components_with_unlike_records_are_named():
    wide = Memory({"component": np.zeros(50, np.int32), "value": np.zeros(50, np.int64)})
    with pytest.raises(SourceError, match=r"'code' and 'web' have unlike records: \['value'\] int64.*int32"):
        rows(feed(Mixture({"web": memory("web"), "code": wide}, {"web": 1, "code": 1}, block=30)), 2)
    other = Memory({"component": np.zeros(50, np.int32), "tokens": np.zeros(50, np.int32)})
    with pytest.raises(SourceError, match=r"'tokens'.*int32.* in 'code', .*'value'.* in 'web'"):
        rows(feed(Mixture({"web": memory("web"), "code": other}, {"web": 1, "code": 1}, block=30)), 2)


@pytest.mark.parametrize("container", [OrderedDict, lambda leaves: [leaves[0], leaves[1]]], ids=["order", "type"])
def test_components_with_the_same_leaves_in_unlike_containers_are_named(container):
    leaves = {1: np.zeros(50, np.int64), 0: np.zeros(50, np.int32)}  # a dict sorts its keys, an OrderedDict does not
    components = {"web": Memory(leaves), "code": Memory(container(leaves))}
    with pytest.raises(SourceError, match=r"unlike records: PyTreeDef\(.*\) in 'code', PyTreeDef\(.*\) in 'web'"):
        rows(feed(Mixture(components, {"web": 1, "code": 1}, block=30)), 2)


@pytest.mark.parametrize("wide", [0, 1])
def test_components_of_unlike_width_are_never_cut_to_one_another(wide):
    widths = {"web": 3 if wide == 0 else 2, "code": 3 if wide == 1 else 2}
    components = {name: Memory({"x": np.ones((50, width), np.float32)}) for name, width in widths.items()}
    with pytest.raises(
        SourceError, match=r"'code' and 'web' have unlike records: \['x'\] float32\[\d\].*float32\[\d\]"
    ):
        rows(feed(Mixture(components, {"web": 1, "code": 1}, block=30)), 2)


class Raw:
    """A source of bytes with a decoder that draws random numbers, and some bad records."""

    def __init__(self, size: int, bad: tuple[int, ...] = ()) -> None:
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, record_id):
        return self.decode(self.read_raw([record_id])[0], rng=np.random.default_rng(0))

    def read_raw(self, record_ids):
        return [int(i).to_bytes(4, "little") for i in record_ids]

    decode_batch = None

    def decode(self, record, rng):
        value = int.from_bytes(record, "little")
        if value in self.bad:
            raise ValueError(f"bad record {value}")
        return {"component": np.int32(5), "value": np.int32(rng.integers(1 << 30))}


def test_random_numbers_belong_to_the_record_whatever_is_read_with_it():
    def make(batch, **kwargs):
        return feed(Mixture({"web": memory("web"), "raw": Raw(64)}, {"web": 1, "raw": 1}, 16), batch=batch, **kwargs)

    expected = rows(make(32, num_epochs=2))
    assert np.unique(expected[expected[:, 0] == 5, 1]).size > 100, "every epoch draws anew"
    np.testing.assert_array_equal(rows(make(8, num_epochs=2))[: len(expected)], expected)


def test_a_bad_record_is_replaced_within_its_component():
    source = Mixture({"web": memory("web"), "raw": Raw(64, bad=(3, 17))}, {"web": 1, "raw": 1}, 16)
    stream = feed(source, batch=32, bad_records=meshfeed.SkipBad(max_fraction=0.5))
    got = rows(stream)
    planned = np.concatenate([stream.record_ids(step) for step in range(stream.step)])
    np.testing.assert_array_equal(got[:, 0] == 5, planned >> 48 == 1)
    bad = {entry[0] for entry in stream.get_state()["skipped"]["0"]}
    assert bad == {join_ids(1, 3), join_ids(1, 17)}


def test_columns_reach_the_components():
    from jax.sharding import NamedSharding, PartitionSpec

    def tokens(name):
        return Memory({"x": np.arange(60 * 8, dtype=np.int32).reshape(60, 8) + 1000 * len(name)})

    source = Mixture({"a": tokens("a"), "bb": tokens("bb")}, {"a": 1, "bb": 1}, 10)
    assert source.reads_columns
    sharding = NamedSharding(mesh(axes=("data", "seq"), shape=(2, 4)), PartitionSpec("data", "seq"))
    stream = meshfeed.MultiHostDataLoadIterator(source, sharding, global_batch_size=4, prefetch=0)
    component, ids = split_ids(stream.record_ids(0))
    expected = np.stack([np.arange(8) + 8 * i + 1000 * (c + 1) for c, i in zip(component, ids, strict=True)])
    np.testing.assert_array_equal(np.asarray(next(stream)["x"]), expected)
    part = source.read_batch(stream.record_ids(0), columns={"['x']": (slice(2, 5),)})
    np.testing.assert_array_equal(part["x"], expected[:, 2:5])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mixture({}, {}), SourceError, "at least one source"),
        (lambda: Mixture([memory("web")], {}), SourceError, "Expected a dict"),
        (lambda: Mixture({"": memory("web")}, {"": 1}), SourceError, "named ''"),
        (lambda: Mixture({"a": 3}, {"a": 1}), SourceError, "cannot feed from a int"),
        (lambda: Mixture({"a": iter([1])}, {"a": 1}), SourceError, "is host batches"),
        (lambda: Mixture({"a": memory("web"), "b": []}, {"a": 1, "b": 0}), SourceError, "component .b. has 0 records"),
        (
            lambda: Mixture({"a": Map(Map(stream_mixture(), dict), dict), "b": memory("web")}, {"a": 1, "b": 1}),
            SourceError,
            r"component 'a' is Map\(Map\(Mixture\(.*Apply the function to its components instead: Mixture\(\{name: Map\(",
        ),
        (lambda: random_mixture(on_end="die"), SettingsError, "'repeat' or 'stop'"),
        (lambda: random_mixture(shuffle=True), SettingsError, "pass shuffle= to the feed"),
        (lambda: Mixture({"a": memory("web")}, {"a": 1}, block=0), SettingsError, "block=0"),
        (lambda: Mixture({"a": memory("web")}, {"a": 1}, block=True), SettingsError, "block=True"),
        (lambda: random_mixture({"web": 1000, "code": 1}), SettingsError, "never get a record"),
        (lambda: random_mixture({"web": 5, "code": 3}), SettingsError, "leaves out the component 'books'"),
        (
            lambda: stream_mixture({"code": 1}),
            SettingsError,
            "leaves out the components 'web', 'books', .*'web': 1, 'code'",
        ),
        (lambda: stream_mixture(shuffle=-1), SettingsError, "shuffle=-1"),
        (lambda: feed(random_mixture(on_end="stop"), num_epochs=None), SettingsError, "never stops"),
        (lambda: feed(stream_mixture(on_end="stop"), num_epochs=None), SettingsError, "never stops"),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_component_is_left_out_on_purpose_by_weight_0_or_until_a_later_stage(caplog):
    weights = {"web": 5, "code": 3, "books": 0}
    with feed(random_mixture(weights), num_epochs=None) as stream:
        assert set(rows(stream, 4)[:, 0].tolist()) == {0, 1}
    stages = [(0, {"web": 5, "code": 3}), (2, {"books": 1})]
    with feed(random_mixture(stages), num_epochs=None) as stream:
        assert set(rows(stream, 2)[:, 0].tolist()) == {0, 1}
        assert set(rows(stream, 2)[:, 0].tolist()) == {2}
    assert not caplog.records
    random_mixture([(0, {"web": 5}), (2, {"code": 1})])
    assert "no stage of weights names the component 'books'" in caplog.text


# --- lanes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("stateful", "plain", "random"), ("plain", "plain", "plain")])
@pytest.mark.parametrize("on_end", ["repeat", "stop"])
def test_lanes_are_resumable_at_every_step(kinds, on_end):
    def make():
        return feed(stream_mixture(kinds=kinds, on_end=on_end), num_lanes=12, end="pad", mask_key="real")

    assert check_resumable(make, save_points=[1, 2, 5, 9]) >= 4


def test_lanes_hold_the_shares_and_lose_nothing():
    with feed(stream_mixture(), num_lanes=12, num_epochs=None) as stream:
        got = rows(stream, 90).reshape(90, 12, 2, 2).swapaxes(0, 1).reshape(12, 180, 2)
    for lane_index, lane in enumerate(got):
        for block in lane.reshape(-1, 9, 2):
            assert np.bincount(block[:, 0], minlength=3).tolist() == [5, 3, 1]
        for number, size in enumerate(SIZES.values()):
            own = lane[lane[:, 0] == number, 1]
            mine = np.arange(lane_index, size, 12)
            for start in range(0, own.size - mine.size + 1, mine.size):
                np.testing.assert_array_equal(np.sort(own[start : start + mine.size]), mine)


@pytest.mark.slow
def test_lanes_do_not_depend_on_devices_threads_workers_or_batch_size():
    expected = rows(feed(stream_mixture(), num_lanes=12, num_epochs=None), 20).reshape(20, 12, 2, 2)
    for kwargs in ({"devices": 8}, {"num_threads": 3}, {"num_workers": 1}, {"prefetch": 2}):
        with feed(stream_mixture(), num_lanes=12, num_epochs=None, **kwargs) as other:
            np.testing.assert_array_equal(rows(other, 20).reshape(20, 12, 2, 2), expected)
    wide = rows(feed(stream_mixture(), batch=48, num_lanes=12, num_epochs=None), 10).reshape(10, 12, 4, 2)
    np.testing.assert_array_equal(wide.swapaxes(0, 1).reshape(12, 40, 2), expected.swapaxes(0, 1).reshape(12, 40, 2))


def test_lanes_end_like_their_components():
    repeat = rows(feed(stream_mixture(), num_lanes=4, batch=8, end="pad", mask_key="real"))
    for number, size in enumerate(SIZES.values()):
        assert np.unique(repeat[repeat[:, 0] == number, 1]).size == size
    stop = stream_mixture(on_end="stop").bind(seed=0, num_epochs=2, position_of_step=lambda step: 0)
    for lane_index in range(4):
        lane = list(stop.open(lane_index, 4))
        finished = 0
        for number, size in enumerate(SIZES.values()):
            own = [int(record["value"]) for record in lane if record["component"] == number]
            counts = np.bincount(np.array(own, int) // 4, minlength=len(range(lane_index, size, 4)))
            assert counts.max() <= 2
            finished += counts.min() == 2
        assert finished >= 1, "it stopped because a component was through"


def test_single_records_and_batches_are_the_same_stream():
    single, batched = stream_mixture().open(1, 4), stream_mixture().open(1, 4)
    one_by_one = list(single)
    taken = []
    while True:
        try:
            batch = batched.next_batch(5)
        except StopIteration:
            break
        taken += list(zip(batch["component"].tolist(), batch["value"].tolist(), strict=True))
    assert taken == [(int(r["component"]), int(r["value"])) for r in one_by_one]


class RaggedCounter(Counter):
    def __init__(self, number: int, values: range, leaves: tuple) -> None:
        super().__init__(number, values)
        self.leaves = leaves

    def __next__(self):
        value = self.number + int(super().__next__()["value"])
        record = {"text": "x" * (1 + value % 5), "tokens": np.full(value % 4, value, np.int32), "id": value}
        return {name: record[name] for name in self.leaves}


def ragged_mixture(leaves=("text", "tokens", "id")):
    def stream(first, size):
        def opened(lane_index, num_lanes):
            return RaggedCounter(first, range(lane_index, size, num_lanes), leaves)

        return Stream(opened, fingerprint=[first, size])

    at_random = [{"text": "y" * (i % 3), "tokens": np.full(i % 4, i, np.int32), "id": i} for i in range(100, 130)]
    parts = {"a": stream(0, 60), "b": stream(200, 50), "c": [{name: one[name] for name in leaves} for one in at_random]}
    return Mixture(parts, {"a": 3, "b": 2, "c": 1}, 12)


def sizes_of(record):
    return {"id": np.int32(record["id"]), "sizes": np.array([len(record["text"]), len(record["tokens"])], np.int32)}


def sizes_of_many(records):
    return {name: np.stack([sizes_of(record)[name] for record in records]) for name in ("id", "sizes")}


def joined_texts():
    others = [
        {"key": letter * count, "many": count} for letter, first in (("x", 1), ("y", 0)) for count in range(first, 6)
    ]
    joined = meshfeed.sources.Join(ragged_mixture(), others, key="text", other_key="key", into="found")
    return meshfeed.sources.Map(joined, lambda record: {"id": np.int32(record["id"]), "many": record["found"]["many"]})


RAGGED = {
    "map": lambda: meshfeed.sources.Map(ragged_mixture(), sizes_of),
    "batched map": lambda: meshfeed.sources.Map(ragged_mixture(), sizes_of_many, batched=True),
    "padded": lambda: meshfeed.sources.Padded(ragged_mixture(("tokens", "id")), {"tokens": 4}),
    "join": joined_texts,
}


@pytest.mark.parametrize("make", RAGGED.values(), ids=RAGGED)
def test_functions_of_a_mixture_of_streams_take_texts_and_arrays_of_any_length(make):
    def opened():
        return meshfeed.Feed(make(), mesh(1), global_batch_size=12, num_lanes=4, num_epochs=1)

    assert check_resumable(opened, save_points=[0, 3]) >= 3
    seen = []
    for batch in opened():
        ids = np.asarray(batch["id"]).tolist()
        texts = [i % 3 if 100 <= i < 200 else 1 + i % 5 for i in ids]
        tokens = [i % 4 for i in ids]
        if "sizes" in batch:
            assert np.asarray(batch["sizes"]).tolist() == [list(sizes) for sizes in zip(texts, tokens, strict=True)]
        if "many" in batch:
            assert np.asarray(batch["many"]).tolist() == texts
        if "tokens" in batch:
            assert np.asarray(batch["tokens"]).tolist() == [
                [i] * size + [0] * (4 - size) for i, size in zip(ids, tokens, strict=True)
            ]
        seen += ids
    stacked = meshfeed.Feed(ragged_mixture(("id",)), mesh(1), global_batch_size=12, num_lanes=4, num_epochs=1)
    assert seen == [int(i) for batch in stacked for i in np.asarray(batch["id"])]


def test_a_mixture_of_stored_records_is_the_same_mixture():
    for mixture in (stream_mixture(), ragged_mixture()):
        assert mixture.unconverted().fingerprint() == mixture.fingerprint()


@pytest.mark.parametrize("kind", ["random", "lanes"])
def test_a_stage_at_a_step_that_no_run_reaches_never_begins(kind):
    web = Records("web", 200, stateful=True) if kind == "lanes" else memory("web")
    parts, settings = {"web": web, "code": memory("code")}, {"num_lanes": 4} if kind == "lanes" else {}
    staged = Mixture(parts, [(0, {"web": 1, "code": 1}), (1 << 60, {"web": 1})], 8)
    plain = Mixture(parts, {"web": 1, "code": 1}, 8)
    assert (rows(feed(staged, **settings), 5) == rows(feed(plain, **settings), 5)).all()


def test_epochs_of_a_component_are_told_to_it():
    log: list = []
    source = Mixture(
        {"web": Records("web", 40, stateful=True, log=log), "code": memory("code")}, {"web": 1, "code": 1}, 8
    )
    rows(feed(source, num_lanes=2, batch=4, num_epochs=None, devices=2), 60)
    assert {entry[3] for entry in log if entry[1] == 0} >= {0, 1, 2}


def test_stop_iteration_of_close_does_not_end_the_lane():
    class Broken(Counter):
        def close(self):
            raise StopIteration

    web = Stream(lambda lane_index, num_lanes: Broken(0, range(8)))
    lane = Mixture({"web": web, "code": memory("code")}, {"web": 1, "code": 1}, 2).open(0, 1)
    with pytest.raises(SourceError, match="component 'web' raised StopIteration in close, in lane 0"):
        list(lane)


def test_random_access_components_of_lanes_are_shuffled_where_asked():
    def values(**kwargs):
        source = stream_mixture(**kwargs)
        got = rows(feed(source, num_lanes=2, batch=8, num_epochs=None, devices=2), 120)
        return got[got[:, 0] == 2, 1]

    plain, shuffled = values(), values(shuffle=True)
    assert sorted(plain[:31].tolist()) != plain[:31].tolist()  # two lanes, one after the other
    assert (shuffled[:31] != plain[:31]).any()
    assert np.unique(shuffled[:62]).size == 31


def test_stages_of_lanes_begin_at_their_step_and_survive_a_change_of_batch_size():
    weights = [(0, WEIGHTS), (6, {"code": 1}), (14, {"web": 1, "books": 1})]
    first = feed(stream_mixture(weights), num_lanes=12, num_epochs=None)
    got = rows(first, 8)
    assert set(got[: 6 * 24, 0].tolist()) == {0, 1, 2}
    assert set(got[6 * 24 :, 0].tolist()) == {1}
    second = feed(stream_mixture(weights), batch=48, num_lanes=12, num_epochs=None)
    second.set_state(json.loads(json.dumps(first.get_state())))
    got = rows(second, 8)
    assert set(got[: 6 * 48, 0].tolist()) == {1}
    assert set(got[6 * 48 :, 0].tolist()) == {0, 2}
    check_resumable(
        lambda: feed(stream_mixture(weights), num_lanes=12, num_epochs=None), max_steps=18, save_points=[5, 6, 7, 15]
    )


def test_a_changed_stage_of_lanes_is_refused_by_field_and_repaired():
    first = feed(stream_mixture(), num_lanes=12, num_epochs=None)
    rows(first, 3)
    other = feed(stream_mixture({"web": 0, "code": 1, "books": 0}), num_lanes=12, num_epochs=None)
    with pytest.raises(StateMismatchError, match=r"\(3, \{'code': 1\}\)") as raised:
        other.set_state(first.get_state())
    assert raised.value.field == "mixture.stages[0]"
    written = eval(raised.value.remedy[raised.value.remedy.index("weights=[") + 8 :])
    other = feed(stream_mixture(written), num_lanes=12, num_epochs=None)
    other.set_state(first.get_state())
    assert set(rows(other, 2)[:, 0].tolist()) == {1}
    other = feed(stream_mixture(shuffle=True), num_lanes=12, num_epochs=None)
    with pytest.raises(StateMismatchError, match=r"mixture\.shuffle"):
        other.set_state(first.get_state())


def test_a_component_without_records_in_a_lane_is_named():
    source = Mixture(
        {"web": Records("web", 100, stateful=True), "books": memory("books", 5)}, {"web": 1, "books": 1}, 8
    )
    with pytest.raises(SourceError, match="component 'books' of the mixture has no record in lane"):
        rows(feed(source, num_lanes=12, num_epochs=None), 4)


def test_a_failing_component_is_named():
    def opened(lane_index, num_lanes):
        yield {"component": np.int32(0), "value": np.int32(0)}
        raise OSError("disk on fire")

    source = Mixture({"web": Stream(opened), "code": memory("code")}, {"web": 1, "code": 1}, 8)
    retry = meshfeed.Retry(attempts=1)
    with pytest.raises(OSError, match="disk on fire") as raised:
        rows(feed(source, num_lanes=2, batch=4, num_epochs=None, devices=2, retry=retry), 20)
    assert any("component 'web'" in note for note in raised.value.__notes__)


def test_an_oserror_is_retried_from_the_last_record():
    failures = [7, 19]

    class Flaky(Counter):
        def __next__(self):
            if failures and self.number == 0 and self.next == failures[0]:
                failures.pop(0)
                raise OSError("for a moment")
            return super().__next__()

    def opened(lane_index, num_lanes):
        return Flaky(0, range(lane_index, 200, num_lanes))

    def make():
        return Mixture({"web": Stream(opened), "code": memory("code")}, {"web": 1, "code": 1}, 8)

    retry = meshfeed.Retry(attempts=3, initial_seconds=0)
    got = rows(feed(make(), num_lanes=2, batch=8, num_epochs=None, devices=2, retry=retry), 30)
    assert not failures
    np.testing.assert_array_equal(got, rows(feed(make(), num_lanes=2, batch=8, num_epochs=None, devices=2), 30))


def test_mixtures_travel_to_workers():
    for source in (random_mixture(), Mixture({"a": memory("web")}, {"a": 1})):
        copy = pickle.loads(pickle.dumps(source))
        assert len(copy) == len(source)
        ids = np.array([0, 5, 3])
        np.testing.assert_array_equal(copy.read_batch(ids)["value"], [0, 5, 3])


def test_stages_need_a_feed():
    with pytest.raises(SettingsError, match="only be opened by a feed"):
        stream_mixture([(0, WEIGHTS), (5, {"web": 1})]).open(0, 2)


def test_a_component_may_be_anything_with_open():
    class OnlyOpen:
        def open(self, lane_index, num_lanes):
            yield from Counter(0, range(lane_index, 90, num_lanes))

    source = Mixture({"web": OnlyOpen(), "code": memory("code")}, {"web": 1, "code": 1}, 8)
    assert check_resumable(lambda: feed(source, num_lanes=2, batch=8, devices=2), save_points=[3]) >= 1
