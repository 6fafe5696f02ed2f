"""Packing within several limits, against definitions by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed._src.order import limits as limits_module
from meshfeed._src.order import packing
from meshfeed._src.order.blocks import Packing
from meshfeed._src.order.limits import Limits, fill, first_fit, pack
from meshfeed._src.order.packing import Budget, PackingMethod


def by_hand_first_fit(sizes: list[list[int]], capacity: list[int]) -> list[int]:
    rooms: list[list[int]] = []
    found = []
    for size in sizes:
        fitting = [bin_ for bin_, room in enumerate(rooms) if all(r >= s for r, s in zip(room, size, strict=True))]
        chosen = fitting[0] if fitting else len(rooms)
        if not fitting:
            rooms.append(list(capacity))
        rooms[chosen] = [r - s for r, s in zip(rooms[chosen], size, strict=True)]
        found.append(chosen)
    return found


@st.composite
def methods(draw: st.DrawFn) -> tuple[np.ndarray, PackingMethod]:
    """Lengths of documents, and a method with any limits."""
    align = draw(st.sampled_from([1, 1, 2, 4]))
    before = draw(st.sampled_from([0, 1]))
    length = align * draw(st.integers(-(-3 // align), 12))
    number = draw(st.integers(1, 60))
    longest = draw(st.sampled_from([2, length, 3 * length]))
    lengths = np.array(draw(st.lists(st.integers(0, longest), min_size=number, max_size=number)))
    most = draw(st.lists(st.integers(1, 5), max_size=2))
    long = draw(st.sampled_from(["split", "truncate", "drop"]))
    budgets = []
    for limit in most:
        counts = st.lists(st.integers(0, limit + (long == "drop")), min_size=number, max_size=number)
        budgets.append(Budget(np.array(draw(counts)), limit))
    max_segments = draw(st.one_of(st.none(), st.integers(1, 6)))
    method = draw(st.sampled_from(["split", "fit"]))
    return lengths, PackingMethod(length, method, long, max_segments, align, before, budgets)


def check(lengths: np.ndarray, method: PackingMethod, source: Packing, epoch: int) -> None:
    """Limits are kept, and every token and entry of a document that is used comes once."""
    length, before = method.sequence_length, method.before
    pieces = source.pieces_at(epoch * source.num_sequences + np.arange(source.num_sequences))
    seen: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for first, end in zip(pieces.splits, pieces.splits[1:], strict=False):
        assert end > first
        taken, entries = 0, [0] * len(method.budgets)
        for i in range(first, end):
            document, start, size = int(pieces.documents[i]), int(pieces.starts[i]), int(pieces.lengths[i])
            assert size >= 1
            taken = -(-(taken + before + size) // method.align) * method.align
            seen[document].append((start, size))
            for k, budget in enumerate(method.budgets):
                entries[k] += int(budget.counts[document]) if start == 0 else 0
        assert taken <= length
        assert all(number <= budget.most for number, budget in zip(entries, method.budgets, strict=True))
        assert method.max_segments is None or end - first <= method.max_segments
    for document, tokens in enumerate(lengths.tolist()):
        dropped = method.long == "drop" and (
            tokens > length - before or any(budget.counts[document] > budget.most for budget in method.budgets)
        )
        kept = 0 if dropped else min(tokens, length - before) if method.long == "truncate" else tokens
        joined = 0
        for start, size in sorted(seen[document]):
            assert start == joined
            joined += size
        assert joined == kept
        if method.method == "fit" and kept:
            assert len(seen[document]) == -(-kept // (length - before))
    cut = sum(len(found) > 1 for found in seen)
    stats = source.stats(epoch)
    used = int(pieces.lengths.sum()) + before * len(pieces.lengths)
    assert stats.cut_documents == cut
    assert stats.padding_fraction == pytest.approx(1 - used / (length * source.num_sequences))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(case=methods(), block=st.sampled_from([7, 64]), seed=st.integers(0, 3))
def test_limits_are_kept_in_every_order(case: tuple[np.ndarray, PackingMethod], block: int, seed: int) -> None:
    lengths, method = case
    source = Packing(lengths, method, block=block)
    if not source.num_sequences:
        return
    check(lengths, method, source, 0)
    shuffled = pickle.loads(pickle.dumps(source.shuffled(seed)))
    for epoch in (0, 3):
        check(lengths, method, shuffled, epoch)
    shards = np.bincount(np.arange(len(lengths)) // 9)
    check(lengths, method, source.by_windows(shards, 2, seed), 1)


@settings(max_examples=150, deadline=None)
@given(case=methods())
def test_the_extension_packs_as_python_does(case: tuple[np.ndarray, PackingMethod]) -> None:
    if limits_module.extension is None or packing.extension is None:
        pytest.skip("the extension modules are not built")
    lengths, method = case
    found = []
    for uses_extension in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not uses_extension:
                patch.setattr(limits_module, "extension", None)
                patch.setattr(packing, "extension", None)
            source = Packing(lengths, method, block=64).shuffled(1)
            pieces = source.pieces_at(np.arange(source.num_sequences)) if source.num_sequences else None
            found.append(pieces and [v.tolist() for v in (pieces.splits, pieces.documents, pieces.starts)])
    assert found[0] == found[1]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), limits=st.integers(1, 3))
def test_first_fit_is_that_by_hand(data: st.DataObject, limits: int) -> None:
    capacity = data.draw(st.lists(st.integers(1, 12), min_size=limits, max_size=limits))
    item = st.tuples(*(st.integers(0, most) for most in capacity)).map(list)
    sizes = data.draw(st.lists(item, min_size=1, max_size=50))
    found, number = first_fit(np.array(sizes), np.array(capacity))
    assert found.tolist() == by_hand_first_fit(sizes, capacity)
    assert number == max(found) + 1
    assert limits_module._first_fit_in_python(sizes, capacity)[0].tolist() == found.tolist()


def test_a_search_that_takes_too_long_opens_a_bin() -> None:
    """Every second bin has room in one dimension, the others in the other, and the last items need both."""
    sizes, capacity = np.array([[9, 2], [2, 9]] * 2000 + [[3, 3]] * 50 + [[1, 1]]), np.array([10, 10])
    found, number = first_fit(sizes, capacity)
    assert number == 4050, "a full search would put three of the last items into a bin"
    bins, in_python = limits_module._first_fit_in_python(sizes.tolist(), capacity.tolist())
    np.testing.assert_array_equal(found, bins)
    assert in_python == number
    assert first_fit(sizes[3800:], capacity)[1] == 217, "a short search is a full one"


@pytest.mark.parametrize("cuts", [False, True])
def test_padding_is_at_most_that_of_first_fit(cuts: bool) -> None:
    """First fit in document order, with the same limits: lengths of several shapes, and as many slots as are needed."""
    rng = np.random.default_rng(0)
    length, number = 1024, 4000
    shapes = {
        "uniform": rng.integers(1, length + 1, number),
        "lognormal": rng.lognormal(5.3, 1.2, number),
        "exponential": rng.exponential(200, number),
        "two sizes": np.where(rng.random(number) < 0.7, rng.integers(10, 40, number), rng.integers(500, 750, number)),
        "many tiny": np.where(rng.random(number) < 0.95, rng.integers(1, 10, number), rng.integers(100, length, number)),
        "near the length": np.where(rng.random(number) < 0.6, rng.integers(870, length, number), rng.integers(1, 99, number)),
    }  # fmt: skip
    for lengths in shapes.values():
        lengths = np.clip(lengths, 1, length).astype(np.int64)
        entries = rng.integers(0, 3, number)[:, None]
        for slots in {max(2, round(share * length / lengths.mean())) for share in (1, 1.2, 2)} | {4, 64}:
            for sizes, most in ((entries[:, :0], ()), (entries, (max(4, slots),))):
                found = pack(lengths, sizes, Limits(length, 1, 0, slots, most), cuts=cuts)
                vectors = np.column_stack([lengths, np.ones_like(lengths), sizes])
                _, usual = first_fit(vectors, np.array([length, slots, *most]))
                points = lengths.sum() / length * (1 / usual - 1 / found.number)
                assert points < 0.01


def test_fill_of_nothing_but_tokens_leaves_no_padding() -> None:
    lengths = np.sort(np.random.default_rng(1).integers(1, 100, 500))
    items, starts, ends, bins = fill(lengths, np.zeros((500, 0), int), Limits(128, 1, 0, 128, ()))
    assert bins.max() + 1 == -(-lengths.sum() // 128)
    np.testing.assert_array_equal(np.bincount(items, ends - starts), lengths)


def test_arguments_that_do_not_fit_their_buffers() -> None:
    extension = limits_module.extension
    if extension is None:
        pytest.skip("the extension module is not built")
    one = np.ones(1, np.int32)
    none = np.ones(0, np.int32)
    for sizes, capacity, bins in (
        (5 * one, 4 * one, one),
        (-one, one, one),
        (one, one, np.ones(2, np.int32)),
        (one, none, one),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            extension.first_fit(sizes, capacity, bins)
    pieces = np.empty((4, 2), np.int32)
    for lengths, sizes, capacity, *rest in (
        (5 * one, none, none, 4, 1, 0, 1, pieces),
        (one, one, none, 4, 1, 0, 1, pieces),
        (one, 2 * one, one, 4, 1, 0, 1, pieces),
        (one, none, none, 4, 3, 0, 1, pieces),
        (one, none, none, 4, 0, 0, 1, pieces),
        (one, none, none, 4, 1, 4, 1, pieces),
        (one, none, none, 4, 1, 0, 0, pieces),
        (one, none, none, 4, 1, 0, 1, np.empty((4, 1), np.int32)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            extension.fill(lengths, sizes, capacity, *rest)


def test_fixed_values() -> None:
    """Packed sequences are part of saved states: a change needs a new VERSION of the limits."""
    lengths = np.arange(1, 400) % 23
    counts = np.arange(399) % 3
    digests = []
    for method in ("split", "fit"):
        for limited in (
            PackingMethod(16, method, "split", 3),
            PackingMethod(16, method, "split", None, 4, 0),
            PackingMethod(16, method, "split", 3, 2, 1),
            PackingMethod(16, method, "split", None, 1, 1),
            PackingMethod(16, method, "split", 4, 1, 0, (Budget(counts, 4),)),
        ):
            source = Packing(lengths, limited, block=150).shuffled(5)
            pieces = source.pieces_at(np.arange(source.num_sequences))
            values = (pieces.documents * 1_000_003 + pieces.starts) * np.arange(1, len(pieces.starts) + 1)
            digests.append((source.num_sequences, int(np.bitwise_xor.reduce(values))))
    assert (limits_module.VERSION, digests) == (
        1,
        [
            (274, 84878239326), (310, 49937516967), (316, 46097576706), (316, 53863512926), (272, 79580104884),
            (281, 97437130394), (310, 104028466336), (316, 46097576706), (305, 82588729906), (277, 100940583326),
        ],
    )  # fmt: skip
