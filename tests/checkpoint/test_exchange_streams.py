"""Units that a host sends arrive as they were read, whatever the width of the windows."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshfeed._src.checkpoint.exchange import _HostStream

Shapes = st.lists(
    st.tuples(st.sampled_from(["uint8", "float32", "complex64"]), st.lists(st.integers(1, 4), max_size=3))
)


def leaf_of(dtype: str, shape: list[int]) -> Any:
    box = tuple((2, 2 + size) for size in shape)
    units = types.SimpleNamespace(box=lambda number: box)
    return types.SimpleNamespace(units=units, stored_dtype=np.dtype(dtype))


class Reader:
    """Counts the units read, and gives each values of its own."""

    def __init__(self) -> None:
        self.read_values: list[np.ndarray] = []

    def read(self, leaves: Any) -> None:
        [(leaf, [target])] = leaves
        assert target.box == leaf.units.box(0)
        rng = np.random.default_rng(len(self.read_values))
        target.buffer.reshape(-1).view(np.uint8)[:] = rng.integers(0, 256, target.buffer.nbytes, np.uint8)
        self.read_values.append(target.buffer.copy())


@given(Shapes, st.integers(1, 40))
def test_windows_of_any_width(shapes: list[tuple[str, list[int]]], width: int) -> None:
    leaves = [leaf_of(dtype, shape) for dtype, shape in shapes]
    units = [(number, 0) for number in range(len(leaves))]
    sender, receiver, reader = _HostStream(leaves, units), _HostStream(leaves, units), Reader()
    assert sender.size == sum(int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize for dtype, shape in shapes)
    found = []
    for start in range(0, sender.size, width):
        window = np.zeros(width, np.uint8)
        sender.fill(window, start, reader)  # pyright: ignore[reportArgumentType]
        found += list(receiver.parse(window, start))
    assert [(index, box) for index, box, _ in found] == [(i, leaf.units.box(0)) for i, leaf in enumerate(leaves)]
    assert len(reader.read_values) == len(leaves)
    for (_, _, values), sent in zip(found, reader.read_values, strict=True):
        assert (values.dtype, values.shape) == (sent.dtype, sent.shape)
        assert values.tobytes() == sent.tobytes()
