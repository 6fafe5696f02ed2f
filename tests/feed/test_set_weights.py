"""``feed.set_weights``: the batches are those of a feed whose mixture had the stages from the start."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import meshfeed
from meshfeed import SettingsError, StateMismatchError
from meshfeed.sources import Memory, Mixture, Stream, Tokens

TESTS = pathlib.Path(__file__).parent.parent
sys.path += [str(TESTS / "model"), str(TESTS / "multihost")]

import simulated_hosts  # noqa: E402
import source_jobs  # noqa: E402

from meshfeed.testing import fake_devices  # noqa: E402

NAMES = ("web", "code", "books")
WEIGHTS = {"web": 5, "code": 3, "books": 1}
KINDS = ["random", "shards", "affinity", "nested", "mapped", "mapped shards", "lanes", "mapped lanes"]
BATCH, STEPS = 8, 26
Weights = dict[str, float]
Stages = list[tuple[int, Weights]]


# ---------------------------------------------------------------------- feeds of every kind of mixture


class Counter:
    """Numbers of a lane, with a state."""

    def __init__(self, values: range, first: int) -> None:
        self._values, self._first, self._next = values, first, 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._values):
            raise StopIteration
        self._next += 1
        return {"tokens": np.array([self._first + self._values[self._next - 1]], np.int32)}

    def get_state(self) -> int:
        return self._next

    def set_state(self, state: int) -> None:
        self._next = state


def numbered(number: int, size: int) -> np.ndarray:
    return (1000 * number + np.arange(size)).astype(np.int32)[:, None]


def component(kind: str, number: int, folder: pathlib.Path) -> Any:
    size = (90, 64, 31)[number]
    if "shards" in kind or kind == "affinity":
        return Tokens(sorted((folder / NAMES[number]).glob("*.npy")), 1, next_token=False)
    if kind in ("lanes", "mapped lanes") and number != 1:
        stateful = number == 0

        def opened(lane_index: int, num_lanes: int) -> Iterator[Any]:
            lane = Counter(range(lane_index, size, num_lanes), 1000 * number)
            return lane if stateful else iter(list(lane))

        return Stream(opened, fingerprint={"number": number})
    return Memory({"tokens": numbered(number, size)})


def twice(record: Any) -> Any:
    return {"tokens": 2 * record["tokens"]}


def make_feed(kind: str, weights: Weights | Stages, folder: pathlib.Path, **options: Any) -> meshfeed.Feed:
    """A feed over a mixture of three components; ``nested`` has two of them in a mixture with stages of its own."""
    parts = {name: component(kind, number, folder) for number, name in enumerate(NAMES)}
    if kind == "nested":
        text = Mixture({"web": parts["web"], "books": parts["books"]}, [(0, {"web": 2, "books": 1}), (9, {"books": 1})])
        parts = {"text": text, "code": parts["code"]}
        weights = [(0, weights)] if isinstance(weights, dict) else weights
        weights = [
            (step, {"text": one.get("web", 0) + one.get("books", 0), "code": one.get("code", 0)})
            for step, one in weights
        ]
    source = Mixture(parts, weights, block=27)
    extra: dict[str, Any] = {"shuffle": True}
    if "shards" in kind or kind == "affinity":
        extra = {"shuffle": meshfeed.ShardShuffle(affinity=kind == "affinity"), "num_lanes": 4}
    if "lanes" in kind:
        extra = {"num_lanes": 4}
    if "mapped" in kind:
        source = meshfeed.sources.Map(source, twice)
    devices = options.pop("devices", jax.devices()[:8])
    mesh = jax.sharding.Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    given: dict[str, Any] = {"global_batch_size": BATCH, "seed": 3, "num_epochs": None, "timeout_seconds": 60}
    return meshfeed.Feed(source, mesh, **{**given, **extra, **options})


def as_given(kind: str, weights: Weights) -> Weights:
    if kind != "nested":
        return weights
    return {"text": weights.get("web", 0) + weights.get("books", 0), "code": weights.get("code", 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("tokens")
    for number, name in enumerate(NAMES):
        (made / name).mkdir()
        for shard, values in enumerate(np.array_split(numbered(number, (90, 64, 31)[number]), (9, 5, 2)[number])):
            np.save(made / name / f"{shard}.npy", values.reshape(-1).astype(np.uint16))
    return made


def rows(batch: Any) -> list[int]:
    return np.asarray(batch["tokens"])[:, 0].tolist()


def from_start(kind: str, stages: Stages, folder: pathlib.Path, steps: int = STEPS, **options: Any) -> list[list[int]]:
    with make_feed(kind, stages, folder, prefetch=0, **options) as feed:
        return [rows(batch) for batch in itertools.islice(feed, steps)]


# ---------------------------------------------------------------------- the stages that calls amount to


@dataclasses.dataclass
class Model:
    """The stages that a feed has after calls of ``set_weights``."""

    given: Stages
    added: Stages = dataclasses.field(default_factory=list)

    def set_weights(self, step: int, weights: Weights, from_step: int | None) -> None:
        first = step if from_step is None else from_step
        self.added = [*(stage for stage in self.added if stage[0] < step), (first, weights)]

    @property
    def stages(self) -> Stages:
        return sorted({**dict(self.given), **dict(self.added)}.items())


def some_weights() -> st.SearchStrategy[Weights]:
    weight = st.sampled_from([0, 1, 2, 0.5])
    return st.fixed_dictionaries(dict.fromkeys(NAMES, weight)).filter(lambda one: any(one.values()))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.integers(1, 6)),
        st.tuples(st.just("weights"), some_weights(), st.none() | st.integers(0, 9)),
        st.tuples(st.sampled_from(["resume", "start", "reset"])),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(data=st.data(), prefetch=st.sampled_from([0, 2]), later=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_stages_from_the_start(
    kind: str, folder: pathlib.Path, data: st.DataObject, prefetch: int, later: bool
) -> None:
    given_weights: Stages = [(0, WEIGHTS), *([(12, {"code": 1})] if later else [])]
    model = Model(given_weights)
    feed = make_feed(kind, given_weights, folder, prefetch=prefetch)
    pending: list[tuple[int, list[int]]] = []
    try:
        for action in data.draw(ACTIONS):
            match action:
                case ("next", count):
                    for _ in range(min(count, STEPS - feed.step)):
                        pending.append((feed.step, rows(next(feed))))
                case ("weights", weights, ahead):
                    from_step = None if ahead is None else feed.step + ahead
                    feed.set_weights(as_given(kind, weights), from_step=from_step)
                    model.set_weights(feed.step, weights, from_step)
                case ("start",):
                    feed.start()
                case ("resume",):  # in a feed with the weights of the beginning
                    state = json.loads(json.dumps(feed.get_state()))
                    feed.close()
                    feed = make_feed(kind, given_weights, folder, prefetch=prefetch)
                    feed.set_state(state)
                case _:
                    check(kind, model, folder, pending)
                    pending = []
                    feed.reset()
        pending += [(step, rows(next(feed))) for step in range(feed.step, STEPS)]
        check(kind, model, folder, pending)
        if "lanes" not in kind:
            with make_feed(kind, model.stages, folder) as other:
                for step in (0, 3, STEPS, STEPS + 40):
                    assert feed.record_ids(step).tolist() == other.record_ids(step).tolist()
    finally:
        feed.close()


def check(kind: str, model: Model, folder: pathlib.Path, found: list[tuple[int, list[int]]]) -> None:
    expected = from_start(kind, model.stages, folder)
    for step, batch in found:
        assert batch == expected[step], (step, model.stages)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_any_number_of_hosts(kind: str, folder: pathlib.Path) -> None:
    stages: Stages = [(0, WEIGHTS), (4, {"code": 2, "books": 1}), (13, {"web": 1, "books": 1})]
    expected = from_start(kind, stages, folder, 18)
    states = []
    for hosts, each in {1: 4, 2: 2, 4: 1}.items():
        found = play(hosts, each, lambda devices: first_run(kind, folder, devices))
        steps = source_jobs.join([steps for steps, _ in found])
        assert [values(step) for step in steps] == expected[:10], hosts
        states.append(source_jobs.merged([state for _, state in found]))
    assert len(set(states)) == 1 or "lanes" in kind  # plain lanes: their snapshots may be taken at other records
    for state, (hosts, each) in zip(states, {2: 2, 4: 1, 1: 4}.items(), strict=True):
        found = play(hosts, each, lambda devices, state=state: second_run(kind, folder, devices, state))
        assert [values(step) for step in source_jobs.join(found)] == expected[10:], hosts


@pytest.mark.parametrize("kind", ["random", "shards", "lanes"])
def test_a_host_outside_of_the_mesh_follows(kind: str, folder: pathlib.Path) -> None:
    def on_host(devices: Any) -> tuple[list[dict[int, str]], list[tuple[int, int]]]:
        here, positions = devices[0].client.process_index(), []
        steps: list[dict[int, str]] = []
        with make_feed(kind, WEIGHTS, folder, devices=devices[:4]) as feed:  # of hosts 0 and 1
            feed.start()
            for _ in range(8):
                if feed.step == 3:
                    feed.set_weights({"code": 1}, from_step=5)
                batch = next(feed)
                steps.append({} if here == 2 else source_jobs.rows_of(batch))
                positions.append((feed.step, feed.position))
        return steps, positions

    found = play(3, 2, on_host)
    assert found[2][1] == found[0][1] == [(step, BATCH * step) for step in range(1, 9)]
    steps = source_jobs.join([steps for steps, _ in found])
    assert [values(step) for step in steps] == from_start(kind, [(0, WEIGHTS), (5, {"code": 1})], folder, 8)


@pytest.mark.slow
def test_with_workers(folder: pathlib.Path) -> None:
    for kind in ("shards", "lanes"):
        with make_feed(kind, WEIGHTS, folder, num_workers=1) as feed:
            feed.start()
            found = [rows(next(feed)) for _ in range(3)]
            feed.set_weights({"code": 1}, from_step=4)
            found += [rows(next(feed)) for _ in range(5)]
        assert found == from_start(kind, [(0, WEIGHTS), (4, {"code": 1})], folder, 8)


def play(hosts: int, each: int, function: Callable[[Any], Any]) -> list[Any]:
    def on_host(host: int) -> Any:
        return function(fake_devices(hosts, each, this_process=host))

    with simulated_hosts.simulation():
        return simulated_hosts.run(hosts, on_host, 120.0)


def first_run(kind: str, folder: pathlib.Path, devices: Any) -> tuple[list[dict[int, str]], str]:
    """Steps 0 to 9, with a stage from step 4 on and one to come."""
    with make_feed(kind, WEIGHTS, folder, devices=devices) as feed:
        feed.start()
        steps = []
        for _ in range(10):
            if feed.step == 4:
                feed.set_weights(as_given(kind, {"web": 1}))
                feed.set_weights(as_given(kind, {"code": 2, "books": 1}))
            if feed.step == 7:
                feed.set_weights(as_given(kind, {"web": 1, "books": 1}), from_step=13)
            steps.append(source_jobs.rows_of(next(feed)))
        return steps, json.dumps(feed.get_state())


def second_run(kind: str, folder: pathlib.Path, devices: Any, state: str) -> list[dict[int, str]]:
    with make_feed(kind, WEIGHTS, folder, devices=devices) as feed:
        feed.set_state(json.loads(state))
        return [source_jobs.rows_of(batch) for batch in itertools.islice(feed, 8)]


def values(step: dict[int, str]) -> list[int]:
    return [int(step[row].partition("tokens=[")[2].removesuffix("];")) for row in sorted(step)]


# ---------------------------------------------------------------------- rules


def test_the_next_step_has_the_new_weights_whatever_was_read_ahead(folder: pathlib.Path) -> None:
    with make_feed("random", WEIGHTS, folder, prefetch=8) as feed:
        for _ in range(5):
            next(feed)
        feed.set_weights({"books": 1})
        assert {value // 1000 for value in rows(next(feed))} == {2}
        assert feed.config()["fingerprint"]["mixture"]["added"] == [[5, {"books": 1}]]


def test_a_later_call_replaces_a_stage_that_has_not_begun_and_keeps_the_others(folder: pathlib.Path) -> None:
    with make_feed("random", [(0, WEIGHTS), (20, {"web": 1})], folder) as feed:
        next(feed)
        feed.set_weights({"code": 1})
        next(feed)
        feed.set_weights({"books": 1}, from_step=9)
        feed.set_weights({"books": 1, "web": 1}, from_step=12)
        stages = feed.config()["fingerprint"]["mixture"]["stages"]
        assert [[step, weights] for step, _, weights in stages] == [
            [0, WEIGHTS],
            [1, {"code": 1}],
            [12, {"web": 1, "books": 1}],
            [20, {"web": 1}],
        ]


def test_a_reset_plays_the_same_stream_again(folder: pathlib.Path) -> None:
    with make_feed("lanes", WEIGHTS, folder) as feed:
        first = [rows(next(feed)) for _ in range(3)]
        feed.set_weights({"code": 1})
        first += [rows(next(feed)) for _ in range(3)]
        feed.reset()
        assert [rows(next(feed)) for _ in range(6)] == first
        assert rows({"tokens": feed.replay(4)["tokens"]}) == first[4]
        feed.reset()
        feed.set_weights(WEIGHTS)  # none has begun
        assert [rows(next(feed)) for _ in range(6)] == from_start("lanes", [(0, WEIGHTS)], folder, 6)


def test_a_state_of_before_has_the_weights_of_before(folder: pathlib.Path) -> None:
    with make_feed("random", WEIGHTS, folder) as feed:
        state = feed.get_state()
        next(feed)
        feed.set_weights({"code": 1})
        feed.set_state(state)
        assert [rows(next(feed)) for _ in range(4)] == from_start("random", [(0, WEIGHTS)], folder, 4)


def test_the_batch_size_may_change_before_a_stage_begins(folder: pathlib.Path) -> None:
    with make_feed("random", WEIGHTS, folder) as feed:
        next(feed)
        feed.set_weights({"code": 1}, from_step=3)
        state = feed.get_state()
    sizes = meshfeed.BatchSchedule([(0, 8), (1, 16)])
    with make_feed("random", WEIGHTS, folder, global_batch_size=16) as feed:
        feed.set_state(state)
        found = [rows(next(feed)) for _ in range(5)]
    stages = [(0, WEIGHTS), (3, {"code": 1.0})]
    assert found == from_start("random", stages, folder, 6, global_batch_size=sizes)[1:]


@pytest.mark.parametrize("kind", ["random", "lanes"])
@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"wiki": 1}, "unknown component 'wiki'"),
        ({"web": 0, "code": 0}, "no component with a weight above 0"),
        ({}, "no component with a weight above 0"),
        ({"web": -1}, "a weight is a finite number"),
        ({"web": float("nan")}, "a weight is a finite number"),
        ({"web": np.array(0.5)}, r"a weight is a finite number of at least 0. Pass .* float\(array\)"),
        ([(3, {"web": 1})], "the weights of one stage"),
        (None, "the weights of one stage"),
    ],
)
def test_wrong_weights_are_refused_and_change_nothing(
    kind: str, weights: Any, named: str, folder: pathlib.Path
) -> None:
    with make_feed(kind, WEIGHTS, folder) as feed:
        next(feed)
        state = feed.get_state()
        with pytest.raises(SettingsError, match=named) as caught:
            feed.set_weights(weights)
        assert caught.value.setting == "weights"
        assert feed.get_state() == state
        assert rows(next(feed)) == from_start(kind, [(0, WEIGHTS)], folder, 2)[1]


@pytest.mark.parametrize("from_step", [0, 2, -1, True, 1.5, "3"])
def test_a_wrong_or_delivered_first_step_is_refused(from_step: Any, folder: pathlib.Path) -> None:
    with make_feed("random", WEIGHTS, folder) as feed:
        for _ in range(3):
            next(feed)
        with pytest.raises(SettingsError, match=r"from_step=") as caught:
            feed.set_weights({"web": 1}, from_step=from_step)
        assert caught.value.setting == "from_step"


@pytest.mark.parametrize(("kind", "size"), [("random", 8), ("shards", 24)])
@pytest.mark.parametrize("restored", [False, True])
def test_a_padded_batch_stays_the_last(kind: str, size: int, restored: bool, folder: pathlib.Path) -> None:
    """With weights that it would have had more records with, no state of the feed could be restored."""
    short, longer = {"books": 1}, {"web": 1, "books": 1}
    options = {"num_epochs": 1, "end": "pad", "global_batch_size": size}
    given: Stages = [(0, WEIGHTS), (1, short)]
    with make_feed(kind, given, folder, **options) as feed:
        for _ in feed:
            pass
        state = feed.get_state()
        assert state["position"] % size
        if restored:
            feed.set_state(state)
        with pytest.raises(
            SettingsError, match=r"has ended with a padded batch, after \d+ records, and with these"
        ) as caught:
            feed.set_weights(longer)
        assert caught.value.setting == "weights"
        assert feed.get_state() == state
        feed.set_weights({"books": 2})  # with which it ends there too
        assert next(feed, None) is None
        with make_feed(kind, given, folder, **options) as other:
            other.set_state(feed.get_state())
            assert other.position == state["position"]


def test_a_block_that_is_too_small_is_named(folder: pathlib.Path) -> None:
    with (
        make_feed("random", WEIGHTS, folder) as feed,
        pytest.raises(SettingsError, match=r"block=27 is too small for the weight of 'books'"),
    ):
        feed.set_weights({"web": 1, "books": 0.001})


@pytest.mark.parametrize("kind", ["records", "view", "stream", "batches"])
def test_what_is_no_mixture_is_refused(kind: str) -> None:
    data = {"x": np.arange(32)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    source: Any = {
        "records": data,
        "view": meshfeed.sources.Subset(Mixture({"a": data}, {"a": 1}), slice(16)),
        "stream": Stream(lambda lane_index, num_lanes: ({"x": np.int32(i)} for i in range(8))),
        "batches": meshfeed.sources.HostBatches([{"x": np.arange(8)}] * 2),
    }[kind]
    with (
        meshfeed.Feed(source, mesh, global_batch_size=8) as feed,
        pytest.raises(SettingsError, match=r"has no weights\. It takes a feed over a Mixture") as caught,
    ):
        feed.set_weights({"a": 1})
    assert caught.value.setting == "weights"


def test_closed_and_failed_feeds_keep_their_error(folder: pathlib.Path) -> None:
    feed = make_feed("random", WEIGHTS, folder)
    feed.close()
    with pytest.raises(meshfeed.MeshfeedError, match="is closed"):
        feed.set_weights({"web": 1})

    def open_lane(lane_index: int, num_lanes: int) -> Any:
        raise PermissionError("no such bucket")

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    source = Mixture({"a": Stream(open_lane)}, {"a": 1})
    with meshfeed.Feed(source, mesh, global_batch_size=8, retry=meshfeed.Retry(attempts=1)) as feed:
        for call in (lambda: next(feed), lambda: feed.set_weights({"a": 2}), lambda: next(feed)):
            with pytest.raises(PermissionError):
                call()


@pytest.mark.parametrize("kind", ["random", "lanes"])
def test_with_epochs_the_new_weights_decide_the_end(kind: str, folder: pathlib.Path) -> None:
    stages: Stages = [(0, {"web": 1, "code": 1}), (3, {"code": 1})]
    expected = from_start(kind, stages, folder, 200, num_epochs=1)
    with make_feed(kind, stages[0][1] | {"books": 0}, folder, num_epochs=1) as feed:
        found = [rows(next(feed)) for _ in range(3)]
        feed.set_weights(stages[1][1])
        found += [rows(batch) for batch in feed]
    assert found == expected
    assert len(found) < 20


def test_weights_that_would_have_ended_the_mixture_before_are_refused(folder: pathlib.Path) -> None:
    with make_feed("random", WEIGHTS, folder, num_epochs=1) as feed:
        for _ in range(26):
            next(feed)
        with pytest.raises(SettingsError, match=r"read num_epochs=1 times already"):
            feed.set_weights({"code": 1})
        next(feed)


def test_of_lanes_such_weights_end_the_stream(folder: pathlib.Path) -> None:
    with make_feed("lanes", WEIGHTS, folder, num_epochs=1) as feed:
        for _ in range(26):  # code has been read in full
            next(feed)
        feed.set_weights({"code": 1})
        assert list(feed) == []


def test_after_the_end_new_weights_may_continue(folder: pathlib.Path) -> None:
    with make_feed("random", {"web": 0, "code": 1, "books": 0}, folder, num_epochs=1) as feed:
        steps = len([rows(batch) for batch in feed])
        feed.set_weights({"web": 1})
        found = [rows(batch) for batch in feed]
        assert {value // 1000 for batch in found for value in batch} == {0}
        assert (steps, feed.step) == (8, len(feed))


PADDED = {"num_epochs": 1, "end": "pad", "mask_key": "mask"}


CHANGES = [
    (WEIGHTS, [(26, {"code": 1})]),  # which has been read in full: the lanes end there
    ({"web": 0, "code": 0, "books": 1}, [(4, {"web": 1})]),  # in step 3 a lane has ended, which others go beyond
    ({"web": 0, "code": 0, "books": 1}, [(3, {"books": 2}), (4, {"web": 1}), (6, {"books": 1, "code": 1})]),
    (WEIGHTS, [(3, {"books": 1}), (5, {"code": 1}), (9, {"web": 1, "books": 1})]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("given", "changes"), CHANGES)
@pytest.mark.parametrize("end", ["pad", "drop"])
def test_past_steps_are_replayed_as_they_were_delivered(
    given: Weights, changes: list[tuple[int, Weights]], end: str, folder: pathlib.Path
) -> None:
    options = {**PADDED, "end": end, "mask_key": "mask" if end == "pad" else None}
    found: list[list[int]] = []
    states: list[Any] = []
    with make_feed("lanes", given, folder, **options) as feed:
        for step, weights in changes:
            for batch in itertools.islice(feed, step - feed.step):
                found.append(rows(batch))
                states.append(feed.get_state())
            feed.set_weights(weights)
            for number, batch in enumerate(found):
                assert rows(feed.replay(number)) == batch, (weights, number)
        found += [rows(batch) for batch in feed]
        for number, batch in enumerate(found):
            assert rows(feed.replay(number)) == batch, number
            for state in states[:number]:
                assert rows(feed.replay(number, state=state)) == batch, number
        feed.set_state(feed.get_state())
        assert [rows(feed.replay(number)) for number in range(len(found))] == found


@pytest.mark.parametrize(("given", "changes"), CHANGES)
@pytest.mark.parametrize("end", ["pad", "drop"])
def test_a_reset_plays_again_what_was_delivered_with_other_weights(
    given: Weights, changes: list[tuple[int, Weights]], end: str, folder: pathlib.Path
) -> None:
    options = {**PADDED, "end": end, "mask_key": "mask" if end == "pad" else None}
    with make_feed("lanes", given, folder, **options) as feed:
        found: list[list[int]] = []
        for step, weights in changes:
            found += [rows(batch) for batch in itertools.islice(feed, step - feed.step)]
            feed.set_weights(weights)
        before = json.loads(json.dumps(feed.get_state()))
        found += [rows(batch) for batch in feed]
        feed.reset()
        assert rows(feed.replay(len(found) - 1)) == found[-1]
        if before["step"] < len(found):
            assert rows(feed.replay(len(found) - 1, state=before)) == found[-1]
        assert [rows(batch) for batch in itertools.islice(feed, 3)] == found[:3]
        state = json.loads(json.dumps(feed.get_state()))
        assert state["meshfeed"] == 3
        feed.reset()
        assert [rows(batch) for batch in feed] == found
        assert feed.get_state()["meshfeed"] == 1, "all has been delivered again"
        feed.reset()
        feed.set_weights(given)
        assert [rows(batch) for batch in feed] == from_start("lanes", [(0, given)], folder, 200, **options)
    with make_feed("lanes", given, folder, **options) as feed:
        feed.set_state(state)
        assert [rows(batch) for batch in feed] == found[3:]
        damaged = {**state, "before_reset": {**state["before_reset"], "step": 1}}
        with pytest.raises(StateMismatchError, match=r"before_reset\.digest"):
            feed.set_state(damaged)


def test_after_a_reset_each_host_knows_the_ends_of_its_lanes(folder: pathlib.Path) -> None:
    given = {"web": 0, "code": 0, "books": 1}
    states: dict[int, Any] = {}
    both = threading.Barrier(2, timeout=60)

    def on_host(devices: Any) -> list[dict[int, str]]:
        with make_feed("lanes", given, folder, devices=devices, **PADDED) as feed:
            steps = [source_jobs.rows_of(batch) for batch in itertools.islice(feed, 4)]
            feed.set_weights({"web": 1})
            steps += [source_jobs.rows_of(batch) for batch in feed]
            feed.set_state(feed.get_state())  # of this host alone
            feed.reset()
            assert [source_jobs.rows_of(batch) for batch in itertools.islice(feed, 2)] == steps[:2]
            states[devices[0].client.process_index()] = feed.get_state()
            both.wait()
            feed.set_state(meshfeed.merge_states(list(states.values())))
            assert [source_jobs.rows_of(batch) for batch in feed] == steps[2:]
            return steps

    expected = [values(step) for step in source_jobs.join(play(2, 4, on_host))]
    with make_feed("lanes", given, folder, **PADDED) as feed:
        feed.set_state(meshfeed.merge_states(list(states.values())))
        assert [rows(batch) for batch in feed] == expected[2:]


def test_a_replay_from_a_state_of_other_weights_is_refused(folder: pathlib.Path) -> None:
    """Its lanes are not where those of this feed were; a state of before the weights differ is as good as one of its own."""
    with make_feed("lanes", WEIGHTS, folder) as feed:
        next(feed)
        state = feed.get_state()
        feed.set_weights({"web": 1})
        next(feed)
        other = feed.get_state()
        feed.set_state(state)
        feed.set_weights({"code": 1})
        found = [rows(next(feed)) for _ in range(3)]
        assert rows(feed.replay(3, state=state)) == found[2]
        with pytest.raises(StateMismatchError, match=r"stages\[1\].*'web': 1.*'code': 1.*Pass a state of this feed"):
            feed.replay(3, state=other)


def test_lanes_read_ahead_to_an_end_that_weights_put_off_still_count(folder: pathlib.Path) -> None:
    """Hosts learn of an end some steps before it, with the window that has it."""

    def on_host(devices: Any) -> tuple[list[tuple[int, int]], Any]:
        with make_feed("lanes", {"web": 1, "code": 0, "books": 0}, folder, devices=devices, **PADDED) as feed:
            for _ in range(10):
                next(feed)
            feed.set_weights({"code": 1})
            return [(feed.step, feed.position) for _ in feed], feed.get_state()

    found = play(2, 4, on_host)
    assert found[0][0] == found[1][0] == [(step, BATCH * step) for step in range(11, 19)]
    merged = meshfeed.merge_states([state for _, state in found])
    assert merged["position"] == sum(lane["records"] for lane in merged["lanes"].values())


def test_a_replay_needs_to_know_which_lanes_have_ended(folder: pathlib.Path) -> None:
    states: dict[int, Any] = {}
    both = threading.Barrier(2, timeout=60)

    def merged(host: int, state: Any) -> Any:
        states[host] = state
        both.wait()
        return meshfeed.merge_states(list(states.values()))

    def on_host(devices: Any) -> None:
        with make_feed("lanes", {"web": 0, "code": 0, "books": 1}, folder, devices=devices, **PADDED) as feed:
            last = [feed.replay(3) for _ in feed][-1]
            state = feed.get_state()
            assert feed.position == 31
            feed.set_state(state)
            if "3" in state["lanes"]:  # the lane that has ended
                assert rows(feed.replay(3)) == rows(last)
            else:
                with pytest.raises(StateMismatchError, match=r"all lanes, some of which have ended.*merge_states"):
                    feed.replay(3)
            feed.set_state(merged(devices[0].client.process_index(), state))
            assert rows(feed.replay(3)) == rows(last)

    play(2, 4, on_host)


def test_the_structure_is_that_of_components_with_a_weight(folder: pathlib.Path) -> None:
    """A component may have no records as long as it has no weight."""
    empty = Stream(lambda lane_index, num_lanes: iter(()), fingerprint={"number": 0})
    parts = {"empty": empty, "code": component("lanes", 1, folder), "books": component("lanes", 2, folder)}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    weights: Stages = [(0, {"empty": 1}), (2, {"code": 1}), (4, {"empty": 1})]
    with meshfeed.Feed(Mixture(parts, weights, block=8), mesh, global_batch_size=8, num_lanes=4) as feed:
        with pytest.raises(meshfeed.SourceError, match="'empty' of the mixture has no record"):
            _ = feed.element_spec
        feed.set_weights({"books": 1})
        assert feed.element_spec["tokens"].shape == (8, 1)
        next(feed)
        next(feed)
        assert feed.element_spec["tokens"].shape == (8, 1)
        feed.set_weights({"empty": 1}, from_step=3)
        next(feed)
        with pytest.raises(meshfeed.SourceError, match="'empty' of the mixture has no record"):
            _ = feed.element_spec
        feed.set_weights({"code": 1, "books": 1})
        assert feed.element_spec["tokens"].shape == (8, 1)


@pytest.mark.parametrize(
    "added",
    [
        5,
        [[1]],
        [[1, {"web": -1}]],
        [[True, {"web": 1}]],
        [[2, {"web": 1}], [1, {"web": 1}]],
        [[1, {"wiki": 1}]],
        [[1, {"web": 1, "books": 0.0001}]],
    ],
)
@pytest.mark.parametrize("kind", ["random", "lanes"])
def test_damaged_stages_in_a_state_are_refused(kind: str, added: Any, folder: pathlib.Path) -> None:
    with make_feed(kind, WEIGHTS, folder) as feed:
        next(feed)
        feed.set_weights({"web": 1})
        next(feed)
        state = json.loads(json.dumps(feed.get_state()))
        state["fingerprint"]["mixture"]["added"] = added
        with pytest.raises(StateMismatchError, match=r"mixture\.(added|stages)"):
            feed.set_state(state)


def test_files_are_fetched_ahead_by_the_new_weights(tmp_path: pathlib.Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    parts: dict[str, Any] = {}
    cache = meshfeed.ShardCache(tmp_path / "cache")
    for number, name in enumerate(("a", "b")):
        for shard in range(2):
            values = np.arange(64, dtype=np.uint16) + 100 * number
            memory.pipe(f"/set_weights/{name}{shard}.bin", values.tobytes())
        urls = [f"memory://set_weights/{name}{shard}.bin" for shard in range(2)]
        parts[name] = Tokens(urls, 1, next_token=False, dtype=np.uint16, cache=cache)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    ahead: list[str] = []
    cat_file = type(memory).cat_file

    def cat(self: Any, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        if "ahead" in threading.current_thread().name:
            ahead.append(path.rsplit("/", 1)[1])
        return cat_file(self, path, start, end, **options)

    type(memory).cat_file = cat
    try:
        source = Mixture(parts, {"a": 1, "b": 0}, block=8)
        with meshfeed.Feed(source, mesh, global_batch_size=8, num_epochs=None, prefetch=0) as feed:
            for _ in range(6):
                next(feed)
            assert not [name for name in ahead if name.startswith("b")]
            feed.set_weights({"a": 1, "b": 1}, from_step=8)
            next(feed)
            next(feed)  # nothing of b is needed yet
            until = threading.Event()
            for _ in range(600):
                if {"b0.bin", "b1.bin"} <= set(ahead):
                    break
                until.wait(0.05)
            assert {"b0.bin", "b1.bin"} <= set(ahead)
    finally:
        type(memory).cat_file = cat_file
        memory.rm("/set_weights", recursive=True)
