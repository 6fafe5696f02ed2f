from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.base.errors import PlanError
from meshfeed._src.plan.plan import (
    HostPlan,
    broadcast_shardings,
    cut_spec,
    merge_ranges,
    normalize_sharding,
    participants,
    plan_host,
)
from meshfeed._src.plan.topology import fake_devices, fake_mesh


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Mesh, int, P]:
    """A mesh of fake devices in any order, perhaps a sub-mesh, its number of hosts, and a spec."""
    axes = {name: draw(st.sampled_from([1, 2, 3, 4])) for name in ("a", "b", "c")[: draw(st.integers(1, 3))]}
    size = math.prod(axes.values())
    devices_per_host = draw(st.integers(1, 4))
    num_hosts = -(-size // devices_per_host) + draw(st.integers(0, 1))
    order = draw(st.permutations(range(num_hosts * devices_per_host)))[:size]
    axis_types = (draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])),) * len(axes)
    mesh = fake_mesh(axes, num_hosts, devices_per_host, permutation=order, axis_types=axis_types)
    entries: list[list[str]] = [[], [], []]
    for axis in draw(st.permutations(list(axes))):
        if (dimension := draw(st.integers(0, 3))) < 3:
            entries[dimension].append(axis)
    spec = P(*(None if not names else names[0] if len(names) == 1 else tuple(names) for names in entries))
    return mesh, num_hosts, spec


def fitting_shape(mesh: Mesh, spec: P, repeat: int) -> tuple[int, ...]:
    """The smallest shape that the spec divides, ``repeat`` times, and a different one in each dimension."""
    axes = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    return tuple(math.prod(mesh.shape[a] for a in names) * (repeat + d) for d, names in enumerate(axes))


def read(plan: HostPlan, columns: tuple[slice, ...], whole: np.ndarray) -> np.ndarray:
    """What a host would have read: its rows of the whole array, then its columns."""
    return whole[plan.rows][(slice(None), *columns)]


@given(topologies(), st.integers(1, 2))
@settings(max_examples=150)
def test_blocks_of_all_hosts_are_the_whole_array_as_the_sharding_divides_it(
    topology: tuple[Mesh, int, P], repeat: int
) -> None:
    mesh, num_hosts, spec = topology
    shape = fitting_shape(mesh, spec, repeat)
    sharding = NamedSharding(mesh, spec)
    whole = np.arange(math.prod(shape)).reshape(shape)
    expected = {device: whole[index] for device, index in sharding.devices_indices_map(shape).items()}
    placed = {}
    for host in range(num_hosts):
        plan = plan_host(sharding, shape[0], host)
        leaf = plan.leaf(sharding, shape)
        held = read(plan, leaf.columns, whole)
        assert held.shape == (plan.num_rows, *leaf.column_shape)
        for block in leaf.blocks:
            assert block.device.process_index == host
            assert block.device not in placed
            placed[block.device] = held[block.local]
            np.testing.assert_array_equal(whole[block.index], held[block.local])
    assert placed.keys() == expected.keys()
    for device, block in expected.items():
        np.testing.assert_array_equal(placed[device], block)


@given(topologies())
@settings(max_examples=50)
def test_a_host_reads_no_row_and_no_column_that_its_devices_do_not_need(topology: tuple[Mesh, int, P]) -> None:
    mesh, num_hosts, spec = topology
    shape = fitting_shape(mesh, spec, 2)
    sharding = NamedSharding(mesh, spec)
    for host in range(num_hosts):
        plan = plan_host(sharding, shape[0], host)
        own = [i for d, i in sharding.devices_indices_map(shape).items() if d.process_index == host]
        rows = {row for index in own for row in range(shape[0])[index[0]]}
        assert sorted(rows) == plan.rows.tolist()
        for dimension, box in enumerate(plan.leaf(sharding, shape).columns, start=1):
            columns = [c for index in own for c in range(shape[dimension])[index[dimension]]]
            assert (box.start, box.stop) == ((min(columns), max(columns) + 1) if columns else (0, 0))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair)))))
