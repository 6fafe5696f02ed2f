from __future__ import annotations

from typing import Any

import pytest

from meshfeed import SettingsError
from meshfeed._src.simulation.units import parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (1, 1), (1e9, 10**9), ("4000", 4000), ("4_000", 4000), ("1,000", 1000), ("100MB", 10**8), ("100 MB", 10**8),
        ("1GiB", 2**30), ("1.5TiB", 3 * 2**39), ("2k", 2000), ("3Mi", 3 * 2**20), ("1e9", 10**9), ("7B", 7), ("1PB", 10**15),
    ],
)  # fmt: skip
def test_sizes(text: Any, number: int) -> None:
    assert parse_bytes("cache", text) == number
    assert parse_rate("bandwidth", text) == number


@pytest.mark.parametrize("text", ["500MB/s", "500 MB/s", "500MB / sec", "0.5GB/s", "5e8"])
def test_rates(text: str) -> None:
    assert parse_rate("bandwidth", text) == 5e8


@pytest.mark.parametrize(
    "text", [0, -1, True, None, "", "MB", "many", "0", "0MB", "-1GB", "nan", "inf", float("nan"), "1.5", "1QB"]
)
def test_refused(text: Any) -> None:
    with pytest.raises(
        SettingsError, match=r"^cache=.*\. Expected a number of bytes of at least 1, such as .* 100MB or 1GiB\.$"
    ):
        parse_bytes("cache", text)
    with pytest.raises(
        SettingsError, match=r"^bandwidth=.*\. Expected bytes per second above 0, such as 500MB/s"
    ) as caught:
        parse_rate("bandwidth", text)
    assert caught.value.setting == "bandwidth"


def test_bits_and_sizes_per_second_are_named() -> None:
    for text in ("10Gb/s", "10Gbit/s"):
        with pytest.raises(SettingsError, match=r"is in bits.*divide by 8"):
            parse_rate("bandwidth", text)
    with pytest.raises(SettingsError, match="cache='100MB/s'"):
        parse_bytes("cache", "100MB/s")
