"""Saves steps in a store: what a Checkpointer needs of Orbax's manager, which writes to folders and Google's store only.

Each host has the handlers write its part of a step to a local folder, as Orbax does where all hosts share one, then uploads
the files. Arrays are stored without OCDBT: each chunk is a file of its own, so the files of all hosts together are the step,
and no host needs those of the others. Once all hosts have uploaded, host 0 merges the manifests and commits the step.
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint import future as orbax_future
from orbax.checkpoint.checkpoint_manager import CheckpointInfo

from meshfeed._src.base.coordination import process_count, process_index
from meshfeed._src.base.errors import CheckpointError, MeshfeedError
from meshfeed._src.base.store_path import StorePath
from meshfeed._src.base.threads import Call, SingleCall, Threads
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.saves import StepSave, run_coroutine
from meshfeed._src.checkpoint.step import ARRAYS, find_steps
from meshfeed._src.checkpoint.store_steps import begin_step, commit_step, remove_step
from meshfeed._src.checkpoint.stored import write_files_part
from meshfeed._src.checkpoint.writer import FolderWriter

_log = logging.getLogger("meshfeed.checkpoint")
_MADE_BY_HOST_0 = "array_metadatas"  # by Orbax, and other hosts wait for it, which do not see it here
_LOOK_SECONDS = 0.1
_CHUNK = re.compile(r"\d+(\.\d+)*")  # whole once it has this name: TensorStore renames it
_UPLOADS = 16  # in flight at once, each with a file of about 16 MiB in memory


class StoreManager:
    """Saves steps of one checkpoint in the background, one at a time; all hosts call the same methods in the same order.

    ``steps`` are the committed ones. Of Orbax's options, it takes some; see ``manager_options``.
    """

    def __init__(
        self,
        directory: StorePath,
        handlers: Mapping[str, ocp.handlers.AsyncCheckpointHandler],
        options: ocp.CheckpointManagerOptions,
        steps: Sequence[int],
        writer: FolderWriter,
    ) -> None:
        self._directory, self._handlers, self._options, self._writer = directory, handlers, options, writer
        self._steps = sorted(steps)  # of the store, without a request at every training step
        self._saving: SingleCall[None] | None = None
        self._begun: set[int] = set()  # the step that is saved, until the save is waited for

    def all_steps(self) -> list[int]:
        """Returns the committed steps and, as in Orbax, the one that is saved: hosts learn of its end at different times."""
        return sorted({*self._steps, *self._begun})

    def reload(self) -> None:
        """Reads the committed steps again."""
        self._steps = find_steps(self._directory)

    def should_save(self, step: int) -> bool:
        """Returns whether the interval includes a step; as in Orbax, also for the first step and before a preemption."""
        interval, chosen = self._options.save_interval_steps, self._options.save_on_steps or ()
        # Asked at every step: from the steps that hosts ask about, JAX chooses the one before a preemption.
        preempted = process_count() > 1 and _preempted(step)
        # Not by the steps alone while one is saved: they change in the background, at another time on each host.
        is_first = self._saving is None and not self._steps
        return preempted or is_first or step in chosen or (bool(interval) and step % interval == 0)

    def save(self, step: int, args: ocp.args.Composite, force: bool = False) -> bool:
        """Captures a step, and begins to write it; ``force`` is for Orbax's manager, since the caller asks what is due."""
        self.wait_until_finished()
        items: dict[str, Any] = dict(args.items())
        save: StepSave = items[ARRAYS].step_save
        staging, started = _staging_folder(self._directory), time.time_ns()
        futures: list[orbax_future.Future] = []
        name = ARRAYS
        try:
            _make_empty(staging, self._directory)
            for name, item in items.items():
                (staging / name).mkdir()
                if name == ARRAYS:
                    (staging / name / _MADE_BY_HOST_0).mkdir()
                futures += run_coroutine(self._handlers[name].async_save(staging / name, item), "meshfeed-save") or []
        except Exception as error:  # the other hosts wait for this one in the background, and learn of it there
            futures += save.begin(name, [save.failed(error)])
        self._saving = SingleCall(lambda: self._write(save, staging, list(items), futures, started), "meshfeed-save")
        self._begun = {save.step}
        self._saving.start()
        return True

    def _write(
        self,
        save: StepSave,
        staging: epath.Path,
        items: Sequence[str],
        futures: Sequence[orbax_future.Future],
        started: int,
    ) -> None:
        folder = self._directory / str(save.step)
        uploads = _Uploads(staging, folder)
        try:
            name = f"save-{save.identity['id']}/store"
            with Agreement(f"saving step {save.step} in {self._directory}", save.timeout_seconds, name) as agreement:
                agreement.publish(lambda: self._begin(folder))
                agreement.attempt(lambda: uploads.run(lambda: [future.result() for future in futures]))
                removed = agreement.publish(lambda: self._commit(folder, items, started))
            self._steps = sorted({*self._steps, save.step} - set(removed))
        except BaseException:
            for future in futures:  # they must not write into the folder of the next save
                with contextlib.suppress(Exception):
                    future.result(save.timeout_seconds)
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _begin(self, folder: StorePath) -> None:
        self._writer.check(int(folder.name))
        begin_step(folder)

    def _commit(self, folder: StorePath, items: Sequence[str], started: int) -> list[int]:
        """Commits a step that all hosts have uploaded, and returns the steps that were removed."""
        self._writer.check(int(folder.name))  # or another job has removed what this one has uploaded
        for item in items:
            self._handlers[item].finalize(folder / item)
        (folder / "_CHECKPOINT_METADATA").write_text(
            json.dumps(
                {
                    "item_handlers": {item: self._handlers[item].typestr() for item in items},
                    "metrics": {},
                    "performance_metrics": {},
                    "init_timestamp_nsecs": started,
                    "commit_timestamp_nsecs": time.time_ns(),
                    "custom_metadata": {},
                }
            )
        )
        self._writer.check(int(folder.name))
        commit_step(folder)
        removed: list[int] = []
        for step in self._unwanted(int(folder.name)):
            try:
                remove_step(self._directory / str(step))
                removed.append(step)
            except MeshfeedError as error:  # the new step is saved all the same
                _log.warning("step %d in %s is not removed: %s", step, self._directory, error)
        return removed

    def _unwanted(self, saved: int) -> list[int]:
        policy = self._options.preservation_policy
        if policy is None:
            return []
        now = datetime.datetime.now(tz=datetime.UTC)
        steps = [*(step for step in self._steps if step != saved), saved]
        infos = [CheckpointInfo(step, now, None) for step in steps]
        kept = policy.should_preserve(infos, context=policies.PreservationContext())
        return [info.step for info, keep in zip(infos, kept, strict=True) if not keep]

    def wait_until_finished(self) -> None:
        """Waits for the save in the background, and raises its error."""
        if (saving := self._saving) is not None:
            saving.wait()  # hosts do not wait for each other for ever, nor do requests
            self._saving, self._begun = None, set()
            saving.result()

    def close(self) -> None:
        """Does nothing: no thread outlives a save."""


