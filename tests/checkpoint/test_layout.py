"""Planning of saves and restores: boxes, grids, cuts, plans and their costs, on meshes of fake devices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshfeed._src.checkpoint.layout import (
    HOST,
    Grid,
    LoadPlan,
    ReadCost,
    ReplicaCut,
    assign_units,
    best_plan,
    box_of_index,
    box_shape,
    box_size,
    candidates,
    choose_cut,
    chunk_shape,
    cut_sharding,
    devices_of_a_process,
    free_axes,
    intersect,
    joint_cell,
    parts_in_window,
    read_cost,
    replica_plan,
    rows_in_flight,
    slices,
    spec_axes,
    spec_of,
    take_rows,
    ways,
)
from meshfeed._src.plan.topology import fake_devices, fake_mesh


def sharding_of(axes, hosts, spec):
    size = math.prod(axes.values())
    return NamedSharding(fake_mesh(axes, hosts, size // hosts), PartitionSpec(*spec))


def places_of(mesh):
    """Device → its coordinate on every axis."""
    return {device: dict(zip(mesh.axis_names, at, strict=True)) for at, device in np.ndenumerate(mesh.devices)}


def mark(array, box):
    array[slices(box)] += 1


class TestBoxes:
    def test_of_an_index(self):
        assert box_of_index((slice(2, 5), slice(None), slice(None, 3)), (9, 4, 7)) == ((2, 5), (0, 4), (0, 3))
        assert box_of_index((), ()) == ()

    def test_sizes(self):
        assert box_shape(((2, 5), (1, 9))) == (3, 8)
        assert box_size(((2, 5), (1, 9))) == 24
        assert box_size(()) == 1
        assert box_size(((2, 2), (1, 9))) == 0

    def test_intersections(self):
        assert intersect(((2, 5), (1, 9)), ((0, 3), (4, 20))) == ((2, 3), (4, 9))
        assert intersect(((2, 5),), ((7, 9),)) == ((7, 7),)
        assert intersect(((7, 9),), ((2, 5),)) == ((7, 7),)
        assert intersect((), ()) == ()

    def test_beyond_the_array_are_no_cells(self):
        assert Grid((4, 6), (2, 4)).touching(((2, 5), (3, 9))) == [2, 3]
        assert Grid((4, 6), (2, 4)).touching(((2, 5), (6, 9))) == []
        assert Grid((6,), (4,)).touching(((7, 9),)) == []

    def test_rows(self):
        assert take_rows(((2, 9), (1, 5)), 0, 3, 2) == ((5, 7), (1, 5))
        assert take_rows(((2, 9), (1, 5), (0, 3)), 1, 3, 2) == ((2, 9), (4, 5), (0, 3))
        assert take_rows(((2, 9),), 0, 8, 2) == ((9, 9),)

    def test_slices(self):
        assert slices(((2, 5), (1, 9))) == (slice(2, 5), slice(1, 9))
        assert slices(((4, 5), (3, 9)), ((2, 5), (1, 9))) == (slice(2, 3), slice(2, 8))


grids = st.integers(0, 3).flatmap(
    lambda rank: st.builds(
        Grid,
        st.tuples(*[st.integers(1, 9)] * rank),
        st.tuples(*[st.integers(1, 5)] * rank),
    )
)


class TestGrid:
    @given(grids)
    def test_cells_cover_the_array_once(self, grid):
        seen = np.zeros(grid.shape, int)
        for number in range(len(grid)):
            box = grid.box(number)
            mark(seen, box)
            assert all(0 < extent <= cell for extent, cell in zip(box_shape(box), grid.cell, strict=True))
            assert all(start % cell == 0 for (start, _), cell in zip(box, grid.cell, strict=True))
            assert list(grid.touching(box)) == [number]
        assert (seen == 1).all()

    @given(grids, st.data())
    def test_cells_that_touch_a_box(self, grid, data):
        sides = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in grid.shape]
        box = tuple((first, second) for first, second in sides)
        touching = [n for n in range(len(grid)) if box_size(intersect(grid.box(n), box))]
        assert list(grid.touching(box)) == touching

    def test_in_row_major_order(self):
        grid = Grid((10, 6), (4, 3))
        assert grid.counts == (3, 2)
        assert [grid.box(number) for number in (0, 1, 2, 5)] == [
            ((0, 4), (0, 3)),
            ((0, 4), (3, 6)),
            ((4, 8), (0, 3)),
            ((8, 10), (3, 6)),
        ]

    def test_scalars(self):
        assert len(Grid((), ())) == 1
        assert Grid((), ()).box(0) == ()
        assert list(Grid((), ()).touching(())) == [0]

    def test_units_are_whole_chunks_and_digest_cells(self):
        assert joint_cell((100, 64), (10, 64), (20, 32)) == (20, 64)
        assert joint_cell((7,), (4,), None) == (4,)
        assert joint_cell((7,), (4,), (3,)) == (7,)
        assert joint_cell((100,), (4,), (6,)) == (12,)
        assert joint_cell((0, 9), (0, 3)) == (1, 3)
        assert joint_cell((5,)) == (1,)


class TestMeshAxes:
    def test_of_a_spec(self):
        sharding = sharding_of({"a": 2, "b": 2, "c": 1, "d": 2}, 2, ("b", None, ("a", "c")))
        assert spec_axes(sharding, 4) == [("b",), (), ("a", "c"), ()]
        assert spec_axes(sharding, 0) == [("b",), (), ("a", "c")]
        assert spec_of([("b",), (), ("a", "c")]) == PartitionSpec("b", None, ("a", "c"))
        assert free_axes(sharding) == ("d",)
        assert ways(sharding.mesh, ("a", "d", "c")) == 4
        assert ways(sharding.mesh, ()) == 1

    def test_without_a_mesh(self):
        assert free_axes(SingleDeviceSharding(fake_devices(1, 1)[0])) == ()


@st.composite
def shardings(draw):
    """A sharding of any rank over three axes on any number of hosts, and a shape that it divides."""
    names = ["a", "b", "c"]
    sizes = {name: draw(st.sampled_from([1, 2, 3])) for name in names}
    rank = draw(st.integers(0, 3))
    parts = [[] for _ in range(rank)]
    for name in draw(st.permutations(names)):
        chosen = draw(st.integers(-1, rank - 1))
        if chosen >= 0:
            parts[chosen].append(name)
    count = math.prod(sizes.values())
    hosts = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    sharding = sharding_of(sizes, hosts, [tuple(part) or None for part in parts])
    shape = tuple(draw(st.integers(1, 4)) * math.prod(sizes[name] for name in part) for part in parts)
    return sharding, shape


class TestPlans:
    @settings(max_examples=60, deadline=None)
    @given(shardings())
    def test_pieces_cover_what_each_device_is_sent(self, given_):
        """A device receives the pieces of all devices that differ from it only in the axes of collectives."""
        sharding, shape = given_
        wanted = sharding.devices_indices_map(shape)
        places = places_of(sharding.mesh)
        for plan in candidates(sharding, shape):
            boxes = plan.boxes()
            assert set(boxes) == set(places)
            if plan.direct:
                assert boxes == {device: box_of_index(index, shape) for device, index in wanted.items()}
                continue
            seen = np.zeros(shape, int)
            for box in boxes.values():
                mark(seen, box)
                padded = zip(box_shape(box), plan.piece_shape, strict=True)
                assert all(
                    extent <= size if d == plan.dimension else extent == size for d, (extent, size) in enumerate(padded)
                )
            assert (seen == 1).all()
            cut = set(plan.cut_axes)
            for device, at in places.items():
                part = np.zeros(shape, int)
                for other, box in boxes.items():
                    if all(places[other][axis] == at[axis] for axis in at if axis not in cut):
                        mark(part, box)
                assert (part[wanted[device]] == 1).all()

    @settings(max_examples=60, deadline=None)
    @given(shardings(), st.data())
    def test_one_replica_reads_what_all_devices_want(self, given_, data):
        sharding, shape = given_
        free = free_axes(sharding)
        if not free:
            assert replica_plan(sharding, shape, "a", 0).direct
            return
        axis = data.draw(st.sampled_from(free))
        index = data.draw(st.integers(0, sharding.mesh.shape[axis] - 1))
        plan = replica_plan(sharding, shape, axis, index)
        assert plan.broadcast == (axis, index)
        seen, places = np.zeros(shape, int), places_of(sharding.mesh)
        readers = [device for device, at in places.items() if at[axis] == index]
        for device, box in plan.boxes().items():
            assert (box is not None) == (device in readers)
            if box is not None:
                mark(seen, box)
        rest = [other for other in free if other != axis]
        copies = 1 if plan.gather else math.prod(sharding.mesh.shape[other] for other in rest)
        assert (seen == copies).all()
        assert plan.gather in ((), tuple(rest))

    def test_shapes_of_a_plan(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, (None, "model"))
        plan = LoadPlan(sharding, (7, 6), 0, ("data",), (("model", 1),), None, 1)
        assert plan.axes == [(), ("model",)]
        assert plan.kept_axes == [(), ()]
        assert plan.cut_axes == ("data", "model")
        assert plan.piece_axes == [("data", "model"), ()]
        assert plan.piece_sharding.spec == PartitionSpec(("data", "model"), None)
        assert plan.num_pieces == 8
        assert plan.piece_shape == (1, 6)
        assert plan.shard_shape == (7, 3)
        assert plan.padded_shape == (8, 3)
        assert plan.mesh is sharding.mesh
        assert not plan.direct
        boxes = list(plan.boxes().values())
        assert boxes == [((min(7, n), min(7, n + 1)), (0, 6)) for n in range(8)]

    def test_the_axis_gathered_last_comes_first(self):
        sharding = sharding_of({"a": 2, "b": 2, "c": 2}, 8, (None, "b", "c"))
        plan = LoadPlan(sharding, (8, 2, 2), 0, ("a",), (("b", 1), ("c", 2)), None, 1)
        assert plan.cut_axes == ("a", "c", "b")
        rows = [box[0][0] for box in plan.boxes().values()]
        assert rows == [0, 2, 1, 3, 4, 6, 5, 7]

    def test_on_one_process_and_on_the_host(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, ("data",))
        for plan in candidates(sharding, (8, 4)):
            everything = plan.boxes()
            for process in range(4):
                own = {device: box for device, box in everything.items() if device.process_index == process}
                assert plan.boxes(process) == own
                assert len(own) == 2
            assert plan.boxes(9) == {}
        host = LoadPlan(None, (3, 2))
        assert host.direct
        assert host.boxes() == host.boxes(5) == {HOST: ((0, 3), (0, 2))}
        assert host.shard_shape == (3, 2)
        assert HOST.platform == "host"
        assert (devices_of_a_process(sharding), devices_of_a_process(None)) == (2, 1)
        uneven = NamedSharding(fake_mesh({"x": 3}, 2, 2), PartitionSpec())
        assert devices_of_a_process(uneven) == 2

    def test_candidates(self):
        sharding = sharding_of({"data": 4, "model": 2, "one": 1}, 4, (None, ("model", "one")))
        found = [(plan.dimension, plan.gather, plan.moved, plan.piece) for plan in candidates(sharding, (9, 4))]
        assert found == [
            (0, (), (), 0),
            (0, ("data",), (), 3),
            (0, ("data",), (("model", 1),), 2),
            (1, ("data",), (), 1),
        ]
        used = sharding_of({"data": 4, "model": 2}, 4, ("data", "model"))
        found = [(plan.dimension, plan.gather, plan.moved, plan.piece) for plan in candidates(used, (8, 4))]
        assert found == [(0, (), (), 0), (0, (), (("model", 1),), 1), (1, (), (("data", 0),), 1)]
        three = sharding_of({"a": 2, "b": 2, "c": 2}, 8, ("a", "b", "c"))
        moves = [plan.moved for plan in candidates(three, (4, 4, 4)) if plan.dimension == 1]
        assert moves == [(("a", 0),), (("c", 2),), (("a", 0), ("c", 2))]
        assert len(candidates(sharding_of({"x": 2}, 1, ()), ())) == 1
        assert len(candidates(SingleDeviceSharding(fake_devices(1, 1)[0]), (4,))) == 1


class TestCosts:
    def test_a_process_reads_a_unit_once_for_all_its_devices(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, ("data", "model"))
        cost = read_cost(LoadPlan(sharding, (8, 4)), Grid((8, 4), (4, 4)), 4)
        assert cost == ReadCost(((0, 64), (1, 64), (2, 64), (3, 64)), 128)
        assert (cost.total, cost.ratio) == (256, 2.0)

    def test_truncated_units_and_requests_beyond_the_stored_array(self):
        sharding = sharding_of({"data": 2}, 2, ("data",))
        cost = read_cost(LoadPlan(sharding, (10,)), Grid((9,), (4,)), 2)
        assert cost == ReadCost(((0, 16), (1, 10)), 18)
        assert read_cost(LoadPlan(sharding, (20,)), Grid((9,), (3,)), 2) == ReadCost(((0, 18), (1, 0)), 18)
        assert read_cost(LoadPlan(sharding_of({"x": 2}, 2, ()), ()), Grid((), ()), 4) == ReadCost(((0, 4), (1, 4)), 4)

    def test_devices_that_receive_read_nothing(self):
        sharding = sharding_of({"data": 4}, 4, ())
        plan = LoadPlan(sharding, (8,), broadcast=("data", 2), piece=8)
        assert read_cost(plan, Grid((8,), (8,)), 1) == ReadCost(((2, 8),), 8)

    def test_counting_stops_at_a_hopeless_ratio(self):
        sharding = sharding_of({"data": 8}, 8, ())
        plan, units = LoadPlan(sharding, (8,)), Grid((8,), (1,))
        assert read_cost(plan, units, 1).total == 64
        assert read_cost(plan, units, 1, 2.0).total == 24  # the first host beyond it
        assert read_cost(plan, units, 1, 8.0).total == 64

    def test_nothing_stored(self):
        assert ReadCost((), 0).ratio == 1.0


class TestBestPlan:
    @pytest.mark.parametrize(
        ("saved", "spec", "shape"),
        [
            ((512, 1024), (None, "model"), (4096, 1024)),  # chunks of rows, wanted in columns and replicated
            ((512, 1024), (None, ("data", "model")), (4096, 1024)),  # wanted in columns only: an all-to-all
            ((512, 128), ("data",), (4096, 1024)),
            ((64, 1024), (), (4096, 1024)),
        ],
    )
    def test_reads_each_chunk_on_one_host(self, saved, spec, shape):
        sharding = sharding_of({"data": 4, "model": 2}, 4, spec)
        plan, cost = best_plan(sharding, shape, Grid(shape, saved), 4)
        assert cost.ratio <= 1.1
        assert max(count for _, count in cost.by_process) * 4 <= 1.5 * cost.total
        assert len(set(plan.boxes().values())) > 1

    def test_prefers_no_collective_if_each_host_reads_its_own(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, ("data", "model"))
        assert best_plan(sharding, (64, 64), Grid((64, 64), (16, 32)), 4)[0].direct
        one_host = sharding_of({"data": 8}, 1, ())
        assert best_plan(one_host, (64,), Grid((64,), (8,)), 4)[0].direct

    def test_moves_only_if_chunks_span_shards(self):
        columns = sharding_of({"data": 4, "model": 2}, 4, (None, ("data", "model")))
        assert best_plan(columns, (64, 64), Grid((64, 64), (64, 8)), 4)[0].direct
        plan, cost = best_plan(columns, (64, 64), Grid((64, 64), (8, 64)), 4)
        assert plan.moved == (("data", 1), ("model", 1))
        assert (plan.dimension, plan.piece, cost.ratio) == (0, 8, 1.0)

    def test_reads_evenly(self):
        # Eight replicas on four hosts. Cut by rows, each host reads two of the eight chunks.
        sharding = sharding_of({"data": 8}, 4, ())
        plan, cost = best_plan(sharding, (64, 64), Grid((64, 64), (8, 64)), 4)
        assert (plan.dimension, plan.gather, plan.piece) == (0, ("data",), 8)
        assert [count for _, count in cost.by_process] == [4096] * 4
        # The same by columns, because the chunks are columns.
        plan, _ = best_plan(sharding, (64, 64), Grid((64, 64), (64, 8)), 4)
        assert plan.dimension == 1

    def test_reads_least_before_evenly(self):
        # Two chunks for four hosts: no plan is even, and only the direct one reads them four times.
        sharding = sharding_of({"data": 4}, 4, ())
        plan, cost = best_plan(sharding, (64,), Grid((64,), (32,)), 4)
        assert plan.gather == ("data",)
        assert cost.ratio == 2.0  # two pieces lie in each chunk
        plan, cost = best_plan(sharding, (64, 2), Grid((64, 2), (64, 1)), 4)
        assert cost.ratio == 1.0

    def test_takes_the_first_that_is_good_enough(self):
        sharding = sharding_of({"data": 4}, 4, ())
        plan, _ = best_plan(sharding, (19, 20), Grid((19, 20), (1, 1)), 4)
        assert (plan.dimension, plan.piece) == (0, 5)  # 5, 5, 5 and 4 rows; columns would be even

    def test_pads_least_among_equals(self):
        sharding = sharding_of({"data": 4}, 4, ())
        plan, _ = best_plan(sharding, (6, 8), Grid((6, 8), (1, 1)), 4)
        assert (plan.dimension, plan.piece) == (1, 2)
        for shape, cell, found in (((2, 5), (2, 3), (1, 2)), ((6, 3), (1, 1), (0, 2)), ((12, 4), (6, 2), (0, 3))):
            plan, _ = best_plan(sharding, shape, Grid(shape, cell), 1)
            assert (plan.dimension, plan.piece) == found


class TestReplicaPlan:
    def test_the_rest_of_the_replicas_share_the_longest_dimension(self):
        sharding = sharding_of({"data": 2, "model": 2, "expert": 2}, 4, ("expert",))
        assert replica_plan(sharding, (8, 10), "data", 1) == LoadPlan(
            sharding, (8, 10), 1, ("model",), (), ("data", 1), 5
        )
        assert replica_plan(sharding, (16, 5), "model", 0) == LoadPlan(
            sharding, (16, 5), 0, ("data",), (), ("model", 0), 4
        )

    def test_a_single_replica_axis_and_leaves_too_small_to_share(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, ("model",))
        assert replica_plan(sharding, (6, 9), "data", 3) == LoadPlan(sharding, (6, 9), 0, (), (), ("data", 3), 3)
        wide = sharding_of({"data": 4, "model": 2}, 4, ())
        assert replica_plan(wide, (3, 2), "model", 1) == LoadPlan(wide, (3, 2), 0, (), (), ("model", 1), 3)
        assert replica_plan(wide, (4, 2), "model", 1) == LoadPlan(wide, (4, 2), 0, ("data",), (), ("model", 1), 1)
        assert replica_plan(wide, (), "data", 1) == LoadPlan(wide, (), broadcast=("data", 1))

    def test_without_replicas_every_device_reads(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, ("model",))
        assert replica_plan(sharding, (6,), "model", 0) == LoadPlan(sharding, (6,))
        assert replica_plan(sharding, (6,), None, 0) == LoadPlan(sharding, (6,))
        assert replica_plan(sharding, (6,), "absent", 0).direct


class TestRowsInFlight:
    @pytest.fixture
    def plan(self):
        sharding = sharding_of({"data": 4, "model": 2}, 4, (None, "model"))
        return LoadPlan(sharding, (1024, 64), 0, ("data",), (), None, 256)

    @pytest.mark.parametrize(
        ("limit", "read", "sent"),
        [
            (1 << 30, 256, 256),
            (1 << 17, 256, 56),  # 256 rows of 256 bytes each, and (1 + 2 × 4) copies of what is sent
            ((1 << 17) - 1, 128, 56),
            (1 << 16, 128, 28),
            (1 << 15, 64, 14),
            (1, 32, 1),  # a unit at least
        ],
    )
    def test_whole_units_within_the_limit(self, plan, limit, read, sent):
        assert rows_in_flight(plan, Grid((1024, 64), (32, 64)), 4, limit) == (read, sent)

    def test_the_whole_piece_if_it_begins_inside_a_unit(self, plan):
        assert rows_in_flight(plan, Grid((1024, 64), (48, 64)), 4, 1 << 16)[0] == 256
        # The units divide the pieces, but there are seven rows for each two of them: the second two begin at row 7.
        sharding = sharding_of({"d": 4, "r": 2}, 2, ("d",))
        plan, units = LoadPlan(sharding, (28,), 0, ("r",), (), None, 4), Grid((28,), (2,))
        assert read_cost(plan, units, 1).ratio == 1.0
        assert rows_in_flight(plan, units, 1, 1)[0] == 4

    def test_the_whole_piece_if_the_requested_shape_differs(self, plan):
        assert rows_in_flight(plan, Grid((1000, 64), (32, 64)), 4, 1 << 16)[0] == 256

    def test_padded_pieces(self, plan):
        padded = LoadPlan(plan.sharding, (1000, 64), 0, ("data",), (), None, 256)
        assert rows_in_flight(padded, Grid((1000, 64), (32, 64)), 4, 1 << 16) == (128, 28)
        three = sharding_of({"data": 3}, 3, ())
        plan = LoadPlan(three, (1024, 8), 0, ("data",), (), None, 342)
        assert rows_in_flight(plan, Grid((1024, 8), (2, 8)), 4, 1 << 13) == (114, 36)
        assert rows_in_flight(plan, Grid((1024, 8), (32, 8)), 4, 1 << 13)[0] == 342

    def test_a_single_piece_whose_last_unit_is_cut_short(self):
        plan = replica_plan(sharding_of({"data": 4}, 4, ()), (1000, 8), "data", 0)
        assert rows_in_flight(plan, Grid((1000, 8), (32, 8)), 1, 1 << 13) == (512, 341)
        assert rows_in_flight(plan, Grid((1000, 8), (333, 8)), 1, 1 << 13) == (333, 1)  # the last unit is one row

    def test_units_that_the_limit_does_not_divide(self):
        sharding = sharding_of({"data": 2}, 2, ())
        plan = LoadPlan(sharding, (24, 8), 0, ("data",), (), None, 12)
        # Five of six units of two rows fit: three, then three.
        assert rows_in_flight(plan, Grid((24, 8), (2, 8)), 4, 2 * 10 * 32) == (6, 4)
        plan = LoadPlan(sharding, (28, 8), 0, ("data",), (), None, 14)
        assert rows_in_flight(plan, Grid((28, 8), (2, 8)), 4, 2 * 10 * 32) == (8, 4)  # four of seven, then three
        plan = LoadPlan(sharding, (26, 8), 0, ("data",), (), None, 13)
        assert rows_in_flight(plan, Grid((26, 8), (1, 8)), 4, 2 * 4 * 32) == (4, 1)  # the last row is alone

    @settings(deadline=None, max_examples=30)
    @given(
        rows=st.integers(1, 80),
        columns=st.integers(1, 12),
        cell=st.tuples(st.integers(1, 24), st.integers(1, 6)),
        spec=st.sampled_from([(), ("a",), ("b",), (None, "a"), ("b", "a")]),
        hosts=st.sampled_from([1, 2, 3, 6]),
        limit=st.integers(1, 2000),
    )
    def test_each_process_reads_a_unit_once(self, rows, columns, cell, spec, hosts, limit):
        sharding = sharding_of({"a": 2, "b": 3}, hosts, spec)
        shape = tuple(
            n * ways(sharding.mesh, axes) for n, axes in zip((rows, columns), spec_axes(sharding, 2), strict=True)
        )
        units = Grid(shape, joint_cell(shape, cell))
        plans = [*candidates(sharding, shape), *(replica_plan(sharding, shape, axis, 1) for axis in "ab")]
        for plan in plans:
            if plan.direct:
                continue
            read, sent = rows_in_flight(plan, units, 1, limit)
            rounds = range(0, plan.piece, read)
            assert 1 <= sent <= plan.piece - rounds[-1]
            row = plan.piece_shape[1 - plan.dimension] * devices_of_a_process(sharding)
            unit = units.cell[plan.dimension]
            assert read in (unit, plan.piece) or (read % unit == 0 and read * row <= limit // 2)
            total = 0
            for first in rounds:
                boxes = ((d.process_index, box) for d, box in plan.boxes().items() if box is not None)
                taken = [(process, take_rows(box, plan.dimension, first, read)) for process, box in boxes]
                found = {(process, number) for process, box in taken for number in units.touching(box)}
                total += sum(box_size(units.box(number)) for _, number in found)
            assert total == read_cost(plan, units, 1).total

    def test_along_another_dimension(self):
        sharding = sharding_of({"data": 2}, 2, ())
        plan = LoadPlan(sharding, (3, 16), 1, ("data",), (), None, 8)
        assert rows_in_flight(plan, Grid((3, 16), (3, 2)), 4, 2 * 4 * 12) == (4, 1)


class TestUnitsOverHosts:
    def test_are_balanced_with_what_hosts_read_anyway(self):
        grids = [(Grid((100, 10), (10, 10)), 4)] * 2
        owned = assign_units(grids, range(4), {0: 4000})
        counts = {host: len(units) for host, units in owned.items()}
        assert counts == {0: 0, 1: 7, 2: 7, 3: 6}
        assert sorted(itertools.chain(*owned.values())) == [(i, n) for i in range(2) for n in range(10)]

    def test_the_largest_come_first(self):
        grids = [(Grid((5,), (4,)), 1), (Grid((3,), (2,)), 4), (Grid((), ()), 2)]
        # Sizes: (0, 0) 4, (0, 1) 1, (1, 0) 8, (1, 1) 4, (2, 0) 2.
        assert assign_units(grids, [0, 1], {}) == {0: [(1, 0), (2, 0)], 1: [(0, 0), (1, 1), (0, 1)]}

    @given(st.lists(st.integers(1, 6), max_size=6), st.integers(1, 9))
    def test_windows_pass_over_every_byte_once(self, sizes, width):
        ends = list(itertools.accumulate(sizes))
        found = []
        for start in range(0, (ends or [0])[-1], width):
            parts = list(parts_in_window(ends, start, start + width))
            assert sum(stop - first for _, first, stop in parts) == min(width, ends[-1] - start)
            found += [(item, byte) for item, first, stop in parts for byte in range(first, stop)]
        assert found == [(item, byte) for item, size in enumerate(sizes) for byte in range(size)]

    def test_a_window_beyond_the_end_is_empty(self):
        assert list(parts_in_window([3], 3, 9)) == []
        assert list(parts_in_window([], 0, 9)) == []
        assert list(parts_in_window([3, 5], 1, 5)) == [(0, 1, 3), (1, 0, 2)]


class TestSaveLayout:
    @pytest.mark.parametrize(
        ("axes", "hosts", "rows", "least", "cut"),
        [
            ({"data": 8}, 1, 64, None, None),  # 16 KiB: eight slices by one host only cost
            ({"data": 8}, 1, 4096, None, ReplicaCut(0, ("data",))),
            ({"data": 8}, 1, 2048, None, ReplicaCut(0, ("data",))),  # slices of 64 KiB
            ({"data": 8}, 1, 2040, None, None),
            ({"data": 8}, 1, 64, 0, ReplicaCut(0, ("data",))),  # requested
            ({"data": 8}, 1, 64, 2048, ReplicaCut(0, ("data",))),
            ({"data": 8}, 1, 64, 2049, None),
            ({"data": 8}, 8, 64, None, None),
            ({"data": 64}, 64, 2048, None, ReplicaCut(0, ("data",))),  # 512 KiB in 8 KiB: a slice for each host
            ({"data": 64}, 64, 1024, None, ReplicaCut(0, ("data",))),  # 256 KiB in 4 KiB
            ({"data": 64}, 64, 960, None, None),
            ({"one": 1, "data": 64}, 64, 1024, None, ReplicaCut(0, ("data",))),
            ({"data": 64}, 8, 2048, None, None),  # eight for each
            ({"data": 64}, 8, 8192, None, ReplicaCut(0, ("data",))),
            ({"data": 64}, 8, 8128, None, None),
            ({"data": 8, "model": 4}, 8, 2048, None, ReplicaCut(0, ("data",))),  # hosts along data, one along model
            ({"data": 2, "model": 4}, 1, 4096, None, ReplicaCut(0, ("data", "model"))),
            ({"data": 2, "model": 4}, 1, 1536, None, ReplicaCut(0, ("model",))),  # the largest cut that is worth it
        ],
    )
    def test_replicas_share_a_leaf_if_that_is_worth_it(self, axes, hosts, rows, least, cut):
        assert choose_cut((rows, 64), 4, sharding_of(axes, hosts, ()), least) == cut

    def test_the_first_dimension_that_replicas_divide(self):
        sharding = sharding_of({"data": 4, "model": 2}, 1, ("model",))
        assert choose_cut((6, 8), 4, sharding, 0) == ReplicaCut(1, ("data",))
        assert choose_cut((16, 8), 4, sharding, 0) == ReplicaCut(0, ("data",))
        assert choose_cut((6, 6), 4, sharding, 0) is None
        free = sharding_of({"data": 4, "model": 2}, 1, ())
        assert choose_cut((6, 3), 4, free, 0) == ReplicaCut(0, ("model",))

    def test_what_is_never_cut(self):
        sharding = sharding_of({"data": 4}, 1, ())
        assert choose_cut((), 4, sharding, 0) is None
        assert choose_cut((0, 4), 4, sharding, 0) is None
        assert choose_cut((4,), 4, sharding_of({"data": 4}, 1, ("data",)), 0) is None
        assert choose_cut((4,), 4, SingleDeviceSharding(fake_devices(1, 1)[0]), 0) is None

    def test_the_sharding_after_a_cut(self):
        sharding = sharding_of({"data": 4, "model": 2}, 1, (None, "model"))
        cut = cut_sharding(sharding, 3, ReplicaCut(1, ("data",)))
        assert cut.spec == PartitionSpec(None, ("model", "data"), None)

    @pytest.mark.parametrize(
        ("shape", "piece"),
        [
            ((4096, 8192), (4096, 8192)),
            ((8192, 100003), (8, 100003)),
            ((3, 1 << 24), (3, 1 << 24)),
            ((9, 9), (9, 9)),
            ((1 << 14, 1 << 12), (1 << 12, 1 << 12)),
            ((1 << 14, 1 << 12), (1 << 14, 1 << 10)),
            ((3 << 11, 1 << 14), (3 << 11, 1 << 11)),
        ],
    )
    def test_chunks_are_what_orbax_makes_of_the_request(self, shape, piece):
        subchunking = pytest.importorskip("orbax.checkpoint._src.arrays.subchunking")
        chunk, asked = chunk_shape(shape, piece, 4)
        assert chunk == tuple(subchunking.choose_chunk_shape(shape, piece, np.dtype(np.float32), asked))

    def test_chunks_of_slices(self):
        assert chunk_shape((8, 4), (2, 4), 4) == ((2, 4), None)
        assert chunk_shape((0, 4), (0, 4), 4) == ((1, 4), None)
        assert chunk_shape((), (), 4) == ((), None)
        assert chunk_shape((1 << 22,), (1 << 22,), 4) == ((1 << 22,), None)  # 16 MiB
        assert chunk_shape((1 << 23,), (1 << 23,), 4) == ((1 << 22,), 16 << 20)
        # The dimension that is cut already is cut further, even if another is longer.
        assert chunk_shape((1 << 14, 1 << 13), (1 << 10, 1 << 13), 4) == ((1 << 9, 1 << 13), 16 << 20)
        assert chunk_shape((34, 1 << 20), (17, 1 << 20), 1) == ((1, 1 << 20), 16 << 20)  # 1 MiB is enough for a chunk
        assert chunk_shape((34, 1 << 19), (17, 1 << 19), 2) == ((1, 1 << 19), 16 << 20)
        assert chunk_shape((38, 1_000_003), (19, 1_000_003), 1) == ((19, 1_000_003), None)
        prime = (1 << 22) + 15
        assert chunk_shape((prime, 3), (prime, 3), 4) == ((prime, 3), None)  # its only divisor would give tiny chunks
