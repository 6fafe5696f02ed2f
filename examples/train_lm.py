"""Trains a small byte-level language model on any number of hosts, and resumes on any other number.

On one host, with all its devices::

    python examples/train_lm.py --data 'corpus/*.array_record' --checkpoints checkpoints

On several hosts, run the same command on each, with its own number::

    python examples/train_lm.py --data ... --checkpoints ... --coordinator host0:8476 --num-hosts 4 --host 0

Records are pieces of text of equal length. Every global batch is the same on any number of hosts, so a job that was
killed can restart on as many hosts as are available: nothing is lost and nothing repeated. ``meshfeed demo`` runs this
file.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

# ---------------------------------------------------------------------------------------------------- the model

WIDTH, HEADS, LAYERS = 64, 4, 2


def init_params(key: jax.Array, context: int) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[0])

    layers = [
        {
            "qkv": matrix(WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": matrix(WIDTH, WIDTH).reshape(HEADS, WIDTH // HEADS, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
            "scales": jnp.ones((2, WIDTH)),
        }
        for _ in range(LAYERS)
    ]
    return {"bytes": matrix(256, WIDTH), "places": matrix(context, WIDTH), "layers": layers}


def layout(mesh: Mesh, path: Any, leaf: Any) -> NamedSharding:
    """Divides heads and hidden units over the model axis, replicates the rest. Adam's state has the same names."""
    specs = {
        "qkv": P(None, None, "model"),
        "out": P("model"),
        "up": P(None, "model"),
        "down": P("model"),
    }
    name = next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None)
    return NamedSharding(mesh, specs.get(name, P()) if leaf.ndim else P())


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def loss_of(params: dict[str, Any], text: jax.Array) -> jax.Array:
    """Mean cross entropy of ``text`` (uint8 ``[rows, context + 1]``), in nats per byte, given the bytes before each."""
    inputs, targets = text[:, :-1], text[:, 1:].astype(jnp.int32)
    x = params["bytes"][inputs] + params["places"]
    for layer in params["layers"]:
        q, k, v = jnp.einsum("btd,dchw->cbthw", normalize(x, layer["scales"][0]), layer["qkv"])
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bthw,hwd->btd", attended, layer["out"])
        x = x + jax.nn.gelu(normalize(x, layer["scales"][1]) @ layer["up"]) @ layer["down"]
    logits = normalize(x, jnp.ones(WIDTH)) @ params["bytes"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


def init_state(key: jax.Array, context: int) -> dict[str, Any]:
    params = init_params(key, context)
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], text: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], text)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


# ---------------------------------------------------------------------------------------------------- the data


def decode_batch(records: list[bytes]) -> dict[str, np.ndarray]:
    """All records of a batch at once: uint8 ``[rows, context + 1]``."""
    return {"text": np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)}


def row_digests(text: jax.Array) -> dict[int, str]:
    """Digest of each row that this host's devices hold: row of the global batch → digest of its bytes."""
    digests: dict[int, str] = {}
    for shard in text.addressable_shards:
        first = shard.index[0].start or 0
        for row, content in enumerate(np.asarray(shard.data), start=first):
            digest = hashlib.sha256(content.tobytes()).hexdigest()[:32]
            if digests.setdefault(row, digest) != digest:
                raise AssertionError(f"two devices of this host hold different contents of row {row}")
    return digests


# ---------------------------------------------------------------------------------------------------- the loop


def train(options: argparse.Namespace) -> None:
    model = options.model_axis
    mesh = jax.make_mesh((jax.device_count() // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    source = meshfeed.sources.ArrayRecord(options.data, decode_batch=decode_batch)
    feed = meshfeed.Feed(
        source,
        NamedSharding(mesh, P("data")),  # rows over the data axis, the same rows along the model axis
        global_batch_size=options.batch,
        shuffle=True,
        seed=options.seed,
        num_epochs=None,
    )
    context = feed.element_spec["text"].shape[1] - 1  # known before any data is read
    init = functools.partial(init_state, context=context)
    shardings = jax.tree_util.tree_map_with_path(
        functools.partial(layout, mesh), jax.eval_shape(init, jax.random.key(0))
    )
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))

    saver = meshfeed.checkpoint.Checkpointer(options.checkpoints, save_interval_steps=options.save_every)
    with feed, saver as checkpoints:
        step, state = checkpoints.restore(state, None if options.forget_position else feed)
        report(options, {"restored": step, "position": feed.position, "mesh": dict(mesh.shape)})
        first, start = None, 0.0
        while step < options.steps:
            number = feed.step
            batch = next(feed)
            state, loss = train_step(state, batch["text"])
            step += 1
            line: dict[str, Any] = {"step": step, "loss": float(loss)}  # waits for the step
            if first is None:  # the clock starts when the first step has been compiled
                first, start = step, time.perf_counter()
            line |= {
                "records_per_second": round((step - first) * options.batch / (time.perf_counter() - start)),
                "stall_fraction": round(feed.stats().stall_fraction, 4),
            }
            if options.audit:
                line |= {"record_ids": feed.record_ids(number).tolist(), "rows": row_digests(batch["text"])}
            report(options, line)
            checkpoints.save(step, state, feed, force=step == options.steps)


def report(options: argparse.Namespace, line: dict[str, Any]) -> None:
    if options.log:
        with open(options.log, "a") as log:
            log.write(json.dumps(line) + "\n")
    if options.host == 0:
        short = {name: value for name, value in line.items() if name not in ("rows", "record_ids")}
        print(json.dumps(short), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="ArrayRecord files: a path or a glob")
    parser.add_argument("--checkpoints", required=True, help="folder; training resumes from the newest step in it")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--batch", type=int, default=64, help="rows of the global batch, over all hosts")
    parser.add_argument("--seed", type=int, default=0, help="of the order of records")
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--model-axis", type=int, default=1, help="devices that share a row of the batch")
    parser.add_argument(
        "--coordinator", help="address:port of host 0, or `auto` under Slurm, on a TPU pod or on Kubernetes"
    )
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--host", type=int, default=0, help="number of this host")
    parser.add_argument("--log", help="file for one line of JSON per step")
    parser.add_argument("--audit", action="store_true", help="log record ids and a digest of each row too")
    parser.add_argument("--forget-position", action="store_true", help=argparse.SUPPRESS)  # for the demo's own test
    options = parser.parse_args()
    if options.coordinator == "auto":
        jax.distributed.initialize()
        options.host = jax.process_index()
    elif options.coordinator:
        jax.distributed.initialize(options.coordinator, options.num_hosts, options.host)
    train(options)


if __name__ == "__main__":
    main()
