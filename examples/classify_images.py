"""Trains an image classifier from JPEG files in one folder per class, decoded and augmented by workers, with checkpoints.

Needs ``pip install '.[images]' flax optax`` in a checkout. Without ``--images`` it first draws some images.
"""

from __future__ import annotations

import argparse
import io
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

import meshfeed

SIDE = 32


def draw_images(folder: pathlib.Path, num_images: int) -> None:
    """Draws stripes, in two classes by their direction."""
    for number in range(num_images):
        rng = np.random.default_rng(number)
        stripes = np.sin(np.arange(48) * rng.uniform(0.5, 1.0) + rng.uniform(0, 6))
        pixels = np.tile(stripes, (48, 1)) * 80 + 128 + rng.normal(0, 20, (48, 48))
        label = ("across", "down")[number % 2]
        path = folder / label / f"{number:05}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels if label == "across" else pixels.T).clip(0, 255).astype(np.uint8)).save(path)


class ImageFolder:
    """The files of one folder per class: a record is the file's bytes and the number of its class."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpeg"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        path = self.paths[index]
        return {"jpeg": np.fromfile(path, np.uint8), "label": np.int32(self.classes.index(path.parent.name))}


def augment(record: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A random crop, brighter or darker. ``rng`` depends on the seed, the epoch and the record alone."""
    image = Image.open(io.BytesIO(record["jpeg"])).convert("L")
    left, top = rng.integers(0, image.width - SIDE + 1), rng.integers(0, image.height - SIDE + 1)
    pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE)), np.float32) * rng.uniform(0.8, 1.2)
    return {"image": pixels.clip(0, 255).astype(np.uint8), "label": record["label"]}


class Classifier(nnx.Module):
    """Two convolutions and their mean over the image."""

    def __init__(self, num_classes: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 8, (5, 5), strides=2, rngs=rngs)
        self.second = nnx.Conv(8, 16, (5, 5), strides=2, rngs=rngs)
        self.out = nnx.Linear(16, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = (
            images[..., None].astype(jnp.float32) / 128 - 1
        )  # uint8 is sent to the devices and converted there: a quarter of the bytes
        return self.out(nnx.relu(self.second(nnx.relu(self.first(x)))).mean((1, 2)))


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_of(model: Classifier) -> jax.Array:
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=pathlib.Path, help="folder with one folder of .jpeg files per class")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("classify"), help="drawn images, checkpoints"
    )
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--batch", type=int, default=32, help="rows of the global batch, over all hosts")
    parser.add_argument("--workers", type=int, default=2, help="processes that decode, on each host")
    options = parser.parse_args()
    images = options.images or options.folder / "images"
    if options.images is None and not images.exists():
        draw_images(images, num_images=256)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    folder = ImageFolder(images)
    feed = meshfeed.Feed(
        meshfeed.sources.Map(folder, augment),
        NamedSharding(mesh, P("data")),
        global_batch_size=options.batch,
        shuffle=True,
        num_epochs=None,
        num_workers=options.workers,
    )
    model = Classifier(len(folder.classes), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    state = jax.device_put(nnx.to_pure_dict(nnx.state((model, optimizer))), NamedSharding(mesh, P()))
    saver = meshfeed.checkpoint.Checkpointer(options.folder / "checkpoints", save_interval_steps=20)
    with feed, saver as checkpoints:
        step, state = checkpoints.restore(state, feed)
        nnx.update((model, optimizer), state)
        print(f"from step {step}, {len(folder)} images, {len(folder.classes)} classes")
        while step < options.steps:
            loss = train_step(model, optimizer, next(feed))
            step += 1
            if step % 10 == 0 or step == options.steps:
                print(f"step {step}, loss {float(loss):.3f}", flush=True)  # waits for the step
            checkpoints.save(step, nnx.to_pure_dict(nnx.state((model, optimizer))), feed)


if __name__ == "__main__":
    main()
