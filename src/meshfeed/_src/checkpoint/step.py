"""The steps of a checkpoint folder: checks that one is complete and undamaged, describes and compares them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import time
from collections.abc import Callable, Collection, Mapping

from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError
from meshfeed._src.base.store_path import children, make_path
from meshfeed._src.base.stores import RefusedError
from meshfeed._src.base.threads import in_threads
from meshfeed._src.base.types import JsonValue, PyTree, public
from meshfeed._src.checkpoint.handlers import PLAIN_FILE
from meshfeed._src.checkpoint.leaves import Entry, dtype_of
from meshfeed._src.checkpoint.read import UnitReader
from meshfeed._src.checkpoint.store_steps import is_committed
from meshfeed._src.checkpoint.stored import (
    FOLDER,
    RESTORE_EARLIER,
    DamagedCheckpointError,
    Manifest,
    StoredArrays,
    abstract_tree_of,
    file_problems,
    read_manifest,
)
from meshfeed._src.state import files as state_files
from meshfeed._src.state.state import flatten

# Errors of the system, not of the file: a step for which they are raised may be intact.
_SYSTEM_ERRORS = (PermissionError, TimeoutError, ConnectionError, InterruptedError, BlockingIOError)
_SYSTEM_ERRNOS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH)
}
# What a field of a small file can raise after a bit has flipped.
_WRONG_FIELD = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError)

ARRAYS = "arrays"
ITERATOR = "iterator"


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of a step: its number and folder, the arrays' manifest, and the iterator's document, if it has one."""

    step: int
    directory: epath.Path
    manifest: Manifest
    document: dict[str, JsonValue] | None

    @property
    def identity(self) -> dict[str, JsonValue]:
        """The id, step, feed_step and position recorded in both parts."""
        return self.manifest.identity or {}

    @property
    def iterator_state(self) -> dict[str, JsonValue] | None:
        """The feed's state, or None."""
        return None if self.document is None else self.document["state"]

    @property
    def stored_bytes(self) -> int:
        """Total size in bytes of the arrays' files."""
        return sum(size for size, _ in self.manifest.files.values())


def find_steps(directory: epath.PathLike) -> list[int]:
    """Returns the numbers of the steps in a folder, ascending, whether complete or not; in a store, of the committed ones."""
    directory = make_path(directory)
    # Orbax also counts "0020", and does not find it.
    numbered = [path for path in children(directory) if path.name.isdecimal() and str(int(path.name)) == path.name]
    found = zip(numbered, in_threads(is_committed, numbered), strict=True)
    return sorted(int(path.name) for path, is_step in found if is_step)


def read_step(directory: epath.PathLike, step: int) -> StepParts:
    """Checks a step without reading array values: its parts and their identities, and the sizes of all files.

    Of the content of files, only the manifest and the iterator's state are compared with their digests: a restore needs no
    more, and checks array values as it reads them. :func:`verify` compares the digests of all files.

    Raises:
      CheckpointError: the step is absent or incomplete, or its parts do not belong together.
      DamagedCheckpointError: a file differs from what was written.
    """
    folder = make_path(directory) / str(step)
    if not is_committed(folder):
        steps = ", ".join(map(str, find_steps(directory))) or "none"
        raise CheckpointError(f"step {step} is not in {directory}; its steps are: {steps}.", step=step)
    arrays = folder / ARRAYS
    try:
        manifest = read_manifest(arrays)
        if manifest is None or manifest.identity is None:
            raise CheckpointError(
                f"step {step} in {directory}: it has no complete part {ARRAYS!r} written by a Checkpointer: "
                f"{ARRAYS}/meshfeed/manifest.json is missing or incomplete. Read plain Orbax checkpoints with "
                "meshfeed.checkpoint.restore_once.",
                step=step,
            )
        for path, problem in file_problems(arrays, manifest, content=False):
            raise DamagedCheckpointError(f"{path}: {problem}. {RESTORE_EARLIER}", path=str(path))
        iterator = folder / ITERATOR
        document = state_files.read_document(iterator) if iterator.exists() else None
        _check_identities(step, folder, manifest.identity, document)
    except CheckpointError as error:
        error.step = step
        raise
    except OSError as error:
        kind = RefusedError if isinstance(error, _SYSTEM_ERRORS) or error.errno in _SYSTEM_ERRNOS else CheckpointError
        raise kind(f"step {step} in {directory}: cannot be read: {error}", step=step) from error
    except _WRONG_FIELD as error:
        raise DamagedCheckpointError(
            f"step {step} in {directory}: its metadata is damaged ({type(error).__name__}: {error})", step=step
        ) from error
    except Exception as error:  # such as a thread that cannot be started: the step may be intact
        raise RefusedError(
            f"step {step} in {directory}: cannot be checked: {type(error).__name__}: {error}", step=step
        ) from error
    return StepParts(step, folder, manifest, document)


