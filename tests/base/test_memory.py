"""Aligned zeros: at the right address, and gone from the process when they are gone."""

from __future__ import annotations

import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from meshfeed._src.base import memory


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (5 << 20,), (1025, 1027, 4)])
@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.bfloat16])
def test_zeros(shape, dtype):
    array = memory.zeros(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert memory.is_aligned(array) or not array.size
    assert not array.view(np.uint8).any() if array.ndim else array == 0


def resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_zeros_take_memory_only_while_they_are_there_and_written():
    size = 24 << 20
    large = np.ones(31 << 20, np.uint8)
    del large  # from now on glibc keeps what is freed up to this size
    before = resident()
    array = memory.zeros((size,), np.uint8)
    assert resident() - before < size // 4
    array[:] = 1
    assert resident() - before > size * 3 // 4
    del array
    assert resident() - before < size // 4


def test_is_aligned_says_what_the_address_says() -> None:
    whole = memory.empty((8, 24), np.int16)
    views = [
        whole,
        whole[1:],
        whole[4:],
        whole[::-1],
        whole[:, 1:],
        whole.T,
        whole.reshape(-1)[32:],
        whole.view(np.uint8),
    ]
    views += [view.copy() for view in views]
    found = [memory.is_aligned(view) for view in views]
    assert found == [view.ctypes.data % 64 == 0 for view in views]
    assert found[:8] == [True, False, True, False, False, True, True, True]
