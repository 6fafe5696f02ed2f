"""Checkpoints drawn at random: a tree, two meshes, a way to restore and a fault, and what must come of it.

The expected result is a model in plain numpy: the values of each leaf, as they were drawn, and the classes of error that
each fault permits. :func:`play` runs in one process or, called on every host of a job, in several.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from checkpoint_feeds import CountingFeed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.checkpoint import stored
from meshfeed.checkpoint import Checkpointer, restore_once

Case = Mapping[str, Any]

OPTIONS: dict[str, list[Any]] = {
    "leaves": ["dense", "narrow", "host", "keys", "empty", "mixed"],
    "large": [False, True],
    "save_mesh": ["8", "4x2", "2x2x2", "turned"],
    "save_layout": ["replicated", "partial", "sharded"],
    "restore_mesh": ["same", "2x4", "8", "turned", "3", "1"],
    "restore_layout": ["replicated", "partial", "sharded"],
    "mode": ["once", "single_replica", "every_host"],
    "limit": [None, 1 << 16],
    "verify": [True, False],
    "target": ["abstract", "concrete", "none", "numpy", "cast", "omit", "restore_once", "plain_orbax"],
    "feed": [True, False],
    "newest": [True, False],
    "fault": [
        "none", "flip", "flip_metadata", "missing", "truncated", "killed", "read_error",
        "extra_leaf", "lacking_leaf", "other_shape", "other_kind",
    ],
}  # fmt: skip
WRONG_TREES = ("extra_leaf", "lacking_leaf", "other_shape", "other_kind")
DENSE = ("float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "int8", "uint16", "int16", "uint32")
NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "int4", "uint4", "int2",
          "float4_e2m1fn")  # fmt: skip
MESHES = {"8": (8,), "4x2": (4, 2), "2x4": (2, 4), "2x2x2": (2, 2, 2), "turned": (2, 4), "3": (3,), "1": (1,)}


def valid(case: Case) -> bool:
    """Whether settings, some of which may be absent, fit together."""
    target, fault, leaves = case.get("target"), case.get("fault"), case.get("leaves")
    if fault in WRONG_TREES and target in ("none", "plain_orbax", "omit", "numpy", "cast", "concrete"):
        return False
    if target == "plain_orbax" and (leaves not in (None, "dense") or fault not in (None, "none")):
        return False
    if target in ("restore_once", "plain_orbax") and (case.get("newest") or case.get("feed")):
        return False
    if target in ("numpy", "cast") and leaves in ("keys", "host", "empty", "mixed"):
        return False
    return not (fault in ("other_shape", "other_kind") and leaves in ("host", "keys", "empty"))


def valid_on_hosts(case: Case) -> bool:
    """Whether a case may be played on several hosts: plain Orbax waits for hosts that are not in the mesh, and a tree to
    copy cannot be on a part of the hosts.
    """
    part = case["restore_mesh"] in ("3", "1")
    return case["target"] != "plain_orbax" and not (part and case["target"] == "concrete" and case["leaves"] != "dense")


# ---------------------------------------------------------------------------------------------------- the model


class Leaf(NamedTuple):
    """A leaf of the model."""

    kind: str  # "jax", "key", "host"
    values: Any  # numpy; of keys the data; of host leaves the leaf
    impl: str | None = None


def draw_tree(case: Case, seed: int) -> Any:
    """Returns a random tree of model leaves: the same for the same case and seed."""
    rng = random.Random(f"{seed} {case['leaves']} {case['large']}")
    bits = np.random.default_rng(seed)
    kinds = {"mixed": ["dense", "narrow", "host", "keys", "empty"]}.get(case["leaves"], [case["leaves"]])
    leaves = [draw_leaf(kinds[i % len(kinds)], case["large"] and i == 0, rng, bits) for i in range(rng.randint(3, 7))]
    root: dict[Any, Any] = {"first": leaves[0]}
    for number, leaf in enumerate(leaves[1:]):
        where = rng.randrange(5)
        if where == 0:
            root[f"leaf {number}/ü"] = leaf
        elif where == 1:
            root.setdefault("list", []).append(leaf)
        elif where == 2:
            root.setdefault("deep", {}).setdefault(number, {})["x"] = (leaf, None, ())
        elif where == 3:
            root.setdefault("numbers", {})[-number] = {"empty": {}, "leaf": leaf}
        else:
            root.setdefault("tuple", {})[f"t{number}"] = (leaf,)
    return root


def random_values(dtype: Any, shape: tuple[int, ...], bits: np.random.Generator) -> np.ndarray:
    """Any bit pattern of a dtype."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return bits.integers(0, 2, shape).astype(bool)
    if dtype.type.__module__ == "ml_dtypes" and jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return bits.integers(int(limits.min), int(limits.max) + 1, shape).astype(dtype)
    if dtype.name.startswith(("float4_", "float6_")):
        return bits.integers(0, 1 << int(dtype.name[5]), shape, dtype=np.uint8).view(dtype)
    raw = bits.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def draw_leaf(kind: str, large: bool, rng: random.Random, bits: np.random.Generator) -> Leaf:
    """Returns one leaf."""
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 8, 16, 24]) for _ in range(rng.randrange(4)))
    if kind in ("dense", "narrow"):
        dtype = rng.choice(DENSE if kind == "dense" else NARROW)
        if large:
            shape = (rng.choice([512, 520, 513]), rng.choice([768, 1024]))
        return Leaf("jax", random_values(dtype, shape, bits))
    if kind == "keys":
        impl, size = rng.choice([("threefry2x32", 2), ("rbg", 4)])
        return Leaf("key", random_values(np.uint32, (*shape[:2], size), bits), impl)
    if kind == "empty":
        dtype = rng.choice(DENSE)
        return Leaf(rng.choice(["jax", "host"]), np.zeros((*shape, 0), dtype))
    aligned = np.dtype([("a", "i1"), ("b", "f8"), ("c", ml_dtypes.bfloat16, (2,))], align=True)
    structured = np.zeros(shape, aligned)
    for name in aligned.names or ():
        structured[name] = random_values(aligned[name].base, structured[name].shape, bits)
    choices: list[Callable[[], Any]] = [
        lambda: structured,
        lambda: random_values(rng.choice([*DENSE, *NARROW, "int64", "float64", "complex128"]), shape, bits),
        lambda: random_values(">f4", shape, bits),
        lambda: random_values(ml_dtypes.float6_e3m2fn, shape, bits),
        lambda: np.arange(3).astype("M8[s]"),
        lambda: np.array(["a", "ß\N{GRINNING FACE}", ""]),
        lambda: np.ones(shape, np.longdouble),
        lambda: np.float16(-0.0),
        lambda: np.int64(2**62),
        lambda: rng.choice([3, -1.5, True, "text", b"\x00\xff", 1 << 70, float("-inf"), 1j, -0.0]),
    ]
    return Leaf("host", rng.choice(choices)())


