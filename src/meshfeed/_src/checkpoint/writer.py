"""Keeps two jobs from saving into one folder: a job that was thought dead stops once its successor has begun to save."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets

from etils import epath

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.writer import new_note, who
from meshfeed._src.checkpoint.directory import SHARED, one_name
from meshfeed._src.checkpoint.step import find_steps

_NAME = ".writer.json"  # while a job saves here; hidden, and not a number, so no step
_log = logging.getLogger("meshfeed.checkpoint")
_known: dict[
    str, set[int]
] = {}  # folder → its steps when this process began to save there, and those that it has saved


class FolderWriter:
    """This job as one that saves into a checkpoint folder; used on host 0 only."""

    def __init__(self, directory: epath.Path) -> None:
        self._directory, self._path = directory, directory / _NAME
        self._note: str | None = None  # until this job begins
        self._before: str | None = None  # the note before
        self._is_written = False

    def begin(self) -> None:
        """Writes the note, before anything in the folder is changed. A job that began before will find it."""
        self._before, self._note = self._read(), _note_of(os.getpid())
        self._known_steps().update(self._steps())
        if self._before and self._before != self._note:
            _log.info(
                "%s has not closed its Checkpointer of %s. If it still runs, it cannot save there any more.",
                who(self._before),
                self._directory,
            )
        self._write(self._note)

    def replaced(self) -> str | None:
        """Says that another job has begun to save here since this one did, or returns None, also if that cannot be found."""
        if self._note is None:
            return None
        found = self._read()
        if found is None or found == self._note:
            return None
        is_absent = (
            not found
        )  # removed by hand, by a Checkpointer of this process, or by a job that has saved and ended
        if (not self._is_written and found == self._before) or (is_absent and self._steps() <= self._known_steps()):
            self._write(self._note)
            return None
        other = f"{who(found)} has begun to save here" if found else "another job has saved here, and ended,"
        return (
            f"{self._directory}: {other} since this job began to, so this job must not save here any more: the steps of both "
            "would be mixed. Stop one of them, or give each a folder of its own. If both belong to one job, call "
            "jax.distributed.initialize() in each before anything else. To save here nonetheless, create a new Checkpointer."
        )

    def check(self, step: int) -> None:
        """Raises a CheckpointError with the text of :meth:`replaced` before a step is saved."""
        if (replaced := self.replaced()) is not None:
            raise CheckpointError(replaced, step=step)
        self._known_steps().add(step)

    def _steps(self) -> set[int]:
        with contextlib.suppress(Exception):  # as in _read
            return set(find_steps(self._directory))
        return set()

    def _known_steps(self) -> set[int]:
        return _known.setdefault(one_name(self._directory), set())

    def end(self) -> None:
        """Removes the note, if it is this job's."""
        with contextlib.suppress(Exception):  # only a message in the log depends on it
            if self._note is not None and self._read() == self._note:
                self._path.unlink()
        self._note = None

    def _read(self) -> str | None:
        """Returns the note, ``""`` if there is none, or None if that cannot be found out: the error of a save says more."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""
        except Exception:  # each store's library has its own
            return None

    def _write(self, note: str) -> None:
        with contextlib.suppress(Exception):  # the step cannot be written either, and its error says more
            if "://" in str(self._directory):
                self._path.write_text(note)
            else:
                self._directory.mkdir(parents=True, exist_ok=True)
                part = self._directory / f"{SHARED}{secrets.token_hex(6)}"
                part.write_text(note)
                part.replace(self._path)  # also if the file belongs to another user
            self._is_written = True


@functools.cache
def _note_of(pid: int) -> str:
    """One note for all Checkpointers of this process, which wait for each other's saves; forked children have their own."""
    return new_note()
