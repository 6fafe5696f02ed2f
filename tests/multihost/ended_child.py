"""One of three hosts: the others wait for a feed and then for a checkpoint, or in a collective, of one that has failed."""

from __future__ import annotations

import contextlib
import sys
import time

import meshfeed


def take_steps(mesh: object, size: int, fails: bool, way: str) -> None:
    """Takes steps, before one of which a host fails."""
    import jax
    import numpy as np

    total = jax.jit(lambda x: x.sum())
    feed = meshfeed.Feed(np.arange(300), mesh, global_batch_size=size, num_epochs=None)
    with feed if way == "exits" else contextlib.nullcontext():
        for batch in feed:
            if fails and feed.step == 4:
                raise SystemExit(143) if way == "exits" else ValueError("the loss is nan.")
            float(total(batch))


def main(host: int, port: str, victim: int, folder: str) -> None:
    """Prints how long this host has waited, and the error; "raises" or "exits" in place of a folder takes steps."""
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 3, host)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    if folder in ("raises", "exits"):
        take_steps(mesh, jax.device_count(), host == victim, folder)
    if host == victim:
        raise FileNotFoundError("no data on this host")
    start = time.monotonic()
    try:
        with meshfeed.Feed(np.arange(300), mesh, global_batch_size=jax.device_count(), timeout_seconds=120) as feed:
            next(feed)
    except meshfeed.StalledError as error:
        print(f"feed {time.monotonic() - start:.1f} {error}", flush=True)
    start = time.monotonic()
    try:
        with meshfeed.checkpoint.Checkpointer(folder, timeout_seconds=120) as ckpt:
            ckpt.save(1, {"w": np.ones(3)})
    except meshfeed.MeshfeedError as error:
        print(f"checkpoint {time.monotonic() - start:.1f} {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
