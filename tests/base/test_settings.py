"""Defaults that follow from other settings."""

from __future__ import annotations

import pytest

from meshfeed._src.base.settings import default_num_lanes


@pytest.mark.parametrize(
    ("sizes", "num_shards", "expected"),
    [
        ((8,), None, 8), ((64,), None, 64), ((128,), None, 64), ((130,), None, 26), ((67,), None, 1),
        ((12, 18), None, 6), ((1, 64), None, 1),
        ((256,), 1000, 64), ((256,), 100, 8), ((96,), 1000, 48), ((7,), 1000, 7), ((101,), 1000, 1), ((256,), 15, 1),
        ((256,), 0, 1), ((12,), 40, 4), ((24, 36), 40, 4),
    ],
)  # fmt: skip
def test_the_default_number_of_lanes(sizes: tuple[int, ...], num_shards: int | None, expected: int) -> None:
    assert default_num_lanes(sizes, num_shards) == expected
