"""Saves and restores arrays and data position together, as one step."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import functools
import logging
import math
import operator
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from meshfeed._src.arrays.reshard import without_callers_settings
from meshfeed._src.base.coordination import forgotten_processes, process_count, process_index
from meshfeed._src.base.errors import (
    CheckpointError,
    Failure,
    MeshfeedError,
    SettingsError,
    StalledError,
    hides_own_frames,
)
from meshfeed._src.base.fork import NotCopied, Owner
from meshfeed._src.base.hooks import CannotResume, Resumable, Startable, find
from meshfeed._src.base.retry import call_with_retry
from meshfeed._src.base.settings import Retry, checked, flag, integer, optional
from meshfeed._src.base.store_path import StorePath, is_in_store
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.agreement import Agreement
from meshfeed._src.checkpoint.at_exit import OpenSaves
from meshfeed._src.checkpoint.directory import (
    as_directory,
    check_no_step,
    check_shared,
    check_writable,
    checkpoints_near,
    is_begun,
    opening,
    put_mark,
    remove_mark,
    remove_unfinished,
    set_aside,
    stamp_of,
    wait_until_begun,
)
from meshfeed._src.checkpoint.handlers import (
    ArraysHandler,
    ArraysRestore,
    ArraysSave,
    IteratorHandler,
    IteratorSave,
    check_feed,
)
from meshfeed._src.checkpoint.leaves import encode_tree
from meshfeed._src.checkpoint.manager_options import manager_options
from meshfeed._src.checkpoint.options import RestoreOptions, naming, short
from meshfeed._src.checkpoint.orbax_internals import count_operations, discard_errors, follow_job, operation_number
from meshfeed._src.checkpoint.restore import open_item
from meshfeed._src.checkpoint.saves import (
    CapturedState,
    HasState,
    OrbaxBarrier,
    SkippedStep,
    StepSave,
    check_same,
    given_state,
    number_of,
    wait_until_finished,
)
from meshfeed._src.checkpoint.step import (
    ARRAYS,
    ITERATOR,
    StepMetadata,
    describe_step,
    find_steps,
    look_at_step,
    newest_readable,
    read_step,
)
from meshfeed._src.checkpoint.store_manager import StoreManager
from meshfeed._src.checkpoint.stored import DamagedCheckpointError, StoredArrays, read_manifest
from meshfeed._src.checkpoint.writer import FolderWriter
from meshfeed._src.state import files as state_files

SAVE_ORDER = "The order is save(step, train_state, feed)."
RESTORE_ORDER = "The order is restore(train_state, feed, step)."
_log = logging.getLogger("meshfeed.checkpoint")
_BEHIND = (
    "step %d is not saved: %s has the newer step %d, and Orbax requires ascending steps. Remove the newer steps to "
    "continue from an older one."
)
_NOT_SAVED = (
    "step %d, which the interval skipped, is not saved in %s at the end: %s. Call save(step, train_state, feed, "
    "force=True) for the step that ends a run, or set save_last=False."
)
_ELSEWHERE = (
    "no checkpoint in %s, so training starts at step 0, but there are checkpoints in %s. If this run is to continue one of "
    "them, stop it and pass that folder."
)
_FEED_LEFT_OUT = (
    "step %d was restored without the feed, so the feed did not continue at its position, %d records; it is at %d records "
    "now. Pass it too: restore(train_state, feed)."
)
_CANNOT_RESUME = (
    "step %d: no run can continue from the position that is saved with it: %s A restore of this step must leave out the "
    "feed, and the data then begin again."
)
_CHANGED = (errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY)  # as nobody else makes or removes the files of a save
_OTHER_PROCESS = (
    ". Something else makes or removes files of this folder: another process that saves here, perhaps. If both belong to "
    "one job, call jax.distributed.initialize() in each before anything else; if not, give each job a folder of its own."
)
_IN_A_BARRIER = (
    ". If another host has ended, as its log and the logger meshfeed.agree show, restart the job: it resumes at the newest "
    "step."
)
_NOT_REMOVED = (
    "step %d is saved in %s, but an older step is not removed: %s. The next save tries again; a step that is left in part is "
    "passed over by restore."
)
_CLOSE_SECONDS = 300.0
_OPENING = Retry(initial_seconds=0.2, on=(FileNotFoundError,))
_GOODBYE_SECONDS = 1.0


@public("meshfeed.checkpoint")
class Checkpointer(NotCopied):
    """Saves a training state and a feed's position as one step, and restores both or neither.

    ::

        with Checkpointer(directory) as ckpt:
            step, train_state = ckpt.restore(train_state, feed)
            for batch in feed:
                train_state = train_step(train_state, batch)
                step += 1
                ckpt.save(step, train_state, feed)

    Every process of the job must create one with the same settings and call its methods in the same order. If the program
    ends without :meth:`close`, pending saves are still finished; if one fails, an ERROR of the logger
    ``meshfeed.checkpoint`` names the step.

    Args:
      directory: the checkpoint folder, the same on every host: a path, created if absent, or the URL of a folder in a
        store that fsspec knows (``gs://``, ``s3://``, …). A step is stored in ``<directory>/<step>/`` as the Orbax items
        ``arrays`` and ``iterator``.
      max_to_keep: number of newest steps to keep, by step number; None keeps all. The step just saved is kept as well,
        until the next save, if ``force`` saved an older one.
      save_interval_steps: :meth:`save` skips steps that are not on this interval, except the first into an empty folder.
      save_last: on close, save the last step that the interval skipped, so the end of a run is not lost; see
        :meth:`close`. Arrays of that step stay alive until then unless they are donated.
      restore: "once", "single_replica" or "every_host"; see :class:`RestoreOptions`, also for the next four.
      verify: check digests of everything that is restored.
      replica_axis: for "single_replica": the mesh axis along which one replica reads.
      primary_replica: index on that axis of the replica that reads.
      memory_limit_bytes: limit on a process's extra memory in bytes while restoring, beyond the result and one shard.
      timeout_seconds: how long hosts wait for each other while saving or restoring.
      array_options: keywords for :class:`ArrayHandler`: further fields of :class:`RestoreOptions`, and Orbax's own.
      orbax_options: further keywords for ``ocp.CheckpointManagerOptions``, except those that rename the folders of steps.
        For a URL other than ``gs://``: ``keep_period`` and ``save_on_steps``.

    Raises:
      SettingsError: a setting has an invalid value.
      CheckpointError: the folder cannot be created or listed, or its store does not answer or refuses the
        credentials; or the launcher (Slurm, MPI, Kubernetes, a TPU pod)
        started several processes but ``jax.distributed`` is not initialized, so all would save to one folder. For jobs
        that are meant to be independent, each with its own folder, set ``MESHFEED_INDEPENDENT_PROCESSES=1``.

    Examples:
      >>> import jax, meshfeed, numpy as np
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> feed = meshfeed.Feed({"x": np.arange(32)}, mesh, global_batch_size=4)
      >>> weights = {"w": jax.numpy.zeros(3)}
      >>> with meshfeed.checkpoint.Checkpointer("checkpoints", save_interval_steps=2) as checkpoints:
      ...     step, weights = checkpoints.restore(weights, feed)  # (0, weights): there is none yet
      ...     for step, batch in enumerate(feed, step + 1):
      ...         _ = checkpoints.save(step, weights, feed)
      >>> feed.reset()
      >>> with meshfeed.checkpoint.Checkpointer("checkpoints") as checkpoints:
      ...     checkpoints.restore(weights, feed)[0], feed.step
      (8, 8)
      >>> feed.close()
    """

    @hides_own_frames
    def __init__(
        self,
        directory: epath.PathLike,
        max_to_keep: int | None = 3,
        save_interval_steps: int = 100,
        restore: str = "once",
        verify: bool = True,
        replica_axis: str | int | None = None,
        primary_replica: int = 0,
        memory_limit_bytes: int | None = None,
        *,
        save_last: bool = True,
        timeout_seconds: float = 1800,
        array_options: dict[str, object] | None = None,
        orbax_options: dict[str, object] | None = None,
    ) -> None:
        max_to_keep = checked("max_to_keep", max_to_keep, optional(integer(1)), "a positive int or None")
        save_interval_steps = checked("save_interval_steps", save_interval_steps, integer(1), "a positive int")
        self._save_last = checked("save_last", save_last, flag, "True or False")
        options = RestoreOptions(
            restore, replica_axis, primary_replica, memory_limit_bytes, verify=verify, timeout_seconds=timeout_seconds
        )
        in_store = isinstance(directory, str | os.PathLike) and is_in_store(directory)
        with naming("array_options", array_options):
            self._arrays = ArraysHandler(options, array_handler=array_options, use_ocdbt=not in_store)
        self._barrier = OrbaxBarrier() if process_count() > 1 else None
        waits = ocp.AsyncOptions(timeout_secs=math.ceil(timeout_seconds), barrier_sync_fn=self._barrier)
        chosen = manager_options(
            orbax_options,
            max_to_keep=max_to_keep,
            in_store=in_store,
            save_interval_steps=save_interval_steps,
            async_options=waits,
        )
        if (forgotten := forgotten_processes()) is not None:
            raise CheckpointError(f"{directory}: every process would save into the same folder. {forgotten}")
        self._timeout_seconds = timeout_seconds
        with Agreement("starting a checkpointer", timeout_seconds) as agreement:
            self._directory = agreement.attempt(lambda: as_directory(directory))
            with opening(self._directory):
                check_no_step(self._directory)
                self._writer = FolderWriter(self._directory)
                handlers = {ARRAYS: self._arrays, ITERATOR: IteratorHandler()}
                if isinstance(self._directory, StorePath):
                    steps = agreement.publish(lambda: find_steps(self._directory))
                    self._manager = StoreManager(self._directory, handlers, chosen, steps, self._writer)
                    wait = self._manager.wait_until_finished
                else:
                    self._manager = _open_manager(self._directory, chosen, handlers)
                    wait = functools.partial(wait_until_finished, self._manager)
            # A random token per job and a counter make each save's id unique without communication per save.
            self._job_id = agreement.publish(lambda: secrets.token_hex(8))
        self._owner = Owner()
        self._saves = 0
        self._last: SkippedStep | None = None  # the newest step that the interval skipped since the last save
        self._open = OpenSaves(wait, self._writer.end, self._directory)
        self._damaged: dict[int, str] = {}  # step → its stamp on host 0
        self._warned = False
        self._without_feed: int | None = None  # the step that was restored last, if without a feed
        self._writes = False  # whether this job has saved
        self._saving: StepSave | None = None  # the newest save passed to Orbax
        self._torn: StepSave | None = None  # one that an interrupt left half begun; parts may still be written
        self._failed = False  # whether a save has failed since the last one
        self._closed = False

    @property
    def directory(self) -> epath.Path:
        """The checkpoint folder."""
        return self._directory

    @hides_own_frames
    def save(self, step: int, train_state: PyTree, feed: HasState | None = None, force: bool = False) -> bool:
        """Saves a step. Everything is captured before this returns and written in the background.

        Once it returns, arrays may be donated, numpy leaves overwritten, and the feed advanced. Background errors are
        raised by :meth:`wait` or the next ``save``. The newest step that the interval skips is saved by :meth:`close`.

        Args:
          step: the caller's step number, an int from 0; with gradient accumulation it differs from ``feed.step``.
          train_state: pytree of arrays, numpy values, numbers and text.
          feed: feed whose state is saved with the step; optional.
          force: save even if the interval skips this step, or a newer step exists.

        Returns:
          False if the interval skips the step, or a newer step exists.

        Raises:
          SettingsError: an argument has the wrong type, for example because the arguments are in the wrong order.
          CheckpointError: the step already exists, a leaf cannot be saved, the hosts save different steps or trees, their
            feeds are at different steps, the save before failed, another job has begun to save here, or the checkpointer
            is closed. With several hosts, the same on every host.
          StalledError: another host did not save within ``timeout_seconds``.
        """
        step = as_step(step, SAVE_ORDER)
        check_train_state(train_state, SAVE_ORDER)
        check_feed(feed, ("get_state",), SAVE_ORDER)
        self._check_open()
        if not self._writes and feed is not None and (one_way := find(feed, CannotResume)) is not None:
            _log.warning(_CANNOT_RESUME, step, one_way.cannot_resume)
        if self._open.wait_for_others():  # such as that of a notebook's cell which is run again
            self._manager.reload()
        due = force or self._due(step)
        if any(number >= step for number in self._damaged):  # with which Orbax takes no step for due
            self._prepare_to_write(step)
            due = force or self._due(step)
        elif due:
            self._prepare_to_write(step)
        self._open.register()
        if not due:
            latest = max(self._manager.all_steps(), default=-1)
            if self._save_last and latest < step:
                self._keep(SkippedStep(step, train_state, feed))
            if latest > step and not self._warned:
                self._warned = True
                _log.warning(_BEHIND, step, self._directory, latest)
            return False
        self._warn_of_position(feed)
        return self._write(step, train_state, feed)

    def _due(self, step: int) -> bool:
        # Orbax compares only with the step saved last, which is not the newest after a forced save of an older step.
        return step > max(self._manager.all_steps(), default=-1) and self._manager.should_save(step)

    def _keep(self, skipped: SkippedStep | None) -> None:
        """Remembers the step to save at the end, if any."""
        self._last, self._open.skipped = skipped, None if skipped is None else skipped.step

    def _write(self, step: int, train_state: PyTree, feed: HasState | None) -> bool:
        self._keep(None)
        if process_count() == 1:
            save, items = self._captured(step, train_state, feed)
        else:  # everything that may fail on one host only comes before Orbax's first barrier
            doing = f"saving step {step} in {self._directory}"
            with Agreement(doing, self._timeout_seconds, kind=f"saving a step{_beside(feed)}") as agreement:
                save, items = agreement.attempt(lambda: self._captured(step, train_state, feed))
                check_same(agreement, save.identity, items[ARRAYS].encoded)
                count_operations(max(agreement.collect(operation_number()).values()))
        self._saves += 1
        self._saving = save
        self._open.begin(step)
        if self._barrier is not None:
            self._barrier.points = save.points
        try:
            # Forced, because save() has checked the interval, and the last step of a run need not be on it.
            follow_job()
            with without_callers_settings():  # for Orbax's own transfers
                saved = bool(self._manager.save(step, args=ocp.args.Composite(**items), force=True))
        except BaseException as error:
            self._failed, self._torn = True, save
            if isinstance(error, MeshfeedError) or not isinstance(error, Exception) or process_count() == 1:
                raise
            text = f"{self._directory}: saving step {step} failed: {type(error).__name__}: {error}{_IN_A_BARRIER}"
            raise CheckpointError(text, step=step) from error
        failure = next(iter(save.failures), None)
        save.failures.clear()  # their tracebacks would keep the caller's train state alive
        if failure is not None and (process_count() == 1 or not isinstance(failure, Exception)):
            with contextlib.suppress(CheckpointError):
                self.wait()  # until Orbax has made the folder
            # Ctrl-C in a coroutine, of which asyncio.run knows nothing if it is caught there.
            if isinstance(failure, asyncio.CancelledError):
                raise KeyboardInterrupt from failure
            raise failure
        return saved

    def _captured(self, step: int, train_state: PyTree, feed: HasState | None) -> tuple[StepSave, dict[str, Any]]:
        """Returns a save and Orbax's arguments for it, with all that the caller may change once ``save`` has returned."""
        self.wait()  # Orbax would do so too, but raise the error of the save before as it is
        if self._failed:
            self._failed = False
            self._manager.reload()  # Orbax has forgotten the old steps that it was to remove after the failed save
            # Not agreed on: the other hosts may not have seen the failure. Another job's unfinished step is not removed.
            if process_index() == 0 and self._writer.replaced() is None:
                with contextlib.suppress(OSError, CheckpointError):
                    remove_unfinished(self._directory)
        if step in self._manager.all_steps():
            self._manager.reload()  # it may have been removed by hand since
        if step in self._manager.all_steps():
            raise CheckpointError(
                f"step {step} already exists in {self._directory}. Save under a different number, or remove it first.",
                step=step,
            )
        if process_index() == 0 and not isinstance(self._directory, StorePath):  # or the manager asks in the background
            self._writer.check(step)
            check_writable(self._directory)
        identity = {
            "id": f"{self._job_id}-{self._saves}",
            "step": step,
            "feed_step": number_of(feed, "step"),
            "position": number_of(feed, "position"),
            "parts": [ARRAYS] if feed is None else [ARRAYS, ITERATOR],
        }
        save = StepSave(identity, self._timeout_seconds)
        encoded = encode_tree(train_state, in_store=isinstance(self._directory, StorePath))
        items: dict[str, Any] = {ARRAYS: ArraysSave(train_state, step_save=save, encoded=encoded)}
        if feed is not None:
            items[ITERATOR] = IteratorSave(CapturedState.of(feed), step_save=save)
        return save, items

    @hides_own_frames
    def restore(
        self, abstract_or_concrete_state: PyTree, feed: Resumable | None = None, step: int | None = None
    ) -> tuple[int, PyTree]:
        """Restores the newest intact step, or the requested one, on any number of hosts and devices.

        Args:
          abstract_or_concrete_state: pytree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays with the wanted
            shapes, dtypes and shardings. None restores everything as it was saved.
          feed: feed to set to the saved position, in place, and to start (:meth:`meshfeed.Feed.start`), so that it reads
            ahead while the arrays are read; at its position before if this raises.
          step: the step number to restore; None restores the newest intact step.

        Returns:
          The step and the train state, or ``(0, abstract_or_concrete_state)`` if the folder has no steps.

        Raises:
          SettingsError: an argument has the wrong type, for example because the arguments are in the wrong order.
          CheckpointError: the requested step is absent or damaged; steps exist but none is intact; a leaf is not stored,
            or is stored with a different shape or a dtype that is not cast; or ``feed`` is given but the step was saved
            without one. The same on every host.
          StateMismatchError: the feed cannot resume from the saved position.
        """
        step = None if step is None else as_step(step, RESTORE_ORDER)
        check_feed(feed, ("get_state", "set_state"), RESTORE_ORDER)
        check_train_state(abstract_or_concrete_state, RESTORE_ORDER)
        self._check_open()
        self.wait()
        if self._open.wait_for_others():  # whose step is the newest
            self._manager.reload()
        doing = f"restoring from {self._directory}"
        which = "the newest step" if step is None else f"step {step}"
        with Agreement(doing, self._timeout_seconds, kind=f"restoring {which}{_beside(feed)}") as agreement:
            if step is None:
                return self._restore_newest(abstract_or_concrete_state, feed, agreement)
            # Host 0 checks the step for all, so all hosts raise the same error.
            identity = agreement.publish(lambda: read_step(self._directory, step).identity)
            return step, self._restore_step(identity, abstract_or_concrete_state, feed, agreement)

    def _restore_newest(self, wanted: PyTree, feed: Resumable | None, agreement: Agreement) -> tuple[int, PyTree]:
        reasons: dict[int, str] = {}
        while True:
            # Host 0 chooses the step for all, so hosts never restore different ones.
            identity, unreadable = agreement.publish(lambda: newest_readable(self._directory, reasons))
            for passed, reason in unreadable:
                self._pass_over(passed, reason, reasons)
            if identity is None:
                break
            try:
                return identity["step"], self._restore_step(identity, wanted, feed, agreement)
            except DamagedCheckpointError as error:
                self._pass_over(identity["step"], str(error), reasons)
        if not reasons:
            _log.info("no checkpoint in %s: starting at step 0", self._directory)
            if feed is not None:
                _start(feed)
            if process_index() == 0 and (near := checkpoints_near(self._directory)):
                _log.warning(_ELSEWHERE, self._directory, ", ".join(near))
            return 0, wanted
        listed = "".join(f"\n  step {number}: {reason}" for number, reason in reasons.items())
        raise CheckpointError(
            f"{self._directory}: none of its steps is intact. Move the folder away to start over.{listed}"
        )

    def _pass_over(self, step: int, reason: str, reasons: dict[int, str]) -> None:
        self._damaged[step] = stamp_of(self._directory, step) if process_index() == 0 else ""
        _log.warning("step %d in %s is passed over: %s", step, self._directory, reason)
        reasons[step] = reason

    def _restore_step(
        self, identity: Mapping[str, JsonValue], wanted: PyTree, feed: Resumable | None, agreement: Agreement
    ) -> PyTree:
        step = identity["step"]
        folder = self._directory / str(step)
        try:
            position, arrays = self._open_step(identity, feed is not None, agreement)
            # The arrays are not restored through Orbax's manager, whose barrier makes all hosts wait if one fails.
            with contextlib.ExitStack() as undo:
                if feed is not None:
                    undo.callback(_continue(feed, position, agreement, folder))
                    _start(feed)  # it reads ahead while the arrays are read
                state = self._arrays.restore_with(agreement, arrays, ArraysRestore(wanted))
                undo.pop_all()
        except CheckpointError as error:
            error.step = step
            raise
        self._keep(None)  # a step skipped before the restore is no longer the last one
        self._without_feed = step if feed is None else None
        return state

    def _open_step(
        self, identity: Mapping[str, JsonValue], with_feed: bool, agreement: Agreement
    ) -> tuple[dict[str, JsonValue], StoredArrays]:
        """Returns the position and the arrays of a step that host 0 has found intact.

        Raises:
          DamagedCheckpointError: host 0 does not find it intact any more: another job removes its older steps.
        """
        step, folder = identity["step"], self._directory / str(identity["step"])

        def opened() -> tuple[dict[str, JsonValue], StoredArrays]:
            position = _position(folder, identity) if with_feed else {}
            arrays = open_item(folder / ARRAYS, self._arrays.restore_options)
            if arrays.manifest.identity != identity:  # without a manifest, nothing would be compared with digests
                raise CheckpointError(f"{folder}: the arrays are not those of the save {identity['id']} any more.")
            return position, arrays

        try:
            return agreement.attempt(opened)
        except CheckpointError as error:  # on all hosts
            found, problem = agreement.publish(lambda: look_at_step(self._directory, step))
            if found is None:
                raise DamagedCheckpointError(problem, step=step) from error
            raise

    def _warn_of_position(self, feed: HasState | None) -> None:
        """Warns once if a feed is saved before the position of a step that was restored without one."""
        if self._without_feed is None or feed is None:
            return
        step, self._without_feed = self._without_feed, None
        now = number_of(feed, "position")
        if now is None or process_index() > 0:
            return
        with contextlib.suppress(CheckpointError, OSError):  # only for a warning; the step may have been removed
            manifest = read_manifest(self._directory / str(step) / ARRAYS)
            position = None if manifest is None or manifest.identity is None else manifest.identity.get("position")
            if position is not None and now < position:
                _log.warning(_FEED_LEFT_OUT, step, position, now)

    @hides_own_frames
    def wait(self) -> None:
        """Waits until all saves are committed, and raises any error from the background.

        Raises:
          CheckpointError: a save failed; the previous step remains the newest.
        """
        try:
            if self._torn is not None:
                if self._torn.started:
                    wait_until_begun(self._directory, self._torn.step)
                self._settle(self._torn)
                self._torn = None
            self._open.result()
            self._end(self._saving)
        except Exception as error:
            self._failed, self._open.saving = True, None
            if self._saving is not None:
                self._settle(self._saving)
                self._saving.end()
            with contextlib.suppress(Exception):
                self._manager.reload()  # Orbax has forgotten this step, and the older ones that it was to remove
            first = error  # Orbax raises errors of its barriers while it handles another
            while first.__cause__ is None and isinstance(first.__context__, Exception):
                first = first.__context__
            if isinstance(first.__cause__, StalledError):  # Orbax raises a TimeoutError of its own, which names no host
                first = first.__cause__
            step = None if self._saving is None else self._saving.step
            if step is not None and self._is_saved(step, first):
                _log.warning(_NOT_REMOVED, step, self._directory, first)
                return self._end(self._saving)
            named = f"{type(first).__name__}: "
            if process_count() > 1 and not isinstance(first, MeshfeedError):
                named = f"host {process_index()}: {named}"  # as the other hosts have it
            elif isinstance(first, MeshfeedError | OSError | ValueError):
                named = ""
            text = f"{self._directory}: saving step {step} failed: {named}{first}"
            # Not found, in the words of TensorStore.
            changed = getattr(first, "errno", None) in _CHANGED or str(first).startswith("NOT_FOUND:")
            if process_count() == 1 and changed:
                text += _OTHER_PROCESS
            if not isinstance(self._directory, StorePath):  # or the manager has asked
                text = self._writer.replaced() or text
            # Orbax keeps the error until the next save, and its traceback would keep the caller's train state alive.
            raise CheckpointError(text, step=step) from error.with_traceback(None)

    def _end(self, save: StepSave | None) -> None:
        self._saving = self._open.saving = None
        if save is not None:
            save.end()

    def _is_saved(self, step: int, error: Exception) -> bool:
        """Whether an error came after the rename that commits a step: Orbax's primary host then removes older steps."""
        removing = isinstance(error, OSError) and not isinstance(error, MeshfeedError | TimeoutError)
        return removing and process_index() == 0 and "://" not in str(self._directory) and step in self.steps()

    def _settle(self, save: StepSave) -> None:
        """Waits for the parts of a save that failed. Orbax stops at the first error, but the others must not write later.

        The next save removes the folder. Without one, they wait for it until their own timeout, and write nothing.
        """
        if is_begun(self._directory, save.step):
            for future in save.started:
                with contextlib.suppress(Exception):
                    future.result(self._timeout_seconds)
            discard_errors(self._manager)

    def steps(self) -> list[int]:
        """Returns the numbers of the committed steps, ascending, including damaged ones."""
        return find_steps(self._directory)

    @hides_own_frames
    def metadata(self, step: int | None = None) -> StepMetadata:
        """Describes a step without reading its arrays: position, and shapes, dtypes and shardings of the train state.

        Args:
          step: the step number; None means the newest.

        Raises:
          CheckpointError: the step is absent or incomplete.
        """
        if step is None:
            steps = self.steps()
            if not steps:
                raise CheckpointError(f"{self._directory}: contains no steps.")
            step = steps[-1]
        return describe_step(read_step(self._directory, as_step(step, "It is metadata(step).")))

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self._directory}: this Checkpointer is closed. Create a new one.")
        self._owner.check("this Checkpointer")

    def _prepare_to_write(self, step: int) -> None:
        """Clears what would keep a step from being saved, once this job saves: a job that only reads must not write."""
        # Orbax would skip the steps up to a damaged one, or refuse to write them.
        damaged = sorted(number for number in self._damaged if number >= step)
        if self._writes and not damaged:
            return

        def prepare() -> str | None:
            if not self._writes:
                self._writer.begin()
                remove_unfinished(self._directory)
            for number in damaged:
                set_aside(self._directory, number, self._damaged[number])
            return put_mark(self._directory) if process_count() > 1 and not self._writes else None

        with Agreement("preparing the folder to save", self._timeout_seconds) as agreement:
            mark = agreement.publish(prepare)
            try:
                agreement.attempt(lambda: check_shared(self._directory, mark, self._timeout_seconds))
            finally:
                if process_index() == 0:
                    remove_mark(self._directory, mark)
        self._writes = True
        if damaged:
            for number in damaged:
                del self._damaged[number]
            self._manager.reload()  # Orbax caches the list of steps

    @hides_own_frames
    def close(self) -> None:
        """Saves the last step if the interval skipped it, waits for pending saves, and releases threads.

        Leaving the ``with`` block does the same, except that after an exception the skipped step is not saved. That
        step also cannot be saved if its arrays were donated, its numpy leaves changed, or its feed advanced; every host
        then logs a WARNING on the logger ``meshfeed.checkpoint``. A second call, or a call in a forked child, does
        nothing.

        Raises:
          CheckpointError: a save failed; the previous step remains the newest.
          StalledError: another host did not close its checkpointer.
        """
        if self._closed or not self._owner.is_here:
            return
        try:
            self._save_skipped()
        finally:
            self._closed = True
            try:
                self.wait()
            finally:
                self._open.remove()
                self._writer.end()
                self._manager.close()

    def _save_skipped(self) -> None:
        last = self._last
        self._keep(None)
        if last is None:
            return
        failed: Exception | None = None
        try:
            self.wait()  # an earlier save that failed does not keep this step from being saved
        except Exception as error:
            failed = error
        # Also if this one has not saved yet: it would take an unfinished step of another one for rubbish, and remove it.
        if self._open.wait_for_others():
            self._manager.reload()
            if last.step <= max(self._manager.all_steps(), default=-1):
                return
        # Saving is collective, so all hosts save or none does.
        with self._leaving(min(_CLOSE_SECONDS, self._timeout_seconds)) as agreement:
            found = agreement.collect(last.problem())
        problems = [f"host {host}: {problem}" for host, problem in sorted(found.items()) if problem is not None]
        if problems:  # only a warning: the program has done its work, and may still have to export a model
            _log.warning(_NOT_SAVED, last.step, self._directory, problems[0])
        else:
            self._prepare_to_write(last.step)
            self._write(last.step, last.train_state, last.feed)
        if failed is not None:
            raise failed

    def _leaving(self, timeout_seconds: float) -> Agreement:
        doing = f"saving the last step in {self._directory}"
        return Agreement(doing, timeout_seconds, kind="leaving its Checkpointer")

    def _abandon_skipped(self, reason: str) -> None:
        """Drops the skipped step and sends the reason to hosts that leave normally, because they wait for this one."""
        last = self._last
        self._keep(None)
        if last is not None and process_count() > 1:
            try:
                with self._leaving(_GOODBYE_SECONDS) as agreement:
                    agreement.partial = True  # or the reducer would tell hosts that come later that they are too late
                    agreement.collect(reason)
            except MeshfeedError:
                pass  # the others failed too, or they wait in a collective that this host has left

    def __enter__(self) -> Self:
        return self

    @hides_own_frames
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception, the training state and the feed may not belong together.
        if kind is not None and not self._closed and self._owner.is_here:
            self._abandon_skipped(f"the with block of the Checkpointer raised {kind.__name__}")
        self.close()


