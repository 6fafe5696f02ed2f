"""Implements ``meshfeed inspect | verify | diff | import-position`` as functions that return JSON values."""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

from etils import epath

from meshfeed._src.base.errors import CheckpointError, StateMismatchError
from meshfeed._src.checkpoint import foreign
from meshfeed._src.checkpoint import verify as checkpoint_verify
from meshfeed._src.checkpoint.leaves import dtype_of
from meshfeed._src.checkpoint.manifest import Manifest, read_manifest
from meshfeed._src.checkpoint.step import ARRAYS, ITERATOR, find_steps, read_step
from meshfeed._src.state import files as state_files
from meshfeed._src.state.state import flatten, parse_state


def inspect(directory: Any, step: int | None = None) -> dict[str, Any]:
    """Lists the steps of a checkpoint folder, and every leaf of one step. Reads no array values.

    Args:
      directory: a Checkpointer's folder, or one of its steps.
      step: the step whose leaves to list.

    Returns:
      ``{"directory", "steps": [{"step", "intact", "problem", "id", "feed_step", "position", "bytes", "leaves"}]}``. For
      the requested step, ``"leaves"`` is ``[{"name", "kind", "dtype", "shape", "bytes", "chunk", "sharding"}]`` and
      ``"iterator"`` holds the feed's state; for other steps, ``"leaves"`` is their number.

    Raises:
      CheckpointError: there are no steps, or not the requested one.
    """
    directory, step = _split(directory, step)
    steps = find_steps(directory) if step is None else [step]
    if not steps:
        raise CheckpointError(f"{directory}: no steps there. Give the folder that was given to Checkpointer.")
    if step is not None and step not in find_steps(directory):
        read_step(directory, step)  # raises and lists the existing steps
    return {"directory": str(directory), "steps": [_inspect_step(directory, n, n == step) for n in steps]}


def _folder(directory: Any) -> epath.Path:
    path = state_files.readable_path(directory)
    if path.is_file():
        raise CheckpointError(f"{path} is a file. Give the folder that was given to Checkpointer, or one of its steps.")
    return path


def _split(directory: Any, step: int | None) -> tuple[epath.Path, int | None]:
    path = _folder(directory)
    if step is None and path.name.isdecimal() and (path / ARRAYS).exists():
        return path.parent, int(path.name)
    return path, step


def _inspect_step(directory: epath.Path, step: int, with_leaves: bool) -> dict[str, Any]:
    try:
        parts = read_step(directory, step)
    except CheckpointError as error:
        return {"step": step, "intact": False, "problem": str(error)}
    found = {
        "step": step,
        "intact": True,
        "problem": None,
        "id": parts.identity.get("id"),
        "feed_step": parts.identity.get("feed_step"),
        "position": parts.identity.get("position"),
        "bytes": sum(size for size, _ in parts.manifest.files.values()),
        "leaves": len(parts.manifest.leaves),
    }
    if with_leaves:
        found["leaves"] = _leaves(parts.manifest)
        found["iterator"] = None if parts.document is None else parts.document["state"]
    return found


def _leaves(manifest: Manifest) -> list[dict[str, Any]]:
    rows = []
    for name, entry in sorted(manifest.leaves.items()):
        if "value" in entry:
            rows.append({"name": name, "kind": entry["kind"], "value": entry["value"]})
            continue
        shape = entry.get("data_shape", entry["shape"])
        rows.append(
            {
                "name": name,
                "kind": f"key {entry['impl']}" if "impl" in entry else entry["kind"],
                "dtype": str(dtype_of(entry)),
                "shape": entry["shape"],
                "bytes": math.prod(shape) * dtype_of(entry).itemsize,
                "chunk": entry.get("chunk"),
                "sharding": entry.get("sharding"),
            }
        )
    return rows


def verify(directory: Any, step: int | None = None) -> dict[str, Any]:
    """Reads and checks every stored byte; see :func:`meshfeed._src.checkpoint.verify.verify`.

    Returns:
      ``{"intact", "steps": [{"path", "step", "intact", "problems", "leaves", "bytes_read", "without_digest",
      "seconds"}]}``. The command exits with status 0 if ``intact``, otherwise 1.
    """
    findings = checkpoint_verify.verify(_folder(directory), step)
    rows = [
        {
            "path": finding.path,
            "step": finding.step,
            "intact": finding.intact,
            "problems": list(finding.problems),
            "leaves": finding.leaves,
            "bytes_read": finding.bytes_read,
            "without_digest": finding.without_digest,
            "seconds": round(finding.seconds, 3),
        }
        for finding in findings
    ]
    return {"intact": all(row["intact"] for row in rows), "steps": rows}


