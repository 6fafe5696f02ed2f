"""Trains a small vision-language model on chats about images, packed into rows of one length.

Needs ``pip install '.[chat,hf,images]' flax optax`` in a checkout. Draws its data first: a folder of images, and a
JSONL file of chats that name them. The model sees an image as one token; replace it with your own.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx
from jax.sharding import AxisType
from PIL import Image

import meshfeed
from meshfeed.sources import DecodeImage, Folder, Join, Map, Packed, TokenizeChat

COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200), "white": (220, 220, 220)}
SIDE, WIDTH, HEADS = 16, 64, 4
IMAGE, VOCABULARY = 258, 259  # of byte_tokenizer
TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_data(folder: pathlib.Path, num_chats: int) -> None:
    """Writes images of one color each, and chats that ask for the colors of no, one or two of them."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    with open(folder / "chats.jsonl", "w") as file:
        for number in range(num_chats):
            names = rng.choice(list(COLORS), number % 3).tolist()
            paths = [f"{number:04}-{place}.png" for place in range(len(names))]
            for name, path in zip(names, paths, strict=True):
                pixels = np.array(COLORS[name]) + rng.normal(0, 15, (24, 24, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "images" / path)
            question, answer = "<image>" * len(names) + "Colors?", " ".join(names) or "none"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages, "images": paths}) + "\n")


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, two around each turn, and one in place of an image."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<image>"])
    return tokenizer


def make_source(folder: pathlib.Path, sequence_length: int, most_images: int) -> Packed:
    """Rows of chats with the images that they name."""
    tokenize, decode = TokenizeChat(byte_tokenizer(), chat_template=TEMPLATE), DecodeImage(SIDE)

    def to_arrays(record: dict[str, Any]) -> dict[str, np.ndarray]:
        images = [decode(image["bytes"]) for image in record["images"]]
        return {**tokenize(record), "images": np.array(images, np.uint8).reshape(-1, SIDE, SIDE, 3)}

    chats = datasets.Dataset.from_json(str(folder / "chats.jsonl"), cache_dir=str(folder / "cache"))
    joined = Join(chats, Folder(folder / "images"), key="images")
    return Packed(Map(joined, to_arrays), sequence_length, method="fit", long="drop", side={"images": most_images})


class Block(nnx.Module):
    """Attention and two layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, attends: jax.Array) -> jax.Array:
        parts = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = (parts[:, :, number] for number in range(3))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, mask=attends[:, None]).reshape(x.shape))
        return x + self.down(nnx.relu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    """Predicts each token from those before it in its own chat, and from the images there."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(256, WIDTH, rngs=rngs)
        self.patch = nnx.Conv(3, WIDTH, (8, 8), strides=8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        tokens, images = batch["tokens"], batch["images"].astype(jnp.float32) / 128 - 1
        seen = self.patch(images.reshape(-1, *images.shape[2:])).mean((1, 2)).reshape(*images.shape[:2], WIDTH)
        # The images of a row are in the order of the tokens in whose places they are.
        is_image = tokens == IMAGE
        which = jnp.maximum(jnp.cumsum(is_image, axis=1) - 1, 0)
        x = jnp.where(is_image[..., None], jnp.take_along_axis(seen, which[..., None], axis=1), self.tokens(tokens))
        x = x + self.positions(batch["positions"])
        segments = batch["segment_ids"]
        attends = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(tokens.shape[1], dtype=bool)
        for block in self.blocks:
            x = block(x, attends)
        return self.head(self.norm(x))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the loss, and the fraction of the assistant's tokens that were predicted."""
    segments, targets = batch["segment_ids"], batch["tokens"][:, 1:]
    counts = (segments[:, 1:] == segments[:, :-1]) & batch["loss_mask"][:, 1:]

    def loss_of(model: Model) -> tuple[jax.Array, jax.Array]:
        logits = model(batch)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = (logits.argmax(-1) == targets) & counts
        return (losses * counts).sum() / counts.sum(), right.sum() / counts.sum()

    (loss, right), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("captions"), help="drawn data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="packed rows of the global batch, over all hosts")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--images", type=int, default=6, help="most images in a row")
    options = parser.parse_args()
    if not options.folder.exists():
        write_data(options.folder, num_chats=300)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    source = make_source(options.folder, options.sequence_length, options.images)
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    with meshfeed.Feed(source, mesh, global_batch_size=options.batch, shuffle=True, num_epochs=None) as feed:
        print(f"{len(source)} rows, {source.stats().padding_fraction:.1%} padding")
        for step in range(1, options.steps + 1):
            loss, right = train_step(model, optimizer, next(feed))
            if step % 10 == 0 or step == options.steps:
                print(f"step {step}, loss {float(loss):.3f}, right {float(right):.1%}", flush=True)


if __name__ == "__main__":
    main()
