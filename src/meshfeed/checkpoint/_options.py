"""The settings of restoring arrays, checked when they are given."""

from __future__ import annotations

import dataclasses

from meshfeed._errors import SettingsError

MODES = ("once", "single_replica", "every_host")


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """How arrays are restored.

    Attributes:
      restore: ``once``: every stored byte is read by one host of the job, then sent to the devices that want it;
        ``single_replica``: the hosts of one replica read, then send; ``every_host``: each host reads what it holds.
      replica_axis: mesh axis along which ``single_replica`` takes one index; None: the one that
        leaves least to read.
      primary_replica: that index.
      memory_limit_bytes: limit on the memory in use by a process while restoring, beside the arrays themselves and one
        shard; a stored chunk for each device that reads, where that is more; None: none.
      verify: check digests.
      timeout_seconds: how long hosts wait for one another's reads.
    """

    restore: str = "once"
    replica_axis: str | int | None = None
    primary_replica: int = 0
    memory_limit_bytes: int | None = None
    verify: bool = True
    timeout_seconds: float = 1800

    def __post_init__(self) -> None:
        if self.restore not in MODES:
            raise SettingsError(
                f"restore={self.restore!r}: takes one of {', '.join(map(repr, MODES))}", setting="restore"
            )
        axis = self.replica_axis
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int | str)):
            raise SettingsError(
                f"replica_axis={axis!r}: takes the name or number of a mesh axis, or None", setting="replica_axis"
            )
        limit = self.memory_limit_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise SettingsError(
                f"memory_limit_bytes={limit!r}: takes a positive int (bytes) or None", setting="memory_limit_bytes"
            )
        replica = self.primary_replica
        if isinstance(replica, bool) or not isinstance(replica, int) or replica < 0:
            raise SettingsError(
                f"primary_replica={replica!r}: takes an index along replica_axis", setting="primary_replica"
            )
