"""The state of a feed as files: one for the job where hosts hold the same state, else one per host, joined on read.

A folder holds ``state.json``, or ``part-<process>.json`` files, or both. Each is a document::

    {"meshfeed_iterator": 1, "identity": {…} | null, "part": 0, "state": {…}, "digest": "…"}

``identity`` is what a :class:`~meshfeed.checkpoint.Checkpointer` stamps on both halves of a step. ``digest`` is xxh3-64
of the rest, so that a flipped bit is an error and never another position. Files are written beside their name and
renamed, so a kill leaves a whole file or none. Nothing here needs Orbax, and hosts do not talk: a state that all hosts
share (random access) is written by process 0 alone; lanes, host batches and ledgers of replaced records are written by
the hosts that hold them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Mapping
from typing import Any

from etils import epath

from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.errors import CheckpointError, CorruptDataError, StateMismatchError
from meshfeed._src.state.state import digest_of, merge_states

STATE_FILE = "state.json"
_PART_PREFIX = "part-"
_VERSION = 1


class DamagedStateError(CheckpointError, CorruptDataError):
    """A file of iterator state whose bytes are not what was written: both a checkpoint's and data's fault."""

    def __init__(self, message: str, *, path: str | None = None, step: int | None = None) -> None:
        CorruptDataError.__init__(self, message, path=path)
        self.step = step


def make_document(state: Mapping[str, Any], identity: Mapping[str, Any] | None, process: int) -> dict[str, Any]:
    """The JSON document that is written for ``state``, sealed with its digest."""
    bare = {"meshfeed_iterator": _VERSION, "identity": identity, "part": process, "state": state}
    bare = json.loads(json.dumps(bare))
    return {**bare, "digest": digest_of(bare)}


def must_write(state: Mapping[str, Any], process: int) -> bool:
    """Whether this host's state has something that process 0's file lacks."""
    return process == 0 or state.get("kind") != "random_access" or bool(state.get("skipped"))


def file_name(state: Mapping[str, Any], process: int) -> str:
    """``state.json`` for the state of all hosts, ``part-<process>.json`` for that of one."""
    whole = process == 0 and state.get("kind") == "random_access" and not state.get("skipped")
    return STATE_FILE if whole else f"{_PART_PREFIX}{process}.json"


def readable_path(directory: Any) -> epath.Path:
    """The path of a checkpoint or of a saved state, to read from.

    Raises:
      CheckpointError: it is a URL of a kind that nothing here reads, or of a bucket that cannot be reached.
    """
    scheme, is_url, _ = str(directory).partition("://")
    if is_url and scheme not in ("gs", "s3"):
        raise CheckpointError(
            f"{directory}: checkpoints are read from folders and gs://, not from {scheme}://. Give the path of a folder, "
            "or copy the checkpoint into one."
        )
    path = epath.Path(directory)
    if is_url:
        try:
            path.exists()
        except Exception as error:  # each library of a file system has exceptions of its own
            raise CheckpointError(
                f"{directory}: {scheme}:// cannot be read here: {type(error).__name__}: {error}. Look at credentials and "
                "network, or copy the checkpoint into a folder."
            ) from error
    return path


def write_json(path: epath.Path, value: Any) -> None:
    """Writes JSON so that a reader, or a kill, sees the whole file or none."""
    text = json.dumps(value, separators=(",", ":"))
    if "://" in os.fspath(path):  # object stores write whole objects
        path.write_text(text)
        return
    beside = f"{os.fspath(path)}.writing-{os.getpid()}"
    with open(beside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, os.fspath(path))


def write_state(
    directory: Any, state: Mapping[str, Any], *, identity: Mapping[str, Any] | None = None, process: int | None = None
) -> None:
    """Writes this host's part of a feed's state into ``directory``, which must exist; maybe nothing at all.

    Args:
      directory: a path, local or remote.
      state: what ``get_state`` gave.
      identity: ties the file to the other half of a checkpoint.
      process: this host's index; default: the JAX process.
    """
    process = process_index() if process is None else process
    if must_write(state, process):
        document = make_document(state, identity, process)
        write_json(epath.Path(directory) / file_name(state, process), document)


def _read_document(path: epath.Path) -> dict[str, Any]:
    remedy = "The file is damaged or was changed by hand; restore an earlier step."
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise DamagedStateError(
            f"{path}: not JSON ({error}), expected a state of a feed. {remedy}", path=str(path)
        ) from None
    if not isinstance(document, dict) or "meshfeed_iterator" not in document:
        raise DamagedStateError(f"{path}: no state of a feed. {remedy}", path=str(path))
    bare = {key: value for key, value in document.items() if key != "digest"}
    if digest_of(bare) != document.get("digest"):
        raise DamagedStateError(
            f"{path}: digest is {digest_of(bare)}, expected {document.get('digest')}. {remedy}", path=str(path)
        )
    if document["meshfeed_iterator"] > _VERSION:
        raise CheckpointError(
            f"{path}: format {document['meshfeed_iterator']}, this version reads up to {_VERSION}. Upgrade meshfeed."
        )
    return bare


def state_paths(directory: Any) -> list[epath.Path]:
    """The state files in ``directory``, the whole one first, then parts by process."""
    names = [path for path in epath.Path(directory).iterdir() if path.name.endswith(".json")]
    whole = [path for path in names if path.name == STATE_FILE]
    parts = [path for path in names if path.name.startswith(_PART_PREFIX)]
    return whole + sorted(parts, key=lambda path: int(path.name.removeprefix(_PART_PREFIX).removesuffix(".json")))


def read_document(directory: Any) -> dict[str, Any]:
    """The joined document of a folder.

    Args:
      directory: where :func:`write_state` wrote, on any number of hosts.

    Raises:
      DamagedStateError: a file is not what was written.
      CheckpointError: no state is there, or its parts do not belong together.
    """
    paths = state_paths(directory) if epath.Path(directory).exists() else []
    if not paths:
        raise CheckpointError(
            f"{directory}: no iterator state there, expected {STATE_FILE}. Restore without a feed, or read files of "
            "MaxText and Grain with `meshfeed import-position`."
        )
    documents = [_read_document(path) for path in paths]
    if len(documents) == 1:
        return documents[0]
    for path, document in zip(paths, documents, strict=True):
        if document["identity"] != documents[0]["identity"]:
            raise CheckpointError(
                f"{directory}: {paths[0].name} and {path.name} belong to different saves "
                f"({documents[0]['identity']} and {document['identity']}). Restore another step."
            )
    try:
        state = merge_states([document["state"] for document in documents])
    except StateMismatchError as error:
        raise CheckpointError(f"{directory}: the parts do not belong together: {error}") from error
    return {**documents[0], "state": state}


def read_state(directory: Any) -> dict[str, Any]:
    """The state in ``directory``, of all hosts joined; raises as :func:`read_document` does."""
    return read_document(directory)["state"]


def merge_files(directory: Any) -> None:
    """Joins the parts of all hosts in one ``state.json`` and removes them; one process calls it, after all wrote."""
    paths = state_paths(directory)
    parts = [path for path in paths if path.name != STATE_FILE]
    if not parts:
        return
    document = read_document(directory)
    merged = make_document(document["state"], document["identity"], 0)
    write_json(epath.Path(directory) / STATE_FILE, merged)
    for path in parts:
        path.unlink()


async def save(feed: Any, directory: Any) -> Awaitable[None]:
    """Orbax v1 ``StatefulCheckpointable.save`` for a feed: takes the state now, writes it in what it returns.

    Args:
      feed: has ``get_state() -> dict``.
      directory: an Orbax ``PathAwaitingCreation``, or a path that exists.
    """
    state = feed.get_state()

    async def write() -> None:
        path = await directory.await_creation() if hasattr(directory, "await_creation") else directory
        write_state(path, state)

    return write()


async def load(feed: Any, directory: Any) -> Awaitable[None]:
    """Orbax v1 ``StatefulCheckpointable.load`` for a feed: reads the files of all hosts and sets the state in place.

    Args:
      feed: has ``set_state(dict)``.
      directory: what :func:`save` wrote, on any number of hosts.
    """

    async def read() -> None:
        feed.set_state(read_state(directory))

    return read()
