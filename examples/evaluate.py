"""Evaluates a model on every record exactly once, with the same result on any number of hosts.

python examples/evaluate.py                                                         # one host
python examples/evaluate.py --coordinator 127.0.0.1:8476 --num-hosts 2 --host 0 &   # two
python examples/evaluate.py --coordinator 127.0.0.1:8476 --num-hosts 2 --host 1
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

NUM_RECORDS, NUM_CLASSES = 1_003, 10


def make_data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_RECORDS, 32)).astype(np.float32)
    return {
        "x": x,
        "label": (x[:, :NUM_CLASSES].argmax(1) + (rng.random(NUM_RECORDS) < 0.1)).astype(np.int32) % NUM_CLASSES,
    }


def model(x: jax.Array) -> jax.Array:
    return x[:, :NUM_CLASSES]


@jax.jit
def eval_step(confusion: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Adds the real rows of a batch to int32 ``[classes, classes]``: row the label, column the prediction."""
    predicted = model(batch["x"]).argmax(1)
    return confusion.at[batch["label"], predicted].add(batch["real"].astype(jnp.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="address:port of host 0; by default this process is the only host")
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--host", type=int, default=0, help="number of this host")
    parser.add_argument("--batch", type=int, default=64, help="rows of the global batch, over all hosts")
    options = parser.parse_args()
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.num_hosts, options.host)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    feed = meshfeed.Feed(
        make_data(), NamedSharding(mesh, P("data")), global_batch_size=options.batch, end="pad", mask_key="real"
    )
    confusion = jax.device_put(np.zeros((NUM_CLASSES, NUM_CLASSES), np.int32), NamedSharding(mesh, P()))
    with feed:
        for batch in feed:
            confusion = eval_step(confusion, batch)
    counts = np.asarray(confusion).astype(np.int64)
    recall = counts.diagonal() / counts.sum(1)
    figures = {
        "records": int(counts.sum()),
        "accuracy": float(counts.trace() / counts.sum()),
        "recall": recall.tolist(),
    }
    if options.host == 0:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
