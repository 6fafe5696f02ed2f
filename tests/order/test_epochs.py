"""The order of records: a bijection, the same on every machine and in every version, and random enough.

The statistics use fixed seeds, so each test has one outcome; the bounds are five standard deviations.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfeed._src.base.errors import SettingsError, SourceError
from meshfeed._src.base.rng import philox
from meshfeed._src.order import permutation
from meshfeed._src.order.epochs import EpochOrder
from meshfeed._src.order.permutation import derive_key, permute, replacement_id

JUST_ABOVE = [2**k + 1 for k in (12, 13, 16, 20, 31, 32, 40)]
LENGTHS = [1, 2, 3, 7, 100, 4095, 4096, 4097, 10_007, 2**16, 2**16 + 1, 10**6, 2**20 + 1, 10**9, 10**12, 2**40 + 1]


def excess(counts: np.ndarray) -> float:
    """Chi-square of counts that should be equal, in standard deviations from what chance gives."""
    counts = counts.astype(float).reshape(-1)
    mean = counts.mean()
    assert mean >= 5, "too few samples per cell"
    degrees = counts.size - 1
    return float((((counts - mean) ** 2 / mean).sum() - degrees) / np.sqrt(2 * degrees))


def cells(values: np.ndarray, num_records: int, count: int) -> np.ndarray:
    return (values.astype(float) / num_records * count).astype(int)


def pair_counts(first: np.ndarray, second: np.ndarray, num_records: int, count: int = 16) -> np.ndarray:
    return np.bincount(cells(first, num_records, count) * count + cells(second, num_records, count), minlength=count**2)


def uniform(num_records: int, **kwargs) -> EpochOrder:
    return EpochOrder(num_records, shuffle=True, num_epochs=None, **kwargs)


# --- a bijection ---------------------------------------------------------------------------------------------------


@given(
    num_records=st.one_of(st.integers(1, 300), st.integers(4090, 4100), st.integers(1, 40_000)),
    shuffle=st.one_of(st.booleans(), st.integers(0, 300), st.integers(4000, 50_000)),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_every_record_once_per_epoch(num_records, shuffle, seed, epoch):
    order = EpochOrder(num_records, shuffle=shuffle, seed=seed, num_epochs=None)
    record_ids, epochs = order.ids_at(np.arange(num_records) + epoch * num_records)
    np.testing.assert_array_equal(np.sort(record_ids), np.arange(num_records))
    assert record_ids.dtype == epochs.dtype == np.int64
    assert (epochs == epoch).all()


@pytest.mark.parametrize("num_records", [*JUST_ABOVE[3:], 10**12, 2**62])
@pytest.mark.parametrize("shuffle", [True, 1000, 1 << 14])
def test_no_id_twice_nor_out_of_range_where_the_epoch_is_too_long_to_read(num_records, shuffle):
    order = EpochOrder(num_records, shuffle=shuffle, seed=1, num_epochs=None)
    for start in (0, num_records // 3, num_records - 200_000):
        record_ids, _ = order.ids_at(np.arange(start, start + 200_000))
        assert np.unique(record_ids).size == 200_000
        assert record_ids.min() >= 0
        assert record_ids.max() < num_records


@given(
    num_records=st.one_of(st.integers(1, 50), st.integers(4000, 9000)),
    shuffle=st.one_of(st.booleans(), st.integers(1, 600)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_position_has_one_record_however_it_is_requested(num_records, shuffle, data):
    order = EpochOrder(num_records, shuffle=shuffle, seed=5, num_epochs=None)
    total = 3 * num_records + 7
    together, epochs = order.ids_at(np.arange(total))
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    for start, stop in itertools.pairwise(cuts):
        np.testing.assert_array_equal(order.ids_at(np.arange(start, stop))[0], together[start:stop])
    scattered = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=40)))
    ids, which = order.ids_at(scattered)
    np.testing.assert_array_equal(ids, together[scattered])
    np.testing.assert_array_equal(which, scattered // num_records)
    np.testing.assert_array_equal(epochs, np.arange(total) // num_records)


def test_sequential():
    record_ids, epochs = EpochOrder(5, shuffle=False, seed=9, num_epochs=3).ids_at(np.arange(3, 12))
    assert record_ids.tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_total_and_the_ends_of_the_stream():
    order = EpochOrder(10, shuffle=True, seed=0, num_epochs=3)
    assert order.total == 30
    assert EpochOrder(10, shuffle=True, seed=0, num_epochs=None).total is None
    for shuffle in (False, True):
        for positions in (np.empty(0, np.int32), np.arange(10, dtype=np.int32)):
            found = EpochOrder(10, shuffle=shuffle, seed=0, num_epochs=3).ids_at(positions)
            assert [(array.size, array.dtype) for array in found] == [(positions.size, np.int64)] * 2
    with pytest.raises(IndexError, match=r"28\.\.30 .*\[0, 30\)"):
        order.ids_at(np.array([28, 29, 30]))
    with pytest.raises(IndexError):
        order.ids_at(np.array([-1]))


def test_far_positions_cost_no_more_and_are_right():
    order = uniform(10**12, seed=3)
    far = np.arange(9 * 10**11, 9 * 10**11 + 64)
    assert np.unique(order.ids_at(far)[0]).size == 64
    order = EpochOrder(3, shuffle=True, seed=3, num_epochs=None)
    start = (2**62 - 64) // 3 * 3
    record_ids, epochs = order.ids_at(np.arange(start, start + 30))
    np.testing.assert_array_equal(np.sort(record_ids.reshape(10, 3), axis=1), np.tile([0, 1, 2], (10, 1)))
    assert epochs[0] == start // 3
    assert epochs[-1] == start // 3 + 9


# --- golden values ----------------------------------------------------------------------------------------------------

# A list, not a dict: as keys, True and 1 are the same.
GOLDEN = [
    (7, True, 0, "e5b661be1e0f2447"),
    (4_096, True, 1, "fce934a715ee776d"),
    (4_097, True, 18446744073709551615, "dee5426c27f9da0b"),
    (100_000, False, 0, "4192cb5e2fd7d286"),
    (100_000, True, 0, "95fe2ca1bf443bba"),
    (100_000, 1, 0, "56f242373657a656"),
    (99_999, 500, 0, "2c530c0a084944f0"),
    (1_000_000_000_000, True, 5, "f89864fd88aed137"),
    (1_000_000_000_001, 4096, 5, "e66ffca1ae038752"),
]
FIRST_10 = [6, 2, 4, 0, 9, 8, 5, 3, 1, 7, 8, 6, 2, 1, 5, 3, 9, 0, 4, 7]
FIRST_1E12 = [987027171496, 761844323577, 313161504808, 153273291219]
FIRST_PERMUTE = [733773, 344218, 175845, 700919]
FIRST_REPLACEMENT = 380213


def golden(order: EpochOrder) -> str:
    """Digest of three stretches of an order: its start, an epoch's edge, and far away."""
    digest = hashlib.sha256()
    for start in (0, max(0, order.num_records - 100), 7 * order.num_records + order.num_records // 3):
        for array in order.ids_at(np.arange(start, start + 5000)):
            digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(("num_records", "shuffle", "seed", "digest"), GOLDEN)
def test_the_algorithm_has_not_changed(num_records, shuffle, seed, digest):
    """If this fails, saved states would continue with different records: raise VERSION, and only then these values."""
    assert permutation.VERSION == 2
    found = golden(EpochOrder(num_records, shuffle=shuffle, seed=seed, num_epochs=None))
    assert found == digest


def test_first_ids_are_these():
    assert uniform(10, seed=0).ids_at(np.arange(20))[0].tolist() == FIRST_10
    assert uniform(10**12, seed=0).ids_at(np.arange(4))[0].tolist() == FIRST_1E12
    assert permute(np.arange(4), 10**6, key=7).tolist() == FIRST_PERMUTE


def in_numpy(offsets: np.ndarray, num_records: int, key: int) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "extension", None)
        return permute(offsets, num_records, key)


