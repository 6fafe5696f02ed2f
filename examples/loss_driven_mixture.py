"""A mixture whose weights follow the losses: the domain that the model knows least is drawn most.

Every 20 steps the weights become the shares of the domains' losses. The stages are part of the checkpoint, so a run that is
killed continues with exactly the batches of one that was not, although its feed is made with the first weights again.
"""

from __future__ import annotations

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

DOMAINS = {"prose": 1.0, "code": 0.4, "math": 0.15}  # scale of the features: small ones are learned slowly
BATCH, EVERY, STEPS = 64, 20, 160


def make_feed(mesh: Mesh) -> meshfeed.Feed:
    draw = np.random.default_rng(0)
    parts: dict[str, Any] = {}
    for number, (name, scale) in enumerate(DOMAINS.items()):
        x = scale * draw.standard_normal((4_000, 8), np.float32)
        y = x @ draw.standard_normal(8, np.float32) / scale
        parts[name] = {"x": x, "y": y, "domain": np.full(4_000, number, np.int32)}
    mixture = meshfeed.sources.Mixture(parts, weights=dict.fromkeys(DOMAINS, 1), block=256)
    return meshfeed.Feed(
        mixture, NamedSharding(mesh, P("data")), global_batch_size=BATCH, shuffle=True, num_epochs=None
    )


@jax.jit
def train_step(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    domains = jax.nn.one_hot(batch["domain"], len(DOMAINS))  # [rows, domains]

    def errors_of(params: jax.Array) -> jax.Array:
        return (jnp.einsum("rk,kd,rd->r", domains, params, batch["x"]) - batch["y"]) ** 2

    errors = errors_of(state["params"])
    gradient = jax.grad(lambda params: errors_of(params).sum())(state["params"]) / BATCH
    counts = domains.sum(0)
    losses = jnp.where(counts > 0, domains.T @ errors / jnp.maximum(counts, 1), state["losses"])
    return {"params": state["params"] - 0.5 * gradient, "losses": 0.9 * state["losses"] + 0.1 * losses}


def train(directory: str, num_steps: int) -> list[dict[str, float]]:
    """Trains up to a step, from the newest checkpoint; returns the weights that it set."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    state: Any = {"params": jnp.zeros((len(DOMAINS), 8)), "losses": jnp.ones(len(DOMAINS))}
    state = jax.device_put(state, NamedSharding(mesh, P()))
    found: list[dict[str, float]] = []
    with make_feed(mesh) as feed, meshfeed.checkpoint.Checkpointer(directory, save_interval_steps=25) as checkpoints:
        first, state = checkpoints.restore(state, feed)
        for step in range(first + 1, num_steps + 1):
            state = train_step(state, next(feed))
            if step % EVERY == 0:
                losses = np.asarray(state["losses"])  # replicated: the same on every host
                shares = (losses / losses.sum()).tolist()
                weights = {name: max(round(share, 3), 0.01) for name, share in zip(DOMAINS, shares, strict=True)}
                feed.set_weights(weights)
                found.append(weights)
            checkpoints.save(step, state, feed)  # after set_weights, so that the state has the stage
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        uninterrupted = train(whole, STEPS)
        for number, weights in enumerate(uninterrupted, 1):
            print(f"from step {number * EVERY:3d}: {weights}")
        resumed = train(parts, 90) + train(parts, STEPS)
        print("the same weights after a resume" if resumed == uninterrupted else "DIFFERENT weights")


if __name__ == "__main__":
    main()
