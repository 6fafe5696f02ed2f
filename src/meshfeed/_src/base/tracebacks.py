"""Decorators for the public API: short tracebacks, and suggestions for misspelled keywords.

A traceback shows the caller's line and, if the user's source or decoder raised, that code's frames.
``MESHFEED_FULL_TRACEBACK=1`` in the environment keeps every frame.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import pathlib
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from meshfeed._src.base.errors import MeshfeedError

F = TypeVar("F", bound=Callable[..., Any])

VARIABLE = "MESHFEED_FULL_TRACEBACK"
_ROOT = str(pathlib.Path(__file__).resolve().parents[2]) + os.sep  # the package's folder
_EXAMPLES = os.path.join(_ROOT, "_examples") + os.sep  # user code, which the demo runs
_CARRIERS = ("concurrent.futures.", "contextlib.", "tenacity.")


def hide_own_frames(error: BaseException) -> None:
    """Removes meshfeed's frames from the traceback of ``error`` and of its causes and contexts.

    An unexpected exception raised in meshfeed's own code keeps all frames, because it is probably a bug in meshfeed.
    Call this in an ``except`` clause that ends with a bare ``raise``, which adds no frame.
    """
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    seen: set[int] = set()  # exceptions can share causes
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            _trim(one)
            todo += [one.__cause__, one.__context__]


def hides_own_frames(function: F) -> F:
    """Decorates a public function: applies :func:`hide_own_frames` to its exceptions."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    return cast("F", call)


def suggests_keywords(function: F) -> F:
    """Decorates a public function: an unknown keyword raises a TypeError that suggests the closest valid one."""
    takes = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        unknown = [name for name in kwargs if name not in takes]
        if unknown:
            words = set(unknown[0].split("_"))
            near = difflib.get_close_matches(unknown[0], takes, n=1) or [n for n in takes if words & set(n.split("_"))]
            remedy = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(takes)}."
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}; {remedy}")
        return function(*args, **kwargs)

    return cast("F", call)


def _trim(error: BaseException) -> None:
    kept: list[types.TracebackType] = []
    hidden, last, entry = False, "", error.__traceback__
    while entry is not None:
        last = entry.tb_frame.f_code.co_filename
        hidden = _is_own(entry.tb_frame) or (hidden and _is_carrier(entry.tb_frame))
        if not hidden:
            kept.append(entry)
        entry = entry.tb_next
    # The decorators in this file raise only the TypeError for wrong arguments, which is the caller's error.
    if hidden and last != __file__ and not isinstance(error, MeshfeedError | StopIteration):
        return
    shown = None
    for entry in reversed(kept):
        shown = types.TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = shown


def _is_own(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_ROOT) and not file.startswith(_EXAMPLES)


def _is_carrier(frame: types.FrameType) -> bool:
    """Whether the frame belongs to a library that only forwards meshfeed's call: to a thread, or as a retry."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith(_CARRIERS)
