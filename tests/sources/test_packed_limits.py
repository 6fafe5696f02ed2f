"""Packed sequences within limits of kernels and models, against definitions by hand."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from packed_rows import ALL, BOS, Documents, check_rows, some_documents

import meshfeed
from meshfeed.sources import Concat, Map, Memory, Mixture, Packed, Subset, Tokens, sequence_order
from meshfeed.testing import check_resumable


def feed_of(source: Any, **given_settings: Any) -> meshfeed.MultiHostDataLoadIterator:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    usual = {"global_batch_size": 8, "seed": 3, "end": "pad", "mask_key": "real", "shuffle": True}
    return meshfeed.MultiHostDataLoadIterator(source, mesh, **{**usual, **given_settings})


def rows_of(feed: Any) -> dict[str, np.ndarray]:
    with feed:
        batches = [jax.tree.map(np.asarray, batch) for batch in feed]
    rows = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return {name: leaf[rows["real"]] for name, leaf in rows.items() if name != "real"}


@st.composite
def limited(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {"method": draw(st.sampled_from(["split", "fit"])), "pad_id": -1}
    if (slots := draw(st.one_of(st.none(), st.integers(1, 5)))) is not None:
        found["max_segments"] = slots
        if draw(st.booleans()):
            found["cumulative_lengths"] = "starts"
    found["align"] = draw(st.sampled_from([1, 1, 2, 4]))
    if draw(st.booleans()):
        found["bos_id"] = BOS
    order = draw(st.sampled_from([None, ("zigzag", 2), ("striped", 4), ("zigzag", 1)]))
    if order is not None:
        found["sequence_order"] = order
    side = draw(st.sampled_from([{}, {"images": 4}, {"images": 9, "clips": 3}]))
    return {**found, "side": side}


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(limits=limited(), seed=st.integers(0, 20), length=st.sampled_from([8, 16, 32]), known=st.booleans())
def test_rows_are_those_of_the_definition(limits: dict[str, Any], seed: int, length: int, known: bool) -> None:
    documents = some_documents(40, seed=seed, stored=known)
    leaves = ["tokens", "squares", *limits["side"]]
    source = Packed(Map(documents, lambda record: {name: record[name] for name in leaves}), length, block=15, **limits)
    rows = source.read_batch(range(len(source)))
    check_rows(rows, documents, length, **limits)
    shuffled = source.with_order(shuffle=True, seed=1)
    ids = np.random.default_rng(seed).permutation(len(source))
    check_rows(shuffled.read_batch(len(source) + ids), documents, length, **limits)
    alone = shuffled.read_batch([len(source) + int(ids[0])])
    for name, leaf in shuffled.read_batch(len(source) + ids).items():
        np.testing.assert_array_equal(leaf[:1], alone[name])
        assert leaf.dtype == alone[name].dtype


@pytest.mark.parametrize("method", ["split", "fit"])
def test_every_token_and_image_once_per_epoch_in_every_order(method: str) -> None:
    documents = some_documents(150)
    for shuffle in (False, True):
        feed = feed_of(Packed(documents, 32, block=50, method=method, **ALL), shuffle=shuffle, num_epochs=2)
        check_rows(rows_of(feed), documents, 32, epochs=2, **ALL)


@pytest.mark.parametrize("method", ["split", "fit"])
def test_a_state_is_a_position(method: str) -> None:
    def feed() -> Any:
        return feed_of(Packed(some_documents(60), 32, block=25, method=method, **ALL), num_epochs=2)

    check_resumable(feed, max_steps=6, save_points=[1, 4])


def test_documents_of_several_sources_share_a_sequence() -> None:
    web, code = some_documents(60, seed=1), some_documents(40, seed=2)
    shifted = Map(code, lambda record: {**record, "tokens": record["tokens"] + 500_000})
    mixture = Mixture({"web": web, "code": shifted}, {"web": 3, "code": 2}, block=10)
    side = {"images": 8, "clips": 4}
    rows = rows_of(feed_of(Packed(mixture, 32, method="fit", max_segments=4, side=side, block=32)))
    both = [{int(t) // 500_000 for t in row[row > 0]} for row in rows["tokens"]]
    assert sum(len(found) == 2 for found in both) > 5
    web_tokens = rows["tokens"][(rows["tokens"] > 0) & (rows["tokens"] < 500_000)]
    assert len(web_tokens) == sum(web._counts["tokens"])
    assert rows["images_mask"].sum() == sum(web._counts["images"]) + sum(code._counts["images"])
    assert (rows["segment_ids"].max(1) <= 4).all()


def test_numbers_of_entries_are_read_only_if_they_are_not_known() -> None:
    known, read = some_documents(50), some_documents(50, stored=False)
    side = {"images": 8, "clips": 4}
    sources = [Packed(documents, 32, method="fit", side=side) for documents in (known, read)]
    assert known.reads == 0
    assert read.reads == 50  # once for all leaves
    assert sources[0].fingerprint() == sources[1].fingerprint()
    for name, leaf in sources[0].read_batch(range(len(sources[0]))).items():
        np.testing.assert_array_equal(leaf, sources[1].read_batch(range(len(sources[1])))[name])
    views = Packed(Concat([Subset(known, slice(20)), Subset(known, slice(20, None))]), 32, method="fit", side=side)
    assert len(views) == len(sources[0])


def test_reads_that_count_entries_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = some_documents(50, stored=False)
    read = documents.__class__.__getitem__
    failures = [OSError("connection reset"), OSError("connection reset")]

    def unreliable(self: Documents, record_id: int) -> Any:
        if record_id == 30 and failures:
            raise failures.pop()
        return read(self, record_id)

    monkeypatch.setattr(Documents, "__getitem__", unreliable)
    monkeypatch.setattr("meshfeed._src.base.retry.time.sleep", lambda seconds: None)
    source = Packed(documents, 32, side={"images": 8, "clips": 4})
    assert not failures
    assert source.fingerprint() == Packed(some_documents(50), 32, side={"images": 8, "clips": 4}).fingerprint()


def test_documents_without_entries_may_have_empty_lists() -> None:
    """numpy's array of an empty list is float64[0]; the first document that has entries gives shape and dtype."""
    documents = [{"tokens": [1, 2], "images": []}, {"tokens": [3], "images": np.ones((1, 4), np.uint8)}]
    rows = Packed(documents, 2, side={"images": 2}).read_batch([0, 1])
    assert rows["images"].shape == (2, 2, 4)
    assert rows["images"].dtype == np.uint8
    assert rows["images_segment"].tolist() in ([[0, 0], [1, 0]], [[1, 0], [0, 0]])
    none = Packed([{"tokens": [1, 2], "images": np.zeros((0, 3))}], 2, side={"images": 2}).read_batch([0])
    assert none["images"].shape == (1, 2, 3)
    assert not none["images_mask"].any()


