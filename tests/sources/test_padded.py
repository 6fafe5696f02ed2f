"""Padded with a length for each leaf, against a definition by hand."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed._src.base.rng import philox
from meshfeed.sources import Concat, Map, Memory, Mixture, Padded, Stream, Subset, Zip
from meshfeed.testing import check_resumable

RNG = np.random.default_rng(0)
RECORDS = [
    {
        "chosen": RNG.integers(1, 99, n, np.int32),
        "rejected": RNG.integers(1, 99, m, np.int32),
        "images": RNG.integers(1, 9, (k, 2, 2)).astype(np.uint8),
        "id": np.int32(i),
    }
    for i, (n, m, k) in enumerate(zip(RNG.integers(0, 20, 40), RNG.integers(0, 30, 40), RNG.integers(0, 4, 40), strict=True))
]  # fmt: skip
LENGTHS = {"chosen": 20, "rejected": 30, "images": 4}


def check_batch(batch: dict[str, np.ndarray], lengths: dict[str, int], pad_value: int = 0) -> list[int]:
    """Every row is its record; returns the ids."""
    assert batch.keys() == {"id", *lengths, *(f"{name}_mask" for name in lengths)}
    for row, record_id in enumerate(batch["id"].tolist()):
        for number, (name, length) in enumerate(lengths.items()):
            leaf = RECORDS[record_id][name][:length]
            assert batch[name].dtype == leaf.dtype
            assert batch[name].shape[1:] == (length, *leaf.shape[1:])
            np.testing.assert_array_equal(batch[name][row, : len(leaf)], leaf)
            assert (batch[name][row, len(leaf) :] == (0 if number else pad_value)).all()
            assert batch[f"{name}_mask"][row].tolist() == [i < len(leaf) for i in range(length)]
    return batch["id"].tolist()


def feed_of(source: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(source, mesh, global_batch_size=8, num_epochs=2)


def test_each_leaf_has_its_own_length_and_mask() -> None:
    with feed_of(Padded(RECORDS, LENGTHS, pad_value=-1)) as feed:
        seen = [i for batch in feed for i in check_batch(jax.tree.map(np.asarray, batch), LENGTHS, -1)]
    assert seen == [*range(40)] * 2
    check_resumable(lambda: feed_of(Padded(RECORDS, LENGTHS)), save_points=[3])


def test_streams_pickles_and_no_masks() -> None:
    stream = Padded(Stream(lambda lane_index, num_lanes: iter(RECORDS)), LENGTHS)
    check_batch(stream.open(0, 1).next_batch(40), LENGTHS)  # pyright: ignore[reportAttributeAccessIssue]
    again = pickle.loads(pickle.dumps(Padded(RECORDS, {"chosen": 3, "rejected": 2, "images": 1}, long="truncate")))
    check_batch(again.read_batch([3, 9, 4]), {"chosen": 3, "rejected": 2, "images": 1})
    assert Padded(RECORDS, LENGTHS, mask_key=None).read_batch([0]).keys() == RECORDS[0].keys()  # type: ignore[union-attr]


def test_an_empty_list_has_the_dtype_of_the_other_records() -> None:
    records = [{"tokens": [1, 2], "boxes": [[1.0, 2.0]]}, {"tokens": [], "boxes": []}, {"tokens": [], "boxes": []}]
    source: Any = Padded(records, {"tokens": 3, "boxes": 2})
    batch = source.read_batch([1, 0])
    assert (batch["tokens"].dtype, batch["tokens"].tolist()) == (np.int64, [[0, 0, 0], [1, 2, 0]])
    assert batch["boxes"].tolist() == [[[0, 0], [0, 0]], [[1, 2], [0, 0]]]
    alone = source.read_batch([1, 2])
    assert {name: (leaf.dtype, leaf.shape) for name, leaf in alone.items()} == {
        name: (leaf.dtype, leaf.shape) for name, leaf in batch.items()
    }
    assert not any(leaf.any() for leaf in alone.values())
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with meshfeed.Feed(source, mesh, global_batch_size=1) as feed:
        assert [np.asarray(batch["tokens_mask"]).sum() for batch in feed] == [2, 0, 0]
    buckets = meshfeed.sources.Buckets([{"tokens": record["tokens"]} for record in records], (1, 2))
    assert buckets.read_batch([0, 1])["tokens"].tolist() == [[1, 2], [0, 0]]
    assert buckets.read_batch([1, 2])["tokens"].dtype == np.int64


@pytest.mark.parametrize("kind", ["stream", "each", "records", "buckets"])
@pytest.mark.parametrize("filled", [range(8), range(8, 16)], ids=["first", "last"])
def test_empty_lists_have_the_same_dtype_for_a_feed_that_resumes(filled: range, kind: str) -> None:
    records = [{"tokens": [i] if i in filled else [], "text": [float(i)] if i in filled else []} for i in range(24)]

    def open_lane(lane_index: int, num_lanes: int) -> Any:
        return iter(records[lane_index::num_lanes])

    def feed() -> meshfeed.MultiHostDataLoadIterator:
        sources: dict[str, Any] = {
            "stream": lambda: Padded(Stream(open_lane), 1, key=("tokens", "text")),
            "each": lambda: Padded(Stream(open_lane), {"tokens": 1, "text": 1}),
            "records": lambda: Padded(records, 1, key=("tokens", "text")),
            "buckets": lambda: meshfeed.sources.Buckets(records, (1,), key=("tokens", "text")),
        }
        return feed_of(sources[kind]())

    with feed() as whole:
        found = {(batch["tokens"].dtype.name, batch["text"].dtype.name) for batch in whole}
    assert found == {("int32", "float32")}
    check_resumable(feed)


def test_wrong_settings_and_records() -> None:
    for setting, settings, match in (
        ("length", {"length": {}}, "a dict of leaves"),
        ("length", {"length": {"a": 0}}, "at least 1"),
        ("length", {"length": {"a": 3, "a_mask": 3}}, "'a_mask' is the mask of 'a'"),
        ("key", {"length": {"a": 3}, "key": "b"}, "Leave out key"),
        ("mask_key", {"length": {"a": 3}, "mask_key": "m"}, "Leave out mask_key"),
    ):
        with pytest.raises(meshfeed.SettingsError, match=match) as error:
            Padded(RECORDS, **settings)  # type: ignore[arg-type]
        assert error.value.setting == setting
    short = Padded(RECORDS, {"chosen": 20, "images": 1})
    wrong = next(i for i, record in enumerate(RECORDS) if len(record["images"]) > 1)
    with pytest.raises(
        meshfeed.SourceError,
        match=rf"record {wrong}: it has . entries in the leaf 'images', and length\['images'\] is 1\. Pass a larger",
    ):
        short[wrong]  # type: ignore[index]
    with pytest.raises(
        meshfeed.SourceError, match=r"record 0: it has the leaves \['a'\], and not 'b', which length= names"
    ):
        Padded([{"a": np.zeros(2)}], {"a": 3, "b": 3})[0]  # type: ignore[index]
    with pytest.raises(meshfeed.SourceError, match="have the leaf 'b_mask' already"):
        Padded([{"a": np.zeros(2), "b": np.zeros(2), "b_mask": 1}], {"a": 3, "b": 3})[0]  # type: ignore[index]


class Decoded:
    """Numbers that a decoder makes documents of, with random numbers."""

    def __len__(self) -> int:
        return 40

    def read_raw(self, record_ids: Any) -> list[bytes]:
        return [bytes([record_id]) for record_id in record_ids]

    def __getitem__(self, record_id: int) -> bytes:
        return bytes([record_id])

    def decode(self, record: bytes, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"tokens": rng.integers(1, 99, record[0] % 5, np.int32)}


def some_of(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"tokens": record["tokens"][: rng.integers(4)]}


def changed_in_place(record: dict[str, Any]) -> dict[str, Any]:
    record["tokens"] += 1
    return record


DOCUMENTS = Memory({"tokens": np.arange(160, dtype=np.int32).reshape(40, 4)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Map(DOCUMENTS, some_of),
        lambda: Map(Map(DOCUMENTS, some_of), changed_in_place),
        lambda: Map(Subset(Map(DOCUMENTS, some_of), slice(None, None, -1)), some_of),
        lambda: Map(Mixture({"a": Map(DOCUMENTS, some_of), "b": DOCUMENTS}, {"a": 1, "b": 1}, 8), changed_in_place),
        lambda: Concat([Map(Map(DOCUMENTS, lambda record: {"tokens": record["tokens"][:1]}), some_of), Decoded()]),
        lambda: Map(Zip({"a": Map(DOCUMENTS, some_of), "b": DOCUMENTS}), lambda record: record["a"]),
        Decoded,
    ],
)
def test_records_of_random_lengths(make: Any) -> None:
    before = DOCUMENTS.read_batch(range(40))["tokens"]
    source: Any = Padded(make(), 4)
    with feed_of(source) as feed:
        for step in range(5):  # of the first epoch
            batch = next(feed)
            for row, record_id in enumerate(feed.record_ids(step).tolist()):  # as if it were read alone
                for name, leaf in source.read_batch([record_id], [philox(0, 0, record_id)]).items():
                    np.testing.assert_array_equal(np.asarray(batch[name])[row], leaf[0])
    np.testing.assert_array_equal(DOCUMENTS.read_batch(range(40))["tokens"], before)