@settings(max_examples=200, deadline=None)
@given(
    num_records=st.one_of(st.integers(1, 20_000), st.integers(1, 2**62), st.integers(12, 61).map(lambda k: 2**k + 1)),
    key=st.integers(0, 2**64 - 1),
    places=st.lists(st.integers(0, 2**62), max_size=200),
    dtype=st.sampled_from([np.int64, np.uint64, np.int32, np.uint16]),
    step=st.integers(1, 3),
)
def test_the_extension_and_numpy_permute_alike(num_records, key, places, dtype, step):
    domain = min(num_records, np.iinfo(dtype).max)
    offsets = np.array([place % domain for place in places], dtype)[::step]
    before = offsets.copy()
    found = permute(offsets, num_records, key)
    np.testing.assert_array_equal(found, in_numpy(offsets, num_records, key))
    np.testing.assert_array_equal(offsets, before)
    assert found.dtype == np.int64
    assert not found.size or (found.min() >= 0 and found.max() < num_records)


@pytest.mark.parametrize("num_records", [*JUST_ABOVE, 10**12, 2**62])
def test_the_extension_and_numpy_permute_many_ids_alike(num_records):
    """More ids than a slice of numpy or a group of the extension; just above a power of two, some are permuted again."""
    offsets = np.arange(40_001) % num_records
    np.testing.assert_array_equal(permute(offsets, num_records, 9), in_numpy(offsets, num_records, 9))