def test_too_many_entries() -> None:
    documents = Documents([3, 2, 0, 5], [1, 5, 2, 7], [0, 0, 0, 0])
    with pytest.raises(
        meshfeed.SourceError,
        match=r"record 1: its leaf 'images' has 5 entries, and a sequence holds at most 4\. 2 more documents are like it\. "
        r"Pass a larger number in side=\{'images': …\}, or leave out such documents with long='drop'",
    ) as error:
        Packed(documents, 8, side={"images": 4, "clips": 1})
    assert error.value.record_id == 1
    with pytest.raises(meshfeed.SourceError, match="record 2: its leaf 'images' has 2 entries, and it has no token"):
        Packed(documents, 8, side={"images": 9, "clips": 1})
    dropped = Packed(documents, 8, side={"images": 4, "clips": 1}, long="drop")
    assert dropped.stats().lost_tokens == 7
    assert dropped.read_batch([0])["tokens"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]


def test_long_documents_with_a_token_before_them() -> None:
    """A piece holds 7 tokens of a document and bos_id; a document of 8 is longer than a sequence."""
    for long, lengths in (("truncate", [7, 7, 7]), ("drop", [7]), ("split", [1, 6, 7, 7, 7, 7])):
        source = Packed([np.arange(1, n + 1) for n in (7, 8, 20)], 8, method="fit", long=long, bos_id=BOS)
        tokens = source.read_batch(range(len(source)))["tokens"]
        assert (
            sorted((row > 0).sum() for row in tokens) == lengths
        )  # 1 and 6 tokens need 9 places with a token before each
        assert (tokens[:, 0] == BOS).all()


