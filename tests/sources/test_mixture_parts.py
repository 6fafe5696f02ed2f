"""Parts of components, components that repeat, and mixtures of mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed.sources import Memory, Mixture, Stream
from meshfeed.testing import check_resumable


def memory(first: int, count: int = 40) -> Memory:
    return Memory({"x": np.arange(first, first + count)})


def stream(first: int, count: int = 40) -> Stream:
    def open_lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, Any]]:
        for i in range(first + lane_index, first + count, num_lanes):
            yield {"x": np.int64(i)}

    return Stream(open_lane)


def feed_of(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    settings = {"global_batch_size": 4, "end": "pad", "mask_key": "mask", **settings}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **settings)


def values(source: Any, **settings: Any) -> list[int]:
    with feed_of(source, **settings) as feed:
        return [int(x) for batch in feed for x in np.asarray(batch["x"])[np.asarray(batch["mask"])]]


def test_take_of_random_access() -> None:
    mixture: Any = Mixture(
        {"a": memory(0), "b": memory(100)}, {"a": 1, "b": 1}, block=4, take={"a": 10, "b": 0.25}, on_end="stop"
    )
    found = values(mixture, shuffle=True)
    assert sorted(found) == [*range(10), *range(100, 110)]
    assert len(mixture) == 20
    with feed_of(mixture) as feed, pytest.raises(meshfeed.SourceError, match="which has 10 records"):
        feed.read([10])


def test_repeat_decides_when_the_mixture_ends() -> None:
    sources = {"a": memory(0, 20), "b": memory(100, 20)}
    found = values(Mixture(sources, {"a": 3, "b": 1}, block=4, repeat={"a": 3}))
    assert sum(x < 100 for x in found) == 60
    assert sorted(x for x in found if x >= 100) == [*range(100, 120)]
    assert sorted(x for x in found if x < 100) == sorted([*range(20)] * 3)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_parts_of_streams(lanes: int) -> None:
    mixture = Mixture(
        {"a": stream(0), "b": memory(100)}, {"a": 1, "b": 1}, block=4, take={"a": 10, "b": 10}, on_end="stop"
    )
    found = values(mixture, num_lanes=lanes)
    assert set(found) <= {*range(10), *range(100, 110)}
    assert len(found) == len(set(found)) >= 12
    streams = {"a": stream(0, 16), "b": stream(100, 16)}
    for times in (1, 3):  # a lane ends when the last component to complete is drawn again
        repeated = Mixture(streams, {"a": 1, "b": 1}, block=4, repeat={"a": times})
        counts = np.bincount(values(repeated, num_lanes=lanes))
        assert counts[:16].min() == counts[:16].max() - (counts[:16].max() > times) == times
        assert counts[100:116].min() >= times


def test_fewer_records_of_a_stream_than_lanes() -> None:
    mixture = Mixture({"a": stream(0), "b": memory(100)}, {"a": 1, "b": 1}, block=4, take={"a": 2})
    with pytest.raises(
        meshfeed.SettingsError, match=r"take\['a'\]=2 leaves no record for lane [23] of 4.*at least 4"
    ) as error:
        values(mixture, num_lanes=4)
    assert error.value.setting == "take"


def test_a_mixture_of_mixtures_is_one_mixture() -> None:
    inner = Mixture({"x": memory(0), "y": memory(100)}, {"x": 3, "y": 1}, block=8, take={"x": 20})
    nested = Mixture({"in": inner, "out": memory(200)}, {"in": 2, "out": 2}, block=8)
    flat = Mixture(
        {"in/x": memory(0), "in/y": memory(100), "out": memory(200)},
        {"in/x": 3, "in/y": 1, "out": 4},
        block=8,
        take={"in/x": 20},
    )
    assert values(nested, shuffle=True, seed=1) == values(flat, shuffle=True, seed=1)
    for start in range(0, 32, 8):
        block = values(nested)[start : start + 8]
        assert [sum(low <= x < low + 100 for x in block) for low in (0, 100, 200)] == [3, 1, 4]
    deeper = Mixture({"all": nested, "more": stream(300)}, {"all": 1, "more": 1}, block=16)
    assert list(deeper.components.sources) == ["all/in/x", "all/in/y", "all/out", "more"]


@pytest.mark.parametrize(("inner", "outer"), [(True, False), (5, True), (True, 1)])
def test_an_order_of_an_inner_mixture_that_would_not_apply_is_refused(inner: Any, outer: Any) -> None:
    def nested(of_inner: Any) -> Any:
        mixed = Mixture({"x": memory(0), "s": stream(100)}, {"x": 1, "s": 1}, block=4, shuffle=of_inner)
        return Mixture({"in": mixed, "out": stream(200)}, {"in": 1, "out": 1}, block=8, shuffle=outer)

    with pytest.raises(meshfeed.SettingsError, match="'in' is a mixture with shuffle=") as error:
        nested(inner)
    assert error.value.setting == "shuffle"
    assert values(nested(outer)) == values(nested(False))


def test_stages_of_both_mixtures_apply() -> None:
    inner = Mixture({"x": memory(0), "y": memory(100)}, [(0, {"x": 1}), (4, {"y": 1})], block=4)
    nested: Any = Mixture({"in": inner, "out": memory(200)}, [(0, {"in": 1}), (2, {"in": 1, "out": 3})], block=4)
    assert nested.components.stages == (
        (0, {"in/x": 1.0}),
        (2, {"in/x": 1.0, "out": 3}),
        (4, {"in/y": 1.0, "out": 3}),
    )


@pytest.mark.parametrize("first", [memory, stream])
def test_resume(first: Any) -> None:
    def feed() -> Any:
        inner = Mixture({"x": first(0), "y": memory(100)}, {"x": 1, "y": 1}, block=8, take={"x": 10}, repeat={"x": 2})
        mixture = Mixture({"in": inner, "out": memory(200)}, {"in": 1, "out": 1}, block=8)
        return feed_of(mixture, num_epochs=2, **({"num_lanes": 2} if first is stream else {"shuffle": True}))

    check_resumable(feed, max_steps=30, save_points=[3, 11])


def test_other_parts_are_refused() -> None:
    def feed(**parts: Any) -> Any:
        return feed_of(Mixture({"a": memory(0), "b": memory(100)}, {"a": 1, "b": 1}, block=4, **parts))

    with feed(take={"a": 10}) as first:
        next(first)
        state = first.get_state()
    for parts in ({}, {"take": {"a": 11}}, {"take": {"a": 10}, "repeat": {"b": 2}}):
        with feed(**parts) as other, pytest.raises(meshfeed.StateMismatchError, match=r"mixture\.components"):
            other.set_state(state)


def test_wrong_settings() -> None:
    sources = {"a": memory(0), "s": stream(0)}
    for parts, message in (
        ({"take": {"c": 1}}, "names among"), ({"take": 3}, "names among"), ({"take": {"a": 41}}, "from 1 to 40"),
        ({"take": {"a": 0}}, "from 1 to 40"), ({"take": {"a": 0.001}}, "at least one record"),
        ({"take": {"a": 1.5}}, "up to 1.0"), ({"take": {"s": 0.5}}, "length is unknown"),
        ({"repeat": {"a": 0}}, "at least 1"), ({"repeat": {"a": 0.001}}, "at least 1"), ({"take": {"a": True}}, "from 1"),
    ):  # fmt: skip
        with pytest.raises(meshfeed.SettingsError, match=message):
            Mixture(sources, {"a": 1, "s": 1}, **parts)  # type: ignore[arg-type]
    inner = Mixture({"x": memory(0)}, {"x": 1})
    with pytest.raises(meshfeed.SettingsError, match="Give them to that mixture"):
        Mixture({"in": inner}, {"in": 1}, take={"in": 3})
    with pytest.raises(meshfeed.SourceError, match="named twice"):
        Mixture({"in": inner, "in/x": memory(0)}, {"in": 1, "in/x": 1})
