"""``interleave_datasets`` within a lane, without threads.

The nodes of datasets prefetch with one thread per source (hundreds of threads with 64 lanes) and sleep 5 s at the end
of every pass over Parquet files. This node follows the same rules, without threads and with an exact state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from datasets.iterable_dataset import _BaseExamplesIterable

_DRAWS = 1000  # random choices per block
_NOT_READ, _END = object(), object()


class Interleave(_BaseExamplesIterable):
    """Interleaves the examples of several sources.

    The state holds the number of turns taken, the state of each source before its next example, and which sources have
    ended.

    Args:
      ex_iterables: the sources.
      stopping_strategy: as for ``interleave_datasets``.
      draws: key of the random choices; None for round-robin.
      probabilities: probability of each source, with ``draws``; None for uniform.
    """

    _sleep_on_threads_shutdown = False  # otherwise datasets sleeps after each pass, to let threads end

    def __init__(
        self,
        ex_iterables: Sequence[Any],
        stopping_strategy: str,
        draws: Sequence[int] | None,
        probabilities: Sequence[float] | None,
    ) -> None:
        super().__init__()
        self.ex_iterables = list(ex_iterables)
        self.stopping_strategy = stopping_strategy
        self.draws = None if draws is None else tuple(draws)
        self.probabilities = None if probabilities is None else tuple(probabilities)

    @property
    def is_typed(self) -> bool:
        return self.ex_iterables[0].is_typed

    @property
    def features(self) -> Any:
        return self.ex_iterables[0].features

    @property
    def num_shards(self) -> int:
        return 1

    def _init_state_dict(self) -> dict[str, Any]:
        for child in self.ex_iterables:
            child._init_state_dict()
        count = len(self.ex_iterables)
        self._state_dict = {"turn": 0, "before": [None] * count, "ended": [False] * count, "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        if not self.ex_iterables:
            return
        state: Any = self._state_dict or self._init_state_dict()
        children, before, ended = self.ex_iterables, state["before"], state["ended"]
        again = self.stopping_strategy != "all_exhausted_without_replacement"
        stop = any if self.stopping_strategy == "first_exhausted" else all
        for child, child_state in zip(children, before, strict=True):
            child._init_state_dict()
            if child_state is not None:
                child.load_state_dict(child_state)
        iterators = [iter(child) for child in children]
        # Read one example ahead of each source, to detect that the example before it was the last.
        ahead: list[Any] = [_NOT_READ] * len(children)

        def fetch(number: int) -> None:
            before[number] = children[number].state_dict()
            ahead[number] = next(iterators[number], _END)

        while not stop(ended):
            number = self._choose(state["turn"])
            state["turn"] += 1
            if ended[number] and not again:
                continue
            if ahead[number] is _NOT_READ:
                fetch(number)
            example = ahead[number]
            if example is not _END:
                fetch(number)
            if ahead[number] is _END:
                ended[number] = True
                if again:
                    children[number]._init_state_dict()
                    iterators[number] = iter(children[number])
                    before[number], ahead[number] = None, _NOT_READ
            if example is not _END:
                yield example

    def _choose(self, turn: int) -> int:
        if self.draws is None:
            return turn % len(self.ex_iterables)
        # Each block has its own key, so the number of turns alone determines the next choice.
        block, offset = divmod(turn, _DRAWS)
        return _choices(self.draws, self.probabilities, len(self.ex_iterables), block)[offset]


@functools.lru_cache(maxsize=256)
def _choices(draws: tuple[int, ...], probabilities: tuple[float, ...] | None, count: int, block: int) -> list[int]:
    raw = np.random.Philox(np.random.SeedSequence([*draws, block])).random_raw(_DRAWS)
    # The high 53 bits as a float64 in [0, 1). Raw Philox numbers are stable across NumPy versions.
    uniform = (raw >> np.uint64(11)) * 2.0**-53
    weights = np.ones(count) if probabilities is None else np.asarray(probabilities, np.float64)
    edges = np.cumsum(weights) / weights.sum()
    # Rounding may leave the last edge below 1.
    return np.minimum(np.searchsorted(edges, uniform, side="right"), count - 1).tolist()
