"""Random combinations of sources and orders against plain definitions; ``compositions.py`` plays any number of them."""

from __future__ import annotations

import compositions
import pytest


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_combinations_follow_their_definitions_on_any_number_of_hosts(first: int) -> None:
    levels = [compositions.play(number, (1, 2, 4))[0].levels + 1 for number in range(first, first + 10)]
    assert min(levels) >= 4
