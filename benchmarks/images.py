"""JPEG to 224 × 224: ``DecodeImage``, the decoder by itself, Pillow, and feeds beside Grain, by CPU time and wall clock.

The functions take turns on one thread; a figure is the median over rounds of CPU milliseconds per image. "decoder" is
libjpeg-turbo alone, whole images without a resize: the limit of a decoder that needs the whole image. The loaders read
shuffled ArrayRecord files of 500 × 375 and decode, crop the middle and resize.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import _data, _peers
from benchmarks._measure import Table, main, make_mesh, rates, take_turns, with_cpu_devices
from benchmarks.feed import OURS, our_ways

SIZES = ((375, 500), (768, 1024), (1536, 2048))


def photographs(number: int, height: int, width: int) -> list[bytes]:
    """Encoded images with about as many bytes per pixel as photographs have: smooth areas, edges and some noise."""
    from PIL import Image

    rng, found = np.random.default_rng(0), []
    for _ in range(number):
        small = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8))
        smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = smooth + rng.integers(-6, 7, (height, width, 1), np.int16)
        buffer = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=87)
        found.append(buffer.getvalue())
    return found


def with_pillow(data: bytes) -> np.ndarray:
    """The middle of an image, cropped and resized, as most Grain pipelines do it."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    return np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box=(left, top, left + short, top + short)))


def functions(options: argparse.Namespace) -> Table:
    """CPU milliseconds per image of single functions."""
    import simplejpeg

    from meshfeed.sources import DecodeImage

    middle, random = DecodeImage(224), DecodeImage(224, crop="random", flip=True)
    rng = np.random.default_rng(0)
    ways: dict[str, Callable[[bytes], Any]] = {
        "decoder: simplejpeg, whole image, no resize": lambda data: simplejpeg.decode_jpeg(data, colorspace="RGB"),
        "meshfeed DecodeImage, middle": middle,
        "meshfeed DecodeImage, random crop and flip": lambda data: random(data, rng=rng),
        "Pillow, middle": with_pillow,
    }
    rows: dict[str, dict[str, Any]] = {name: {"function": name} for name in ways}
    for height, width in SIZES:
        encoded = photographs(8, height, width)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, function in ways.items():
                start = time.thread_time()
                for data in encoded:
                    function(data)
                times[name].append((time.thread_time() - start) / len(encoded) * 1e3)
        kilobytes = sum(map(len, encoded)) / len(encoded) / 1e3
        for name in ways:
            rows[name][f"{width}×{height}, {kilobytes:.0f} KB"] = statistics.median(times[name])
    return Table("images, CPU ms per image of one thread", list(rows.values()))


def loaders(options: argparse.Namespace, folder: str) -> Table:
    """Feeds beside Grain, which decodes by Pillow."""
    from jax.sharding import NamedSharding, PartitionSpec

    import meshfeed

    encoded = photographs(64, *SIZES[0])
    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    path = _data.write_array_record(os.path.join(folder, "records"), (encoded[i % 64] for i in range(4096)))
    source = meshfeed.sources.ArrayRecord(path, decode=meshfeed.sources.DecodeImage(224))
    ways = our_ways(source, sharding, options.batch, shuffle=True)
    ways["meshfeed, num_threads=2"] = our_ways(source, sharding, options.batch, (2,), shuffle=True, num_threads=2)[OURS]
    pillow = meshfeed.sources.ArrayRecord(path, decode=with_pillow)
    ways["meshfeed, decode= by Pillow"] = our_ways(pillow, sharding, options.batch, (2,), shuffle=True)[OURS]
    ways |= _peers.grain_ways(path, options.batch, with_pillow, _peers.putter(sharding))
    found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
    return rates(f"images, JPEG 500×375 to 224×224, {options.batch} per batch", "batches", found, ours=OURS)


def measure(options: argparse.Namespace) -> list[Table]:
    with tempfile.TemporaryDirectory() as folder:
        return [functions(options), loaders(options, folder)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn of a loader")


if __name__ == "__main__":
    with_cpu_devices(8)
    main(__doc__, measure, add_options)
