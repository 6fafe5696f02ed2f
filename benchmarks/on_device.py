"""What an accelerator sees: transfers beside the link, the step that hides them, and checkpoints of device memory.

The first table puts batches that are ready in host memory on the devices and waits for each, beside a bare ``device_put``
of the same array. The second runs a step of matrix products on the devices, sized so that loading a batch (copy and
transfer) takes a share of it, and compares with the same steps on one batch that stays there: the rest is stall. The third
saves and restores arrays on the devices, beside Orbax; a copy to the host limits how long ``save`` holds a step.
Without an accelerator, all this runs on CPU devices, and says so.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks._measure import Table, Way, main, make_mesh, rates, spread, take_turns, with_cpu_devices

with_cpu_devices(8)

OURS = "meshfeed"


class Ready:
    """Batches in host memory; with ``copies`` each is copied once, as reading does."""

    def __init__(self, rows: int, row_bytes: int, copies: bool = False) -> None:
        from meshfeed._src.base import memory, ownership

        self._batch = memory.empty((rows, row_bytes // 4), np.int32)
        self._batch[:] = np.arange(rows)[:, None]
        if not copies:
            ownership.seal(self._batch)  # or it would be copied, since the source might write to it again

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, record_id: int) -> Any:
        return self._batch[0]

    def read_batch(self, record_ids: Any) -> Any:
        """The same rows each time."""
        return self._batch[: len(record_ids)]

    def fingerprint(self) -> Any:
        """Nothing to compare."""
        return {"kind": "ready"}


def where() -> str:
    import jax

    device = jax.devices()[0]
    return f"{jax.device_count()} × {device.device_kind}"


def sharding() -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(make_mesh(), PartitionSpec("data"))


def make_feed(source: Any, rows: int, prefetch: int) -> Any:
    import meshfeed

    return meshfeed.Feed(source, sharding(), global_batch_size=rows, shuffle=True, num_epochs=None, prefetch=prefetch)


def transfers(options: argparse.Namespace) -> Iterator[Table]:
    import jax

    rows = 64
    for mebibytes in options.mebibytes:
        source = Ready(rows, mebibytes * (1 << 20) // rows)
        batch, place = source.read_batch(range(rows)), sharding()

        def bare(batch: Any = batch, place: Any = place) -> int:
            jax.device_put(batch, place).block_until_ready()
            return 1

        def three(batch: Any = batch, place: Any = place) -> int:
            jax.block_until_ready([jax.device_put(batch, place) for _ in range(3)])
            return 3

        def way(feed: Any) -> Way:
            def run() -> int:
                jax.block_until_ready(next(feed))
                return 1

            return Way(run, 3, feed.close)

        limit = "device_put, one after the other"
        ways = {limit: Way(bare), "device_put, three at once": Way(three)}
        ways |= {OURS: way(make_feed(source, rows, 2)), f"{OURS}, prefetch=0": way(make_feed(source, rows, 0))}
        copied = Ready(rows, mebibytes * (1 << 20) // rows, copies=True)
        ways[f"{OURS}, and a copy of each batch"] = way(make_feed(copied, rows, 2))
        found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
        yield rates(
            f"host to device, batches of {mebibytes} MiB, {where()}", "GB", found, ours=OURS, floor=limit,
            scale=1e9 / (mebibytes << 20),
        )  # fmt: skip


def make_step(seconds: float) -> tuple[Callable[[Any, Any], Any], Any]:
    """A step on all devices that takes about so long: products of square matrices, and a sum of the batch."""
    import jax
    import jax.numpy as jnp

    size = 4096 if jax.devices()[0].platform != "cpu" else 256

    def run(batch: Any, noise: Any, repeats: int) -> Any:
        noise = jax.lax.fori_loop(0, repeats, lambda _, x: jnp.tanh(x @ x), noise)
        return noise + batch.sum().astype(noise.dtype) * 0

    noise = jax.device_put(jnp.ones((size, size), jnp.bfloat16) / size)
    timed = jax.jit(run, static_argnums=2)
    empty = jnp.zeros((1, 1), jnp.int32)
    durations = []
    for repeats in (20, 220):
        timed(empty, noise, repeats).block_until_ready()
        start = time.perf_counter()
        timed(empty, noise, repeats).block_until_ready()
        durations.append(time.perf_counter() - start)
    repeats = max(1, round(seconds / max((durations[1] - durations[0]) / 200, 1e-7)))
    return (lambda batch, noise: timed(batch, noise, repeats)), noise


def stalls(options: argparse.Namespace) -> Table:
    """How much longer steps take with a feed than on a batch that stays on the devices."""
    import jax

    rows, mebibytes = 64, options.mebibytes[-1]
    source = Ready(rows, mebibytes * (1 << 20) // rows, copies=True)
    feed = make_feed(source, rows, 0)
    loads = []
    for _ in range(12):
        start = time.perf_counter()
        jax.block_until_ready(next(feed))
        loads.append(time.perf_counter() - start)
    kept = next(feed)
    feed.close()
    load = statistics.median(loads[2:])
    table = []
    for ratio in options.ratios:
        step, noise = make_step(load / ratio)

        def loop(batches: Callable[[], Any], step: Any = step, noise: Any = noise) -> float:
            value = step(batches(), noise)
            value.block_until_ready()
            start = time.perf_counter()
            values = []
            for _ in range(options.steps):
                value = step(batches(), value)
                values.append(value)
                if len(values) > 1:  # as a loop that reads its loss one step late
                    values.pop(0).block_until_ready()
            value.block_until_ready()
            return (time.perf_counter() - start) / options.steps

        feeds = {depth: make_feed(source, rows, depth) for depth in (0, 2)}
        found: dict[str, list[float]] = {"alone": [], "0": [], "2": []}
        for _ in range(options.rounds):
            found["alone"].append(loop(lambda: kept))
            for depth, feed in feeds.items():
                found[str(depth)].append(loop(feed.__next__))
        for feed in feeds.values():
            feed.close()
        alone = statistics.median(found["alone"])
        table.append(
            {
                "load / step": ratio,
                "ms per step, batch stays": alone * 1e3,
                "stall, prefetch=0": f"{1 - alone / statistics.median(found['0']):.1%}",
                "stall, prefetch=2": f"{1 - alone / statistics.median(found['2']):.1%}",
                "quartiles of ms, prefetch=2": spread([seconds * 1e3 for seconds in found["2"]]),
            }
        )
    note = f"A batch of {mebibytes} MiB takes {load * 1e3:.3g} ms to copy and transfer when nothing runs beside it."
    return Table(f"steps with a feed beside steps on one batch, {where()}", table, note)


def checkpoints(options: argparse.Namespace) -> Iterator[Table]:
    """Save and restore of arrays on the devices."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from meshfeed.checkpoint import Checkpointer

    folder = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    leaves, place = 16, sharding()
    elements = options.checkpoint_mib * (1 << 20) // 4 // leaves
    make = jax.jit(lambda key: jax.random.normal(key, (elements // 1024, 1024), jnp.float32), out_shardings=place)
    state = {f"layer{number}": make(jax.random.key(number)) for number in range(leaves)}
    jax.block_until_ready(state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    renew = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
    seconds: dict[str, dict[str, list[float]]] = {}

    def note(way: str, what: str, start: float) -> None:
        seconds.setdefault(way, {}).setdefault(what, []).append(time.perf_counter() - start)

    try:
        for turn in range(options.checkpoint_rounds):
            state = renew(state)  # JAX keeps the host's copy of an array that was read
            jax.block_until_ready(state)
            start = time.perf_counter()
            copies = [np.asarray(leaf) for leaf in state.values()]
            note("copy to the host", "save returns", start)
            del copies
            state = jax.block_until_ready(renew(state))
            with Checkpointer(folder / f"ours{turn}", save_interval_steps=1) as ours:
                start = time.perf_counter()
                ours.save(1, state)
                note(OURS, "save returns", start)
                ours.wait()
                note(OURS, "saved", start)
                start = time.perf_counter()
                jax.block_until_ready(ours.restore(abstract)[1])
                note(OURS, "restored", start)
            state = jax.block_until_ready(renew(state))
            with ocp.CheckpointManager(folder / f"orbax{turn}") as theirs:
                start = time.perf_counter()
                theirs.save(1, args=ocp.args.StandardSave(state))
                note("Orbax", "save returns", start)
                theirs.wait_until_finished()
                note("Orbax", "saved", start)
                start = time.perf_counter()
                jax.block_until_ready(theirs.restore(1, args=ocp.args.StandardRestore(abstract)))
                note("Orbax", "restored", start)
            for name in (f"ours{turn}", f"orbax{turn}"):
                shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table = []
    for way, found in seconds.items():
        row: dict[str, Any] = {"way": way}
        for what in ("save returns", "saved", "restored"):
            row[f"{what}, s"] = statistics.median(found[what]) if what in found else None
        table.append(row)
    yield Table(
        f"checkpoint of {options.checkpoint_mib:,} MiB in {leaves} leaves, {where()}", table,
        "Medians; digests are written and checked by meshfeed, not by Orbax.",
    )  # fmt: skip


TABLES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "transfers": transfers,
    "stalls": lambda options: [stalls(options)],
    "checkpoints": checkpoints,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 16, 64], help="per batch")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each way in each round")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint-mib", type=int, default=512)
    parser.add_argument("--checkpoint-rounds", type=int, default=3)
    parser.add_argument("--folder", help="where checkpoints are written; the folder for temporary files by default")


def measure(options: argparse.Namespace) -> Iterator[Table]:
    for name in options.tables:
        yield from TABLES[name](options)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
