"""What orders by shards cost in learning: a small language model on sorted text, the worst case, in several orders.

The text is the source code of Python's standard library, sorted by path, so neighbors are alike and a shard holds one or
two files. The model predicts the next byte from the 32 before it. All orders train it for the same number of steps, with
the same initial weights per seed; the loss is that on records held out at random.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import sysconfig
from typing import Any

import numpy as np

from benchmarks._measure import Table, main, make_mesh, with_cpu_devices

with_cpu_devices(1)

CONTEXT, LENGTH = 32, 128  # bytes that the model sees, and bytes of a record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=int, default=16_384, help=f"of {LENGTH} bytes")
    parser.add_argument("--shard-records", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)


def text_records(number: int) -> np.ndarray:
    """uint8 ``[number, LENGTH]``: files evenly spaced among those of the standard library, in the order of their paths."""
    paths = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    paths = [path for path in paths if "site-packages" not in path.parts and "test" not in path.parts]
    sizes = np.cumsum([path.stat().st_size for path in paths])
    every = max(1, int(sizes[-1]) // (number * LENGTH))
    content = b"".join(path.read_bytes() for path in paths[::every])
    content = (content * -(-number * LENGTH // len(content)))[: number * LENGTH]
    return np.frombuffer(content, np.uint8).reshape(number, LENGTH)


def source_of(records: np.ndarray, shard_records: int) -> Any:
    from meshfeed.sources import Memory

    class Sorted(Memory):
        """Records in memory, as if they were in files."""

        def shard_lengths(self) -> np.ndarray:
            return np.diff(np.append(np.arange(0, len(records), shard_records), len(records)))

    return Sorted({"text": records})


def initial(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"embedding": (256, 16), "inner": (16 * CONTEXT, 128), "outer": (128, 256)}
    return {name: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()}


def loss_of(weights: Any, text: Any) -> Any:
    """Mean cross entropy of each byte after the first ``CONTEXT``, in nats."""
    import jax
    import jax.numpy as jnp

    embedded = weights["embedding"][text]
    places = jnp.arange(0, LENGTH - CONTEXT, 4)  # every fourth byte: neighbors say much the same
    windows = embedded[:, places[:, None] + jnp.arange(CONTEXT)].reshape(len(text), len(places), -1)
    logits = jax.nn.relu(windows @ weights["inner"]) @ weights["outer"]
    wanted = text[:, places + CONTEXT]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None].astype(jnp.int32), -1).mean()


@functools.cache
def compiled() -> tuple[Any, Any]:
    import jax

    def step(weights: Any, moments: Any, text: Any, number: Any) -> Any:
        gradients = jax.grad(loss_of)(weights, text)  # Adam
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
        second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradients)

        def moved(weight: Any, m: Any, v: Any) -> Any:
            m, v = m / (1 - 0.9**number), v / (1 - 0.99**number)
            return weight - 2e-3 * m / (v**0.5 + 1e-8)

        return jax.tree.map(moved, weights, first, second), (first, second)

    return jax.jit(step), jax.jit(loss_of)


def train(
    records: np.ndarray, held_out: np.ndarray, shuffle: Any, seed: int, options: argparse.Namespace
) -> list[float]:
    """Trains a model in an order; returns the loss on the records held out after each epoch."""
    import jax

    import meshfeed

    step, loss = compiled()
    mesh = make_mesh()
    weights = initial(seed)
    moments = (jax.tree.map(np.zeros_like, weights),) * 2
    losses: list[float] = []
    settings = {"global_batch_size": options.batch, "num_epochs": options.epochs, "seed": seed}
    with meshfeed.Feed(source_of(records, options.shard_records), mesh, shuffle=shuffle, **settings) as feed:
        for number, batch in enumerate(feed, 1):
            weights, moments = step(weights, moments, batch["text"], float(number))
            if number % (len(feed) // options.epochs) == 0:
                losses.append(float(loss(weights, held_out)))
    return losses


def measure(options: argparse.Namespace) -> list[Table]:
    import meshfeed

    records = text_records(options.records)
    held = np.zeros(len(records), bool)
    held[np.random.default_rng(0).choice(len(records), len(records) // 16, replace=False)] = True
    orders = {
        "uniform": True,
        '"shards"': "shards",
        "with affinity": meshfeed.ShardShuffle(affinity=True),
        "blocks of a shard": options.shard_records,
        "in order": False,
    }
    rows = []
    for name, shuffle in orders.items():
        losses = [train(records[~held], records[held], shuffle, seed, options) for seed in range(options.seeds)]
        row: dict[str, Any] = {"order": name}
        for epoch, found in enumerate(zip(*losses, strict=True), 1):
            row[f"loss after epoch {epoch}"] = f"{statistics.mean(found):.3f}"
            row[f"seeds, epoch {epoch}"] = " ".join(f"{value:.3f}" for value in found)
        rows.append(row)
    return [
        Table(
            "Loss on held-out records of sorted text",
            rows,
            f"{options.records:,} records of {LENGTH} bytes in shards of {options.shard_records}, batches of "
            f"{options.batch}, {options.seeds} seeds, whose initial weights are the same for each order.",
        )
    ]


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