def _open_manager(
    directory: epath.Path, options: ocp.CheckpointManagerOptions, handlers: dict[str, Any]
) -> ocp.CheckpointManager:
    """Opens a folder with Orbax; again if another job removes a step while Orbax looks at it."""
    attempt = functools.partial(ocp.CheckpointManager, directory, options=options, item_handlers=handlers)
    if process_count() > 1:  # a host alone must not repeat what all do together
        return attempt()
    return call_with_retry(attempt, _OPENING, doing=f"opening {directory}")


def _position(folder: epath.Path, identity: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    if ITERATOR not in identity.get("parts", ()) and not (folder / ITERATOR).exists():
        raise CheckpointError(
            f"step {folder.name} in {folder.parent} was saved without a feed, so it has no position to resume from. "
            "Restore it without a feed, and set the feed's position with feed.set_state."
        )
    document = state_files.read_document(folder / ITERATOR)
    if document["identity"] != identity:
        raise CheckpointError(f"{folder}: the position is not that of the save {identity['id']} any more.")
    return given_state(document["state"])


def _beside(feed: object) -> str:
    """Ends the name of a call that all hosts must make alike: without a feed, a host would not exchange its state."""
    return "" if feed is None else " with a feed"


def _start(feed: Resumable) -> None:
    """Starts the feed if it can be started."""
    startable = find(feed, Startable)
    if startable is not None:
        startable.start()


def _continue(
    feed: Resumable, state: dict[str, JsonValue], agreement: Agreement, folder: epath.Path
) -> Callable[[], None]:
    """Sets the feed's state on all hosts or on none; returns a function that sets it back."""
    before = copy.deepcopy(feed.get_state())  # an iterator may give its own, which set_state changes
    try:
        feed.set_state(state)
    except Exception as error:
        error.add_note(
            f"in restoring {folder}: a new run needs a folder of its own; without a feed, the rest is restored"
        )
        if None in agreement.collect(Failure.of(error).to_json()).values():
            # The others undo it below, which begins their feeds anew. This one must meet them there.
            with contextlib.suppress(Exception):  # the reason is that of the state
                feed.set_state(before)
        raise
    reports = agreement.collect(None)
    failed = [host for host, report in sorted(reports.items()) if report is not None]
    if failed:  # on another host: undo it here
        feed.set_state(before)
        reason = str(Failure.from_json(reports[failed[0]])).rstrip(".")
        text = f"step {folder.name}: host {failed[0]} cannot resume the feed: {reason}. The feeds of all hosts are unchanged."
        raise CheckpointError(text)
    return lambda: feed.set_state(before)


def as_step(step: object, order: str) -> int:
    """Returns a step number as an int; also accepts numpy integers and 0-d integer arrays, of at least 0."""
    try:  # a bool is an int, but as a step it is a mistake
        number = -1 if isinstance(step, bool) else operator.index(step)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = -1
    if number < 0:
        raise SettingsError(f"step={short(step)}; it takes an int of at least 0. {order}", setting="step")
    return number


def check_train_state(train_state: PyTree, order: str) -> None:
    """Rejects a feed passed in place of the train state."""
    # A registered pytree may have a get_state method of its own; only an opaque leaf is taken for a feed.
    if callable(getattr(train_state, "get_state", None)) and jax.tree_util.all_leaves([train_state]):
        raise SettingsError(
            f"train_state={short(train_state)}: is a feed, expected a pytree of arrays. {order}", setting="train_state"
        )
