"""A training loop like MaxText's: load_next_batch, an eval iterator with reset, ramp-up, checkpoints of the loader.

It runs with MaxText's loader or, with the import below, with meshfeed's. `maxtext_loop_after.py` is the same
training with a feed; docs/how-to/migrate-from-maxtext.md compares them.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

try:
    from maxtext.input_pipeline import multihost_dataloading
except ImportError:  # users of MaxText change only this: this import instead of the one above
    from meshfeed import maxtext as multihost_dataloading

RECORDS, WIDTH, BATCH, SMALL_BATCH, RAMP_STEPS = 2048, 8, 32, 16, 2


class HostBatches:
    """This host's share of the records in batches; its iterators have a state, like Grain's."""

    def __init__(self, records: np.ndarray, batch: int) -> None:
        share = records[jax.process_index() :: jax.process_count()]
        self.batches = share[: len(share) // batch * batch].reshape(-1, batch, WIDTH)

    def __iter__(self) -> HostIterator:
        return HostIterator(self.batches)


class HostIterator:
    def __init__(self, batches: np.ndarray) -> None:
        self.batches, self.next_index = batches, 0

    def __iter__(self) -> HostIterator:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.next_index == len(self.batches):
            raise StopIteration
        self.next_index += 1
        return {"inputs": self.batches[self.next_index - 1]}

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.next_index}

    def set_state(self, state: dict[str, int]) -> None:
        self.next_index = state["next_index"]


def load_next_batch(train_iter: Any, pending: list[Any], step: int) -> Any:
    """Returns the next batch; while ramping up, loads a full one and returns it in parts."""
    if step >= RAMP_STEPS:
        return next(train_iter)
    if not pending:
        whole = next(train_iter)
        pending += [{"inputs": whole["inputs"][i : i + SMALL_BATCH]} for i in range(0, BATCH, SMALL_BATCH)]
    return pending.pop(0)


def iterator_file(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / str(step) / "iter" / f"process_{jax.process_index()}-of-{jax.process_count()}.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--checkpoints", type=pathlib.Path, required=True)
    options = parser.parse_args()

    records = np.random.default_rng(0).normal(size=(RECORDS, WIDTH)).astype(np.float32)
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))
    host_batch = BATCH // jax.process_count()
    train_iter = multihost_dataloading.MultiHostDataLoadIterator(HostBatches(records, host_batch), mesh)
    eval_iter = multihost_dataloading.MultiHostDataLoadIterator(
        HostBatches(records[:100], host_batch), mesh, generate_padding_batch=True
    )

    w = jax.device_put(jnp.zeros(WIDTH), NamedSharding(mesh, P()))
    saved = sorted(int(path.name) for path in options.checkpoints.glob("[0-9]*"))
    start = saved[-1] if saved else 0
    if saved:
        w = jax.device_put(np.load(options.checkpoints / str(start) / "w.npy"), NamedSharding(mesh, P()))
        train_iter.local_iterator.set_state(json.loads(iterator_file(options.checkpoints, start).read_text()))

    def loss_of(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean((batch["inputs"] @ w - batch["inputs"].sum(-1)) ** 2)

    train_step = jax.jit(lambda w, batch: (w - 0.05 * jax.grad(loss_of)(w, batch), loss_of(w, batch)))
    eval_step = jax.jit(loss_of)
    pending: list[Any] = []
    for step in range(start, options.steps):
        batch = load_next_batch(train_iter, pending, step)
        w, loss = train_step(w, batch)
        print(f"step {step}: {batch['inputs'].shape[0]} rows, loss {float(loss):.5f}", flush=True)

    eval_iter.reset()
    losses = [float(eval_step(w, next(eval_iter))) for _ in range(5)]  # the last ones are padding
    print("eval:", " ".join(f"{loss:.5f}" for loss in losses))

    if options.steps > start:
        file = iterator_file(options.checkpoints, options.steps)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(train_iter.local_iterator.get_state()))
        if jax.process_index() == 0:
            np.save(file.parent.parent / "w.npy", np.asarray(w))


if __name__ == "__main__":
    main()