def test_merged_ranges_are_the_union_with_gaps_between(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(ranges)
    assert sorted({row for start, stop in ranges for row in range(start, stop)}) == [
        row for start, stop in merged for row in range(start, stop)
    ]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


def test_rows_of_shardings_in_one_prefix_are_united() -> None:
    mesh = fake_mesh({"data": 4, "seq": 2}, 4, 2)
    prefix = {"tokens": NamedSharding(mesh, P("data")), "small": NamedSharding(mesh, P(("seq", "data")))}
    plan = plan_host(prefix, 16, 1)
    assert plan.row_ranges == ((2, 8), (10, 12))
    tokens = plan.leaf(prefix["tokens"], (16, 3))
    small = plan.leaf(prefix["small"], (16,))
    assert [block.local[0] for block in tokens.blocks] == [slice(2, 6)] * 2
    assert [block.local[0] for block in small.blocks] == [slice(0, 2), slice(6, 8)]


def test_sequence_sharding_gives_each_host_its_columns() -> None:
    mesh = fake_mesh({"data": 2, "seq": 4}, 4, 2)
    sharding = NamedSharding(mesh, P("data", "seq"))
    plan = plan_host(sharding, 4, 1)
    leaf = plan.leaf(sharding, (4, 16))
    assert plan.row_ranges == ((0, 2),)
    assert leaf.columns == (slice(8, 16),)
    assert [block.local for block in leaf.blocks] == [(slice(0, 2), slice(0, 4)), (slice(0, 2), slice(4, 8))]
    rank_1 = plan.leaf(sharding, (4,))
    assert [block.local for block in rank_1.blocks] == [(slice(0, 2),)] * 2


def test_a_host_outside_the_mesh_holds_nothing() -> None:
    devices = fake_devices(3, 2)
    mesh = Mesh(np.array(devices[:4], object), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    plan = plan_host(sharding, 8, 2)
    assert (plan.row_ranges, plan.num_rows, plan.rows.tolist()) == ((), 0, [])
    leaf = plan.leaf(sharding, (8, 5))
    assert (leaf.blocks, leaf.columns) == ((), (slice(0, 0),))
    assert participants(sharding) == (0, 1)


def test_row_order_follows_the_mesh_and_not_the_devices() -> None:
    mesh = fake_mesh({"data": 4}, 2, 2, permutation=[3, 0, 2, 1])
    sharding = NamedSharding(mesh, P("data"))
    plan = plan_host(sharding, 8, 1)
    assert plan.row_ranges == ((0, 2), (4, 6))
    assert [(block.device.id, block.local[0]) for block in plan.leaf(sharding, (8,)).blocks] == [
        (2049, slice(0, 2)),
        (2048, slice(2, 4)),
    ]


def test_a_plan_of_a_leaf_is_made_once() -> None:
    sharding = NamedSharding(fake_mesh({"data": 4}, 4, 1), P("data"))
    plan = plan_host(sharding, 8, 1)
    assert plan.leaf(sharding, (8, 3)) is plan.leaf(sharding, (8, 3))
    assert not plan.rows.flags.writeable


def test_a_batch_that_does_not_divide_names_axis_size_and_sizes_that_work() -> None:
    mesh = fake_mesh({"data": 4, "model": 2}, 4, 2)
    with pytest.raises(PlanError, match=r"batch of size 10 .* mesh axis 'data' of size 4.* Nearest .*: 8 and 12\."):
        plan_host(NamedSharding(mesh, P("data")), 10, 0)
    with pytest.raises(PlanError, match=r"size 3 .*axes \('data', 'model'\) of size 4 x 2 = 8.* sizes: 8\."):
        plan_host(NamedSharding(mesh, P(("data", "model"))), 3, 0)


def test_the_sizes_named_suit_all_leaves() -> None:
    mesh = fake_mesh({"a": 4, "b": 3}, 4, 3)
    with pytest.raises(PlanError, match=r"size 16 .* 'b' of size 3.*: 12 and 24\."):
        plan_host({"x": NamedSharding(mesh, P("a")), "y": NamedSharding(mesh, P("b"))}, 16, 0)


def test_a_dimension_that_does_not_divide_names_the_leaf() -> None:
    sharding = NamedSharding(fake_mesh({"data": 2, "seq": 4}, 4, 2), P("data", "seq"))
    plan = plan_host(sharding, 4, 0)
    with pytest.raises(PlanError, match=r"dimension 1 of leaf \['tokens'\] of size 10 .*'seq' of size 4.*: 8 and 12"):
        plan.leaf(sharding, (4, 10), "['tokens']")
    with pytest.raises(PlanError, match=r"global shape \(5, 8\); expected \(4, \.\.\.\)"):
        plan.leaf(sharding, (5, 8))


def test_a_leaf_of_a_sharding_that_was_not_planned_is_refused() -> None:
    mesh = fake_mesh({"data": 4}, 4, 1)
    with pytest.raises(PlanError, match="made from different shardings"):
        plan_host(NamedSharding(mesh, P("data")), 8, 1).leaf(NamedSharding(mesh, P()), (8,))


def test_spec_is_cut_to_the_rank_and_memory_kind_is_kept() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", "seq"), memory_kind="unpinned_host")
    assert cut_spec(sharding, 1).spec == P("data")
    assert cut_spec(sharding, 1).memory_kind == "unpinned_host"
    assert cut_spec(sharding, 3) is sharding


def test_a_mesh_means_rows_over_all_its_axes() -> None:
    mesh = fake_mesh({"data": 4, "model": 2}, 4, 2)
    assert normalize_sharding(mesh) == NamedSharding(mesh, P(("data", "model")))
    given_prefix = {"x": mesh, "y": (NamedSharding(mesh, P("model")),)}
    assert normalize_sharding(given_prefix) == {
        "x": NamedSharding(mesh, P(("data", "model"))),
        "y": (NamedSharding(mesh, P("model")),),
    }


def test_prefix_gives_one_sharding_for_each_leaf() -> None:
    mesh = fake_mesh({"data": 4, "model": 2}, 4, 2)
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))
    batch = {"a": {"x": 0, "y": 1}, "b": [2, 3, {"z": 4}]}
    assert broadcast_shardings(rows, batch) == [rows] * 5
    assert broadcast_shardings({"a": rows, "b": [columns, rows, columns]}, batch) == [
        rows,
        rows,
        columns,
        rows,
        columns,
    ]
    assert broadcast_shardings(rows, 7) == [rows]


