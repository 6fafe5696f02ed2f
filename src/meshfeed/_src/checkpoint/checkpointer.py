"""Saves and restores arrays and data position together, as one step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import operator
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from meshfeed._src.base.coordination import forgotten_processes, format_differences, process_count, process_index
from meshfeed._src.base.errors import (
    CheckpointError,
    Failure,
    MeshfeedError,
    SettingsError,
    hides_own_frames,
    suggests_keywords,
)
from meshfeed._src.base.fork import Owner
from meshfeed._src.base.hooks import Resumable
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.at_exit import OpenSaves
from meshfeed._src.checkpoint.collectives import Agreement
from meshfeed._src.checkpoint.handlers import (
    ArraysHandler,
    ArraysSave,
    HasState,
    IteratorHandler,
    IteratorSave,
    check_feed,
)
from meshfeed._src.checkpoint.leaves import EncodedTree, describe_leaves, encode_tree
from meshfeed._src.checkpoint.restore import is_number, require, restore_tree, short
from meshfeed._src.checkpoint.retention import retention_options
from meshfeed._src.checkpoint.step import ARRAYS, ITERATOR, StepMetadata, describe_step, find_steps, read_step
from meshfeed._src.checkpoint.stored import DamagedCheckpointError, digest
from meshfeed._src.state import files as state_files
from meshfeed._src.state.state import digest_of


def _number_of(feed: HasState | None, name: str) -> int | None:
    """Returns an attribute of a feed as an int, or None if the feed is None or has no such number."""
    value = getattr(feed, name, None)
    return None if value is None else int(value)


def _feed_marker(feed: HasState | None) -> JsonValue:
    """Returns a value that changes when a feed delivers a batch: its counters, which are cheap, or else its state."""
    if feed is None:
        return None
    numbers = (_number_of(feed, "step"), _number_of(feed, "position"))
    return feed.get_state() if numbers == (None, None) else numbers


class SkippedStep:
    """A training state and a feed at one step.

    Nothing is copied, because a copy at every step would need memory for a second train state. So :meth:`problem` checks
    for later changes.
    """

    def __init__(self, step: int, train_state: PyTree, feed: HasState | None) -> None:
        self.step = step
        self.feed = feed
        self._leaves, self._structure = jax.tree_util.tree_flatten(train_state)
        self._host_digests = self._digests()
        self._feed_marker = _feed_marker(feed)

    @property
    def train_state(self) -> PyTree:
        """The tree as it was passed."""
        return jax.tree_util.tree_unflatten(self._structure, self._leaves)

    def _digests(self) -> list[str]:
        # Numpy arrays are often written in place; a digest costs less than a copy.
        return [digest(x) for x in self._leaves if isinstance(x, np.ndarray) and not x.dtype.hasobject]

    def problem(self) -> str | None:
        """Returns why the step can no longer be saved, or None if it can."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.train_state):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                return f"leaf {jax.tree_util.keystr(path)} was donated or deleted since"
        if self._digests() != self._host_digests:
            return "a numpy leaf was changed since"
        if _feed_marker(self.feed) != self._feed_marker:
            return "the feed has moved on since"
        return None


