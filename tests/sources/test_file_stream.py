from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.sources.files.stream import FileCut, Piece, cut_files, keep_rows


def rows_of(piece: Piece, file_rows: int) -> list[int]:
    rows = []
    for number in itertools.count():
        row = piece.file_row(number)
        if row >= (file_rows if piece.stop is None else piece.stop):
            return rows
        rows.append(row)
    raise AssertionError


def cut(groups: list[list[int]], lane: int, lanes: int, *, counted: bool = True) -> FileCut:
    files = [Piece(index) for index in range(len(groups))]
    return cut_files(files, lane, lanes, lambda index: groups[index] if counted else None)


_GROUPS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=9)


@pytest.mark.slow
@given(_GROUPS, st.integers(1, 13), st.booleans())
def test_lanes_cover_each_row_once(groups, num_lanes, counted):
    found = []
    for lane in range(num_lanes):
        for piece in cut(groups, lane, num_lanes, counted=counted).pieces:
            found += [(piece.file_index, row) for row in rows_of(piece, sum(groups[piece.file_index]))]
    assert sorted(found) == [(index, row) for index, rows in enumerate(groups) for row in range(sum(rows))]


@pytest.mark.parametrize("counted", [True, False])
def test_whole_rounds_of_files_are_not_cut(counted):
    assert [cut([[5]] * 8, lane, 4, counted=counted) for lane in range(4)] == [
        FileCut((Piece(lane), Piece(lane + 4)), "files") for lane in range(4)
    ]


def test_files_that_remain_are_cut_by_row_groups_and_then_rows():
    groups = [[4], [4], [4, 4, 4, 2]]
    cuts = [cut(groups, lane, 2) for lane in range(2)]
    assert cuts[0].pieces == (Piece(0), Piece(2, 0, 4), Piece(2, 8, 11))
    assert cuts[1].pieces == (Piece(1), Piece(2, 4, 8), Piece(2, 11, 14))
    assert {one.unit for one in cuts} == {"rows"}
    assert cuts[0].times_read == pytest.approx((8 + 4 + 4 + 2) / 14)  # one of the groups is read by both
    even = [cut([[4, 4], [4, 4]], lane, 4) for lane in range(4)]
    assert [one.pieces for one in even] == [(Piece(f, s, s + 4),) for f in (0, 1) for s in (0, 4)]
    assert {(one.unit, one.times_read) for one in even} == {("row_groups", 1.0)}
    thirds = [cut([[9]], lane, 3) for lane in range(3)]
    assert [one.pieces for one in thirds] == [(Piece(0, 3 * lane, 3 * lane + 3),) for lane in range(3)]
    assert {one.unit for one in thirds} == {"rows"}
    assert thirds[0].times_read == 3.0


@pytest.mark.parametrize(("num_files", "num_lanes"), [(1, 12), (5, 12), (16, 12), (17, 12), (4, 5)])
def test_uncountable_files_are_dealt_out_evenly_and_seldom_read_twice(num_files, num_lanes):
    groups = [[600]] * num_files
    cuts = [cut(groups, lane, num_lanes, counted=False) for lane in range(num_lanes)]
    sizes = {sum(len(rows_of(piece, 600)) for piece in one.pieces) for one in cuts}
    assert max(sizes) - min(sizes) <= 2
    left = num_files % num_lanes
    assert all(len([piece for piece in one.pieces if piece != Piece(piece.file_index)]) <= 2 for one in cuts)
    assert cuts[0].times_read <= num_lanes / left + 1


def test_a_lane_may_have_nothing():
    assert [cut([[2]], lane, 4).pieces for lane in range(4)] == [(), (Piece(0, 0, 1),), (), (Piece(0, 1, 2),)]
    assert cut([[]], 0, 2).pieces == ()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4), st.integers(5, 13))
def test_fewer_files_than_lanes_are_cut_evenly(groups, num_lanes):
    sizes = [
        sum(len(rows_of(piece, sum(groups[piece.file_index]))) for piece in cut(groups, lane, num_lanes).pieces)
        for lane in range(num_lanes)
    ]
    assert max(sizes) - min(sizes) <= 1


@given(_GROUPS, st.integers(1, 13), st.integers(0, 30))
def test_the_second_version_makes_lanes_even_and_reads_few_groups_twice(groups, num_lanes, first):
    files = keep_rows(len(groups), first, None, lambda index: groups[index])
    assert files is not None
    cuts = {
        version: [cut_files(files, lane, num_lanes, lambda index: groups[index], version) for lane in range(num_lanes)]
        for version in (1, 2)
    }
    rows = {
        version: [
            [(piece.file_index, row) for piece in one.pieces for row in rows_of(piece, sum(groups[piece.file_index]))]
            for one in found
        ]
        for version, found in cuts.items()
    }
    every = sorted(itertools.chain(*rows[1]))
    assert sorted(itertools.chain(*rows[2])) == every
    lengths = list(map(len, rows[2]))
    if cuts[2][0].unit != "even":
        assert cuts[2] == cuts[1]
        assert num_lanes == 1 or (len(every) // num_lanes - min(lengths)) * num_lanes <= 0.01 * len(every)
        return
    assert max(lengths) - min(lengths) <= 1
    assert list(itertools.chain(*rows[2])) == every  # in order, so a lane begins inside at most one group
    group_of = {
        (index, row): (index, number)
        for index, sizes in enumerate(groups)
        for row, number in enumerate(n for n, size in enumerate(sizes) for _ in range(size))
    }
    read = [{group_of[row] for row in lane} for lane in rows[2]]
    again = sum(map(len, read)) - len(set().union(*read))
    assert again < num_lanes


def test_files_whose_rows_cannot_be_counted_are_cut_as_before():
    files = [Piece(index) for index in range(3)]
    for lane in range(2):
        both = [cut_files(files, lane, 2, lambda index: None if index else [9], version) for version in (1, 2)]
        assert both[0] == both[1]


def test_the_second_version_says_how_much_is_read_twice():
    groups = [[4, 4], [4]]  # 12 rows: the second of two lanes begins inside the second group
    found = [cut_files([Piece(0), Piece(1)], lane, 2, lambda index: groups[index], 2) for lane in range(2)]
    assert [one.pieces for one in found] == [(Piece(0, 0, 6),), (Piece(0, 6, 8), Piece(1))]
    assert [one.times_read for one in found] == [pytest.approx(16 / 12)] * 2


@given(_GROUPS, st.integers(0, 30), st.one_of(st.none(), st.integers(0, 30)), st.integers(1, 5))
def test_ranges_of_rows_through_all_files(groups, first, length, num_lanes):
    stop = None if length is None else first + length
    kept = keep_rows(len(groups), first, stop, lambda index: groups[index])
    assert kept is not None
    every = [(index, row) for index, rows in enumerate(groups) for row in range(sum(rows))]
    found = [(piece.file_index, row) for piece in kept for row in rows_of(piece, sum(groups[piece.file_index]))]
    assert found == every[first:stop]
    cuts = [cut_files(kept, lane, num_lanes, lambda index: groups[index]) for lane in range(num_lanes)]
    again = [
        (piece.file_index, row)
        for one in cuts
        for piece in one.pieces
        for row in rows_of(piece, sum(groups[piece.file_index]))
    ]
    assert sorted(again) == every[first:stop]


def test_rows_that_cannot_be_counted_have_no_ranges():
    assert keep_rows(2, 3, None, lambda index: None) is None
