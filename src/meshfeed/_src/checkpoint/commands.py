"""Implements ``meshfeed inspect | verify | diff | import-position`` as functions that return JSON values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

from etils import epath

from meshfeed._src.base.errors import CheckpointError, StateMismatchError
from meshfeed._src.base.types import JsonValue
from meshfeed._src.checkpoint import foreign
from meshfeed._src.checkpoint.leaves import Entry, dtype_of
from meshfeed._src.checkpoint.manifest import read_manifest
from meshfeed._src.checkpoint.step import ARRAYS, ITERATOR, find_steps, read_step
from meshfeed._src.checkpoint.step import verify as verify_steps
from meshfeed._src.state import files as state_files
from meshfeed._src.state.state import flatten, parse_state


def inspect(directory: epath.PathLike, step: int | None = None) -> dict[str, JsonValue]:
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
    path = _folder(directory)
    if step is None and path.name.isdecimal() and (path / ARRAYS).exists():
        path, step = path.parent, int(path.name)
    steps = find_steps(path)
    if step is None and not steps:
        what = "contains no steps" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {what}. Pass a Checkpointer's folder.")
    if step is not None and step not in steps:
        read_step(path, step)  # raises and lists the existing steps
    chosen = steps if step is None else [step]
    return {"directory": str(path), "steps": [_inspect_step(path, number, number == step) for number in chosen]}


def _folder(directory: epath.PathLike) -> epath.Path:
    path = state_files.readable_path(directory)
    if path.is_file():
        raise CheckpointError(f"{path} is a file. Pass a Checkpointer's folder, or one of its steps.")
    return path


def _inspect_step(directory: epath.Path, step: int, with_leaves: bool) -> dict[str, JsonValue]:
    try:
        parts = read_step(directory, step)
    except CheckpointError as error:
        return {"step": step, "intact": False, "problem": str(error)}
    leaves = parts.manifest.leaves
    return {
        "step": step,
        "intact": True,
        "problem": None,
        **{name: parts.identity.get(name) for name in ("id", "feed_step", "position")},
        "bytes": parts.stored_bytes,
        "leaves": [_leaf(name, leaves[name]) for name in sorted(leaves)] if with_leaves else len(leaves),
        **({"iterator": parts.iterator_state} if with_leaves else {}),
    }


def _leaf(name: str, entry: Entry) -> dict[str, JsonValue]:
    if "value" in entry:
        return {"name": name, "kind": entry["kind"], "value": entry["value"]}
    dtype = dtype_of(entry)
    return {
        "name": name,
        "kind": f"key {entry['impl']}" if "impl" in entry else entry["kind"],
        "dtype": str(dtype),
        "shape": entry["shape"],
        "bytes": math.prod(entry.get("data_shape", entry["shape"])) * dtype.itemsize,
        "chunk": entry.get("chunk"),
        "sharding": entry.get("sharding"),
    }


def verify(directory: epath.PathLike, step: int | None = None) -> dict[str, JsonValue]:
    """Reads and checks every stored byte; see :func:`meshfeed.checkpoint.verify`.

    Returns:
      ``{"intact", "steps": [{"path", "step", "intact", "problems", "leaves", "bytes_read", "without_digest",
      "seconds"}]}``. The command exits with status 0 if ``intact``, else 1.
    """
    findings = verify_steps(_folder(directory), step)
    rows = [
        {**dataclasses.asdict(finding), "intact": finding.intact, "seconds": round(finding.seconds, 3)}
        for finding in findings
    ]
    return {"intact": all(row["intact"] for row in rows), "steps": rows}


def diff(first: epath.PathLike, second: epath.PathLike) -> dict[str, JsonValue]:
    """Compares two steps, or two saved states.

    Returns:
      ``{"same", "state": {field: [first, second]}, "leaves": {name: [first, second]}}``. Leaves are compared by kind,
      dtype, shape and digests. If two leaves have digests of different chunks, both chunks are listed.
    """
    (state, leaves), (other_state, other_leaves) = _load(first), _load(second)
    states, differing = _differing(state, other_state), _differing(leaves, other_leaves)
    return {"same": not states and not differing, "state": states, "leaves": differing}


def _differing(one: Mapping[str, JsonValue], two: Mapping[str, JsonValue]) -> dict[str, list[JsonValue]]:
    return {name: [one.get(name), two.get(name)] for name in sorted({*one, *two}) if one.get(name) != two.get(name)}


def _load(path: epath.PathLike) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """Returns the fields of the state, and the parts of each leaf's entry that are compared."""
    path = state_files.readable_path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. Pass a step's folder, an iterator's folder, or a JSON state.")
    if not path.is_dir():
        document = json.loads(path.read_text())
        return flatten(document.get("state", document)), {}
    iterator, arrays = (path / part if (path / part).exists() else path for part in (ITERATOR, ARRAYS))
    state = state_files.read_state(iterator) if state_files.state_paths(iterator) else {}
    manifest = read_manifest(arrays)
    if not state and manifest is None:
        steps = find_steps(path)
        remedy = f"Pass one of its steps, such as {path / str(steps[-1])}." if steps else "Pass a step's folder."
        raise CheckpointError(f"{path}: neither a step written by a Checkpointer nor a saved state. {remedy}")
    entries = {} if manifest is None else manifest.leaves
    digests = {} if manifest is None else manifest.digests
    return flatten(state), {name: _summary(entry, digests.get(name, {})) for name, entry in entries.items()}


def _summary(entry: Entry, digests: Mapping[int, str]) -> dict[str, JsonValue]:
    kept = {name: entry[name] for name in ("kind", "dtype", "shape", "impl", "value") if name in entry}
    if digests:
        kept |= {"chunk": entry.get("cell"), "digests": [digests[cell] for cell in sorted(digests)]}
    return kept


@dataclasses.dataclass
class _Template:
    """Stands in for a feed before its first batch when only its state and batch size are known."""

    state: dict[str, JsonValue]
    global_batch_size: int

    def get_state(self) -> dict[str, JsonValue]:
        return dict(self.state)

    def config(self) -> dict[str, JsonValue]:
        return {"global_batch_size": self.global_batch_size}


def import_position(
    directory: epath.PathLike,
    template: epath.PathLike,
    output: epath.PathLike,
    *,
    global_batch_size: int,
    step: int | None = None,
    unshuffled: bool = False,
) -> dict[str, JsonValue]:
    """Converts files that MaxText or Grain wrote to a state from which a feed can resume, and writes it to ``output``.

    Returns:
      The state.

    Raises:
      CheckpointError: the template is invalid, or the feed cannot resume exactly; the message gives the reason.
    """
    feed = _Template(_read_template(template), global_batch_size)
    imported = foreign.convert_state(directory, feed, step=step, unshuffled=unshuffled)
    folder = epath.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    document = state_files.make_document(imported, None, 0)  # holds all hosts' state, also for streams
    state_files.write_json(folder / state_files.STATE_FILE, document)
    return imported


def _read_template(path: epath.PathLike) -> dict[str, JsonValue]:
    try:
        return parse_state(epath.Path(path).read_bytes()).to_json()
    except (StateMismatchError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a template: {error} A template is the state of a new feed over the same records in the same "
            "order, before its first batch. Write one with json.dump(feed.get_state(), file)."
        ) from None
