"""Reads byte ranges of one file with few calls."""

from __future__ import annotations

import numpy as np

from meshfeed._src.sources.files.direct import ByteRange, RemoteBytes, read_ranges
from meshfeed._src.sources.files.open_files import Descriptor

_GAP_BYTES = 4096  # bytes between two records that cost less to read than a second call
_SPAN_BYTES = 8 << 20


def read_spans(file: Descriptor | RemoteBytes, starts: np.ndarray, stops: np.ndarray) -> list[bytes]:
    """Reads byte ranges ``[starts, stops)``, int64[n], of a file, in any order; neighbors are read with one call.

    Returns:
      The bytes of each range; fewer than requested if the file ends before.
    """
    if isinstance(file, RemoteBytes):
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        return read_ranges([ByteRange(file, *pair) for pair in pairs])
    if len(starts) == 1:
        return [file.read(int(starts[0]), int(stops[0]))]
    order = np.argsort(starts, kind="stable")
    lows, highs = starts[order], stops[order]
    # A run is read up to the end of its last range, so ranges that overlap are read apart.
    apart = (lows[1:] > highs[:-1] + _GAP_BYTES) | (lows[1:] < highs[:-1])
    found = [b""] * len(starts)
    low_list, high_list, order_list = lows.tolist(), highs.tolist(), order.tolist()
    first = 0
    for last in [*np.flatnonzero(apart).tolist(), len(starts) - 1]:
        while first <= last:
            first = _read_run(file, low_list, high_list, order_list, first, last, found)
    return found


def _read_run(
    file: Descriptor, lows: list[int], highs: list[int], order: list[int], first: int, last: int, found: list[bytes]
) -> int:
    """Reads ranges ``first`` to ``last``, or as many as one call should; returns the index after the last one read."""
    start, stop = lows[first], first
    while stop < last and highs[stop + 1] - start <= _SPAN_BYTES:
        stop += 1
    content = file.read(start, highs[stop])
    if stop == first:
        found[order[first]] = content
        return first + 1
    for number in range(first, stop + 1):
        found[order[number]] = content[lows[number] - start : highs[number] - start]
    return stop + 1
