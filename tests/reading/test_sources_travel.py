"""Every source that is built over others can be sent to worker processes, which answer as this process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import meshfeed
from meshfeed import sources
from meshfeed._src.reading import reads

LENGTHS = np.random.default_rng(0).integers(1, 9, 60)


def documents(number: int = 0) -> Any:
    return [{"tokens": np.full(length, 100 * number + i, np.int32)} for i, length in enumerate(LENGTHS)]


def same(record: Any) -> Any:
    return record


def mixture(**parts: Any) -> Any:
    return sources.Mixture(parts, weights=dict.fromkeys(parts, 1), block=8)


BELOW: dict[str, Callable[[], Any]] = {
    "documents": documents,
    "map": lambda: sources.Map(documents(), same),
    "mixture": lambda: mixture(a=documents(), b=documents(1)),
    "nested mixture": lambda: mixture(a=mixture(a=documents(), b=documents(1)), b=documents(2)),
    "concat": lambda: sources.Concat([documents(), documents(1)]),
    "subset": lambda: sources.Subset(documents(), slice(3, 50)),
    "sample": lambda: sources.Sample(documents(), 90),
    "part": lambda: sources.random_split(documents(), {"a": 0.7, "b": 0.3})["a"],
}
ABOVE: dict[str, Callable[[Any], Any]] = {
    "packed": lambda below: sources.Packed(below, 12, block=16),
    "fitted": lambda below: sources.Packed(below, 12, block=16, method="fit", max_segments=4),
    "padded": lambda below: sources.Padded(below, 8, key="tokens"),
    "buckets": lambda below: sources.Buckets(below, (4, 8), key="tokens"),
    "mixture of packed": lambda below: mixture(
        a=sources.Packed(below, 12, block=16), b=sources.Packed(documents(3), 12)
    ),
}


class Travelled:
    """Reads as a worker would, in this process."""

    killed = False

    def __init__(self, workers: Any, make_task: bytes, **_: Any) -> None:
        self._task, self._requests = cloudpickle.loads(make_task)(), []

    def submit(self, worker_index: int, request: Any) -> None:
        self._requests.append(request)

    def result(self, worker_index: int, timeout: float) -> Any:
        return self._task(self._requests.pop(0))

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("below", BELOW)
def test_it_travels(above: str, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "open_pool", Travelled)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def deliver(num_workers: int, shuffle: bool) -> list[Any]:
        source = ABOVE[above](BELOW[below]())
        settings: Any = {"global_batch_size": 8, "shuffle": shuffle, "num_workers": num_workers}
        with meshfeed.Feed(source, mesh, end="pad", mask_key="mask_of_rows", **settings) as feed:
            next(feed)
            feed.reset()  # now the reader has used its orders
            return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch) for batch in feed]

    for shuffle in (False, True):
        assert deliver(1, shuffle) == deliver(0, shuffle)