def message(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(PlanError) as caught:
        call(*arguments)
    return str(caught.value)


def test_what_a_plan_refuses_word_for_word() -> None:
    mesh = fake_mesh({"data": 2, "seq": 4}, 4, 2)
    sharding = NamedSharding(mesh, P("data", "seq"))
    plan = plan_host(sharding, 4, 1)
    assert message(plan.leaf, sharding, (5, 8)) == (
        "leaf (the only one) has the global shape (5, 8); expected (4, ...), rows first"
    )
    assert message(plan.leaf, sharding, (), "['x']") == (
        "leaf ['x'] has the global shape (); expected (4, ...), rows first"
    )
    rest = (
        "of size 6 cannot be divided evenly over mesh axis 'seq' of size 4. Nearest valid sizes: 4 and 8. Change "
        "the size, or divide it over fewer axes."
    )
    assert message(plan.leaf, sharding, (4, 6)) == f"dimension 1 of leaf (the only one) {rest}"
    assert message(plan.leaf, sharding, (4, 6), "['x']") == f"dimension 1 of leaf ['x'] {rest}"
    odd = HostPlan(1, 5, ((0, 5),))
    assert message(odd.leaf, sharding, (5, 8)).startswith("the global batch of size 5 cannot be divided evenly over")
    assert message(plan.local_rows, 1, 3) == (
        "host 1 holds the rows ((0, 2),), not 1 to 3: the plan was made from different shardings. Make it from the "
        "shardings of all leaves."
    )


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair))), max_size=5))
def test_local_rows_are_where_the_rows_are_or_refused(ranges: list[tuple[int, int]]) -> None:
    plan = HostPlan(0, 40, merge_ranges(ranges))
    rows = plan.rows.tolist()
    for start in range(40):
        for stop in range(start + 1, 40):
            if set(range(start, stop)) <= set(rows):
                assert rows[plan.local_rows(start, stop)] == list(range(start, stop))
            else:
                with pytest.raises(PlanError):
                    plan.local_rows(start, stop)


def test_a_leaf_plan_has_the_sharding_of_its_rank_and_the_shape() -> None:
    sharding = NamedSharding(fake_mesh({"data": 2, "seq": 4}, 4, 2), P("data", "seq"))
    plan = plan_host(sharding, 4, 1)
    assert (plan.leaf(sharding, (4, 8)).sharding, plan.leaf(sharding, (4, 8)).global_shape) == (sharding, (4, 8))
    assert plan.leaf(sharding, (4,)).sharding == NamedSharding(sharding.mesh, P("data"))
    assert plan.leaf(sharding, (4, 8, 3)).column_shape == (4, 3)
    assert plan.leaf(sharding, (4, 8)).blocks[1].index == (slice(0, 2), slice(6, 8))
    assert (plan.process_index, plan.global_batch_size) == (1, 4)
