"""Files of a feed's state: one per job if all hosts share the state, else one per host, merged on read.

A folder contains ``state.json``, or ``part-<process>.json`` files, or both. Each is a document::

    {"meshfeed_iterator": 1, "identity": {…} | null, "part": 0, "state": {…}, "digest": "…"}

A :class:`~meshfeed.checkpoint.Checkpointer` writes the same ``identity`` to both parts of a step. ``digest`` is the
xxh3-64 of all other fields; a flipped bit raises an error instead of changing the position. Files are written under a
temporary name and renamed, so a killed process leaves a complete file or none. Writing requires neither Orbax nor
cross-host communication: process 0 alone writes a state shared by all hosts (random access); lanes, host batches and
ledgers of replaced records are written by the hosts that hold them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from etils import epath  # pyright: ignore[reportMissingTypeStubs]

from meshfeed._src.base.coordination import process_index
from meshfeed._src.base.errors import CheckpointError, CorruptDataError, StateMismatchError
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.store_path import StorePath, absolute_path, make_path
from meshfeed._src.base.stores import open_store
from meshfeed._src.base.types import JsonValue
from meshfeed._src.state.state import digest_of, merge_states, seal

STATE_FILE = "state.json"
HOSTS = "__hosts__"
"""The key of the states of several hosts, by process, if they are not those of a feed and so cannot be merged."""
_PART_PREFIX = "part-"
_FORMAT, _VERSION = "meshfeed_iterator", 1

Directory: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")
JsonObject: TypeAlias = Mapping[str, JsonValue]


@runtime_checkable
class PathAwaitingCreation(Protocol):
    """Orbax's path of a folder that another process is creating."""

    async def await_creation(self) -> os.PathLike[str]:
        """Returns the path once the folder exists."""
        ...


class DamagedStateError(CheckpointError, CorruptDataError):
    """A state file is damaged. Both a CheckpointError and a CorruptDataError."""

    def __init__(self, message: str, *, path: str | None = None, step: int | None = None) -> None:
        CorruptDataError.__init__(self, message, path=path)
        self.step = step


def make_document(state: JsonObject, identity: JsonObject | None, process: int) -> dict[str, JsonValue]:
    """Returns the JSON document for ``state``, with its digest."""
    return sealed({_FORMAT: _VERSION, "identity": identity, "part": process, "state": state})


def sealed(content: JsonObject) -> dict[str, JsonValue]:
    """Returns JSON of ``content`` with its digest, for :func:`read_sealed`."""
    return seal(json.loads(json.dumps(content)))  # the digest of what a reader will parse


def _is_shared(state: JsonObject) -> bool:
    """Whether all hosts have this state."""
    return state.get("kind") == "random_access" and not state.get("skipped")


def must_write(state: JsonObject, process: int) -> bool:
    """Whether this host must write a file: it is process 0, or its state has data that process 0 does not have."""
    return process == 0 or not _is_shared(state)


def file_name(state: JsonObject, process: int) -> str:
    """Returns ``state.json`` for the state of all hosts, or ``part-<process>.json`` for the state of one host."""
    return STATE_FILE if process == 0 and _is_shared(state) else f"{_PART_PREFIX}{process}.json"


def readable_path(directory: Directory) -> epath.Path:
    """Returns the path of a checkpoint or saved state, checked for reading.

    Raises:
      CheckpointError: the store of a URL cannot be reached, or its package is not installed, or this process may not look
        into the folder that holds a local path, which would then look absent.
    """
    path = absolute_path(make_path(directory))
    if isinstance(path, StorePath):
        open_store(str(path))
    elif "://" in str(directory):
        try:
            path.exists()
        except Exception as error:  # each file system library has its own exceptions
            raise CheckpointError(
                f"{directory}: cannot be read here: {type(error).__name__}: {error}. Check credentials and network, or copy "
                "the checkpoint into a folder."
            ) from error
    else:
        try:
            os.stat(path)
        except PermissionError as error:
            raise CheckpointError(
                f"{directory}: cannot be read here: {error}. Check the user and the permissions."
            ) from error
        except OSError:  # the caller names what is absent
            pass
    return path