def diff(first: Any, second: Any) -> dict[str, Any]:
    """Compares two steps, or two saved states.

    Args:
      first: a step's folder, an iterator's folder, or a JSON file with a state.
      second: likewise.

    Returns:
      ``{"same", "state": {field: [first, second]}, "leaves": {name: [first, second]}}``. Leaves are compared by kind,
      dtype, shape and digests. If two leaves have digests of different chunks, both chunks are listed.
    """
    one, two = _load(first), _load(second)
    state = {
        field: [one["state"].get(field), two["state"].get(field)]
        for field in sorted({*one["state"], *two["state"]})
        if one["state"].get(field) != two["state"].get(field)
    }
    leaves = {
        name: [one["leaves"].get(name), two["leaves"].get(name)]
        for name in sorted({*one["leaves"], *two["leaves"]})
        if one["leaves"].get(name) != two["leaves"].get(name)
    }
    return {"same": not state and not leaves, "state": state, "leaves": leaves}


def _load(path: Any) -> dict[str, Any]:
    path = state_files.readable_path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: not there. Give a step's folder, an iterator's folder, or a JSON state.")
    if not path.is_dir():
        document = json.loads(path.read_text())
        return {"state": flatten(document.get("state", document)), "leaves": {}}
    iterator = path / ITERATOR if (path / ITERATOR).exists() else path
    state = state_files.read_state(iterator) if state_files.state_paths(iterator) else {}
    arrays = path / ARRAYS if (path / ARRAYS).exists() else path
    manifest = read_manifest(arrays)
    if not state and manifest is None:
        steps = find_steps(path)
        remedy = f"Give one of its steps, such as {path / str(steps[-1])}." if steps else "Give a step's folder."
        raise CheckpointError(f"{path}: neither a step that a Checkpointer wrote nor a saved state. {remedy}")
    leaves = {} if manifest is None else {name: _summary(manifest, name) for name in manifest.leaves}
    return {"state": flatten(state), "leaves": leaves}


def _summary(manifest: Manifest, name: str) -> dict[str, Any]:
    kept = ("kind", "dtype", "shape", "impl", "value")
    entry = {key: value for key, value in manifest.leaves[name].items() if key in kept}
    digests = manifest.digests.get(name)
    if digests:
        entry["chunk"] = manifest.leaves[name].get("cell")
        entry["digests"] = [digests[cell] for cell in sorted(digests)]
    return entry


class _Template:
    """Stands in for a feed before its first batch when only its state and batch size are known."""

    def __init__(self, state: dict[str, Any], global_batch_size: int) -> None:
        self._state = state
        self._global_batch_size = global_batch_size

    def get_state(self) -> dict[str, Any]:
        return dict(self._state)

    def config(self) -> dict[str, Any]:
        return {"global_batch_size": self._global_batch_size}


def import_position(
    directory: Any,
    template: Any,
    output: Any,
    *,
    global_batch_size: int,
    step: int | None = None,
    unshuffled: bool = False,
) -> dict[str, Any]:
    """Converts files that MaxText or Grain wrote to a state from which a feed can resume.

    Args:
      directory: folder with ``process_<i>-of-<n>.json`` files or ``process_0.json``.
      template: JSON file with ``feed.get_state()`` of a new feed over the same records in the same order.
      output: folder in which to write ``state.json``.
      global_batch_size: the feed's global batch size.
      step: number of batches delivered.
      unshuffled: see :func:`meshfeed.checkpoint.convert_state`.

    Returns:
      the state.

    Raises:
      CheckpointError: the template is invalid, or the feed cannot resume exactly; the message says why.
    """
    state = _read_template(template)
    imported = foreign.convert_state(directory, _Template(state, global_batch_size), step=step, unshuffled=unshuffled)
    folder = epath.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    document = state_files.make_document(imported, None, 0)  # holds all hosts' state, also for streams
    state_files.write_json(folder / state_files.STATE_FILE, document)
    return imported


def _read_template(path: Any) -> dict[str, Any]:
    try:
        return parse_state(pathlib.Path(path).read_bytes()).to_json()
    except (StateMismatchError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a template: {error} A template is the state of a new feed over the same records in the same "
            "order, before its first batch. Write one with json.dump(feed.get_state(), file)."
        ) from None
