"""The compiled modules run on Python 3.11 and later, whichever of them they were built with."""

from __future__ import annotations

import pathlib
import re
import sys

import numpy as np
import pytest

import meshfeed
from meshfeed._src.order import permutation

SOURCES = sorted(pathlib.Path(meshfeed.__file__).parent.rglob("*.c"))


@pytest.mark.skipif(permutation.extension is None, reason="built without a C compiler")
def test_calls_leave_the_references_to_none_as_they_were() -> None:
    before = sys.getrefcount(None)
    for _ in range(1000):
        permutation.permute(np.arange(8), 10_000, 1)
    assert abs(sys.getrefcount(None) - before) < 200  # other threads


@pytest.mark.skipif(not SOURCES, reason="sources are not installed")
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_none_is_returned_with_a_reference(path: pathlib.Path) -> None:
    """From the headers of Python 3.12 on, Py_RETURN_NONE and the like take none, and Python 3.11 dies sooner or later."""
    assert not re.search(r"\bPy_RETURN_(NONE|TRUE|FALSE)\s*;", path.read_text())