def test_the_extension_refuses_what_does_not_fit():
    if permutation.extension is None:
        pytest.skip("the extension module is not built")
    network = permutation._network(10**6, 7)
    bits, rows, constants = network
    wrong = [
        (np.array([10**6]), 10**6, *network),
        (np.array([-1]), 10**6, *network),
        (np.zeros(1, np.int64), 10**6, 0, rows, constants),
        (np.zeros(1, np.int64), 10**6, 64, rows, constants),
        (np.zeros(1, np.int64), 10**6, bits, 0, constants),
        (np.zeros(1, np.int64), 10**6, bits, 2**60, constants),
        (np.zeros(1, np.int64), 10**6, bits, rows // 2, constants),
        (np.zeros(1, np.int64), 10**6, bits, rows, constants[1:]),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            permutation.extension.permute(*arguments)


def test_settings_are_part_of_the_order():
    positions = np.arange(5000)
    base = uniform(20_000, seed=1).ids_at(positions)[0]
    assert (uniform(20_000, seed=2).ids_at(positions)[0] != base).mean() > 0.99
    assert (uniform(20_001, seed=1).ids_at(positions)[0] != base).mean() > 0.99
    assert (EpochOrder(20_000, shuffle=1000, seed=1, num_epochs=None).ids_at(positions)[0] != base).mean() > 0.99
    assert (uniform(20_000, seed=1).ids_at(positions + 20_000)[0] != base).mean() > 0.99


def test_config_and_value_semantics():
    order = EpochOrder(20_000, shuffle=1, seed=4, num_epochs=2)
    assert order.config() == {"algorithm": "feistel-square", "version": 2, "shuffle": 1, "seed": 4}
    assert type(order.config()["shuffle"]) is int
    assert EpochOrder(20_000, shuffle=True, seed=4, num_epochs=2).config()["shuffle"] is True
    assert order != EpochOrder(20_000, shuffle=True, seed=4, num_epochs=2), "a block of 1 is not True"
    copy = pickle.loads(pickle.dumps(order))
    assert copy == order
    assert hash(copy) == hash(order)
    np.testing.assert_array_equal(copy.ids_at(np.arange(9))[0], order.ids_at(np.arange(9))[0])
    with pytest.raises(AttributeError):
        order.seed = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "kwargs"),
    [
        ("shuffle", {"shuffle": -1}),
        ("shuffle", {"shuffle": "yes"}),
        ("shuffle", {"shuffle": 1.5}),
        ("shuffle", {"shuffle": None}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
        ("seed", {"seed": True}),
        ("seed", {"seed": 1.0}),
        ("num_epochs", {"num_epochs": 0}),
        ("num_epochs", {"num_epochs": True}),
        ("num_epochs", {"num_epochs": 1.5}),
    ],
)
def test_wrong_settings_are_named(setting, kwargs):
    with pytest.raises(SettingsError, match=setting) as raised:
        EpochOrder(10, **{"shuffle": False, "seed": 0, "num_epochs": 1, **kwargs})
    assert raised.value.setting == setting


@pytest.mark.parametrize("num_records", [2**62 + 1, 10.0, True, None])
def test_a_wrong_number_of_records_is_named(num_records):
    with pytest.raises(SettingsError) as raised:
        EpochOrder(num_records, shuffle=False, seed=0, num_epochs=1)
    assert raised.value.setting == "num_records"
    assert str(raised.value) == f"num_records must be an int from 1 to 2**62, not {num_records!r}."


def test_no_records_is_a_source_error():
    with pytest.raises(SourceError, match="0 records"):
        EpochOrder(0, shuffle=False, seed=0, num_epochs=1)


# --- random enough --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_records", [2, 3, 4, 5])
def test_tiny_epochs_reach_every_permutation_equally(num_records):
    epochs = 1200 * int(np.prod(np.arange(1, num_records + 1))) // 20
    record_ids = uniform(num_records, seed=2).ids_at(np.arange(epochs * num_records))[0].reshape(epochs, num_records)
    codes = record_ids @ (num_records ** np.arange(num_records))
    _, counts = np.unique(codes, return_counts=True)
    assert counts.size == np.prod(np.arange(1, num_records + 1))
    assert abs(excess(counts)) < 5


@pytest.mark.parametrize("num_records", [5, 60, 4096, 4097, 8193, 65_537, 10**6])
def test_over_epochs_each_position_has_every_record_equally_often(num_records):
    """The marginal of one position, and of two neighbours together, over epochs and over seeds."""
    count = min(num_records, 12)
    epochs = np.arange(3000)
    order = uniform(num_records, seed=8)
    for offset in (0, num_records // 2, num_records - 2):
        first = order.ids_at(epochs * num_records + offset)[0]
        second = order.ids_at(epochs * num_records + offset + 1)[0]
        if num_records > 100:
            assert abs(excess(np.bincount(cells(first, num_records, count)))) < 5
            assert abs(excess(pair_counts(first, second, num_records, count))) < 5
        else:
            assert abs(excess(np.bincount(first, minlength=num_records))) < 5
    by_seed = np.array([int(uniform(num_records, seed=seed).ids_at(np.array([1]))[0][0]) for seed in range(600)])
    assert abs(excess(np.bincount(cells(by_seed, num_records, min(num_records, 12))))) < 5


@pytest.mark.parametrize("num_records", [n for n in LENGTHS if n >= 4096] + JUST_ABOVE)
def test_neighbours_and_epochs_are_independent(num_records):
    span = min(num_records, 1 << 16)
    column_bits = permutation._network(max(num_records, 4097), 0)[0]
    lags = [1, 2, 3, 1 << (column_bits // 2), 1 << column_bits, (1 << column_bits) + 1]
    worst: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, -9.0), value)

    for seed in range(6):
        order = uniform(num_records, seed=seed)
        start = int(np.random.default_rng(seed).integers(0, num_records - span + 1))
        positions = np.arange(start, start + span)
        ids = order.ids_at(positions)[0]
        later = order.ids_at(positions + num_records)[0]
        if span < num_records:
            note("uniform", excess(np.bincount(cells(ids, num_records, 256), minlength=256)))
            note("late bits", excess(np.bincount(ids & 63, minlength=64)) if num_records > 10**7 else 0.0)
        for lag in lags:
            if lag <= span // 2:
                note(f"pairs {lag}", excess(pair_counts(ids[:-lag], ids[lag:], num_records)))
                steps = (ids[lag:] - ids[:-lag]) % num_records
                note(f"steps {lag}", excess(np.bincount(cells(steps, num_records, 64), minlength=64)))
        quadruples = cells(ids[: span // 4 * 4].reshape(-1, 4), num_records, 3) @ 3 ** np.arange(4)
        note("quadruples", excess(np.bincount(quadruples, minlength=81)))
        note("epochs", excess(pair_counts(ids, later, num_records)))
        differences = (later - ids) % num_records
        note("epoch differences", excess(np.bincount(cells(differences, num_records, 64), minlength=64)))
    # Sampling without replacement makes counts more even than chance, never less, so only the upper side is bounded.
    assert max(worst.values()) < 5, worst


@pytest.mark.parametrize("num_records", [4097, 65_537, 10**5])
def test_fixed_points_between_epochs_are_as_rare_as_chance(num_records):
    order = uniform(num_records, seed=1)
    epochs = [order.ids_at(np.arange(num_records) + epoch * num_records)[0] for epoch in range(12)]
    common = [int((first == second).sum()) for first, second in itertools.combinations(epochs, 2)]
    # 66 Poisson variables of mean 1: the sum lies within 66 ± 5 * sqrt(66).
    assert 25 < sum(common) < 107
    assert max(common) < 9


@pytest.mark.parametrize("num_records", [2**20 + 1, 10**9, 10**12, 2**40 + 1])
def test_gaps_between_the_sorted_ids_of_a_batch_are_exponential(num_records):
    """A round function that is too linear spreads neighbours too evenly, which shows here."""
    statistics = []
    for seed in range(20):
        ids = np.sort(uniform(num_records, seed=seed).ids_at(np.arange(2048) + seed * 10_000)[0])
        gaps = np.sort(np.diff(ids) * 2049 / num_records)
        expected = 1 - np.exp(-gaps)
        grid = np.arange(1, gaps.size + 1) / gaps.size
        statistics.append(np.abs(expected - grid).max() * np.sqrt(gaps.size))
    assert np.median(statistics) < 1.1
    assert max(statistics) < 2.3


# --- blocked --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 10, 512, 5000])
@pytest.mark.parametrize("num_records", [1, 97, 1000, 20_003])
def test_blocks_are_read_one_after_the_other_and_whole(num_records, block):
    order = EpochOrder(num_records, shuffle=block, seed=3, num_epochs=None)
    for epoch in (0, 2):
        record_ids = order.ids_at(np.arange(num_records) + epoch * num_records)[0]
        assert np.sort(record_ids).tolist() == list(range(num_records))
        assert np.count_nonzero(np.diff(record_ids // block)) + 1 == -(-num_records // block)
        anywhere = np.random.default_rng(0).permutation(num_records)[:50]
        assert order.ids_at(anywhere + epoch * num_records)[0].tolist() == record_ids[anywhere].tolist()


@pytest.mark.parametrize("num_records", [10**6, 10**6 - 317, 2**40 + 1])
def test_blocked_reads_stay_within_few_blocks_in_a_source_of_any_length(num_records):
    block = 512
    order = EpochOrder(num_records, shuffle=block, seed=3, num_epochs=None)
    for start in (0, 123_456, 8192 * 7):
        record_ids = order.ids_at(np.arange(start, start + 16 * block))[0]
        assert np.unique(record_ids // block).size <= 18  # the first and last in part, and the short one
        assert (np.abs(np.diff(record_ids)) == 1).mean() < 0.01, "records of a block are mixed"


def test_blocked_mixes_blocks_and_records():
    num_records, block = 10**6 - 317, 512
    order = EpochOrder(num_records, shuffle=block, seed=3, num_epochs=None)
    first, second = (order.ids_at(np.arange(num_records) + epoch * num_records)[0] for epoch in (0, 1))
    starts = first[::block] // block
    assert excess(np.bincount(cells(starts, num_records // block + 1, 8), minlength=8)) < 5
    assert excess(pair_counts(first[::block], second[::block], num_records, 8)) < 5
    within = first[: 400 * block] % block
    assert excess(pair_counts(within[:-1], within[1:], block, 8)) < 5
    assert excess(pair_counts(within[: 200 * block], within[200 * block :], block, 8)) < 5


def test_the_short_block_moves_about():
    num_records, block = 16 * 4096 + 100, 4096
    order = EpochOrder(num_records, shuffle=block, seed=3, num_epochs=None)
    places = set()
    for epoch in range(30):
        record_ids = order.ids_at(np.arange(num_records) + epoch * num_records)[0]
        places.add(int(np.flatnonzero(record_ids >= 16 * block).mean()) // block)
    assert len(places) >= 2


# --- keys of single records -----------------------------------------------------------------------------------------


@given(num_records=st.integers(2, 60), record=st.integers(0, 59), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_replacements_try_every_other_record_once(num_records, record, seed):
    record %= num_records
    tried = [replacement_id(seed, 2, record, attempt, num_records) for attempt in range(1, num_records)]
    assert sorted([*tried, record]) == list(range(num_records))
    assert replacement_id(seed, 2, record, num_records, num_records) == tried[0]


def test_replacements_are_keyed():
    assert replacement_id(1, 0, 0, 1, 1) == 0
    picks = [replacement_id(s, e, r, a, 10**9) for s in (0, 1) for e in (0, 1) for r in (5, 6) for a in (1, 2)]
    assert len(set(picks)) == 16
    spread = np.array([replacement_id(0, 0, r, 1, 1000) for r in range(1000)])
    assert abs(excess(np.bincount(spread // 50, minlength=20))) < 5
    assert replacement_id(0, 0, 7, 1, 10**6) == FIRST_REPLACEMENT


def test_philox_streams_are_those_numpy_documents_and_distinct():
    ours = philox(2**64 - 1, 3, 2**62).integers(2**62, size=4)
    bits = np.random.Philox(key=np.array([2**64 - 1, 3], np.uint64), counter=np.array([0, 0, 0, 2**62], np.uint64))
    np.testing.assert_array_equal(ours, np.random.Generator(bits).integers(2**62, size=4))
    draws = {tuple(philox(s, e, r).integers(2**62, size=2)) for s in range(4) for e in range(4) for r in range(64)}
    assert len(draws) == 1024


def test_derived_keys_differ():
    keys = {derive_key(seed, *parts) for seed in range(8) for parts in itertools.product(range(16), range(16))}
    assert len(keys) == 8 * 256
    assert len({derive_key(1, 2), derive_key(2, 1), derive_key(1), derive_key(2)}) == 4


@given(num_records=st.sampled_from([1, 3, 100, 4096, 4097, 8200, 10**12]), data=st.data())
@settings(deadline=None, max_examples=60)
def test_neighbours_are_what_they_are_one_by_one(num_records, data):
    shuffle = data.draw(st.sampled_from([True, False, 16]))
    epochs = data.draw(st.sampled_from([None, 2]))
    order = EpochOrder(num_records, seed=5, shuffle=shuffle, num_epochs=epochs)
    near = data.draw(st.sampled_from([0, 4096, num_records, 2 * num_records]))
    start = max(0, near - data.draw(st.integers(0, 70)))
    stop = start + data.draw(st.integers(0, 140))
    if order.total is not None:
        start, stop = min(start, order.total), min(stop, order.total)
    ids, of_epochs = order.ids_between(start, stop)
    wanted_ids, wanted_epochs = order.ids_at(np.arange(start, stop))
    assert ids.tolist() == wanted_ids.tolist()
    assert of_epochs.tolist() == wanted_epochs.tolist()
    assert ids.flags.writeable
    if order.total is not None:
        with pytest.raises(IndexError):
            order.ids_between(order.total, order.total + 1)
