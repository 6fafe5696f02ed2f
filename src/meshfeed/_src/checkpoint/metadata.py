"""What a step holds, for restoring it without an abstract tree and for looking at it."""

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
    """A step without its values.

    Attributes:
      step: the caller's number.
      feed_step: batches that the feed had delivered, or None without a feed.
      position: records that it had delivered, or None.
      id: of the save.
      train_state: the saved tree: ``jax.ShapeDtypeStruct`` with the saved sharding where this job has as many devices,
        numpy values of the saved shape and dtype, and numbers and text themselves. ``restore`` takes it as it is.
      iterator_state: the feed's state, or None.
      stored_bytes: size of the arrays' files.
    """

    step: int
    feed_step: int | None
    position: int | None
    id: str
    train_state: Any
    iterator_state: dict[str, Any] | None
    stored_bytes: int


def describe_step(parts: StepParts) -> StepMetadata:
    """The metadata of a step whose parts were checked."""
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
