"""Trains a classifier of handwritten digits in plain JAX, on real images, and tests it on images that it has not seen.

Needs ``pip install . scikit-learn optax`` in a checkout; the 1,797 images of 8 × 8 pixels are part of scikit-learn.
Interrupt it and run it again: it resumes from the newest checkpoint. On several hosts, run it on each, with its own
number::

    python examples/digits.py --coordinator host0:8476 --num-hosts 2 --host 0
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import meshfeed

OPTIMIZER = optax.adam(2e-3)


def load() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Three quarters of the images to train on, and the others to test: each {"image": [n, 64], "label": [n]}."""
    digits = load_digits()
    data = {"image": digits.data.astype(np.float32) / 16, "label": digits.target.astype(np.int32)}
    order = np.random.default_rng(0).permutation(len(data["label"]))
    num_train = len(order) * 3 // 4
    train, test = ({name: leaf[part] for name, leaf in data.items()} for part in np.split(order, [num_train]))
    return train, test


def init_state(key: jax.Array, width: int = 128) -> dict:
    first, second = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(first, (64, width)) / 8,
        "bias": jnp.zeros(width),
        "out": jax.random.normal(second, (width, 10)) / width**0.5,
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def logits_of(params: dict, images: jax.Array) -> jax.Array:
    return jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["out"]


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict, batch: dict) -> tuple[dict, jax.Array]:
    def loss_of(params: dict) -> jax.Array:
        logits = logits_of(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


@jax.jit
def num_right(params: dict, batch: dict) -> jax.Array:
    right = logits_of(params, batch["image"]).argmax(-1) == batch["label"]
    return (right & batch["real"]).sum()  # of the last batch, only some rows are images; the others pad it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="train up to this step; an epoch has 21")
    parser.add_argument("--batch", type=int, default=64, help="rows of the global batch, over all hosts")
    parser.add_argument("--checkpoints", default="digits-checkpoints", help="folder, shared by all hosts")
    parser.add_argument("--coordinator", help="address and port of host 0, for several hosts")
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--host", type=int, default=0)
    options = parser.parse_args()
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.num_hosts, options.host)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    train, test = load()
    feed = meshfeed.Feed(train, rows, global_batch_size=options.batch, shuffle=True, num_epochs=None)
    test_feed = meshfeed.Feed(test, rows, global_batch_size=options.batch, end="pad", mask_key="real", name="test")
    state = jax.jit(init_state, out_shardings=everywhere)(jax.random.key(0))
    with feed, test_feed, meshfeed.checkpoint.Checkpointer(options.checkpoints, save_interval_steps=50) as checkpoints:
        step, state = checkpoints.restore(state, feed)  # the newest intact step, or (0, state)
        print(f"from step {step}")
        while step < options.steps:
            state, loss = train_step(state, next(feed))
            step += 1
            if step % 25 == 0:
                print(f"step {step}, loss {float(loss):.3f}", flush=True)  # waits for the step
            checkpoints.save(step, state, feed)
        right = sum(int(num_right(state["params"], batch)) for batch in test_feed)
    print(f"{right} of {len(test['label'])} test images are right: {right / len(test['label']):.1%}")


if __name__ == "__main__":
    main()
