"""The training of `maxtext_loop_before.py` with a meshfeed feed.

Removed: the division of records among hosts, the parts of a ramp-up, the iterator's files, the reshard in the step.
Added: it resumes on any number of hosts and devices, and no record of the evaluation is lost or counted twice.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

RECORDS, WIDTH, BATCH, SMALL_BATCH, RAMP_STEPS = 2048, 8, 32, 16, 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpoints", type=pathlib.Path, required=True)
    options = parser.parse_args()

    records = np.random.default_rng(0).normal(size=(RECORDS, WIDTH)).astype(np.float32)
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))
    rows = NamedSharding(mesh, P(("data", "fsdp")))  # the layout that the step wants
    train = meshfeed.Feed(
        {"inputs": records},
        rows,
        global_batch_size=meshfeed.BatchSchedule([(0, SMALL_BATCH), (RAMP_STEPS, BATCH)]),
        name="train",
    )
    evaluate = meshfeed.Feed(
        {"inputs": records[:100]}, rows, global_batch_size=BATCH, end="pad", mask_key="real", name="eval"
    )

    def loss_of(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean((batch["inputs"] @ w - batch["inputs"].sum(-1)) ** 2)

    def eval_step(w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        errors = (batch["inputs"] @ w - batch["inputs"].sum(-1)) ** 2
        return jnp.sum(errors * batch["real"]), jnp.sum(batch["real"])

    train_step = jax.jit(lambda w, batch: (w - 0.05 * jax.grad(loss_of)(w, batch), loss_of(w, batch)))
    w = jax.device_put(jnp.zeros(WIDTH), NamedSharding(mesh, P()))
    with train, evaluate, meshfeed.checkpoint.Checkpointer(options.checkpoints, save_interval_steps=1) as checkpointer:
        start, state = checkpointer.restore({"w": w}, train)
        w = state["w"]
        for step in range(start, options.steps):
            batch = next(train)
            w, loss = train_step(w, batch)
            print(f"step {step}: {batch['inputs'].shape[0]} rows, loss {float(loss):.5f}", flush=True)

        evaluate.reset()
        sums = [jax.jit(eval_step)(w, batch) for batch in evaluate]
        total, count = (float(sum(part)) for part in zip(*sums, strict=True))
        print(f"eval: {total / count:.5f} over {count:.0f} records")
        if options.steps > start:
            checkpointer.save(options.steps, {"w": w}, train, force=True)


if __name__ == "__main__":
    main()
