"""Packing of documents into sequences, against definitions by hand."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed._src.base.settings import ShardShuffle
from meshfeed._src.order import packing
from meshfeed._src.order.blocks import PACKING_VERSION, Packing, PackingStats, SequenceOrder
from meshfeed._src.order.packing import PackingMethod, best_fit

RNG = np.random.default_rng(0)
DISTRIBUTIONS = {
    "one document": np.array([37]),
    "all of length 1": np.ones(200, np.uint32),
    "one of a million": np.array([3, 10**6, 0, 5, 7]),
    "lognormal": np.minimum(RNG.lognormal(2.5, 1.2, 700).astype(np.uint32), 500),
    "all of one sequence": np.full(90, 16),
    "many empty": np.where(RNG.random(400) < 0.7, 0, RNG.integers(0, 60, 400)),
}
SIZE = 16


def packed(lengths: np.ndarray, method: str, long: str = "split", block: int = 64, size: int = SIZE) -> Packing:
    return Packing(lengths, PackingMethod(size, method, long), block=block)


def sequences(source: Packing, epoch: int = 0) -> list[list[tuple[int, int, int]]]:
    """(document, start, length) of each piece of each sequence of an epoch."""
    positions = epoch * source.num_sequences + np.arange(source.num_sequences)
    pieces = source.pieces_at(positions)
    rows = np.stack([pieces.documents, pieces.starts, pieces.lengths], 1).tolist()
    return [[tuple(row) for row in rows[a:b]] for a, b in zip(pieces.splits, pieces.splits[1:], strict=False)]


def by_hand_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The room left in each bin, ascending."""
    rooms: list[int] = []
    for length in lengths:
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@pytest.mark.parametrize("method", ["split", "fit"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", [None, 7])
def test_every_token_once_per_epoch(method: str, name: str, seed: int | None) -> None:
    lengths = DISTRIBUTIONS[name]
    source = packed(lengths, method)
    source = source if seed is None else source.shuffled(seed)
    for epoch in (0, 1, 5):
        found = sequences(source, epoch)
        assert all(0 < sum(length for *_, length in sequence) <= SIZE for sequence in found)
        pieces = sorted(piece for sequence in found for piece in sequence)
        assert min(length for *_, length in pieces) >= 1
        joined = np.zeros(len(lengths), np.int64)
        for document, start, length in pieces:
            assert start == joined[document]  # the pieces of a document follow each other
            joined[document] += length
        np.testing.assert_array_equal(joined, lengths)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", [None, 7])
def test_fit_cuts_no_document_that_fits(name: str, seed: int | None) -> None:
    lengths = DISTRIBUTIONS[name]
    source = packed(lengths, "fit")
    found = sequences(source if seed is None else source.shuffled(seed))
    counts = np.bincount([document for sequence in found for document, *_ in sequence], minlength=len(lengths))
    np.testing.assert_array_equal(counts, -(-lengths.astype(int) // SIZE))
    assert source.stats().cut_documents == np.count_nonzero(lengths > SIZE)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_split_is_the_documents_of_a_block_end_to_end(name: str) -> None:
    lengths = DISTRIBUTIONS[name]
    found = []
    for first in range(0, len(lengths), 64):
        tokens = [(d, i) for d in range(first, min(first + 64, len(lengths))) for i in range(int(lengths[d]))]
        found += [tokens[i : i + SIZE] for i in range(0, len(tokens), SIZE)]
    source = packed(lengths, "split")
    expanded = [[(d, start + i) for d, start, n in seq for i in range(n)] for seq in sequences(source)]
    assert expanded == found
    cut = len({d for a, b in itertools.pairwise(found) for d in {d for d, _ in a} & {d for d, _ in b}})
    stats = source.stats()
    assert stats.cut_documents == cut
    assert stats.padding_fraction == pytest.approx(1 - lengths.sum() / (SIZE * len(found)))


@pytest.mark.parametrize("method", ["split", "fit"])
@pytest.mark.parametrize("long", ["truncate", "drop"])
def test_long_documents(method: str, long: str) -> None:
    lengths = np.array([5, 40, 16, 17, 3, 0, 100])
    source = packed(lengths, method, long)
    kept = [16 if n > 16 and long == "truncate" else 0 if n > 16 else n for n in lengths]
    found = np.zeros(len(lengths), np.int64)
    for sequence in sequences(source.shuffled(3)):
        for document, start, length in sequence:
            assert start + length <= kept[document]
            found[document] += length
    np.testing.assert_array_equal(found, kept)
    assert source.stats().lost_tokens == lengths.sum() - sum(kept)


@pytest.mark.parametrize("method", ["split", "fit"])
def test_a_sequence_is_a_function_of_its_place(method: str) -> None:
    lengths = DISTRIBUTIONS["lognormal"]
    source = packed(lengths, method).shuffled(11)
    count = source.num_sequences
    whole = [sequence for epoch in range(3) for sequence in sequences(source, epoch)]
    again = pickle.loads(pickle.dumps(source))
    positions = RNG.integers(0, 3 * count, 200)
    pieces = again.pieces_at(positions)
    rows = np.stack([pieces.documents, pieces.starts, pieces.lengths], 1).tolist()
    for i, position in enumerate(positions):
        assert [tuple(row) for row in rows[pieces.splits[i] : pieces.splits[i + 1]]] == whole[position]


def test_statistics_are_those_of_all_blocks() -> None:
    lengths = np.array([5, 40, 16, 17, 3, 0, 100])
    source = packed(lengths, "split", "drop", block=4)
    assert source.stats() == source.copy().stats(4) == PackingStats(3, 7, 24, 0.5, 1, 157)
    assert packed(lengths, "fit", block=3).stats() == PackingStats(13, 7, 181, 1 - 181 / 208, 3, 0)


def test_the_order_of_sequences_is_that_of_their_places() -> None:
    order, endless = (SequenceOrder(np.array([2, 3]), 7, num_epochs) for num_epochs in (2, None))
    assert (order.total, endless.total) == (10, None)
    assert order.config() == {"algorithm": "packing", "version": 1, "shuffle": True, "seed": 7}
    for found in (order.ids_between(3, 7), order.ids_at(np.array([3, 4, 5, 6], np.int32))):
        assert [array.tolist() for array in found] == [[3, 4, 5, 6], [0, 0, 1, 1]]
        assert [array.dtype for array in found] == [np.int64, np.int64]
    assert [array.size for array in order.ids_between(7, 7)] == [0, 0]
    with pytest.raises(IndexError, match=r"9\.\.10 .*\[0, 10\)"):
        order.ids_between(9, 11)
    assert endless.ids_between(9, 11)[0].tolist() == [9, 10]


def test_shuffling_permutes_blocks_and_documents_within_blocks() -> None:
    source = packed(np.full(640, 4), "split", block=64)
    assert source.num_sequences == 160
    epochs = [sequences(source.shuffled(seed), epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert epochs[0] == epochs[3]
    assert len({str(epoch) for epoch in epochs}) == 3
    for epoch in epochs:
        blocks = [{d // 64 for seq in epoch[i : i + 16] for d, *_ in seq} for i in range(0, 160, 16)]
        assert all(len(block) == 1 for block in blocks)
        assert sorted(min(block) for block in blocks) == [*range(10)]
        assert [min(block) for block in blocks] != [*range(10)]
        assert [d for seq in epoch for d, *_ in seq] != sorted(d for seq in epoch for d, *_ in seq)


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=80), capacity=st.sampled_from([40, 63, 64, 4096, 100_000]))
def test_best_fit_in_c_and_python_is_that_by_hand(lengths: list[int], capacity: int) -> None:
    lengths = [1 + (length * capacity) // 41 for length in lengths]
    values = np.array(lengths, np.int64)
    found = packing._best_fit_in_python(lengths, capacity)
    if packing.extension is not None:
        np.testing.assert_array_equal(found[0], best_fit(values, capacity)[0])
        assert found[1] == best_fit(values, capacity)[1]
    loads = np.bincount(found[0], weights=values, minlength=found[1]).astype(int)
    assert sorted(capacity - loads) == by_hand_best_fit(lengths, capacity)


def test_packing_without_the_extension_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [sequences(packed(lengths, "fit").shuffled(3)) for lengths in DISTRIBUTIONS.values()]
    monkeypatch.setattr(packing, "extension", None)
    assert [sequences(packed(lengths, "fit").shuffled(3)) for lengths in DISTRIBUTIONS.values()] == usual


def test_arguments_that_do_not_fit_their_buffers() -> None:
    if packing.extension is None:
        pytest.skip("the extension module is not built")
    one = np.ones(1, np.int32)
    for lengths, capacity, bins in (
        (one, 0, one),
        (0 * one, 4, one),
        (5 * one, 4, one),
        (one, 4, np.ones(2, np.int32)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            packing.extension.best_fit(lengths, capacity, bins)


def test_fixed_values() -> None:
    """The order of packed sequences is part of saved states: a change needs a new PACKING_VERSION."""
    lengths = np.arange(1, 200) % 23
    digests = []
    for method in ("split", "fit"):
        pieces = packed(lengths, method).shuffled(5).pieces_at(np.arange(200))
        digests.append(
            int(
                np.bitwise_xor.reduce(
                    (pieces.documents * 1_000_003 + pieces.starts) * np.arange(1, len(pieces.starts) + 1)
                )
            )
        )
    assert (PACKING_VERSION, digests) == (1, [136066015613, 23828440401])


@pytest.mark.parametrize("method", ["split", "fit"])
def test_windows_of_shards_are_packed_together(method: str) -> None:
    lengths = DISTRIBUTIONS["lognormal"]
    shards = np.array([0, 100, 120, 0, 80, 200, 90, 110])
    list_order = packed(lengths, method)
    source = list_order.by_windows(shards, 2, seed=3)
    assert sum(list_order.in_shards(shards)) == list_order.num_sequences
    bounds = [0, 220, 500, 700]
    assert len(source.counts) == 3
    first = 0
    for window, count in enumerate(source.counts.tolist()):
        for epoch in (0, 4):
            found = source.pieces_at(epoch * source.num_sequences + first + np.arange(count))
            documents = set(found.documents.tolist())
            used = np.flatnonzero(lengths[bounds[window] : bounds[window + 1]]) + bounds[window]
            assert documents == set(used.tolist())
            by_sequence = np.split(found.documents, found.splits[1:-1])
            assert any(min(d) < bounds[window] + 100 < max(d) for d in by_sequence)  # of several shards in a sequence
        first += count
    assert sequences(source, 0) != sequences(source, 1)


def test_sequences_of_a_list_count_for_the_shard_in_which_their_block_begins() -> None:
    source = packed(np.full(200, SIZE), "split", block=64)  # a sequence per document
    assert source.in_shards(np.array([10, 60, 0, 70, 60])).tolist() == [64, 64, 0, 64, 8]


def test_fixed_values_by_shards() -> None:
    """Pins the order of windows in lanes: a changed output requires a new version."""
    lengths = np.arange(1, 200) % 23
    digests = []
    for method in ("split", "fit"):
        source = packed(lengths, method).by_windows(np.array([50, 0, 49, 30, 70]), 2, 5)
        shuffle = ShardShuffle(affinity=True)
        order = SequenceOrder(source.counts, 5, 2, shuffle=shuffle, num_lanes=2, segments=[(0, 4)])
        pieces = source.pieces_at(order.ids_between(0, order.total or 0)[0])
        weights = np.arange(1, len(pieces.starts) + 1)
        digests.append(int(np.bitwise_xor.reduce((pieces.documents * 1_000_003 + pieces.starts) * weights)))
    config = order.config()
    assert config.pop("shards")
    assert config == {
        "algorithm": "packing", "version": 1, "shuffle": "shards", "affinity": True, "seed": 5,
        "num_lanes": 2, "places": ["shard-windows", 1],
    }  # fmt: skip
    assert digests == [55463060212, 101797094765]
