"""Settings for restoring arrays, checked on construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from meshfeed._src.base.errors import SettingsError

MODES = ("once", "single_replica", "every_host")

# Constructor arguments of Orbax's SingleReplicaArrayHandler, and our names for them.
_ORBAX_NAMES = {
    "replica_axis_index": "replica_axis",
    "primary_replica_id": "primary_replica",
    "broadcast_memory_limit_bytes": "memory_limit_bytes",
    "broadcast_memory_scaling_factor": "memory_fraction",
}


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """How arrays are restored.

    Attributes:
      restore: ``once``: every stored byte is read by one host of the job, then sent to the devices that need it;
        ``single_replica``: the hosts of one replica read, then send; ``every_host``: each host reads what its devices
        hold.
      replica_axis: name or index of the mesh axis along which ``single_replica`` selects one replica. None chooses the
        axis that requires the fewest bytes to be read.
      primary_replica: index of that replica.
      memory_limit_bytes: limit on a process's memory in bytes while restoring, beyond the arrays themselves and one
        shard. One stored chunk per reading device is always allowed. None means no limit.
      verify: check digests.
      timeout_seconds: how long hosts wait for each other's reads.
      memory_fraction: without ``memory_limit_bytes``: limit memory to this fraction of what a device has left beside
        the restored arrays.
      metadata_key: name of TensorStore's metadata files of arrays, if they were saved under a non-default name.
      dispatch: restores arrays on remote workers instead of in this process: (stored arrays, requests) → arrays.
    """

    restore: str = "once"
    replica_axis: str | int | None = None
    primary_replica: int = 0
    memory_limit_bytes: int | None = None
    verify: bool = True
    timeout_seconds: float = 1800
    memory_fraction: float | None = None
    metadata_key: str | None = None
    dispatch: Callable[[Any, Any], list[Any]] | None = None

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
        fraction = self.memory_fraction
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if fraction is not None and not (number and 0 < fraction <= 1):
            raise SettingsError(
                f"memory_fraction={fraction!r} (in Orbax broadcast_memory_scaling_factor): takes a number above 0 and up "
                "to 1, or None",
                setting="memory_fraction",
            )


def options_of(orbax: dict[str, Any], **ours: Any) -> RestoreOptions:
    """Builds options from our keywords and from Orbax's names for them, which it removes from ``orbax``.

    Raises:
      SettingsError: a value is invalid, or a setting is given under both names with different values.
    """
    defaults: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(RestoreOptions)}
    for theirs, name in _ORBAX_NAMES.items():
        value = orbax.pop(theirs, None)
        if value is None:
            continue
        given = ours.get(name, defaults[name])
        if given not in (defaults[name], value):
            raise SettingsError(
                f"{theirs}={value!r} and {name}={given!r} are two names of one setting. Give one of them.",
                setting=theirs,
            )
        ours[name] = value
    return RestoreOptions(**ours)
