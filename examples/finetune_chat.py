"""Fine-tunes on chats of a Hugging Face dataset on disk: the loss covers only the assistant's turns, and chats are packed.

Needs ``pip install '.[chat,hf]' optax`` in a checkout. Without ``--dataset`` it first writes a small one. The model is two
matrices, which predict a token from the one before it; replace it with your own.
"""

from __future__ import annotations

import argparse
import functools
import pathlib

import datasets
import jax
import jax.numpy as jnp
import optax
import tokenizers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

VOCABULARY = 256 + 2  # of byte_tokenizer
TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
OPTIMIZER = optax.adam(1e-2)


def write_dataset(folder: pathlib.Path, num_chats: int) -> None:
    """Chats of one or two questions, in the form that most chat datasets have."""
    chats = []
    for number in range(num_chats):
        pairs = [
            [{"role": "user", "content": f"What follows {n}?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
            for n in range(number, number + 1 + number % 2)
        ]
        chats.append([{"role": "system", "content": "Count."}, *(turn for pair in pairs for turn in pair)])
    datasets.Dataset.from_dict({"messages": chats}).save_to_disk(folder)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and two around each turn; replace it with that of your model."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of the masked tokens, each from the token before it in its own chat."""
    logits = params["in"][batch["tokens"][:, :-1]] @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    segments = batch["segment_ids"]
    counts = (segments[:, 1:] == segments[:, :-1]) & batch["loss_mask"][:, 1:]  # False on padding
    return (losses * counts).sum() / jnp.maximum(counts.sum(), 1)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, object], batch: dict[str, jax.Array]) -> tuple[dict[str, object], jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def init_state() -> dict[str, object]:
    keys = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(keys[0], (VOCABULARY, 32)) * 0.1,
        "out": jax.random.normal(keys[1], (32, VOCABULARY)) * 0.1,
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=pathlib.Path, help="folder of save_to_disk, with a column `messages`")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("chat"), help="written dataset, checkpoints"
    )
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--batch", type=int, default=8, help="packed sequences of the global batch, over all hosts")
    parser.add_argument("--sequence-length", type=int, default=128)
    options = parser.parse_args()
    path = options.dataset or options.folder / "dataset"
    if options.dataset is None and not path.exists():
        write_dataset(path, num_chats=400)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    tokenize = meshfeed.sources.TokenizeChat(byte_tokenizer(), chat_template=TEMPLATE)
    chats = meshfeed.sources.Map(datasets.load_from_disk(path), tokenize)
    packed = meshfeed.sources.Packed(chats, options.sequence_length, method="fit", long="truncate")
    feed = meshfeed.Feed(
        packed, NamedSharding(mesh, P("data")), global_batch_size=options.batch, shuffle=True, num_epochs=None
    )
    state = jax.jit(init_state, out_shardings=NamedSharding(mesh, P()))()
    saver = meshfeed.checkpoint.Checkpointer(options.folder / "checkpoints", save_interval_steps=20)
    with feed, saver as checkpoints:
        step, state = checkpoints.restore(state, feed)
        print(f"from step {step}, {len(chats)} chats in {len(packed)} sequences")
        while step < options.steps:
            state, loss = train_step(state, next(feed))
            step += 1
            if step % 10 == 0 or step == options.steps:
                print(f"step {step}, loss {float(loss):.3f}", flush=True)  # waits for the step
            checkpoints.save(step, state, feed, force=step == options.steps)


if __name__ == "__main__":
    main()
