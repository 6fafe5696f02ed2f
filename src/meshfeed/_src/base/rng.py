"""Random numbers of a record: the same on every host, in every thread and process, and after every resume."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


class _KeyWords(ISeedSequence):
    """Hands Philox its key as it is. Passing ``key=`` would draw entropy from the system first, at twice the cost."""

    def __init__(self, words: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._words


def philox(seed: int, epoch: int, record_id: int) -> np.random.Generator:
    """The random numbers of one record in one epoch, for augmentation.

    The Philox4x64 key is (seed, epoch) and the highest word of its counter starts at the record id, so that distinct
    inputs below 2**64 have distinct streams that do not meet within 2**192 draws. Equal to
    ``np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, record_id]))``; about 3 µs.
    """
    key: Any = _KeyWords(np.array([seed, epoch], dtype=np.uint64))
    return np.random.Generator(np.random.Philox(key, counter=np.array([0, 0, 0, record_id], dtype=np.uint64)))
