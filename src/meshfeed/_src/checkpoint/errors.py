"""The error for damaged checkpoints, which is both a checkpoint error and a data error."""

from __future__ import annotations

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.names import public
from meshfeed._src.state.files import DamagedStateError


@public("meshfeed.checkpoint")
class DamagedCheckpointError(DamagedStateError):
    """The stored bytes of a checkpoint differ from those written.

    It is both a :class:`~meshfeed.CheckpointError` and a :class:`~meshfeed.CorruptDataError`.
    """


def as_checkpoint_error(kind: str, message: str, *, step: int | None = None) -> CheckpointError:
    """Returns the error that all hosts raise for a failure reported by one of them."""
    if kind == "damaged":
        return DamagedCheckpointError(message, step=step)
    return CheckpointError(message, step=step)
