"""Random combinations on a mesh of several devices; ``scripts/chaos --real-compositions`` plays them on real processes."""

from __future__ import annotations

import logging

import pytest
import real_compositions


@pytest.mark.slow
def test_combinations_on_real_devices() -> None:
    try:
        assert real_compositions.play_on_host(range(1000, 1004)) == []
    finally:
        logging.disable(logging.NOTSET)  # play_on_host silences the process that it runs in
