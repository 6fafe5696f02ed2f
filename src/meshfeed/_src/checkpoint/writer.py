"""Keeps two jobs from saving into one folder: a job that was thought dead stops once its successor has begun to save."""

from __future__ import annotations

import contextlib
import functools
import logging
import os

from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError
from meshfeed._src.base.writer import new_note, who

_NAME = ".writer.json"  # while a job saves here; hidden, and not a number, so no step
_log = logging.getLogger("meshfeed.checkpoint")


class FolderWriter:
    """This job as one that saves into a checkpoint folder; used on host 0 only."""

    def __init__(self, directory: epath.Path) -> None:
        self._directory, self._path = directory, directory / _NAME
        self._note: str | None = None  # until this job begins

    def begin(self) -> None:
        """Writes the note, before anything in the folder is changed. A job that began before will find it."""
        found, self._note = self._read(), _note_of(os.getpid())
        if found and found != self._note:
            _log.info(
                "%s has not closed its Checkpointer of %s. If it still runs, it cannot save there any more.",
                who(found),
                self._directory,
            )
        self._write(self._note)

    def replaced(self) -> str | None:
        """Says that another job has begun to save here since this one did, or returns None."""
        if self._note is None:
            return None
        found = self._read()
        if not found:  # removed by hand, or by a Checkpointer of this process that is closed
            self._write(self._note)
        if not found or found == self._note:
            return None
        return (
            f"{self._directory}: {who(found)} has begun to save here since this job did, so this job must not save here any "
            "more: the steps of both would be mixed. Stop one of them, or give each a folder of its own. If both belong to "
            "one job, call jax.distributed.initialize() in each before anything else."
        )

    def check(self) -> None:
        """Raises a CheckpointError with the text of :meth:`replaced`."""
        if (replaced := self.replaced()) is not None:
            raise CheckpointError(replaced)

    def end(self) -> None:
        """Removes the note, if it is this job's."""
        with contextlib.suppress(Exception):  # only a message in the log depends on it
            if self._note is not None and self._read() == self._note:
                self._path.unlink()
        self._note = None

    def _read(self) -> str:
        """Returns the note, or nothing if there is none or it cannot be read, as its folder then cannot be written."""
        try:
            return self._path.read_text()
        except (OSError, ValueError, MeshfeedError):
            return ""

    def _write(self, note: str) -> None:
        with contextlib.suppress(OSError, MeshfeedError):  # the step cannot be written either, and its error says more
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path.write_text(note)


@functools.cache
def _note_of(pid: int) -> str:
    """One note for all Checkpointers of this process, which wait for each other's saves; forked children have their own."""
    return new_note()