def look_at_step(directory: epath.PathLike, step: int) -> tuple[dict[str, JsonValue] | None, str]:
    """Returns the identity of a step that is intact as far as :func:`read_step` looks, or None and why it is not.

    Raises:
      RefusedError: whether it is intact cannot be known, since its storage refuses to be read.
    """
    try:
        return read_step(directory, step).identity, ""
    except RefusedError:
        raise
    except CheckpointError as error:
        return None, str(error)


def newest_readable(
    directory: epath.PathLike, excluded: Collection[int]
) -> tuple[dict[str, JsonValue] | None, list[tuple[int, str]]]:
    """Returns the identity of the newest step that can be read, or None, and each newer step that cannot, with the reason.

    Raises:
      RefusedError: see :func:`look_at_step`.
    """
    unreadable: list[tuple[int, str]] = []
    for step in sorted(set(find_steps(directory)) - set(excluded), reverse=True):
        identity, problem = look_at_step(directory, step)
        if identity is not None:
            return identity, unreadable
        unreadable.append((step, problem))
    return None, unreadable


def _check_identities(step: int, folder: epath.Path, identity: JsonValue, document: JsonValue) -> None:
    if identity.get("step") != step:
        raise CheckpointError(
            f"{folder}: the arrays were saved as step {identity.get('step')}; the folder was renamed or copied by hand."
        )
    if ITERATOR in identity.get("parts", ()) and document is None:
        raise CheckpointError(
            f"{folder}: the part {ITERATOR!r}, which was saved, is missing; restore a different step."
        )
    if document is not None and document["identity"] != identity:
        raise CheckpointError(
            f"{folder}: the parts do not belong together: {ARRAYS} is from save {_short(identity)}, {ITERATOR} from save "
            f"{_short(document['identity'])}. Parts of one step must stay together; restore a different step."
        )


def _short(identity: JsonValue) -> str:
    if not isinstance(identity, dict):
        return "unknown"
    return f"{identity.get('id')} (step {identity.get('step')}, position {identity.get('position')})"


@public("meshfeed.checkpoint")
@dataclasses.dataclass(frozen=True)
class StepMetadata:
    """A step without its array values.

    Attributes:
      step: the caller's step number.
      feed_step: number of batches that the feed had delivered, or None without a feed.
      position: number of records that the feed had delivered, or None.
      id: id of the save.
      train_state: the saved tree. Arrays are ``jax.ShapeDtypeStruct``, with the saved sharding if this job has as many
        devices; numpy values are placeholders with the saved shape and dtype; numbers and text are themselves.
        ``restore`` accepts it unchanged.
      iterator_state: the feed's state, or None.
      stored_bytes: total size in bytes of the arrays' files.
    """

    step: int
    feed_step: int | None
    position: int | None
    id: str
    train_state: PyTree
    iterator_state: dict[str, JsonValue] | None
    stored_bytes: int


def describe_step(parts: StepParts) -> StepMetadata:
    """Returns the metadata of a step whose parts have been checked."""
    return StepMetadata(
        step=parts.step,
        feed_step=parts.identity.get("feed_step"),
        position=parts.identity.get("position"),
        id=str(parts.identity.get("id")),
        train_state=abstract_tree_of(StoredArrays(parts.directory / ARRAYS)),
        iterator_state=parts.iterator_state,
        stored_bytes=parts.stored_bytes,
    )


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of checking one step or item.

    Attributes:
      path: its folder.
      step: its number, or None for an item given directly.
      problems: one message per problem; empty if it is intact.
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
def verify(directory: epath.PathLike, step: int | None = None) -> list[Finding]:
    """Reads everything in a checkpoint folder, or in one item of arrays, and compares it with its digests.

    Args:
      directory: a Checkpointer's folder, a step's folder, or an item's; a path or a URL.
      step: the only step to check; None checks all steps.

    Returns:
      A finding per step, in ascending order, or one for the item.

    Raises:
      CheckpointError: there is nothing to check, or the requested step does not exist.
    """
    if not state_files.readable_path(directory).exists():
        raise CheckpointError(f"{directory}: no such folder. Pass a Checkpointer's folder, or a step's.")
    directory, steps, step = _steps(directory, step)
    if steps:
        findings = [_verify_step(directory, number) for number in (steps if step is None else [step])]
        return [one for one in findings if one.intact or one.step == step or _is_there(directory, one.step)]
    if (directory / "_METADATA").exists() or (directory / FOLDER).exists():
        return [_verify_arrays(directory, None, [])]
    if state_files.state_paths(directory):
        problems = _problems(lambda: state_files.read_document(directory))
        return [Finding(str(directory), None, problems, 0, 0, 0, 0.0)]
    raise CheckpointError(
        f"{directory}: contains no steps, no item of arrays and no iterator state. Pass a Checkpointer's folder."
    )


