"""Checks whole checkpoints without restoring them: every file, chunk and digest."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError
from meshfeed._src.base.types import public
from meshfeed._src.checkpoint.iterator import PLAIN_FILE
from meshfeed._src.checkpoint.manifest import file_digest
from meshfeed._src.checkpoint.read import UnitReader, Wanted
from meshfeed._src.checkpoint.step import ARRAYS, ITERATOR, StepParts, find_steps, read_step
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import stored_kinds
from meshfeed._src.state import files as state_files


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of checking one step or item.

    Attributes:
      path: its folder.
      step: its number, or None for an item given directly.
      problems: messages on what is wrong; empty if it is intact.
      leaves: number of arrays read.
      bytes_read: bytes of array values read.
      without_digest: number of leaves that were read but not checked, because plain Orbax saved them.
      seconds: duration of the check in seconds.
    """

    path: str
    step: int | None
    problems: tuple[str, ...]
    leaves: int
    bytes_read: int
    without_digest: int
    seconds: float

    @property
    def intact(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@public("meshfeed.checkpoint")
def verify(directory: Any, step: int | None = None) -> list[Finding]:
    """Reads everything in a checkpoint folder, or in one item of arrays, and compares it with its digests.

    Args:
      directory: a Checkpointer's folder, a step's folder, or an item's.
      step: the only step to check; None checks all steps.

    Returns:
      a finding per step, in ascending order, or one for the item.

    Raises:
      CheckpointError: there is nothing to check, or the requested step does not exist.
    """
    directory = state_files.readable_path(directory)
    if not directory.exists():
        raise CheckpointError(
            f"{directory}: no such folder. Give the folder that was given to Checkpointer, or a step's."
        )
    steps = find_steps(directory)
    if step is not None and step not in steps:
        read_step(directory, step)  # absent is not damaged: raises and lists the existing steps
    if step is not None or steps:
        return [_verify_step(directory, number) for number in ([step] if step is not None else steps)]
    if directory.name.isdecimal() and (directory / ARRAYS).exists():
        return [_verify_step(directory.parent, int(directory.name))]
    if (directory / "_METADATA").exists() or (directory / "meshfeed").exists():
        return [_finding(directory, None, [])]
    paths = state_files.state_paths(directory)
    if paths:
        problems = []
        try:
            state_files.read_document(directory)
        except MeshfeedError as error:
            problems.append(str(error))
        return [Finding(str(directory), None, tuple(problems), 0, 0, 0, 0.0)]
    raise CheckpointError(f"{directory}: no steps, no item of arrays and no iterator state there.")


def _verify_step(directory: epath.Path, step: int) -> Finding:
    problems: list[str] = []
    try:
        parts = read_step(directory, step)
    except CheckpointError as error:
        problems.append(str(error))
    else:
        problems += _check_copy(parts)
    return _finding(directory / str(step) / ARRAYS, step, problems)


def _check_copy(parts: StepParts) -> list[str]:
    """Compares the iterator's plain copy with its state: the copy, which plain Orbax reads, has no digest."""
    path = parts.directory / ITERATOR / PLAIN_FILE
    if parts.document is None or not path.exists():
        return []
    try:
        same = json.loads(path.read_text()) == parts.document["state"]
    except ValueError:
        same = False
    return [] if same else [f"{path}: is not a copy of the iterator's state"]


def _finding(item: epath.Path, step: int | None, problems: list[str]) -> Finding:
    started = time.perf_counter()
    leaves = without = count = 0
    try:
        stored = StoredArrays(item)
        problems += _check_files(stored)
        stored.open_soon(_names(stored))
        for name in _names(stored):
            leaves += 1
            reader = UnitReader(stored, verify=True, bytes_in_flight=None)
            try:
                leaf = stored.leaf(name)
                without += not leaf.digests
                units = range(len(leaf.units)) if leaf.shape else (0,)
                reader.read(Wanted(leaf, number, lambda box, values: None) for number in units)
            except MeshfeedError as error:
                problems.append(str(error))
            count += reader.bytes_read
    except MeshfeedError as error:
        # read_step may already have reported the same error.
        if str(error) not in problems:
            problems.append(str(error))
    seconds = time.perf_counter() - started
    return Finding(str(item), step, tuple(problems), leaves, count, without, seconds)


def _names(stored: StoredArrays) -> list[str]:
    kinds = stored_kinds(stored)
    entries = {} if stored.manifest is None else stored.manifest.leaves
    skipped = {name for name, entry in entries.items() if "value" in entry or entry.get("stored") == "nothing"}
    return [name for name, kind in kinds.items() if kind != "str" and name not in skipped]


def _check_files(stored: StoredArrays) -> list[str]:
    problems = []
    files = {} if stored.manifest is None else stored.manifest.files
    for name, (size, digest) in files.items():
        path = stored.directory / name
        if not path.exists():
            problems.append(f"{path}: is missing")
        elif path.stat().length != size:
            problems.append(f"{path}: has {path.stat().length} bytes, saved were {size}")
        elif digest is not None and file_digest(path) != digest:
            problems.append(f"{path}: its digest is not that of the file that was saved")
    return problems
