"""Steps in a store, which cannot rename: the object written last makes a step exist, and is the first to be removed.

While a step is written or removed, there is a note beside it, ``<step>.unfinished``. What a killed process leaves is found by
its note, without listing the objects of all steps. A folder with neither that object nor a note was not written by a
Checkpointer, and is never removed.
"""

from __future__ import annotations

import logging

from etils import epath

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.store_path import StorePath, children
from meshfeed._src.base.threads import in_threads

COMMITTED = "commit_success.txt"
"""Orbax uses the same name, so a step that it committed in a folder also exists after an upload."""

_UNFINISHED = ".unfinished"
_log = logging.getLogger("meshfeed.checkpoint")


def is_committed(folder: epath.Path) -> bool:
    """Whether the folder of a step exists as a step: in a store, whether it was committed."""
    return (folder / COMMITTED).exists() if isinstance(folder, StorePath) else folder.is_dir()


def _note(folder: StorePath) -> StorePath:
    return folder.parent / f"{folder.name}{_UNFINISHED}"


def begin_step(folder: StorePath) -> None:
    """Announces that a step will be written.

    Raises:
      CheckpointError: objects are in its place that no Checkpointer wrote.
    """
    if is_committed(folder):
        raise CheckpointError(
            f"{folder}: another job has saved this step. Stop it, or give each job a folder of its own; to save here, create "
            "a new Checkpointer."
        )
    if folder.sizes() and not _note(folder).exists():
        raise CheckpointError(
            f"{folder}: has objects but no {COMMITTED}, so it is not a step, and no Checkpointer is writing it. Remove the "
            f"folder; or, if it is a step that was copied there completely, create an empty object {folder / COMMITTED}."
        )
    _note(folder).write_text("This step is being written or removed.\n")


def commit_step(folder: StorePath) -> None:
    """Makes a step exist, once all its objects do."""
    (folder / COMMITTED).write_text("Checkpoint commit was successful.\n")
    _note(folder).unlink()


def remove_step(folder: StorePath) -> None:
    """Removes a step. If the process is killed meanwhile, the step has either not begun to be removed or does not exist."""
    _note(folder).write_text("This step is being removed.\n")
    (folder / COMMITTED).unlink()
    folder.rmtree()
    _note(folder).unlink()


def move_step(folder: StorePath, target: StorePath) -> None:
    """Copies the objects of a step within the store, then removes the step."""
    in_threads(lambda name: (folder / name).copy(target / name), sorted(folder.sizes()))
    remove_step(folder)


def remove_leftovers(directory: StorePath) -> None:
    """Removes what killed processes left while they wrote or removed steps; no other process may be doing so."""
    for path in children(directory):
        if path.name.endswith(_UNFINISHED):
            folder = directory / path.name.removesuffix(_UNFINISHED)
            if not is_committed(folder):
                folder.rmtree()
                _log.info("removed the unfinished step %s", folder)
            path.unlink()
    directory.abort_uploads()