class CapturedState:
    """The state of a feed at the time of a save.

    Args:
      state: the result of the feed's ``get_state``.
    """

    def __init__(self, state: dict[str, JsonValue]) -> None:
        self._state = state

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state."""
        return self._state


_DESCRIBED_LEAVES = 10_000


def _check_same(agreement: Agreement, step: int, encoded: EncodedTree) -> None:
    """Raises on every host if hosts save different steps or trees."""
    own = describe_leaves(encoded.tree)
    found = agreement.collect([step, len(own), digest_of(own)])
    steps = {host: str(number) for host, (number, _, _) in found.items()}
    if (differing := format_differences(steps)) is not None:
        raise CheckpointError(f"hosts save different steps at the same time: {differing}. Call save in the same order.")
    if len({digest for _, _, digest in found.values()}) == 1:
        return
    # Only now and only so many, because the description of a large tree is long.
    first = agreement.publish(lambda: own[:_DESCRIBED_LEAVES])
    differences = sorted({*map(tuple, first)} ^ {*map(tuple, own[:_DESCRIBED_LEAVES])})
    reports = agreement.collect(": ".join(differences[0]) if differences else None)
    different = [(host, leaf) for host, leaf in sorted(reports.items()) if leaf is not None]
    host, leaf = different[0] if different else ("?", f"after the first {_DESCRIBED_LEAVES:,}")
    raise CheckpointError(
        f"step {step}: host {host} saves a different tree from host 0; the first difference is leaf {leaf}. Pass the "
        "same train_state on every host.",
        step=step,
    )


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
_UNFINISHED = ".orbax-checkpoint-tmp"
_CLOSE_SECONDS = 300.0
_GOODBYE_SECONDS = 1.0


@public("meshfeed.checkpoint")
class Checkpointer:
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
      directory: the checkpoint folder, a path or ``gs://…``, the same on every host; created if absent. A step is
        stored in ``<directory>/<step>/`` as the Orbax items ``arrays`` and ``iterator``.
      max_to_keep: number of newest steps to keep, by step number; None keeps all. The step just saved is kept as well,
        until the next save, if ``force`` saved an older one.
      save_interval_steps: :meth:`save` skips steps that are not on this interval.
      save_last: on close, save the last step that the interval skipped, so the end of a run is not lost; see
        :meth:`close`. Arrays of that step stay alive until then unless they are donated.
      restore: "once": nearly every stored byte is read by one host, then sent over the accelerator network;
        "single_replica": the hosts of one replica read, then send; "every_host": each host reads what its devices hold.
      verify: check digests of everything that is restored.
      replica_axis: for "single_replica": name or index of a mesh axis. None chooses the axis that requires the fewest
        bytes to be read.
      primary_replica: index on that axis of the replica that reads.
      memory_limit_bytes: limit on a process's extra memory in bytes while restoring, beyond the result and one shard.
      timeout_seconds: how long hosts wait for each other while saving or restoring.
      array_options: keywords for Orbax's array handler, see :class:`ArraysHandler`.
      orbax_options: further keywords for ``ocp.CheckpointManagerOptions``.

    Raises:
      SettingsError: a setting has an invalid value.
      CheckpointError: the folder cannot be created or listed; or the launcher (Slurm, MPI, Kubernetes, a TPU pod)
        started several processes but ``jax.distributed`` is not initialized, so all would save to one folder. For jobs
        that are meant to be independent, each with its own folder, set ``MESHFEED_INDEPENDENT_PROCESSES=1``.
    """

    @hides_own_frames
    @suggests_keywords
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
        for name, count in (("save_interval_steps", save_interval_steps), ("max_to_keep", max_to_keep)):
            proper = is_number(count) and count >= 1
            require(proper or (name == "max_to_keep" and count is None), name, count, "a positive int")
        for name, flag in (("verify", verify), ("save_last", save_last)):
            require(isinstance(flag, bool), name, flag, "True or False")
        positive = is_number(timeout_seconds, int | float) and math.isfinite(timeout_seconds) and timeout_seconds > 0
        require(positive, "timeout_seconds", timeout_seconds, "a positive number of seconds")
        with naming("array_options", array_options):
            self._arrays = ArraysHandler(
                restore, replica_axis, primary_replica, memory_limit_bytes, verify=verify, array_handler=array_options
            )
        self._options = dataclasses.replace(self._arrays.restore_options, timeout_seconds=timeout_seconds)
        self._arrays.restore_options = self._options
        with naming("orbax_options", orbax_options):
            waits = ocp.AsyncOptions(timeout_secs=math.ceil(timeout_seconds))
            settings = {"save_interval_steps": save_interval_steps, "async_options": waits, **(orbax_options or {})}
            options = ocp.CheckpointManagerOptions(**retention_options(max_to_keep, settings))
        if (forgotten := forgotten_processes()) is not None:
            raise CheckpointError(f"{directory}: every process would save into the same folder. {forgotten}")
        self._iterator = IteratorHandler()
        self._iterator.timeout_seconds = timeout_seconds
        with Agreement("starting a checkpointer", timeout_seconds) as agreement:
            self._directory = agreement.attempt(lambda: as_directory(directory))
            with opening(self._directory):
                _check_no_step(self._directory)
                self._manager = ocp.CheckpointManager(
                    self._directory, options=options, item_handlers={ARRAYS: self._arrays, ITERATOR: self._iterator}
                )
            # A random token per job and a counter make each save's id unique without communication per save.
            self._job_id = agreement.publish(lambda: secrets.token_hex(8))
        self._owner = Owner()
        self._saves = 0
        self._save_last = save_last
        self._last: SkippedStep | None = None  # the newest step that the interval skipped since the last save
        self._open = OpenSaves(self._manager, self._directory)
        self._damaged: set[int] = set()
        self._warned = False
        self._writes = False  # whether this job has saved
        self._saving: int | None = None  # the newest step passed to Orbax
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
          CheckpointError: the step already exists, a leaf cannot be saved, the hosts save different steps or trees, the
            save before failed, or the checkpointer is closed. With several hosts, the same on every host.
          StalledError: another host did not save within ``timeout_seconds``.
        """
        step = as_step(step, SAVE_ORDER)
        check_train_state(train_state, SAVE_ORDER)
        check_feed(feed, ("get_state",), SAVE_ORDER)
        self._check_open()
        self._begin_to_write()
        self._set_damaged_aside(step)
        self._open.register()
        if not force and not self._due(step):
            latest = max(self._manager.all_steps(), default=-1)
            if self._save_last and latest < step:
                self._last = SkippedStep(step, train_state, feed)
                self._open.skipped = step
            if latest > step and not self._warned:
                self._warned = True
                _log.warning(_BEHIND, step, self._directory, latest)
            return False
        return self._write(step, train_state, feed)

    def _due(self, step: int) -> bool:
        # Orbax compares only with the step saved last, which is not the newest after a forced save of an older step.
        return step > max(self._manager.all_steps(), default=-1) and self._manager.should_save(step)

    def _write(self, step: int, train_state: PyTree, feed: HasState | None) -> bool:
        self._last = self._open.skipped = None
        if process_count() == 1:
            items = self._captured(step, train_state, feed)
        else:  # everything that may fail on one host only comes before Orbax's first barrier
            with Agreement(f"saving step {step} in {self._directory}", self._options.timeout_seconds) as agreement:
                items = agreement.attempt(lambda: self._captured(step, train_state, feed))
                _check_same(agreement, step, items[ARRAYS].encoded)
        self._saves += 1
        self._saving = self._open.saving = step
        try:
            # Forced, because save() has checked the interval, and the last step of a run need not be on it.
            saved = bool(self._manager.save(step, args=ocp.args.Composite(**items), force=True))
        except BaseException:
            self._failed = True
            raise
        failure, self._arrays.failure = self._arrays.failure, None
        if failure is not None and (process_count() == 1 or not isinstance(failure, Exception)):
            with contextlib.suppress(CheckpointError):
                self.wait()  # until Orbax has made the folder
            raise failure
        return saved

    def _captured(self, step: int, train_state: PyTree, feed: HasState | None) -> dict[str, Any]:
        """Returns the arguments for Orbax, with everything that the caller may change once ``save`` has returned."""
        self.wait()  # Orbax would do so too, but raise the error of the save before as it is
        if self._failed:
            self._failed = False
            self._manager.reload()  # Orbax has forgotten the old steps that it was to remove after the failed save
            if process_index() == 0:  # not agreed on: the other hosts may not have seen the failure
                with contextlib.suppress(OSError):
                    self._remove_unfinished()
        if step in self._manager.all_steps():
            raise CheckpointError(
                f"step {step} already exists in {self._directory}. Save under a different number, or remove it first.",
                step=step,
            )
        identity = {
            "id": f"{self._job_id}-{self._saves}",
            "step": step,
            "feed_step": _number_of(feed, "step"),
            "position": _number_of(feed, "position"),
            "parts": [ARRAYS] if feed is None else [ARRAYS, ITERATOR],
        }
        items: dict[str, Any] = {ARRAYS: ArraysSave(train_state, identity=identity, encoded=encode_tree(train_state))}
        if feed is not None:
            items[ITERATOR] = IteratorSave(CapturedState(feed.get_state()), identity=identity)
        return items

    @hides_own_frames
    def restore(
        self, abstract_or_concrete_state: PyTree, feed: Resumable | None = None, step: int | None = None
    ) -> tuple[int, PyTree]:
        """Restores the newest intact step, or the requested one, on any number of hosts and devices.

        Args:
          abstract_or_concrete_state: pytree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays with the wanted
            shapes, dtypes and shardings. None restores everything as it was saved.
          feed: feed to set to the saved position, in place; unchanged if this raises.
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
        with Agreement(f"restoring from {self._directory}", self._options.timeout_seconds) as agreement:
            if step is None:
                return self._restore_newest(abstract_or_concrete_state, feed, agreement)
            # Host 0 checks the step for all, so all hosts raise the same error.
            agreement.publish(lambda: bool(read_step(self._directory, step)))
            return step, self._restore_step(step, abstract_or_concrete_state, feed, agreement)

    def _restore_newest(self, wanted: PyTree, feed: Resumable | None, agreement: Agreement) -> tuple[int, PyTree]:
        reasons: dict[int, str] = {}
        while True:
            # Host 0 chooses the step for all, so hosts never restore different ones.
            number, unreadable = agreement.publish(lambda: self._newest_readable(reasons))
            for passed, reason in unreadable:
                self._pass_over(passed, reason, reasons)
            if number is None:
                break
            try:
                return number, self._restore_step(number, wanted, feed, agreement)
            except DamagedCheckpointError as error:
                self._pass_over(number, str(error), reasons)
        if not reasons:
            _log.info("%s has no steps, so nothing is restored", self._directory)
            return 0, wanted
        listed = "".join(f"\n  step {number}: {reason}" for number, reason in reasons.items())
        raise CheckpointError(
            f"{self._directory}: none of its steps is intact. Move the folder away to start over.{listed}"
        )

    def _newest_readable(self, excluded: Collection[int]) -> JsonValue:
        """Returns the newest step that can be read, or None, and the newer steps that cannot, each with the reason."""
        unreadable: list[list[int | str]] = []
        for step in sorted(set(find_steps(self._directory)) - set(excluded), reverse=True):
            problem = self._problem(step)
            if problem is None:
                return [step, unreadable]
            unreadable.append([step, problem])
        return [None, unreadable]

    def _pass_over(self, step: int, reason: str, reasons: dict[int, str]) -> None:
        self._damaged.add(step)
        _log.warning("step %d in %s is passed over: %s", step, self._directory, reason)
        reasons[step] = reason

    def _problem(self, step: int) -> str | None:
        try:
            read_step(self._directory, step)
        except CheckpointError as error:
            return str(error)
        return None

    def _restore_step(self, step: int, wanted: PyTree, feed: Resumable | None, agreement: Agreement) -> PyTree:
        folder = self._directory / str(step)
        try:
            # Read the feed's state first and set it last, so a failed restore leaves the feed unchanged. The arrays are not
            # restored through Orbax's manager, whose barrier makes all hosts wait if one fails.
            position = None if feed is None else agreement.attempt(lambda: _position(folder))
            state = restore_tree(folder / ARRAYS, wanted, self._options, agreement)
            if feed is not None and position is not None:
                _continue(feed, position, agreement, step)
        except CheckpointError as error:
            error.step = step
            raise
        self._last = self._open.skipped = None  # a step skipped before the restore is no longer the last one
        return state

    @hides_own_frames
    def wait(self) -> None:
        """Waits until all saves are committed, and raises any error from the background.

        Raises:
          CheckpointError: a save failed; the previous step remains the newest.
        """
        try:
            self._manager.wait_until_finished()
            self._open.saving = None
        except Exception as error:
            self._failed, self._open.saving = True, None
            # Orbax stops at the first error. The other parts must not write into the folder of the next save.
            for future in (*self._arrays.started, *self._iterator.started):
                with contextlib.suppress(Exception):
                    future.result(self._options.timeout_seconds)
            first = error  # Orbax raises errors of its barriers while it handles another
            while first.__cause__ is None and isinstance(first.__context__, Exception):
                first = first.__context__
            text = f"{self._directory}: saving step {self._saving} failed: {first}"
            # Orbax keeps the error until the next save, and its traceback would keep the caller's train state alive.
            raise CheckpointError(text, step=self._saving) from error.with_traceback(None)

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

    def _begin_to_write(self) -> None:
        # Leftovers of a killed save prevent saving the same step again. Remove them only once this job saves: a job that
        # only reads, such as an evaluation, must not remove files that a training job is still writing.
        if self._writes:
            return

        with Agreement("removing unfinished steps", self._options.timeout_seconds) as agreement:
            agreement.publish(self._remove_unfinished)
        self._writes = True

    def _remove_unfinished(self) -> None:
        if not self._directory.exists():  # an object store has no folder before its first file
            return
        for path in self._directory.iterdir():
            if _UNFINISHED in path.name and path.is_dir():
                path.rmtree()
                _log.info("removed the unfinished save %s", path)

    def _set_damaged_aside(self, step: int) -> None:
        # Damaged steps occupy future step numbers: Orbax would skip those steps or refuse to write them. They are renamed
        # and not deleted, and only by a job that saves: a job that only reads must not write.
        newer = sorted(number for number in self._damaged if number >= step)
        if not newer:
            return

        def rename() -> list[int]:
            for number in newer:
                path = self._directory / str(number)
                if path.exists():
                    aside = self._directory / f"{number}.damaged-{secrets.token_hex(3)}"
                    path.rename(aside)
                    _log.warning("the damaged step %d is renamed to %s", number, aside)
            return newer

        with Agreement("setting damaged steps aside", self._options.timeout_seconds) as agreement:
            agreement.publish(rename)
        self._damaged.difference_update(newer)
        # Orbax caches the list of steps.
        self._manager.reload()

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
                self._manager.close()

    def _save_skipped(self) -> None:
        last, self._last = self._last, None
        self._open.skipped = None
        if last is None:
            return
        # Saving is collective, so all hosts save or none does.
        with self._leaving(min(_CLOSE_SECONDS, self._options.timeout_seconds)) as agreement:
            found = agreement.collect(last.problem())
        problems = [f"host {host}: {problem}" for host, problem in sorted(found.items()) if problem is not None]
        if problems:  # only a warning: the program has done its work, and may still have to export a model
            _log.warning(_NOT_SAVED, last.step, self._directory, problems[0])
        else:
            self._write(last.step, last.train_state, last.feed)

    def _leaving(self, timeout_seconds: float) -> Agreement:
        return Agreement(f"saving the last step in {self._directory}", timeout_seconds)

    def _abandon_skipped(self, reason: str) -> None:
        """Drops the skipped step and sends the reason to hosts that leave normally, because they wait for this one."""
        last, self._last = self._last, None
        self._open.skipped = None
        if last is not None and process_count() > 1:
            try:
                with self._leaving(_GOODBYE_SECONDS) as agreement:
                    agreement.collect(reason)
            except MeshfeedError:
                pass  # the others failed too, or they wait in a collective that this host has left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception, the training state and the feed may not belong together.
        if kind is not None and not self._closed and self._owner.is_here:
            self._abandon_skipped(f"the with block of the Checkpointer raised {kind.__name__}")
        self.close()


