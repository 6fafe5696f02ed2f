"""The folder of a Checkpointer: what may be passed as one, what its user should know, and what is cleared to save in it."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator

import orbax.checkpoint as ocp
from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError
from meshfeed._src.base.store_path import StorePath, make_path
from meshfeed._src.base.stores import is_url, open_store
from meshfeed._src.checkpoint.options import short
from meshfeed._src.checkpoint.step import ARRAYS, find_steps
from meshfeed._src.checkpoint.store_steps import move_step, remove_leftovers

_log = logging.getLogger("meshfeed.checkpoint")
_UNFINISHED = ".orbax-checkpoint-tmp"
SHARED = ".shared-with-all-hosts-"
_BEGIN_SECONDS = 10.0  # in which a folder is made, also on a busy machine
_SEEN_PART = 0.8  # of the time that hosts wait for each other
_SEEN_SECONDS, _PAUSE_SECONDS = 60.0, 0.1  # network file systems may show a new name only after a minute
_ATTEMPTS = 10
_TRIAL_BYTES = 1 << 16  # more than a file system stores in an inode
_FOLDERS_LOOKED_INTO = 20
_FOLDERS_NAMED = 3


def as_directory(directory: epath.PathLike) -> epath.Path:
    """Returns the absolute path of the checkpoint folder.

    Raises:
      SettingsError: it is not a path, it is a file or below one, it is not UTF-8, or it is a URL that lost a slash.
      CheckpointError: the package for a URL is not installed.
    """
    text, remedy = str(directory), "Pass the path of a folder, which is created if absent."

    def refused(problem: str, shown: str = repr(text)) -> SettingsError:
        return SettingsError(f"directory={shown}: {problem}", setting="directory")

    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]", text):  # unchecked, a folder "gs:" would be created here
        raise refused("is a URL that has lost a slash, as in a pathlib.Path. Pass a str or an etils.epath.Path.")
    if not text or not isinstance(directory, str | os.PathLike):
        raise refused(f"is not a path. {remedy}", short(directory))
    if is_url(text):
        open_store(text) if not text.startswith("gs://") else None
        return make_path(directory)
    path = make_path(directory).expanduser().absolute()
    # The nearest existing ancestor must be a folder too: nothing can be created below a file.
    nearest = next((part for part in (path, *path.parents) if part.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise refused(f"{nearest} is a file. {remedy}")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise refused(
            f"{str(path)!r} has no form in UTF-8, which TensorStore needs. Choose a different name; if it is UTF-8, start "
            "Python with PYTHONUTF8=1."
        ) from None
    return path


def one_name(directory: epath.Path) -> str:
    """Returns the same name for all paths of a folder, since links may lead to it."""
    name = os.fspath(directory)
    return name if "://" in name else os.path.realpath(name)


def check_no_step(directory: epath.Path) -> None:
    """Rejects one of a Checkpointer's steps, which has no steps itself: training would start afresh inside it."""
    if directory.name.isdecimal() and (directory / ARRAYS).exists() and not find_steps(directory):
        raise SettingsError(
            f"directory={str(directory)!r}: is a step of the checkpoint in {directory.parent}. Pass that folder; "
            f"restore(…, step={int(directory.name)}) restores this step.",
            setting="directory",
        )


def _damaged_metadata(directory: epath.Path) -> epath.Path | None:
    """The first step's file that Orbax cannot parse when it opens the folder, though no restore needs it."""
    names = ocp.path.step.standard_name_format()
    with contextlib.suppress(Exception):  # the store itself may be out of reach
        for step in find_steps(directory):
            try:
                _ = names.find_step(directory, step).commit_timestamp
            except ValueError:
                return directory / str(step) / "_CHECKPOINT_METADATA"
    return None


@contextlib.contextmanager
def opening(directory: epath.Path) -> Iterator[None]:
    """Turns errors of Orbax and of the store's library into a CheckpointError that names the folder."""
    try:
        yield
    except MeshfeedError:
        raise
    except Exception as error:
        if (damaged := _damaged_metadata(directory)) is not None:
            raise CheckpointError(
                f"{directory}: cannot be opened, because {damaged} is damaged ({type(error).__name__}: {error}). Delete that "
                "file: steps are restored without it."
            ) from error
        raise CheckpointError(
            f"{directory}: cannot be opened: {type(error).__name__}: {error}. Check that this host may create and write "
            "the folder; for an object store, also check the bucket's name and the credentials."
        ) from error


def checkpoints_near(directory: epath.Path) -> list[str]:
    """Returns the folders beside and inside one without steps that hold a Checkpointer's steps, most alike names first.

    Looks into a few folders only, because each takes requests to storage.
    """
    near: list[epath.Path] = []
    for folder in (directory.parent, directory):
        with contextlib.suppress(OSError, CheckpointError):  # a store may refuse to list what is outside the folder
            near += [path for path in folder.iterdir() if path != directory and not path.name.isdecimal()]
    near.sort(key=lambda path: -difflib.SequenceMatcher(None, path.name, directory.name).ratio())
    found: list[str] = []
    for path in near[:_FOLDERS_LOOKED_INTO]:
        with contextlib.suppress(OSError, CheckpointError):
            if path.is_dir() and any((path / str(step) / ARRAYS).exists() for step in find_steps(path)):
                found.append(str(path))
    return found[:_FOLDERS_NAMED]


