"""The ``sharding`` argument: what it may be, how it reaches the leaves, and refusals word for word."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshfeed._src.base.errors import PlanError, SettingsError, SourceError
from meshfeed._src.plan.plan import (
    axes_of,
    broadcast_shardings,
    check_divisible,
    check_shape,
    cut_spec,
    describe_layout,
    normalize_sharding,
    participants,
    sharding_leaves,
)
from meshfeed._src.plan.topology import fake_devices, fake_mesh

MESH = fake_mesh({"data": 4, "model": 2}, 4, 2)
ROWS, COLUMNS = NamedSharding(MESH, P("data")), NamedSharding(MESH, P(None, "model"))


TAKES = "Pass a NamedSharding, a Mesh (rows over all its axes), or a pytree of NamedShardings."


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: {"x": P("data")},
            SettingsError,
            f"sharding['x'] is a PartitionSpec, which names no devices: {P('data')}. Pass NamedSharding(mesh, spec).",
        ),
        (lambda: [ROWS, 3], SettingsError, f"sharding[1] is of type int: 3. {TAKES}"),
        (lambda: "rows", SettingsError, f"sharding is of type str: 'rows'. {TAKES}"),
        (lambda: None, SettingsError, f"sharding=None holds no sharding. {TAKES}"),
        (dict, SettingsError, f"sharding={{}} holds no sharding. {TAKES}"),
        (
            lambda: (NamedSharding(MESH.abstract_mesh, P("data")),),
            SettingsError,
            "sharding[0] is over an AbstractMesh, which has no devices. Pass a Mesh.",
        ),
        (
            lambda: {"x": NamedSharding(MESH, P("data", P.UNCONSTRAINED))},
            SettingsError,
            f"sharding['x'] does not define a layout: {P('data', P.UNCONSTRAINED)}. Every entry must be None, an axis, "
            "or a tuple of axes.",
        ),
        (
            lambda: Mesh(np.empty((0, 2), object), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
            PlanError,
            "sharding is over a mesh without devices, of shape {'data': 0, 'model': 2}. Each axis must have a size of "
            "at least 1.",
        ),
    ],
)
def test_what_is_not_a_sharding_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        normalize_sharding(make())
    assert str(caught.value) == message
    assert getattr(caught.value, "setting", "sharding") == "sharding"


@pytest.mark.parametrize("kind", ["unreduced", "reduced"])
def test_a_spec_that_is_reduced_over_an_axis_is_refused(kind: str) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = P("data", **{kind: {"model"}})  # type: ignore[arg-type]
    with pytest.raises(SettingsError) as caught:
        normalize_sharding(NamedSharding(mesh, spec))
    assert str(caught.value) == (
        f"sharding does not define a layout: {spec}. Every entry must be None, an axis, or a tuple of axes."
    )


def test_shardings_of_a_prefix_are_listed_once_in_order() -> None:
    assert sharding_leaves({"b": COLUMNS, "a": ROWS, "c": (COLUMNS, ROWS)}) == [ROWS, COLUMNS]
    assert sharding_leaves(ROWS) == [ROWS]


def test_participants_are_all_processes_of_all_meshes() -> None:
    devices = fake_devices(6, 1)

    def over(*indices: int) -> NamedSharding:
        grid = np.empty(len(indices), object)
        grid[:] = [devices[index] for index in indices]
        return NamedSharding(Mesh(grid, ("data",), axis_types=(AxisType.Auto,)), P("data"))

    assert participants(over(5, 0)) == (0, 5)
    assert participants({"a": over(5, 1), "b": over(3), "c": over(1)}) == (1, 3, 5)


def test_a_spec_is_cut_to_the_rank() -> None:
    sharding = NamedSharding(MESH, P("data", None, "model"))
    assert cut_spec(sharding, 3) is sharding
    assert cut_spec(sharding, 4) is sharding
    assert cut_spec(sharding, 2).spec == P("data", None)
    assert cut_spec(sharding, 0).spec == P()
    assert cut_spec(sharding, 2).mesh is MESH


def test_each_dimension_within_the_rank_must_be_divisible() -> None:
    sharding = NamedSharding(MESH, P(None, ("data", "model")))
    parts = MESH.shape["data"] * MESH.shape["model"]
    check_shape((7, 2 * parts, 5), sharding, "['x']")
    check_shape((7,), sharding, "['x']")
    with pytest.raises(PlanError, match=rf"^dimension 1 of leaf \['x'\] of size {parts + 1} cannot be divided evenly"):
        check_shape((7, parts + 1), sharding, "['x']")
    with pytest.raises(PlanError, match=r"^dimension 2 of leaf \(the only one\) of size 1 cannot"):
        check_shape((MESH.shape["data"], 5, 1), NamedSharding(MESH, P("data", None, "model")), "")
    with pytest.raises(PlanError, match=r"^the global batch of size 1 cannot"):
        check_shape((1,), NamedSharding(MESH, P("data")), "")
    assert [axes_of(entry) for entry in (None, "data", ("data", "model"), ())] == [(), ("data",), ("data", "model"), ()]


class Pair:
    """A pytree node with two children, unlike a tuple only in its type."""

    def __init__(self, first: Any, second: Any) -> None:
        self.children = (first, second)


jax.tree_util.register_pytree_with_keys(
    Pair,
    lambda pair: ([(jax.tree_util.SequenceKey(i), child) for i, child in enumerate(pair.children)], None),
    lambda _, children: Pair(*children),
)
BATCH = {"a": {"x": 0, "y": 1}, "b": [2, 3]}


@pytest.mark.parametrize(
    ("prefix", "where"),
    [
        ({"a": ROWS}, "at batch the batch has ['b'], but there is no sharding for it"),
        ({"a": ROWS, "b": ROWS, "c": ROWS}, "at batch there is a sharding for ['c'], but the batch has no such part"),
        ({"a": {"x": ROWS}, "b": ROWS}, "at batch['a'] the batch has ['y'], but there is no sharding for it"),
        ({"a": ROWS, "b": [ROWS]}, "at batch['b'] the batch has [1], but there is no sharding for it"),
        (
            {"a": {"x": ROWS, "y": ROWS}, "b": [ROWS]},
            "at batch['b'] the batch has [1], but there is no sharding for it",
        ),
        ({"a": ROWS, "b": (ROWS, ROWS)}, "at batch['b'] the shardings are a tuple and the batch is a list"),
        ({"a": ROWS, "b": Pair(ROWS, ROWS)}, "at batch['b'] the shardings are a Pair and the batch is a list"),
        (
            {"a": {"x": ROWS, "y": {"z": ROWS}}, "b": ROWS},
            "at batch['a']['y'] there is a sharding for ['z'], but the batch has no such part",
        ),
    ],
)
def test_the_first_place_where_a_prefix_does_not_fit_is_named(prefix: Any, where: str) -> None:
    with pytest.raises(SourceError) as caught:
        broadcast_shardings(prefix, BATCH)
    assert str(caught.value) == (
        f"the pytree of shardings is not a prefix of the batch: {where}. Received a batch of structure "
        f"{jax.tree.structure(BATCH)}; shardings {jax.tree.structure(prefix)}. Pass one sharding for each of those parts, "
        "or one NamedSharding for the whole batch."
    )


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 6), st.sampled_from([None, 1, 5, 9]))
def test_a_size_is_accepted_or_its_nearest_neighbours_are_named(
    size: int, a: int, b: int, multiple: int | None
) -> None:
    if size % (a * b) == 0:
        check_divisible("the batch", size, ("a", "b"), {"a": a, "b": b, "c": 7}, multiple)
        return
    with pytest.raises(PlanError) as caught:
        check_divisible("the batch", size, ("a", "b"), {"a": a, "b": b, "c": 7}, multiple)
    good = [n for n in range(1, 1000) if n % (a * b) == 0 and n % (multiple or 1) == 0]
    nearest = [max((n for n in good if n <= size), default=0), min(n for n in good if n >= size)]
    works = " and ".join(str(n) for n in nearest if n)
    assert str(caught.value) == (
        f"the batch of size {size} cannot be divided evenly over mesh axes ('a', 'b') of size {a} x {b} = {a * b}. "
        f"Nearest valid sizes: {works}. Change the size, or divide it over fewer axes."
    )


def test_one_axis_is_named_alone() -> None:
    with pytest.raises(PlanError) as caught:
        check_divisible("dimension 1", 10, ("model",), {"model": 4})
    assert str(caught.value) == (
        "dimension 1 of size 10 cannot be divided evenly over mesh axis 'model' of size 4. Nearest valid sizes: 8 "
        "and 12. Change the size, or divide it over fewer axes."
    )


def test_a_layout_names_axes_and_devices_in_their_order() -> None:
    assert describe_layout(ROWS) == describe_layout(NamedSharding(MESH, P(("data",), None)))
    assert describe_layout(ROWS) == "P(data) over data=4, model=2 of devices 0, 1, 2048, 2049, 4096, 4097, 6144, 6145"
    assert describe_layout({"a": COLUMNS, "b": ROWS, "c": COLUMNS}) == "; ".join(map(describe_layout, (COLUMNS, ROWS)))
    assert describe_layout(NamedSharding(MESH, P(("model", "data")))).startswith("P(model+data) over")
    devices = np.array(fake_devices(40, 1))
    one, other = (
        describe_layout(NamedSharding(Mesh(found, ("x",), axis_types=(AxisType.Auto,)), P("x")))
        for found in (devices, np.concatenate([devices[:39:-1], devices[:38], devices[:37:-1]]))
    )
    assert one.startswith("P(x) over x=40 of devices 0, 2048, 4096, 6144, 8192, 10240, 12288, 14336, … (of 40, digest ")
    assert one != other  # though the first devices are alike
    assert one[: one.index("digest")] == other[: other.index("digest")]
