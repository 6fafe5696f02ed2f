"""Trains the language model of train_lm.py on whole documents, packed into sequences with segment masks.

On one host, with all its devices::

    python examples/pretrain_documents.py --data 'corpus/*.bin' --checkpoints checkpoints

On several hosts, run the same command on each, with its own number::

    python examples/pretrain_documents.py --data ... --checkpoints ... --coordinator host0:8476 --num-hosts 4 --host 0

Files hold bytes of text (uint8 tokens), and every document ends with a 0. A token attends only to its own document, and the
last token of a document predicts nothing. On the same mesh, a job that was killed and resumed on any number of hosts has
the same loss at every step as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import OPTIMIZER, init_state, normalize

import meshfeed


def summed_loss(params: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Sum of the cross entropies, in nats, of each byte given those before it in its document, and the number of bytes.

    Args:
      params: parameters of the model.
      batch: ``tokens``, ``segment_ids`` and ``positions``, int32 ``[rows, context]`` each.
    """
    tokens, segments, positions = batch["tokens"], batch["segment_ids"], batch["positions"]
    same_document = segments[:, None, :, None] == segments[:, None, None, :]
    x = params["bytes"][tokens] + params["places"][positions]
    for layer in params["layers"]:
        q, k, v = jnp.einsum("btd,dchw->cbthw", normalize(x, layer["scales"][0]), layer["qkv"])
        attended = jax.nn.dot_product_attention(q, k, v, mask=same_document, is_causal=True)
        x = x + jnp.einsum("bthw,hwd->btd", attended, layer["out"])
        x = x + jax.nn.gelu(normalize(x, layer["scales"][1]) @ layer["up"]) @ layer["down"]
    logits = normalize(x, jnp.ones(x.shape[-1])) @ params["bytes"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return jnp.where(counts, losses, 0).sum(), counts.sum()


def loss_and_gradients(params: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    """Mean loss and its gradients, on each device of the data axis.

    Sums over devices are gathered and added in the order of the devices: a reduction by the network may add in an
    order that depends on the number of hosts, and would then round differently.
    """
    (loss, count), gradients = jax.value_and_grad(summed_loss, has_aux=True)(params, batch)
    loss, count, gradients = jax.tree.map(
        lambda part: jax.lax.all_gather(part, "data").sum(0), (loss, count, gradients)
    )
    return loss / count, jax.tree.map(lambda part: part / count, gradients)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def train_step(state: dict[str, Any], batch: dict[str, jax.Array], mesh: Mesh) -> tuple[dict[str, Any], jax.Array]:
    on_devices = jax.shard_map(loss_and_gradients, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    loss, gradients = on_devices(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def train(options: argparse.Namespace) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    documents = meshfeed.sources.Tokens.documents(options.data, dtype=np.uint8, eod=0)
    source = meshfeed.sources.Packed(documents, options.context, method="fit")
    feed = meshfeed.Feed(
        source,
        NamedSharding(mesh, P("data")),
        global_batch_size=options.batch,
        shuffle=True,
        seed=options.seed,
        num_epochs=None,
        balance="attention",  # the same rows per step, placed so that all devices have equal work
    )
    init = functools.partial(init_state, context=options.context)
    state = jax.jit(init, out_shardings=NamedSharding(mesh, P()))(jax.random.key(0))
    saver = meshfeed.checkpoint.Checkpointer(options.checkpoints, save_interval_steps=options.save_every)
    with feed, saver as checkpoints:
        step, state = checkpoints.restore(state, feed)
        stats = source.stats()
        report(options, {"restored": step, "sequences": len(source), "padding": stats.padding_fraction})
        while step < options.steps:
            state, loss = train_step(state, next(feed), mesh)
            step += 1
            report(options, {"step": step, "loss": float(loss)})
            checkpoints.save(step, state, feed, force=step == options.steps)


def report(options: argparse.Namespace, line: dict[str, Any]) -> None:
    if options.host == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="files of bytes: a path or a glob")
    parser.add_argument("--checkpoints", required=True, help="folder; training resumes from the newest step in it")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step")
    parser.add_argument("--batch", type=int, default=64, help="rows of the global batch, over all hosts")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--seed", type=int, default=0, help="of the order of documents")
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--coordinator", help="address:port of host 0; by default this process is the only host")
    parser.add_argument("--num-hosts", type=int, default=1)
    parser.add_argument("--host", type=int, default=0, help="number of this host")
    options = parser.parse_args()
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.num_hosts, options.host)
    train(options)


if __name__ == "__main__":
    main()
