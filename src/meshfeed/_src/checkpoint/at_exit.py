"""Saves that are unfinished when the program ends without ``close``: they are finished, or an ERROR names them.

Orbax writes on threads that need executors of ``concurrent.futures``, which accept no work once the interpreter has begun
to exit. So pending saves are finished before that, in the exit handlers that Python runs before it joins threads. A
second look, after all threads have ended, finds the saves of other threads that began too late. Python 3.12.0 and 3.12.1
start no threads even in those handlers (python/cpython#113964): there, an ERROR names the step.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures.thread  # noqa: F401 # registers its own exit handler first, which therefore runs last
import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable

from etils import epath

from meshfeed._src.base.fork import Owner
from meshfeed._src.checkpoint.directory import one_name

_log = logging.getLogger("meshfeed.checkpoint")


@dataclasses.dataclass(eq=False)
class OpenSaves:
    """What a checkpointer has yet to save."""

    wait: Callable[[], object]  # for the save in the background; raises its error
    leave: Callable[[], object]  # called at exit, when nothing is left to save
    directory: epath.Path
    owner: Owner = dataclasses.field(default_factory=Owner)
    saving: int | None = None  # the step that may be unfinished
    skipped: int | None = None  # the newest step that the interval skipped, which close will save
    error: Exception | None = None  # of the save, if another checkpointer has waited for it
    seen: int | None = None  # how many saves this process had begun in the folder when others were waited for last

    def register(self) -> None:
        """Asks for :meth:`finish` at exit; the checkpointer itself may be collected before."""
        _register_exit()
        _open[id(self)] = self

    def remove(self) -> None:
        """Undoes :meth:`register`, once nothing is open."""
        _open.pop(id(self), None)

    @functools.cached_property
    def _folder(self) -> str:
        return one_name(self.directory)

    def begin(self, step: int) -> None:
        """Records that a save begins."""
        self.saving = step
        _begun[self._folder] += 1
        self.seen = _begun[self._folder]

    def result(self) -> None:
        """Waits for the save in the background, and raises its error."""
        self.wait()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def wait_for_others(self) -> bool:
        """Waits for saves of other checkpointers of this process in the folder, whose steps Orbax would take for rubbish.

        Returns:
          Whether they have begun any since the last call, so that its steps must be listed again.
        """
        saving = (one for one in list(_open.values()) if one.saving is not None and one.owner.is_here)
        for one in saving:
            if one is not self and one._folder == self._folder:
                try:
                    one.wait()
                except Exception as error:  # which is raised only once
                    one.error = error
        before, self.seen = self.seen, _begun[self._folder]
        return before != self.seen

    def finish(self) -> None:
        """Waits for the save in the background; logs an ERROR if it failed, and one for a skipped step."""
        if not self.owner.is_here:
            return
        saving, self.saving = self.saving, None
        skipped, self.skipped = self.skipped, None
        if saving is not None:
            try:
                self.result()
            except BaseException as error:  # including Ctrl-C: the program ends in any case
                _log.error(_LOST, saving, self.directory, type(error).__name__, error)
        if skipped is not None:
            _log.error(_SKIPPED, skipped, self.directory)
        self.leave()


_LOST = (
    "step %d is not saved in %s: the program ended without Checkpointer.close(), and the save failed: %s: %s. Use the "
    "Checkpointer in a with statement, or call close()."
)
_SKIPPED = (
    "step %d, which the interval skipped, is not saved in %s: the program ended without Checkpointer.close(). Use the "
    "Checkpointer in a with statement, call close(), or set save_last=False."
)
_open: dict[int, OpenSaves] = {}
# Folder → number of saves that this process has begun there.
_begun: collections.Counter[str] = collections.Counter()


def finish_open_saves() -> None:
    """Finishes the saves of all checkpointers that were not closed."""
    for saves in list(_open.values()):
        saves.finish()


@functools.cache
def _register_exit() -> None:
    atexit.register(finish_open_saves)
    early = getattr(threading, "_register_atexit", None)  # without it, the second look still finds what was lost
    if early is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter already exits
            early(finish_open_saves)
