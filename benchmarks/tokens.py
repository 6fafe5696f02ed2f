"""Windows of flat token files, shuffled and in order: windows/s, ours and bare numpy gathers from the same files.

Files hold uint16 tokens and are in the page cache. A unit is a window of 2,049 int32 tokens in a stacked batch; nothing
is sent to a device. "numpy, memory map" indexes a ``numpy.memmap`` window by window into one array, "numpy, array" a
plain view of the same map, and "nanoGPT" stacks windows of int64 as its ``get_batch`` does. The last two rows of a table
leave out what a map cannot give: an error instead of SIGBUS for a file that was cut short.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks._measure import Table, Way, main, rates, take_turns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32_000_000, help="in each file")
    parser.add_argument("--length", type=int, default=2_048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each way in each round")


def gathers(arrays: Sequence[np.ndarray], length: int, per_file: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Ways to read windows with numpy alone."""
    plain = [np.asarray(array) for array in arrays]

    def gather(sources: Sequence[np.ndarray], ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), length + 1), np.int32)
        files, windows = np.divmod(ids, per_file)
        for row, (file, start) in enumerate(zip(files.tolist(), (windows * length).tolist(), strict=True)):
            out[row] = sources[file][start : start + length + 1]
        return out

    def nano(ids: np.ndarray) -> np.ndarray:
        files, windows = np.divmod(ids, per_file)
        starts = zip(files.tolist(), (windows * length).tolist(), strict=True)
        return np.stack([arrays[file][start : start + length + 1].astype(np.int64) for file, start in starts])

    return {
        "numpy, memory map": lambda ids: gather(arrays, ids),
        "numpy, array": lambda ids: gather(plain, ids),
        "nanoGPT": nano,
    }


def measure(options: argparse.Namespace) -> list[Table]:
    import meshfeed

    turns = {"rounds": options.rounds, "seconds": options.seconds}
    rng = np.random.default_rng(0)
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{number:02d}.bin") for number in range(options.files)]
        for path in paths:
            rng.integers(0, 50_000, options.tokens, np.uint16).tofile(path)
        source = meshfeed.sources.Tokens(paths, options.length, dtype=np.uint16)
        arrays = [np.memmap(path, np.uint16, "r") for path in paths]
        numpy_ways = gathers(arrays, options.length, len(source) // options.files)
        for title, ids in (("shuffled", rng.permutation(len(source))), ("in order", np.arange(len(source)))):
            batches = ids[: len(ids) // options.batch * options.batch].reshape(-1, options.batch)

            def way(read: Callable[[np.ndarray], object], batches: np.ndarray = batches) -> Way:
                coming = itertools.cycle(batches)

                def run() -> int:
                    ids = next(coming)
                    read(ids)
                    return len(ids)

                return Way(run)

            ways = {"meshfeed": way(source.read_batch)} | {name: way(read) for name, read in numpy_ways.items()}
            found = take_turns(ways, **turns)
            table = rates(f"windows of {options.length:,} tokens, {title}", "windows", found, ours="meshfeed")
            tables.append(table)
    return tables


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
