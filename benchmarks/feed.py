"""Records on disk to global arrays on all devices: the whole feed against what people use today.

Cases: ``lm`` (tokenised LM, 2,048 int32 per record, 100,000 records in one file, shuffled), ``lm200k``, ``million``
(1,000,000 records of 200 bytes in one file), ``thousand`` (1,000 records), ``compressed`` (zstd), ``in-order`` (not
shuffled, beside tf.data), ``mosaic`` (4 KB records), ``images`` (decoded JPEG). A unit is a batch. The floor is a bare
loop over the reader that makes host arrays and no global ones; what that loop costs with JAX's private call after it, in
the same thread and in another, stands beside it. Files come from the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import _data, _peers
from benchmarks._measure import Table, Way, main, make_mesh, rates, take_turns, with_cpu_devices

with_cpu_devices(8)

FLOOR, OURS = "bare reader loop", "meshfeed"


def our_ways(
    source: Any, sharding: Any, batch: int, depths: tuple[int, ...] = (2, 0), **settings: Any
) -> dict[str, Way]:
    """The feed as it is by default, and without read-ahead."""
    import meshfeed

    def way(prefetch: int) -> Way:
        feed = meshfeed.MultiHostDataLoadIterator(
            source, sharding, global_batch_size=batch, num_epochs=None, prefetch=prefetch, **settings
        )
        last: list[Any] = [None]

        def run() -> int:
            last[0] = next(feed)
            return 1

        return Way(run, prefetch + 1, feed.close)

    return {OURS if depth == 2 else f"{OURS}, prefetch={depth}": way(depth) for depth in depths}


def lm(
    options: argparse.Namespace,
    folder: str,
    *,
    records: int,
    num_tokens: int = _data.TOKENS,
    layout: str = "group_size:1,uncompressed",
    peers: tuple[str, ...] = ("grain",),
    title: str,
    batch: int | None = None,
) -> Table:
    """Shuffled records of one size, through every way that reads them."""
    import meshfeed

    sharding, size = _sharding(), batch or options.batch
    put = _peers.putter(sharding)
    path = _data.write_array_record(os.path.join(folder, "records"), _data.tokens(records, num_tokens), layout)

    def again() -> Iterator[np.ndarray]:
        return _data.tokens(records, num_tokens)

    ours = meshfeed.sources.ArrayRecord(path, decode_batch=meshfeed.sources.DecodeRaw(np.int32, num_tokens))
    ways = {FLOOR: _peers.reader_loop(_peers.scattered(path, records, size), _data.join_tokens)}
    ways |= _peers.limit_ways(lambda: _peers.scattered(path, records, size), size, num_tokens, sharding)
    ways |= our_ways(ours, sharding, size, shuffle=True)
    each = meshfeed.sources.ArrayRecord(path, decode=_data.decode_tokens)
    joined = meshfeed.sources.ArrayRecord(path, decode_batch=_data.join_tokens)
    ways['meshfeed, b"".join'] = our_ways(joined, sharding, size, (2,), shuffle=True)[OURS]
    ways["meshfeed, decode one by one"] = our_ways(each, sharding, size, (2,), shuffle=True)[OURS]
    makers: dict[str, Callable[[], dict[str, Way]]] = {
        "grain": lambda: _peers.grain_ways(path, size, _data.decode_tokens, put),
        "torch": lambda: _peers.torch_ways(path, size, _data.join_tokens, put),
        "mosaic": lambda: _peers.mosaic_ways(folder, again, size, put),
        "hf": lambda: _peers.hugging_face_ways(folder, again, size, put),
        "tfds": lambda: _peers.tfds_ways(folder, again, size, put),
    }
    for peer in peers:
        ways |= _made(peer, makers[peer])
    ways = {name: way for name, way in ways.items() if not name.startswith(tuple(options.skip))}
    found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
    return rates(f"{title}, {size} per batch", "batches", found, ours=OURS, floor=FLOOR)


def in_order(options: argparse.Namespace, folder: str, records: int) -> Table:
    """Not shuffled, beside tf.data."""
    import meshfeed

    sharding = _sharding()
    put = _peers.putter(sharding)
    path = _data.write_array_record(os.path.join(folder, "records"), _data.tokens(records, _data.TOKENS))
    decode = meshfeed.sources.DecodeRaw(np.int32, _data.TOKENS)
    source = meshfeed.sources.ArrayRecord(path, decode_batch=decode)
    ways = {FLOOR: _peers.reader_loop(_peers.in_runs(path, records, options.batch), _data.join_tokens)}
    ways |= _peers.limit_ways(
        lambda: _peers.in_runs(path, records, options.batch), options.batch, _data.TOKENS, sharding
    )
    ways |= our_ways(source, sharding, options.batch)
    ways["meshfeed, num_threads=2"] = our_ways(source, sharding, options.batch, (2,), num_threads=2)[OURS]
    ways |= _made(
        "tf.data",
        lambda: _peers.tf_data_ways(folder, lambda: _data.tokens(records, _data.TOKENS), options.batch, put),
    )
    ways |= _made(
        "hf", lambda: _hf_stream_ways(folder, lambda: _data.tokens(records, _data.TOKENS), options.batch, put)
    )
    found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
    title = f"LM in order, {records:,} records in one file, {options.batch} per batch"
    return rates(title, "batches", found, ours=OURS, floor=FLOOR)


def _hf_stream_ways(
    folder: str, records: Callable[[], Iterator[np.ndarray]], batch: int, put: Callable[[Any], Any]
) -> dict[str, Way]:
    import datasets

    files = _peers.parquet(folder, records)
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).with_format("numpy")
    return {
        "Hugging Face streaming, iter(batch)": _peers.taking(
            lambda: (
                np.stack(list(found["tokens"])).astype(np.int32, copy=False) for found in stream.iter(batch, True)
            ),
            put,
        )
    }


def images(options: argparse.Namespace, folder: str) -> Table:
    """JPEGs that are decoded one by one: the decoder is the limit, on every way."""
    import meshfeed

    sharding = _sharding()
    encoded = _data.jpegs(256)
    records = 20_000
    path = _data.write_array_record(
        os.path.join(folder, "records"), itertools.islice(itertools.cycle(encoded), records)
    )

    def decode_all(raw: list[bytes]) -> np.ndarray:
        return np.stack([_data.decode_jpeg(record) for record in raw])

    ways = {FLOOR: _peers.reader_loop(_peers.scattered(path, records, options.batch), decode_all)}
    source = meshfeed.sources.ArrayRecord(path, decode=_data.decode_jpeg)
    ways |= our_ways(source, sharding, options.batch, shuffle=True)
    ways["meshfeed, num_threads=2"] = our_ways(source, sharding, options.batch, (2,), shuffle=True, num_threads=2)[OURS]
    ways["meshfeed, num_workers=2"] = our_ways(source, sharding, options.batch, (2,), shuffle=True, num_workers=2)[OURS]
    ways |= _peers.grain_ways(path, options.batch, _data.decode_jpeg, _peers.putter(sharding))
    found = take_turns(ways, rounds=options.rounds, seconds=max(1.0, options.seconds))
    return rates(
        f"images, JPEG to uint8 224×224×3, {options.batch} per batch", "batches", found, ours=OURS, floor=FLOOR
    )


def _made(name: str, make: Callable[[], dict[str, Way]]) -> dict[str, Way]:
    try:
        ways = make()
    except Exception as error:  # a peer's failure is a row that is missing, and is said
        print(f"({name} is left out: {type(error).__name__}: {str(error)[:200]})", flush=True)
        return {}
    if not ways:
        print(f"({name} is left out: not installed)", flush=True)
    return ways


def _sharding() -> Any:
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(make_mesh(), PartitionSpec("data"))


CASES: dict[str, Callable[[argparse.Namespace, str], Table]] = {
    "lm": lambda options, folder: lm(
        options,
        folder,
        records=100_000,
        peers=("grain", "torch", "hf"),
        title="shuffled LM, 100,000 records of 2,048 int32 in one file",
    ),
    "lm256": lambda options, folder: lm(
        options, folder, records=100_000, batch=256, title="shuffled LM, 100,000 records of 2,048 int32 in one file"
    ),
    "lm200k": lambda options, folder: lm(
        options, folder, records=200_000, title="shuffled LM, 200,000 records of 2,048 int32 in one file"
    ),
    "million": lambda options, folder: lm(
        options, folder, records=1_000_000, num_tokens=50, title="shuffled, 1,000,000 records of 200 bytes in one file"
    ),
    "thousand": lambda options, folder: lm(
        options,
        folder,
        records=1_000,
        peers=("grain", "torch", "hf", "tfds"),
        title="shuffled LM, 1,000 records of 2,048 int32 in one file",
    ),
    "compressed": lambda options, folder: lm(
        options,
        folder,
        records=100_000,
        layout="group_size:1,zstd",
        title="shuffled LM, 100,000 records of 2,048 int32, zstd",
    ),
    "mosaic": lambda options, folder: lm(
        options,
        folder,
        records=50_000,
        num_tokens=1024,
        peers=("mosaic", "grain"),
        title="shuffled, 50,000 records of 4 KB",
    ),
    "in-order": lambda options, folder: in_order(options, folder, 50_000),
    "images": images,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each way in each round")
    parser.add_argument("--skip", nargs="*", default=[], help="ways whose names begin so; slow ones take minutes")
    parser.add_argument("--data", metavar="FOLDER", help="keep the files here, for another run")


def measure(options: argparse.Namespace) -> Iterator[Table]:
    for case in options.cases:
        if options.data:
            folder = os.path.join(options.data, case)
            os.makedirs(folder, exist_ok=True)
            yield CASES[case](options, folder)
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield CASES[case](options, folder)


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
