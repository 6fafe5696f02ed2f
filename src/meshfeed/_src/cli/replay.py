"""``meshfeed replay``: computes the records of a batch from a saved state alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError, without_signatures
from meshfeed._src.base.settings import BatchSchedule
from meshfeed._src.base.types import RecordIds
from meshfeed._src.checkpoint.store_steps import is_committed
from meshfeed._src.cli.text import shortened
from meshfeed._src.order import epochs as epoch_order
from meshfeed._src.order import permutation
from meshfeed._src.order.steps import StepSchedule, derive_step, parse_segments
from meshfeed._src.reading.identity import source_identity
from meshfeed._src.reading.records import file_of
from meshfeed._src.state import files as state_files
from meshfeed._src.state import state as feed_state

_SHOWN_BYTES = 48


def load_state(path: str) -> feed_state.FeedState:
    """Loads the state in a JSON file, in a folder of state files, or in the newest step of a checkpoint folder."""
    root = state_files.readable_path(path)
    if root.is_file():
        return feed_state.parse_state(state_files.read_json(root))

    def step_of(folder: epath.Path) -> int:
        return max((int(part) for part in folder.relative_to(root).parts if part.isdecimal()), default=-1)

    folders = [root, *root.glob("*"), *root.glob("*/*")]
    holding = [folder for folder in folders if folder.is_dir() and state_files.state_paths(folder)]
    # Folders with "tmp" in their names are checkpoints that were not completed.
    holding = [folder for folder in holding if not any("tmp" in part for part in folder.relative_to(root).parts)]
    holding = [folder for folder in holding if all(map(is_committed, _steps_above(folder, root)))]
    if not holding:
        raise CheckpointError(
            f"{path}: no feed state found. Pass a JSON file with the result of get_state(), or a checkpoint folder."
        )
    return feed_state.parse_state(state_files.read_state(max(holding, key=step_of)))


def _steps_above(folder: epath.Path, root: epath.Path) -> list[epath.Path]:
    above = (folder, *folder.parents)[: len(folder.relative_to(root).parts)]
    return [path for path in above if path.name.isdecimal()]


def _other_order(state: feed_state.FeedState) -> str | None:
    """Describes a state whose order is not an :class:`EpochOrder`, otherwise returns None."""
    if state.kind != "random_access":
        return f"a feed of kind {state.kind!r}"
    if "mixture" in state.fingerprint:
        return "a mixture"
    algorithm = state.fingerprint["order"]["algorithm"]
    return None if algorithm == permutation.ALGORITHM else f"a feed with the order {algorithm!r}"


def replay(state: feed_state.FeedState, batch_index: int | None, global_batch_size: int | None) -> dict[str, Any]:
    """Computes the records of one past or future batch of the stream.

    Args:
      state: state of a feed over a random-access source.
      batch_index: index of the batch, from 0; None for the last one delivered.
      global_batch_size: rows of the batches after the state; None for the size of the last one delivered.

    Returns:
      ``feed_step`` and ``position`` of the state, as in ``inspect``; ``batch_index``, ``delivered``, ``first_position``,
      ``global_batch_size``, ``epochs`` (first and last) and ``record_ids`` int64 ``[rows]`` of the batch.

    Raises:
      MeshfeedError: if the state does not determine the records, because the source is a stream or a mixture.
      SettingsError: if there is no such batch, or its size is unknown.
    """
    fingerprint = state.fingerprint
    if (other := _other_order(state)) is not None:
        raise MeshfeedError(
            f"This is the state of {other}, which does not determine the records by itself. Make the feed, pass it the "
            "state with set_state, and call feed.record_ids(step)."
        )
    segments = parse_segments(state.segments)
    order = epoch_order.EpochOrder(
        fingerprint["source"]["records"],
        shuffle=fingerprint["shuffle"],
        seed=fingerprint["seed"],
        num_epochs=fingerprint["num_epochs"],
    )
    current = {"algorithm": permutation.ALGORITHM, "version": permutation.VERSION}
    feed_state.compare_fingerprints({"order": fingerprint["order"]}, {"order": current})
    pad = fingerprint["end"] == "pad"
    next_step = derive_step(segments, state.position, order.total, pad=pad)
    size = global_batch_size or (segments[-1].size if segments else None)
    if size is None:
        raise SettingsError(
            "No batch was delivered before this state, so its batch size is not known. Give --global-batch-size.",
            setting="global_batch_size",
        )
    step_schedule = StepSchedule(BatchSchedule([(0, size)]), past=segments, step=next_step, position=state.position)
    batch_index = max(0, next_step - 1) if batch_index is None else batch_index
    count = None if order.total is None else step_schedule.num_steps(order.total, pad=pad)
    if count is not None and batch_index >= count:
        raise SettingsError(
            f"batch index {batch_index} is beyond this stream, which has {count} batches, counted from 0. Give "
            f"--batch-index less than {count}.",
            setting="batch_index",
        )
    position, size = step_schedule.at(batch_index)
    stop = position + size if order.total is None else min(position + size, order.total)
    record_ids, epochs = order.ids_at(np.arange(position, stop, dtype=np.int64))
    return {
        "feed_step": next_step,
        "position": state.position,
        "batch_index": batch_index,
        "delivered": batch_index < next_step,
        "first_position": position,
        "global_batch_size": size,
        "epochs": [int(epochs[0]), int(epochs[-1])],
        "record_ids": record_ids,
    }


def lines(found: dict[str, Any], records: list[dict[str, Any]] | None) -> Iterator[str]:
    """Yields the result of :func:`replay`, with its ids as a list, and of :func:`describe_records`, as lines of text."""
    ids, start, (first, last) = found["record_ids"], found["first_position"], found["epochs"]
    when = "delivered" if found["delivered"] else "not yet delivered"
    yield f"state: feed step {found['feed_step']:,}, position {found['position']:,}"
    yield f"batch index {found['batch_index']:,}, {when}: positions {start:,}..{start + len(ids) - 1:,}"
    yield f"{len(ids):,} records of epoch {first}" + (f" to {last}" if last != first else "")
    if not records:
        yield " ".join(map(str, ids))
        return
    shared = os.path.commonprefix([record["file"] for record in records])  # noqa: RUF071 (these may be URLs)
    folder, slash, _ = shared.rpartition("/")
    yield f"from {folder}"
    for record in records:
        name, begins = record["file"].removeprefix(folder + slash), shortened(record["begins"], 40)
        yield f"{record['record_id']:>12}  {record['bytes']:>10,} B  {name}  {begins}"


def describe_records(state: feed_state.FeedState, paths: list[str], record_ids: RecordIds) -> list[dict[str, Any]]:
    """Returns the file, size and first bytes of records, read from the ArrayRecord files of the state."""
    from meshfeed.sources import ArrayRecord

    source = ArrayRecord(paths)
    try:
        feed_state.compare_fingerprints({"source": state.fingerprint["source"]}, {"source": source_identity(source)})
        raw = source.read_raw(record_ids)
        return [
            {
                "record_id": int(record_id),
                "file": without_signatures(file_of(source, int(record_id)) or ""),
                "bytes": len(record),
                "begins": repr(bytes(record[:_SHOWN_BYTES]))[2:-1],
            }
            for record_id, record in zip(record_ids.tolist(), raw, strict=True)
        ]
    finally:
        source.close()
