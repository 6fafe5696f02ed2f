"""Hides private names of other libraries from meshfeed, as a version that renamed them would."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import meshfeed

_OURS = str(pathlib.Path(meshfeed.__file__).parent)


def hide(monkeypatch: pytest.MonkeyPatch, kind: type, *names: str) -> None:
    """Makes attributes of instances of ``kind`` missing for meshfeed's own code; the library still has them."""
    found = kind.__getattribute__

    def hidden(self: Any, name: str) -> Any:
        if name in names and sys._getframe(1).f_code.co_filename.startswith(_OURS):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return found(self, name)

    monkeypatch.setattr(kind, "__getattribute__", hidden)


@contextlib.contextmanager
def renamed(kind: type, name: str) -> Iterator[None]:
    """Gives a class another name within the ``with`` block."""
    before, kind.__name__ = kind.__name__, name
    try:
        yield
    finally:
        kind.__name__ = before
