"""Restoring a checkpoint on several hosts: bytes read, balance, seconds, extra memory and exactness, ours and Orbax's.

One tree, one run, one machine; files come from the page cache, so seconds flatter whoever reads more. ``read`` is
decoded by TensorStore from files, over all hosts, over the size of the stored files; ``busiest`` the most any host read
over the mean; ``extra`` the peak resident memory of any process beside what it held before and the restored arrays: in
the first run, which compiles and connects (20 to 30 MB by itself), and in the best. It counts what malloc keeps of freed
memory; with MALLOC_TRIM_THRESHOLD_=131072 set, it does not.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks._measure import Table, main


def make_tree(mesh: Any, mib: int, replica_sharded: bool, leaves: int = 0) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    rng = np.random.default_rng(0)

    def put(values: np.ndarray, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def floats(rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
        values = rng.normal(size=(rows, columns)).astype(dtype)
        values[:8, :4] = np.array([-0.0, np.inf, np.nan, 1e-42], np.float32).astype(dtype)
        return values

    if leaves:
        rows = max(8, mib * (1 << 20) // 4 // 256 // leaves * 2 // 8 * 8)
        parts = {
            "kernel": (put(floats(rows, 256), "model"), leaves - leaves // 2),
            "scale": (put(floats(8, 256)), leaves // 2),
        }
        return {f"{name}_{number}": part + 0 for name, (part, count) in parts.items() for number in range(count)}
    rows = mib * (1 << 20) // 4 // 4096 // 8 * 4  # half of the bytes in one leaf
    tree = {"embedding": put(floats(rows, 4096), None, "model")}
    for layer in range(8):
        size = rows // 32 // 8 * 8
        tree[f"layer_{layer}"] = {
            "kernel": put(floats(size, 4096), "model"),
            "out": put(floats(size, 4096, jnp.bfloat16), None, "model"),
            "moment": put(floats(size // 2, 4096), "data" if replica_sharded else None, "model"),
            "scale": put(floats(1, 4096)[0].copy()),
        }
    tree["ints"] = put(rng.integers(-128, 127, (1 << 20,)).astype(np.int8))
    return tree


def abstract(tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def count_wrong(tree: Any, restored: Any) -> int:
    """Leaves of which some byte, the dtype or the sharding differs."""
    import jax
    import numpy as np

    wrong = 0
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(restored), strict=True):
        theirs = {shard.device: shard.data for shard in two.addressable_shards}
        same = one.dtype == two.dtype and one.sharding.is_equivalent_to(two.sharding, one.ndim)
        wrong += not same or any(
            np.asarray(shard.data).tobytes() != np.asarray(theirs[shard.device]).tobytes()
            for shard in one.addressable_shards
        )
    return wrong


def bytes_read() -> int:
    import tensorstore

    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return int(sum(entry.get("value", 0) for metric in metrics for entry in metric["values"]))


def memory(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def held(tree: Any) -> int:
    import jax

    return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)


def restorers(directory: str, tree: Any, limit: int) -> dict[str, Any]:
    """Name → a function that restores."""
    import functools

    import jax
    import orbax.checkpoint as ocp

    from meshfeed.checkpoint import restore_once

    wanted = abstract(tree)
    ours = functools.partial(restore_once, f"{directory}/ours", wanted)
    handlers = ocp.type_handlers

    def orbax(path: str, handler: Any, args: Any) -> Any:
        registry = handlers.create_type_handler_registry((jax.Array, handler))
        pytree = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        return pytree.restore(pathlib.Path(path), args=ocp.args.PyTreeRestore(wanted, restore_args=args))

    plain = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype), wanted
    )
    single = jax.tree.map(
        lambda leaf: ocp.type_handlers.SingleReplicaArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        ),
        wanted,
    )
    theirs = f"{directory}/orbax"
    return {
        "meshfeed once": ours,
        "meshfeed once, no verify": functools.partial(ours, verify=False),
        f"meshfeed once, limit {limit >> 20} MiB": functools.partial(ours, memory_limit_bytes=limit),
        "meshfeed single_replica": functools.partial(ours, restore="single_replica"),
        f"meshfeed single_replica, limit {limit >> 20} MiB": functools.partial(
            ours, restore="single_replica", memory_limit_bytes=limit
        ),
        "meshfeed every_host": functools.partial(ours, restore="every_host"),
        "meshfeed once, of Orbax's files": functools.partial(restore_once, theirs, wanted),
        "Orbax, every host": functools.partial(orbax, theirs, handlers.ArrayHandler(), plain),
        "Orbax, single replica": functools.partial(
            orbax, theirs, handlers.SingleReplicaArrayHandler(replica_axis_index=0, primary_replica_id=0), single
        ),
        f"Orbax, single replica, limit {limit >> 20} MiB": functools.partial(
            orbax,
            theirs,
            handlers.SingleReplicaArrayHandler(
                replica_axis_index=0, primary_replica_id=0, broadcast_memory_limit_bytes=limit
            ),
            single,
        ),
    }


def save_both(directory: str, tree: Any, rounds: int = 1) -> dict[str, list[float]]:
    """Saves the arrays by us and by Orbax, in turns; returns the seconds of each. The first saves are kept.

    The very first one, ours, also starts TensorStore and the services that both use.
    """
    import jax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils

    from meshfeed.checkpoint import ArraysHandler, ArraysSave

    ways: dict[str, Callable[[], tuple[Any, Any]]] = {
        "ours": lambda: (ocp.Checkpointer(ArraysHandler()), ArraysSave(tree)),
        "orbax": lambda: (ocp.PyTreeCheckpointer(), ocp.args.PyTreeSave(tree)),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            path = pathlib.Path(directory, f"{way}-{turn}" if turn else way)
            checkpointer, args = ways[way]()
            multihost_utils.sync_global_devices(str(path))
            started = time.perf_counter()
            checkpointer.save(path, args=args)
            seconds[way].append(time.perf_counter() - started)
            if turn and jax.process_index() == 0:
                shutil.rmtree(path)
    return seconds


def job(
    directory: str, shape: tuple[int, int], mib: int, limit: int, rounds: int, replica_sharded: bool, leaves: int
) -> Any:
    """What every host runs."""
    import jax
    from jax.experimental import multihost_utils

    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tree = make_tree(mesh, mib, replica_sharded, leaves)
    saved = save_both(directory, tree, 3 * rounds)
    results: dict[str, Any] = {
        "save: meshfeed": {"seconds": saved["ours"]},
        "save: Orbax": {"seconds": saved["orbax"]},
    }
    for name, restore in restorers(directory, tree, limit).items():
        seconds, extra, read, wrong = [], [], 0, None
        try:
            for _ in range(rounds):
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # or memory freed before would hide what is taken now
                multihost_utils.sync_global_devices(name)
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
                before, before_bytes, started = memory("VmRSS"), bytes_read(), time.perf_counter()
                restored = restore()
                jax.block_until_ready(restored)
                seconds.append(time.perf_counter() - started)
                read = bytes_read() - before_bytes
                extra.append(memory("VmHWM") - before - held(restored))
                wrong = count_wrong(tree, restored)
                del restored
            results[name] = {"seconds": seconds, "read": read, "extra": extra, "wrong": wrong}
        except Exception as error:  # Orbax refuses some layouts
            results[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    return list(results.items())  # a dict would come back sorted


saved: list[tuple[Any, dict[str, Callable[[], Any]]]] = []  # in each host: the arrays, and the ways to restore them


def restore_again(directory: str, way: str, limit: int) -> tuple[float, float]:
    """What every host runs for benchmarks/against.py: one restore, and before the first the save.

    Returns:
      its seconds by wall clock and of CPU time.
    """
    import jax
    from jax.experimental import multihost_utils

    from benchmarks.restore import saved  # the host's own: this function's globals are sent anew with each call

    if not saved:
        mesh = jax.make_mesh(
            (jax.process_count(), jax.local_device_count()),
            ("data", "model"),
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
        )
        tree = make_tree(mesh, 200, replica_sharded=False)
        save_both(directory, tree)
        saved.append((tree, restorers(directory, tree, limit)))
    tree, ways = saved[0]
    gc.collect()
    multihost_utils.sync_global_devices(way)
    wall, cpu = time.perf_counter(), time.process_time()
    restored = ways[way]()
    jax.block_until_ready(restored)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    if wrong := count_wrong(tree, restored):
        raise RuntimeError(f"{wrong} leaves were restored wrong")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices", type=int, default=2, help="of each host")
    parser.add_argument("--mib", type=int, default=200)
    parser.add_argument(
        "--mesh", type=int, nargs=2, default=None, help="sizes of data and model; default: hosts devices"
    )
    parser.add_argument("--limit-mib", type=int, default=16)
    parser.add_argument(
        "--replica-sharded", action="store_true", help="also leaves sharded over data, which Orbax's broadcast refuses"
    )
    parser.add_argument(
        "--leaves", type=int, default=0, help="so many leaves of equal sizes instead, half of them replicated"
    )
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> list[Table]:
    from meshfeed.testing import HostPool

    directory = pathlib.Path(tempfile.mkdtemp(prefix="meshfeed-restore-"))
    shape = tuple(options.mesh or (options.hosts, options.devices))
    try:
        with HostPool(options.hosts, options.devices, timeout_seconds=900) as pool:
            arguments = (
                str(directory),
                shape,
                options.mib,
                options.limit_mib << 20,
                options.rounds,
                options.replica_sharded,
                options.leaves,
            )
            hosts = [dict(result.value) for result in pool.run(job, *arguments)]
        sizes = {
            part: sum(path.stat().st_size for path in (directory / part).rglob("*") if path.is_file())
            for part in ("ours", "orbax")
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows = [
        {
            "way": row["name"],
            "read / stored": row.get("read"),
            "busiest host / mean": row.get("busiest"),
            "first s": row.get("first"),
            "best s": row.get("best"),
            "first extra MB": row["extra first"] / 1e6 if "extra" in row else None,
            "extra MB": row["extra"] / 1e6 if "extra" in row else None,
            "wrong leaves": row.get("wrong", row.get("error", "")),
        }
        for row in summarize(hosts, sizes)
    ]
    title = f"restore, mesh {shape[0]} × {shape[1]} on {options.hosts} hosts, {sizes['ours'] / 1e6:.0f} MB stored"
    title += f" in {options.leaves} leaves" * bool(options.leaves)
    return [Table(title, rows, bars="read / stored")]


def summarize(hosts: list[dict[str, Any]], sizes: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    for name in hosts[0]:
        parts = [host[name] for host in hosts]
        row: dict[str, Any] = {"name": name}
        failed = next((part["error"] for part in parts if "error" in part), None)
        if failed:
            rows.append({**row, "error": failed})
            continue
        row["first"] = max(part["seconds"][0] for part in parts)
        row["best"] = min(max(times) for times in zip(*(part["seconds"] for part in parts), strict=True))
        if "read" in parts[0]:
            read = [part["read"] for part in parts]
            stored = sizes["ours" if name.startswith("meshfeed") and "Orbax" not in name else "orbax"]
            row["read"] = sum(read) / stored
            row["busiest"] = max(read) * len(read) / max(1, sum(read))
            row["extra first"] = max(part["extra"][0] for part in parts)
            row["extra"] = max(min(part["extra"]) for part in parts)
            row["wrong"] = max(part["wrong"] for part in parts)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
