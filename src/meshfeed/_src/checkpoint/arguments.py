"""Checks callers' arguments before anything is written, waited for or agreed on."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterator, Mapping
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