def _preempted(step: int) -> bool:
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError:  # the job does not watch for preemption
        return False


def _staging_folder(directory: StorePath) -> epath.Path:
    """Returns the path of the folder for what this process saves in ``directory``."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    name = f"meshfeed-{os.getuid()}-{digest}-{process_index()}-{os.getpid()}"
    return epath.Path(os.path.join(tempfile.gettempdir(), name))


def _make_empty(path: epath.Path, directory: StorePath) -> None:
    """Makes a staging folder, which is empty then; removes those of processes that were killed."""
    start = os.fspath(path).removesuffix(str(os.getpid()))
    for left in glob.glob(f"{glob.escape(start)}*"):
        pid = left.removeprefix(start)
        if not pid.isdecimal() or int(pid) == os.getpid() or not _is_running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be created: {error}. Steps are written there before they are uploaded to {directory}; set "
            "TMPDIR to a folder with room for this host's part of a step."
        ) from error


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


class _Uploads:
    """Uploads this host's files of a step from a local folder, chunks while others are still being written."""

    def __init__(self, staging: epath.Path, folder: StorePath) -> None:
        self._staging, self._folder = staging, folder
        self._threads = Threads(_UPLOADS, "meshfeed-upload")
        self._started: dict[tuple[str, int], Call[int]] = {}  # (path, time of change) → its upload

    def run(self, written: Callable[[], object]) -> None:
        """Uploads all files that exist once ``written`` has returned.

        Errors of uploads are raised after that: in ``written``, hosts wait for each other.
        """
        writer = Threads(1, "meshfeed-written")
        try:
            writing = writer.submit(written)
            while not writing.done():
                before = time.monotonic()
                self._start(lambda name: _CHUNK.fullmatch(name) is not None)
                # A walk over many files costs time that their writing needs.
                time.sleep(max(_LOOK_SECONDS, 5 * (time.monotonic() - before)))
            writing.result()
            # The sizes of files in a store take further requests, so they are recorded.
            write_files_part(self._staging / ARRAYS)
            self._start(lambda _: True)
            for call in self._started.values():
                call.result()
        finally:
            self._threads.shutdown(cancel_futures=True)
            writer.shutdown()

    def _start(self, chosen: Callable[[str], bool]) -> None:
        for parent, _, names in os.walk(self._staging):
            for path in (os.path.join(parent, name) for name in names if chosen(name)):
                key = path, os.stat(path).st_mtime_ns
                if key not in self._started:
                    target = self._folder / os.path.relpath(path, self._staging)
                    self._started[key] = self._threads.submit(target.upload, path)
