from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.base.errors import PlanError, SettingsError
from meshfeed._src.plan.plan import plan_host
from meshfeed._src.plan.topology import fake_mesh, plan_table


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, ...] | None], int, int, list[int] | None]:
    axes = {name: draw(st.sampled_from([1, 2, 3, 4])) for name in ("a", "b", "c")[: draw(st.integers(1, 3))]}
    size = math.prod(axes.values())
    devices_per_host = draw(st.integers(1, 4))
    hosts = -(-size // devices_per_host) + draw(st.integers(0, 2))
    order = draw(st.none() | st.permutations(range(hosts * devices_per_host)).map(lambda places: places[:size]))
    entries: list[list[str]] = [[], [], []]
    for axis in draw(st.permutations(list(axes))):
        if (dimension := draw(st.integers(0, 3))) < 3:
            entries[dimension].append(axis)
    return axes, [tuple(names) or None for names in entries], hosts, devices_per_host, order


@given(tables())
@settings(max_examples=200)
def test_the_table_equals_the_plan_of_each_host(
    table: tuple[dict[str, int], list[tuple[str, ...] | None], int, int, list[int] | None],
) -> None:
    axes, spec, hosts, devices_per_host, order = table
    mesh = fake_mesh(axes, hosts, devices_per_host, permutation=order)
    process_of = None if order is None else np.array(order) // devices_per_host
    shape = tuple(math.prod(axes[a] for a in entry or ()) * (2 + d) for d, entry in enumerate(spec))
    found = plan_table(axes, spec, process_of, hosts, devices_per_host, shape)
    sharding = NamedSharding(mesh, P(*spec))
    plans = [plan_host(sharding, shape[0], host) for host in range(hosts)]
    assert found.row_ranges() == [plan.row_ranges for plan in plans]
    assert found.num_rows().tolist() == [plan.num_rows for plan in plans]
    boxes = [[(box.start, box.stop) for box in plan.leaf(sharding, shape).columns] for plan in plans]
    np.testing.assert_array_equal(found.columns, np.array(boxes).reshape(hosts, 2, 2))


def test_four_thousand_hosts_are_planned_as_the_sharding_divides_them() -> None:
    axes, hosts, devices_per_host = {"data": 4096, "model": 4}, 4096, 4
    order = np.random.default_rng(0).permutation(hosts * devices_per_host)
    spec = P("data", "model")
    found = plan_table(axes, spec, order // devices_per_host, hosts, devices_per_host, (16384, 8))
    sharding = NamedSharding(fake_mesh(axes, hosts, devices_per_host, permutation=order.tolist()), spec)
    ranges = found.row_ranges()
    for host in (0, 1, 77, 4095):
        plan = plan_host(sharding, 16384, host)
        assert ranges[host] == plan.row_ranges
        box = plan.leaf(sharding, (16384, 8)).columns[0]
        assert found.columns[host].tolist() == [[box.start, box.stop]]
    assert found.num_rows().sum() >= 16384


def test_rows_over_hosts_that_share_a_model_axis() -> None:
    found = plan_table({"data": 2, "model": 4}, ["data"], None, 4, 2, (16,))
    assert found.row_ranges() == [((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),)]


AXES = {"data": 2, "model": 4}


def test_a_table_has_64_bit_rows_and_columns_of_every_host() -> None:
    found = plan_table(AXES, ["data", "model"], None, 5, 2, (16, 8, 3))
    assert found.num_hosts == 5
    assert found.range_host.tolist() == [0, 1, 2, 3]
    assert found.ranges.tolist() == [[0, 8], [0, 8], [8, 16], [8, 16]]
    assert found.columns.tolist() == [
        [[0, 4], [0, 3]], [[4, 8], [0, 3]], [[0, 4], [0, 3]], [[4, 8], [0, 3]], [[0, 0], [0, 0]],
    ]  # fmt: skip
    assert found.num_rows().tolist() == [8, 8, 8, 8, 0]
    assert {array.dtype for array in (found.ranges, found.columns, found.num_rows())} == {np.dtype(np.int64)}


def test_one_host_with_all_devices() -> None:
    assert plan_table({"data": 1}, [], None, 1, 1, (3,)).row_ranges() == [((0, 3),)]
    assert plan_table(AXES, ["data", "model", "further"][:2], None, 1, 8, (16,)).row_ranges() == [((0, 16),)]


def test_the_hosts_of_the_mesh_may_be_given_in_its_shape() -> None:
    process_of = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    shaped = plan_table(AXES, [("data", "model")], process_of, 2, 99, (16,))
    flat = plan_table(AXES, [("data", "model")], process_of.reshape(-1), 2, 1, (16,))
    assert shaped.row_ranges() == flat.row_ranges() == [((4, 12),), ((0, 4), (12, 16))]


EVENLY = (
    "{} cannot be divided evenly over mesh axis {}. Nearest valid sizes: {}. Change the size, or divide it over "
    "fewer axes."
)
UNKNOWN = "the spec names the axis 'seq', which the mesh does not have. Use one of ['data', 'model']."
TWICE = "the spec names the axis {!r} twice. An axis can divide only one dimension."
TOO_SMALL = (
    "the mesh {'data': 2, 'model': 4} has 8 positions, but 3 hosts x 2 devices are 6. Use a smaller mesh, or more "
    "hosts or devices."
)
PROCESSES = (
    "process_of has {} entries from {} to {}; expected 8 entries, one for each position of the mesh "
    "{{'data': 2, 'model': 4}}, each in 0..3"
)


@pytest.mark.parametrize(
    ("arguments", "setting", "message"),
    [
        (
            (["data"], None, 4, 2, (15,)),
            None,
            EVENLY.format("the global batch of size 15", "'data' of size 2", "14 and 16"),
        ),
        (
            (["data", "model"], None, 4, 2, (16, 6)),
            None,
            EVENLY.format("dimension 1 of size 6", "'model' of size 4", "4 and 8"),
        ),
        ((["seq"], None, 4, 2, (16,)), "spec", UNKNOWN),
        ((["data", "data"], None, 4, 2, (16, 16)), "spec", TWICE.format("data")),
        (([("model", "model")], None, 4, 2, (16,)), "spec", TWICE.format("model")),
        ((["data", None, "seq"], None, 4, 2, (16,)), "spec", UNKNOWN),
        ((["data"], None, 3, 2, (16,)), "mesh", TOO_SMALL),
        ((["data"], np.arange(8), 4, 2, (16,)), "process_of", PROCESSES.format(8, 0, 7)),
        ((["data"], np.array([0, 1, 2, 3, 4, 0, 0, 0]), 4, 2, (16,)), "process_of", PROCESSES.format(8, 0, 4)),
        ((["data"], np.array([2, 1, 2, 3, -1, 1, 1, 1]), 4, 2, (16,)), "process_of", PROCESSES.format(8, -1, 3)),
        ((["data"], np.arange(3), 4, 2, (16,)), "process_of", PROCESSES.format(3, 0, 2)),
        ((["data"], np.array([]), 4, 2, (16,)), "process_of", PROCESSES.format(0, 0, 0)),
        ((["data"], None, 0, 2, (16,)), "hosts", "hosts is 0; it must be at least 1"),
        ((["data"], None, 4, -2, (16,)), "devices_per_host", "devices_per_host is -2; it must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, setting: str | None, message: str) -> None:
    with pytest.raises(PlanError if setting is None else SettingsError) as caught:
        plan_table(AXES, *arguments)
    assert (str(caught.value), getattr(caught.value, "setting", None)) == (message, setting)