def test_limits_that_never_bind_leave_split_as_it_is() -> None:
    """16 segments of at least 2 tokens fill a sequence of 32: documents stay end to end."""
    documents = [np.arange(1, n + 1) for n in (5, 40, 9, 3)]
    usual = Packed(documents, 32, align=2).read_batch([0, 1])
    limited_source = Packed(documents, 32, align=2, max_segments=16, cumulative_lengths="starts")
    rows = limited_source.read_batch([0, 1])
    for name, leaf in usual.items():
        np.testing.assert_array_equal(rows[name], leaf)
    assert rows["starts"][0].tolist() == [0, 6, *[32] * 15]
    assert limited_source.fingerprint() != Packed(documents, 32, align=2).fingerprint()


def test_token_files_with_limits(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 80).tolist()
    np.concatenate([[*rng.integers(1, 99, n - 1), 0] for n in lengths]).astype(np.uint16).tofile(tmp_path / "a.bin")
    documents = Tokens.documents(tmp_path / "a.bin", dtype=np.uint16, eod=0)
    given_limits: dict[str, Any] = {
        "method": "fit",
        "max_segments": 3,
        "align": 2,
        "bos_id": 100,
        "sequence_order": ("striped", 2),
    }
    found = Packed(documents, 32, **given_limits)
    in_memory = Packed([documents[i]["tokens"] for i in range(len(documents))], 32, **given_limits)
    for name, leaf in in_memory.read_batch(range(len(in_memory))).items():
        np.testing.assert_array_equal(found.read_batch(range(len(found)))[name], leaf)
    with pytest.raises(meshfeed.SourceError, match="and not 'images', which side= names"):
        Packed(documents, 32, side={"images": 3})


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sequence_order(n: int) -> None:
    zigzag, striped = sequence_order("zigzag", 16, n), sequence_order("striped", 16, n)
    assert zigzag.dtype == striped.dtype == np.int64
    chunks = np.arange(16).reshape(2 * n, -1)
    for shard in range(n):
        part = slice(shard * 16 // n, (shard + 1) * 16 // n)
        assert zigzag[part].tolist() == [*chunks[shard], *chunks[2 * n - 1 - shard]]
        assert striped[part].tolist() == list(range(shard, 16, n))


def test_wrong_arguments_of_sequence_order() -> None:
    for kind, length, n, setting in (("ring", 8, 2, "kind"), ("zigzag", 0, 2, "length"), ("striped", 8, True, "n")):
        with pytest.raises(meshfeed.SettingsError) as error:
            sequence_order(kind, length, n)  # pyright: ignore[reportArgumentType]
        assert error.value.setting == setting
    with pytest.raises(meshfeed.SettingsError, match="length=12 is not a multiple of 8, the number of chunks"):
        sequence_order("zigzag", 12, 4)
    assert len(sequence_order("striped", 12, 4)) == 12


def test_wrong_settings() -> None:
    documents = some_documents(5)
    for setting, value, match in (
        ("max_segments", 0, "at least 1"),
        ("align", 3, "align=3 does not divide sequence_length=8"),
        ("align", None, "at least 1"),
        ("bos_id", 2**31, "an int32"),
        ("bos_id", True, "an int32"),
        ("cumulative_lengths", "starts", "Pass max_segments"),
        ("sequence_order", "zigzag", "a kind and a number of shards"),
        ("sequence_order", ("zigzag", 3), "length=8 is not a multiple of 6"),
        ("sequence_order", ("ring", 2), "'zigzag' or 'striped'"),
        ("side", {"images": 0}, "at least 1"),
        ("side", {3: 1}, "a dict of leaves"),
        ("side", ["images"], "a dict of leaves"),
        ("side", {"tokens": 3}, "another leaf 'tokens'"),
        ("side", {"images": 3, "images_mask": 2}, "another leaf 'images_mask'"),
    ):
        given_setting: dict[str, Any] = {setting: value}
        with pytest.raises(meshfeed.SettingsError, match=match) as error:
            Packed(documents, 8, **given_setting)
        assert error.value.setting == setting
    with pytest.raises(meshfeed.SettingsError, match="name of a leaf of its own") as error:
        Packed(documents, 8, max_segments=3, cumulative_lengths="positions")
    assert error.value.setting == "cumulative_lengths"
    with pytest.raises(meshfeed.SettingsError, match="at least 3"):
        Packed(documents, 2, bos_id=1)


def test_wrong_entries() -> None:
    def packed(*records: Any) -> Packed:
        return Packed(list(records), 8, side={"images": 3})

    tokens = np.arange(1, 4)
    with pytest.raises(meshfeed.SourceError, match=r"float64 of shape \(\)\. Expected numbers of shape \[entries, …\]"):
        packed({"tokens": tokens, "images": np.float64(3)})
    with pytest.raises(meshfeed.SourceError, match="Decode the entries with Map"):
        packed({"tokens": tokens, "images": [b"png"]})
    with pytest.raises(meshfeed.SourceError, match="documents have the leaf 'images_mask'"):
        packed({"tokens": tokens, "images": np.zeros(1), "images_mask": np.zeros(3)})
    source = packed(*({"tokens": tokens, "images": np.zeros((1, n), np.float32)} for n in (4, 5)))
    with pytest.raises(
        meshfeed.SourceError, match=r"document 1 is float32\[5\], that of another document float32\[4\]"
    ):
        source.read_batch(range(len(source)))
    documents = some_documents(3)
    source = Packed(documents, 80, side={"images": 9, "clips": 9})
    documents._counts["images"][0] += 1
    with pytest.raises(meshfeed.SourceError, match=r"leaf 'images' of document 0 has . entries, and had . when"):
        source.read_batch(range(len(source)))


def test_a_state_with_other_limits_is_refused() -> None:
    documents = some_documents(40)
    usual: dict[str, Any] = {"side": {"images": 8, "clips": 8}}
    with feed_of(Packed(documents, 32, **usual, max_segments=4)) as feed:
        next(feed)
        state = feed.get_state()
    others: list[dict[str, Any]] = [
        {"max_segments": 5},
        {"max_segments": 4, "bos_id": 3},
        {"max_segments": 4, "align": 2},
    ]
    for changed in (*others, {}):
        other = Packed(documents, 32, **usual, **changed)
        with feed_of(other) as feed, pytest.raises(meshfeed.StateMismatchError, match="limits"):
            feed.set_state(state)
    lengths, images, clips = (counts.copy() for counts in documents._counts.values())
    images[0] += 1
    other = Packed(Documents(lengths, images, clips), 32, **usual, max_segments=4)
    with feed_of(other) as feed, pytest.raises(meshfeed.StateMismatchError, match="side"):
        feed.set_state(state)


def test_unset_limits_are_not_part_of_the_fingerprint() -> None:
    """States saved before there were limits continue."""
    plain = Packed(Memory({"tokens": np.arange(60).reshape(20, 3)}), 7)
    assert plain.fingerprint()["packing"] == {  # type: ignore[index,call-overload]
        "sequence_length": 7, "key": "tokens", "pad_id": 0, "method": "split", "block": 65_536, "long": "split",
    }  # fmt: skip


@pytest.mark.parametrize(
    "make", [lambda documents: Packed(documents, 8), lambda documents: meshfeed.sources.Buckets(documents, [4])]
)
def test_documents_without_an_end_are_named(make: Any) -> None:
    grain = pytest.importorskip("grain")
    endless = grain.MapDataset.source(np.arange(40)).repeat().map(lambda value: {"tokens": np.arange(value % 4)})
    with pytest.raises(meshfeed.SourceError, match=r"records, and measures each of them\. Pass those of one epoch"):
        make(endless)
