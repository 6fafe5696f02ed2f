"""Checks arguments before anything is written, waited for or agreed on; and defines the options of a restore."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import operator
import os
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard

import jax
from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError
from meshfeed._src.base.types import JsonValue, PyTree

_CREATION_SECONDS, _POLL_SECONDS = 60.0, 0.01  # after that, writing names the folder that is missing

SAVE_ORDER = "The order is save(step, train_state, feed)."
RESTORE_ORDER = "The order is restore(train_state, feed, step)."


def is_number(value: object, kind: type | types.UnionType = int) -> TypeGuard[float]:
    """Returns whether ``value`` is of a numeric type; a bool is not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require(proper: bool, setting: str, value: object, takes: str) -> None:
    """Rejects the value of a setting that is not ``proper``."""
    if not proper:
        raise SettingsError(f"{setting}={short(value)}: takes {takes}", setting=setting)


def short(value: object) -> str:
    """Formats numbers and short text as they are, and any other value as its type, because a tree of arrays is long."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    text = repr(value) if plain else ""
    return text if text and len(text) <= 40 else f"<{type(value).__module__}.{type(value).__qualname__}>"


def as_step(step: object, order: str) -> int:
    """Returns a step number as an int; also accepts numpy integers and 0-d integer arrays, of at least 0."""
    try:  # a bool is an int, but as a step it is a mistake
        number = -1 if isinstance(step, bool) else operator.index(step)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = -1
    require(number >= 0, "step", step, f"an int of at least 0. {order}")
    return number


class HasState(Protocol):
    """The part of a feed that saving needs."""

    def get_state(self) -> dict[str, JsonValue]:
        """Returns the state after the last delivered batch, as JSON."""
        ...


def check_feed(feed: object, methods: tuple[str, ...], order: str) -> None:
    """Rejects an object without the methods of a feed. None means no feed and is accepted."""
    lacks = [name for name in methods if feed is not None and not callable(getattr(feed, name, None))]
    if lacks:
        raise SettingsError(
            f"feed={short(feed)}: has no {lacks[0]}(), expected a meshfeed.Feed or another object "
            f"with get_state() and set_state(state). {order}",
            setting="feed",
        )


def check_train_state(train_state: PyTree, order: str) -> None:
    """Rejects a feed passed in place of the train state."""
    # A registered pytree may have a get_state method of its own; only an opaque leaf is taken for a feed.
    if callable(getattr(train_state, "get_state", None)) and jax.tree_util.all_leaves([train_state]):
        raise SettingsError(
            f"train_state={short(train_state)}: is a feed, expected a pytree of arrays. {order}", setting="train_state"
        )


def check_settings(counts: Mapping[str, object], flags: Mapping[str, object], timeout_seconds: object) -> None:
    """Checks the arguments of ``Checkpointer`` that its components do not check."""
    for name, value in counts.items():
        require(is_number(value) and value >= 1, name, value, "a positive int")
    for name, value in flags.items():
        require(isinstance(value, bool), name, value, "True or False")
    seconds = timeout_seconds
    positive = is_number(seconds, int | float) and math.isfinite(seconds) and seconds > 0
    require(positive, "timeout_seconds", seconds, "a positive number of seconds")


@contextlib.contextmanager
def naming(setting: str, keywords: object) -> Iterator[None]:
    """Turns the TypeError with which Orbax rejects its keywords into a SettingsError that names the setting."""
    require(keywords is None or isinstance(keywords, Mapping), setting, keywords, "a dict of keywords, or None")
    try:
        yield
    except TypeError as error:
        raise SettingsError(
            f"{setting}: {error}. Its keywords are passed to Orbax unchanged.", setting=setting
        ) from error


MODES = ("once", "single_replica", "every_host")
_FRACTION = "a number above 0 and up to 1, or None (Orbax calls it broadcast_memory_scaling_factor)"

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
      replica_axis: name of the mesh axis along which ``single_replica`` selects one replica, or its index in each mesh.
        None chooses, for each mesh, the axis that requires the fewest bytes to be read.
      primary_replica: index of that replica.
      memory_limit_bytes: limit on a process's memory in bytes while restoring, beyond the arrays themselves and one
        shard. One stored chunk per reading device is always allowed. None means no limit.
      verify: check digests.
      timeout_seconds: how long hosts wait for each other's reads.
      memory_fraction: without ``memory_limit_bytes``: limit memory to this fraction of the memory that a device has left
        beside the restored arrays.
      metadata_key: name of TensorStore's metadata files of arrays, if they were saved under a non-default name.
      dispatch: restores arrays on remote workers instead of in this process: (stored arrays, requests) → arrays.

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
    dispatch: Callable[..., Sequence[jax.Array]] | None = None

    def __post_init__(self) -> None:
        axis, limit, replica = self.replica_axis, self.memory_limit_bytes, self.primary_replica
        fraction = self.memory_fraction
        is_fraction = is_number(fraction, int | float) and 0 < fraction <= 1
        for proper, setting, takes in (
            (self.restore in MODES, "restore", f"one of {', '.join(map(repr, MODES))}"),
            (
                isinstance(axis, str | None) or is_number(axis),
                "replica_axis",
                "the name or number of a mesh axis, or None",
            ),
            (
                limit is None or (is_number(limit) and limit >= 1),
                "memory_limit_bytes",
                "a positive int (bytes) or None",
            ),
            (is_number(replica) and replica >= 0, "primary_replica", "an index along replica_axis"),
            (fraction is None or is_fraction, "memory_fraction", _FRACTION),
        ):
            require(proper, setting, getattr(self, setting), takes)


def options_of(orbax: dict[str, object], **ours: object) -> RestoreOptions:
    """Builds options from our keywords and from Orbax's names for them, which are removed from ``orbax``."""
    defaults = {field.name: field.default for field in dataclasses.fields(RestoreOptions)}
    for theirs, name in _ORBAX_NAMES.items():
        if (value := orbax.pop(theirs, None)) is None:
            continue
        given = ours.get(name, defaults[name])
        if given not in (defaults[name], value):
            text = f"{theirs}={value!r} and {name}={given!r} are two names of one setting. Pass only one of them."
            raise SettingsError(text, setting=theirs)
        ours[name] = value
    return RestoreOptions(**ours)  # pyright: ignore[reportArgumentType]  # it checks them