def mesh_of(name: str) -> Mesh:
    """Returns a mesh of the first devices; ``turned`` has them in another order."""
    shape = MESHES[name]
    devices = np.array(jax.devices()[: math.prod(shape)])
    devices = devices[::-1].reshape(shape[::-1]).T if name == "turned" else devices.reshape(shape)
    return Mesh(devices, ("x", "y", "z")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def sharding_of(leaf: Leaf, mesh: Mesh, layout: str, rng: random.Random) -> NamedSharding:
    """Returns a sharding that the shape permits: over no axis, one, or as many as possible."""
    shape = leaf.values.shape if leaf.kind == "jax" else leaf.values.shape[:-1]
    axes = [] if layout == "replicated" else list(mesh.axis_names)
    rng.shuffle(axes)
    parts: list[list[str]] = [[] for _ in shape]
    for axis in axes:
        places = list(range(len(shape)))
        rng.shuffle(places)
        for place in places:
            if shape[place] % (math.prod(mesh.shape[name] for name in parts[place]) * mesh.shape[axis]) == 0:
                parts[place].append(axis)
                break
        if layout == "partial" and any(parts):
            break
    return NamedSharding(mesh, PartitionSpec(*(tuple(part) or None for part in parts)))


# ---------------------------------------------------------------------------------------------------- the real thing


def is_leaf(node: object) -> bool:
    """Whether a node is a leaf of the model."""
    return isinstance(node, Leaf)


def real(leaf: Leaf, sharding: NamedSharding) -> Any:
    """Returns the leaf that is saved."""
    if leaf.kind == "host":
        return leaf.values
    if leaf.kind == "jax":
        return jax.make_array_from_callback(
            leaf.values.shape, sharding, lambda index: leaf.values[index], dtype=leaf.values.dtype
        )
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    data = jax.make_array_from_callback(
        leaf.values.shape, whole, lambda index: leaf.values[index], dtype=leaf.values.dtype
    )
    return jax.jit(lambda x: jax.random.wrap_key_data(x, impl=leaf.impl), out_shardings=sharding)(data)


def shape_of(leaf: Leaf) -> tuple[int, ...]:
    """Returns the leaf's shape."""
    return leaf.values.shape if leaf.kind == "jax" else leaf.values.shape[:-1]


def wanted_leaf(leaf: Leaf, sharding: NamedSharding, target: str) -> Any:
    """Returns what is passed to restore."""
    if leaf.kind == "host":
        return leaf.values
    if target == "concrete":
        return real(leaf, sharding)
    if target == "numpy":
        return np.zeros(leaf.values.shape, leaf.values.dtype)
    dtype = leaf.values.dtype if leaf.kind == "jax" else jax.random.key(0, impl=leaf.impl).dtype
    if target == "cast" and jnp.issubdtype(dtype, jnp.floating):
        dtype = np.dtype(np.float32)
    return jax.ShapeDtypeStruct(shape_of(leaf), dtype, sharding=sharding)


def compare(where: str, leaf: Leaf, found: Any, wanted: Any) -> None:
    """Compares a restored leaf with the model, to the bit."""
    values = leaf.values
    if leaf.kind == "host" and not isinstance(values, np.ndarray | np.generic):
        assert type(found) is type(values), where
        assert repr(found) == repr(values), where
        return
    if isinstance(wanted, jax.ShapeDtypeStruct) and leaf.kind == "jax":
        values = values.astype(wanted.dtype)
    if isinstance(found, jax.Array):
        assert wanted is None or found.sharding.is_equivalent_to(wanted.sharding, found.ndim), (where, found.sharding)
        if leaf.kind == "key":
            assert str(jax.random.key_impl(found)) == leaf.impl, where
        assert found.shape == shape_of(leaf), where
        for shard in found.addressable_shards:
            data = jax.random.key_data(shard.data) if leaf.kind == "key" else shard.data
            same_bits(where, values[shard.index], np.asarray(data))
        return
    assert leaf.kind == "host" or isinstance(wanted, np.ndarray), where
    assert isinstance(found, np.generic) == isinstance(values, np.generic), where
    same_bits(where, np.asarray(values), np.asarray(found))


def same_bits(where: str, expected: np.ndarray, found: np.ndarray) -> None:
    """Bits are equal; padding of structured dtypes and of long doubles is not compared."""
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape), (where, expected.dtype, found.dtype)
    if expected.dtype.names:
        for name in expected.dtype.names:
            same_bits(f"{where}.{name}", expected[name], found[name])
    elif expected.dtype.name in ("longdouble", "float128"):
        np.testing.assert_array_equal(expected, found, err_msg=where)
    else:
        assert expected.tobytes() == found.tobytes(), where