def write_json(path: epath.Path, value: JsonValue) -> None:
    """Writes JSON atomically: readers see the complete file or none, even if this process is killed."""
    write_text(path, json.dumps(value, separators=(",", ":")))


def write_text(path: epath.Path, text: str) -> None:
    """Writes text atomically, as :func:`write_json` does."""
    if "://" in os.fspath(path):  # object stores write objects atomically
        path.write_text(text)
        return
    beside = f"{os.fspath(path)}.writing-{os.getpid()}"
    with open(beside, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without it, a crash after the rename could leave an empty file
    os.replace(beside, os.fspath(path))


def write_state(
    directory: Directory, state: JsonObject, *, identity: JsonObject | None = None, process: int | None = None
) -> None:
    """Writes this host's part of a feed's state, if it has one (:func:`must_write`), into an existing folder.

    ``identity`` is that of the checkpoint to which the file belongs; ``process`` is by default this process.
    """
    process = process_index() if process is None else process
    if must_write(state, process):
        write_json(make_path(directory) / file_name(state, process), make_document(state, identity, process))


def read_sealed(
    path: epath.Path, form: str, version: int, what: str, error: type[DamagedStateError] = DamagedStateError
) -> dict[str, JsonValue]:
    """Returns the content of a JSON file that :func:`sealed` made: ``what``, for errors.

    The field ``form`` has the version of the file's format, which may be at most ``version``.

    Raises:
      DamagedStateError: the file differs from what was written; of the class ``error``.
      CheckpointError: a newer version of meshfeed wrote it.
    """

    def damaged(problem: str) -> DamagedStateError:
        remedy = "The file is damaged or was changed by hand; restore an earlier step."
        return error(f"{path}: {problem}. {remedy}", path=str(path))

    try:
        document = json.loads(path.read_text())
    except ValueError as problem:
        raise damaged(f"not JSON ({problem}), expected a {what}") from None
    if not isinstance(document, dict) or form not in document:
        raise damaged(f"not the {what}")
    document = cast("dict[str, JsonValue]", document)
    bare = {key: value for key, value in document.items() if key != "digest"}
    # Before the version check: a flipped bit in the version must not ask for an upgrade.
    if digest_of(bare) != document.get("digest"):
        raise damaged(f"digest is {digest_of(bare)}, expected {document.get('digest')}")
    if document[form] > version:
        raise CheckpointError(
            f"{path}: has format {document[form]}, but this version of meshfeed reads up to {version}. Upgrade meshfeed."
        )
    return bare


def state_paths(directory: Directory) -> list[epath.Path]:
    """Returns the state files in ``directory``: ``state.json`` first, then the parts in order of process."""
    # The suffix excludes temporary files of killed writers.
    names = [path for path in make_path(directory).iterdir() if path.name.endswith(".json")]
    whole = [path for path in names if path.name == STATE_FILE]
    parts = [path for path in names if path.name.startswith(_PART_PREFIX)]
    # By number: as text, part-10 comes before part-2.
    return whole + sorted(parts, key=lambda path: int(path.name.removeprefix(_PART_PREFIX).removesuffix(".json")))


def read_document(directory: Directory) -> dict[str, JsonValue]:
    """Reads a folder's state files, which any number of hosts have written, and merges them into one document.

    Raises:
      DamagedStateError: a file is damaged.
      CheckpointError: the directory has no state, its parts belong to different saves, or a newer version wrote it.
    """
    paths = state_paths(directory) if make_path(directory).exists() else []
    if not paths:
        raise CheckpointError(
            f"{directory}: no iterator state, expected {STATE_FILE}. Restore without a feed, or read files of MaxText "
            "and Grain with `meshfeed import-position`."
        )
    documents = [read_sealed(path, _FORMAT, _VERSION, "state of a feed") for path in paths]
    if len(documents) == 1:
        return documents[0]
    for path, document in zip(paths, documents, strict=True):
        if document["identity"] != documents[0]["identity"]:
            raise CheckpointError(
                f"{directory}: {paths[0].name} and {path.name} belong to different saves "
                f"({documents[0]['identity']} and {document['identity']}). Restore another step."
            )
    try:
        return {**documents[0], "state": _join_states(documents)}
    except StateMismatchError as error:
        raise CheckpointError(f"{directory}: the parts do not belong together: {error}") from error


def is_of_feed(state: JsonObject) -> bool:
    """Whether this is a state of a feed, and not of another iterator, which only that iterator understands."""
    return type(state.get("meshfeed")) is int


def _join_states(documents: Sequence[JsonObject]) -> JsonValue:
    """Returns the state of a feed on all hosts, or ``{"__hosts__": {process: state}}`` of an iterator that is not a feed."""
    states: list[JsonObject] = [document["state"] for document in documents]
    if any(map(is_of_feed, states)):
        return merge_states(states)
    hosts: dict[str, JsonValue] = {}
    for document, state in zip(documents, states, strict=True):
        # The file of all hosts is there beside their parts if a process was killed between writing it and removing them.
        hosts |= state[HOSTS] if set(state) == {HOSTS} else {str(document["part"]): state}
    return {HOSTS: hosts}


def read_state(directory: Directory) -> dict[str, JsonValue]:
    """Returns the merged state of all hosts in ``directory``; raises the errors of :func:`read_document`."""
    return read_document(directory)["state"]


def read_json(path: epath.Path) -> dict[str, JsonValue]:
    """Returns the state in a JSON file: the result of ``get_state``, or a state file's document.

    Raises:
      CheckpointError: the file holds no JSON object.
    """
    value, problem = None, ""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        problem = f": {error}"
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds no JSON object{problem}. Pass a file with json.dumps(feed.get_state()), or a checkpoint folder."
        )
    document = cast("dict[str, JsonValue]", value)
    return cast("dict[str, JsonValue]", document["state"]) if _FORMAT in document else document


