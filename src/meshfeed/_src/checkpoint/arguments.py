"""Checks callers' arguments before anything is written, waited for or agreed on.

Settings for restoring arrays, checked on construction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from meshfeed._src.base.errors import CheckpointError, MeshfeedError, SettingsError

SAVE_ORDER = "The order is save(step, train_state, feed)."
RESTORE_ORDER = "The order is restore(train_state, feed, step)."

_WRITTEN = ("gs",)  # for any other URL, the first save makes Orbax write to a relative path


def _short(value: Any) -> str:
    """Returns numbers and short text as they are, otherwise the type: a printed tree of arrays fills a screen."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    text = repr(value) if plain else ""
    return text if text and len(text) <= 40 else f"<{type(value).__module__}.{type(value).__qualname__}>"


def as_step(step: Any, order: str) -> int:
    """Returns a step number as an int; also accepts numpy integers and 0-d integer arrays.

    Raises:
      SettingsError: it is not an integer, or it is negative.
    """
    # bool is an int, but as a step it is surely a mistake.
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = None
    if number is None or number < 0:
        raise SettingsError(f"step={_short(step)}: takes an int from 0. {order}", setting="step")
    return number


def check_feed(feed: Any, methods: tuple[str, ...], order: str) -> None:
    """Rejects an object without the methods of a feed. None means no feed and is accepted.

    Raises:
      SettingsError: ``feed`` lacks one of ``methods``.
    """
    lacks = [name for name in methods if feed is not None and not callable(getattr(feed, name, None))]
    if lacks:
        raise SettingsError(
            f"feed={_short(feed)}: has no {lacks[0]}(), expected a meshfeed.Feed or another object "
            f"with get_state() and set_state(state). {order}",
            setting="feed",
        )


def check_train_state(train_state: Any, order: str) -> None:
    """Rejects a feed passed in place of the train state.

    Raises:
      SettingsError: it is a feed.
    """
    # A registered pytree may have a get_state method of its own; only an opaque leaf is taken for a feed.
    if callable(getattr(train_state, "get_state", None)) and jax.tree_util.all_leaves([train_state]):
        raise SettingsError(
            f"train_state={_short(train_state)}: is a feed, expected a pytree of arrays. {order}", setting="train_state"
        )


def as_directory(directory: Any) -> epath.Path:
    """Returns the absolute path of the checkpoint folder.

    Raises:
      SettingsError: it is not a path, it is a file or lies below one, it is a URL that lost a slash, or Orbax cannot
        write to that kind of URL.
    """
    remedy = "Give the path of a folder, which is made if absent."
    scheme, is_url, _ = str(directory).partition("://")
    if is_url and scheme not in _WRITTEN:
        raise SettingsError(
            f"directory={str(directory)!r}: Orbax writes checkpoints to folders and to gs:// only, not to {scheme}://. "
            f"Give the path of a folder, such as that of a mounted bucket: Orbax takes {scheme}:// for a relative path.",
            setting="directory",
        )
    if re.match(r"(gs|s3):/[^/]", str(directory)):  # otherwise a folder "gs:" would be created in the working directory
        raise SettingsError(
            f"directory={str(directory)!r}: is a URL that has lost a slash, as pathlib.Path does. Give it as text, or as an "
            "etils.epath.Path.",
            setting="directory",
        )
    try:
        path = epath.Path(directory)
    except TypeError:
        path = None
    if path is None or not str(directory):
        raise SettingsError(f"directory={_short(directory)}: is no path. {remedy}", setting="directory")
    if is_url:
        return path
    path = path.expanduser().absolute()
    # The nearest ancestor that exists must be a folder too: nothing can be created below a file.
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise SettingsError(f"directory={str(directory)!r}: {part} is a file. {remedy}", setting="directory")
            break
    return path


@contextlib.contextmanager
def opening(directory: epath.Path) -> Iterator[None]:
    """Wraps errors of Orbax or the object store's library with the folder that could not be created or listed.

    Raises:
      CheckpointError: in place of their errors.
    """
    try:
        yield
    except MeshfeedError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory}: cannot be opened: {type(error).__name__}: {error}. Check that this host may make and write "
            "the folder; for an object store also the bucket's name and the credentials."
        ) from error


def check_settings(timeout_seconds: Any, **mappings: Any) -> None:
    """Checks the arguments of ``Checkpointer`` that its components do not check.

    Raises:
      SettingsError: ``timeout_seconds`` is not a positive finite number, or one of ``mappings`` is neither None nor a
        dict.
    """
    number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    if not number or not math.isfinite(timeout_seconds) or timeout_seconds <= 0:
        raise SettingsError(
            f"timeout_seconds={_short(timeout_seconds)}: takes a positive number of seconds", setting="timeout_seconds"
        )
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise SettingsError(f"{name}={_short(value)}: takes a dict of keywords, or None", setting=name)


@contextlib.contextmanager
def naming(setting: str) -> Iterator[None]:
    """Adds the setting's name to the error if Orbax rejects its keywords inside this context.

    Raises:
      SettingsError: in place of Orbax's TypeError.
    """
    try:
        yield
    except TypeError as error:
        raise SettingsError(f"{setting}: {error}. Its keywords go to Orbax as they are.", setting=setting) from error


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