def _steps(directory: epath.PathLike, step: int | None) -> tuple[epath.Path, list[int], int | None]:
    """Returns a Checkpointer's folder, its steps, and the step to which ``directory`` or ``step`` refers."""
    path = state_files.readable_path(directory)
    if path.is_file():
        raise CheckpointError(f"{path} is a file. Pass a Checkpointer's folder, or one of its steps.")
    if step is None and path.name.isdecimal() and (path / ARRAYS).exists():
        path, step = path.parent, int(path.name)
    steps = find_steps(path)
    if step is not None and step not in steps:
        read_step(path, step)  # absent is not damaged: raises and lists the existing steps
    return path, steps, step


def _is_there(directory: epath.Path, step: int | None) -> bool:
    """Whether a step that was listed still exists: a job that saves here removes its older steps."""
    return is_committed(directory / str(step))


def _problems(check: Callable[[], object]) -> tuple[str, ...]:
    try:
        check()
    except MeshfeedError as error:
        return (str(error),)
    except OSError as error:  # a file that cannot be read, or a folder in its place
        return (f"{type(error).__name__}: {error}",)
    return ()


def _verify_step(directory: epath.Path, step: int) -> Finding:
    problems = _problems(lambda: _check_copy(read_step(directory, step)))
    return _verify_arrays(directory / str(step) / ARRAYS, step, list(problems))


def _check_copy(parts: StepParts) -> None:
    """Compares the iterator's plain copy with its state: the copy, which plain Orbax reads, has no digest."""
    path = parts.directory / ITERATOR / PLAIN_FILE
    if parts.document is None or not path.exists():
        return
    with contextlib.suppress(ValueError):
        if json.loads(path.read_text()) == parts.document["state"]:
            return
    raise CheckpointError(f"{path}: is not a copy of the iterator's state")


def _verify_arrays(item: epath.Path, step: int | None, problems: list[str]) -> Finding:
    started, without = time.perf_counter(), 0
    names: list[str] = []
    sizes: list[int] = []
    try:
        stored = StoredArrays(item)
        problems += [f"{path}: {problem}" for path, problem in file_problems(item, stored.manifest, content=True)]
        names = stored.array_names()
        stored.open_soon(names)
        reader = UnitReader(stored, verify=True, on_bytes=sizes.append)
        for name in names:
            problems += _problems(lambda name=name: reader.check(stored.saved(name)))
            without += not stored.manifest.digests.get(name)
    except (MeshfeedError, OSError) as error:
        problems.append(str(error))
    problems = list(dict.fromkeys(problems))  # read_step may already have reported the same
    return Finding(str(item), step, tuple(problems), len(names), sum(sizes), without, time.perf_counter() - started)


def inspect(directory: epath.PathLike, step: int | None = None) -> dict[str, JsonValue]:
    """Lists the steps of a checkpoint folder, and every leaf of one step. Reads no array values.

    Args:
      directory: a Checkpointer's folder, or one of its steps.
      step: the step whose leaves to list.

    Returns:
      ``{"directory", "steps": [{"step", "intact", "problem", "id", "feed_step", "position", "bytes", "leaves"}]}``. For
      the requested step, ``"leaves"`` is ``[{"name", "kind", "dtype", "shape", "bytes", "chunk", "sharding"}]`` and
      ``"iterator"`` holds the feed's state; for other steps, ``"leaves"`` is their number.

    Raises:
      CheckpointError: there are no steps, or not the requested one.
    """
    path, steps, step = _steps(directory, step)
    if not steps:
        what = "contains no steps" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {what}. Pass a Checkpointer's folder.")
    rows = [_inspect_step(path, number, number == step) for number in (steps if step is None else [step])]
    rows = [row for row in rows if row["intact"] or row["step"] == step or _is_there(path, row["step"])]
    return {"directory": str(path), "steps": rows}


