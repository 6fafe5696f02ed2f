"""How arrays are restored: one value, declared and checked here, that is passed whole to everything that restores."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, TypeGuard

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.types import public


def is_number(value: object, kind: type | types.UnionType = int) -> TypeGuard[float]:
    """Returns whether ``value`` is of a numeric type; a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require(proper: bool, setting: str, value: object, takes: str) -> None:
    """Rejects the value of a setting that is not ``proper``."""
    if not proper:
        raise SettingsError(f"{setting}={short(value)}; it takes {takes}.", setting=setting)


def short(value: object) -> str:
    """Formats numbers and short text as they are, and any other value as its type, because a tree of arrays is long."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    text = repr(value) if plain else ""
    return text if text and len(text) <= 40 else f"<{type(value).__module__}.{type(value).__qualname__}>"


_MODES = ("once", "single_replica", "every_host")
_FRACTION = "a number above 0 and up to 1, or None (Orbax calls it broadcast_memory_scaling_factor)"

# Constructor arguments of Orbax's SingleReplicaArrayHandler, and our names for them.
_ORBAX_NAMES = {
    "replica_axis_index": "replica_axis",
    "primary_replica_id": "primary_replica",
    "broadcast_memory_limit_bytes": "memory_limit_bytes",
    "broadcast_memory_scaling_factor": "memory_fraction",
}


@public("meshfeed.checkpoint")
@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """How arrays are restored.

    Attributes:
      restore: "once": stored bytes are read by one host of the job (of a leaf whose chunks do not fit the division, up to a
        tenth by two), then sent to the devices that need it over the accelerator network;
        "single_replica": the hosts of one replica read, then send; "every_host": each host reads what its devices hold.
      replica_axis: name of the mesh axis along which "single_replica" selects one replica, or its index in each mesh.
        None chooses, for each mesh, the axis that requires the fewest bytes to be read.
      primary_replica: index of that replica.
      memory_limit_bytes: limit on a process's memory in bytes while restoring, beyond the arrays themselves and one
        shard. One stored chunk per reading device is always allowed, and the device's whole piece of a leaf if pieces
        begin inside chunks or the requested shape differs from the stored one. None means no limit.
      verify: check digests, if the checkpoint has any.
      timeout_seconds: how long hosts wait for each other's reads.
      memory_fraction: without ``memory_limit_bytes``: limit memory to this fraction of the memory that a device has left
        beside the restored arrays.
      metadata_key: name of TensorStore's metadata files of arrays, if they were saved under a non-default name.

    Raises:
      SettingsError: a value is invalid.
    """

    restore: str = "once"
    replica_axis: str | int | None = None
    primary_replica: int = 0
    memory_limit_bytes: int | None = None
    verify: bool = True
    timeout_seconds: float = 1800
    memory_fraction: float | None = None
    metadata_key: str | None = None

    def __post_init__(self) -> None:
        axis, replica, limit = self.replica_axis, self.primary_replica, self.memory_limit_bytes
        fraction, seconds = self.memory_fraction, self.timeout_seconds
        is_axis = isinstance(axis, str | None) or is_number(axis)
        is_limit = limit is None or (is_number(limit) and limit >= 1)
        is_fraction = fraction is None or (is_number(fraction, int | float) and 0 < fraction <= 1)
        is_duration = is_number(seconds, int | float) and math.isfinite(seconds) and seconds > 0
        require(self.restore in _MODES, "restore", self.restore, f"one of {', '.join(map(repr, _MODES))}")
        require(is_axis, "replica_axis", axis, "the name or number of a mesh axis, or None")
        require(is_limit, "memory_limit_bytes", limit, "a positive int (bytes) or None")
        require(is_number(replica) and replica >= 0, "primary_replica", replica, "an index along replica_axis")
        require(isinstance(self.verify, bool), "verify", self.verify, "True or False")
        require(is_duration, "timeout_seconds", seconds, "a positive number of seconds")
        require(is_fraction, "memory_fraction", fraction, _FRACTION)


def split_options(options: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[RestoreOptions, dict[str, Any]]:
    """Returns the options among a handler's arguments, and the keywords left over, which are Orbax's.

    Args:
      options: the options themselves, or their fields in order.
      keywords: fields of the options, also under the names of Orbax's ``SingleReplicaArrayHandler``, and others.

    Raises:
      SettingsError: a value is invalid, or a setting is given under both names with different values.
    """
    fields = {field.name: field.default for field in dataclasses.fields(RestoreOptions)}
    own = {name: value for name, value in keywords.items() if name in fields}
    if not any(isinstance(option, RestoreOptions) for option in options):
        given = RestoreOptions(*options, **own)
    elif len(options) == 1:
        given = dataclasses.replace(options[0], **own)
    else:
        raise TypeError("RestoreOptions is the only positional argument if it is given; change its fields by keywords")
    renamed: dict[str, Any] = {}
    for theirs, name in _ORBAX_NAMES.items():
        if (value := keywords.get(theirs)) is None:
            continue
        before = getattr(given, name)
        if before not in (fields[name], value):
            text = f"{theirs}={value!r} and {name}={before!r} are two names of one setting. Pass only one of them."
            raise SettingsError(text, setting=theirs)
        renamed[name] = value
    rest = {name: value for name, value in keywords.items() if name not in fields and name not in _ORBAX_NAMES}
    return dataclasses.replace(given, **renamed), rest
