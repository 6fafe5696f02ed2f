"""Reads one step of a checkpoint folder, and checks that its parts are complete and belong together.

Describes a step, for inspection and for restoring it without an abstract tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from etils import epath

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.types import public
from meshfeed._src.checkpoint.manifest import DamagedCheckpointError, Manifest, read_manifest
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import abstract_tree_of
from meshfeed._src.state import files as state_files

ARRAYS = "arrays"
ITERATOR = "iterator"


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The parts of a step.

    Attributes:
      step: the caller's step number.
      directory: the step's folder.
      manifest: the manifest of the arrays.
      document: the iterator's document, or None if the step was saved without a feed.
    """

    step: int
    directory: epath.Path
    manifest: Manifest
    document: dict[str, Any] | None

    @property
    def identity(self) -> dict[str, Any]:
        """The id, step, feed_step and position recorded in both parts."""
        return self.manifest.identity or {}


def find_steps(directory: Any) -> list[int]:
    """Returns the numbers of the steps in a folder, ascending, whether complete or not."""
    directory = epath.Path(directory)
    if not directory.exists():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir())


def read_step(directory: Any, step: int) -> StepParts:
    """Checks a step without reading array values: parts, identities, digests of small files, and sizes of the rest.

    Raises:
      CheckpointError: the step is absent or incomplete, or its parts do not belong together.
      DamagedCheckpointError: a file differs from what was written.
    """
    folder = epath.Path(directory) / str(step)
    if not folder.exists():
        steps = ", ".join(map(str, find_steps(directory))) or "none"
        raise CheckpointError(f"step {step} is not in {directory}; there: {steps}.", step=step)
    arrays = folder / ARRAYS
    try:
        manifest = read_manifest(arrays) if arrays.exists() else None
        if manifest is None or manifest.identity is None:
            raise CheckpointError(
                f"step {step} in {directory}: it has no whole part {ARRAYS!r} that a Checkpointer wrote. Read plain "
                "Orbax checkpoints with meshfeed.checkpoint.restore_once.",
                step=step,
            )
        _check_files(arrays, manifest)
        document = None
        if (folder / ITERATOR).exists():
            document = state_files.read_document(folder / ITERATOR)
        _check_identities(step, folder, manifest.identity, document)
    except CheckpointError as error:
        error.step = step
        raise
    except OSError as error:
        raise CheckpointError(f"step {step} in {directory}: cannot be read: {error}", step=step) from error
    except Exception as error:  # a flipped bit can turn any field of a small file into anything
        raise DamagedCheckpointError(
            f"step {step} in {directory}: its metadata is damaged ({type(error).__name__}: {error})", step=step
        ) from error
    return StepParts(step, folder, manifest, document)


def _check_files(arrays: epath.Path, manifest: Manifest) -> None:
    for name, (size, _) in manifest.files.items():
        path = arrays / name
        found = path.stat().length if path.exists() else None
        if found != size:
            raise DamagedCheckpointError(
                f"{path}: {'is missing' if found is None else f'has {found} bytes'}, saved were {size} bytes. Restore "
                "an earlier step.",
                path=str(path),
            )


def _check_identities(step: int, folder: epath.Path, identity: dict[str, Any], document: dict[str, Any] | None) -> None:
    if identity.get("step") != step:
        raise CheckpointError(
            f"{folder}: the arrays were saved as step {identity.get('step')}; the folder was renamed or copied by hand."
        )
    if ITERATOR in identity.get("parts", ()) and document is None:
        raise CheckpointError(f"{folder}: the part {ITERATOR!r} is missing; it was saved with one.")
    if document is not None and document["identity"] != identity:
        raise CheckpointError(
            f"{folder}: the parts do not belong together: {ARRAYS} is of save {_short(identity)}, {ITERATOR} of save "
            f"{_short(document['identity'])}. Parts of one step must stay together; restore another step."
        )


def _short(identity: Any) -> str:
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
    train_state: Any
    iterator_state: dict[str, Any] | None
    stored_bytes: int


def describe_step(parts: StepParts) -> StepMetadata:
    """Returns the metadata of a step whose parts have been checked."""
    stored = StoredArrays(parts.directory / ARRAYS)
    return StepMetadata(
        step=parts.step,
        feed_step=parts.identity.get("feed_step"),
        position=parts.identity.get("position"),
        id=str(parts.identity.get("id")),
        train_state=abstract_tree_of(stored),
        iterator_state=None if parts.document is None else parts.document["state"],
        stored_bytes=sum(size for size, _ in parts.manifest.files.values()),
    )