def _position(folder: epath.Path) -> dict[str, JsonValue]:
    if not (folder / ITERATOR).exists():
        raise CheckpointError(
            f"step {folder.name} in {folder.parent} was saved without a feed, so it has no position to resume from. "
            "Restore it without a feed, and set the feed's position with feed.set_state."
        )
    return state_files.read_state(folder / ITERATOR)


def _continue(feed: Resumable, state: dict[str, JsonValue], agreement: Agreement, step: int) -> None:
    """Sets the feed's state on all hosts or on none."""
    before = feed.get_state()
    try:
        feed.set_state(state)
    except Exception as error:
        agreement.collect(Failure.of(error).to_json())
        raise
    reports = agreement.collect(None)
    failed = [host for host, report in sorted(reports.items()) if report is not None]
    if failed:  # on another host: undo it here
        feed.set_state(before)
        reason = Failure.from_json(reports[failed[0]])
        text = f"step {step}: host {failed[0]} cannot resume the feed: {reason}. The feeds of all hosts are unchanged."
        raise CheckpointError(text)


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


@contextlib.contextmanager
def naming(setting: str, keywords: object) -> Iterator[None]:
    """Turns the TypeError with which Orbax rejects its keywords into a SettingsError that names the setting."""
    require(keywords is None or isinstance(keywords, Mapping), setting, keywords, "a dict of keywords, or None")
    try:
        yield
    except TypeError as error:
        raise SettingsError(
            f"{setting}: {error}. Its keywords are passed to Orbax unchanged.", setting=setting
        ) from error