def _inspect_step(directory: epath.Path, step: int, with_leaves: bool) -> dict[str, JsonValue]:
    try:
        parts = read_step(directory, step)
    except CheckpointError as error:
        return {"step": step, "intact": False, "problem": str(error)}
    leaves = parts.manifest.leaves
    return {
        "step": step,
        "intact": True,
        "problem": None,
        **{name: parts.identity.get(name) for name in ("id", "feed_step", "position")},
        "bytes": parts.stored_bytes,
        "leaves": [_leaf(name, leaves[name]) for name in sorted(leaves)] if with_leaves else len(leaves),
        **({"iterator": parts.iterator_state} if with_leaves else {}),
    }


def _leaf(name: str, entry: Entry) -> dict[str, JsonValue]:
    if "value" in entry:
        return {"name": name, "kind": entry["kind"], "value": entry["value"]}
    dtype = dtype_of(entry["dtype"])
    return {
        "name": name,
        "kind": f"key {entry['impl']}" if "impl" in entry else entry["kind"],
        "dtype": str(dtype),
        "shape": entry["shape"],
        "bytes": math.prod(entry.get("data_shape", entry["shape"])) * dtype.itemsize,
        "chunk": entry.get("chunk"),
        "sharding": entry.get("sharding"),
    }


def verify_as_json(directory: epath.PathLike, step: int | None = None) -> dict[str, JsonValue]:
    """Does what :func:`verify` does.

    Returns:
      ``{"intact", "steps": [{"path", "step", "intact", "problems", "leaves", "bytes_read", "without_digest",
      "seconds"}]}``. The command exits with status 0 if ``intact``, else 1.
    """
    findings = verify(directory, step)
    rows = [
        {**dataclasses.asdict(finding), "intact": finding.intact, "seconds": round(finding.seconds, 3)}
        for finding in findings
    ]
    return {"intact": all(row["intact"] for row in rows), "steps": rows}


def diff(first: epath.PathLike, second: epath.PathLike) -> dict[str, JsonValue]:
    """Compares two steps, or two saved states.

    Returns:
      ``{"same", "state": {field: [first, second]}, "leaves": {name: [first, second]}}``. Leaves are compared by kind,
      dtype, shape and digests. If two leaves have digests of different chunks, both chunks are listed.
    """
    (state, leaves), (other_state, other_leaves) = _load(first), _load(second)
    states, differing = _differing(state, other_state), _differing(leaves, other_leaves)
    return {"same": not states and not differing, "state": states, "leaves": differing}


def _differing(one: Mapping[str, JsonValue], two: Mapping[str, JsonValue]) -> dict[str, list[JsonValue]]:
    return {name: [one.get(name), two.get(name)] for name in sorted({*one, *two}) if one.get(name) != two.get(name)}


def _load(path: epath.PathLike) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """Returns the fields of the state, and the parts of each leaf's entry that are compared."""
    path = state_files.readable_path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist. Pass a step's folder, an iterator's folder, or a JSON state.")
    if not path.is_dir():
        return flatten(state_files.read_json(path)), {}
    iterator, arrays = (path / part if (path / part).exists() else path for part in (ITERATOR, ARRAYS))
    try:
        state = state_files.read_state(iterator) if state_files.state_paths(iterator) else {}
        manifest = read_manifest(arrays)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not state and manifest is None:
        steps = find_steps(path)
        remedy = f"Pass one of its steps, such as {path / str(steps[-1])}." if steps else "Pass a step's folder."
        raise CheckpointError(f"{path}: neither a step written by a Checkpointer nor a saved state. {remedy}")
    entries = {} if manifest is None else manifest.leaves
    digests = {} if manifest is None else manifest.digests
    return flatten(state), {name: _summary(entry, digests.get(name, {})) for name, entry in entries.items()}


def _summary(entry: Entry, digests: Mapping[int, str]) -> dict[str, JsonValue]:
    kept = {name: entry[name] for name in ("kind", "dtype", "shape", "impl", "value") if name in entry}
    if digests:
        kept |= {"chunk": entry.get("cell"), "digests": [digests[cell] for cell in sorted(digests)]}
    return kept
