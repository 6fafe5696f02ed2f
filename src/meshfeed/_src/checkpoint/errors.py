"""The error for damaged checkpoints, which are a checkpoint's fault and data's fault at once."""

from __future__ import annotations

from meshfeed._src.base.errors import CheckpointError
from meshfeed._src.base.names import public
from meshfeed._src.state.files import DamagedStateError


@public("meshfeed.checkpoint")
class DamagedCheckpointError(DamagedStateError):
    """Stored bytes of a checkpoint are not what was written.

    Both :class:`~meshfeed.CheckpointError` and :class:`~meshfeed.CorruptDataError`.
    """


def as_checkpoint_error(kind: str, message: str, *, step: int | None = None) -> CheckpointError:
    """The error that all hosts raise for what one of them reported."""
    if kind == "damaged":
        return DamagedCheckpointError(message, step=step)
    return CheckpointError(message, step=step)
