"""How arrays are restored: one value, declared and checked here, that is passed whole to everything that restores."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from meshfeed._src.base.errors import SettingsError
from meshfeed._src.base.settings import Check, checked, flag, instance, integer, number, one_of, optional
from meshfeed._src.base.types import public


def short(value: object) -> str:
    """Formats numbers and short text as they are, and any other value as its type, because a tree of arrays is long."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    text = repr(value) if plain else ""
    return text if text and len(text) <= 40 else f"<{type(value).__module__}.{type(value).__qualname__}>"


def _axis(value: Any) -> str | int | None:
    """Takes names and indices of axes."""
    return value if value is None or isinstance(value, str) else integer(-math.inf)(value)


_CHECKS: dict[str, tuple[Check, str]] = {
    "restore": (one_of("once", "single_replica", "every_host"), "one of 'once', 'single_replica', 'every_host'"),
    "replica_axis": (_axis, "the name or number of a mesh axis, or None"),
    "primary_replica": (integer(0), "an index along replica_axis"),
    "memory_limit_bytes": (optional(integer(1)), "a positive int (bytes) or None"),
    "verify": (flag, "True or False"),
    "timeout_seconds": (number(0, above=True), "a positive number of seconds"),
    "memory_fraction": (
        optional(number(0, 1, above=True)),
        "a number above 0 and up to 1, or None (Orbax calls it broadcast_memory_scaling_factor)",
    ),
}

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
        for name, (check, takes) in _CHECKS.items():
            object.__setattr__(self, name, checked(name, getattr(self, name), check, takes))


def split_options(options: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[RestoreOptions, dict[str, Any]]:
    """Returns the options among a handler's arguments, and the keywords left over, which are Orbax's.

    Arguments are the options themselves, or their fields in order; keywords are fields of the options, also under the names
    of Orbax's ``SingleReplicaArrayHandler``, and others.

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


@contextlib.contextmanager
def naming(setting: str, keywords: object) -> Iterator[None]:
    """Turns the TypeError with which Orbax rejects its keywords into a SettingsError that names the setting."""
    checked(setting, keywords, optional(instance(Mapping)), "a dict of keywords, or None")
    try:
        yield
    except TypeError as error:
        raise SettingsError(
            f"{setting}: {error}. Its keywords are passed to Orbax unchanged.", setting=setting
        ) from error
