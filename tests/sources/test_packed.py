"""Packed documents through the feed, against definitions by hand."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from token_files import write_megatron

import meshfeed
from meshfeed.sources import Concat, Map, Memory, Mixture, Packed, Stream, Tokens
from meshfeed.testing import check_resumable

RNG = np.random.default_rng(0)
SIZE = 16
LENGTHS = {
    "one document": [37],
    "all of length 1": [1] * 150,
    "one of a million": [3, 10**6 // 50, 0, 5],
    "lognormal": np.minimum(RNG.lognormal(2.2, 1.2, 300).astype(int), 400).tolist(),
    "all of one sequence": [16] * 40,
    "many empty": np.where(RNG.random(200) < 0.7, 0, RNG.integers(0, 60, 200)).tolist(),
}


class Documents:
    """Document d is d * 100,000 + 1, …, with a mask that says where it is odd."""

    def __init__(self, lengths: list[int], known: bool = True) -> None:
        self._lengths = lengths
        if known:
            self.lengths = lambda: np.array(lengths, np.uint32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, record_id: int) -> dict[str, np.ndarray]:
        tokens = record_id * 100_000 + 1 + np.arange(self._lengths[record_id])
        return {"tokens": tokens, "mask": tokens % 2 == 1}

    def fingerprint(self) -> Any:
        return {"kind": "documents"}


def mesh() -> Any:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def feed_of(source: Any, **settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    settings = {"global_batch_size": 8, "seed": 3, "end": "pad", "shuffle": True, **settings}
    return meshfeed.MultiHostDataLoadIterator(source, mesh(), **settings)


def rows_of(feed: Any) -> dict[str, np.ndarray]:
    with feed:
        batches = [jax.tree.map(np.asarray, batch) for batch in feed]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def check_rows(rows: dict[str, np.ndarray], lengths: list[int], epochs: int = 1) -> None:
    """Every token the given number of times, segments of one document each, positions from 0, and padding at the end."""
    tokens, segments, positions = rows["tokens"], rows["segment_ids"], rows["positions"]
    assert {leaf.dtype for leaf in (tokens, segments, positions)} == {np.dtype(np.int32)}
    real = segments > 0
    wanted = [d * 100_000 + 1 + np.arange(n) for d, n in enumerate(lengths)]
    np.testing.assert_array_equal(np.sort(tokens[real]), np.sort(np.tile(np.concatenate(wanted), epochs)))
    np.testing.assert_array_equal(rows["mask"], real & (tokens % 2 == 1))
    assert not tokens[~real].any()
    assert not positions[~real].any()
    for row in range(len(tokens)):
        count = int(real[row].sum())
        assert real[row, :count].all()
        assert sorted(set(segments[row, :count].tolist())) == list(range(1, segments[row].max() + 1))
        for number in range(1, segments[row].max() + 1):
            at = np.flatnonzero(segments[row] == number)
            np.testing.assert_array_equal(at, np.arange(at[0], at[-1] + 1))
            np.testing.assert_array_equal(np.diff(tokens[row, at]), 1)
            np.testing.assert_array_equal(positions[row, at], np.arange(len(at)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("method", ["split", "fit"])
@pytest.mark.parametrize("name", LENGTHS)
def test_every_token_once_per_epoch(name: str, method: str, shuffle: bool) -> None:
    source = Packed(Documents(LENGTHS[name]), SIZE, method=method, block=50)
    check_rows(rows_of(feed_of(source, shuffle=shuffle, num_epochs=2)), LENGTHS[name], epochs=2)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    source = Packed(Documents(LENGTHS["lognormal"]), SIZE, block=50)
    tokens = {
        (seed, epoch): rows_of(feed_of(source, seed=seed, num_epochs=2))["tokens"].reshape(-1)[half].tobytes()
        for seed in (1, 2)
        for epoch, half in enumerate((slice(0, len(source) * SIZE), slice(len(source) * SIZE, 2 * len(source) * SIZE)))
    }
    assert len(set(tokens.values())) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["split", "fit"])
def test_resume_at_many_places(method: str) -> None:
    def feed() -> Any:
        return feed_of(Packed(Documents(LENGTHS["lognormal"]), SIZE, method=method, block=50), num_epochs=2)

    count = len(rows_of(feed())["tokens"]) // 8
    points = np.linspace(1, count - 1, 20).astype(int).tolist()
    check_resumable(feed, max_steps=count + 1, save_points=points)


def test_the_batch_of_a_step_does_not_depend_on_the_hosts() -> None:
    source = Packed(Documents(LENGTHS["lognormal"]), SIZE, method="fit", block=50)
    with feed_of(source) as feed:
        ids = [feed.record_ids(step) for step in range(10)]
        for step in range(10):
            batch = jax.tree.map(np.asarray, next(feed))
            read = feed.read(ids[step])
            for name in batch:
                np.testing.assert_array_equal(batch[name], read[name])
            for parts in (2, 4, 8):  # what each of several hosts would read
                for rows in np.split(ids[step], parts):
                    np.testing.assert_array_equal(feed.read(rows)["tokens"], batch["tokens"][np.isin(ids[step], rows)])


@pytest.mark.slow
def test_other_batch_sizes_and_workers_give_the_same_stream() -> None:
    source = Packed(Documents(LENGTHS["lognormal"]), SIZE, method="fit", block=50)
    usual = rows_of(feed_of(source, end="drop"))["tokens"]
    for settings in ({"global_batch_size": 16}, {"num_workers": 2}, {"num_threads": 3}):
        found = rows_of(feed_of(source, end="drop", **settings))["tokens"]
        np.testing.assert_array_equal(found, usual[: len(found)])


def test_lengths_are_read_once_if_they_are_not_known() -> None:
    lengths = LENGTHS["lognormal"]
    for method in ("split", "fit"):
        known, read = (Packed(Documents(lengths, known), SIZE, method=method) for known in (True, False))
        np.testing.assert_array_equal(
            known.read_batch(range(len(known)))["tokens"], read.read_batch(range(len(read)))["tokens"]
        )
    bare = Packed([np.arange(n) for n in lengths], SIZE)
    assert bare.read_batch([0])["tokens"].shape == (1, SIZE)
    rows = Packed(Memory({"tokens": np.arange(60).reshape(20, 3)}), 7)
    assert rows.stats().tokens == 60


@pytest.mark.parametrize("method", ["split", "fit"])
def test_token_files(method: str, tmp_path: pathlib.Path) -> None:
    documents = [[np.arange(n, dtype=np.int32) + 1000 * d] for d, n in enumerate(LENGTHS["lognormal"])]
    write_megatron(tmp_path / "x", documents)
    source = Packed(Tokens.documents(tmp_path / "x.bin"), SIZE, method=method, block=50, pad_id=-1)
    rows = source.read_batch(range(len(source)))
    in_memory = Packed([document[0] for document in documents], SIZE, method=method, block=50, pad_id=-1)
    for name, leaf in in_memory.read_batch(range(len(source))).items():
        np.testing.assert_array_equal(rows[name], leaf)
    assert (rows["tokens"][rows["segment_ids"] == 0] == -1).all()


def test_tokenizing_through_map() -> None:
    texts = ["a few words", "", "some more words than before", "x"]

    def tokenize(record: dict[str, str]) -> dict[str, np.ndarray]:
        return {"tokens": np.frombuffer(record["text"].encode(), np.uint8).astype(np.int32)}

    source = Packed(Map([{"text": text} for text in texts], tokenize), 8)
    tokens = source.read_batch(range(len(source)))
    assert bytes(tokens["tokens"][tokens["segment_ids"] > 0].astype(np.uint8)).decode() == "".join(texts)


def test_in_a_mixture_and_in_a_map() -> None:
    a = Packed(Documents(LENGTHS["lognormal"]), SIZE, method="fit")
    b = Packed(Documents(LENGTHS["all of length 1"]), SIZE)
    mixture = Mixture({"a": a, "b": b}, {"a": 3, "b": 1}, block=8)
    check_resumable(lambda: feed_of(mixture), max_steps=8, save_points=[3])

    def inputs(record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"inputs": record["tokens"][:-1]}

    mapped = rows_of(feed_of(Map(a, inputs)))["inputs"]
    assert sorted(map(bytes, mapped[: len(a)])) == sorted(map(bytes, a.read_batch(range(len(a)))["tokens"][:, :-1]))


def test_leaves_have_the_names_that_the_model_expects() -> None:
    names = {"key": "inputs", "segment_ids": "inputs_segmentation", "positions": "inputs_position"}
    documents = [np.arange(n) for n in LENGTHS["lognormal"]]
    usual, named = Packed(documents, SIZE), Packed(documents, SIZE, **names)
    with feed_of(usual) as feed, feed_of(named) as other:
        for batch, renamed in zip(feed, other, strict=True):
            assert set(renamed) == {*names.values(), *batch.keys() - {"tokens", "segment_ids", "positions"}}
            for usual_name, setting in (("tokens", "key"), ("segment_ids", "segment_ids"), ("positions", "positions")):
                np.testing.assert_array_equal(batch[usual_name], renamed[names[setting]])
    assert "segment_ids" not in str(usual.fingerprint())  # as in states that were saved without these settings
    assert named.fingerprint() != Packed(documents, SIZE, key="inputs").fingerprint()
    Packed([{"tokens": np.arange(3), "positions": np.arange(3)}], 8, positions="place")


def test_a_state_of_other_documents_or_settings_is_refused() -> None:
    usual = Packed(Documents(LENGTHS["lognormal"]), SIZE)
    with feed_of(usual) as feed:
        next(feed)
        state = feed.get_state()
    changed = [*LENGTHS["lognormal"][:-1], LENGTHS["lognormal"][-1] + 1]
    for other, field in (
        (Packed(Documents(changed), SIZE), "lengths"),
        (Packed(Documents(LENGTHS["lognormal"]), SIZE // 2), "source.packing.sequence_length"),
        (Packed(Documents(LENGTHS["lognormal"]), SIZE, method="fit"), "packing"),
        (Packed(Documents(LENGTHS["lognormal"]), SIZE, block=10), "packing"),
    ):
        with feed_of(other) as feed, pytest.raises(meshfeed.StateMismatchError) as error:
            feed.set_state(state)
        assert field in error.value.field
    with feed_of(usual, seed=4) as feed, pytest.raises(meshfeed.StateMismatchError, match="seed"):
        feed.set_state(state)


def test_pickled_sources_read_the_same() -> None:
    source = Packed(Documents([5, 40, 3], known=False), SIZE, method="fit")
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.read_batch([0, 1, 2])["tokens"], source.read_batch([0, 1, 2])["tokens"])
    assert repr(source).endswith("3 sequences of 16 tokens)")


def test_stats() -> None:
    stats = Packed(Documents([5, 40, 3, 0]), SIZE, method="fit").stats()
    assert (stats.sequences, stats.documents, stats.tokens, stats.cut_documents, stats.lost_tokens) == (3, 4, 48, 1, 0)
    assert stats.padding_fraction == 0


def test_wrong_settings() -> None:
    documents = Documents([5, 6])
    for setting, value in {
        "sequence_length": 0, "method": "best", "block": True, "pad_id": 2**31, "long": "keep", "key": "",
        "segment_ids": "tokens", "positions": "segment_ids",
    }.items():  # fmt: skip
        with pytest.raises(meshfeed.SettingsError, match=setting) as error:
            Packed(documents, **{"sequence_length": 8, setting: value})
        assert error.value.setting == setting
    with pytest.raises(meshfeed.SettingsError, match="block= to Packed"):
        feed_of(Packed(documents, 8), shuffle=16)


def test_wrong_documents() -> None:
    def packed(*records: Any, **settings: Any) -> Packed:
        return Packed(list(records), 8, **settings)

    with pytest.raises(meshfeed.SourceError, match=r"has the leaves \['x'\], and not 'tokens'"):
        packed({"x": np.arange(3)})
    with pytest.raises(meshfeed.SourceError, match=r"float64 of shape \(3,\)"):
        packed({"tokens": np.zeros(3)})
    with pytest.raises(meshfeed.SourceError, match=r"record 0: leaf 'tokens' of a document is a masked array"):
        packed({"tokens": np.ma.masked_equal([1, 2], 1)})
    with pytest.raises(meshfeed.SourceError, match="positions"):
        packed({"tokens": np.arange(3), "positions": np.arange(3)})
    with pytest.raises(meshfeed.SourceError, match="leave no token"):
        packed(np.arange(0), np.arange(9), long="drop")
    with pytest.raises(meshfeed.SourceError, match="Expected one value per token"):
        packed({"tokens": np.arange(3), "id": np.arange(2)}).read_batch([0])
    for align in (1, 2):  # rows of pieces end to end, and with gaps
        with pytest.raises(meshfeed.SourceError, match=r"document 1 holds the token 2147483648, .*fit into int32"):
            packed(np.arange(3), np.array([1, 2**31]), align=align).read_batch([0])
    with pytest.raises(meshfeed.SourceError, match="differ in the leaf 'mask'"):
        packed({"tokens": np.arange(3)}, {"tokens": np.arange(3), "mask": np.arange(3)}).read_batch([0])
    with pytest.raises(meshfeed.SourceError, match="which is read in order"):
        Packed(Stream(lambda lane_index, num_lanes: iter([])), 8)
    with pytest.raises(meshfeed.SettingsError, match=r"weights of the mixture change at step 5, .* Mix last"):
        Packed(Mixture({"a": Memory({"tokens": np.zeros((4, 4), int)})}, [(0, {"a": 1}), (5, {"a": 2})]), 8)
    with pytest.raises(meshfeed.SettingsError, match="rng="):
        Packed(Map([np.arange(3)], lambda record, rng: record), 8)
    with pytest.raises(IndexError, match="record id 1 is out of range"):
        packed(np.arange(3)).read_batch([1])
    with feed_of(packed(np.arange(3))) as feed, pytest.raises(meshfeed.SourceError, match="record id -1"):
        feed.read([-1])


def test_the_key_is_checked_of_documents_that_are_read_in_parts(tmp_path: pathlib.Path) -> None:
    np.array([5, 6, 1, 7, 1], np.uint16).tofile(tmp_path / "a.bin")

    def documents(key: str) -> Any:
        return Tokens.documents(tmp_path / "a.bin", dtype=np.uint16, eod=1, key=key)

    with pytest.raises(meshfeed.SourceError, match=r"has the leaves \['ids'\], and not 'tokens'. Pass key="):
        Packed(documents("ids"), 4).read_batch([0])
    with pytest.raises(meshfeed.SourceError, match=r"has the leaves \['positions'\], and not 'tokens'"):
        Packed(documents("positions"), 4)[0]
    both = Concat([documents("tokens"), documents("ids")])
    with pytest.raises(meshfeed.SourceError, match=r"source '0' of the Concat have the leaves .*tokens.*'1' .*ids"):
        Packed(both, 4).read_batch([0, 1, 2])


def test_the_lengths_of_joined_documents_are_of_the_leaf_that_is_asked_for() -> None:
    class WithImages(Documents):
        def __getitem__(self, document: int) -> dict[str, np.ndarray]:
            tokens = super().__getitem__(document)["tokens"]
            return {"tokens": tokens, "images": np.ones((1, 2), np.float32)}

    for source in (WithImages([20, 30, 2, 1]), Concat([WithImages([20, 30]), WithImages([2, 1])])):
        for view in (source, meshfeed.sources.Subset(source, range(4))):
            packed = Packed(view, 64, side={"images": 4}, long="drop")
            assert packed.stats().lost_tokens == 0
            assert packed[0]["images_mask"].sum() == 4


def test_a_document_that_cannot_be_read_is_named() -> None:
    class Spoiled(Documents):
        def __getitem__(self, document: int) -> dict[str, np.ndarray]:
            return {"tokens": np.zeros(3) if document == 1 else np.arange(3)}

    with pytest.raises(meshfeed.SourceError, match="record 1: leaf 'tokens' of a document is float64"):
        Packed(Spoiled([3, 3]), 8).read_batch([0])


def test_a_document_that_is_no_longer_as_long() -> None:
    documents = Documents([5, 6])
    source = Packed(documents, 8)
    documents._lengths[1] = 7
    with pytest.raises(meshfeed.SourceError, match=r"document 1 has shape \(7,\), and the document 6 tokens"):
        source.read_batch([0])