def remove_unfinished(directory: epath.Path) -> None:
    """Removes what killed saves have left, which keeps the same step from being saved again."""
    if isinstance(directory, StorePath):
        return remove_leftovers(directory)
    if not directory.exists():  # an object store has no folder before its first file
        return
    for path in directory.iterdir():
        if path.name.startswith(SHARED):
            remove_mark(directory, path.name)
        if _UNFINISHED in path.name and path.is_dir():
            _remove(path)
            _log.info("removed the unfinished save %s", path)


def _remove(folder: epath.Path) -> None:
    """Removes a folder, to which a job that is ending may still be writing."""
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            return folder.rmtree()
        except OSError as error:
            if not folder.exists():
                return
            if not attempts_left:
                raise CheckpointError(
                    f"{folder}: is left of an unfinished save, and cannot be removed: {type(error).__name__}: {error}. If "
                    "another job still saves here, stop it; or remove the folder."
                ) from error
        time.sleep(_PAUSE_SECONDS)


def is_begun(directory: epath.Path, step: int) -> bool:
    """Whether the unfinished save of a step has a folder; True in a store, which needs none."""
    if "://" in str(directory):
        return True
    try:
        return any(path.name.startswith(f"{step}{_UNFINISHED}") for path in directory.iterdir())
    except OSError:
        return False


def wait_until_begun(directory: epath.Path, step: int) -> None:
    """Waits until the save of a step has a folder, or is committed; not for ever, since making the folder may have failed.

    Orbax makes the folder in the background, before it asks for the parts of the step.
    """
    _wait_for(lambda: is_begun(directory, step) or step in find_steps(directory), _BEGIN_SECONDS)


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return met


def put_mark(directory: epath.Path) -> str | None:
    """Writes an empty file for :func:`check_shared` and returns its name; None in a store, which all hosts share."""
    if "://" in str(directory):
        return None
    name = f"{SHARED}{secrets.token_hex(6)}"  # new each time, so that no host has cached its absence
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).touch()
    return name


def check_writable(directory: epath.Path) -> None:
    """Checks that a step can be added, on host 0; if Orbax found that it cannot, the other hosts would wait for host 0.

    Makes a folder and a file with content, since a full disk may still have room for an empty file.

    Raises:
      CheckpointError: nothing can be created in the folder, such as on a full disk or a read-only file system.
    """
    if "://" in str(directory):
        return
    trial = directory / f"{SHARED}{secrets.token_hex(6)}"
    try:
        try:
            trial.mkdir(parents=True)
            (trial / "content").write_bytes(secrets.token_bytes(_TRIAL_BYTES))
        finally:
            shutil.rmtree(trial, ignore_errors=True)  # what is left is removed by the next job that saves
    except OSError as error:
        raise CheckpointError(
            f"{directory}: nothing can be created there: {error}. Steps saved before are unchanged. Free space or quota, or "
            "make the folder writable, and save again."
        ) from error


def check_shared(directory: epath.Path, mark: str | None, timeout_seconds: float) -> None:
    """Waits until this host sees ``mark``, which :func:`put_mark` has written on host 0.

    The other hosts wait ``timeout_seconds`` for this one, which must tell them in time what it does not see.

    Raises:
      CheckpointError: it does not, so the folder is on a disk of each host. Orbax would wait 10 minutes for the folders of
        the first save, and then name those only.
    """
    seconds = min(_SEEN_SECONDS, _SEEN_PART * timeout_seconds)
    if mark is not None and not _wait_for((directory / mark).exists, seconds):
        raise CheckpointError(
            f"{directory}: this host does not see what host 0 wrote there {seconds:.3g} s ago, so hosts do not share this "
            "folder, or were given different ones. Pass the same folder of a file system that all hosts mount, or a URL such "
            "as s3://bucket/run."
        )


def remove_mark(directory: epath.Path, mark: str | None) -> None:
    """Removes what :func:`put_mark` has written, unless it is gone."""
    if mark is not None:
        path = directory / mark
        path.rmtree(missing_ok=True) if path.is_dir() else path.unlink(missing_ok=True)


def stamp_of(directory: epath.Path, step: int) -> str:
    """Returns a text by which a step can be told from a later one of the same number, or ``""`` if it has none."""
    try:
        return (directory / str(step) / "_CHECKPOINT_METADATA").read_text()  # has the time
    except Exception:  # each store's library has its own, and the file may be damaged
        return ""


def set_aside(directory: epath.Path, step: int, stamp: str) -> None:
    """Renames the folder of a damaged step, so that its number can be saved again; nothing is deleted.

    A step that has another ``stamp`` than the damaged one was saved by another job meanwhile, and stays.
    """
    path, aside = directory / str(step), directory / f"{step}.damaged-{secrets.token_hex(3)}"
    if path.exists() and stamp_of(directory, step) == stamp:
        if isinstance(path, StorePath) and isinstance(aside, StorePath):
            move_step(path, aside)
        else:
            path.rename(aside)
        _log.warning("the damaged step %d is renamed to %s", step, aside)
