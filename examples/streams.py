"""A stream: records that can only be read sequentially, saved midway and resumed on a different number of devices.

The stream is divided into a fixed number of lanes. A lane always feeds the same rows of every batch, whichever host reads
it, so the batches are the same on any number of hosts, also after a restart.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshfeed

NUM_FILES, LINES_PER_FILE, BATCH = 16, 500, 16


def write_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files of JSON lines, as a log would be."""
    paths = [folder / f"log-{number:02d}.jsonl" for number in range(NUM_FILES)]
    for number, path in enumerate(paths):
        lines = ({"file": number, "line": line, "ok": (number + line) % 3 != 0} for line in range(LINES_PER_FILE))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def make_feed(paths: list[pathlib.Path], num_devices: int) -> meshfeed.Feed:
    def open_lane(lane_index: int, num_lanes: int) -> Iterator[dict[str, np.ndarray]]:
        for path in paths[lane_index::num_lanes]:
            with open(path) as lines:
                for line in map(json.loads, lines):
                    if line["ok"]:  # a stream need not know how many records it will deliver
                        yield {"file": np.int32(line["file"]), "line": np.int32(line["line"])}

    mesh = jax.make_mesh((num_devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])
    source = meshfeed.sources.Stream(open_lane, fingerprint=[path.name for path in paths])
    return meshfeed.Feed(
        source, NamedSharding(mesh, P("data")), global_batch_size=BATCH, num_lanes=8, num_epochs=2, end="drop"
    )


def lines_of(batch: dict[str, jax.Array]) -> list[tuple[int, int]]:
    return list(zip(np.asarray(batch["file"]).tolist(), np.asarray(batch["line"]).tolist(), strict=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(pathlib.Path(folder))
        with make_feed(paths, jax.device_count()) as feed:
            whole = [lines_of(batch) for batch in feed]
        print(f"uninterrupted, {jax.device_count()} devices: {len(whole)} batches, the last {whole[-1][:2]} ...")

        with make_feed(paths, jax.device_count()) as feed:
            parts = [lines_of(next(feed)) for _ in range(100)]
            text = json.dumps(feed.get_state())  # one entry per lane
        few = max(1, jax.device_count() // 4)
        with make_feed(paths, few) as feed:
            feed.set_state(json.loads(text))
            print(f"resumed on {few} device{'s' * (few > 1)} at step {feed.step}, record {feed.position:,}")
            parts += [lines_of(batch) for batch in feed]
        print("the same batches" if parts == whole else "DIFFERENT batches")


if __name__ == "__main__":
    main()
