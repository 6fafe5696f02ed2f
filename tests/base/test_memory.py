"""Aligned zeros: at the right address, and gone from the process when they are gone."""

from __future__ import annotations

import mmap
import sys
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

from meshfeed._src.base import memory, ownership


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (5 << 20,), (1025, 1027, 4)])
@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.bfloat16])
def test_zeros(shape, dtype):
    array = memory.zeros(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert memory.is_aligned(array) or not array.size
    assert not array.view(np.uint8).any() if array.ndim else array == 0


def resident(address: int, size: int) -> int:
    """Bytes in memory of the pages of ``[address, address + size)``; pages that are not mapped have none.

    Not of the mapping that holds them: the system joins private mappings that lie side by side.
    """
    page = mmap.PAGESIZE
    first, stop = -(-address // page), (address + size) // page
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (stop - first)), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_zeros_take_memory_only_while_they_are_there_and_written():
    size = 24 << 20
    large = np.ones(31 << 20, np.uint8)
    del large  # from now on glibc keeps what is freed up to this size
    array = memory.zeros((size,), np.uint8)
    address = array.ctypes.data
    assert resident(address, size) < size // 4
    array[:] = 1
    assert resident(address, size) >= size * 3 // 4
    del array
    assert resident(address, size) < size // 4


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


LARGE = (33 << 20,)  # has its own pages


def filled(value: int) -> np.ndarray:
    array = memory.empty(LARGE, np.uint8)
    array[:] = value
    return array


def test_pages_are_used_again_only_when_nothing_uses_them() -> None:
    array = filled(1)
    address = memory.address(array)
    last = array[7:].view(np.int8).reshape(-1)[3:]
    del array
    others = [filled(2), filled(3)]
    assert address not in map(memory.address, others)
    assert (last == 1).all()
    del last
    again = memory.empty((LARGE[0] // 4,), np.int32)
    assert memory.address(again) == address
    assert memory.is_aligned(again)
    assert all((other == value).all() for other, value in zip(others, (2, 3), strict=True))


def test_pages_of_a_sealed_array_are_writable_again() -> None:
    array = ownership.seal(filled(1))
    assert ownership.is_immutable(array)
    address = memory.address(array)
    del array
    again = memory.empty(LARGE, np.uint8)
    assert memory.address(again) == address
    assert again.flags.writeable
    assert not ownership.is_immutable(again)


def test_pages_stay_while_a_jax_array_shares_them() -> None:
    arrays = [jax.device_put(filled(value), jax.devices()[0]) for value in range(6)]
    for _ in range(6):
        filled(255)
    for value, array in enumerate(arrays):
        assert (np.asarray(array) == value).all()


def test_threads_never_share_pages() -> None:
    wrong = []

    def work(value: int) -> None:
        for _ in range(20):
            array = filled(value)
            wrong.extend([value] * bool((array != value).any()))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_few_free_pages_are_kept() -> None:
    arrays = [filled(1) for _ in range(10)]
    addresses = [memory.address(array) for array in arrays]
    assert all(resident(address, LARGE[0]) > LARGE[0] // 2 for address in addresses)
    del arrays
    assert sum(resident(address, LARGE[0]) > 0 for address in addresses) <= 4