def merge_files(directory: Directory) -> None:
    """Merges the parts of all hosts into ``state.json`` and deletes them; call on one host, after all have written."""
    paths = state_paths(directory)
    parts = [path for path in paths if path.name != STATE_FILE]
    if not parts:
        return
    document = read_document(directory)
    merged = make_document(document["state"], document["identity"], 0)
    write_json(make_path(directory) / STATE_FILE, merged)
    # If killed here, both the merged file and parts remain, and merge to the same state.
    for path in parts:
        path.unlink()


def for_orbax(coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Renames a coroutine that Orbax awaits, for a user who calls its function and drops what it returns.

    Python names a coroutine where it is shown, and in the warning that it was never awaited.
    """
    called = coroutine.__qualname__.partition(".<locals>")[0]
    coroutine.__qualname__ = (
        f"{called}, which Orbax calls and awaits (to save or restore, use meshfeed.checkpoint.Checkpointer)"
    )
    return coroutine


class Checkpointable:
    """Makes a resumable iterator a ``StatefulCheckpointable`` of Orbax v1."""

    def save(self, directory: Directory | PathAwaitingCreation) -> Coroutine[Any, Any, Awaitable[None]]:
        """Part of Orbax v1's StatefulCheckpointable, for Orbax to call. To save, use meshfeed.checkpoint.Checkpointer.

        Returns:
          A coroutine that captures the state, and returns one that writes it. Nothing is written before both are awaited.
        """

        async def capture() -> Awaitable[None]:
            write_into = self._captured()

            async def write() -> None:
                write_into(
                    await directory.await_creation() if isinstance(directory, PathAwaitingCreation) else directory
                )

            return for_orbax(write())

        return for_orbax(capture())

    def load(self, directory: Directory) -> Coroutine[Any, Any, Awaitable[None]]:
        """Part of Orbax v1's StatefulCheckpointable, for Orbax to call. To restore, use meshfeed.checkpoint.Checkpointer.

        Returns:
          A coroutine that returns one that reads the files of all hosts and sets the state.
        """

        async def begin() -> Awaitable[None]:
            async def read() -> None:
                self._read_from(directory)

            return for_orbax(read())

        return for_orbax(begin())

    def _captured(self) -> Callable[[Directory], None]:
        """Returns a function that writes the current state."""
        state = cast("Resumable", self).get_state()
        return lambda directory: write_state(directory, state)

    def _read_from(self, directory: Directory) -> None:
        cast("Resumable", self).set_state(read_state(directory))