def sync(name: str) -> None:
    """Waits for the other hosts."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def files_of(step: pathlib.Path, data: bool) -> list[pathlib.Path]:
    """Returns the files of array values, or all others, of a step."""
    files = [path for path in (step / "arrays").rglob("*") if path.is_file()]
    return sorted(path for path in files if (path.parent.name == "d") == data)


def damage(step: pathlib.Path, fault: str, rng: random.Random) -> None:
    """Applies a fault to the files of a step."""
    if fault == "killed":
        step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp"))
        return
    files = files_of(step, fault == "flip")
    if fault == "flip_metadata":
        files = sorted((step / "arrays/meshfeed").iterdir())
    if fault in ("missing", "truncated"):
        later = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes them once the item is complete
        files = [path for path in files if path.parent.name != "meshfeed" and path.name not in later]
        files = [path for path in files if path.stat().st_size] or files
    if not files:
        return
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(content[:-1])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))


@contextlib.contextmanager
def read_errors(wanted: bool) -> Iterator[list[int]]:
    """On the last host, reads of arrays fail. Gives the reads that failed."""
    failed: list[int] = []
    whole = stored.StoredArrays.finish_read

    def fail(self: Any, leaf: Any, *_: Any) -> np.ndarray:
        failed.append(1)
        raise OSError(5, "Input/output error", leaf.name)

    if wanted and jax.process_index() == jax.process_count() - 1:
        stored.StoredArrays.finish_read = fail
    try:
        yield failed
    finally:
        stored.StoredArrays.finish_read = whole


def wrong(tree: Any, fault: str) -> Any:
    """Returns the wanted tree with a leaf that the checkpoint does not have as such."""
    first = tree["first"]
    if fault == "extra_leaf":
        return {**tree, "another": np.zeros(3)}
    if fault == "lacking_leaf":
        return {key: value for key, value in tree.items() if key != "first"}
    whole = NamedSharding(first.sharding.mesh, PartitionSpec())
    if fault == "other_shape":
        return {**tree, "first": jax.ShapeDtypeStruct((*first.shape, 2), first.dtype, sharding=whole)}
    kind = first.dtype if jnp.issubdtype(first.dtype, jax.dtypes.prng_key) else np.dtype(bool)
    kind = np.dtype(np.complex64) if kind == first.dtype else kind
    return {**tree, "first": jax.ShapeDtypeStruct(first.shape, kind, sharding=whole)}


def allowed(case: Case, model: Any) -> set[str]:
    """Returns the permitted outcomes: "exact", the "older" step, "error", or for data without a check "anything"."""
    fault, fallback = case["fault"], "older" if case["newest"] else "error"
    if case["target"] == "restore_once" and fault in ("missing", "truncated"):
        return {"exact", "error"}  # what is not needed is not looked at
    if fault in ("none",):
        return {"exact"}
    if fault == "flip":  # the bit may be one that no value depends on
        return {"exact", fallback, "error"} if case["verify"] else {"exact", "anything", fallback, "error"}
    if fault == "flip_metadata":
        return {fallback}
    if fault in ("missing", "truncated", "killed"):
        return {fallback}
    if fault == "other_kind" and model["first"].values.dtype == np.bool_:
        return {"anything"}  # of bool, every kind can be made
    return {"error"}


def play(case: Case, seed: int, directory: pathlib.Path) -> str:
    """Saves, damages and restores as the case says, and compares with the model; returns the outcome."""
    model = {step: draw_tree(case, seed + step) for step in (1, 2)}
    model[1] = model[2] if case["leaves"] == "empty" else refill(model[2], seed)
    rng = random.Random(f"{seed} layouts")
    save_mesh = mesh_of(case["save_mesh"])
    restore_mesh = save_mesh if case["restore_mesh"] == "same" else mesh_of(case["restore_mesh"])
    draw = random.Random(f"{seed} saved").random()
    trees = {}
    for step in (1, 2):
        layouts = random.Random(draw)
        trees[step] = jax.tree.map(
            lambda leaf, layouts=layouts: (
                real(leaf, sharding_of(leaf, save_mesh, case["save_layout"], layouts))
                if leaf.kind != "host"
                else leaf.values
            ),
            model[step],
            is_leaf=is_leaf,
        )
    feed = CountingFeed() if case["feed"] else None
    with Checkpointer(directory, save_interval_steps=1, timeout_seconds=120) as ckpt:
        for step in (1, 2):
            _ = feed and next(feed)
            assert ckpt.save(step, trees[step], feed)
    if jax.process_index() == 0 and case["fault"] not in ("none", "read_error", *WRONG_TREES):
        damage(directory / "2", case["fault"], rng)
    sync("damaged")
    layouts = random.Random(f"{seed} restored")
    wanted = jax.tree.map(
        lambda leaf: wanted_leaf(
            leaf,
            sharding_of(leaf, restore_mesh, case["restore_layout"], layouts) if leaf.kind != "host" else None,
            case["target"],
        ),
        model[2],
        is_leaf=is_leaf,
    )
    if case["fault"] in WRONG_TREES:
        wanted = wrong(wanted, case["fault"])
    if case["target"] == "omit":
        wanted = {**wanted, "first": ...}
    permitted = allowed(case, model[2])
    with read_errors(case["fault"] == "read_error") as failed:
        try:
            step, found, position = restore(case, directory, None if case["target"] == "none" else wanted)
            outcome = "exact" if step == 2 else "older"
        except CheckpointError:
            outcome, step, found, position = "error", 0, None, None
    if case["fault"] == "read_error" and jax.process_count() == 1 and not failed:
        permitted = {"exact"}  # nothing is stored as an array
    elif case["fault"] == "read_error" and jax.process_count() > 1:
        permitted = {"exact", "error"}  # that host may have nothing to read
    if outcome != "error":
        assert position == (4 * step if case["feed"] else None)
        try:
            check(case, model[step], found, wanted)
        except AssertionError:
            if "anything" not in permitted:
                raise
            outcome = "anything"
        outcome = "anything" if "anything" in permitted and outcome not in permitted else outcome
    assert outcome in permitted, f"{outcome}, but the model permits {sorted(permitted)}"
    return outcome


def refill(model: Any, seed: int) -> Any:
    """Returns a tree of the same structure with other values."""
    bits = np.random.default_rng([seed, 1])

    def other(leaf: Leaf) -> Leaf:
        if leaf.kind == "host":
            return leaf
        return leaf._replace(values=random_values(leaf.values.dtype, leaf.values.shape, bits))

    return jax.tree.map(other, model, is_leaf=is_leaf)


def restore(case: Case, directory: pathlib.Path, wanted: Any) -> tuple[int, Any, int | None]:
    """Restores as the case says; returns the step, the tree and the feed's position."""
    settings = {"restore": case["mode"], "verify": case["verify"], "memory_limit_bytes": case["limit"]}
    if case["target"] == "restore_once":
        return 2, restore_once(directory / "2/arrays", wanted, timeout_seconds=120, **settings), None
    if case["target"] == "plain_orbax":
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        with ocp.PyTreeCheckpointer() as plain:
            return 2, plain.restore(directory.absolute() / "2/arrays", item=wanted, restore_args=arguments), None
    feed = CountingFeed() if case["feed"] else None
    with Checkpointer(directory, timeout_seconds=120, **settings) as ckpt:
        try:
            step, found = ckpt.restore(wanted, feed, None if case["newest"] else 2)
        except CheckpointError:
            assert feed is None or feed.position == 0, "a failed restore moved the feed"
            raise
    return step, found, None if feed is None else feed.position


def check(case: Case, model: Any, found: Any, wanted: Any) -> None:
    """Compares a restored tree with the model."""
    expected, structure = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_leaf)
    leaves, found_structure = jax.tree_util.tree_flatten_with_path(found)
    assert structure == found_structure, (structure, found_structure)
    asked = [None] * len(leaves) if case["target"] == "none" else jax.tree.leaves(wanted)
    for (path, leaf), (_, value), want in zip(expected, leaves, asked, strict=True):
        where = jax.tree_util.keystr(path)
        if want is ...:
            assert value is ..., where
        else:
            compare(where, leaf, value, want)


def script(case: Case, seed: int) -> str:
    """Returns a program that plays the case."""
    return f"""# From the repository's root, with XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu
import json, pathlib, sys, tempfile
sys.path.append("tests/checkpoint")
import checkpoint_cases
case = json.loads({json.dumps(dict(case))!r})
with tempfile.TemporaryDirectory() as directory:
    print(checkpoint_cases.play(case, {seed}, pathlib.Path(directory)))
"""
