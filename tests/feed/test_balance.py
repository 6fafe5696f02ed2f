"""balance= of the feed: the same rows per step, placed so that shards cost the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed.sources import Map, Memory, Mixture, Packed, Stream
from meshfeed.testing import check_resumable

RNG = np.random.default_rng(0)
DOCUMENTS = [np.arange(1, n + 1) for n in np.minimum(RNG.lognormal(2.5, 1.2, 1500).astype(int) + 1, 300)]
PACKED = Packed(DOCUMENTS, 64, method="fit", block=500)


def feed_of(source: Any = PACKED, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    settings = {"global_batch_size": 64, "shuffle": True, "seed": 3, "num_epochs": 2, **settings}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **settings)


def rows_of(feed: Any) -> list[np.ndarray]:
    with feed:
        return [np.concatenate([np.asarray(leaf) for leaf in batch.values()], axis=1) for batch in feed]


def cost(row: np.ndarray) -> float:
    segments = row[64:128]  # tokens, segment_ids, positions in the order of their names
    return float((np.bincount(segments)[1:].astype(float) ** 2).sum())


def attention(lengths: np.ndarray) -> float:
    return float((lengths.astype(float) ** 2).sum())


@pytest.mark.parametrize("balance", ["attention", attention, "tokens"])
def test_a_step_keeps_its_rows(balance: Any) -> None:
    usual, found = rows_of(feed_of()), rows_of(feed_of(balance=balance))
    assert len(usual) == len(found) > 5
    for before, after in zip(usual, found, strict=True):
        assert sorted(map(bytes, before)) == sorted(map(bytes, after))
    moved = [not np.array_equal(before, after) for before, after in zip(usual, found, strict=True)]
    assert all(moved) or balance == "tokens"


def test_shards_cost_the_same() -> None:
    with feed_of() as feed, feed_of(balance="attention") as balanced:
        for before, after in zip(feed, balanced, strict=True):
            spreads = []
            for batch in (before, after):
                segments = np.asarray(batch["segment_ids"])
                costs = np.array([(np.bincount(row)[1:].astype(float) ** 2).sum() for row in segments])
                sums = costs.reshape(8, 8).sum(axis=1)
                spreads.append(sums.max() / sums.mean())
            assert spreads[1] <= min(1.03, spreads[0])


def test_record_ids_are_in_row_order() -> None:
    with feed_of(balance="attention") as feed:
        for step in range(6):
            batch = jax.tree.map(np.asarray, next(feed))
            for name, leaf in feed.read(feed.record_ids(step)).items():
                np.testing.assert_array_equal(leaf, batch[name])


def test_the_order_does_not_depend_on_the_mesh_or_the_way_to_read() -> None:
    usual = rows_of(feed_of(balance="attention"))
    two = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with meshfeed.MultiHostDataLoadIterator(
        PACKED, two, global_batch_size=64, shuffle=True, seed=3, num_epochs=2, balance="attention", num_threads=2
    ) as feed:
        for batch, wanted in zip(feed, usual, strict=True):
            np.testing.assert_array_equal(
                np.asarray(batch["tokens"]), wanted[:, list(batch).index("tokens") * 64 :][:, :64]
            )


def test_states_stay_as_they_are() -> None:
    with feed_of(balance="attention") as balanced, feed_of() as plain:
        next(balanced)
        next(plain)
        assert balanced.get_state() == plain.get_state()
        plain.set_state(balanced.get_state())
        assert balanced.config()["balance"] == "attention"
    check_resumable(lambda: feed_of(balance=attention, end="pad", mask_key="mask"), max_steps=12, save_points=[2, 9])


def test_padding_stays_at_the_end() -> None:
    with feed_of(balance="attention", end="pad", mask_key="mask") as feed:
        *_, last = [jax.tree.map(np.asarray, batch) for batch in feed]
    real = int(last["mask"].sum())
    assert 0 < real < 64
    assert last["mask"][:real].all()
    assert (last["segment_ids"][:real, 0] == 1).all()
    assert not last["segment_ids"][real:].any()


class Known:
    """Records of one shape, with lengths."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, record_id: int) -> dict[str, Any]:
        return {"x": np.int64(record_id)}

    def lengths(self) -> np.ndarray:
        return np.arange(640) % 37


def test_other_sources_with_lengths() -> None:
    with feed_of(Known(), balance="tokens") as feed:
        for batch in feed:
            sums = (np.asarray(batch["x"]) % 37).reshape(8, 8).sum(axis=1)
            assert sums.max() <= 1.03 * sums.mean()
    mixture = Mixture({"a": PACKED, "b": Packed(DOCUMENTS[:700], 64)}, {"a": 3, "b": 1}, block=8)
    for source in (mixture, Map(mixture, lambda record: {"tokens": record["tokens"]})):
        with feed_of(source, num_epochs=1) as usual, feed_of(source, num_epochs=1, balance="attention") as balanced:
            for step in range(3):
                assert sorted(usual.record_ids(step)) == sorted(balanced.record_ids(step))
                assert list(usual.record_ids(step)) != list(balanced.record_ids(step))


def test_wrong_settings() -> None:
    for value in ("flops", 3, True):
        with pytest.raises(meshfeed.SettingsError, match="balance"):
            feed_of(balance=value)
    with pytest.raises(meshfeed.SettingsError, match="which a source of kind 'Memory' does not provide"):
        feed_of(Memory({"x": np.arange(640)}), balance="tokens")
    with pytest.raises(meshfeed.SettingsError, match="random-access source"):
        feed_of(Stream(lambda lane_index, num_lanes: iter([])), balance="tokens", shuffle=False)
    with pytest.raises(meshfeed.SettingsError, match="returned -1"), feed_of(balance=lambda lengths: -1) as feed:
        next(feed)
    for value in (None, "much", np.arange(3), float("nan")):
        wrong = feed_of(balance=lambda _, value=value: value)
        with pytest.raises(meshfeed.SettingsError, match="one finite number of at least 0"), wrong as feed:
            next(feed)
    mixture = Mixture({"a": Memory({"x": np.arange(64)})}, {"a": 1}, block=8)
    with (
        pytest.raises(meshfeed.SettingsError, match="component 'a' does not know"),
        feed_of(mixture, balance="tokens") as feed,
    ):
        next(feed)
