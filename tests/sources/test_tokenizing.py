"""Text of Hugging Face datasets through Map with a tokenizer: at random and in streams, in threads and in workers."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed.sources import Buckets, HuggingFace, Map, Packed, Padded
from meshfeed.testing import check_resumable

datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences its warning about forked workers

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "naïve", "東京"]
RNG = np.random.default_rng(0)
TEXTS = [" ".join(RNG.choice(WORDS, n)) for n in RNG.integers(1, 30, 90)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["[UNK]", "[END]"], show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    return trained


class Tokenize:
    """The tokens of the text, and its number."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        assert type(record["text"]) is str
        assert type(record["id"]) is np.int64
        return {"tokens": np.array(self.tokenizer.encode(record["text"]).ids, np.int32)}


def dataset() -> Any:
    return datasets.Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS, "unused": [None] * len(TEXTS)})


def feed_of(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **{"global_batch_size": 8, "end": "pad", **settings})


def batches_of(feed: Any) -> list[dict[str, np.ndarray]]:
    with feed:
        return [jax.tree.map(np.asarray, batch) for batch in feed]


def texts_of(tokenizer: Any, rows: Any) -> list[str]:
    return sorted(tokenizer.decode(row.tolist()).replace(" Ġ", " ").replace("Ġ", "").replace(" ", "") for row in rows)


@pytest.mark.parametrize("make", [lambda d: d, lambda d: HuggingFace(d, columns=["text", "id"])])
def test_packed_from_text(tokenizer: Any, make: Any) -> None:
    source = Packed(Map(make(dataset()), Tokenize(tokenizer)), 64, method="fit")
    usual = batches_of(feed_of(source, shuffle=True))
    rows = [
        row["tokens"][row["segment_ids"] == number]
        for batch in usual
        for row in (jax.tree.map(lambda leaf, i=i: leaf[i], batch) for i in range(8))
        for number in range(1, row["segment_ids"].max() + 1)
    ]
    assert texts_of(tokenizer, rows) == texts_of(tokenizer, [np.array(tokenizer.encode(t).ids) for t in TEXTS])
    check_resumable(lambda: feed_of(source, shuffle=True), save_points=[2])


@pytest.mark.slow
def test_threads_and_workers_give_the_same_batches(tokenizer: Any) -> None:
    source = Buckets(Map(dataset(), Tokenize(tokenizer)), (32, 64, 128))
    usual = batches_of(feed_of(source, shuffle=True))
    for settings in ({"num_threads": 3}, {"num_workers": 2}):
        for batch, wanted in zip(batches_of(feed_of(source, shuffle=True, **settings)), usual, strict=True):
            jax.tree.map(np.testing.assert_array_equal, batch, wanted)


@pytest.mark.parametrize("change", [lambda d: d, lambda d: d.map(lambda row: row)], ids=["tables", "examples"])
def test_streams(tokenizer: Any, change: Any) -> None:
    stream = change(dataset().remove_columns("unused").to_iterable_dataset(num_shards=4))

    def tokenize(record: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": np.array(tokenizer.encode(record["text"]).ids, np.int32)}

    def feed(**settings: Any) -> Any:
        source = HuggingFace(stream, columns=["text"], shuffle_buffer=20)
        return feed_of(Padded(Map(source, tokenize), 256), num_lanes=4, mask_key="real", **settings)

    usual = batches_of(feed())
    found = [
        row[mask] for b in usual for row, mask, real in zip(b["tokens"], b["mask"], b["real"], strict=True) if real
    ]
    assert texts_of(tokenizer, found) == texts_of(tokenizer, [np.array(tokenizer.encode(t).ids) for t in TEXTS])
    check_resumable(feed, save_points=[3])


def test_a_batch_of_texts_at_once(tokenizer: Any) -> None:
    def tokenize(records: list[dict[str, Any]]) -> dict[str, Any]:
        found = tokenizer.encode_batch([record["text"] for record in records])
        tokens = np.zeros((len(found), 128), np.int32)
        for row, encoding in enumerate(found):
            tokens[row, : len(encoding.ids)] = encoding.ids
        return {"tokens": tokens}

    wanted = batches_of(feed_of(Padded(Map(dataset(), Tokenize(tokenizer)), 128, mask_key=None)))
    for batch, one_by_one in zip(batches_of(feed_of(Map(dataset(), tokenize, batched=True))), wanted, strict=True):
        np.testing.assert_array_equal(batch["tokens"], one_by_one["tokens"])


def test_records_as_they_are_stored() -> None:
    rows = {
        "text": ["a", None, "c"],
        "ragged": [[1], [], [2, 3]],
        "null": [1, None, 3],
        "nested": [[[1], [2, 3]], [], [[4]]],
        "struct": [{"a": 1, "b": "x"}] * 3,
        "flag": [True, False, True],
    }
    table = datasets.Dataset.from_dict(rows)
    seen: list[Any] = []
    for source in (table, table.shuffle(seed=1).sort("flag"), HuggingFace(table.with_transform(lambda batch: batch))):
        mapped = Map(source, lambda record: seen.append(record) or {"x": np.int32(0)})
        mapped.read_batch([1, 2])
    assert seen[0]["text"] is None
    assert seen[1]["text"] == "c"
    assert [type(seen[1][name]) for name in ("ragged", "flag")] == [np.ndarray, np.bool_]
    assert seen[1]["ragged"].tolist() == [2, 3]
    seen[1]["ragged"][0] = 5  # the caller's own
    assert (seen[1]["null"], seen[1]["nested"], seen[1]["struct"]) == (3, [[4]], {"a": 1, "b": "x"})
    assert seen[4]["text"] is None, "with a transform"
    with pytest.raises(IndexError, match="record id 3 is out of range"):
        Map(table, len)[3]


def test_a_state_of_the_dataset_without_map_is_of_the_same_source() -> None:
    numbers = datasets.Dataset.from_dict({"x": range(40)})
    mapped = Map(HuggingFace(numbers), lambda record: record)
    assert mapped.fingerprint()["source"] == {"records": 40, **HuggingFace(numbers).fingerprint()}  # type: ignore[index]
