"""Windows of flat token files, shuffled and in order: windows/s, ours and bare numpy gathers from the same files.

Files hold uint16 tokens and are in the page cache. A unit is a window of 2,049 int32 tokens in a stacked batch; nothing
is sent to a device. "numpy, memory map" indexes a ``numpy.memmap`` window by window into one array, "numpy, array" a
plain view of the same map, and "nanoGPT" stacks windows of int64 as its ``get_batch`` does. "Grain, memory map" reads as
MaxText's ``olmo_grain`` does: a Grain DataLoader in this process over a random-access source that copies each window
out of a cached map, then a function per record that casts it, then ``Batch``; without the other leaves that MaxText
derives from it. The ways with maps leave out what a map cannot give: an error instead of SIGBUS for a file that was cut
short.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import threading
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


class MappedWindows:
    """Windows of memory maps by number, one at a time; what a Grain DataLoader samples."""

    def __init__(self, arrays: Sequence[np.ndarray], length: int, per_file: int) -> None:
        self._arrays, self._length, self._per_file = arrays, length, per_file
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._arrays) * self._per_file

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        file, window = divmod(int(number), self._per_file)
        with self._lock:
            array = self._arrays[file]
        start = window * self._length
        return {"tokens": np.array(array[start : start + self._length + 1])}


def grain_way(arrays: Sequence[np.ndarray], options: argparse.Namespace, per_file: int, shuffle: bool) -> Way:
    import grain

    class ToInt32(grain.transforms.Map):
        def map(self, element: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"tokens": element["tokens"].astype(np.int32)}

    source = MappedWindows(arrays, options.length, per_file)
    sampler = grain.samplers.IndexSampler(num_records=len(source), shuffle=shuffle, seed=0, num_epochs=None)
    operations = [ToInt32(), grain.transforms.Batch(options.batch, drop_remainder=True)]
    batches = iter(grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=0))

    def run() -> int:
        next(batches)
        return options.batch

    return Way(run, drain=4 * options.batch)


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
            ways["Grain, memory map"] = grain_way(arrays, options, len(source) // options.files, title == "shuffled")
            found = take_turns(ways, **turns)
            table = rates(f"windows of {options.length:,} tokens, {title}", "windows", found, ours="meshfeed")
            tables.append(table)
    return tables


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