_WRITTEN = ("gs",)  # Orbax treats any other URL as a relative path when it first saves


async def created(folder: epath.PathLike) -> epath.Path:
    """Waits until the folder of a save exists: some versions of Orbax pass a handle instead of a path.

    Orbax's primary host makes the folder in the background. Another host that saves before the primary has announced that
    does not wait for it (``AwaitableSignalsContract``, Orbax 0.12), which happens with the managers that have no barrier at
    the start of a save. Object stores have no folders to wait for.
    """
    wait = getattr(folder, "await_creation", None)
    path = epath.Path(folder) if wait is None else await wait()
    deadline = time.monotonic() + _CREATION_SECONDS
    while "://" not in str(path) and not path.exists() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return path


def as_directory(directory: epath.PathLike) -> epath.Path:
    """Returns the absolute path of the checkpoint folder.

    Raises:
      SettingsError: it is not a path, it is a file or below one, it is a URL that lost a slash, or Orbax cannot
        write to that kind of URL.
    """
    text, remedy = str(directory), "Pass the path of a folder, which is created if absent."

    def refused(problem: str, shown: str = repr(text)) -> SettingsError:
        return SettingsError(f"directory={shown}: {problem}", setting="directory")

    scheme, is_url, _ = text.partition("://")
    if is_url and scheme not in _WRITTEN:
        raise refused(
            f"Orbax writes checkpoints only to folders and to gs://, and treats {scheme}:// as a relative path. Pass the "
            "path of a folder, such as the mount point of a bucket."
        )
    if re.match(r"(gs|s3):/[^/]", text):  # unchecked, a folder "gs:" would be created in the working directory
        raise refused("is a URL that has lost a slash, as in a pathlib.Path. Pass a str or an etils.epath.Path.")
    if not text or not isinstance(directory, str | os.PathLike):
        raise refused(f"is not a path. {remedy}", short(directory))
    if is_url:
        return epath.Path(directory)
    path = epath.Path(directory).expanduser().absolute()
    # The nearest existing ancestor must be a folder too: nothing can be created below a file.
    nearest = next((part for part in (path, *path.parents) if part.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise refused(f"{nearest} is a file. {remedy}")
    return path


@contextlib.contextmanager
def opening(directory: epath.Path) -> Iterator[None]:
    """Turns errors of Orbax and of the store's library into a CheckpointError that names the folder."""
    try:
        yield
    except MeshfeedError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory}: cannot be opened: {type(error).__name__}: {error}. Check that this host may create and write "
            "the folder; for an object store, also check the bucket's name and the credentials."
        ) from error
