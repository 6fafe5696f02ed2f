"""Describes a step, for inspection and for restoring it without an abstract tree."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshfeed._src.base.names import public
from meshfeed._src.checkpoint.step import ARRAYS, StepParts
from meshfeed._src.checkpoint.stored import StoredArrays
from meshfeed._src.checkpoint.tree_restore import abstract_tree_of


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