def as_directory(directory: epath.PathLike) -> epath.Path:
    """Returns the absolute path of the checkpoint folder.

    Raises:
      SettingsError: it is not a path, it is a file or below one, it is a URL that lost a slash, or Orbax cannot
        write to that kind of URL.
    """
    text, remedy = str(directory), "Pass the path of a folder, which is created if absent."

    def refused(problem: str, shown: str = repr(text)) -> SettingsError:
        return SettingsError(f"directory={shown}: {problem}", setting="directory")

    scheme, is_url, _ = text.partition("://")
    if is_url and scheme != "gs":
        raise refused(
            f"Orbax writes checkpoints only to folders and to gs://, and treats {scheme}:// as a relative path. Pass the "
            "path of a folder, such as the mount point of a bucket."
        )
    if re.match(r"(gs|s3):/[^/]", text):  # unchecked, a folder "gs:" would be created in the working directory
        raise refused("is a URL that has lost a slash, as in a pathlib.Path. Pass a str or an etils.epath.Path.")
    if not text or not isinstance(directory, str | os.PathLike):
        raise refused(f"is not a path. {remedy}", short(directory))
    if is_url:
        return epath.Path(directory)
    path = epath.Path(directory).expanduser().absolute()
    # The nearest existing ancestor must be a folder too: nothing can be created below a file.
    nearest = next((part for part in (path, *path.parents) if part.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise refused(f"{nearest} is a file. {remedy}")
    return path


def _check_no_step(directory: epath.Path) -> None:
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
